"""functional/attention.py against float64 attention and torch's own, forward and every gradient."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, ShapeError, UnsupportedError
from primus_turbo_plugin.functional.attention import attention, attention_with_lse
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, Dropout, Packing
from primus_turbo_plugin.kernels.reference import attention as reference
from tests.functional.attention_oracle import (
    allowed_keys,
    attention_float64,
    dropout_keep,
    packed_float64,
    relative_error,
)

# Largest error allowed against float64, relative to the largest value. fp64 and fp32: some dozen roundings of 2^-53 and 2^-24.
# bf16 and fp16: the one rounding at the end, half a unit in the last place, and fp32's share.
BARS = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2**-8 + 3e-6, torch.float16: 2**-11 + 3e-6}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks small enough that every case has several."""
    monkeypatch.setattr(reference, "_BLOCK_SCORES", 150)
    monkeypatch.setattr(reference, "_MIN_ROWS", 3)
    monkeypatch.setattr(reference, "_MIN_WINDOW_ROWS", 4)


def _tensor(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_(grad)


def _draw(rng: torch.Generator, case: int) -> dict[str, Any]:
    """One combination of features; `case` makes sure that each is on and off often enough."""
    pick = random.Random(int(torch.randint(2**31, (1,), generator=rng)))
    queries = pick.choice([1, 2, 7, 16, 23])
    keys = queries if case % 2 else pick.choice([1, 3, 16, 29])
    heads, groups = pick.choice([(1, 1), (3, 3), (4, 2), (6, 2), (5, 1)])
    return {
        "queries": queries, "keys": keys, "batch": pick.choice([1, 2, 3]), "heads": heads, "groups": groups,
        "dim": pick.choice([1, 4, 8, 15]), "v_dim": pick.choice([1, 5, 8]), "causal": bool(case & 2),
        "window": pick.choice([(-1, -1), (-1, -1), (3, 0), (0, 0), (5, 2), (-1, 1), (4, -1)]),
        "masked": bool(case & 4), "bias": pick.random() < 0.4, "sinks": bool(case & 8), "softcap": pick.choice([0.0, 0.0, 1.5]),
        "dropout": pick.choice([0.0, 0.0, 0.3, 1.0]), "layout": pick.choice(["sbhd", "bshd"]), "strided": pick.random() < 0.5,
    }  # fmt: skip


def _strided(x: Tensor) -> Tensor:
    """The same values, as a slice of a wider tensor: no dimension is contiguous with the next."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
    wide[..., 1::2] = x
    return wide[..., 1::2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", range(32))
def test_any_combination_of_features_equals_float64(dtype: torch.dtype, case: int, rng: torch.Generator) -> None:
    c = _draw(rng, case)
    q = _tensor(rng, c["queries"], c["batch"], c["heads"], c["dim"], dtype=dtype)
    k = _tensor(rng, c["keys"], c["batch"], c["groups"], c["dim"], dtype=dtype)
    v = _tensor(rng, c["keys"], c["batch"], c["groups"], c["v_dim"], dtype=dtype)
    scores = (c["batch"], c["heads"], c["queries"], c["keys"])
    masked = torch.rand(c["batch"], 1, c["queries"], c["keys"], generator=rng) < 0.4 if c["masked"] else None
    bias = _tensor(rng, 1, c["heads"], 1, c["keys"], dtype=dtype) if c["bias"] else None
    sinks = _tensor(rng, c["heads"], dtype=dtype) if c["sinks"] else None
    seed = torch.randint(2**62, (1,), generator=rng)
    keep = dropout_keep(seed.item(), c["dropout"], scores) if c["dropout"] else None
    scale = 0.6 / c["dim"] ** 0.5

    def laid_out(x: Tensor) -> Tensor:
        x = x if c["layout"] == "sbhd" else x.transpose(0, 1)
        return _strided(x) if c["strided"] else x

    out = attention(
        laid_out(q), laid_out(k), laid_out(v),
        layout=c["layout"],
        mask=AttentionMask(causal=c["causal"], window=c["window"], masked=masked),
        scale=scale, bias=bias, sinks=sinks, softcap=c["softcap"],
        dropout=None if keep is None else Dropout(probability=c["dropout"], seed=seed),
    )  # fmt: skip
    assert out.is_contiguous()
    assert out.dtype == dtype
    out = out if c["layout"] == "sbhd" else out.transpose(0, 1)
    copies = [None if x is None else x.detach().double().requires_grad_() for x in (q, k, v, bias, sinks)]
    allowed = allowed_keys(c["queries"], c["keys"], causal=c["causal"], window=c["window"])[None, None]
    want, _ = attention_float64(
        *copies[:3], scale=scale, allowed=allowed if masked is None else allowed & ~masked, bias=copies[3],
        sinks=copies[4], softcap=c["softcap"], keep=keep, dropout=min(c["dropout"], 0.999),
    )  # type: ignore[arg-type]  # fmt: skip
    assert relative_error(out, want) <= BARS[dtype], c

    dout = torch.randn(want.shape, generator=rng).to(dtype)
    got_grads = torch.autograd.grad(out, [x for x in (q, k, v, bias, sinks) if x is not None], dout)
    want_grads = torch.autograd.grad(want, [x for x in copies if x is not None], dout.double())
    for position, (got, full) in enumerate(zip(got_grads, want_grads)):
        assert got.dtype == dtype
        assert relative_error(got, full) <= BARS[dtype], (position, c)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (2, 2)])
def test_packed_sequences_equal_each_sequence_alone(
    dtype: torch.dtype, padded: bool, causal: bool, window: tuple[int, int], rng: torch.Generator
) -> None:
    q_lens, k_lens = [5, 1, 0, 9, 3], [5, 4, 2, 9, 0]
    padding = [2, 0, 1, 3, 0] if padded else [0] * 5
    starts = [[0], [0]]
    for side, lengths in enumerate((q_lens, k_lens)):
        for length, pad in zip(lengths, padding):
            starts[side].append(starts[side][-1] + length + pad)
    tail = 2  # tokens behind the last sequence
    q = _tensor(rng, starts[0][-1] + tail, 4, 6, dtype=dtype)
    k = _tensor(rng, starts[1][-1], 2, 6, dtype=dtype)
    v = _tensor(rng, starts[1][-1], 2, 5, dtype=dtype)

    def cumulative(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    packing = Packing(
        cu_seqlens_q=cumulative(q_lens),
        cu_seqlens_k=cumulative(k_lens),
        cu_seqlens_q_padded=torch.tensor(starts[0], dtype=torch.int32) if padded else None,
        cu_seqlens_k_padded=torch.tensor(starts[1], dtype=torch.int32) if padded else None,
    )
    out = attention(q, k, v, layout="thd", mask=AttentionMask(causal=causal, window=window, packing=packing), scale=0.4)
    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
    lengths = list(zip(starts[0], q_lens, starts[1], k_lens))
    want = packed_float64(*copies, lengths, causal=causal, window=window, scale=0.4)
    assert relative_error(out, want) <= BARS[dtype]
    assert not out[-tail:].any()
    dout = torch.randn(want.shape, generator=rng).to(dtype)
    got = torch.autograd.grad(out, (q, k, v), dout)
    for mine, full in zip(got, torch.autograd.grad(want, copies, dout.double())):
        assert relative_error(mine, full) <= BARS[dtype]


@pytest.mark.parametrize("causal", [False, True])
def test_bf16_errs_no_more_than_torchs_own_attention(causal: bool, rng: torch.Generator) -> None:
    shape = (48, 2, 4, 32)
    q, k, v = (_tensor(rng, *shape, dtype=torch.bfloat16) for _ in range(3))
    allowed = allowed_keys(48, 48, causal=causal)[None, None]
    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, _ = attention_float64(*copies, scale=32**-0.5, allowed=allowed)
    dout = torch.randn(shape, generator=rng).bfloat16()
    want_grads = torch.autograd.grad(want, copies, dout.double())
    ours = attention(q, k, v, mask=AttentionMask(causal=causal))
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=causal
    ).permute(2, 0, 1, 3)
    for name, full, mine, torchs in zip(
        ("out", "dq", "dk", "dv"),
        (want, *want_grads),
        (ours, *torch.autograd.grad(ours, (q, k, v), dout)),
        (theirs, *torch.autograd.grad(theirs, (q, k, v), dout)),
    ):
        ours_rms = (mine.double() - full).square().mean().sqrt().item()
        theirs_rms = (torchs.double() - full).square().mean().sqrt().item()
        assert ours_rms <= 1.02 * theirs_rms, (name, ours_rms, theirs_rms)


def test_fp32_equals_torchs_own_attention(rng: torch.Generator) -> None:
    q, k, v = (_tensor(rng, 33, 2, 3, 8) for _ in range(3))
    ours = attention(q, k, v, mask=AttentionMask(causal=True))
    views = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True).permute(2, 0, 1, 3)
    dout = torch.randn(ours.shape, generator=rng)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    pairs = zip(torch.autograd.grad(ours, (q, k, v), dout), torch.autograd.grad(theirs, (q, k, v), dout))
    for mine, torchs in pairs:
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=5e-6)


def test_a_row_that_sees_nothing_gives_zero_and_takes_no_gradient(rng: torch.Generator) -> None:
    q, k, v = (_tensor(rng, 6, 2, 2, 4) for _ in range(3))
    masked = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    masked[0, 0, 2] = True
    masked[1] = True
    out = attention(q, k, v, mask=AttentionMask(causal=True, masked=masked))
    assert not out[2, 0].any()
    assert not out[:, 1].any()
    assert out[3, 0].any()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not dq[2, 0].any()
    for grad in (dq, dk, dv):
        assert grad.isfinite().all()
        assert not grad[:, 1].any()


def test_a_nan_among_the_keys_that_are_seen_is_seen(rng: torch.Generator) -> None:
    q, k, v = (_tensor(rng, 4, 1, 1, 3, grad=False) for _ in range(3))
    k[2] = float("nan")
    out = attention(q, k, v, mask=AttentionMask(causal=True))
    assert out[:2].isfinite().all()
    assert out[2:].isnan().all()


def test_scores_far_beyond_the_range_of_exp_do_not_overflow(rng: torch.Generator) -> None:
    """Multiples of 1000 up to 3000, so that scores of millions are exact in fp32 and ties are ties."""
    q, k = (torch.randint(-3, 4, (9, 1, 2, 4), generator=rng) * 1e3 for _ in range(2))
    v = _tensor(rng, 9, 1, 2, 4)
    out = attention(q, k, v, mask=AttentionMask(causal=True))
    want, _ = attention_float64(q, k, v, scale=0.5, allowed=allowed_keys(9, 9, causal=True)[None, None])
    assert relative_error(out, want) <= BARS[torch.float32]


def test_a_sink_far_above_all_scores_takes_everything_and_one_far_below_nothing(rng: torch.Generator) -> None:
    q, k, v = (_tensor(rng, 7, 1, 2, 4) for _ in range(3))
    sinks = torch.tensor([300.0, -300.0], requires_grad=True)
    out = attention(q, k, v, sinks=sinks)
    assert not out[:, :, 0].any()
    torch.testing.assert_close(out[:, :, 1], attention(q, k, v)[:, :, 1])
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v, sinks)))


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (3, 0, 4, 8), (1, 1, 1, 1)], ids=str)
def test_empty_and_single_inputs_have_outputs_and_gradients(shape: tuple[int, ...], rng: torch.Generator) -> None:
    q, k, v = (_tensor(rng, *shape) for _ in range(3))
    out = attention(q, k, v, mask=AttentionMask(causal=True))
    out.sum().backward()
    assert out.shape == shape
    assert all(x.grad is not None and x.grad.shape == shape for x in (q, k, v))
    if out.numel():
        torch.testing.assert_close(out, v)


def test_no_keys_at_all_give_zero(rng: torch.Generator) -> None:
    q, k, v = _tensor(rng, 3, 2, 2, 4), _tensor(rng, 0, 2, 2, 4), _tensor(rng, 0, 2, 2, 4)
    sinks = _tensor(rng, 2)
    for given in (None, sinks):
        out = attention(q, k, v, sinks=given)
        assert not out.any()
        out.sum().backward()
        assert q.grad is not None
        assert not q.grad.any()


def test_slices_of_one_projection_get_their_gradients(rng: torch.Generator) -> None:
    """Megatron splits one qkv tensor into views; gradients must meet again in it."""
    mixed = _tensor(rng, 7, 2, 2, 5 * 8)  # two groups of [3 queries, key, value]
    q, k, v = mixed.split([3 * 8, 8, 8], dim=3)
    out = attention(q.reshape(7, 2, 6, 8), k, v, mask=AttentionMask(causal=True))
    (got,) = torch.autograd.grad(out.square().sum(), mixed)
    copy = mixed.detach().double().requires_grad_()
    q, k, v = copy.split([3 * 8, 8, 8], dim=3)
    want, _ = attention_float64(
        q.reshape(7, 2, 6, 8), k, v, scale=8**-0.5, allowed=allowed_keys(7, 7, causal=True)[None, None]
    )
    assert relative_error(got, torch.autograd.grad(want.square().sum(), copy)[0]) <= BARS[torch.float32]


def test_backward_does_not_write_into_the_gradient_it_is_given(rng: torch.Generator) -> None:
    q, k, v = (_tensor(rng, 9, 1, 2, 4) for _ in range(3))
    out = attention(q, k, v)
    dout = torch.randn(out.shape, generator=rng)
    before = dout.clone()
    torch.autograd.grad(out, (q, k, v), dout)
    assert torch.equal(dout, before)


def test_the_same_call_gives_the_same_bits(rng: torch.Generator) -> None:
    q, k, v = (_tensor(rng, 31, 2, 4, 8) for _ in range(3))
    runs = []
    for _ in range(2):
        out = attention(q, k, v, mask=AttentionMask(causal=True), deterministic=True)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_activations_saved_for_backward_are_views_and_no_score_matrix(rng: torch.Generator) -> None:
    mixed = _tensor(rng, 64, 1, 2, 12)
    q, k, v = mixed.split(4, -1)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attention(q, k, v, mask=AttentionMask(causal=True))
    assert max(x.numel() for x in saved) <= q.numel()
    assert {q.data_ptr(), k.data_ptr(), v.data_ptr()} <= {x.data_ptr() for x in saved}


def test_scores_are_scaled_by_the_dim_of_queries_and_keys_by_default(rng: torch.Generator) -> None:
    q, k, v = _tensor(rng, 5, 1, 2, 12), _tensor(rng, 5, 1, 2, 12), _tensor(rng, 5, 1, 2, 3)
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=12**-0.5))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "three dimensions": ({"q": torch.ones(4, 2, 8)}, "needs 4 dimensions"),
    "other dtype": ({"k": torch.ones(4, 1, 2, 8, dtype=torch.bfloat16)}, "share a float dtype"),
    "integers": ({name: torch.ones(4, 1, 2, 8, dtype=torch.int32) for name in "qkv"}, "share a float dtype"),
    "other batch": ({"q": torch.ones(4, 2, 2, 8)}, "must agree"),
    "other dim": ({"q": torch.ones(4, 1, 2, 7)}, "must agree"),
    "other number of values": ({"v": torch.ones(5, 1, 2, 8)}, "must agree"),
    "heads do not divide": ({"q": torch.ones(4, 1, 3, 8)}, "must divide"),
    "packed layout without lengths": ({"layout": "thd"}, "go together"),
    "sinks of other heads": ({"sinks": torch.ones(3)}, r"sinks must be \[heads\] = \[2\], got \[3\]"),
    "mask of other size": ({"mask": AttentionMask(masked=torch.ones(1, 1, 4, 5).bool())}, r"\[1, 2, 4, 4\], got \[1, 1, 4, 5\]"),
    "mask of floats": ({"mask": AttentionMask(masked=torch.ones(1, 1, 4, 4))}, "must be bool"),
    "bias of three dimensions": ({"bias": torch.ones(2, 4, 4)}, "the bias must broadcast"),
    "seed of other dtype": ({"dropout": Dropout(probability=0.1, seed=torch.zeros(1))}, "seed must be one int64 on cpu"),
    "probability": ({"dropout": Dropout(probability=1.1, seed=torch.zeros(1).long())}, "must be in 0 ... 1, got 1.1"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_inputs_that_do_not_fit_are_named(mistake: str) -> None:
    change, message = MISTAKES[mistake]
    given: dict[str, Any] = {name: torch.ones(4, 1, 2, 8) for name in "qkv"} | change
    with pytest.raises(ShapeError, match=message):
        attention(**given)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ([0, 3, 9], [0, 3, 8], "cu_seqlens_q"),  # more tokens than there are
        ([0, 3, 2], [0, 3, 8], "cu_seqlens_q"),  # falls
        ([1, 3, 8], [0, 3, 8], "cu_seqlens_q"),  # does not start at 0
        ([0, 8], [0, 3, 8], "1 sequences of queries, 2 of keys"),
    ],
)
def test_packed_lengths_that_do_not_fit_are_named(q: list[int], k: list[int], message: str) -> None:
    x = torch.ones(8, 2, 4)
    packing = Packing(cu_seqlens_q=torch.tensor(q), cu_seqlens_k=torch.tensor(k))
    with pytest.raises(ShapeError, match=message):
        attention(x, x, x, layout="thd", mask=AttentionMask(packing=packing))


def test_packed_sequences_take_no_mask_tensor() -> None:
    x, lengths = torch.ones(8, 2, 4), torch.tensor([0, 8])
    packing = Packing(cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    with pytest.raises(ShapeError, match="take no mask tensor"):
        attention(x, x, x, layout="thd", mask=AttentionMask(packing=packing, masked=torch.ones(1, 1, 8, 8).bool()))


def test_an_unknown_kernel_is_an_error() -> None:
    x = torch.ones(2, 1, 1, 4)
    with pytest.raises((ConfigError, UnsupportedError), match="tritonn"):
        attention(x, x, x, kernels=["tritonn"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inside", ["forward", "backward", "both"])
def test_autocast_casts_the_inputs_and_nothing_inside(dtype: torch.dtype, inside: str, rng: torch.Generator) -> None:
    """With sharp scores, a backward that recomputes them in another precision than forward has no correct digit left."""
    autocast = torch.bfloat16
    leaves = [(3 * _tensor(rng, 20, 2, heads, 8, dtype=dtype, grad=False)).requires_grad_() for heads in (4, 2, 2)]
    dout = _tensor(rng, 20, 2, 4, 8, grad=False)
    computed = autocast if inside != "backward" else dtype
    reference_leaves = [x.detach().to(computed).requires_grad_() for x in leaves]
    expected = attention(*reference_leaves, mask=AttentionMask(causal=True))
    expected.backward(dout.to(computed))
    with torch.autocast("cpu", dtype=autocast, enabled=inside != "backward"):
        out = attention(*leaves, mask=AttentionMask(causal=True))
    with torch.autocast("cpu", dtype=autocast, enabled=inside != "forward"):
        out.backward(dout.to(computed))
    assert out.dtype == computed
    assert torch.equal(out, expected)
    for mine, theirs in zip(leaves, reference_leaves):
        assert torch.equal(mine.grad, theirs.grad.to(dtype))


def test_the_rows_log_sum_exp_is_returned_and_merges_parts_of_the_keys(rng: torch.Generator) -> None:
    """Attention over two halves of the keys, merged by lse, is attention over all of them; no gradient flows through lse."""
    q, k, v = (torch.randn(20, 2, n, 16, generator=rng, dtype=torch.float64).requires_grad_() for n in (4, 2, 2))
    options = AttentionOptions(scale=0.25)
    whole, lse = attention_with_lse(q, k, v, options)
    parts = [attention_with_lse(q, k[rows], v[rows], options) for rows in (slice(0, 7), slice(7, 20))]
    weights = [torch.exp(part - lse).permute(2, 0, 1).unsqueeze(-1) for _, part in parts]
    torch.testing.assert_close(sum(w * out for w, (out, _) in zip(weights, parts)), whole)
    torch.testing.assert_close(torch.logaddexp(parts[0][1], parts[1][1]), lse)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(2, 2)) * 0.25
    torch.testing.assert_close(scores.logsumexp(-1).detach(), lse)
    assert whole.requires_grad
    assert not lse.requires_grad
    assert torch.equal(whole, attention(q, k, v, scale=0.25))


def test_a_window_may_be_a_list(rng: torch.Generator) -> None:
    """As configuration files give it; the choice of a backend is kept by what was asked for."""
    q = torch.randn(2, 8, 2, 16, generator=rng)
    outs = [attention(q, q, q, layout="bshd", mask=AttentionMask(window=window)) for window in ((3, 0), [3, 0])]  # type: ignore[arg-type]
    assert torch.equal(*outs)
