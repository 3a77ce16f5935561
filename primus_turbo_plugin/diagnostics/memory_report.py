"""`primus-turbo memory`, and the memory section of the start-up report: what the linears keep, in the recipe and in BF16."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from primus_turbo_plugin.diagnostics.activation_memory import LayerKeeps, Layout, predict, rest_of_layer, totals
from primus_turbo_plugin.diagnostics.expert_memory import (
    MODELS,
    ExpertSizes,
    add_expert_arguments,
    expert_predictions,
    experts_of_arguments,
    linears_of_experts,
    rest_of_model,
)
from primus_turbo_plugin.diagnostics.model_sizes import ModelSizes, add_size_arguments, linears_of, sizes_of_arguments
from primus_turbo_plugin.diagnostics.tables import ranges, section
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import add_turbo_arguments, resolve
from primus_turbo_plugin.precision.module_plan import ModulePlan

HELP = "what a model's linears keep for backward under a recipe, against BF16 (predicted; needs no GPU)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `memory`."""
    add_size_arguments(parser, MODELS)
    add_expert_arguments(parser)
    parser.add_argument("--in-flight", type=int, default=1, metavar="N", help="microbatches kept at once (%(default)s)")
    parser.add_argument("--sequence-parallel", action="store_true", help="each rank holds its share of the tokens")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--config", dest="turbo_config", metavar="FILE", help="configuration; as --turbo-config")
    add_turbo_arguments(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Runs the command; returns its exit code."""
    config = resolve(args, environ).config
    dense_parts = {name: model for name, (model, _) in MODELS.items()}
    sizes = sizes_of_arguments(args, config, dense_parts)
    experts = experts_of_arguments(args)
    if min(args.tokens, args.tp, args.in_flight) < 1:
        raise ConfigError("--tokens, --tp and --in-flight must be at least 1.")
    if args.sequence_parallel and args.tokens % args.tp:
        raise ConfigError(f"--tokens {args.tokens} must divide by --tp {args.tp} with --sequence-parallel.")
    layout = Layout(tokens=args.tokens, tp=args.tp, sequence_parallel=args.sequence_parallel)
    groups = predict(sizes, layout, plans_of_sizes(config, sizes, experts), expert_predictions(sizes, layout, experts))
    if args.json:
        print(json.dumps(to_plain(sizes, layout, groups, args.in_flight, experts), indent=2))
    else:
        print("\n".join(memory_lines(sizes, layout, groups, in_flight=args.in_flight, experts=experts)))
    return 0


def plans_of_sizes(config: TurboConfig, sizes: ModelSizes, experts: ExpertSizes | None = None) -> list[ModulePlan]:
    """The plans of all linears of a decoder, dense or with experts."""
    count = sizes.num_layers
    dense = linears_of(sizes)
    sparse = dense if experts is None else (*dense[:2], *linears_of_experts(sizes, experts))
    first_dense = 0 if experts is None else experts.first_dense
    return [
        config.plan(linear.path.replace("*", str(layer)), layer, count)
        for layer in range(count)
        for linear in (dense if layer < first_dense else sparse)
    ]


def memory_lines(
    sizes: ModelSizes,
    layout: Layout,
    groups: Sequence[LayerKeeps],
    *,
    in_flight: int = 1,
    experts: ExpertSizes | None = None,
) -> list[str]:
    """The report: one table a group of layers, then the model."""
    lines = [f"Kept for backward on one rank, a microbatch of {layout.tokens} tokens{_split(layout)}; predicted"]
    for group in groups:
        rows = [("linear", "recipe", "input", "BF16", "kept", "")]
        rows += [
            (item.name, item.recipe, str(list(item.shape)), size(item.bf16_nbytes), size(item.nbytes), item.note)
            for item in group.linears
        ]
        rows.append(
            ("together", "", "", size(group.bf16_nbytes), size(group.nbytes), less(group.nbytes, group.bf16_nbytes))
        )
        lines += ["", *section(_which(group).capitalize(), rows)]
    kept, in_bf16 = (in_flight * nbytes for nbytes in totals(groups))
    rest = rest_of_model(sizes, layout, experts, sum(len(group.layers) for group in groups))
    others = in_flight * sum(rest.values())
    model = [
        ("", "BF16", "kept", ""),
        ("linears", size(in_bf16), size(kept), less(kept, in_bf16)),
        ("the rest", size(others), size(others), f"estimate: {', '.join(rest)}; fused kernels"),
        ("together", size(in_bf16 + others), size(kept + others), less(kept + others, in_bf16 + others)),
    ]
    title = f"All {sum(len(group.layers) for group in groups)} layers"
    return [*lines, "", *section(title + (f", {in_flight} microbatches in flight" if in_flight > 1 else ""), model)]


def startup_rows(
    sizes: ModelSizes,
    layout: Layout,
    plans: Iterable[ModulePlan],
    *,
    per_token: bool,
    experts: ExpertSizes | None = None,
) -> list[tuple[str, str]]:
    """A few lines for the start-up report.

    Args:
        sizes: The model.
        layout: A microbatch; where its tokens are not known, one of which everything is a multiple.
        plans: Of the linears.
        per_token: Whether to give figures a token, since the microbatch is not known.
        experts: Of the layers that have them.
    """
    groups = predict(sizes, layout, plans, expert_predictions(sizes, layout, experts))
    kept, in_bf16 = totals(groups)
    if not groups or kept == in_bf16:
        return []

    def figure(nbytes: int) -> str:
        return f"{nbytes / layout.tokens:.0f} bytes a token" if per_token else size(nbytes)

    rows = [(_which(group), f"{figure(group.nbytes)}, in BF16 {figure(group.bf16_nbytes)}") for group in groups]
    return [*rows, ("all layers", f"{figure(kept)}, in BF16 {figure(in_bf16)}: {less(kept, in_bf16)}")]


def to_plain(
    sizes: ModelSizes,
    layout: Layout,
    groups: Sequence[LayerKeeps],
    in_flight: int,
    experts: ExpertSizes | None = None,
) -> dict[str, Any]:
    """Plain data for `--json`; bytes of one microbatch unless said."""
    kept, in_bf16 = totals(groups)
    return {
        "tokens": layout.tokens,
        "tp": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "in_flight": in_flight,
        "layers": [
            {
                "layers": list(group.layers),
                "linears": [
                    {
                        "name": item.name,
                        "recipe": item.recipe,
                        "shape": list(item.shape),
                        "bytes": item.nbytes,
                        "bf16_bytes": item.bf16_nbytes,
                        "note": item.note,
                    }
                    for item in group.linears
                ],
            }
            for group in groups
        ],
        "linears_bytes": kept,
        "linears_bf16_bytes": in_bf16,
        "rest_of_layer_estimate_bytes": rest_of_layer(sizes, layout),
        "rest_of_model_estimate_bytes": rest_of_model(
            sizes, layout, experts, sum(len(group.layers) for group in groups)
        ),
    }


def size(nbytes: int) -> str:
    """Bytes as a reader takes them in."""
    if nbytes < 1024:
        return f"{nbytes} B"
    for unit, scale in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if nbytes < 1024 * scale or unit == "GiB":
            return f"{nbytes / scale:.1f} {unit}"
    raise AssertionError("unreachable")


def less(nbytes: int, of: int) -> str:
    """How much less, in words."""
    if nbytes == of:
        return "the same"
    change = f"{size(abs(of - nbytes))} {'less' if nbytes < of else 'more'}"
    return f"{change}, {nbytes / of:.0%} of BF16" if of else change


def _which(group: LayerKeeps) -> str:
    several = len(group.layers) > 1
    return f"layers {ranges(group.layers)}, each" if several else f"layer {group.layers[0]}"


def _split(layout: Layout) -> str:
    if layout.tp == 1:
        return ""
    return f", tensor-parallel size {layout.tp}" + (", sequence parallel" if layout.sequence_parallel else "")
