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
import functools
import sys
import time
from pathlib import Path
from typing import Any

# Light ones only: every training process imports this file again.
from primus_turbo_plugin.training.run_report import Run, draw, median_step_s, print_table, save_results
from primus_turbo_plugin.training.scratch import all_or_nothing, sigterm_exits

RESULTS = "results.json"  # marks a folder as ours to replace
SPLIT = "95,5,0"  # of the documents: training, validation, test


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the CPU in several precisions and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    size = parser.add_argument_group("model")
    size.add_argument("--layers", type=int, default=4, help="decoder layers")
    size.add_argument("--hidden", type=int, default=256, help="width of the residual stream")
    size.add_argument("--ffn", type=int, default=768, help="width of the SwiGLU layer")
    size.add_argument("--heads", type=int, default=8, help="attention heads")
    size.add_argument("--kv-heads", type=int, default=4, help="heads of keys and values")
    size.add_argument("--vocab", type=int, default=1024, help="size of the tokenizer that is trained")
    size.add_argument("--seq", type=int, default=128, help="tokens a sequence")
    run = parser.add_argument_group("run")
    run.add_argument("--recipes", default="bf16,mxfp4", help="precision presets, separated by commas")
    run.add_argument("--steps", type=int, default=160, help="optimizer steps of each recipe")
    run.add_argument("--save-at", type=int, help="step of the checkpoint to resume from; None: three quarters")
    run.add_argument("--batch", type=int, default=8, help="sequences a step")
    run.add_argument("--micro-batch", type=int, default=4, help="sequences a microbatch")
    run.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    run.add_argument("--seed", type=int, default=1234, help="of initialisation and batches")
    run.add_argument("--eval-iters", type=int, default=8, help="batches a validation")
    run.add_argument("--characters", type=int, help="of text to take; None: all")
    where = parser.add_argument_group("where")
    where.add_argument("--tp", type=int, default=2, help="tensor (and sequence) parallel size")
    where.add_argument(
        "--overlap", action="store_true", help="tensor-parallel collectives under the GEMMs (--tp-comm-overlap)"
    )
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
    if options.overlap and options.tp == 1:
        raise ConfigError("--overlap: --tp 1 has no tensor-parallel collectives. Take --tp 2 or more, or leave it out.")
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
    switches += ["tp-comm-overlap"] if options.overlap else []
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
    losses = [m for m in everything if m.tag == "lm loss"]
    return Run(
        recipe=recipe,
        losses={m.step: m.value for m in losses},
        validation={m.step: m.value for m in everything if m.tag == "lm loss validation"},
        tokens_per_s=options.batch * options.seq / median_step_s([m.time_s for m in losses]),
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


def report(options: argparse.Namespace, corpus: Any, runs: list[Run], resumed: str) -> None:
    """The closing table, what the resumed run showed, and where everything is."""
    size = f"{options.steps} steps of {options.batch} x {options.seq} tokens, {corpus.tokens:,} tokens of text"
    print_table(size, runs)
    print("train loss: mean of the last 10 steps. A CPU emulates the low-precision recipes, hence slower.")
    print(resumed)
    folders = ", ".join(run.recipe for run in runs)
    files = {"picture": "loss.png", "numbers": RESULTS, "dataset": "data", "checkpoints and logs": f"{{{folders}}}"}
    for what, path in files.items():
        print(f"{what + ':':<22}{options.out / path}")


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
        save_results(folder / RESULTS, vars(options), runs, verdict)
    report(options, corpus, runs, verdict)
    print(f"done in {time.monotonic() - start:.0f} s")


def main(argv: list[str]) -> int:
    from primus_turbo_plugin.training.pretrain import one_line_errors

    options = parse(argv)
    with sigterm_exits(), one_line_errors(show_traceback=options.turbo_traceback) as outcome:
        run(options)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
