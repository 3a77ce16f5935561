"""What the linears of a model keep for their backward, predicted from sizes and recipes, against the same model in BF16.

For wgrad a linear keeps its input once, as `functional/linear.py` says:

    quantised, columnwise    codes and scales of [in, tokens], tokens padded to the block: MXFP4 0.53 bytes an element, MXFP8 1.03
    unquantised              the input itself, 2 bytes an element; nothing where another module keeps that very tensor anyway

Column-parallel linears under sequence parallelism keep this rank's tokens only; where blocks would lie across ranks (FP8 with one
scale for all tokens) they keep the BF16 input. A norm in front keeps its own input and one fp32 factor a token, in any recipe.

`saved_tensors.py` measures the same on a real forward; tests hold the two equal, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from primus_turbo_plugin.communication.quantized import shards_align
from primus_turbo_plugin.diagnostics.model_sizes import LinearSizes, ModelSizes, linears_of
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import LinearPrecision

_COLUMN = ("linear_qkv", "linear_fc1")
_KEPT_BY_ANOTHER = {"linear_proj": "core attention"}
"""Linears whose unquantised input another module keeps too: attention's output, for its own backward."""
_PLAIN_BYTES, _FACTOR_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a microbatch lies on a rank.

    Attributes:
        tokens: Of a microbatch, before tensor parallelism splits them.
        tp: Tensor-parallel size.
        sequence_parallel: Whether each rank holds its share of the tokens outside attention and MLP.
    """

    tokens: int
    tp: int = 1
    sequence_parallel: bool = False

    @property
    def outside(self) -> int:
        """Tokens of this rank outside the tensor-parallel regions."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearKeeps:
    """What one linear keeps on one rank.

    Attributes:
        name: `linear_fc1`.
        recipe: What it runs.
        shape: [tokens, in] of the input it keeps.
        nbytes: In that recipe.
        bf16_nbytes: In BF16.
        norm_nbytes: Of the norm that is part of it, in any recipe.
        note: Why a figure is not what the format says.
    """

    name: str
    recipe: str
    shape: tuple[int, int]
    nbytes: int
    bf16_nbytes: int
    norm_nbytes: int = 0
    note: str = ""


def linear_keeps(linear: LinearSizes, recipe: str, precision: LinearPrecision, layout: Layout) -> LinearKeeps:
    """The prediction for one linear under a recipe."""
    column = linear.name in _COLUMN
    tokens = layout.outside if column else layout.tokens
    gathers = column and layout.sequence_parallel and layout.tp > 1
    shape = (tokens, linear.in_features)
    spec = precision.wgrad_x
    another = _KEPT_BY_ANOTHER.get(linear.name)
    plain = 0 if another else _PLAIN_BYTES * tokens * linear.in_features
    nbytes, note = plain, f"{another} keeps it" if another else ""
    if spec.is_quantized:
        if not gathers or shards_align(spec, (linear.in_features, tokens), "contraction"):
            nbytes, note = (
                quantized_bytes(spec, linear.in_features, tokens),
                f"{another} keeps the BF16 one" if another else "",
            )
        else:
            note = "kept in BF16: its scales span the tokens of all ranks"
    norm = _PLAIN_BYTES * layout.outside * linear.in_features + _FACTOR_BYTES * layout.outside if column else 0
    return LinearKeeps(
        name=linear.name, recipe=recipe, shape=shape, nbytes=nbytes, bf16_nbytes=plain, norm_nbytes=norm, note=note
    )


def quantized_bytes(spec: QuantSpec, outer: int, contraction: int) -> int:
    """Bytes of codes and scales of an operand [outer, contraction]."""
    rows, columns = spec.scale_shape(outer, contraction)
    codes = outer * spec.padded(contraction) // spec.element_type.codes_per_byte
    return codes + rows * columns * (1 if spec.is_mx else 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKeeps:
    """Layers that run alike.

    Attributes:
        layers: Their numbers, from 0.
        linears: What each linear of one of them keeps.
    """

    layers: tuple[int, ...]
    linears: tuple[LinearKeeps, ...]

    @property
    def nbytes(self) -> int:
        """The linears of one layer, norms apart."""
        return sum(item.nbytes for item in self.linears)

    @property
    def bf16_nbytes(self) -> int:
        """The same in BF16."""
        return sum(item.bf16_nbytes for item in self.linears)


def predict(
    sizes: ModelSizes,
    layout: Layout,
    plans: Iterable[ModulePlan],
    others: Mapping[str, Callable[[ModulePlan], LinearKeeps]] | None = None,
) -> list[LayerKeeps]:
    """What the linears of every decoder layer keep on one rank, for one microbatch; layers that keep the same together.

    Args:
        sizes: A dense decoder, or the dense part of one.
        layout: How a microbatch lies on a rank.
        plans: Of the linears of the decoder's layers; those of other modules are passed over.
        others: Linears of other kinds of layers, `experts.linear_fc1` -> the prediction under a plan (`expert_memory`).
    """
    linears: dict[str, Callable[[ModulePlan], LinearKeeps]] = {
        linear.name: partial(_keeps, linear, layout) for linear in linears_of(sizes, layout.tp)
    }
    linears |= others or {}
    by_layer: dict[int, dict[str, LinearKeeps]] = {}
    for plan in plans:
        place = re.fullmatch(r"decoder\.layers\.(\d+)\.(?:self_attention|mlp)\.([\w.]+)", plan.path)
        if place and place[2] in linears:
            by_layer.setdefault(int(place[1]), {})[place[2]] = linears[place[2]](plan)
    groups: dict[tuple[LinearKeeps, ...], list[int]] = {}
    for layer, found in sorted(by_layer.items()):
        groups.setdefault(tuple(found[name] for name in linears if name in found), []).append(layer)
    return [LayerKeeps(layers=tuple(layers), linears=kept) for kept, layers in groups.items()]


def _keeps(linear: LinearSizes, layout: Layout, plan: ModulePlan) -> LinearKeeps:
    return linear_keeps(linear, plan.recipe, plan.precision, layout)


def totals(groups: Sequence[LayerKeeps]) -> tuple[int, int]:
    """(bytes, bytes in BF16) of the linears of all layers."""
    return (
        sum(len(group.layers) * group.nbytes for group in groups),
        sum(len(group.layers) * group.bf16_nbytes for group in groups),
    )


def rest_of_layer(sizes: ModelSizes, layout: Layout) -> dict[str, int]:
    """What else a layer keeps, whatever the recipe: an estimate for fused kernels (rotary, attention, SwiGLU), not measured."""
    tokens, tp = layout.tokens, layout.tp
    heads, groups = sizes.heads // tp, max(sizes.groups // tp, 1)
    up = (2 if sizes.gated else 1) * sizes.ffn // tp
    return {
        "norm inputs": 2 * (_PLAIN_BYTES * sizes.hidden + _FACTOR_BYTES) * layout.outside,
        "q, k, v, output, log-sum-exp": tokens * (_PLAIN_BYTES * (2 * heads + 2 * groups) * sizes.head_dim + 4 * heads),
        "activation function's input": _PLAIN_BYTES * tokens * up,
    }
