"""A ring of ranks in one process against one kernel call: up to eight ranks, and Triton's kernels where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.functional.context_parallel.merge import row_deltas
from primus_turbo_plugin.functional.context_parallel.ring import Ring
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, Dropout, Packing
from tests.support.thread_ranks import ThreadGroup, run_thread_ranks

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": (200, 0)},
    "window both ways": {"causal": False, "window": (100, 60)},
    "latent": {"dims": (192, 128), "groups": 8},
    "sinks and softcap": {"sinks": True, "softcap": 20.0},
    "dropout": {"dropout": 0.2},
    "packed": {"packed": True},
    "packed window": {"packed": True, "window": (150, 0), "dropout": 0.1},
}


def kernels_of(backend: str) -> tuple[Any, str]:
    """(kernels, device), or a skip."""
    if backend == "reference":
        from primus_turbo_plugin.kernels.reference import attention as reference

        return reference, "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from primus_turbo_plugin.kernels.triton import attention as triton_attention

    return triton_attention, "cuda"


def share(x: Tensor, rank: int, size: int, rooms: list[int]) -> Tensor:
    parts = []
    for sequence in x.split(rooms, 1):
        chunks = sequence.chunk(2 * size, 1)
        parts += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(parts, 1)


def problem(case: Case, tokens: int, device: str, dtype: torch.dtype, rng: torch.Generator) -> dict[str, Any]:
    """Tensors, options and sequence lengths."""
    dim, v_dim = case.get("dims", (128, 128))
    rooms = [tokens // 2, tokens // 4, tokens // 4] if case.get("packed") else [tokens]
    batch, heads, groups = (1 if case.get("packed") else 2), 8, case.get("groups", 2)
    sizes = ((heads, dim), (groups, dim), (groups, v_dim), (heads, v_dim))
    tensors = [torch.randn(batch, tokens, *size, generator=rng).to(device, dtype) for size in sizes]
    packing = None
    if case.get("packed"):
        lengths = [tokens // 2 - 5, tokens // 4, tokens // 16 + 1]
        ends, starts = (
            torch.tensor([0, *x], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
            for x in (lengths, rooms)
        )
        packing = Packing(cu_seqlens_q=ends, cu_seqlens_k=ends, cu_seqlens_q_padded=starts, cu_seqlens_k_padded=starts)
    mask = AttentionMask(causal=case.get("causal", True), window=case.get("window", (-1, -1)), packing=packing)
    dropout = None
    if "dropout" in case:
        dropout = Dropout(probability=case["dropout"], seed=torch.tensor([77], device=device))
    options = AttentionOptions(scale=dim**-0.5, mask=mask, softcap=case.get("softcap", 0.0), dropout=dropout)
    sinks = torch.randn(heads, generator=rng).to(device) if case.get("sinks") else None
    return {"tensors": tensors, "options": options, "sinks": sinks, "rooms": rooms}


def on_one_rank(kernels: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: Any, sinks: Any) -> list[Tensor]:
    out, lse = kernels.attention_fwd(q, k, v, options, sinks=sinks)
    delta = row_deltas(dout, out, lse.dtype)
    dq, dk, dv, _, _ = kernels.attention_bwd(dout, q, k, v, out, lse, options, sinks=sinks, delta=delta)
    return [out, dq, dk, dv]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_a_ring_in_one_process_equals_one_rank(
    name: str, backend: str, size: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, device = kernels_of(backend)
    dtype, tokens = (torch.bfloat16, 1024) if backend == "triton" else (torch.float32, 256)
    given = problem(CASES[name], tokens, device, dtype, rng)
    options, sinks, rooms = given["options"], given["sinks"], given["rooms"]
    want = on_one_rank(kernels, *given["tensors"], options, sinks)

    def rank_main(group: ThreadGroup) -> list[Tensor]:
        q, k, v, dout = (share(x, group.rank(), size, rooms) for x in given["tensors"])
        engine = Ring(kernels, group)  # type: ignore[arg-type]
        out = dout.new_empty(dout.shape)
        saved = engine.forward(q, k, v, options, None, sinks, out)
        return [out, *engine.backward(dout, saved, options)[:3]]

    runs = [run_thread_ranks(monkeypatch, size, rank_main) for _ in range(2)]
    # Some roundings of 2^-24 in sums of another order; bf16: one rounding each of two nearly equal numbers, and half of one more,
    # since kernels round probabilities by another row maximum.
    bar = 5e-6 if dtype is torch.float32 else 1.5 * 2**-7
    for rank, (got, again) in enumerate(zip(*runs)):
        for tensor, value, repeated, whole in zip(("out", "dq", "dk", "dv"), got, again, want):
            assert torch.equal(value, repeated), (tensor, rank)
            expected = share(whole, rank, size, rooms).double()
            error = (value.double() - expected).abs().max() / expected.abs().max().clamp_min(0.5)
            assert error <= bar, (tensor, rank, float(error))
