"""`primus-turbo tune`: arguments, and the run from tasks to a file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from primus_turbo_plugin.devices import Device, detect
from primus_turbo_plugin.devices.capabilities import CAPABILITIES
from primus_turbo_plugin.diagnostics.model_sizes import LinearSizes, add_size_arguments, linears_of, sizes_of_arguments
from primus_turbo_plugin.diagnostics.tune.gemm_tasks import (
    FORMATS,
    GEMMS,
    LAYOUTS,
    GemmTask,
    distinct,
    linear_tasks,
    shape_tasks,
)
from primus_turbo_plugin.diagnostics.tune.precompile import Workers, launch_gemm
from primus_turbo_plugin.diagnostics.tune.report import backend_advice, dry_lines, entry_of, outcome_lines, table_lines
from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.kernels.tuning.codec import canonical, encode
from primus_turbo_plugin.kernels.tuning.file import merge_into
from primus_turbo_plugin.kernels.tuning.search import search
from primus_turbo_plugin.kernels.tuning.table import TuningTable, tuning_table
from primus_turbo_plugin.kernels.tuning.tunable import Tunable, tunables
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import add_turbo_arguments, resolve
from primus_turbo_plugin.precision.recipe import LinearPrecision, Recipe
from primus_turbo_plugin.precision.vocabulary import check_choice

HELP = "find the fastest kernel configurations for a model's shapes on this GPU and keep them in a file"
DEFAULT_FILE = "primus_turbo_tuning.json"
TUNED_ARCHITECTURES = tuple(arch for arch in CAPABILITIES if arch != "cpu")

#: Compute units of the product that is commonly meant by an architecture, for --dry-run without it.
_UNITS = {"sm80": 108, "sm90": 132, "sm100": 148, "gfx942": 304, "gfx950": 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tune`."""
    what = parser.add_argument_group("what to tune")
    add_size_arguments(what)
    what.add_argument("--precisions", metavar="LIST", help="recipes, 'bf16,mxfp4'; default: those of the configuration")
    what.add_argument("--gemms", default=",".join(GEMMS), metavar="LIST", help="of %(default)s")
    what.add_argument("--shapes", nargs="+", metavar="M,N,K", help="products as they are, instead of a model")
    what.add_argument(
        "--formats", default="bf16", metavar="LIST", help=f"of --shapes: {', '.join(FORMATS)} (%(default)s)"
    )
    what.add_argument(
        "--layouts", default="nt", metavar="LIST", help=f"of --shapes: {', '.join(LAYOUTS)} (%(default)s)"
    )
    what.add_argument("--accumulate", action="store_true", help="--shapes add to an fp32 output")
    how = parser.add_argument_group("how")
    how.add_argument("--out", default=DEFAULT_FILE, metavar="FILE", help="entries are merged into it (%(default)s)")
    how.add_argument("--resume", action="store_true", help="leave out cases that the file answers for these versions")
    how.add_argument("--dry-run", action="store_true", help="list candidates and what struck others out; needs no GPU")
    how.add_argument(
        "--show", action="store_true", help="print the entries that apply, and do nothing else; needs no GPU"
    )
    how.add_argument("--arch", choices=TUNED_ARCHITECTURES, help="with --dry-run or --show: for this architecture")
    how.add_argument("--compute-units", type=int, metavar="N", help="with --dry-run: of that GPU")
    how.add_argument("--backends", metavar="LIST", help="time these backends too: 'torch,triton'")
    how.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that compile; 0: this one (%(default)s)"
    )
    how.add_argument(
        "--compile-limit", type=float, default=300.0, metavar="S", help="seconds a candidate may compile (%(default)g)"
    )
    how.add_argument("--time-limit", type=float, metavar="S", help="begin no new case after so many seconds")
    how.add_argument("--max-candidates", type=int, metavar="N", help="try only the first N of a case")
    how.add_argument("--verbose", action="store_true", help="every candidate")
    parser.add_argument("--config", dest="turbo_config", metavar="FILE", help="configuration; as --turbo-config")
    add_turbo_arguments(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: What is asked for is wrong.
        UnsupportedError: There is no GPU to time on.
    """
    _check(args)
    resolved = resolve(args, environ)
    table = tuning_table(resolved.config.tuning_file)
    device = detect()
    for note in table.notes:
        print(f"note: {note}")
    if args.show:
        print("\n".join(table_lines(table, args.arch or device.capabilities.arch)))
        return 0
    tasks = tasks_of(args, resolved.config)
    if args.dry_run:
        return _dry_run(args, tasks, device, table)
    for name in ("arch", "compute_units"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')}: only with --dry-run; a timing run is for the GPU it runs on."
            )
    reason = cannot_time(device)
    if reason is not None:
        raise UnsupportedError(f"tune: {reason}. --dry-run lists candidates without one.")
    with Workers(args.jobs, launch_gemm, args.compile_limit) as workers:
        return _Run(args, device, workers).tune(tasks)


def _check(args: argparse.Namespace) -> None:
    """Numbers and names that no run could use, before anything is read or timed."""
    from primus_turbo_plugin.kernels.registry import default_registry

    for name, least in (("jobs", 0), ("compute_units", 1), ("max_candidates", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}.")
    if not args.compile_limit > 0:
        raise ConfigError(f"--compile-limit: seconds, more than 0; got {args.compile_limit:g}.")
    for name in _list(args.backends or ""):
        check_choice("--backends", name, default_registry().names("gemm_nt"))


def cannot_time(device: Device) -> str | None:
    """Why nothing can be timed here, or None."""
    from primus_turbo_plugin.kernels.triton.targets import refusal

    if device.torch_device != "cuda":
        found = f" ({device.notes[0]})" if device.notes else ""
        return f"times kernels on a GPU, and torch sees none{found}"
    return refusal("cuda")


def tasks_of(args: argparse.Namespace, config: TurboConfig) -> list[GemmTask]:
    """The products that are asked for.

    Raises:
        ConfigError: A name, size or combination is wrong.
    """
    if args.shapes:
        for name in ("model", "precisions", "hidden", "ffn", "heads", "groups", "head_dim", "num_layers"):
            if getattr(args, name):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"--shapes: products as they are written; leave {option} out.")
        layouts = [check_choice("--layouts", name, LAYOUTS) for name in _list(args.layouts)]
        return list(shape_tasks(args.shapes, _list(args.formats), layouts, accumulate=args.accumulate))  # type: ignore[arg-type]
    sizes = sizes_of_arguments(args, TurboConfig() if args.precisions else config)
    if args.tokens < 1 or args.tp < 1:
        raise ConfigError(f"--tokens and --tp must be at least 1; got {args.tokens} and {args.tp}.")
    gemms = [check_choice("--gemms", name, GEMMS) for name in _list(args.gemms)]
    label = args.model or "model"
    tasks: list[GemmTask] = []
    for linear in linears_of(sizes, args.tp):
        precisions = _precisions(args, config, linear, sizes.num_layers)
        tasks += linear_tasks(label, [linear], precisions, tokens=args.tokens, gemms=gemms)
    return tasks


def _precisions(
    args: argparse.Namespace, config: TurboConfig, linear: LinearSizes, num_layers: int
) -> list[tuple[str, LinearPrecision]]:
    """The recipes a linear runs in some layer, each once."""
    if args.precisions:
        return [(name, Recipe.preset(name).linear()) for name in _list(args.precisions)]
    found: dict[LinearPrecision, str] = {}
    for layer in range(num_layers):
        plan = config.plan(linear.path.replace("*", str(layer)), layer, num_layers)
        found.setdefault(plan.precision, plan.recipe)
    return [(name, precision) for precision, name in found.items()]


def _list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _tunable() -> Tunable[Any, Any]:
    return tunables()["triton.gemm_nt"]


def _dry_run(args: argparse.Namespace, tasks: Sequence[GemmTask], device: Device, table: TuningTable) -> int:
    arch = args.arch or device.capabilities.arch
    if arch == "cpu":
        raise ConfigError(f"--dry-run: there is no GPU here: name one with --arch ({', '.join(TUNED_ARCHITECTURES)}).")
    units = args.compute_units or (_own_units() if args.arch is None else _UNITS.get(arch))
    if units is None:
        raise ConfigError(f"--dry-run: how many compute units {arch} has is not known here: give --compute-units.")
    tunable = _tunable()
    for task in distinct(tasks, arch, units):
        key = task.key(arch, units)
        current = "tuned" if table.tuned(tunable, key) is not None else "not tuned"
        print("\n".join(dry_lines(task, key, tunable, current, verbose=args.verbose)), flush=True)
    return 0


def _own_units() -> int:
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


class _Run:
    """One timing run.

    Args:
        args: The command line.
        device: The GPU.
        workers: Compile ahead.
    """

    def __init__(self, args: argparse.Namespace, device: Device, workers: Workers) -> None:
        self.args, self.device, self.workers = args, device, workers
        self.backends = _list(args.backends or "")
        self.started = time.monotonic()

    def tune(self, tasks: Sequence[GemmTask]) -> int:
        """Tunes every distinct case and writes each down at once; 1 where one has no working configuration."""
        import torch

        from primus_turbo_plugin.kernels.triton.gemm_key import gpu_of

        arch, units = gpu_of(torch.cuda.current_device())
        done = self._done()
        cases = [task for task in distinct(tasks, arch, units) if canonical(encode(task.key(arch, units))) not in done]
        machine = f"{self.device.name} ({arch}, {units} compute units), {_tunable().versions}"
        print(f"{machine}; {len(cases)} cases into {self.args.out}")
        failed, times = 0, {}
        for index, task in enumerate(cases):
            if self._is_over():
                print(f"{len(cases) - index} cases left out: --time-limit {self.args.time_limit:g} is over")
                return 1
            found = self._tune_one(task)
            if found is None:
                failed += 1
            else:
                times[task.name] = found
        print("\n".join(backend_advice(times)))
        return 1 if failed else 0

    def _done(self) -> set[str]:
        """Cases not to be tuned again. Reading the file first shows what is wrong with it before hours are spent."""
        entries = merge_into(self.args.out, [])
        if not self.args.resume:
            return set()
        tunable = _tunable()
        return {entry.case[1] for entry in entries if entry.op == tunable.op and entry.versions == tunable.versions}

    def _is_over(self) -> bool:
        return self.args.time_limit is not None and time.monotonic() - self.started > self.args.time_limit

    def _tune_one(self, task: GemmTask) -> dict[str, float] | None:
        """Times by backend; None where no configuration works. Raises where the GPU is broken for this process."""
        from primus_turbo_plugin.diagnostics.tune.gemm_case import GemmCase
        from primus_turbo_plugin.kernels.registry import default_registry

        tunable = _tunable()
        case = GemmCase(task, default_registry())
        candidates = tunable.candidates(case.key)[: self.args.max_candidates]
        outcome = search(candidates, case, self.workers.compile(task, candidates))
        others: dict[str, Any] = {name: case.compare_backend(name) for name in self._others()} if outcome.winner else {}
        print("\n".join(outcome_lines(task, case.key, outcome, others, verbose=self.args.verbose)), flush=True)
        if outcome.broken_by:
            raise UnsupportedError(
                f"tune: {outcome.broken_by}. Earlier cases are in {self.args.out}; run again for the rest."
            )
        times = {name: found.us for name, found in others.items() if not isinstance(found, str)}
        if outcome.winner is not None and outcome.winner.sample is not None and self.backends:
            times = {"triton": outcome.winner.sample.us, **times}
        entry = entry_of(tunable, case.key, outcome, self.device.name, times)
        if entry is None:
            return None
        merge_into(self.args.out, [entry])
        return times

    def _others(self) -> Iterator[str]:
        """Backends to compare; Triton is what is tuned."""
        return (name for name in self.backends if name != "triton")
