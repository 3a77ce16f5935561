"""What a layer of experts needs besides its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from primus_turbo_plugin.functional.grouped_linear_kernels import GroupedLinearKernels
from primus_turbo_plugin.functional.linear_call import Rounding, check_contraction, require_random_bits
from primus_turbo_plugin.functional.weight_cache import WeightCache
from primus_turbo_plugin.functional.wgrad import GradientSink
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.rounding import RoundingKey


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedLinearCall:
    """Everything about one call of `grouped_linear` that is not a tensor. Fields are those of `LinearCall`.

    Attributes:
        plan: Precision, padding rule, names for messages.
        kernels: Chosen for the plan, the device and the dtypes at hand.
        sink: Where dw is accumulated, a buffer [experts, out, in]; None returns it to autograd.
        delay: Takes the computation of dw to be run later (it gives dw, or None once dw is in the sink) and returns what
            autograd is to get meanwhile. None runs it in backward.
        cache: Quantised copies of the weights, kept between calls; None quantises in every forward.
        transpose_weight: Make the weights' copies for dgrad even though nothing here asks for a gradient: the first pass of an
            activation recomputation runs so, and the second should find them.
        rounding: Random bits; needed when the recipe rounds stochastically.
    """

    plan: ModulePlan
    kernels: GroupedLinearKernels
    sink: GradientSink | None = None
    delay: Callable[[Callable[[], Tensor | None]], Tensor | None] | None = None
    cache: WeightCache | None = None
    transpose_weight: bool = False
    rounding: Rounding | None = None

    def __post_init__(self) -> None:
        require_random_bits(self.plan, self.where, self.rounding)

    @property
    def where(self) -> str:
        """The module's name for messages."""
        return self.plan.path or "grouped_linear"

    def key(self, operand: str) -> RoundingKey | None:
        """Random bits of x, dy or `w/3` (the fourth expert's weight); None when everything is rounded to nearest."""
        return None if self.rounding is None else self.rounding.key(operand)

    def check_contraction(self, gemm: str, symbol: str, length: int) -> None:
        """Refuses a contraction that would be padded, where the plan says so. wgrad's is padded for every expert, always.

        Raises:
            ShapeError: Names recipe, module, GEMM, multiple, length and remedy.
        """
        check_contraction(self.plan, self.where, gemm, symbol, length)
