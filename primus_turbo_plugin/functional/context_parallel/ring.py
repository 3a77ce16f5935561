"""Ring attention: each rank keeps its queries, and the ranks' keys and values come to it one after the other.

fprop       step i: attention over what is needed of rank (r - i)'s keys, while the message of step i + 1 is on its way;
            partial results are merged by their log-sum-exp in fp32 and rounded once (merge.py)
backward    keys and values travel again in the same order; each step's dk and dv, in fp32, travel home to their owner under
            the attention of the step behind it. The owner adds them in the order of the steps: the same bits every run
Messages    only the tokens that the receiver sees (schedule.py): size - 1 messages a rank, three quarters of a plain ring's
            bytes under a causal mask, a window's reach under a window. Two receive buffers are alive at a time
Saved       q, k, v, out, lse
FP8         q, k and v are quantised by each step's kernel; in blocks that a cut made shorter they decode to the same numbers, but
            for some 2^14 below their block's largest. dout is decoded here, once, for delta to be that of what is multiplied
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group, Pending
from primus_turbo_plugin.communication.ring_exchange import connect, exchange
from primus_turbo_plugin.functional.context_parallel.calls import CallMaker
from primus_turbo_plugin.functional.context_parallel.engines import Gradients, Saved, inner_dtype
from primus_turbo_plugin.functional.context_parallel.merge import Merged, row_deltas, sink_gradients
from primus_turbo_plugin.functional.context_parallel.messages import add_to, empty_message, fill, parts_of
from primus_turbo_plugin.functional.context_parallel.schedule import Step, ring_schedule, rows_of
from primus_turbo_plugin.functional.context_parallel.sequences import sequences_of
from primus_turbo_plugin.functional.context_parallel.sums import Summed
from primus_turbo_plugin.kernels.attention import AttentionOptions, ZigZag


@dataclass(frozen=True, slots=True)
class Ring:
    """See the top of this file."""

    kernels: Any
    group: Group

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        bias: Tensor | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> Saved:
        merged = Merged(out, inner_dtype(q))
        calls = self._calls(q, k, options)
        for step, keys, values in self.visits(k, v, options):
            for call in calls.of(step, bias):
                part = merged.room(call.rows)
                _, lse = self.kernels.attention_fwd(
                    q[:, call.rows], keys[:, call.keys], values[:, call.keys], call.options, bias=call.bias, out=part
                )
                merged.add(call.rows, part, lse)
        whole, lse = merged.finish(sinks)
        out.copy_(whole)
        return q, k, v, out, lse, bias, sinks

    def backward(self, dout: Tensor, saved: Saved, options: AttentionOptions) -> Gradients:
        q, k, v, out, lse, bias, sinks = saved
        assert q is not None
        assert k is not None
        assert v is not None
        assert out is not None
        assert lse is not None
        inner = inner_dtype(q)
        dout = self._decoded(dout, options)
        delta = row_deltas(dout, out, inner)
        dq = Summed(q, inner)
        dbias = None if bias is None else torch.zeros_like(bias, dtype=inner)
        calls = self._calls(q, k, options)
        homecoming: tuple[Step, Pending[Tensor | None]] | None = None
        own: tuple[Tensor, Tensor] | None = None
        for step, keys, values in self.visits(k, v, options):
            found = empty_message(k, v, rows_of(step.incoming), inner)
            rooms = (None, None) if own is None else parts_of(found, k, v)
            dkeys, dvalues = (Summed(x, inner, room) for x, room in zip((keys, values), rooms))
            for call in calls.of(step, bias):
                rows = call.rows
                dq_part, dk_part, dv_part, dbias_part, _ = self.kernels.attention_bwd(
                    dout[:, rows], q[:, rows], keys[:, call.keys], values[:, call.keys], out[:, rows],
                    lse[:, :, rows].contiguous(), call.options, bias=call.bias, delta=delta[:, :, rows].contiguous(),
                    q_grad_dtype=inner, kv_grad_dtype=inner,
                )  # fmt: skip
                dq.add(rows, dq_part)
                dkeys.add(call.keys, dk_part)
                dvalues.add(call.keys, dv_part)
                if dbias is not None:
                    call.add_to_bias(dbias, dbias_part)
            sums = dkeys.finish(), dvalues.finish()
            if own is None:
                own = sums
                continue
            self._collect(own, homecoming)
            homecoming = step, self.send_home(step, found, k, v)
        assert own is not None
        self._collect(own, homecoming)
        dsinks = None if sinks is None else sink_gradients(sinks, lse, delta)
        return Gradients(dq.finish(), *own, dbias, dsinks)

    def _decoded(self, dout: Tensor, options: AttentionOptions) -> Tensor:
        """dout as FP8 attention multiplies it; dout itself where it is not quantised."""
        precision = options.precision
        if not precision.is_quantized or precision.gradients == "bf16":
            return dout
        place = ZigZag(rank=self.group.rank(), size=self.group.size())
        placed = replace(options, mask=replace(options.mask, zigzag=place))
        decoded: Tensor = self.kernels.attention_decoded(dout, placed, precision.gradients)
        return decoded

    def visits(self, k: Tensor, v: Tensor, options: AttentionOptions) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """The steps with the keys and values that they use; while one is worked on, the next one's are under way."""
        steps = self.schedule(k, options)
        connect(self.group, k.device)
        coming = None
        for number, step in enumerate(steps):
            message = None if coming is None else coming.wait()
            coming = self._send_keys(steps[number + 1], k, v) if number + 1 < len(steps) else None
            keys, values = (k, v) if message is None else parts_of(message, k, v)
            yield step, keys, values

    def _send_keys(self, step: Step, k: Tensor, v: Tensor) -> Pending[Tensor | None]:
        needed = fill(empty_message(k, v, rows_of(step.outgoing), k.dtype), k, v, step.outgoing)
        room = empty_message(k, v, rows_of(step.incoming), k.dtype)
        return exchange(needed, step.receiver, room, step.owner, self.group)

    def send_home(self, step: Step, found: Tensor, k: Tensor, v: Tensor) -> Pending[Tensor | None]:
        """Sends what was found for the owner's keys, and receives what the receiver of ours found."""
        room = empty_message(k, v, rows_of(step.outgoing), found.dtype)
        return exchange(found, step.owner, room, step.receiver, self.group)

    def _collect(self, own: tuple[Tensor, Tensor], homecoming: tuple[Step, Pending[Tensor | None]] | None) -> None:
        """Adds what has come home for this rank's keys."""
        if homecoming is not None:
            step, coming = homecoming
            message = coming.wait()
            assert message is not None
            add_to(*own, message, step.outgoing)

    def schedule(self, k: Tensor, options: AttentionOptions) -> tuple[Step, ...]:
        mask, size = options.mask, self.group.size()
        sequences = (sequences_of(mask.packing, k.shape[1], size, side) for side in "qk")
        return ring_schedule(*sequences, mask.limits, self.group.rank(), size, mask.packing is not None)

    def _calls(self, q: Tensor, k: Tensor, options: AttentionOptions) -> CallMaker:
        return CallMaker(options, q.shape[1], k.shape[1], self.group.rank(), self.group.size(), q.device)
