"""Which engine moves a copy: found out, not assumed.

Every compute unit is filled with waves that do nothing but watch one word, which a copy behind the copy in question is to
change. If the word changes, something other than compute units has moved the data. If the watchers give up first and it changes
only then, the copy had to wait for a compute unit, if the experiment is worth anything: a copy from pinned host memory, which
engines always make, must come through on the same GPU at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_UNTIL_FULL_S = 2e-3  # the watchers are there within microseconds, and stay for some ten milliseconds
_CONTROL_BYTES = 1 << 20

COPY_ENGINE, COMPUTE_UNITS = "copy engine", "compute units"
UNKNOWN = (
    "an engine that could not be told: on this GPU not even a copy from the host came through, something else uses it"
)


def probe_engine(copy: Callable[[int], None], device: torch.device) -> str:
    """Runs `copy(stream)` on a full GPU.

    Args:
        copy: Enqueues the copy on a raw stream.
        device: The GPU that makes it.

    Returns:
        `COPY_ENGINE`, `COMPUTE_UNITS` or `UNKNOWN`.
    """
    if _comes_through(copy, device):
        return COPY_ENGINE
    host = torch.ones(_CONTROL_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_CONTROL_BYTES, dtype=torch.uint8, device=device)

    def upload(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            target.copy_(host, non_blocking=True)

    return COMPUTE_UNITS if _comes_through(upload, device) else UNKNOWN


def _comes_through(copy: Callable[[int], None], device: torch.device) -> bool:
    """Whether a copy ends while every compute unit is taken."""
    from primus_turbo_plugin.communication.transports.device_api import device_api
    from primus_turbo_plugin.kernels.triton.wait_flag import PATIENCE, fill_and_watch

    api = device_api()
    word = torch.zeros(16, dtype=torch.int32, device=device)
    one = torch.ones(16, dtype=torch.int32, device=device)
    lane = torch.cuda.Stream(device, priority=-1)
    copy(lane.cuda_stream)  # whatever is set up at the first use is no part of the question
    fill_and_watch(word, patience=1)  # compiles
    torch.cuda.synchronize(device)
    seen = fill_and_watch(word, patience=PATIENCE)
    time.sleep(_UNTIL_FULL_S)
    copy(lane.cuda_stream)
    api.poke(word.data_ptr(), one.data_ptr(), lane.cuda_stream)
    torch.cuda.synchronize(device)
    return bool((seen == 1).all())
