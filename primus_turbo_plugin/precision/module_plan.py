"""What one module of the model runs: its operand representations and which kernels may serve it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.precision.attention import AttentionPrecision
from primus_turbo_plugin.precision.communication import Communication
from primus_turbo_plugin.precision.presets import GEMM_OPERANDS
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import LinearPrecision


@dataclass(frozen=True, slots=True)
class KernelOrders(Mapping[str, tuple[str, ...]]):
    """For each op, the backends that may serve it, first choice first; those not listed are not used.

    `orders.get("gemm_nt")` is what `KernelRegistry.select` takes: the op's own order, else `default`, else None, which is the
    registry's own order. Iteration gives the ops that have an order of their own.

    Attributes:
        default: The order of ops that have none of their own.
        by_op: (op, order) pairs, sorted by op.
    """

    default: tuple[str, ...] = ()
    by_op: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def from_value(cls, value: Any, *, where: str = "kernels") -> KernelOrders:
        """An order for every op (`[triton, reference]`, `triton`), or `{gemm: [...], default: [...]}`.

        Raises:
            ConfigError: Not a list of distinct names.
        """
        if not isinstance(value, Mapping):
            return cls(default=_order(value, where))
        orders = {str(op): _order(order, f"{where}.{op}") for op, order in value.items()}
        return cls(default=orders.pop("default", ()), by_op=tuple(sorted(orders.items())))

    def to_value(self) -> list[str] | dict[str, list[str]]:
        """The inverse of `from_value`."""
        if not self.by_op:
            return list(self.default)
        default = {"default": list(self.default)} if self.default else {}
        return {**default, **{op: list(order) for op, order in self.by_op}}

    def __getitem__(self, op: str) -> tuple[str, ...]:
        order = dict(self.by_op).get(op, self.default)
        if not order:
            raise KeyError(op)
        return order

    def __iter__(self) -> Iterator[str]:
        return (op for op, _ in self.by_op)

    def __len__(self) -> int:
        return len(self.by_op)

    def __bool__(self) -> bool:
        return bool(self.default or self.by_op)


def _order(value: Any, where: str) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{where}: must be a backend's name or a list of them, first choice first; got {value!r}")
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}: names a backend twice: {list(names)}")
    return tuple(names)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulePlan:
    """What a module was told to run; `TurboConfig.plan` makes it, the spec hands it to the module's constructor.

    Attributes:
        path: Full path in the model, `decoder.layers.7.mlp.linear_fc1`; layers count globally from 0.
        precision: Operand representations, for linears.
        attention: In which numbers core attention multiplies, for core attention.
        kernels: Backends by op.
        tuning_file: Tuned configurations of those kernels, in front of the shipped ones.
        recipe: The recipe's name, for messages and the start-up report.
        reason: Which setting decided the precision: `precision`, `modules['...']` or `bf16_first_layers`.
        layer_number: Global layer number from 0; None outside the layers.
        communication: Which collectives run under GEMMs, and by which transport.
    """

    path: str = ""
    precision: LinearPrecision = field(default_factory=LinearPrecision.bf16)
    kernels: KernelOrders = field(default_factory=KernelOrders)
    tuning_file: str | None = None
    recipe: str = "bf16"
    reason: str = "default"
    layer_number: int | None = None
    communication: Communication = field(default_factory=Communication)
    attention: AttentionPrecision = field(default_factory=AttentionPrecision)

    @classmethod
    def default(cls) -> ModulePlan:
        """BF16 and the registry's own kernel order: a module built without a configuration."""
        return cls()


def contraction_multiple(*specs: QuantSpec) -> int:
    """What a contraction must be a multiple of, so that no block and no rotation of `specs` is padded."""
    return math.lcm(1, *(spec.contraction_multiple for spec in specs if spec.is_quantized))


def check_shapes(
    plan: ModulePlan, in_features: int, out_features: int, *, tp: int = 1, split: Literal["in", "out"] | None = None
) -> None:
    """Refuses a linear layer whose contractions need padding, where the plan says `padding: refuse`.

    fprop contracts over the local in_features (K), dgrad over the local out_features (N). wgrad contracts over tokens, known only
    when it runs.

    Args:
        plan: The layer's plan.
        in_features: K of the whole layer.
        out_features: N of the whole layer.
        tp: Tensor-parallel size.
        split: Which of the two is divided by `tp`: `out` in a column-parallel, `in` in a row-parallel linear.

    Raises:
        ShapeError: Names the recipe, the module, the multiple, the size and the remedy.
    """
    sizes = {"fprop": ("K", "in", in_features), "dgrad": ("N", "out", out_features)}
    for gemm, (symbol, side, size) in sizes.items():
        local = size
        if split == side and tp > 1:
            if size % tp:
                raise ShapeError(
                    f"{plan.path or 'linear'}: {symbol} = {size} is not divisible by tensor-parallel size {tp}."
                )
            local = size // tp
        multiple = contraction_multiple(*plan.precision.gemm(gemm))
        if plan.precision.padding == "refuse" and local % multiple:
            got = f"{local} ({size} / tensor-parallel size {tp})" if local != size else str(size)
            raise ShapeError(
                f"recipe '{plan.recipe}', {plan.path or 'linear'}: {symbol}, the contraction of {gemm} "
                f"({' and '.join(GEMM_OPERANDS[gemm])}), must be a multiple of {multiple}, got {got}. "
                f"Change the size, set 'padding: pad', or pin this module: modules: {{{plan.path!r}: bf16}}."
            )
