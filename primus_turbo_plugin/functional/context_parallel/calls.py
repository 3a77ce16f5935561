"""A scheduled call as a kernel takes it: slices of this rank's queries and of the keys at hand, and options to match."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from primus_turbo_plugin.functional.context_parallel.messages import token_index
from primus_turbo_plugin.functional.context_parallel.schedule import Call, Limits, Step
from primus_turbo_plugin.functional.context_parallel.sequences import places, sequences_of
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, Dropout, Packing


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Arguments of one kernel call.

    Attributes:
        rows: Of this rank's queries.
        keys: Of the keys at hand.
        options: The mask is in terms of these slices.
        bias: The slice of the bias; None without one.
        columns: int64, the keys' places in the natural order: where they stand in a mask tensor or bias. None where neither is.
    """

    rows: slice
    keys: slice
    options: AttentionOptions
    bias: Tensor | None
    columns: Tensor | None

    def add_to_bias(self, whole: Tensor, part: Tensor) -> None:
        """Adds the gradient of the bias's slice to the whole's."""
        target = whole[:, :, self.rows] if whole.shape[2] > 1 else whole
        if whole.shape[3] > 1:
            assert self.columns is not None
            target.index_add_(3, self.columns, part)
        else:
            target += part


@dataclass(frozen=True, slots=True)
class CallMaker:
    """Makes the kernel calls of a rank's steps.

    Attributes:
        options: Of the whole problem.
        queries: This rank's tokens.
        keys: Likewise.
        rank: In the ring.
        size: Of the ring.
        device: Of the tensors.
    """

    options: AttentionOptions
    queries: int
    keys: int
    rank: int
    size: int
    device: torch.device

    def of(self, step: Step, bias: Tensor | None) -> Iterator[KernelCall]:
        """The calls of a step. Calls of packed sequences with one block need no lengths."""
        mask = self.options.mask
        indexed = bias is not None or mask.masked is not None
        for call in step.calls:
            rows = slice(call.blocks[0].q_start, call.blocks[-1].q_stop)
            keys = slice(call.blocks[0].k_start, call.blocks[-1].k_stop)
            columns = self._key_places(step)[keys].long() if indexed else None
            packing = _packing(call, self.device) if len(call.blocks) > 1 else None
            masked = None if mask.masked is None else _slice(mask.masked, rows, columns)
            options = replace(
                self.options, mask=_mask(call.limits, masked, packing), dropout=self._dropout(step, rows, keys)
            )
            yield KernelCall(rows, keys, options, None if bias is None else _slice(bias, rows, columns), columns)

    def _dropout(self, step: Step, rows: slice, keys: slice) -> Dropout | None:
        if self.options.dropout is None:
            return None
        return replace(
            self.options.dropout, query_places=self._query_places()[rows], key_places=self._key_places(step)[keys]
        )

    def _query_places(self) -> Tensor:
        sequences = sequences_of(self.options.mask.packing, self.queries, self.size, "q")
        return places(sequences, self.queries, self.rank, self.size, self.device)

    def _key_places(self, step: Step) -> Tensor:
        """Of the keys at hand in a step."""
        sequences = sequences_of(self.options.mask.packing, self.keys, self.size, "k")
        found = places(sequences, self.keys, step.owner, self.size, self.device)
        return found if step.owner == self.rank else found[token_index(step.incoming, self.device)]


def _mask(limits: Limits, masked: Tensor | None, packing: Packing | None) -> AttentionMask:
    left, right = limits
    window = (-1 if left is None else left, -1 if right is None or right == 0 else right)
    return AttentionMask(causal=right == 0, window=window, masked=masked, packing=packing)


def _slice(x: Tensor, rows: slice, columns: Tensor | None) -> Tensor:
    """Of a tensor [batch | 1, heads | 1, queries | 1, keys | 1]."""
    x = x[:, :, rows] if x.shape[2] > 1 else x
    return x[..., columns] if x.shape[3] > 1 else x


@functools.lru_cache(maxsize=256)
def _packing(call: Call, device: torch.device) -> Packing:
    """The call's blocks as packed sequences of the sliced tensors; what lies between them is padding."""
    q_first, k_first = call.blocks[0].q_start, call.blocks[0].k_start
    q_starts = [block.q_start - q_first for block in call.blocks] + [call.blocks[-1].q_stop - q_first]
    k_starts = [block.k_start - k_first for block in call.blocks] + [call.blocks[-1].k_stop - k_first]
    q_lengths = [block.q_len for block in call.blocks]
    k_lengths = [block.k_len for block in call.blocks]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    return Packing(
        cu_seqlens_q=ends(q_lengths), cu_seqlens_k=ends(k_lengths),
        cu_seqlens_q_padded=numbers(q_starts), cu_seqlens_k_padded=numbers(k_starts),
        max_seqlen_q=max(q_lengths), max_seqlen_k=max(k_lengths),
    )  # fmt: skip
