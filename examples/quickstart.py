"""Trains a small Llama-style GPT in BF16 and in MXFP4 on this machine's CPU, and shows what comes out.

    bash examples/quickstart.sh                  makes the environment, then runs this file with the same arguments
    bash examples/quickstart.sh --steps 400      longer; --help lists every size

What happens, in order: a BPE tokenizer is trained on the Python standard library and the text written as Megatron's
indexed dataset; each recipe trains the same model on the same batches through `megatron.training.pretrain` in
tensor x pipeline parallel processes; the last one is resumed from its checkpoint in fresh processes and must give the
same bits; a table and a picture compare the recipes. Everything lands in one folder, or nothing does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = "results.json"  # marks a folder as ours to replace
SPLIT = "95,5,0"  # of the documents: training, validation, test


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training run gave.

    Attributes:
        recipe: Precision preset.
        losses: Training loss by step.
        validation: Validation loss by step.
        tokens_per_s: Over the median step.
        seconds: From start to end, checkpoints and validation included.
        checkpoints: Folder of `iter_*` folders.
    """

    recipe: str
    losses: dict[int, float]
    validation: dict[int, float]
    tokens_per_s: float
    seconds: float
    checkpoints: Path

    @property
    def train_loss(self) -> float:
        """Mean over the last steps: one batch is small, its loss jumps about."""
        return statistics.fmean(list(self.losses.values())[-10:])

    @property
    def validation_loss(self) -> float:
        """The last one."""
        return list(self.validation.values())[-1]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the CPU in several precisions and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    size = parser.add_argument_group("model")
    size.add_argument("--layers", type=int, default=4)
    size.add_argument("--hidden", type=int, default=256)
    size.add_argument("--ffn", type=int, default=768, help="width of the SwiGLU layer")
    size.add_argument("--heads", type=int, default=8)
    size.add_argument("--kv-heads", type=int, default=4)
    size.add_argument("--vocab", type=int, default=1024)
    size.add_argument("--seq", type=int, default=128, help="tokens a sequence")
    run = parser.add_argument_group("run")
    run.add_argument("--recipes", default="bf16,mxfp4", help="precision presets, separated by commas")
    run.add_argument("--steps", type=int, default=160)
    run.add_argument("--save-at", type=int, help="step of the checkpoint to resume from (default: three quarters)")
    run.add_argument("--batch", type=int, default=8, help="sequences a step")
    run.add_argument("--micro-batch", type=int, default=4)
    run.add_argument("--lr", type=float, default=3e-3)
    run.add_argument("--seed", type=int, default=1234)
    run.add_argument("--eval-iters", type=int, default=8, help="batches a validation")
    run.add_argument("--characters", type=int, help="of text to take (default: all)")
    where = parser.add_argument_group("where")
    where.add_argument("--tp", type=int, default=2, help="tensor (and sequence) parallel size")
    where.add_argument("--pp", type=int, default=2, help="pipeline parallel size")
    where.add_argument("--dp", type=int, default=1, help="data parallel size")
    where.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder for everything it writes")
    where.add_argument("--turbo-traceback", action="store_true", help="show the traceback of a refused setting")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> list[str]:
    """The recipes; refuses what would only be found wrong after minutes.

    Raises:
        ConfigError: Names the flag.
    """
    from primus_turbo_plugin.errors import ConfigError
    from primus_turbo_plugin.precision.recipe import Recipe
    from primus_turbo_plugin.training.writable import check_folder

    recipes = [name.strip() for name in options.recipes.split(",") if name.strip()]
    if not recipes or len(set(recipes)) < len(recipes):
        raise ConfigError(f"--recipes: one or more different presets, separated by commas, got {options.recipes!r}.")
    for name in recipes:
        Recipe.preset(name)
    check_sizes(options)
    if options.save_at is None:
        options.save_at = max(1, options.steps * 3 // 4)
    if not 0 < options.save_at < options.steps:
        raise ConfigError(
            f"--save-at: between 1 and {options.steps - 1} (--steps is {options.steps}), got {options.save_at}."
        )
    check_folder("--out", options.out.parent)
    if options.out.exists() and not (options.out / RESULTS).exists():
        raise ConfigError(f"--out {options.out}: exists, and is not a quickstart's folder. Name another, or remove it.")
    return recipes


def check_sizes(options: argparse.Namespace) -> None:
    """The numbers, each by itself and together.

    Raises:
        ConfigError: Names the flags.
    """
    from primus_turbo_plugin.errors import ConfigError
    from primus_turbo_plugin.training import sizes
    from primus_turbo_plugin.training.stdlib_corpus import LARGEST_VOCAB, SMALLEST_VOCAB

    least = {"steps": 2, "vocab": SMALLEST_VOCAB}  # the last step must come after the checkpoint's
    for name in POSITIVE:
        if getattr(options, name) is not None:
            sizes.at_least(size(options, name), least.get(name, 1))
    if options.vocab > LARGEST_VOCAB:
        raise ConfigError(f"--vocab: at most {LARGEST_VOCAB}, got {options.vocab}.")
    if not options.lr > 0:
        raise ConfigError(f"--lr: more than 0, got {options.lr}.")
    of = functools.partial(size, options)
    sizes.attention(of("heads"), of("kv_heads"), of("tp"))
    sizes.divides(of("heads"), of("hidden"))
    if options.hidden // options.heads % 2:
        raise ConfigError(
            f"--hidden {options.hidden}: a head has {options.hidden // options.heads} channels; rotary embeddings take "
            f"an even number. Take a multiple of {2 * options.heads}."
        )
    sizes.divides(of("tp"), of("ffn"))
    sizes.divides(of("pp"), of("layers"))
    sizes.sequence(of("seq"), options.tp, 1, sequence_parallel=options.tp > 1)
    sizes.batch(of("batch"), of("micro_batch"), options.dp)


POSITIVE = (
    *("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq"),
    *("steps", "batch", "micro_batch", "seed", "eval_iters", "characters", "tp", "pp", "dp"),
)


def size(options: argparse.Namespace, name: str) -> Any:
    """A number with its flag."""
    from primus_turbo_plugin.training.sizes import Size

    return Size(f"--{name.replace('_', '-')}", getattr(options, name))


def check_corpus(options: argparse.Namespace, corpus: Any) -> None:
    """Refuse a dataset of which training or validation gets nothing: Megatron would search it for ever.

    Raises:
        ConfigError: Names the flag.
    """
    from primus_turbo_plugin.errors import ConfigError
    from primus_turbo_plugin.training.dataset_splits import empty_splits, sequence_lengths

    empty = empty_splits(sequence_lengths(corpus.prefix), SPLIT)
    if empty:
        raise ConfigError(
            f"--characters {options.characters}: gives {corpus.documents} documents, and none for {' and '.join(empty)} "
            f"(split {SPLIT}). Take more, or leave it out."
        )


def megatron_arguments(options: argparse.Namespace, corpus: Any, recipe: str, folder: Path) -> list[str]:
    """The command line of one run: Megatron's own arguments, and two of ours."""
    model = {
        "num-layers": options.layers,
        "hidden-size": options.hidden,
        "ffn-hidden-size": options.ffn,
        "num-attention-heads": options.heads,
        "num-query-groups": options.kv_heads,
        "seq-length": options.seq,
        "max-position-embeddings": options.seq,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "hidden-dropout": 0.0,
        "attention-dropout": 0.0,
        "init-method-std": 0.04,
        "embedding-init-method-std": 1.0,
    }
    training = {
        "train-iters": options.steps,
        "global-batch-size": options.batch,
        "micro-batch-size": options.micro_batch,
        "lr": options.lr,
        "min-lr": options.lr / 10,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": max(1, options.steps // 30),
        "weight-decay": 0.1,
        "adam-beta2": 0.95,
        "clip-grad": 1.0,
        "seed": options.seed,
        "tensor-model-parallel-size": options.tp,
        "pipeline-model-parallel-size": options.pp,
        "eval-interval": max(1, options.steps // 4),
        "eval-iters": options.eval_iters,
        "log-interval": 1,
        "save-interval": options.save_at,
        "save": folder / "checkpoints",
    }
    data = {
        "data-path": corpus.prefix,
        "data-cache-path": Path(corpus.prefix).parent / "cache",
        "split": SPLIT,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": corpus.vocab_size,
        "null-tokenizer-eod-id": 0,
        "make-vocab-size-divisible-by": 1,
    }
    switches = ["swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights", "group-query-attention", "bf16"]
    switches += ["use-distributed-optimizer", "no-create-attention-mask-in-dataloader"]
    switches += ["sequence-parallel"] if options.tp > 1 else []
    ours = {"device": "cpu", "turbo-precision": recipe, "turbo-metrics": folder / "metrics.jsonl"}
    valued = {**model, **training, **data, **ours}
    return [part for name, value in valued.items() for part in (f"--{name}", str(value))] + [f"--{s}" for s in switches]


def train(
    options: argparse.Namespace, corpus: Any, recipe: str, folder: Path, title: str, resume: Path | None = None
) -> Run:
    """Train in fresh processes and follow them; `resume` is the folder of checkpoints to go on from.

    Raises:
        RanksFailed: With the first failing rank's error.
    """
    from primus_turbo_plugin.training import launch, progress
    from primus_turbo_plugin.training.metrics import MetricsReader

    (folder / "logs").mkdir(parents=True)
    argv = megatron_arguments(options, corpus, recipe, folder)
    first = 0
    if resume is not None:
        first = options.save_at
        argv += ["--load", str(resume), "--ckpt-step", str(first), "--exit-on-missing-checkpoint"]
    reader, everything = MetricsReader(folder / "metrics.jsonl"), []
    speed = progress.Speed(options.batch * options.seq)
    start = time.monotonic()
    world_size = options.tp * options.pp * options.dp
    target = "primus_turbo_plugin.training.pretrain:train"
    with (
        progress.display(title, first, options.steps) as display,
        launch.start_ranks(target, argv, world_size, logs=folder / "logs") as ranks,
    ):
        ended = False
        while not ended:
            ended = ranks.poll(timeout_s=0.2)
            news = list(reader.new())
            everything += news
            progress.follow(iter(news), display, speed)
    losses = {m.step: m for m in everything if m.tag == "lm loss"}
    times = [m.time_s for m in losses.values()]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else float("nan")
    return Run(
        recipe=recipe,
        losses={step: m.value for step, m in losses.items()},
        validation={m.step: m.value for m in everything if m.tag == "lm loss validation"},
        tokens_per_s=options.batch * options.seq / step_s,
        seconds=time.monotonic() - start,
        checkpoints=folder / "checkpoints",
    )


def check_resumed(options: argparse.Namespace, whole: Run, resumed: Run) -> str:
    """What the comparison of the uninterrupted and the resumed run says.

    Raises:
        TurboError: They differ in a bit.
    """
    from primus_turbo_plugin.errors import TurboError
    from primus_turbo_plugin.training.checkpoint_compare import compare_checkpoints

    final = f"iter_{options.steps:07d}"
    states = compare_checkpoints(whole.checkpoints / final, resumed.checkpoints / final)
    wrong = [step for step, loss in resumed.losses.items() if whole.losses[step] != loss]
    steps = options.steps - options.save_at
    if wrong or not states.identical or len(resumed.losses) != steps:
        raise TurboError(
            f"the resumed run is not the uninterrupted one: {len(wrong)} of {len(resumed.losses)} losses and "
            f"{len(states.different)} tensors differ ({', '.join(states.different[:3])}). This is a fault; please report it."
        )
    return (
        f"resumed {whole.recipe} from step {options.save_at} in fresh processes: {steps} losses, {states.num_weights} weights, "
        f"{states.num_optimizer} optimizer tensors and {states.num_rng} RNG states are bit-identical to the uninterrupted run"
    )


def smooth(values: list[float], keep: float = 0.85) -> list[float]:
    """Exponential moving average, started at the first value."""
    return list(itertools.accumulate(values, lambda mean, value: keep * mean + (1 - keep) * value))


def draw(runs: list[Run], picture: Path) -> None:
    """Above: loss of every recipe, training smoothed, validation as dots. Below: what each loses to the first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), dpi=120, sharex=True, height_ratios=(3, 1))
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for run, color, style in zip(runs, colors, itertools.cycle(("-", "--", ":"))):
        steps, losses = list(run.losses), list(run.losses.values())
        above.plot(steps, losses, color=color, linewidth=0.6, alpha=0.3)
        above.plot(steps, smooth(losses), style, color=color, linewidth=2, label=f"{run.recipe}, training (smoothed)")
        dots = {
            "color": color,
            "markerfacecolor": "none" if style != "-" else color,
            "label": f"{run.recipe}, validation",
        }
        above.plot(list(run.validation), list(run.validation.values()), "o", markersize=9, **dots)
        if run is not runs[0]:
            gap = [loss - runs[0].losses[step] for step, loss in run.losses.items()]
            below.plot(steps, gap, color=color, linewidth=0.6, alpha=0.4)
            below.plot(steps, smooth(gap), color=color, linewidth=2)
    below.axhline(0, color=colors[0], linewidth=1)
    above.set(ylabel="loss (nats a token)", title="The same model and batches, one curve a precision recipe")
    below.set(xlabel="step", ylabel=f"minus {runs[0].recipe}")
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(picture, bbox_inches="tight")
    plt.close(figure)


def report(options: argparse.Namespace, corpus: Any, runs: list[Run], resumed: str, seconds: float) -> None:
    """The closing table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{options.steps} steps of {options.batch} x {options.seq} tokens, {corpus.tokens:,} tokens of text"
    )
    for heading in ("recipe", "first loss", "train loss", "validation loss", "tokens/s", "time"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    for run in runs:
        first = next(iter(run.losses.values()))
        cells = [run.recipe, f"{first:.3f}", f"{run.train_loss:.3f}", f"{run.validation_loss:.3f}"]
        table.add_row(*cells, f"{run.tokens_per_s:,.0f}", f"{run.seconds:.0f} s")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print("train loss: mean of the last 10 steps. A CPU emulates the low-precision recipes, hence slower.")
    console.print(resumed)
    files = {"picture": "loss.png", "numbers": RESULTS, "dataset": "data", "checkpoints": "<recipe>/checkpoints"}
    for what, path in files.items():
        console.print(f"{what:>12}: {options.out / path}", markup=False, highlight=False)
    console.print(f"done in {seconds:.0f} s")


def save_results(options: argparse.Namespace, runs: list[Run], resumed: str, path: Path) -> None:
    recipes = {
        run.recipe: {
            "train_loss": run.train_loss,
            "validation_loss": run.validation_loss,
            "tokens_per_s": run.tokens_per_s,
            "seconds": run.seconds,
            "losses": run.losses,
            "validation": run.validation,
        }
        for run in runs
    }
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    path.write_text(json.dumps({"settings": settings, "recipes": recipes, "resumed": resumed}, indent=2) + "\n")


@contextlib.contextmanager
def all_or_nothing(out: Path) -> Iterator[Path]:
    """A scratch folder beside `out` that takes its place if the block succeeds; if it fails, the ranks' logs are kept in
    `<out>.failed-logs`, and the error says so; if it is interrupted, nothing is.

    Raises:
        ConfigError: The folder cannot be made.
    """
    from primus_turbo_plugin.errors import ConfigError

    out = Path(os.path.abspath(out))  # `--out .` has a name only then
    scratch = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.filename}: {error.strerror}).") from error
    try:
        yield scratch
        old = out.with_name(f".{out.name}.old")
        if out.exists():
            out.rename(old)
        scratch.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        keep_logs(scratch, out.with_name(f"{out.name}.failed-logs"), error)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def keep_logs(scratch: Path, kept: Path, error: Exception) -> None:
    """Move the `logs` folder of every run in `scratch` to `kept/<run>`, in place of an earlier failure's, and say where."""
    from primus_turbo_plugin.training.launch import RanksFailed

    logs = [folder for folder in sorted(scratch.glob("*/logs")) if any(folder.iterdir())]
    if not logs:
        return
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for folder in logs:
        folder.rename(kept / folder.parent.name)
    words = f"The processes' logs are in {kept}."
    if isinstance(error, RanksFailed):
        error.add(words)
    else:
        print(words, file=sys.stderr)


def run(options: argparse.Namespace) -> None:
    from primus_turbo_plugin.training import pretrain, stdlib_corpus

    start = time.monotonic()
    pretrain.require_training_loop()
    recipes = check(options)
    with all_or_nothing(options.out) as folder:
        print("writing the dataset: Python's standard library, its sources and language reference", flush=True)
        (folder / "data").mkdir()
        corpus = stdlib_corpus.build(folder / "data", vocab_size=options.vocab, max_characters=options.characters)
        print(f"  {corpus.documents} documents, {corpus.tokens:,} tokens of {corpus.vocab_size} kinds", flush=True)
        check_corpus(options, corpus)
        runs = [train(options, corpus, recipe, folder / recipe, recipe) for recipe in recipes]
        last = runs[-1]
        title = f"{last.recipe}, resumed at {options.save_at}"
        resumed = train(options, corpus, last.recipe, folder / "resumed", title, resume=last.checkpoints)
        verdict = check_resumed(options, last, resumed)
        draw(runs, folder / "loss.png")
        save_results(options, runs, verdict, folder / RESULTS)
    report(options, corpus, runs, verdict, time.monotonic() - start)


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Inside the block SIGTERM ends the program as Ctrl-C does: processes are stopped, and scratch files removed."""

    def leave(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: list[str]) -> int:
    from primus_turbo_plugin.training.pretrain import one_line_errors

    options = parse(argv)
    with sigterm_exits(), one_line_errors(show_traceback=options.turbo_traceback) as outcome:
        run(options)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
