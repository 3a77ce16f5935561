"""kernels/reference/fused.py: the ops in front against float64 and torch, the bytes against those of the two steps apart."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.reference import fused
from primus_turbo_plugin.kernels.reference.norm import rms_norm_fwd
from primus_turbo_plugin.kernels.reference.quantize import quantize_both
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.requests import FusedQuantizeRequest
from primus_turbo_plugin.kernels.triton import fused as turbo
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.tree_sum import tree_sum
from tests.kernels.quantize_cases import same_tensor
from tests.tolerances import BF16_UNIT

ROW, COL = QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", hadamard=16)
STOCHASTIC = QuantSpec(format="mxfp8", rounding="stochastic")
KEY = RoundingKey(seed=1, draw=2, tensor=3, rank=0)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    "specs", [(ROW, COL), (STOCHASTIC, None), (None, ROW)], ids=lambda specs: " | ".join(map(str, specs))
)
def test_a_fused_norm_has_the_bytes_of_norm_then_quantise(specs, zero_centered, rng) -> None:
    x = (torch.randn(70, 96, generator=rng) * 3).bfloat16()
    weight = torch.randn(96, generator=rng).bfloat16()
    *copies, rstd = fused.rms_norm_quantize(x, weight, 1e-5, *specs, zero_centered_gamma=zero_centered, key=KEY)
    y, want_rstd = rms_norm_fwd(x, weight, 1e-5, zero_centered_gamma=zero_centered)
    for got, want in zip(copies, quantize_both(y, *specs, key=KEY)):
        assert (got is None and want is None) or same_tensor(got, want)
    assert torch.equal(rstd, want_rstd)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = exact * (weight.double() + zero_centered)
    torch.testing.assert_close(y.double(), exact, rtol=BF16_UNIT * 1.001, atol=1e-30)


def test_a_fused_swiglu_has_the_bytes_of_swiglu_then_quantise(rng) -> None:
    x = (torch.randn(70, 192, generator=rng) * 3).bfloat16()
    gate, up = x.double().chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    y = fused.swiglu_fwd(x)
    torch.testing.assert_close(y.double(), exact, rtol=BF16_UNIT * 1.001, atol=1e-30)
    for got, want in zip(fused.swiglu_quantize(x, ROW, COL), quantize_both(y, ROW, COL)):
        assert same_tensor(got, want)


def test_silu_over_its_whole_range() -> None:
    g = torch.linspace(-87, 100, 1_000_001)
    exact = g.double() * torch.sigmoid(g.double())
    # Seven roundings of the polynomial, of t = g log2(e) relative to 1 (87 * 2^-24 in f at the far end), of three Newton steps.
    assert ((fused.silu(g).double() - exact).abs() <= 1.2e-5 * exact.abs()).all()
    near = g.abs() < 8
    assert ((fused.silu(g).double() - exact).abs()[near] <= 1e-6 * exact.abs()[near]).all()
    assert fused.silu(torch.tensor([float("nan")])).isnan().all()
    assert fused.silu(torch.tensor([-1e4, 1e30])).tolist() == pytest.approx([0.0, 1e30], abs=1e-30, rel=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 33, 100, 257])
def test_sums_are_those_of_float64_and_do_not_depend_on_tiles(rows, rng) -> None:
    x = torch.randn(rows, 40, generator=rng)
    total = tree_sum(x, 0)
    # log2(n) roundings a term.
    bound = 9 * 2.0**-24 * x.double().abs().sum(0)
    assert ((total.double() - x.double().sum(0)).abs() <= bound).all()
    parts = torch.stack([tree_sum(x[i : i + 32], 0) for i in range(0, rows, 32)]) if rows else x
    assert torch.equal(tree_sum(parts, 0), total)


def test_quantise_and_sum_gives_the_copies_and_the_sum(rng) -> None:
    dy = torch.randn(100, 64, generator=rng).bfloat16()
    *copies, sums = fused.quantize_and_sum(dy, ROW, COL)
    for got, want in zip(copies, quantize_both(dy, ROW, COL)):
        assert same_tensor(got, want)
    torch.testing.assert_close(sums.double(), dy.double().sum(0), rtol=0, atol=7 * 2.0**-24 * 100 * 4)
    assert sums.dtype == torch.float32


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"gate then up, got \[4, 5\]"):
        fused.swiglu_fwd(torch.zeros(4, 5))


def test_the_registry_serves_fused_requests_and_the_gpu_kernels_say_what_they_cannot_do() -> None:
    for request in FusedQuantizeRequest.examples("cpu"):
        assert default_registry().select("fused_quantize", request).name == "reference"
        assert str(request)

    def reason(**fields: object) -> str | None:
        values = {"kind": "rms_norm", "dtype": torch.bfloat16, "hidden": 4096, "weight_dtype": torch.bfloat16}
        return turbo.supports(FusedQuantizeRequest(device="cuda", **{**values, **fields}))  # type: ignore[arg-type]

    whole = QuantSpec(format="fp8", block="rowwise")
    pytest.importorskip("triton")
    assert reason(row_spec=ROW, col_spec=COL) is None
    assert reason(dtype=torch.float16) == "fuses with bf16, not float16"
    assert reason(hidden=100) == "reads 8 columns at a time, hidden is 100"
    assert reason(hidden=1 << 16) == "normalises rows of at most 32768, hidden is 65536"
    assert "knows only after the op in front" in str(reason(row_spec=whole))
    assert reason(kind="sums", row_spec=whole) is None
    assert "has no fused kernel for mxfp4(e2m1, 1x32, even, H64)" in str(
        reason(col_spec=QuantSpec(format="mxfp4", hadamard=64))
    )
