"""What a forward keeps for its backward, measured: bytes by module, each storage counted once.

    with measure_saved(model) as kept:
        loss = model(tokens, ...)
    print(kept.by_module())

torch's hooks on saved tensors see every tensor that an autograd function saves, ours and Megatron's. Parameters, buffers and the
weights' quantised copies are no activations: they are listed apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A storage that is kept.

    Attributes:
        module: Path of the innermost module that was running when it was first saved.
        nbytes: Of the whole storage: a saved view keeps all of it.
        seen_bytes: Of the elements that saved tensors show.
        dtype: Of the tensor that was saved first.
        shape: Of that tensor.
        also: Other modules that saved it.
    """

    module: str
    nbytes: int
    seen_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    also: tuple[str, ...] = ()


@dataclass
class Measurement:
    """What was kept.

    Attributes:
        activations: In the order they were saved.
        weights: Storages of parameters, buffers and the weights' quantised copies.
    """

    activations: list[Kept] = field(default_factory=list)
    weights: list[Kept] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of activations."""
        return sum(kept.nbytes for kept in self.activations)

    def by_module(self) -> dict[str, int]:
        """Path -> bytes of the storages it saved first."""
        found: dict[str, int] = {}
        for kept in self.activations:
            found[kept.module] = found.get(kept.module, 0) + kept.nbytes
        return found

    def of(self, suffix: str) -> list[Kept]:
        """Activations that modules whose path ends with `suffix` saved, whoever saved them first."""
        return [kept for kept in self.activations if any(path.endswith(suffix) for path in (kept.module, *kept.also))]


class _Recorder:
    """Notes every saved tensor under the module that runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._running: list[str] = []
        self._kept: dict[int, dict[str, Any]] = {}
        self._alive: list[torch.UntypedStorage] = []  # so that no address is given out twice

    def enter(self, path: str) -> None:
        self._running.append(path)

    def leave(self) -> None:
        self._running.pop()

    def save(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.nbytes():
            path = self._running[-1] if self._running else ""
            facts = self._kept.setdefault(
                storage.data_ptr(),
                {"nbytes": storage.nbytes(), "dtype": t.dtype, "shape": tuple(t.shape), "paths": [], "seen": {}},
            )
            if not facts["paths"]:
                self._alive.append(storage)
            if path not in facts["paths"]:
                facts["paths"].append(path)
            facts["seen"][t.storage_offset(), tuple(t.shape), t.stride()] = t.numel() * t.element_size()
        return t

    def result(self) -> Measurement:
        weights = {address for t in weight_tensors(self._model) for address in (t.untyped_storage().data_ptr(),)}
        found = Measurement()
        for address, facts in self._kept.items():
            first, *others = facts["paths"]
            kept = Kept(
                module=first,
                nbytes=facts["nbytes"],
                seen_bytes=min(sum(facts["seen"].values()), facts["nbytes"]),
                dtype=facts["dtype"],
                shape=facts["shape"],
                also=tuple(others),
            )
            (found.weights if address in weights else found.activations).append(kept)
        return found


def weight_tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and the quantised copies of weights that are kept now."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        cache = getattr(module, "_weight_cache", None)
        if cache is not None:
            yield from cache.tensors()


@contextmanager
def measure_saved(model: torch.nn.Module) -> Iterator[Measurement]:
    """Measures the forwards run inside. Keeps what they save alive until the end.

    The copies of quantised weights are told apart only where weights are cached, as they are in training; this announces a step
    to every layer that has a cache, as Megatron's schedules do.
    """
    recorder, measurement = _Recorder(model), Measurement()
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if getattr(module, "_weight_cache", None) is not None:
                module.is_first_microbatch = True  # type: ignore[assignment]
            before = module.register_forward_pre_hook(lambda *_, path=path: recorder.enter(path))
            after = module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        with torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda t: t):
            yield measurement
        result = recorder.result()
        measurement.activations, measurement.weights = result.activations, result.weights
