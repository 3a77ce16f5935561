"""`--tp-comm-overlap` without Transformer Engine.

Megatron's training loop answers the flag by making Transformer Engine's user buffers, and ends the job where that package is
missing. The linears of this package have buffers of their own, so here the flag reaches the model's configuration only.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.training.cpu_device.patching import Shim, patched

_NO_USER_BUFFERS = Shim(
    target="megatron.training.initialize:_initialize_tp_communicators",
    make=lambda original: _nothing,
    why="imports Transformer Engine to make buffers that no linear of this package uses",
)


def _nothing() -> Any:
    return None


@contextlib.contextmanager
def own_buffers(args: argparse.Namespace, turbo: ResolvedConfig) -> Iterator[None]:
    """Around `pretrain`: leaves Megatron's buffers out where this package's linears overlap, and does nothing elsewhere."""
    ours = args.spec is None and args.turbo_spec != "megatron" and turbo.config.linear == "turbo"
    with patched([_NO_USER_BUFFERS] if args.tp_comm_overlap and ours else []):
        yield
