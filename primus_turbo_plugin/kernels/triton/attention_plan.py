"""Launches that are made once and then repeated with other tensors.

Everything of a launch but its pointers follows from shapes, strides, dtypes, alignments and options. Making it again for every
call, descriptors included, and having Triton find its compiled kernel again take the host longer than a small problem takes the
GPU. A `Plan` keeps what was found, under a key that holds all it follows from; it keeps no tensor.

What Triton's own switches say (debugging, instrumentation) is looked at when a plan is made, not when it is repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.triton.launching import repeater

if TYPE_CHECKING:
    from primus_turbo_plugin.kernels.triton.attention_launch import Launch

_NUMBERS = (int, float, type(None))
_MOST_PLANS = 256


class Moved:
    """A tensor as far as a descriptor looks, `offset` elements away from `tensor`."""

    __slots__ = ("dtype", "offset", "tensor")

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self.tensor, self.offset, self.dtype = tensor, offset, tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() + self.offset * self.tensor.element_size()


class _Described(NamedTuple):
    """A descriptor to be made again: at which places of the arguments, of which tensor, and all its fields but the base."""

    places: tuple[int, ...]
    source: int
    offset: int | None
    kind: type
    fields: dict[str, Any]

    def of(self, tensor: Tensor) -> Any:
        """The descriptor, without the checks that it passed when the plan was made."""
        made: Any = object.__new__(self.kind)
        made.__dict__.update(self.fields)
        made.base = tensor if self.offset is None else Moved(tensor, self.offset)
        return made


class _Step(NamedTuple):
    """A launch without its tensors."""

    run: Callable[..., Any]
    values: list[Any]
    pointers: tuple[tuple[int, int], ...]
    descriptors: tuple[_Described, ...]

    def repeat(self, tensors: Sequence[Tensor | None]) -> None:
        values = self.values.copy()
        for place, source in self.pointers:
            values[place] = tensors[source]
        for described in self.descriptors:
            made = described.of(tensors[described.source])  # type: ignore[arg-type]
            for place in described.places:
                values[place] = made
        self.run(*values)


class Plan(NamedTuple):
    """The launches of a call.

    Attributes:
        steps: In order.
        splits: What the caller found out on the way: into how many parts the result is summed.
    """

    steps: tuple[_Step, ...]
    splits: int = 1

    def repeat(self, tensors: Sequence[Tensor | None]) -> None:
        """The launches with these tensors, in the order of those that the plan was made with."""
        for step in self.steps:
            step.repeat(tensors)


class Plans:
    """Plans by key: at most 256, then all are forgotten, so that ever new lengths cost no memory."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}
        self.get = self._plans.get
        self.clear = self._plans.clear

    def run_and_keep(
        self,
        key: Hashable,
        tensors: Sequence[Tensor | None],
        make: Callable[[Sequence[Tensor | None]], Iterable[Launch]],
        splits: int = 1,
    ) -> None:
        """Runs what `make` launches with `tensors`; `key` must hold all that `make` looks at, but the tensors' addresses.

        Args:
            key: Of these launches.
            tensors: What they read and write.
            make: Gives them from such tensors, which come as other objects where one is given twice.
            splits: Of the plan.
        """
        tensors = _told_apart(tensors)
        made = [_step(launch, launch.run(), tensors) for launch in make(tensors)]
        steps = tuple(step for step in made if step is not None)
        if len(steps) < len(made):
            return
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = Plan(steps, splits)


def _told_apart(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same, each an object of its own, so that it can be told which one a launch means."""
    seen: set[int] = set()
    found: list[Tensor | None] = []
    for x in tensors:
        found.append(x.detach() if x is not None and id(x) in seen else x)
        seen.add(id(x))
    return found


def _step(launch: Launch, compiled: Any, tensors: Sequence[Tensor | None]) -> _Step | None:
    """The launch to be repeated; None where that cannot be, as for an interpreter or tensors that are not among `tensors`."""
    if compiled is None:
        return None
    sources = {id(x): index for index, x in enumerate(tensors) if x is not None}
    given = launch.args | launch.constants
    values = [given[name] for name in launch.kernel.arg_names]
    pointers: list[tuple[int, int]] = []
    described: dict[int, _Described] = {}
    for place, (name, value) in enumerate(zip(launch.kernel.arg_names, values)):
        if name in launch.constants or isinstance(value, _NUMBERS):
            continue
        base, offset = getattr(value, "base", None), None
        if isinstance(base, Moved):
            base, offset = base.tensor, base.offset
        source = sources.get(id(value if isinstance(value, Tensor) else base))
        if source is None or not hasattr(value, "__dict__"):  # a descriptor that cannot be made without its checks
            return None
        values[place] = None
        if isinstance(value, Tensor):
            pointers.append((place, source))
        else:
            same = described.get(id(value))
            fields = {key: field for key, field in vars(value).items() if key != "base"}
            places = (place,) if same is None else (*same.places, place)
            described[id(value)] = _Described(places, source, offset, type(value), fields)
    return _Step(_runner(launch, compiled), values, tuple(pointers), tuple(described.values()))


def _runner(launch: Launch, compiled: Any) -> Callable[..., Any]:
    """Runs the kernel on arguments in its own order."""
    if torch.version.hip is not None:  # the short way has not been tried there
        return functools.partial(launch.kernel[launch.grid], **launch.options)
    return repeater(compiled, launch.grid)
