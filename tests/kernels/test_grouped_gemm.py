"""Every grouped GEMM backend that serves this machine against float64 products of operands quantised expert by expert."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels import groups as groups_module
from primus_turbo_plugin.kernels.grouped_operands import take_contraction, take_rows
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.reference import quantize
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.requests import GroupedGemmRequest
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from tests.support.grouped import LOADS, depth_operands, experts, products, rows_operands, tokens, weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MX4, MX8 = QuantSpec(format="mxfp4"), QuantSpec(format="mxfp8")
ROTATED = QuantSpec(format="mxfp4", hadamard=16)
TENSORWISE, ROWWISE = QuantSpec(format="fp8", block="tensorwise"), QuantSpec(format="fp8", block="rowwise")
BLOCKS, SQUARES = QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="128x128")
SPECS: dict[str, tuple[QuantSpec | None, QuantSpec | None]] = {
    "bf16": (None, None),
    "mxfp4 squares": (MX4, QuantSpec(format="mxfp4", block="32x32")),
    "mxfp4 rotated": (ROTATED, ROTATED),
    "mxfp8 hybrid": (QuantSpec(format="mxfp8", element="e5m2"), MX8),
    "fp8 tensorwise": (TENSORWISE, TENSORWISE),
    "fp8 rowwise": (ROWWISE, ROWWISE),
    "fp8 blocks": (BLOCKS, SQUARES),
    "mxfp4 x bf16": (MX4, None),
}
BACKENDS = default_registry().names("grouped_gemm")
FP8_UNITS_DB = 50.0
"""GPUs' FP8 units sum products in as little as 14 bits: 2^-13 of the largest, about 60 dB; a wrong scale is below 20."""


def _kernels(backend: str, kind: Any, a: Any, b: Any, out_dtype: torch.dtype, *, accumulate: bool = False) -> Any:
    kinds = [x.dtype if isinstance(x, torch.Tensor) else x.spec for x in (a, b)]
    request = GroupedGemmRequest(
        device=DEVICE, kind=kind, a=kinds[0], b=kinds[1], out_dtype=out_dtype, accumulate=accumulate
    )
    found = default_registry().backend("grouped_gemm", backend)
    reason = found.supports(request)
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    return found.kernels


def _check(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor, name: str) -> None:
    got = got.cpu().double()
    if DEVICE == "cuda" and name.startswith("fp8"):
        error = (got - want).norm()
        assert error == 0 or 20 * math.log10(float(want.norm() / error)) > FP8_UNITS_DB
    else:
        assert bool(((got - want).abs() <= bound).all()), float(((got - want).abs() - bound).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("load", LOADS)
def test_rows_are_multiplied_with_their_own_expert(backend, name, load, rng) -> None:
    """fprop and dgrad: odd N, K no multiple of a block, experts without tokens or with one."""
    counts, specs = LOADS[load], SPECS[name]
    n, k = 65, 132
    x, weight = tokens(rng, counts, k), torch.randn(len(counts), n, k, generator=rng).bfloat16()
    a, b, groups = rows_operands(x, weight, counts, specs, DEVICE)
    kernels = _kernels(backend, "rows", a, b, torch.float32)
    y = kernels.grouped_gemm_nt(a, b, groups, out_dtype=torch.float32)
    assert y.shape == (sum(counts), n)
    found = products(experts(x, counts, specs[0], columnwise=False), weights(weight, specs[1]))
    for got, (want, bound) in zip(y.split(list(counts)), found):
        _check(got, want, bound, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("load", LOADS)
def test_depth_sums_over_the_tokens_of_one_expert(backend, name, load, rng) -> None:
    """wgrad, written and added: an expert without tokens gets zero, or keeps what is there."""
    counts, specs = LOADS[load], SPECS[name]
    specs = (specs[0], specs[1] if name == "mxfp4 x bf16" else specs[0])
    m, n = 65, 132
    dy, x = tokens(rng, counts, m), tokens(rng, counts, n)
    a, b, padded = depth_operands(dy, x, counts, specs, DEVICE)
    sides = (experts(t, counts, spec, columnwise=True) for t, spec in zip((dy, x), specs))
    found = products(*sides)
    kernels = _kernels(backend, "depth", a, b, torch.float32)
    out = torch.full((len(counts), m, n), math.nan, device=DEVICE)
    assert kernels.grouped_gemm_depth(a, b, padded, out, accumulate=False) is out
    before = torch.randn(len(counts), m, n, generator=rng)
    total = before.to(DEVICE, copy=True)
    by_expert = name in ("fp8 tensorwise", "fp8 rowwise")
    kernels.grouped_gemm_depth(a, b, padded, total, accumulate=True, scales_by_expert=by_expert)
    for expert, (want, bound) in enumerate(found):
        _check(out[expert], want, bound, name)
        if counts[expert] == 0:
            assert torch.equal(out[expert].cpu(), torch.zeros(m, n))
            assert torch.equal(total[expert].cpu(), before[expert])
        start = before[expert].double()
        _check(total[expert], want + start, bound + 2.0**-23 * (want + start).abs(), name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_of_dgrad_and_of_strided_views(backend, rng) -> None:
    """dgrad's weight is a transposed view; rows of x may lie apart."""
    counts = LOADS["uneven"]
    dy = tokens(rng, counts, 144)[:, :72]
    weight = torch.randn(len(counts), 72, 40, generator=rng).bfloat16()
    a, b, groups = rows_operands(dy, weight.transpose(1, 2), counts, (None, None), DEVICE)
    kernels = _kernels(backend, "rows", a, b, torch.bfloat16)
    y = kernels.grouped_gemm_nt(a, b, groups, out_dtype=torch.bfloat16)
    for got, piece, w in zip(y.split(list(counts)), dy.split(list(counts)), weight):
        want = piece.double() @ w.double()
        assert bool(((got.cpu().double() - want).abs() <= 2.0**-8 * want.abs() + 1e-2).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("load", LOADS)
def test_bf16_results_are_rounded_once_and_empty_experts_get_zero(backend, load, rng) -> None:
    """Sizes of whole 16 bytes, which `torch._grouped_mm` wants as well."""
    counts, n, k = LOADS[load], 72, 136
    x, dy = tokens(rng, counts, k), tokens(rng, counts, n)
    weight = torch.randn(len(counts), n, k, generator=rng).bfloat16()
    a, b, groups = rows_operands(x, weight, counts, (None, None), DEVICE)
    y = _kernels(backend, "rows", a, b, torch.bfloat16).grouped_gemm_nt(a, b, groups, out_dtype=torch.bfloat16)
    found = products(experts(x, counts, None, columnwise=False), weights(weight, None))
    for got, (want, bound) in zip(y.split(list(counts)), found):
        _check(got, want, bound + 2.0**-8 * want.abs(), "bf16")
    a, b, groups = depth_operands(dy, x, counts, (None, None), DEVICE)
    out = torch.full((len(counts), n, k), math.nan, device=DEVICE, dtype=torch.bfloat16)
    _kernels(backend, "depth", a, b, torch.bfloat16).grouped_gemm_depth(a, b, groups, out, accumulate=False)
    found = products(*(experts(t, counts, None, columnwise=True) for t in (dy, x)))
    for got, (want, bound) in zip(out, found):
        _check(got, want, bound + 2.0**-8 * want.abs(), "bf16")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_repeats_itself_is_a_gradient(backend, rng) -> None:
    """What the sum of a layer's outputs gives, and the sum over tokens: strides of zero, dgrad and wgrad."""
    counts, n, k = LOADS["uneven"], 72, 136
    x, weight = tokens(rng, counts, k), torch.randn(len(counts), n, k, generator=rng).bfloat16()
    for dy in (torch.randn(1, n, generator=rng).bfloat16(), torch.randn((), generator=rng).bfloat16()):
        for kind, other in (("rows", weight.transpose(1, 2)), ("depth", x)):
            results = []
            repeated = dy.to(DEVICE).expand(sum(counts), n)
            for t in (repeated, repeated.contiguous()):
                operands = rows_operands if kind == "rows" else depth_operands
                a, b, groups = operands(t, other, counts, (None, None), DEVICE)
                kernels = _kernels(backend, kind, a, b, torch.bfloat16)
                if kind == "rows":
                    results.append(kernels.grouped_gemm_nt(a, b, groups, out_dtype=torch.bfloat16))
                else:
                    out = torch.empty(len(counts), n, k, device=DEVICE, dtype=torch.bfloat16)
                    results.append(kernels.grouped_gemm_depth(a, b, groups, out, accumulate=False))
            torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["rows", "depth"])
def test_a_nan_stays_with_its_expert(backend, kind, rng) -> None:
    """Tiles reach past an expert's rows; what they find there must not come back."""
    counts = (40, 30, 50)
    x, dy = tokens(rng, counts, 64), tokens(rng, counts, 48)
    x[40:70], dy[40:70] = math.nan, math.inf
    if kind == "rows":
        weight = torch.randn(3, 48, 64, generator=rng).bfloat16()
        weight[1] = math.nan
        a, b, groups = rows_operands(x, weight, counts, (None, None), DEVICE)
        y = _kernels(backend, kind, a, b, torch.float32).grouped_gemm_nt(a, b, groups, out_dtype=torch.float32)
        pieces = y.split(counts)
    else:
        a, b, padded = depth_operands(dy, x, counts, (MX8, MX8), DEVICE)
        out = torch.zeros(3, 48, 64, device=DEVICE)
        pieces = _kernels(backend, kind, a, b, torch.float32).grouped_gemm_depth(a, b, padded, out, accumulate=False)
        a, b, groups = depth_operands(dy, x, counts, (None, None), DEVICE)
        plain = torch.zeros(3, 48, 64, device=DEVICE)
        _kernels(backend, kind, a, b, torch.float32).grouped_gemm_depth(a, b, groups, plain, accumulate=False)
        assert bool(plain[0].isfinite().all())
        assert bool(plain[2].isfinite().all())
    assert bool(pieces[0].isfinite().all())
    assert bool(pieces[1].isnan().all())
    assert bool(pieces[2].isfinite().all())


def test_counts_known_on_the_host_are_filled_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of experts with a capacity, which Megatron captures: torch copies nothing from the host while it captures."""
    counts = torch.tensor([2, 0, 3])
    expected = Groups.of(counts, 5, torch.device("cpu"))
    monkeypatch.setattr(groups_module, "_is_captured", lambda device: True)
    monkeypatch.setattr(torch, "tensor", None)
    captured = Groups.of(counts, 5, torch.device("cpu"))
    assert captured.offsets.dtype == expected.offsets.dtype
    assert torch.equal(captured.offsets, expected.offsets)
    assert captured.host == expected.host


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")
def test_groups_of_counts_on_the_host_can_be_captured() -> None:
    device, graph = torch.device("cuda", torch.cuda.current_device()), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        groups = Groups.of(torch.tensor([2, 0, 3]), 5, device)
    graph.replay()
    assert groups.offsets.tolist() == [0, 2, 2, 5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused_with_the_shapes(backend) -> None:
    groups = Groups.of(torch.tensor([2, 3]).to(DEVICE), 5, torch.device(DEVICE))
    x, w = (torch.zeros(*shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((5, 16), (3, 8, 16)))
    kernels = _kernels(backend, "rows", x, w, torch.bfloat16)
    with pytest.raises(ShapeError, match=r"b \[2, N, K\].*got \[5, 16\] and \[3, 8, 16\]"):
        kernels.grouped_gemm_nt(x, w, groups, out_dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=r"out \[2, M, N\].*\[3, 16, 16\]"):
        kernels.grouped_gemm_depth(x.t(), x.t(), groups, torch.zeros(3, 16, 16, device=DEVICE), accumulate=False)
    out = torch.zeros(2, 16, 16, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=r"float32 to be accumulated into, got torch\.bfloat16"):
        kernels.grouped_gemm_depth(x.t(), x.t(), groups, out, accumulate=True)


def test_groups_check_what_the_host_knows() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ShapeError, match=r"sum to the rows of x, 7; got \[3, 3\] with sum 6"):
        Groups.of(torch.tensor([3, 3]), 7, cpu)
    with pytest.raises(ShapeError, match=r"multiples of 32, as said; got \[64, 33\]"):
        Groups.of(torch.tensor([64, 33]), 97, cpu, multiple=32)
    with pytest.raises(ShapeError, match="non-negative"):
        Groups.of(torch.tensor([-1, 3]), 2, cpu)
    with pytest.raises(ShapeError, match=r"int32 or int64 \[experts\].*torch.float32 \[2\]"):
        Groups.of(torch.tensor([1.0, 2.0]), 3, cpu)


@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("multiple", [1, 32, 128])
def test_padding_moves_every_expert_to_a_multiple_and_loses_no_row(counts, multiple, rng) -> None:
    """With offsets that only the device knows, the bound on the length must hold for every load."""
    known = Groups.of(torch.tensor(counts), sum(counts), torch.device("cpu"))
    unknown = Groups(known.offsets, known.total)
    for groups in (known, unknown):
        padded = groups.padded(multiple)
        assert all(offset % multiple == 0 for offset in padded.offsets.tolist())
        assert padded.offsets[-1] <= padded.total
        assert padded.total % multiple == 0
        sizes = padded.offsets.diff()
        assert all(0 <= size - count < multiple for size, count in zip(sizes.tolist(), counts))
        places = groups.places_in(padded)
        assert places.unique().numel() == sum(counts)
    padded = known.padded(multiple)
    assert padded.total == padded.offsets[-1]
    assert padded.padded(multiple) is padded


def test_rows_that_lie_apart_already_are_not_moved() -> None:
    """Known on the host, or said of a device that only the device could be asked."""
    counts = torch.tensor([64, 0, 128])
    assert Groups.of(counts, 192, torch.device("cpu")).padded(32).multiple == 64
    said = Groups(torch.tensor([0, 64, 64, 192]), 192, multiple=32)
    assert said.padded(32) is said
    assert said.padded(128) is not said


def test_pieces_of_stacked_operands_are_those_of_one_expert(rng) -> None:
    x = torch.randn(96, 64, generator=rng).bfloat16()
    for spec in (MX4, QuantSpec(format="mxfp4", block="32x32"), BLOCKS):
        whole = quantize.quantize(x, spec)
        alone = quantize.quantize(x[32:64], spec)
        if spec is not BLOCKS or spec.block_shape[0] == 1:
            piece = take_rows(whole, 32, 64)
            assert torch.equal(piece.decode(), alone.decode())
        if spec.is_mx:
            assert torch.equal(take_contraction(whole, 32, 64).decode(), whole.decode()[:, 32:64])
