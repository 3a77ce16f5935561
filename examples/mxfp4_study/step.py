"""One training step: forward, backward, clipping, AdamW; on a GPU replayed from a CUDA graph, which a host keeps up with.

The first steps run as written, the next is captured, and that one and all later are replays of it: the same kernels on the same
addresses, so the same bits. A stochastic recipe draws new bits on the host in every step and stays uncaptured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from examples.mxfp4_study.model import StudyModel

if TYPE_CHECKING:
    from examples.mxfp4_study.train import Settings

_UNCAPTURED = 3
"""Steps before the capture: kernels compile, libraries allocate their workspaces, AdamW its state."""


class Step:
    """A step of one model.

    Attributes:
        captured: Whether steps are replayed from a graph.
    """

    def __init__(self, model: StudyModel, settings: Settings, *, capture: bool) -> None:
        device = model.embedding.device
        self.model, self.settings = model, settings
        self.captured = capture and device.type == "cuda" and not model.is_stochastic
        self.optimizer = _adamw(model, settings, capturable=device.type == "cuda")
        self._rate: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = torch.empty(settings.batch, settings.size.seq + 1, dtype=torch.int64, device=device)
        self._result: Tensor | None = None
        self._done = 0

    def __call__(self, tokens: Tensor, rate: float) -> Tensor:
        """Trains on tokens int64 [batch, seq + 1]; fp32 [2]: loss, and norm of the gradient before clipping. Never waits."""
        self._set_rate(rate)
        self._tokens.copy_(tokens)
        self._done += 1
        if not self.captured:
            return self._compute()
        if self._done <= _UNCAPTURED:
            return self._beside()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = self._compute()
        assert self._result is not None
        self._graph.replay()
        return self._result.clone()

    def load(self, state: dict[str, object]) -> None:
        """AdamW's state, of a checkpoint."""
        self.optimizer.load_state_dict(state)
        self._rate = None

    def _beside(self) -> Tensor:
        """A step on a stream of its own, as capturing asks of the steps before it."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = self._compute()
        current.wait_stream(side)
        return result.clone()

    def _compute(self) -> Tensor:
        settings, losses = self.settings, []
        self.optimizer.zero_grad(set_to_none=True)
        for part in self._tokens.split(settings.micro_batch):
            loss = self.model(part) * (len(part) / settings.batch)
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        return torch.stack([torch.stack(losses).sum(), norm])

    def _set_rate(self, rate: float) -> None:
        if self._tokens.device.type != "cuda":
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            return
        if self._rate is None:
            self._rate = torch.empty((), device=self._tokens.device)
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate  # a tensor: the graph reads what it holds at each replay
        self._rate.fill_(rate)


def _adamw(model: StudyModel, settings: Settings, *, capturable: bool) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True, capturable=capturable)
