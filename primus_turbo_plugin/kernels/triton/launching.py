"""Launching kernels for little host time: what is alike in two calls is decided in the first.

Triton's JIT looks at every argument of every call: dtype and alignment of a tensor, whether an integer is 1 or a multiple of 16.
With 40 arguments that takes longer on the host than a small kernel takes on the GPU. So it is asked once for tensors that are
alike in all of this (`facts`), and the answer is kept: sizes of outputs, grid, constants, and a `Launcher`; tensors never are.

What Triton's own switches say (debugging, instrumentation, hooks before a kernel's run) is looked at in the first launch only.
Its hooks around launches, which profilers use, are called in every one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo  # torch.compiler.disable would import dynamo at once, a second of start-up

_ON_ROCM = torch.version.hip is not None
_MOST_ANSWERS = 1 << 12
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """The function, which torch.compile calls and does not trace: addresses decide here, and a traced tensor has none."""
    outside_graphs = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return outside_graphs(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


def facts(x: torch.Tensor | None) -> Hashable:
    """What kernels are compiled for, of one tensor: dtype, shape, strides, alignment; on ROCm also whether it is under 2 GiB."""
    if x is None:
        return None
    if _ON_ROCM:
        small = x.untyped_storage().nbytes() < 1 << 31
        return x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.device, small
    return x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.device


def facts_but(x: torch.Tensor, dim: int) -> Hashable:
    """`facts` without the size of a dimension of a matrix, for kernels that are told it by other tensors: experts' tokens."""
    small = not _ON_ROCM or x.untyped_storage().nbytes() < 1 << 31
    return x.dtype, x.shape[1 - dim], x.stride(), x.data_ptr() & 15, x.device, small


class Answers(dict[Hashable, V]):
    """Answers to questions that come again. They depend on nothing but the question, so that losing one costs only time."""

    def keep(self, question: Hashable, answer: V) -> V:
        if len(self) >= _MOST_ANSWERS:  # experts have another number of tokens every time
            self.clear()
        self[question] = answer
        return answer


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the current one; free of charge where it is. A graph of torch.compile may run where another one is."""
    here = torch.cuda.current_device() == device.index and not torch.compiler.is_compiling()
    return _HERE if here else torch.cuda.device(device)


_HERE = nullcontext()


def repeater(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Launches what Triton's JIT compiled on a grid, given all arguments in the kernel's order, constants among them."""
    launch: Callable[..., None] = compiled[(*grid, 1, 1)[:3]]
    return launch


class Launcher:
    """One kernel with its grid and constants: launched by Triton's JIT once, from then on by the compiled kernel that came of it.

    One Launcher serves arguments that are alike in all that a kernel is compiled for, on one device. Integers that differ from
    call to call are in the kernel's `do_not_specialize`.

    Args:
        kernel: A `triton.jit` or `gluon.jit` function whose constants come last.
        grid: Programs along each axis.
        constants: Values of its constants, by name.
        options: Such as `num_warps`.
        views: Place of a tensor among the arguments -> the dtype as which the kernel reads it. A compiled kernel takes addresses,
            so that only the first launch needs views.
    """

    __slots__ = ("_constants", "_launch", "_options", "_tail", "_views", "grid", "kernel")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        views: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self._constants = dict(constants)
        self._options = dict(options)
        self._views = dict(views or {})
        self._tail: tuple[Any, ...] = ()
        self._launch: Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        if self._launch is not None:
            self._launch(*args, *self._tail)
            return
        given = list(args)
        for place, dtype in self._views.items():
            if given[place] is not None:
                given[place] = given[place].view(dtype)
        compiled = self.kernel[self.grid](*given, **self._constants, **self._options)
        if compiled is not None:  # Triton's interpreter compiles nothing, torch.compile does so later
            names = self.kernel.arg_names
            self._tail = tuple(self._constants[name] for name in names[len(names) - len(self._constants) :])
            self._launch = repeater(compiled, self.grid)
