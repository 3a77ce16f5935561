"""kernels/reference/attention.py: what the functional tests cannot see.

Values and gradients are in tests/functional/test_attention.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, AttentionRequest, Packing
from primus_turbo_plugin.kernels.reference import attention as reference
from primus_turbo_plugin.kernels.registry import default_registry
from tests.functional.attention_oracle import allowed_keys, attention_float64, relative_error


class LargestTensor(TorchDispatchMode):
    """The largest result of any operation, and all scores that batched products compute, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
            if func is torch.ops.aten.bmm.default:
                self.products += result.numel() * args[0].shape[-1]
        return result


def _inputs(rng: torch.Generator, seq: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, seq, heads, 8, generator=rng).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("sinks", [False, True])
def test_lse_is_the_logarithm_of_the_denominator(sinks: bool, rng: torch.Generator) -> None:
    q, k, v = _inputs(rng, 13)
    sink = torch.randn(4, generator=rng) if sinks else None
    if sink is not None:
        sink[0] = 200.0  # exp(200) is no fp32 number
    masked = torch.zeros(2, 1, 13, 13, dtype=torch.bool)
    masked[1, 0, 5] = True  # a row that sees nothing
    options = AttentionOptions(scale=0.3, mask=AttentionMask(causal=True, masked=masked))
    out, lse = reference.attention_fwd(q, k, v, options, sinks=sink)
    allowed = allowed_keys(13, 13, causal=True) & ~masked
    want_out, want = attention_float64(*(x.transpose(0, 1) for x in (q, k, v)), scale=0.3, allowed=allowed, sinks=sink)
    assert lse.dtype == torch.float32
    assert relative_error(out.transpose(0, 1), want_out) < 3e-6
    torch.testing.assert_close(lse.double(), want, rtol=1e-6, atol=1e-6)
    if not sinks:
        assert (lse[1, :, 5] == -torch.inf).all()


@pytest.mark.parametrize("scores", [1, 60, 10**9])
def test_results_do_not_depend_on_the_size_of_a_block(
    scores: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x.double() for x in _inputs(rng, 21))
    options = AttentionOptions(scale=0.3, mask=AttentionMask(causal=True, window=(6, 0)))
    dout = torch.randn(2, 21, 4, 8, generator=rng, dtype=torch.float64)

    def run() -> list[Tensor]:
        out, lse = reference.attention_fwd(q, k, v, options)
        return [out, lse, *reference.attention_bwd(dout, q, k, v, out, lse, options)[:3]]

    want = run()
    monkeypatch.setattr(reference, "_BLOCK_SCORES", scores)
    monkeypatch.setattr(reference, "_MIN_ROWS", 1)
    monkeypatch.setattr(reference, "_MIN_WINDOW_ROWS", 2)
    for got, full in zip(run(), want):
        torch.testing.assert_close(got, full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backward", [False, True])
def test_no_tensor_grows_with_the_square_of_the_sequence(
    backward: bool, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq = 512
    monkeypatch.setattr(reference, "_BLOCK_SCORES", 4096)
    monkeypatch.setattr(reference, "_MIN_ROWS", 1)
    q, k, v = _inputs(rng, seq)
    options = AttentionOptions(scale=0.3, mask=AttentionMask(causal=True))
    with LargestTensor() as largest:
        out, lse = reference.attention_fwd(q, k, v, options)
        if backward:
            reference.attention_bwd(out, q, k, v, out, lse, options)
    assert largest.numel <= max(4096, q.numel()) < seq * seq


def test_work_under_a_window_is_in_proportion_to_the_window(rng: torch.Generator) -> None:
    q, k, v = _inputs(rng, 1024)

    def products(window: tuple[int, int]) -> int:
        options = AttentionOptions(scale=0.3, mask=AttentionMask(causal=True, window=window))
        with LargestTensor() as counted:
            out, lse = reference.attention_fwd(q, k, v, options)
            reference.attention_bwd(out, q, k, v, out, lse, options)
        return counted.products

    pairs = 2 * 4 * 1024 * 64  # batch, heads, queries, keys of the window
    assert (
        products((63, 0)) <= 2.1 * 7 * pairs * 8
    )  # 2 products forward, 5 backward, dim 8; blocks see up to twice the window
    assert products((63, 0)) < products((-1, -1)) / 4


def test_gradients_of_keys_come_in_fp32_for_those_who_sum_them(rng: torch.Generator) -> None:
    q, k, v = _inputs(rng, 9, torch.bfloat16)
    options = AttentionOptions(scale=0.3)
    out, lse = reference.attention_fwd(q, k, v, options)
    dout = torch.randn(2, 9, 4, 8, generator=rng).bfloat16()
    dq, dk, dv, _, _ = reference.attention_bwd(dout, q, k, v, out, lse, options, kv_grad_dtype=torch.float32)
    assert (dq.dtype, dk.dtype, dv.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    _, dk16, dv16, _, _ = reference.attention_bwd(dout, q, k, v, out, lse, options)
    assert torch.equal(dk.bfloat16(), dk16)
    assert torch.equal(dv.bfloat16(), dv16)


def test_an_output_given_is_overwritten_everywhere(rng: torch.Generator) -> None:
    """Padding between packed sequences included."""
    q, k, v = (x[:1] for x in _inputs(rng, 9))
    packing = Packing(
        cu_seqlens_q=torch.tensor([0, 3, 5]),
        cu_seqlens_k=torch.tensor([0, 3, 5]),
        cu_seqlens_q_padded=torch.tensor([0, 4, 8]),
        cu_seqlens_k_padded=torch.tensor([0, 4, 8]),
    )
    options = AttentionOptions(scale=0.3, mask=AttentionMask(causal=True, packing=packing))
    out = torch.full((1, 9, 4, 8), float("nan"))
    got, _ = reference.attention_fwd(q, k, v, options, out=out)
    assert got is out
    assert out.isfinite().all()
    assert not out[0, [3, 6, 7, 8]].any()


def test_the_reference_serves_every_example() -> None:
    examples = AttentionRequest.examples("cpu")
    assert all(
        default_registry().select("attention", request, ["reference"]).name == "reference" for request in examples
    )
    assert len({str(request) for request in examples}) == len(examples)
