"""Which engine moves a copy: found out, not assumed.

Every compute unit is filled with waves that do nothing but watch one word, which a copy behind the copy in question is to
change. If the word changes, something other than compute units has moved the data. If the watchers give up first and it changes
only then, the copy had to wait for a compute unit: it is made by a kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_UNTIL_FULL_S = 2e-3  # the watchers are there within microseconds, and stay for some ten milliseconds

COPY_ENGINE, COMPUTE_UNITS = "copy engine", "compute units"


def probe_engine(copy: Callable[[int], None], device: torch.device) -> str:
    """Runs `copy(stream)` on a full GPU.

    Args:
        copy: Enqueues the copy on a raw stream.
        device: The GPU that makes it.

    Returns:
        `copy engine`, or `compute units`.
    """
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
    return COPY_ENGINE if bool((seen == 1).all()) else COMPUTE_UNITS
