"""Distributed checkpoints of grouped experts: each expert by itself, as Megatron's SequentialMLP and TEGroupedMLP write it.

All local experts are one tensor here and a slice each there. A factory cuts the tensor up when a checkpoint is written, and puts
the slices together when one is read; Megatron's optimizers apply it to their own state as well. So what one kind of experts
wrote, another reads, at any expert- or tensor-parallel size that Megatron itself can change to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

from primus_turbo_plugin.errors import UnsupportedError

Offsets = tuple[tuple[int, int, int], ...]
"""(axis, this part, parts) of the axes that lie in front of a tensor's own, as Megatron's checkpoints name them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlace:
    """Where this rank's experts stand in the model.

    Attributes:
        num_local: Experts of this rank.
        ep_rank, ep_size: Of the expert-parallel group.
        tp_rank, tp_size: Of the expert-tensor-parallel group.
        dp_rank: Among the ranks that hold the same experts.
        apart: Each expert is to have a key of its own (Megatron's `singleton_local_shards`).
    """

    num_local: int
    ep_rank: int
    ep_size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    apart: bool = False

    @property
    def experts(self) -> range:
        """Numbers of this rank's experts in the model."""
        first = self.ep_rank * self.num_local
        return range(first, first + self.num_local)

    def offsets(self, expert: int, before: Offsets) -> Offsets:
        """Offsets of an expert's own tensors."""
        if self.apart:
            return before
        return (*before, (len(before), expert, self.num_local * self.ep_size))

    def key(self, common: str, rest: str, expert: int) -> str:
        """Key of an expert's `rest` (`linear_fc1.weight`), where all experts' is `common`, which ends in it."""
        assert common.endswith(rest), (common, rest)
        return f"{common.removesuffix(rest)}{expert}.{rest}" if self.apart else common


def sharded_linear(
    linear: Any, name: str, prefix: str, before: Offsets, place: ExpertPlace, *, gated: bool
) -> dict[str, ShardedTensorFactory | ShardedObject]:
    """The sharded state dict of a grouped linear.

    Args:
        linear: A `TurboGroupedLinear`.
        name: `linear_fc1` or `linear_fc2`.
        prefix: Of the experts module, `...mlp.experts.`.
        before: Offsets of axes in front, the layer's.
        place: Where the experts stand.
        gated: Whether a weight holds gate, then up, each spread over the tensor-parallel ranks.
    """
    sharded: dict[str, ShardedTensorFactory | ShardedObject] = {}
    for kind in ("weight", "bias"):
        parameter = getattr(linear, kind)
        if parameter is None:
            continue
        dim = {"weight": {"out": 0, "in": 1}, "bias": {"out": 0}}[kind].get(linear.split)
        replica = (0, 0 if dim is not None else place.tp_rank, place.dp_rank)
        cut = partial(_cut, rest=f"{name}.{kind}", before=before, place=place, dim=dim, gated=gated)
        sharded[f"{prefix}{name}.{kind}"] = ShardedTensorFactory(
            f"{prefix}experts.{name}.{kind}", parameter, cut, partial(_join, gated=gated), replica
        )
    for index, expert in enumerate(place.experts):
        key = place.key(f"{prefix}experts.{name}._extra_state", f"{name}._extra_state", expert)
        sharded[f"{prefix}{name}._extra_state{index or ''}"] = make_sharded_object_for_checkpoint(
            None, key, place.offsets(expert, before), (0, place.tp_rank, place.dp_rank)
        )
    return sharded


@torch.no_grad()
def _cut(
    key: str,
    every: Tensor,
    replica_id: Any,
    flattened_range: slice | None,
    *,
    rest: str,
    before: Offsets,
    place: ExpertPlace,
    dim: int | None,
    gated: bool,
) -> list[list[ShardedTensor]]:
    """[experts, ...] -> for each expert its tensor, or gate and up. The key has been rewritten: by the block, for its layers, and
    by an optimizer.
    """
    if flattened_range is not None:
        raise UnsupportedError(
            f"{key}: an optimizer's state cut anywhere (distrib_optim_sharding_type 'fully_sharded_model_space') cannot be "
            "divided among grouped experts. Use 'fully_reshardable' or 'dp_reshardable', or leave --moe-grouped-gemm out."
        )
    parts = []
    for expert, one in zip(place.experts, every.unbind(0), strict=True):
        name, offsets = place.key(key, rest, expert), place.offsets(expert, before)
        pieces = one.chunk(2, dim=0) if gated else (one,)
        parts.append(
            [
                _piece(name, piece, number, len(pieces), offsets, place, dim, replica_id)
                for number, piece in enumerate(pieces)
            ]
        )
    return parts


def _piece(
    key: str,
    piece: Tensor,
    number: int,
    pieces: int,
    offsets: Offsets,
    place: ExpertPlace,
    dim: int | None,
    replica_id: Any,
) -> ShardedTensor:
    """One tensor of one expert; of a gated weight, gate (0) and up (1) lie one behind the other over all ranks."""
    own: Offsets = ()
    if dim is not None:
        part, parts = place.tp_rank, place.tp_size
        if pieces > 1 and place.apart:
            key += ("_w", "_v")[number]
        elif pieces > 1:
            part, parts = number * place.tp_size + place.tp_rank, pieces * place.tp_size
        own = ((len(offsets) + dim, part, parts),)
    return ShardedTensor.from_rank_offsets(
        key, piece, *offsets, *own, replica_id=replica_id, prepend_axis_num=len(offsets)
    )


@torch.no_grad()
def _join(parts: list[list[Tensor]], *, gated: bool) -> Tensor:
    """The inverse of `_cut`."""
    return torch.stack([torch.cat(pieces, dim=0) if gated else pieces[0] for pieces in parts])


def gather_experts(state_dict: dict[str, Any], prefix: str, names: tuple[str, ...], num_experts: int) -> None:
    """Gives a plain state dict of SequentialMLP or TEGroupedMLP the keys of grouped experts, in place; ours is left as it is.

    Args:
        state_dict: Being loaded.
        prefix: Of the experts module.
        names: Of its linears.
        num_experts: Local experts.
    """
    for name in names:
        for kind in ("weight", "bias"):
            for one in (f"{prefix}local_experts.{{}}.{name}.{kind}", f"{prefix}{name}.{kind}{{}}"):
                keys = [one.format(expert) for expert in range(num_experts)]
                if all(key in state_dict for key in keys):
                    state_dict[f"{prefix}{name}.{kind}"] = torch.stack([state_dict.pop(key) for key in keys])
        for key in [key for key in state_dict if key.startswith(prefix) and f"{name}._extra_state" in key]:
            del state_dict[key]  # what another backend kept there is of no use here
