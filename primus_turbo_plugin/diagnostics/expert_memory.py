"""What the linears of experts keep for their backward, predicted for tokens that the router spreads evenly.

A rank's experts see as many tokens as the rank routes, each `topk` times: what it sends away comes back from the others. For
wgrad each expert's tokens are padded to whole blocks (`kernels/groups.py`), so many small experts keep more than one large one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from primus_turbo_plugin.diagnostics.activation_memory import (
    Layout,
    LinearKeeps,
    linear_keeps,
    quantized_bytes,
    rest_of_layer,
)
from primus_turbo_plugin.diagnostics.model_sizes import LinearSizes, ModelSizes
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.grouped_operands import depth_multiple, depth_spec
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.recipe import LinearPrecision

_PLAIN_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSizes:
    """The mixture-of-experts layers of a decoder.

    Attributes:
        experts: Routed experts of a layer.
        topk: Experts a token is sent to.
        ffn: Width of one expert.
        shared_ffn: Width of the shared experts together; 0: none.
        first_dense: Layers at the start whose MLP is dense.
        ep, etp: Expert- and expert-tensor-parallel sizes.
        grouped: Whether experts run in grouped GEMMs, or one after the other.
    """

    experts: int
    topk: int
    ffn: int
    shared_ffn: int = 0
    first_dense: int = 0
    ep: int = 1
    etp: int = 1
    grouped: bool = True

    def __post_init__(self) -> None:
        for name in ("experts", "topk", "ffn", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"experts: {name} must be at least 1, got {getattr(self, name)}.")
        if self.topk > self.experts:
            raise ConfigError(f"experts: a token cannot go to {self.topk} of {self.experts} experts.")
        if self.experts % self.ep:
            raise ConfigError(f"experts: {self.experts} experts do not divide over {self.ep} expert-parallel ranks.")
        if self.ffn % self.etp:
            raise ConfigError(f"experts: a width of {self.ffn} does not divide over {self.etp} tensor-parallel ranks.")

    def counts(self, layout: Layout) -> list[int]:
        """Tokens of each local expert."""
        local = self.experts // self.ep
        whole, more = divmod(layout.outside * self.etp * self.topk, local)
        return [whole + (expert < more) for expert in range(local)]


#: Source: the models' published configurations.
MODELS: Mapping[str, tuple[ModelSizes, ExpertSizes]] = {
    "mixtral_8x7b": (
        ModelSizes(num_layers=32, hidden=4096, ffn=14336, heads=32, groups=8, head_dim=128),
        ExpertSizes(experts=8, topk=2, ffn=14336),
    ),
    "qwen3_30b_a3b": (
        ModelSizes(num_layers=48, hidden=2048, ffn=6144, heads=32, groups=4, head_dim=128),
        ExpertSizes(experts=128, topk=8, ffn=768),
    ),
}


def linears_of_experts(sizes: ModelSizes, experts: ExpertSizes, tp: int = 1) -> tuple[LinearSizes, ...]:
    """The linears of an MoE layer's MLP on one rank, of one expert where there are many."""
    gates = 2 if sizes.gated else 1
    widths = {"experts": (experts.ffn, experts.etp), "shared_experts": (experts.shared_ffn, tp)}
    found = []
    for part, (ffn, ranks) in widths.items():
        for name, shape in (
            ("linear_fc1", (gates * ffn // ranks, sizes.hidden)),
            ("linear_fc2", (sizes.hidden, ffn // ranks)),
        ):
            if ffn:
                name = f"{part}.{name}"
                path = f"decoder.layers.*.mlp.{name}"
                found.append(LinearSizes(name=name, path=path, out_features=shape[0], in_features=shape[1]))
    return tuple(found)


def expert_keeps(linear: LinearSizes, plan: ModulePlan, layout: Layout, experts: ExpertSizes) -> LinearKeeps:
    """The prediction for one linear of an MoE layer: of all local experts, or of the shared ones."""
    if linear.name.startswith("shared_experts."):
        alone = linear_keeps(replace(linear, name=linear.name.split(".")[1]), plan.recipe, plan.precision, layout)
        return replace(alone, name=linear.name, norm_nbytes=0)  # the norm stands alone in front of experts
    counts = experts.counts(layout)
    tokens, features = sum(counts), linear.in_features
    precision = plan.precision
    if precision.wgrad_x.is_quantized:
        nbytes = _quantized(precision, features, counts, grouped=experts.grouped)
    else:
        padded = _padded(counts, _multiple(precision)) if experts.grouped else tokens
        nbytes = _PLAIN_BYTES * padded * features
    return LinearKeeps(
        name=linear.name,
        recipe=plan.recipe,
        shape=(tokens, features),
        nbytes=nbytes,
        bf16_nbytes=_PLAIN_BYTES * tokens * features,
        note=f"{len(counts)} expert{'s' if len(counts) > 1 else ''}, even load",
    )


def expert_predictions(
    sizes: ModelSizes, layout: Layout, experts: ExpertSizes | None
) -> dict[str, Callable[[ModulePlan], LinearKeeps]]:
    """For `activation_memory.predict`: the linears of MoE layers by name."""
    if experts is None:
        return {}
    linears = linears_of_experts(sizes, experts, layout.tp)
    return {linear.name: partial(_keeps, linear, layout, experts) for linear in linears}


def rest_of_model(sizes: ModelSizes, layout: Layout, experts: ExpertSizes | None, layers: int) -> dict[str, int]:
    """What else `layers` layers keep together, estimated as `activation_memory.rest_of_layer` does."""
    dense = rest_of_layer(sizes, layout)
    sparse_layers = max(layers - experts.first_dense, 0) if experts else 0
    total = {name: nbytes * layers for name, nbytes in dense.items()}
    if experts is not None:
        gates = 2 if sizes.gated else 1
        routed = sum(experts.counts(layout)) * experts.ffn // experts.etp
        shared = layout.tokens * experts.shared_ffn // layout.tp
        name = "activation function's input"
        total[name] += sparse_layers * (_PLAIN_BYTES * gates * (routed + shared) - dense[name])
    return total


def _keeps(linear: LinearSizes, layout: Layout, experts: ExpertSizes, plan: ModulePlan) -> LinearKeeps:
    return expert_keeps(linear, plan, layout, experts)


def _quantized(precision: LinearPrecision, features: int, counts: list[int], *, grouped: bool) -> int:
    spec = precision.wgrad_x
    if grouped:
        return quantized_bytes(depth_spec(spec), features, _padded(counts, _multiple(precision)))
    return sum(quantized_bytes(spec, features, count) for count in counts)


def _multiple(precision: LinearPrecision) -> int:
    """What grouped GEMMs pad each expert's tokens to."""
    return depth_multiple(*(spec for spec in (precision.wgrad_x, precision.wgrad_dy) if spec.is_quantized))


def _padded(counts: list[int], multiple: int) -> int:
    return sum(-(-count // multiple) * multiple for count in counts)


def add_expert_arguments(group: argparse._ActionsContainer) -> None:
    """Arguments that describe the experts of a model, and how they are spread."""
    for name, meaning in (
        ("experts", "routed experts of a layer"),
        ("topk", "experts a token is sent to"),
        ("expert-ffn", "width of one expert"),
        ("shared-ffn", "width of the shared experts"),
        ("first-dense", "layers at the start whose MLP is dense"),
        ("ep", "expert-parallel size"),
        ("etp", "expert-tensor-parallel size"),
    ):
        otherwise = "1 where left out" if name in ("ep", "etp") else "of --model, or none, where left out"
        group.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}; {otherwise}")


def experts_of_arguments(args: argparse.Namespace) -> ExpertSizes | None:
    """The experts that these arguments describe; None for a dense model.

    Raises:
        ConfigError: Part of the description is missing, or does not divide.
    """
    base = MODELS[args.model][1] if args.model in MODELS else None
    names = {"experts": "experts", "topk": "topk", "ffn": "expert_ffn", "shared_ffn": "shared_ffn"}
    names |= {name: name for name in ("first_dense", "ep", "etp")}
    given = {field: getattr(args, name) for field, name in names.items() if getattr(args, name) is not None}
    if base is not None:
        return replace(base, **given)
    if not given:
        return None
    missing = [names[field] for field in ("experts", "topk", "ffn") if field not in given]
    if missing:
        raise ConfigError(f"experts: give {', '.join('--' + name.replace('_', '-') for name in missing)} as well.")
    return ExpertSizes(**given)
