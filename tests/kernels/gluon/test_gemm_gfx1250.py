"""Launchers of the gfx1250 GEMMs: what they refuse and why, which tile they take, how tensors become arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.gluon import gemm_gfx1250 as gemm
from primus_turbo_plugin.kernels.gluon import triton_release
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_plan import (
    LDS_BYTES,
    SCRATCH_BYTES,
    GemmPlan,
    choose_tile,
    fitted,
    lds_bytes,
    pieces,
    tiles_for,
)
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.precision.quant_spec import QuantSpec

MXFP4, MXFP8 = QuantSpec(format="mxfp4"), QuantSpec(format="mxfp8")
ROWWISE = QuantSpec(format="fp8", block="rowwise")


def request(a: object, b: object) -> GemmRequest:
    return GemmRequest(device="cuda", a=a, b=b, out_dtype=torch.bfloat16)


@pytest.fixture
def new_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "triton_refusal", lambda: None)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (MXFP4, MXFP4), (MXFP8, MXFP4),
        (ROWWISE, QuantSpec(format="fp8", block="tensorwise")), (MXFP4, QuantSpec(format="mxfp4", block="32x32")),
    ],
)  # fmt: skip
def test_what_is_served(a: object, b: object, new_triton: None) -> None:
    assert gemm.supports(request(a, b)) is None


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (torch.float32, torch.float32, "got float32 and float32"),
        (torch.bfloat16, torch.float16, "both be bf16 or both fp16"),
        (torch.bfloat16, MXFP4, "not one of each"),
        (MXFP8, ROWWISE, "both operands must have MX scales"),
        (QuantSpec(format="fp8", block="1x128"), ROWWISE, "blocks of 1x128"),
    ],
)
def test_what_is_refused_says_why(a: object, b: object, reason: str, new_triton: None) -> None:
    assert reason in str(gemm.supports(request(a, b)))


@pytest.mark.parametrize(("version", "served"), [("3.6.0", False), ("3.7.1", False), ("3.8.0", True), ("3.10.0", True)])
def test_an_old_triton_is_refused_with_its_version(version: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_release.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_release.importlib.metadata, "version", lambda name: version)
    refusal = gemm.triton_refusal()
    assert (refusal is None) == served
    assert served or version in str(refusal)


ELEMENTS = [("bf16", "bf16"), ("e4m3", "e5m2"), ("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e2m1", "e5m2")]


@pytest.mark.parametrize(("a", "b"), ELEMENTS)
@pytest.mark.parametrize("out_bytes", [2, 4])
@pytest.mark.parametrize("k_inner", [True, False])
@pytest.mark.parametrize("vectors", [True, False])
def test_every_tile_fits_lds_with_at_least_two_stages(
    a: str, b: str, out_bytes: int, k_inner: bool, vectors: bool
) -> None:
    for tile in tiles_for(a, b, mx=a not in ("bf16", "fp16")):
        fields = {name: value for name, value in tile._asdict().items() if name != "share"}
        plan = fitted(
            GemmPlan(
                A=a, B=b, A_K=k_inner, B_K=k_inner, PIECES=pieces(tile.BM), MX=a not in ("bf16", "fp16"), **fields
            ),
            out_bytes,
            vectors=vectors,
        )
        assert lds_bytes(plan, out_bytes) + SCRATCH_BYTES * vectors <= LDS_BYTES
        assert plan.STAGES >= 2
        assert plan.BM % plan.SLAB == 0
        assert sum(pieces(plan.BM)) == plan.BM
        assert all(piece % plan.SLAB == 0 for piece in pieces(plan.BM))
        assert plan.SLAB >= 32, "two waves of 16 rows"


@pytest.mark.parametrize(("a", "b"), ELEMENTS)
def test_tiles_that_do_not_depend_on_size_are_the_largest_for_much_work_and_the_smallest_for_little(
    a: str, b: str
) -> None:
    tiles = tiles_for(a, b)
    assert choose_tile(a, b, 16384, 28672, 1, 256) == tiles[0]
    assert choose_tile(a, b, 100, 100, 1, 256) == tiles[-1]
    assert choose_tile(a, b, 1024, 1024, 1, 256) == tiles[-1], "16 large tiles would leave most compute units idle"


def test_the_group_of_every_row_tile(rng: torch.Generator) -> None:
    for _ in range(20):
        groups = int(torch.randint(1, 9, (), generator=rng))
        sizes = torch.randint(0, 300, (groups,), generator=rng)
        sizes[torch.rand(groups, generator=rng) < 0.3] = 0
        offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
        table = gemm.row_tiles(offsets, 128, int(offsets[-1])).tolist()
        want = [g for g in range(groups) for _ in range(-(-int(sizes[g]) // 128))]
        assert table[: groups + 1] == [*np.cumsum([0] + [want.count(g) for g in range(groups)])]
        assert table[groups + 1 :][: len(want)] == want
        assert all(item == groups for item in table[groups + 1 + len(want) :])


def call(a: object, b: object, y: torch.Tensor, **fields: object) -> gemm.KernelCall:
    pytest.importorskip("triton", reason="the call names a kernel, which is written in Triton")
    if (reason := gemm.triton_refusal()) is not None:
        pytest.skip(reason)
    return gemm.gemm_call(a, b, y, cus=8, **fields)


def test_orientation_and_strides_are_read_off_plain_operands(rng: torch.Generator) -> None:
    y = torch.empty(40, 24, dtype=torch.bfloat16)
    a = torch.randn(64, 48, generator=rng).bfloat16().t()[:40]
    b = torch.randn(24, 128, generator=rng).bfloat16()[:, ::2]  # contiguous along neither axis: copied
    made = call(a, b, y)
    plan = made.constants["P"]
    assert (plan.A_K, plan.B_K) == (False, True)
    assert (made.args["stride_a"], made.args["stride_b"]) == (48, 64)
    assert made.args["a_ptr"].data_ptr() == a.data_ptr()
    assert torch.equal(made.args["b_ptr"], b)
    assert made.grid == (1,)


def test_square_block_scales_are_spread_over_their_rows(rng: torch.Generator) -> None:
    spec = QuantSpec(format="mxfp4", block="32x32")
    a = quantize(torch.randn(70, 96, generator=rng), spec)
    made = call(a, a, torch.empty(70, 70))
    scale = made.args["a_scale"]
    assert scale.shape == (70, 3)
    assert torch.equal(scale, a.block_scale[torch.arange(70) // 32])
    assert made.args["stride_sa"] == 3


def test_a_tensorwise_scale_is_read_by_every_row_and_a_rotation_keeps_its_padding(rng: torch.Generator) -> None:
    x = quantize(torch.randn(33, 40, generator=rng), QuantSpec(format="fp8", block="tensorwise"))
    made = call(x, quantize(torch.randn(17, 40, generator=rng), ROWWISE), torch.empty(33, 17))
    assert (made.args["stride_sa"], made.args["stride_sb"], made.args["K"]) == (0, 1, 40)
    assert made.constants["P"].ROW_SCALE
    rotated = quantize(torch.randn(33, 40, generator=rng), QuantSpec(format="mxfp4", hadamard=16))
    assert call(rotated, rotated, torch.empty(33, 33)).args["K"] == 64


def test_pointer_copies_are_refused_for_rows_that_are_not_16_bytes(rng: torch.Generator) -> None:
    a, b = (torch.randn(16, 68, generator=rng).bfloat16() for _ in range(2))
    with pytest.raises(ShapeError, match=r"rows of a must be multiples of 16 bytes.*got 68 elements with stride 68"):
        call(a, b, torch.empty(16, 16), ablation=gemm.Ablation(tdm=False))


def test_shapes_of_groups_are_checked(rng: torch.Generator) -> None:
    a, b = torch.randn(12, 32, generator=rng).bfloat16(), torch.randn(3, 8, 32, generator=rng).bfloat16()
    y = torch.empty(12, 8, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 4, 4, 12], dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"offsets must be contiguous int32 or int64.*got torch.int16"):
        gemm.grouped_call(a, b, offsets.short(), y, cus=1)
    with pytest.raises(ShapeError, match=r"with 3 groups; got a \[12, 32\], b \[2, 8, 32\]"):
        gemm.grouped_call(a, b[:2], offsets, y, cus=1)
    with pytest.raises(ShapeError, match=r"out \[3, M, N\].*out \[3, 32, 8\]"):
        gemm.depth_call(a.t(), a.t(), offsets, torch.empty(3, 32, 8), accumulate=False, cus=1)
    with pytest.raises(ShapeError, match=r"float32 to accumulate into, got torch\.bfloat16"):
        gemm.grouped_gemm_depth(a.t(), a.t(), offsets, torch.empty(3, 32, 32).bfloat16(), accumulate=True)


def test_an_output_that_is_not_contiguous_along_n_is_refused(rng: torch.Generator) -> None:
    a = torch.randn(16, 32, generator=rng).bfloat16()
    with pytest.raises(ShapeError, match="output must be contiguous along its last axis"):
        gemm.gemm_nt(a, a, out_dtype=torch.float32, out=torch.empty(16, 16).t())


def test_an_empty_contraction_needs_no_kernel(rng: torch.Generator) -> None:
    a, b = torch.empty(3, 0, dtype=torch.bfloat16), torch.empty(2, 0, dtype=torch.bfloat16)
    bias = torch.randn(2, generator=rng).bfloat16()
    assert torch.equal(gemm.gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias), bias.expand(3, 2))
    assert torch.equal(gemm.gemm_nt(a, b, out_dtype=torch.float32), torch.zeros(3, 2))
    out = torch.ones(3, 2)
    assert gemm.gemm_nt(a, b, out_dtype=torch.float32, out=out) is out
    assert bool((out == 1).all())
