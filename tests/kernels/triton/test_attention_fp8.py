"""FP8 attention's Triton kernels on whatever GPU is here, against the reference; fake kernels and refusals on any machine."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from primus_turbo_plugin.functional.attention import attention as functional_attention
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, AttentionRequest
from primus_turbo_plugin.kernels.reference import attention as reference
from primus_turbo_plugin.kernels.triton import attention, attention_fp8_ops
from primus_turbo_plugin.precision.attention import BLOCK_TOKENS, AttentionPrecision
from tests.kernels.triton.attention_cases import CASES, AttentionCase, Problem, make

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")
FP8 = AttentionPrecision(format="fp8")

BARS = {"out": 8e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dsinks": 8e-3}
"""RMS error over RMS value against the reference. Forward: Hopper's FP8 units keep some 14 bits of a sum, which moves scores by
2^-11 and probabilities over their rounding boundaries (H200: 2e-3 at dim 64, 5e-3 at 256; an eighth of FP8's own error).
Backward: the bf16 kernels' own roundings (test_attention.py)."""


def _run(problem: Problem, options: AttentionOptions, kernels: object = attention) -> dict[str, Tensor]:
    q, k, v, dout = problem.tensors if kernels is attention else [x.nan_to_num() for x in problem.tensors]
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype, device=q.device)
    _, lse = kernels.attention_fwd(q, k, v, options, sinks=problem.sinks, out=out)  # type: ignore[attr-defined]
    grads = kernels.attention_bwd(dout, q, k, v, out, lse, options, sinks=problem.sinks)  # type: ignore[attr-defined]
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv", "dbias", "dsinks"), grads))


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_every_feature_has_the_references_numbers(name: str, rng: torch.Generator) -> None:
    problem = make(CASES[name], rng, "cuda")
    for gradients in ("e4m3", "e5m2", "bf16") if name in ("129", "packed with padding") else ("e4m3",):
        precision = AttentionPrecision(format="fp8", gradients=gradients)
        options = dataclasses.replace(problem.options, precision=precision)
        got, want = _run(problem, options), _run(problem, options, reference)
        torch.testing.assert_close(got["lse"], want["lse"].float(), rtol=2e-3, atol=2e-3)
        scale = max(want[key].double().square().mean().sqrt().item() for key in ("dq", "dk", "dv"))
        for key, bar in BARS.items():
            if want.get(key) is None:
                continue
            error = (got[key].double() - want[key].double()).square().mean().sqrt().item()
            size = want[key].double().square().mean().sqrt().item()
            assert error <= bar * max(size, 1e-3 * scale), (key, error, size)


@needs_gpu
def test_codes_and_scales_are_the_references_on_many_sizes(rng: torch.Generator) -> None:
    for dim in (40, 64, 128, 192, 256):
        problem = make(AttentionCase(queries=300, dim=dim, strided=True), rng, "cuda")
        q = problem.tensors[0]
        for element in ("e4m3", "e5m2"):
            options = dataclasses.replace(problem.options, precision=FP8)
            mine, want = (kernels.attention_decoded(q, options, element) for kernels in (attention, reference))
            assert torch.equal(mine, want)


@needs_gpu
def test_a_graph_replays_with_other_tensors() -> None:
    q, k, v = (torch.randn(300, 2, n, 64, device="cuda").bfloat16().requires_grad_() for n in (4, 2, 2))
    dout = torch.randn(300, 2, 4, 64, device="cuda").bfloat16()

    def both() -> list[Tensor]:
        out = functional_attention(q, k, v, mask=AttentionMask(causal=True), precision=FP8)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        for x in (q, k, v):
            x.mul_(-1.5)
    graph.replay()
    assert all(torch.equal(mine, want) for mine, want in zip(captured, both()))


@needs_gpu
def test_the_operators_pass_opcheck_and_repeat_bit_for_bit(rng: torch.Generator) -> None:
    problem = make(CASES["sinks, dropout and softcap"], rng, "cuda")
    q, k, v, dout = problem.tensors
    fields = attention._fields(problem.options, problem.sinks)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(
        attention_fp8_ops.attention_fp8_fwd, (q, k, v, torch.empty_like(dout), *fields), test_utils=tests
    )
    torch.library.opcheck(attention_fp8_ops.attention_decoded, (q, False, "e4m3", None, None, 0, 1), test_utils=tests)
    options = dataclasses.replace(problem.options, precision=FP8)
    first, second = _run(problem, options), _run(problem, options)
    assert all(torch.equal(first[key], second[key]) for key in ("out", "lse", "dq", "dk", "dv"))


@needs_gpu
def test_what_padding_holds_and_a_nan_reach_only_what_they_should(rng: torch.Generator) -> None:
    """NaN in a block of v reaches the rows that multiply with it, and no other head."""
    problem = make(AttentionCase(queries=300, dim=64), rng, "cuda")
    problem.tensors[2][0, 200, 0, 3] = float("nan")
    out = _run(problem, dataclasses.replace(problem.options, precision=FP8))["out"]
    assert bool(out[0, 256:, :2].isnan().all())
    assert not out[0, :BLOCK_TOKENS].isnan().any()
    assert not out[0, :, 2:].isnan().any()


@pytest.mark.parametrize("name", ["129", "mla", "fp16"])
def test_fake_kernels_give_the_shapes_and_dtypes(name: str) -> None:
    case = CASES[name]
    with FakeTensorMode():
        v_dim = case.v_dim or case.dim
        q = torch.empty(case.queries, case.batch, case.heads, case.dim, dtype=case.dtype).transpose(0, 1)
        k = torch.empty(case.queries, case.batch, case.groups, case.dim, dtype=case.dtype).transpose(0, 1)
        v = torch.empty(case.queries, case.batch, case.groups, v_dim, dtype=case.dtype).transpose(0, 1)
        options = AttentionOptions(scale=0.1, precision=FP8)
        out, lse = attention.attention_fwd(q, k, v, options)
        assert (lse.dtype, lse.shape) == (torch.float32, (case.batch, case.heads, case.queries))
        for mine, x in zip(attention.attention_bwd(out, q, k, v, out, lse, options)[:3], (q, k, v)):
            assert (mine.shape, mine.dtype) == (x.shape, x.dtype)
            assert mine.transpose(0, 1).is_contiguous()


def test_what_is_not_supported_is_said() -> None:
    pytest.importorskip("triton", reason="without triton everything is refused for that")
    base = AttentionRequest(
        device="cuda", dtype=torch.bfloat16, heads=8, groups=2, head_dim=128, v_head_dim=128, fp8=True
    )
    assert attention.supports(base) is None
    assert "fp8" in str(base)
    refused = ({"bias": True}, "no bias"), ({"dtype": torch.float32}, "bf16 and fp16"), ({"head_dim": 320}, "up to 256")
    for change, message in refused:
        assert message in str(attention.supports(dataclasses.replace(base, **change)))


def test_columns_of_codes_are_contractions_that_fp8_units_take() -> None:
    launch = pytest.importorskip("primus_turbo_plugin.kernels.triton.attention_fp8_launch", reason="needs triton")
    for dim in range(1, 257):
        first, second = launch.split_columns(dim)
        assert first + second >= dim
        assert all(size == 0 or (size >= 32 and size & (size - 1) == 0) for size in (first, second)), dim
        assert second < first
    assert [launch.split_columns(dim) for dim in (40, 64, 80, 96, 192, 256)] == [
        (64, 0), (64, 0), (64, 32), (64, 32), (128, 64), (256, 0),
    ]  # fmt: skip
