"""Attention, forward and backward apart, against torch's scaled_dot_product_attention by cuDNN and by flash-attention 2.

Packed sequences and windows, which it does not know, against torch's varlen_attn, flash-attention 2 as well.

    python -m benchmarks.attention [--cases causal full ...] [--json rows.jsonl]

Every result is first compared with float64 attention of one group of heads, computed in blocks of rows: the signal-to-noise ratio
of out, or the smallest of those of dq, dk and dv. FLOPs count the products of visible scores only: 4 * D a score forward, 10 * D
backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._timing import HEADER, Row, describe_machine, measure_launches, report
from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.kernels.attention import AttentionMask, Packing

_ROWS = 1024  # of a block of the float64 attention


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One problem; `window` is how many keys before its own a query sees, -1 for all; `lengths` are of packed sequences."""

    batch: int = 2
    seq: int = 8192
    heads: int = 32
    groups: int = 8
    dim: int = 128
    v_dim: int = 128
    causal: bool = True
    window: int = -1
    lengths: tuple[int, ...] = ()

    @property
    def scores(self) -> float:
        """Visible scores of all heads."""
        lengths = self.lengths or (self.seq,)
        rows = torch.cat([torch.arange(length, dtype=torch.float64) for length in lengths])
        behind = torch.cat([torch.full((length,), float(length), dtype=torch.float64) for length in lengths])
        seen = rows + 1 if self.causal else behind
        if self.window >= 0:
            seen = seen.clamp_max(self.window + 1)
        return self.batch * self.heads * float(seen.sum())

    @property
    def sequences(self) -> Tensor:
        """Which sequence each token belongs to."""
        lengths = torch.tensor(self.lengths or (self.seq,))
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    @property
    def ends(self) -> Tensor:
        """Where each sequence starts, and behind the last: cu_seqlens."""
        return torch.tensor([0, *(self.lengths or (self.seq,))], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def __str__(self) -> str:
        dims = str(self.dim) if self.dim == self.v_dim else f"{self.dim}/{self.v_dim}"
        limits = ("causal" if self.causal else "full") + (f" w{self.window}" if self.window >= 0 else "")
        size = f"{len(self.lengths)} packed in s{self.seq}" if self.lengths else f"b{self.batch} s{self.seq}"
        return f"{size} h{self.heads}/{self.groups} d{dims} {limits}"


CASES: dict[str, Case] = {
    "causal": Case(),
    "full": Case(causal=False),
    "mha": Case(heads=16, groups=16),
    "one_group": Case(heads=16, groups=1),
    "d64": Case(dim=64, v_dim=64),
    "d64_full": Case(dim=64, v_dim=64, causal=False),
    "d96": Case(dim=96, v_dim=96),
    "mla": Case(heads=16, groups=16, dim=192, v_dim=128),
    "d256": Case(heads=16, groups=4, dim=256, v_dim=256),
    "short": Case(batch=16, seq=1024),
    "long": Case(batch=1, seq=32768),
    "window": Case(batch=1, seq=32768, window=1023),
    "packed": Case(batch=1, seq=16384, lengths=(5000, 3100, 700, 4096, 33, 1500, 1900, 55)),
    "packed_short": Case(batch=1, seq=16384, lengths=(512, 1000, 777, 263, 1544) * 4),
}

Forward = Callable[[], Tensor]


def _inputs(case: Case) -> list[Tensor]:
    """q, k, v and dout as Megatron lays them out, [seq, batch, heads, dim]."""
    shapes = [(case.heads, case.dim), (case.groups, case.dim), (case.groups, case.v_dim), (case.heads, case.v_dim)]
    return [torch.randn(case.seq, case.batch, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _backends(case: Case, leaves: list[Tensor]) -> Iterator[tuple[str, Forward, list[Tensor]]]:
    """(name, forward, its leaves); outputs are [seq, batch, heads, v_dim]."""
    window, ends = (case.window, -1), case.ends.cuda()
    if case.lengths:
        mask = AttentionMask(causal=case.causal, packing=Packing(cu_seqlens_q=ends, cu_seqlens_k=ends))
        yield "turbo", lambda: attention(*(x[:, 0] for x in leaves), layout="thd", mask=mask).unsqueeze(1), leaves
    else:
        yield "turbo", lambda: attention(*leaves, mask=AttentionMask(causal=case.causal, window=window)), leaves
    if case.lengths or case.window >= 0:
        from torch.nn.attention.varlen import varlen_attn

        longest = max(case.lengths or (case.seq,))
        reach = (case.window, 0 if case.causal else -1)

        def packed() -> Tensor:
            out = varlen_attn(*(x[:, 0] for x in leaves), ends, ends, longest, longest, window_size=reach)
            assert isinstance(out, Tensor)
            return out.unsqueeze(1)

        yield "torch varlen flash", packed, leaves
        return
    heads_first = [x.detach().permute(1, 2, 0, 3).requires_grad_() for x in leaves]
    for name, kind in (
        ("torch SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("torch SDPA flash", SDPBackend.FLASH_ATTENTION),
    ):

        def forward(kind: SDPBackend = kind) -> Tensor:
            with sdpa_kernel(kind):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *heads_first, is_causal=case.causal, enable_gqa=case.heads != case.groups
                )
            return out.permute(2, 0, 1, 3)

        yield name, forward, heads_first


def _float64(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """out, dq, dk, dv of the first batch entry's first group, [seq, heads of the group, dim]."""
    heads = case.heads // case.groups
    q64, dout64 = (x[:, 0, :heads].double() for x in (q, dout))
    k64, v64 = (x[:, 0, 0].double() for x in (k, v))
    want = {"out": torch.empty_like(dout64), "dq": torch.empty_like(q64)}
    want |= {"dk": torch.zeros_like(k64), "dv": torch.zeros_like(v64)}
    keys, sequences = torch.arange(case.seq, device=q.device), case.sequences.to(q.device)
    scale = case.dim**-0.5
    for head in range(heads):
        for first in range(0, case.seq, _ROWS):
            rows = slice(first, min(first + _ROWS, case.seq))
            places = keys[rows, None]
            hidden = (keys > places) if case.causal else torch.zeros_like(keys > places)
            if case.window >= 0:
                hidden |= keys < places - case.window
            hidden |= sequences != sequences[rows, None]
            p = (q64[rows, head] @ k64.T * scale).masked_fill_(hidden, -torch.inf).softmax(-1)
            g = dout64[rows, head]
            want["out"][rows, head] = p @ v64
            want["dv"] += p.T @ g
            delta = (g * want["out"][rows, head]).sum(-1, keepdim=True)
            ds = p * (g @ v64.T - delta) * scale
            want["dq"][rows, head] = ds @ k64
            want["dk"] += ds.T @ q64[rows, head]
    want["dk"], want["dv"] = want["dk"].unsqueeze(1), want["dv"].unsqueeze(1)
    return want


def _snr_db(got: Tensor, want: Tensor) -> float:
    """Of the first batch entry's first heads; `got` [seq, batch, heads, dim]."""
    error = got[:, 0, : want.shape[1]].double() - want
    return float(10 * torch.log10(want.square().sum() / error.square().sum()))


def _rows(case: Case, roof: float) -> Iterator[Row]:
    tensors = _inputs(case)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    dout = tensors[3]
    q, k, v = (x.detach() for x in leaves)
    want = _float64(case, q, k, v, dout)
    sizes: dict[str, Any] = {"shape": str(case), "bytes": 0.0, "roof": roof}
    per_score = case.dim + case.v_dim
    backward_rows = []
    for name, forward, inputs in _backends(case, leaves):
        try:
            out = forward()
        except RuntimeError as error:
            print(f"{case}: {name}: not measured: {str(error).splitlines()[0][:80]}")
            continue
        grads = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        grads = tuple(x if inputs is leaves else x.permute(2, 0, 1, 3) for x in grads)
        decibels = {key: _snr_db(x, want[key]) for key, x in zip(("out", "dq", "dk", "dv"), (out, *grads))}
        with torch.no_grad():
            us, low, high = measure_launches(forward)
        flops = 2 * per_score * case.scores
        times: dict[str, Any] = {"us": us, "us_p20": low, "us_p80": high}
        ok = f"{decibels['out']:.1f} dB"
        yield Row(op="attention fwd", backend=name, flops=flops, ok=ok, **times, **sizes)

        def backward(out: Tensor = out, inputs: list[Tensor] = inputs) -> object:
            return torch.autograd.grad(out, inputs, dout, retain_graph=True)

        us, low, high = measure_launches(backward)
        times = {"us": us, "us_p20": low, "us_p80": high}
        ok = f"{min(decibels[key] for key in ('dq', 'dk', 'dv')):.1f} dB"
        backward_rows.append(Row(op="attention bwd", backend=name, flops=2.5 * flops, ok=ok, **times, **sizes))
    yield from backward_rows


def _matmul_rate() -> float:
    """FLOP/s of torch.matmul on 8192 x 8192 x 8192 in bf16: the roof."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    us, _, _ = measure_launches(lambda: a @ b)
    return 2 * 8192**3 / (us * 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--json", help="append the rows to this JSON lines file")
    options = parser.parse_args()
    print(describe_machine())
    roof = _matmul_rate()
    print(f"roof: torch.matmul {roof / 1e12:.0f} TFLOP/s; launches timed one by one\n\n{HEADER}")
    for name in options.cases:
        report(_rows(CASES[name], roof), options.json)


if __name__ == "__main__":
    main()
