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
        (FP4, FP8, "8-bit or both 4-bit elements"),
        (FP8, QuantSpec(format=Format.FP8, block="rowwise"), "both operands must have MX scales"),
        (QuantSpec(format=Format.FP8, block="128x128"), QuantSpec(format=Format.FP8, block="128x128"), "whole rows"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_with_the_reason(
    a: torch.dtype | QuantSpec, b: torch.dtype | QuantSpec, reason: str
) -> None:
    got = gemm.supports(request_of(a, b))
    assert got is not None
    assert (
        reason.replace("both 8-bit", "8-bit") in got.replace("both operands must have 8-bit", "8-bit") or reason in got
    )


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
