"""Where a weight gradient goes, and when it is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from primus_turbo_plugin.functional.linear_kernels import LinearKernels, Operand


class GradientSink(Protocol):
    """A buffer that weight gradients of several microbatches are accumulated into, bypassing `weight.grad`."""

    def buffer(self) -> Tensor:
        """The buffer [out, in]: fp32, or a 16-bit dtype that is rounded to at every microbatch."""

    def overwrites(self) -> bool:
        """Whether the buffer's contents are stale and must be replaced, not added to."""

    def delivered(self) -> Tensor | None:
        """Called when dw is in the buffer, or has been taken over by whoever will put it there.

        Returns:
            What backward hands to autograd in dw's place, in the weight's shape and dtype.
        """


class WgradQueue:
    """Weight gradients put off until `run()`, in the order of the backward passes that left them."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Callable[[], Tensor | None], Callable[[Tensor], None]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, compute: Callable[[], Tensor | None], deliver: Callable[[Tensor], None]) -> None:
        """Leaves a computation for later.

        Args:
            compute: Gives dw, or None once it is in a sink.
            deliver: Takes a dw that has no sink.
        """
        self._pending.append((compute, deliver))

    @torch.no_grad()
    def run(self) -> None:
        """Computes everything that is waiting; what each computation holds is freed as it ends."""
        while self._pending:
            compute, deliver = self._pending.popleft()
            dw = compute()
            if dw is not None:
                deliver(dw)


def compute_wgrad(kernels: LinearKernels, dy_col: Operand, x_col: Operand, sink: GradientSink | None) -> Tensor | None:
    """dw[N, K] = dy[T, N].T @ x[T, K], into the sink where there is one.

    Args:
        kernels: Of the layer.
        dy_col: [N, T], dy transposed or its columnwise copy.
        x_col: [K, T], x transposed or its columnwise copy.
        sink: Where dw goes.

    Returns:
        dw in `kernels.wgrad_dtype`, or None when it went into the sink.
    """
    if sink is None:
        return kernels.gemm_nt("wgrad", dy_col, x_col)
    buffer = sink.buffer()
    if sink.overwrites():
        buffer.zero_()
    if buffer.dtype == torch.float32:
        kernels.gemm_nt("wgrad", dy_col, x_col, out=buffer)
    else:
        buffer.add_(kernels.gemm_nt("wgrad", dy_col, x_col))  # dw in fp32: one rounding, of the sum
    return None
