"""The subcommand: runs a training command with tracing on, then puts the ranks' files together."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from primus_turbo_plugin.communication import tracing
from primus_turbo_plugin.diagnostics.trace.analysis import chrome_trace, read_ranks, rows, table
from primus_turbo_plugin.errors import ConfigError

HELP = "run a training command and show how much of each overlapped collective lay under compute"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `primus-turbo trace`."""
    parser.add_argument(
        "--steps", default="2-3", metavar="FIRST-LAST", help="optimizer steps to trace, from 1 (default: 2-3)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("trace.json"), metavar="FILE", help="the Chrome trace (default: trace.json)"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="after --: the training command, with its launcher if it has one"
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Runs the command; its exit code, unless there is no trace to show.

    Raises:
        ConfigError: No command, impossible steps, or nothing was traced.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError(
            "trace: no command. Write it after --: primus-turbo trace -- python examples/pretrain_gpt.py ..."
        )
    with tempfile.TemporaryDirectory(prefix="turbo-trace-") as folder:
        value = f"{folder}:{args.steps}"
        try:
            tracing.parse_value(value)  # a mistake is better said now than by every rank
        except ConfigError as error:
            raise ConfigError(
                f"--steps {args.steps}: must be FIRST-LAST, optimizer steps from 1, such as 2-3."
            ) from error
        try:
            code = subprocess.run(command, env={**environ, tracing.VARIABLE: value}, check=False).returncode
        except OSError as error:
            raise ConfigError(f"trace: {command[0]} cannot be run ({error.strerror}).") from error
        if code and not any(Path(folder).iterdir()):
            return code
        ranks = read_ranks(Path(folder))
    found = rows(ranks)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(chrome_trace(ranks)), encoding="utf-8")
    if args.json:
        print(json.dumps([{name: getattr(row, name) for name in row.__slots__} for row in found], indent=2))
    else:
        print(table(found))
        print(f"written: {args.out} (open it in https://ui.perfetto.dev or chrome://tracing)")
    return code
