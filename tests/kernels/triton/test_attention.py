"""The Triton attention kernels on whatever GPU is here, against float64; launching and refusing, on any machine."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from primus_turbo_plugin.functional.attention import attention as functional_attention
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, AttentionRequest, Dropout
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.triton import attention, attention_ops
from tests.kernels.triton.attention_cases import CASES, AttentionCase, Problem, make, wrong

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")

BARS = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
"""RMS error over RMS value. Two roundings to 8 (bf16) or 11 (fp16) bits dominate, that of P or dS and that of the result, each
2^-9 / sqrt(3) relative for bf16: 1.6e-3 for the two; gradients of few rows see three times that, cancellation included."""


def _run(problem: Problem) -> dict[str, Tensor]:
    q, k, v, dout = problem.tensors
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype, device=q.device)
    _, lse = attention.attention_fwd(q, k, v, problem.options, sinks=problem.sinks, out=out)
    grads = attention.attention_bwd(dout, q, k, v, out, lse, problem.options, sinks=problem.sinks)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv", "dbias", "dsinks"), grads))


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_every_feature_is_within_rounding_of_float64(name: str, rng: torch.Generator) -> None:
    """Windows, sinks, dropout, packing and the rest, alone and together, forward and every gradient."""
    problem = make(CASES[name], rng, "cuda")
    assert wrong(problem, _run(problem), BARS[CASES[name].dtype]) == []


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_errs_no_more_than_torchs_flash_attention(causal: bool, dim: int, rng: torch.Generator) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = AttentionMask(causal=causal)
    problem = make(AttentionCase(queries=1000, dim=dim, mask=lambda device: mask), rng, "cuda")
    got = _run(problem)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in problem.tensors[:3]]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        grads = torch.autograd.grad(theirs, leaves, problem.tensors[3].transpose(1, 2))
    for name, their in zip(("out", "dq", "dk", "dv"), (theirs, *grads)):
        want = problem.expected[name]
        mine = (got[name].double() - want).square().mean().sqrt().item()
        flash = (their.transpose(1, 2).double() - want).square().mean().sqrt().item()
        assert mine <= 1.05 * flash, name  # 5 %: spread of two RMS values of 10^5 and more errors


@needs_gpu
@pytest.mark.parametrize("name", ["129", "packed with a window", "mla"])
def test_the_same_bits_every_run(name: str, rng: torch.Generator) -> None:
    problem = make(CASES[name], rng, "cuda")
    first, second = _run(problem), _run(problem)
    assert all(torch.equal(first[key].nan_to_num(), second[key].nan_to_num()) for key in problem.expected)


@needs_gpu
def test_partial_calls_merge_to_the_whole(rng: torch.Generator) -> None:
    """Ring attention: fp32 outputs merged by lse; the backward with the whole row's lse and delta, gradients in fp32."""
    mask = AttentionMask()
    problem = make(AttentionCase(queries=100, keys=256, dim=128, mask=lambda device: mask), rng, "cuda")
    q, k, v, dout = problem.tensors
    halves = [(k[:, part], v[:, part]) for part in (slice(0, 128), slice(128, 256))]
    outs, lses = [], []
    for keys, values in halves:
        out, lse = attention.attention_fwd(
            q, keys, values, problem.options, out=torch.empty_like(q, dtype=torch.float32)
        )
        outs.append(out)
        lses.append(lse)
    lse = torch.logaddexp(*lses)
    out = sum(o * torch.exp(part - lse).transpose(1, 2).unsqueeze(-1) for o, part in zip(outs, lses))
    assert isinstance(out, Tensor)
    delta = (out * dout).sum(-1).transpose(1, 2).contiguous()
    grads = [
        attention.attention_bwd(
            dout, q, keys, values, out, lse, problem.options, delta=delta,
            q_grad_dtype=torch.float32, kv_grad_dtype=torch.float32,
        )
        for keys, values in halves
    ]  # fmt: skip
    assert all(x.dtype == torch.float32 for part in grads for x in part[:3])
    got = {"out": out, "lse": lse, "dq": grads[0][0] + grads[1][0]}
    got |= {name: torch.cat((grads[0][i], grads[1][i]), 1) for i, name in ((1, "dk"), (2, "dv"))}
    assert wrong(problem, got, BARS[torch.bfloat16]) == []


@needs_gpu
def test_a_graph_replays_with_another_dropout_seed(rng: torch.Generator) -> None:
    """Packed lengths and seed are read on the device: a captured call follows what they hold at the replay."""
    case = dataclasses.replace(CASES["packed"], dropout=0.3)
    problem = make(case, rng, "cuda")
    assert problem.options.dropout is not None
    seed = problem.options.dropout.seed
    eager = _run(problem)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _run(problem)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _run(problem)
    graph.replay()
    assert all(torch.equal(captured[key].nan_to_num(), eager[key].nan_to_num()) for key in problem.expected)
    seed += 1
    graph.replay()
    again = _run(problem)
    assert not torch.equal(captured["out"].nan_to_num(), eager["out"].nan_to_num())
    assert all(torch.equal(captured[key].nan_to_num(), again[key].nan_to_num()) for key in problem.expected)


@needs_gpu
@pytest.mark.parametrize("name", ["129", "packed", "sinks, dropout and softcap"])
def test_repeated_launches_give_the_same_bits(name: str, rng: torch.Generator) -> None:
    """The first call makes the launches, later ones repeat them: other tensors, streams and graphs at once."""
    problems = [make(CASES[name], rng, "cuda") for _ in range(2)]
    wanted = []
    for problem in problems:
        attention_ops._PLANS.clear()
        wanted.append(_run(problem))
    streams = [torch.cuda.Stream() for _ in problems]
    graphs = [torch.cuda.CUDAGraph() for _ in problems]
    captured = []
    torch.cuda.synchronize()
    found: list[list[dict[str, Tensor]]] = [[], []]
    for problem, graph in zip(problems, graphs):
        with torch.cuda.graph(graph):
            captured.append(_run(problem))
    for _ in range(20):
        for problem, stream, results, graph in zip(problems, streams, found, graphs):
            with torch.cuda.stream(stream):
                results.append(_run(problem))
                graph.replay()
    torch.cuda.synchronize()
    for want, results, replayed in zip(wanted, found, captured):
        for got in (*results, replayed):
            assert all(torch.equal(got[key].nan_to_num(), want[key].nan_to_num()) for key in problems[0].expected)
    assert not torch.equal(wanted[0]["out"].nan_to_num(), wanted[1]["out"].nan_to_num())


@needs_gpu
def test_the_operators_pass_opcheck(rng: torch.Generator) -> None:
    problem = make(CASES["sinks, dropout and softcap"], rng, "cuda")
    q, k, v, dout = problem.tensors
    fields = attention._fields(problem.options, problem.sinks)
    out = torch.empty_like(dout)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(attention_ops.attention_fwd, (q, k, v, out, *fields), test_utils=tests)
    lse = attention_ops.attention_fwd(q, k, v, out, *fields)
    arguments = (dout, q, k, v, out, lse, None, None, torch.float32, *fields)
    torch.library.opcheck(attention_ops.attention_bwd, arguments, test_utils=tests)


@needs_gpu
def test_compiled_calls_give_the_same_bits(rng: torch.Generator) -> None:
    """The operator and the differentiable function, each in one graph."""
    problem = make(CASES["window"], rng, "cuda")
    q, k, v, dout = problem.tensors
    fields = attention._fields(problem.options, None)

    def operator(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        return out, attention_ops.attention_fwd(q, k, v, out, *fields)

    for eager, compiled in zip(
        operator(q, k, v), torch.compile(operator, backend="aot_eager", fullgraph=True)(q, k, v)
    ):
        assert torch.equal(eager, compiled)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional_attention(2 * q, k, v, layout="bshd", mask=problem.options.mask) * 3

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    eager_out, compiled_out = function(*leaves), torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves)
    assert torch.equal(eager_out, compiled_out)
    for mine, theirs in zip(*(torch.autograd.grad(out, leaves, dout) for out in (eager_out, compiled_out))):
        assert torch.equal(mine, theirs)


@needs_gpu
def test_offsets_go_past_two_to_the_31_elements(rng: torch.Generator) -> None:
    """The last of many heads of a long sequence lies there; its answer is that of the same head alone."""
    tokens, heads, dim = 34000, 512, 128
    assert tokens * heads * dim > 2**31
    shape = (1, tokens, heads, dim)
    q = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    small = [torch.randn(1, tokens, 1, dim, generator=rng).bfloat16().cuda() for _ in range(4)]
    q[:, :, -1:] = small[0]
    k, v = small[1], small[2]
    options = AttentionOptions(scale=dim**-0.5, mask=AttentionMask(causal=True, window=(256, 0)))
    out, lse = attention.attention_fwd(q, k, v, options)
    want, want_lse = attention.attention_fwd(small[0], k, v, options)
    assert torch.equal(out[:, :, -1:], want)
    assert torch.equal(lse[:, -1:], want_lse)
    dout = torch.zeros_like(q)
    dout[:, :, -1:] = small[3]
    dq = attention.attention_bwd(dout, q, k, v, out, lse, options)[0]
    want_dq = attention.attention_bwd(small[3], small[0], k, v, want, want_lse, options)[0]
    assert torch.equal(dq[:, :, -1:], want_dq)


@needs_gpu
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_heads_may_lie_past_two_to_the_31_elements(softcap: float, rng: torch.Generator) -> None:
    """`[batch, heads, tokens, dim]` tensors, whose heads are far apart; with a softcap the portable kernels read them."""
    tokens, heads, dim = 66000, 130, 256
    assert tokens * (heads - 1) * dim > 2**31
    q = torch.zeros(1, heads, tokens, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    small = [torch.randn(1, tokens, 1, dim, generator=rng).bfloat16().cuda() for _ in range(4)]
    q[:, :, -1:] = small[0]
    k, v = small[1], small[2]
    options = AttentionOptions(scale=dim**-0.5, mask=AttentionMask(causal=True, window=(256, 0)), softcap=softcap)
    out, lse = attention.attention_fwd(q, k, v, options, out=torch.empty_like(q))
    want, want_lse = attention.attention_fwd(small[0], k, v, options)
    assert torch.equal(out[:, :, -1:], want)
    assert torch.equal(lse[:, -1:], want_lse)
    dout = torch.zeros_like(q)
    dout[:, :, -1:] = small[3]
    dq = attention.attention_bwd(dout, q, k, v, out, lse, options)[0]
    want_dq = attention.attention_bwd(small[3], small[0], k, v, want, want_lse, options)[0]
    assert torch.equal(dq[:, :, -1:], want_dq)


@pytest.mark.parametrize("name", ["129", "mask of keys", "sinks, dropout and softcap"])
def test_fake_kernels_give_the_shapes_dtypes_and_strides(name: str) -> None:
    """What torch.compile plans with: gradients as their tensors lie, lse fp32."""
    case = CASES[name]
    with FakeTensorMode():
        v_dim = case.v_dim or case.dim
        q = torch.empty(case.queries, case.batch, case.heads, case.dim, dtype=case.dtype).transpose(0, 1)
        k = torch.empty(case.queries, case.batch, case.groups, case.dim, dtype=case.dtype).transpose(0, 1)
        v = torch.empty(case.queries, case.batch, case.groups, v_dim, dtype=case.dtype).transpose(0, 1)
        options = AttentionOptions(scale=0.1, dropout=Dropout(probability=0.1, seed=torch.zeros(1, dtype=torch.int64)))
        out, lse = attention.attention_fwd(q, k, v, options)
        assert out.shape == (case.batch, case.queries, case.heads, v_dim)
        assert (lse.dtype, lse.shape) == (torch.float32, (case.batch, case.heads, case.queries))
        grads = attention.attention_bwd(out, q, k, v, out, lse, options, kv_grad_dtype=torch.float32)
        for mine, x, dtype in zip(grads[:3], (q, k, v), (case.dtype, torch.float32, torch.float32)):
            assert (mine.shape, mine.stride(), mine.dtype) == (x.shape, x.stride(), dtype)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"dtype": torch.float32}, "bf16 and fp16, not float32"),
    "wide heads": ({"head_dim": 320}, "head dims go up to 256, got 320 and 128"),
    "bias": ({"bias": True}, "adds no bias"),
    "CPU": ({"device": "cpu"}, "the tensors are on cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_said(name: str) -> None:
    pytest.importorskip("triton", reason="without triton everything is refused for that")
    fields, message = REFUSED[name]
    base: dict[str, Any] = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "heads": 8,
        "groups": 2,
        "head_dim": 128,
        "v_head_dim": 128,
    }
    assert attention.supports(AttentionRequest(**base)) is None
    reason = attention.supports(AttentionRequest(**(base | fields)))
    assert reason is not None
    assert message in reason


def test_it_is_offered_before_the_reference() -> None:
    names = default_registry().names("attention")
    assert names.index("triton") < names.index("reference")


def test_two_tiles_cover_the_head_with_few_columns() -> None:
    launch = pytest.importorskip("primus_turbo_plugin.kernels.triton.attention_launch", reason="needs triton")
    for dim in range(1, 257):
        first, second = launch.split_dim(dim)
        assert first + second >= dim
        assert all(size == 0 or (size >= 16 and size & (size - 1) == 0) for size in (first, second)), dim
        assert first + second <= max(16, 1 << (dim - 1).bit_length())
    assert [launch.split_dim(dim) for dim in (96, 128, 192, 256)] == [(64, 32), (128, 0), (128, 64), (256, 0)]


@pytest.mark.parametrize("block", [16, 64, 128])
def test_slots_suffice_for_any_packed_lengths(block: int, rng: torch.Generator) -> None:
    """start // block + piece + tile never collides, and never exceeds what the shapes alone allow."""
    for _ in range(200):
        rooms = torch.randint(0, 300, (int(torch.randint(1, 9, (1,), generator=rng)),), generator=rng).tolist()
        starts = [0]
        for room in rooms:
            starts.append(starts[-1] + room)
        tokens = starts[-1] + int(torch.randint(0, 200, (1,), generator=rng))
        used: list[int] = []
        for piece, (start, stop) in enumerate(pairwise([*starts, tokens])):
            used += [start // block + piece + tile for tile in range(-(-(stop - start) // block))]
        assert len(set(used)) == len(used)
        assert all(slot < tokens // block + len(rooms) + 1 for slot in used)
