"""`primus-turbo`: tools around the package.

doctor     what this machine can do, what serves each op, and what is broken
tune       find the fastest kernel configurations for a model's shapes on this GPU
memory     what a model's linears keep for backward under a recipe, against BF16
trace      how much of each overlapped collective of a training run lay under compute
isa        what the compiler made of an AMD kernel
emulate    run an AMD kernel in the functional emulator
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from primus_turbo_plugin import __version__
from primus_turbo_plugin.errors import ConfigError, TurboError

if TYPE_CHECKING:
    from primus_turbo_plugin.diagnostics.doctor import Report

_LONGEST_S = 604_800  # a week; far longer times overflow the timers of some systems


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code. The environment is read here."""
    started = time.monotonic()
    missing = _torch_problem()
    if missing is not None:
        print(f"primus-turbo: {missing}", file=sys.stderr)
        return 1
    args = build_parser().parse_args(argv, argparse.Namespace(started=started))
    run: Callable[[argparse.Namespace, Mapping[str, str]], int] = args.run
    try:
        return run(args, os.environ)
    except TurboError as error:
        print(f"primus-turbo: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (`| head`) has gone
        sys.stdout = None  # type: ignore[assignment]
        return 0


def _torch_problem() -> str | None:
    """Why torch cannot be imported: without it nothing below can even be asked."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a shared library of a build for another system
        reason = " ".join(str(error).split())
        return (
            f"torch cannot be imported ({reason}). Install a CPU, CUDA or ROCm build: https://pytorch.org/get-started"
        )
    return None


def build_parser() -> argparse.ArgumentParser:
    """The command line; an unknown subcommand is answered with those that exist."""
    from primus_turbo_plugin.amdgcn import commands as amdgcn
    from primus_turbo_plugin.diagnostics import memory_report
    from primus_turbo_plugin.diagnostics.trace import command as trace
    from primus_turbo_plugin.diagnostics.tune import command as tune
    from primus_turbo_plugin.precision.config_sources import add_turbo_arguments

    parser = argparse.ArgumentParser(prog="primus-turbo", description="Tools of the primus_turbo_plugin package.")
    parser.add_argument("--version", action="version", version=f"primus-turbo-plugin {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="device, versions, what serves each op, what is missing",
        description="Reports the device, versions, what serves each op, and whether a configuration can be had here. "
        "Exit code 1 when something that was asked for is broken.",
    )
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    doctor.add_argument(
        "--selftest", action="store_true", help="run every kernel on this device and compare its results"
    )
    doctor.add_argument(
        "--selftest-limit",
        type=_seconds,
        default=900.0,
        metavar="S",
        help="end the self-test of a GPU, and this command, S seconds after its start (900)",
    )
    doctor.add_argument(
        "--config", dest="turbo_config", metavar="FILE", help="check this configuration; as --turbo-config"
    )
    add_turbo_arguments(doctor)
    doctor.set_defaults(run=_doctor)
    tune_parser = commands.add_parser("tune", help=tune.HELP, description=tune.HELP)
    tune.add_arguments(tune_parser)
    tune_parser.set_defaults(run=tune.run)
    memory = commands.add_parser("memory", help=memory_report.HELP, description=memory_report.HELP)
    memory_report.add_arguments(memory)
    memory.set_defaults(run=memory_report.run)
    trace_parser = commands.add_parser("trace", help=trace.HELP, description=trace.HELP)
    trace.add_arguments(trace_parser)
    trace_parser.set_defaults(run=trace.run)
    isa = commands.add_parser("isa", help=amdgcn.ISA_HELP, description=amdgcn.ISA_HELP)
    amdgcn.add_isa_arguments(isa)
    isa.set_defaults(run=amdgcn.run_isa)
    emulate = commands.add_parser("emulate", help=amdgcn.EMULATE_HELP, description=amdgcn.EMULATE_HELP)
    amdgcn.add_emulate_arguments(emulate)
    emulate.set_defaults(run=amdgcn.run_emulate)
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= _LONGEST_S:
            return value
    raise argparse.ArgumentTypeError(f"must be seconds, more than 0 and at most {_LONGEST_S}, got {text!r}")


def _doctor(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from primus_turbo_plugin.diagnostics import selftest_guard
    from primus_turbo_plugin.diagnostics.render import render

    with _ends_by(args.started + args.selftest_limit) if args.selftest else contextlib.nullcontext():
        report = _examined(args, environ)
        print(json.dumps(report.to_dict(), indent=2) if args.json else render(report), flush=True)
    code = 0 if report.is_healthy else 1
    if args.selftest and report.device.torch_device != "cpu":
        selftest_guard.leave_stuck_processes(code)
    return code


def _examined(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    import dataclasses

    from primus_turbo_plugin.diagnostics import selftest_guard
    from primus_turbo_plugin.diagnostics.doctor import examine
    from primus_turbo_plugin.diagnostics.selftest import run_selftest
    from primus_turbo_plugin.kernels.registry import default_registry
    from primus_turbo_plugin.precision.config_sources import ResolvedConfig, resolve

    resolved: ResolvedConfig | ConfigError
    try:
        resolved = resolve(args, environ)
    except ConfigError as error:
        resolved = error  # reported with everything else, so that one run shows all there is
    report = examine(resolved, environ)
    on = report.device.torch_device
    if not args.selftest:
        return report
    if on == "cpu":  # nothing here can hang a device
        results = run_selftest(default_registry(), on)
    else:
        results = selftest_guard.run_guarded(
            on, limit_s=args.selftest_limit, started=args.started, progress=selftest_guard.show_progress
        )
    return dataclasses.replace(report, selftest=results)


@contextlib.contextmanager
def _ends_by(deadline: float) -> Iterator[None]:
    """Whatever hangs in here, in a driver say, this process ends 5 seconds behind the deadline, and says where it was."""
    left = max(deadline - time.monotonic(), 0.0) + 5.0
    faulthandler.dump_traceback_later(left, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
