"""The linears of a model on one rank, by the model's name or sizes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.vocabulary import nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """A dense decoder.

    Attributes:
        num_layers: Decoder layers.
        hidden: Width of the residual stream.
        ffn: Width of the MLP.
        heads: Attention heads.
        groups: Heads of keys and values.
        head_dim: Width of a head.
        gated: Whether fc1 holds a gate and an up projection (SwiGLU).
    """

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    gated: bool = True

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "ffn", "heads", "groups", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model sizes: {name} must be at least 1, got {getattr(self, name)}.")
        if self.heads % self.groups:
            raise ConfigError(f"model sizes: {self.heads} heads do not divide into {self.groups} key-value groups.")

    @property
    def qkv(self) -> int:
        """Outputs of linear_qkv."""
        return (self.heads + 2 * self.groups) * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSizes:
    """One linear on one rank: w [out, in].

    Attributes:
        name: `linear_qkv`, `linear_proj`, `linear_fc1`, `linear_fc2`.
        path: Path pattern of its modules in a model, with `*` for the layer.
    """

    name: str
    path: str
    out_features: int
    in_features: int


#: Source: the models' published configurations.
MODELS: Mapping[str, ModelSizes] = {
    "llama2_7b": ModelSizes(num_layers=32, hidden=4096, ffn=11008, heads=32, groups=32, head_dim=128),
    "llama2_70b": ModelSizes(num_layers=80, hidden=8192, ffn=28672, heads=64, groups=8, head_dim=128),
    "llama3_8b": ModelSizes(num_layers=32, hidden=4096, ffn=14336, heads=32, groups=8, head_dim=128),
    "llama3_70b": ModelSizes(num_layers=80, hidden=8192, ffn=28672, heads=64, groups=8, head_dim=128),
    "llama3_405b": ModelSizes(num_layers=126, hidden=16384, ffn=53248, heads=128, groups=8, head_dim=128),
}


def model_sizes(name: str, others: Mapping[str, ModelSizes] | None = None) -> ModelSizes:
    """The sizes of a model by name: one of `MODELS`, or of `others`.

    Raises:
        ConfigError: No model of that name; names the nearest.
    """
    known = {**MODELS, **(others or {})}
    if name not in known:
        raise ConfigError(f"--model: no sizes are known of {name!r}{nearest(name, known)} (known: {', '.join(known)})")
    return known[name]


def linears_of(sizes: ModelSizes, tp: int = 1) -> tuple[LinearSizes, ...]:
    """The linears of one layer on one of `tp` tensor-parallel ranks.

    Raises:
        ConfigError: A size does not divide by `tp`.
    """
    heads_out = sizes.heads * sizes.head_dim
    up = 2 * sizes.ffn if sizes.gated else sizes.ffn
    column = {"linear_qkv": (sizes.qkv, sizes.hidden), "linear_fc1": (up, sizes.hidden)}
    row = {"linear_proj": (sizes.hidden, heads_out), "linear_fc2": (sizes.hidden, sizes.ffn)}
    for name, split in [("linear_qkv", sizes.groups), ("linear_fc1", sizes.ffn)]:
        if split % tp:
            raise ConfigError(f"--tp {tp}: {name} cannot be split, {split} does not divide by it.")
    found = []
    for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
        part = "self_attention" if name in ("linear_qkv", "linear_proj") else "mlp"
        out_features, in_features = column[name] if name in column else row[name]
        if name in column:
            out_features //= tp
        else:
            in_features //= tp
        path = f"decoder.layers.*.{part}.{name}"
        found.append(LinearSizes(name=name, path=path, out_features=out_features, in_features=in_features))
    return tuple(found)


def override(sizes: ModelSizes | None, **given: int | bool | None) -> ModelSizes:
    """Sizes with single ones replaced; None leaves one as it is. Without a base, all but `head_dim` and `groups` are required.

    Raises:
        ConfigError: A size is missing, or does not divide.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if sizes is not None:
        return replace(sizes, **values)  # type: ignore[arg-type]
    missing = [name for name in ("hidden", "ffn", "heads") if name not in values]
    if missing:
        raise ConfigError(f"model sizes: give --model, or {', '.join('--' + name for name in missing)} as well.")
    values.setdefault("groups", values["heads"])
    if "head_dim" not in values:
        hidden, heads = values["hidden"], values["heads"]
        if heads < 1 or hidden % heads:
            raise ConfigError(f"model sizes: a width of {hidden} does not divide into {heads} heads. Give --head-dim.")
        values["head_dim"] = hidden // heads
    values.setdefault("num_layers", 1)
    return ModelSizes(**values)  # type: ignore[arg-type]


def add_size_arguments(group: argparse._ActionsContainer, others: Iterable[str] = ()) -> None:
    """Arguments that describe a model and a microbatch; models named `others` are known beside `MODELS`."""
    group.add_argument("--model", metavar="NAME", help=f"a model's linears: {', '.join([*MODELS, *others])}")
    for name, meaning in (
        ("hidden", "width of the residual stream"),
        ("ffn", "width of the MLP"),
        ("heads", "attention heads"),
        ("groups", "heads of keys and values"),
        ("head-dim", "width of a head"),
        ("num-layers", "decoder layers"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}; of --model where left out")
    group.add_argument("--no-gate", action="store_true", help="fc1 has no gate projection")
    group.add_argument("--tokens", type=int, default=8192, metavar="N", help="tokens of a microbatch (%(default)s)")
    group.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size (%(default)s)")


def sizes_of_arguments(
    args: argparse.Namespace, config: TurboConfig, models: Mapping[str, ModelSizes] | None = None
) -> ModelSizes:
    """The model that these arguments describe, one layer where neither they nor its name say how many; `models` are known beside
    `MODELS`.

    Raises:
        ConfigError: As `model_sizes` and `override`; or the configuration tells layers apart, and their number is unknown.
    """
    if (
        not args.model
        and args.num_layers is None
        and (config.bf16_first_layers or config.bf16_last_layers or config.modules)
    ):
        raise ConfigError(
            "model sizes: the configuration tells layers apart (bf16_first_layers, bf16_last_layers or modules). "
            "Give --num-layers as well."
        )
    base = model_sizes(args.model, models) if args.model else None
    given = {name: getattr(args, name) for name in ("hidden", "ffn", "heads", "groups", "head_dim", "num_layers")}
    return override(base, **given, gated=False if args.no_gate else None)
