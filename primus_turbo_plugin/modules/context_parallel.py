"""What Megatron's configuration says about context parallelism, as core attention needs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.functional.context_parallel import (
    ContextParallel,
    parse_algorithm,
    reason_against_dealing_out,
)
from primus_turbo_plugin.modules.attention_settings import AttentionSettings


def context_parallel(
    cp_comm_type: str | None, groups: ProcessGroupCollection, settings: AttentionSettings, where: str
) -> ContextParallel:
    """The ranks that share a layer's sequences, and how they attend.

    Args:
        cp_comm_type: As the layer's constructor got it; None is Megatron's default, p2p.
        groups: With `cp`, and for a2a+p2p with `hcp`, or else Megatron's global ones.
        settings: The layer's heads.
        where: The layer.

    Raises:
        ConfigError: No such algorithm, no groups for it, or heads that it can't deal out.
    """
    try:
        algorithm = parse_algorithm(cp_comm_type)
        levels = _levels(groups) if algorithm == "a2a+p2p" else None
        context = ContextParallel(group=groups.cp, algorithm=algorithm, levels=levels)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    dealt = context.all_to_all_group
    reason = None if dealt is None else reason_against_dealing_out(settings.heads, settings.groups, dealt.size())
    if reason is not None:
        raise ConfigError(f"{where}: cp_comm_type={cp_comm_type}: {reason}")
    return context


def for_batch(own: ContextParallel | None, packed: PackedSeqParams | None, where: str) -> ContextParallel | None:
    """The ranks that share this batch: a batch may bring its own group, or none (dynamic context parallelism).

    Raises:
        ConfigError: The batch's group is missing, or the layer's algorithm cannot use it.
    """
    if packed is None or (packed.cp_group is None and packed.local_cp_size is None):
        return own
    if packed.cp_group is None:
        if packed.local_cp_size != 1:
            raise ConfigError(
                f"{where}: packed_seq_params.local_cp_size={packed.local_cp_size} needs a cp_group beside it."
            )
        return None
    if own is None:
        return ContextParallel(group=packed.cp_group)
    if own.algorithm == "a2a+p2p":
        raise ConfigError(
            f"{where}: packed_seq_params.cp_group has {packed.cp_group.size()} ranks of its own and cp_comm_type=a2a+p2p needs "
            "two levels of groups. Set cp_comm_type to p2p, a2a or all_gather."
        )
    return replace(own, group=packed.cp_group)


def _levels(groups: ProcessGroupCollection) -> tuple[Any, Any] | None:
    """(all-to-all group, ring) of a2a+p2p.

    Raises:
        ConfigError: There are not two of them.
    """
    found = getattr(groups, "hcp", None) or parallel_state.get_hierarchical_context_parallel_groups(
        check_initialized=False
    )
    if not found:
        return None
    if len(found) != 2:
        raise ConfigError(
            f"cp_comm_type=a2a+p2p has two levels and hierarchical_context_parallel_sizes {len(found)}: "
            f"{[group.size() for group in found]}. Set it to [a2a size, p2p size]."
        )
    return found[0], found[1]
