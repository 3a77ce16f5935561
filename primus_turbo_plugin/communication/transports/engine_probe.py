"""Which engine moves a copy: found out, not assumed.

Every compute unit is filled with waves that do nothing but watch one word, which a copy behind the copy in question is to
change. If the word changes, something other than compute units has moved the data. If the watchers give up first and it changes
only then, the copy had to wait for a compute unit: it is made by a kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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
    from primus_turbo_plugin.kernels.triton.wait_flag import PATIENCE, fill_and_watch, num_watchers

    api = device_api()
    word = torch.zeros(16, dtype=torch.int32, device=device)
    one = torch.ones(16, dtype=torch.int32, device=device)
    count = num_watchers(device)
    started = torch.zeros(16, dtype=torch.int32, device=device)
    seen = torch.zeros(count, dtype=torch.int32, device=device)
    lane = torch.cuda.Stream(device, priority=-1)
    copy(lane.cuda_stream)  # whatever is set up at the first use is no part of the question
    fill_and_watch(word, started, seen, count, patience=1)
    torch.cuda.synchronize(device)
    started.zero_()
    seen.zero_()
    torch.cuda.synchronize(device)
    fill_and_watch(word, started, seen, count, patience=PATIENCE)
    # Stream operations only: the lane holds its copy back until every watcher is there.
    api.wait_at_least(lane.cuda_stream, started.data_ptr(), count)
    copy(lane.cuda_stream)
    api.copy(word.data_ptr(), one.data_ptr(), 4, lane.cuda_stream)
    torch.cuda.synchronize(device)
    return COPY_ENGINE if bool((seen == 1).all()) else COMPUTE_UNITS
