"""What a linear layer needs besides its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group, group_size
from primus_turbo_plugin.communication.overlap import Overlap
from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.functional.weight_cache import WeightCache
from primus_turbo_plugin.functional.wgrad import GradientSink
from primus_turbo_plugin.precision.module_plan import ModulePlan, contraction_multiple
from primus_turbo_plugin.precision.presets import GEMM_OPERANDS
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """How a layer is split over a group of ranks, and which collectives it does itself.

    Attributes:
        mode: `column`: each rank holds rows of the weight; `row`: columns of it; `none`: all of it, and no collective.
        group: The ranks; None is a group of one.
        sequence_parallel: Outside the layer each rank holds its share of the tokens: column gathers x, row scatters y.
        reduce: Without sequence parallelism, sum dx (column) or y (row) over the group. False leaves the partial sums
            to the caller, as Megatron's experts and its `disable_grad_reduce` do.
        size: Ranks of the group.
        gathers_input: x arrives as this rank's tokens and is needed whole; dx leaves summed, as this rank's tokens.
        scatters_output: y leaves summed, as this rank's tokens; dy arrives so and is needed whole.

    Raises:
        ConfigError: `none` with a group, or sequence parallelism without one of the other two.
    """

    mode: Literal["none", "column", "row"] = "none"
    group: Group | None = None
    sequence_parallel: bool = False
    reduce: bool = True
    size: int = field(init=False)
    gathers_input: bool = field(init=False)
    scatters_output: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.mode not in ("none", "column", "row"):
            raise ConfigError(f"TensorParallel: mode must be 'none', 'column' or 'row', got {self.mode!r}.")
        if self.mode == "none" and (self.group is not None or self.sequence_parallel):
            raise ConfigError(
                "TensorParallel: mode 'none' has no collective; pass neither a group nor sequence_parallel."
            )
        size = group_size(self.group)
        split_tokens = self.sequence_parallel and size > 1
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "gathers_input", split_tokens and self.mode == "column")
        object.__setattr__(self, "scatters_output", split_tokens and self.mode == "row")

    def sums(self, mode: str) -> bool:
        """Whether an all-reduce of the whole tensor is due in a layer of that mode."""
        return self.mode == mode and self.reduce and not self.sequence_parallel and self.size > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapUse:
    """Which collectives of a layer run under GEMMs.

    Attributes:
        overlap: Of the layer's group.
        gather: All-gathers in front of a GEMM (fprop of column, dgrad of row).
        scatter: Reduce-scatters behind fprop (row).
        bulk_gather: AG(x) under dgrad (column).
        bulk_scatter: RS(dx) under wgrad (column).
        scatter_dgrad: RS(dx) behind dgrad, chunk by chunk, instead of under wgrad.
        note: Told (what, why) where a collective is not overlapped.
    """

    overlap: Overlap
    gather: bool = True
    scatter: bool = True
    bulk_gather: bool = True
    bulk_scatter: bool = True
    scatter_dgrad: bool = False
    note: Callable[[str, str], None] = lambda what, why: None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """The random bits of one forward and its backward, for recipes that round stochastically.

    Attributes:
        seed: The recipe's rounding seed.
        draw: A number drawn for this forward.
        rank: Global rank.
        path: The module's path: layers must not share their bits.
    """

    seed: int
    draw: int
    rank: int
    path: str

    def key(self, operand: str) -> RoundingKey:
        """The key of x, w or dy."""
        digest = hashlib.blake2b(f"{self.path}/{operand}".encode(), digest_size=8).digest()
        return RoundingKey(seed=self.seed, draw=self.draw, tensor=int.from_bytes(digest, "little"), rank=self.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCall:
    """Everything about one call of `linear` that is not a tensor.

    Attributes:
        plan: Precision, padding rule, names for messages.
        kernels: Chosen for the plan, the device and the dtypes at hand.
        parallel: Split and collectives.
        overlap: Which of them run under GEMMs, with sequence parallelism; None: none.
        sink: Where dw is accumulated; None returns it to autograd.
        delay: Takes the computation of dw to be run later (it gives dw, or None once dw is in the sink) and returns what
            autograd is to get meanwhile. None runs it in backward.
        defer: Asked in backward, with dy [tokens, out]: True takes dw over altogether (deferred embedding gradients).
        cache: Quantised copies of the weight, kept between calls; None quantises in every forward.
        transpose_weight: Make the weight's copy for dgrad even though nothing here asks for a gradient: the first pass of an
            activation recomputation runs so, and the second should find it.
        rounding: Random bits; needed when the recipe rounds stochastically.
        x_copies: x's quantised copies, made by whoever computed x (functional/fused_quantize.py); x itself is then not read.
        dy_sum: Takes the sum of dy over tokens, fp32 [out], from a kernel that quantises dy.
    """

    plan: ModulePlan
    kernels: LinearKernels
    parallel: TensorParallel = field(default_factory=TensorParallel)
    overlap: OverlapUse | None = None
    sink: GradientSink | None = None
    delay: Callable[[Callable[[], Tensor | None]], Tensor | None] | None = None
    defer: Callable[[Tensor], bool] | None = None
    cache: WeightCache | None = None
    transpose_weight: bool = False
    rounding: Rounding | None = None
    x_copies: tuple[QuantizedTensor | None, QuantizedTensor | None] | None = None
    dy_sum: list[Tensor] | None = None

    def __post_init__(self) -> None:
        if self.kernels.is_stochastic:
            require_random_bits(self.plan, self.where, self.rounding)

    @property
    def where(self) -> str:
        """The module's name for messages."""
        return self.plan.path or "linear"

    def key(self, operand: str) -> RoundingKey | None:
        """Random bits of x, w or dy; None when everything is rounded to nearest."""
        return None if self.rounding is None else self.rounding.key(operand)

    def check_contraction(self, gemm: str, symbol: str, length: int) -> None:
        """Refuses a contraction that would be padded, where the plan says so.

        Raises:
            ShapeError: Names recipe, module, GEMM, multiple, length and remedy.
        """
        check_contraction(self.plan, self.where, gemm, symbol, length)


def require_random_bits(plan: ModulePlan, where: str, rounding: Rounding | None) -> None:
    """Refuses a call that has no random bits and needs them.

    Raises:
        ConfigError: Names the module (`where`), the recipe and the remedy.
    """
    if plan.precision.is_stochastic and rounding is None:
        raise ConfigError(
            f"{where}: recipe {plan.recipe!r} rounds stochastically and needs random bits, got rounding=None. "
            "Draw a number for this forward and pass Rounding(seed=..., draw=..., rank=..., path=...)."
        )


def check_contraction(plan: ModulePlan, where: str, gemm: str, symbol: str, length: int) -> None:
    """Refuses a contraction that would be padded, where the plan says so.

    Raises:
        ShapeError: Names recipe, module (`where`), GEMM, multiple, length and remedy.
    """
    precision = plan.precision
    if precision.padding != "refuse":
        return  # most plans pad; computing the multiples takes 5 us of a quantised layer's call
    multiple = contraction_multiple(*precision.gemm(gemm))
    if length % multiple:
        raise ShapeError(
            f"recipe '{plan.recipe}', {where}: {symbol}, the contraction of {gemm} "
            f"({' and '.join(GEMM_OPERANDS[gemm])}), must be a multiple of {multiple}, got {length}. "
            f"Change the size, set 'padding: pad', or pin this module: modules: {{{where!r}: bf16}}."
        )
