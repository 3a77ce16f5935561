"""The choice of gfx950 GEMM kernels: what is supported and why not, tiles, and the backend in the registry. No GPU, no triton."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError, UnsupportedError
from primus_turbo_plugin.kernels.gluon import gemm, gemm_gfx950, gemm_gfx1250, triton_release
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_plan import choose_tile, tiles_for
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

FP4, FP8 = QuantSpec(format=Format.MXFP4), QuantSpec(format=Format.MXFP8)


def request_of(a: torch.dtype | QuantSpec, b: torch.dtype | QuantSpec, device: str = "cuda") -> GemmRequest:
    return GemmRequest(device=device, a=a, b=b, out_dtype=torch.bfloat16)


@pytest.fixture
def on_gfx950(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "this_arch", lambda: "gfx950")
    monkeypatch.setattr(gemm_gfx950, "triton_refusal", lambda: None)


@pytest.mark.usefixtures("on_gfx950")
@pytest.mark.parametrize(
    "kind", [torch.bfloat16, torch.float16, FP4, FP8, QuantSpec(format=Format.FP8, block="rowwise")], ids=str
)
def test_two_operands_of_a_kind_are_served(kind: torch.dtype | QuantSpec) -> None:
    assert gemm.supports(request_of(kind, kind)) is None


@pytest.mark.usefixtures("on_gfx950")
@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (torch.float32, torch.float32, "both be bf16 or both fp16, got float32"),
        (torch.bfloat16, torch.float16, "got bfloat16 and float16"),
        (torch.bfloat16, FP4, "two quantised operands or two plain ones"),
        (FP4, FP8, "both operands must have 8-bit or both 4-bit elements"),
        (FP8, QuantSpec(format=Format.FP8, block="rowwise"), "both operands must have MX scales"),
        (QuantSpec(format=Format.FP8, block="128x128"), QuantSpec(format=Format.FP8, block="128x128"), "whole rows"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_with_the_reason(
    a: torch.dtype | QuantSpec, b: torch.dtype | QuantSpec, reason: str
) -> None:
    assert reason in str(gemm.supports(request_of(a, b)))


def test_other_devices_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gemm.supports(request_of(torch.bfloat16, torch.bfloat16, "cpu")) == (
        "runs on gfx950 and gfx1250 GPUs, the tensors are on cpu"
    )
    monkeypatch.setattr(gemm, "this_arch", lambda: "gfx942")
    assert gemm.supports(request_of(FP4, FP4)) == "is written for gfx950 and gfx1250, this GPU is gfx942"


@pytest.mark.parametrize(("installed", "refused"), [("3.7.1", True), ("3.8.0", False), ("3.10.0+rocm", False)])
def test_an_older_triton_is_refused(installed: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_release.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_release.importlib.metadata, "version", lambda name: installed)
    reason = gemm_gfx950.triton_refusal()
    assert (reason is not None) == refused
    if reason is not None:
        assert "3.8" in reason
        assert installed in reason


@pytest.mark.parametrize("name", ["triton-rocm", "pytorch-triton-rocm", None])
def test_torchs_rocm_builds_package_triton_under_other_names(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module says its version itself where the package has yet another name."""

    def version(asked: str) -> str:
        if asked != name:
            raise triton_release.importlib.metadata.PackageNotFoundError(asked)
        return "3.6.0"

    monkeypatch.setattr(triton_release.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_release.importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    for kernels in (gemm_gfx950, gemm_gfx1250):
        assert "or later" in str(kernels.triton_refusal())
        assert "found 3.6.0" in str(kernels.triton_refusal())


@pytest.mark.parametrize("arch", ["gfx950", "gfx1250"])
def test_targets_are_refused_under_an_older_triton(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = importlib.import_module(f"primus_turbo_plugin.kernels.gluon.gemm_{arch}_targets")
    monkeypatch.setattr(targets, "triton_refusal", lambda: "needs Triton 3.8 or later, found 3.6.0")
    with pytest.raises(UnsupportedError, match=rf"{arch} GEMMs: needs Triton 3.8 or later, found 3.6.0"):
        targets.isa_targets()


@pytest.mark.usefixtures("on_gfx950")
def test_gluon_comes_before_triton() -> None:
    names = default_registry().names("gemm_nt")
    assert names.index("gluon") < names.index("triton")
    assert default_registry().select("gemm_nt", request_of(FP4, FP4), order=["gluon", "triton"]).name == "gluon"


def test_without_such_a_gpu_the_registry_says_why() -> None:
    with pytest.raises(UnsupportedError, match="gfx950 and gfx1250"):
        default_registry().select("gemm_nt", request_of(FP4, FP4, "cpu"), order=["gluon"])


@pytest.mark.parametrize(
    ("rows", "cols", "tile"),
    [(8192, 12288, (256, 192)), (4096, 4096, (256, 128)), (512, 512, (128, 128)), (1, 1, (128, 128))],
)
def test_the_tile_fills_the_gpu(rows: int, cols: int, tile: tuple[int, int]) -> None:
    chosen = choose_tile("bf16", rows, cols)
    assert tile == (chosen.BM, chosen.BN)


def test_every_tile_fits_the_lds_twice() -> None:
    for element in ("bf16", "e4m3", "e2m1"):
        for tile in tiles_for(element):
            assert 2 * 128 * (tile.BM + tile.BN) * 33 // 32 <= 160 * 1024
            assert (tile.BM % tile.HM, tile.BN % tile.HN) == (0, 0)


def test_offsets_and_outputs_are_checked() -> None:
    a, b = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    y = torch.empty(8, 8)
    with pytest.raises(ShapeError, match=r"int32 or int64 .* got torch.float32"):
        gemm_gfx950.grouped_call(a, b, torch.zeros(3), y, cus=1)
    offsets = torch.tensor([0, 4, 8])
    with pytest.raises(ShapeError, match="with 2 groups"):
        gemm_gfx950.grouped_call(a, b[:1], offsets, y, cus=1)
    with pytest.raises(ShapeError, match="K is 0"):
        gemm_gfx950.grouped_call(a[:, :0], b[..., :0], offsets, y, cus=1)
    out = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match="float32 to accumulate"):
        gemm_gfx950.depth_call(a.t()[:8], a.t()[:8], offsets, out, accumulate=True, cus=1)


@pytest.mark.parametrize("kernels", [gemm_gfx950, gemm_gfx1250])
@pytest.mark.parametrize(
    ("values", "wrong"),
    [([0, 48, 96], "got 48 as offset 1 of 3"), ([0, 64, 32], "got 32 as offset 2"), ([0, 64, 128], "got 128 as offset 2"),
     ([-32, 0, 96], "got -32 as offset 0")],
    ids=str,
)  # fmt: skip
def test_offsets_that_the_host_knows_are_checked(kernels: types.ModuleType, values: list[int], wrong: str) -> None:
    codes, scale = torch.zeros(8, 96, dtype=torch.uint8), torch.full((8, 3), 127, dtype=torch.uint8)
    x = QuantizedTensor(codes, scale, FP8, (8, 96))
    with pytest.raises(ShapeError, match=rf"multiples of 32 and lie in 0 \.\.\. 96; {wrong}"):
        kernels.grouped_gemm_depth(x, x, torch.tensor(values), torch.zeros(2, 8, 8), accumulate=False)


def test_a_promise_that_breaks_blocks_of_scales_is_refused() -> None:
    codes, scale = torch.zeros(8, 96, dtype=torch.uint8), torch.full((8, 3), 127, dtype=torch.uint8)
    x, offsets = QuantizedTensor(codes, scale, FP8, (8, 96)), torch.tensor([0, 96])
    with pytest.raises(ShapeError, match=r"multiples of 32, got multiple=16\. Pad every group"):
        gemm_gfx950.grouped_gemm_depth(x, x, offsets, torch.zeros(1, 8, 8), accumulate=False, multiple=16)


def test_plain_scales_are_copied_only_where_their_rows_are_no_whole_words() -> None:
    pytest.importorskip("triton", reason="the call names a kernel, which is written in Triton")
    if (reason := gemm_gfx950.triton_refusal()) is not None:
        pytest.skip(reason)
    for blocks, copied in ((12, False), (13, True), (4, True)):
        codes = torch.zeros(8, 32 * blocks, dtype=torch.uint8)
        scale = torch.arange(8 * blocks, dtype=torch.uint8).view(8, blocks)
        x = QuantizedTensor(codes, scale, FP8, (8, 32 * blocks))
        out = torch.zeros(1, 8, 8)
        read = gemm_gfx950.depth_call(x, x, torch.tensor([0, 32]), out, accumulate=False, cus=1).args["a_scale"]
        assert torch.equal(read[:, :blocks], scale)
        assert (read.stride(0) % 4, read.shape[1] >= 8) == (0, True)
        assert (read.data_ptr() != scale.data_ptr()) == copied


def test_strides_too_large_for_offsets_are_refused() -> None:
    a = torch.empty_strided((4, 8), (1 << 23, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(ShapeError, match="rows of a are 8388608 elements apart"):
        gemm_gfx950.gemm_call(a, torch.zeros(8, 8, dtype=torch.bfloat16), torch.empty(4, 8), cus=1)


def test_codes_that_do_not_start_at_whole_transfers_are_copied() -> None:
    pytest.importorskip("triton", reason="the call names a kernel, which is written in Triton")
    if (reason := gemm_gfx950.triton_refusal()) is not None:
        pytest.skip(reason)
    codes = torch.arange(8 * 80, dtype=torch.uint8).view(8, 80)[:, 4:68]
    x = QuantizedTensor(codes, torch.full((8, 2), 127, dtype=torch.uint8), FP8, (8, 64))
    read = gemm_gfx950.gemm_call(x, x, torch.empty(8, 8), cus=1).args["a_ptr"]
    assert torch.equal(read, codes)
    assert (read.data_ptr() % 16, read.stride(0) % 16) == (0, 0)


def test_operands_rotated_differently_are_refused() -> None:
    from primus_turbo_plugin.kernels.reference.quantize import quantize

    x = torch.randn(32, 64)
    a, b = quantize(x, FP4), quantize(x, QuantSpec(format=Format.MXFP4, hadamard=16))
    with pytest.raises(ShapeError, match="rotated alike"):
        gemm_gfx950.gemm_call(a, b, torch.empty(32, 32), cus=1)
