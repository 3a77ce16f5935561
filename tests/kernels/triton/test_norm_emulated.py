"""The norm kernels compiled for AMD GPUs and executed by the emulator, against the reference, and their ISA gates.

As in test_quantize_emulated.py, nothing here stands in for an AMD GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.amdgcn import IsaGate
from primus_turbo_plugin.kernels.reference import norm as reference
from primus_turbo_plugin.kernels.triton import norm as launcher
from primus_turbo_plugin.kernels.triton import norm_kernel as kernels

ARCHS = ("gfx942", "gfx950", "gfx1250")
LANES = {"gfx942": 64, "gfx950": 64, "gfx1250": 32}
GATE = IsaGate(forbidden_anywhere=("scratch_.*",))
each_arch = pytest.mark.parametrize("arch", ARCHS)
EPS, PROGRAMS = 1e-5, 2


def _run(kernel: Any, arch: str, grid: Any, args: dict[str, Any], constants: dict[str, Any], **options: Any) -> None:
    compiled = amdgcn.compile(kernel, arch, args, constants, **options)
    amdgcn.launch(compiled, grid, args)
    report = amdgcn.isa_report(compiled)
    assert not amdgcn.check_gate(report, GATE), amdgcn.render(report)


def _inputs(rows: int, hidden: int, rng: torch.Generator) -> tuple[Tensor, ...]:
    """Rows at a distance, x with a mean; weight and bias."""
    wide = (torch.randn(2, rows, hidden + 8, generator=rng) * 2 + 1).bfloat16()
    weight, bias = torch.randn(2, hidden, generator=rng)
    return wide[0, :, :hidden], wide[1, :, 8:], weight, bias


def _forward(
    arch: str, x: Tensor, weight: Tensor, bias: Tensor | None, rms: bool, log: int
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean, rstd; `log`: columns at a time where that is less than a row."""
    rows, hidden = x.shape
    y, mean, rstd = torch.full((rows, hidden), 7.0).bfloat16(), torch.full((rows,), 7.0), torch.full((rows,), 7.0)
    args = {
        "x_ptr": x, "weight_ptr": weight, "bias_ptr": bias, "y_ptr": y, "mean_ptr": None if rms else mean, "rstd_ptr": rstd,
        "rows": rows, "hidden": hidden, "stride_row": x.stride(0), "stride_col": x.stride(1), "eps": EPS,
    }  # fmt: skip
    constants = {"RMS": rms, "ZERO_CENTERED": rms, "BIAS": bias is not None}
    if 1 << log < hidden:
        constants |= {"LOG": log, "LOG_CHUNKS": ((hidden - 1) >> log).bit_length()}
        kernel, grid, warps = kernels.norm_fwd_chunks_kernel, rows, 1
    else:
        tile = launcher.forward_tile(hidden, LANES[arch])
        constants |= {"ROWS": tile["ROWS"], "LOG": tile["LOG"]}
        kernel, grid, warps = kernels.norm_fwd_kernel, -(-rows // tile["ROWS"]), tile["num_warps"]
    _run(kernel, arch, grid, args, constants, num_warps=warps, enable_fp_fusion=False)
    return y, mean, rstd


@each_arch
@pytest.mark.parametrize("log", [15, 6], ids=["whole rows", "chunks"])
def test_forward(arch, log, rng) -> None:
    """The RMS norm in every bit, the layer norm up to the order of its sums."""
    x, _, weight, bias = _inputs(19, 264, rng)
    y, _, rstd = _forward(arch, x, weight, None, True, log)
    want, want_rstd = reference.rms_norm_fwd(x, weight, EPS, zero_centered_gamma=True)
    assert torch.equal(rstd, want_rstd)
    assert torch.equal(y, want)
    y, mean, rstd = _forward(arch, x, weight, bias, False, log)
    want, want_mean, want_rstd = reference.layer_norm_fwd(x, weight, bias, EPS)
    torch.testing.assert_close(mean, want_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd, want_rstd, rtol=1e-5, atol=0)
    torch.testing.assert_close(y.float(), want.float(), rtol=2.0**-7, atol=1e-5)


def _backward(arch: str, given: dict[str, Any], rms: bool, how: str) -> tuple[Tensor, Tensor]:
    """dx, and the sums of weight and bias `[1 or 2, hidden]`."""
    rows, hidden = given["x"].shape
    dx, sums = torch.full((rows, hidden), 7.0).bfloat16(), 1 if rms else 2
    parts = torch.full((sums, PROGRAMS, hidden), 7.0)
    residual = given["residual"]
    args = {
        "dy_ptr": given["dy"], "x_ptr": given["x"], "weight_ptr": given["weight"], "mean_ptr": None if rms else given["mean"],
        "rstd_ptr": given["rstd"], "res_ptr": residual, "dx_ptr": dx, "parts_ptr": parts, "rows": rows, "hidden": hidden,
    }  # fmt: skip
    for name, tensor in (("dy", given["dy"]), ("x", given["x"]), ("res", residual)):
        args |= {
            f"{name}_row": 0 if tensor is None else tensor.stride(0),
            f"{name}_col": 0 if tensor is None else tensor.stride(1),
        }
    kinds = {"RMS": rms, "ZERO_CENTERED": rms, "RESIDUAL": residual is not None}
    if how != "chunks":
        tile = launcher.backward_tile(hidden, LANES[arch]) | {"SUMS": how == "with sums"}
        warps = tile.pop("num_warps")
        grid = PROGRAMS if tile["SUMS"] else -(-rows // tile["ROWS"])
        _run(kernels.norm_bwd_kernel, arch, grid, args, {**kinds, **tile}, num_warps=warps)
    else:
        chunked = {name: value for name, value in args.items() if name != "parts_ptr"}
        _run(kernels.norm_bwd_chunks_kernel, arch, rows, chunked, {**kinds, "LOG": 7}, num_warps=1)
    if how != "with sums":
        needed = (
            "dy_ptr",
            "x_ptr",
            "mean_ptr",
            "rstd_ptr",
            "parts_ptr",
            "rows",
            "hidden",
            "dy_row",
            "dy_col",
            "x_row",
            "x_col",
        )
        tile = {"RMS": rms, "ROWS": 8, "COLS": 64}
        grid = (PROGRAMS, -(-hidden // 64))
        _run(kernels.norm_weight_kernel, arch, grid, {name: args[name] for name in needed}, tile, num_warps=1)
    out = torch.full((sums, hidden), 7.0)
    summed = {"parts_ptr": parts, "out_ptr": out, "count": PROGRAMS, "hidden": hidden}
    tile = {"ROWS": kernels.SUM_ROWS, "COLS": kernels.SUM_COLS}
    _run(kernels.sum_parts_kernel, arch, (-(-hidden // kernels.SUM_COLS), sums), summed, tile, num_warps=4)
    return dx, out


@each_arch
@pytest.mark.parametrize("how", ["with sums", "whole rows", "chunks"])
def test_backward(arch, how, rng) -> None:
    x, dy, weight, _ = _inputs(37, 264, rng)
    residual = torch.randn(37, 264, generator=rng).bfloat16()
    _, rstd = reference.rms_norm_fwd(x, weight, EPS, zero_centered_gamma=True)
    given = {"x": x, "dy": dy, "weight": weight, "rstd": rstd, "residual": residual}
    dx, sums = _backward(arch, given, True, how)
    want, *want_sums = reference.rms_norm_bwd(dy, x, weight, rstd, zero_centered_gamma=True, dresidual=residual)
    torch.testing.assert_close(dx.float(), want.float(), rtol=2.0**-7, atol=1e-5)
    torch.testing.assert_close(sums, torch.stack(want_sums), rtol=1e-5, atol=1e-4)
    _, mean, rstd = reference.layer_norm_fwd(x, weight, None, EPS)
    given |= {"rstd": rstd, "mean": mean, "residual": None}
    dx, sums = _backward(arch, given, False, how)
    want, *want_sums = reference.layer_norm_bwd(dy, x, weight, mean, rstd)
    torch.testing.assert_close(dx.float(), want.float(), rtol=2.0**-7, atol=1e-5)
    torch.testing.assert_close(sums, torch.stack(want_sums), rtol=1e-5, atol=1e-4)


@each_arch
@pytest.mark.parametrize("hidden", [4096, 8192, 16384])
def test_the_kernels_of_models_do_not_spill(arch, hidden) -> None:
    """Compiled only: a layer norm, whose backward holds the most."""
    tensors = {name: torch.zeros(2, hidden).bfloat16() for name in ("x_ptr", "y_ptr", "dy_ptr", "dx_ptr")}
    vectors = {name: torch.zeros(hidden) for name in ("weight_ptr", "bias_ptr")}
    statistics = {name: torch.zeros(2) for name in ("mean_ptr", "rstd_ptr")}
    everything = {
        **tensors, **vectors, **statistics, "res_ptr": None, "parts_ptr": torch.zeros(2, 2, hidden), "rows": 2, "hidden": hidden,
        "stride_row": hidden, "stride_col": 1, "eps": EPS, "dy_row": hidden, "dy_col": 1, "x_row": hidden, "x_col": 1,
        "res_row": 0, "res_col": 0,
    }  # fmt: skip
    kinds = {"RMS": False, "ZERO_CENTERED": True}
    for kernel, tile, more in (
        (kernels.norm_fwd_kernel, launcher.forward_tile(hidden, LANES[arch]), {"BIAS": True}),
        (kernels.norm_bwd_kernel, launcher.backward_tile(hidden, LANES[arch]), {"RESIDUAL": False}),
    ):
        warps, constants = tile.pop("num_warps"), {**kinds, **tile, **more}
        args = {name: everything[name] for name in kernel.arg_names if name not in constants}
        report = amdgcn.isa_report(amdgcn.compile(kernel, arch, args, constants, num_warps=warps))
        assert not amdgcn.check_gate(report, GATE), amdgcn.render(report)
