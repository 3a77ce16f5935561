"""The `isa` and `emulate` commands, as plain functions the command line registers.

add_isa_arguments(parser), run_isa(args)             primus-turbo isa KERNEL --arch gfx950 [--json]
add_emulate_arguments(parser), run_emulate(args)     primus-turbo emulate KERNEL --arch gfx950
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Mapping
from typing import Any

from primus_turbo_plugin.amdgcn.architecture import ARCHITECTURES
from primus_turbo_plugin.errors import ConfigError

ISA_HELP = "what the compiler made of a kernel: registers, occupancy, hot loop, what bounds it (no GPU needed)"
EMULATE_HELP = "run a kernel in the emulator and compare it with its reference (no GPU needed)"

_KERNEL = (
    "a built-in target such as gfx1250_bf16_nt, `all` of those, FILE.py or MODULE (all its isa_targets()), FILE.py:NAME (one "
    "target, or a kernel), or an assembly file"
)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        choices=list(ARCHITECTURES),
        help="target; may be repeated; default: all it is for",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def add_isa_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `isa`."""
    _common(parser)
    for flag, meaning in (
        ("--arg", "run-time argument of a bare kernel: a type ('*bf16', 'i32:16') or a number"),
        ("--const", "compile-time constant of a bare kernel"),
        ("--option", "compile option of a bare kernel, such as num_warps=8"),
    ):
        parser.add_argument(flag, action="append", default=[], metavar="NAME=VALUE", help=meaning)
    parser.add_argument(
        "--mca", action="store_true", help="simulate the hot loop with LLVM MCA (CDNA; needs mlc-llvm-static)"
    )
    parser.add_argument("--asm", action="store_true", help="print the assembly as well")


def add_emulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `emulate`."""
    _common(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    parser.add_argument("--no-defer", action="store_true", help="let every load and transfer complete at once")
    parser.add_argument("--no-race", action="store_true", help="do not look for LDS races")


def _pairs(items: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` items; values that read as Python literals are those, the rest stay text."""
    result: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"amdgcn: NAME=VALUE expected, got {item!r}.")
        try:
            result[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            result[name] = text
    return result


def run_isa(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> int:
    """Print a report per kernel and architecture; exit code 1 if a gate is violated."""
    from primus_turbo_plugin.amdgcn.report.gate import check_gate
    from primus_turbo_plugin.amdgcn.report.isa import isa_report
    from primus_turbo_plugin.amdgcn.report.render import render, to_json
    from primus_turbo_plugin.amdgcn.resolve import find_kernels

    found = find_kernels(args.kernel, args.arch, _pairs(args.arg), _pairs(args.const), _pairs(args.option))
    failed, data, blocks = False, [], []
    for item in found:
        report = isa_report(item.compiled, mca=args.mca)
        violations = None if item.gate is None else check_gate(report, item.gate)
        failed |= bool(violations)
        data.append({"target": item.name, **to_json(report, violations)})
        blocks.append(f"{item.name}\n{render(report, violations)}" + (f"\n{item.compiled.asm}" if args.asm else ""))
    print(json.dumps(data, indent=2) if args.json else "\n\n".join(blocks))
    return 1 if failed else 0


def run_emulate(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> int:
    """Emulate targets against their references; exit code 1 if one is wrong or faults."""
    from primus_turbo_plugin.amdgcn.faults import EmulationError
    from primus_turbo_plugin.amdgcn.resolve import find_targets
    from primus_turbo_plugin.amdgcn.targets import emulate_target

    data: list[dict[str, Any]] = []
    for target in find_targets(args.kernel):
        for arch in target.archs:
            if args.arch and arch not in args.arch:
                continue
            entry: dict[str, Any] = {"target": target.name, "arch": arch, "seed": args.seed}
            try:
                result = emulate_target(target, arch, seed=args.seed, defer=not args.no_defer, race=not args.no_race)
                entry |= {"ok": result.passed, "problems": result.failures, "relative_error": result.errors}
                entry |= {"emulated_instructions": sum(result.report.executed.values())}
            except EmulationError as error:
                entry |= {"ok": False, "problems": [str(error)], "relative_error": {}}
            data.append(entry)
            if not args.json:
                print(_line(entry))
    if args.json:
        print(json.dumps(data, indent=2))
    if not data:
        raise ConfigError(f"amdgcn: no target of {args.kernel!r} is for {', '.join(args.arch)}.")
    return 0 if all(entry["ok"] for entry in data) else 1


def _line(entry: Mapping[str, Any]) -> str:
    """One result as text."""
    head = f"{'ok  ' if entry['ok'] else 'FAIL'} {entry['target']} on {entry['arch']} (emulated)"
    errors = ", ".join(f"{name} {error:.1e}" for name, error in entry["relative_error"].items())
    lines = [head + (f": relative error {errors}" if errors else "")]
    return "\n".join(lines + [f"     {problem}" for problem in entry["problems"]])
