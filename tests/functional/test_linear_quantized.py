"""The quantised linear against fp64 products of operands that torchao quantised: nothing of ours computes the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.functional.linear import linear
from tests.support import seeded
from tests.support.linear import leaf, make_call, plan, relative_error

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao needs Python 3.12 here")
FP4, FP8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn


def _mx(t: Tensor, rule: str, element: torch.dtype, block: int = 32) -> Tensor:
    """t quantised along its last dimension by torchao and dequantised, fp64."""
    mode = mx_tensor.ScaleCalculationMode[rule.upper()]
    scale, codes = mx_tensor.to_mx(t.contiguous(), element, block, mode)
    return mx_tensor.to_dtype(codes, scale, element, block, torch.float32).double()


def _mx_2d(w: Tensor, rule: str) -> Tensor:
    """MXFP4 with one scale for 32x32: each tile laid out as one block of 1024."""
    rows, columns = (size // 32 for size in w.shape)
    tiles = w.view(rows, 32, columns, 32).transpose(1, 2).reshape(rows * columns, 1024)
    return _mx(tiles, rule, FP4, 1024).view(rows, columns, 32, 32).transpose(1, 2).reshape(w.shape)


def _hadamard16() -> Tensor:
    """By its definition, H[i, j] = (-1)^popcount(i & j), over 4."""
    return torch.tensor(
        [[(-1.0) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)], dtype=torch.float64
    )


def _rotated(t: Tensor) -> Tensor:
    """t H along the last dimension, fp32. Exact for inputs on a coarse grid."""
    return (t.double().view(*t.shape[:-1], -1, 16) @ _hadamard16()).reshape(t.shape).float()


def _on_grid(g: torch.Generator, *shape: int) -> Tensor:
    """BF16 values of few bits and several sizes, so that sums of 16 of them are exact and no block is like the next."""
    magnitude = 2.0 ** torch.randint(-2, 3, (shape[0], 1), generator=g)
    return (torch.randint(-24, 25, shape, generator=g) / 8 * magnitude).bfloat16()


def _run(recipe: str, x: Tensor, w: Tensor, dy: Tensor, /, **overrides: Any) -> dict[str, Tensor]:
    leaves = [leaf(x), leaf(w)]
    call = make_call(plan(recipe, **overrides), torch.float32)
    y = linear(*leaves, None, call)
    y.backward(dy)
    return {"fprop": y.detach(), "dgrad": leaves[0].grad, "wgrad": leaves[1].grad}


def _assert_products(got: dict[str, Tensor], operands: dict[str, tuple[Tensor, Tensor]]) -> None:
    """fp32 accumulation of exactly these operands; another code anywhere is an error of 1e-3 or more."""
    for gemm, (a, b) in operands.items():
        error = relative_error(got[gemm], a @ b.t())
        assert error < 1e-6, (gemm, error)


@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
def test_preset_wgrad_multiplies_what_torchao_quantises(request: Any, rule: str) -> None:
    """The default recipe: 2D weights whose codes serve both directions, x and dy of wgrad rotated by H16 along tokens."""
    g = seeded(request)
    x, w, dy = _on_grid(g, 128, 96), _on_grid(g, 64, 96), _on_grid(g, 128, 64)
    rules = {operand: {"scale_rule": rule} for operand in ("x", "w", "dy")}
    got = _run("mxfp4", *(t.float() for t in (x, w, dy)), **rules)
    w2d = _mx_2d(w, rule)
    _assert_products(
        got,
        {
            "fprop": (_mx(x, rule, FP4), w2d),
            "dgrad": (_mx(dy, rule, FP4), w2d.t()),
            "wgrad": (_mx(_rotated(dy.float().t()), rule, FP4), _mx(_rotated(x.float().t()), rule, FP4)),
        },
    )


def test_preset_all_rotates_every_gemm_along_its_own_contraction(request: Any) -> None:
    g = seeded(request)
    x, w, dy = (t.float() for t in (_on_grid(g, 64, 96), _on_grid(g, 32, 96), _on_grid(g, 64, 32)))
    q = {name: _mx(_rotated(t), "even", FP4) for name, t in {"x": x, "w": w, "dy": dy, "wt": w.t()}.items()}
    columns = [_mx(_rotated(t.t()), "even", FP4) for t in (dy, x)]
    _assert_products(
        _run("mxfp4_all", x, w, dy),
        {"fprop": (q["x"], q["w"]), "dgrad": (q["dy"], q["wt"]), "wgrad": (columns[0], columns[1])},
    )


@pytest.mark.parametrize(("recipe", "element", "rule"), [("mxfp4_none", FP4, "even"), ("mxfp8", FP8, "rceil")])
def test_unrotated_presets_multiply_what_torchao_quantises(
    request: Any, recipe: str, element: torch.dtype, rule: str
) -> None:
    g = seeded(request)
    x, w, dy = (torch.randn(*shape, generator=g) for shape in ((64, 96), (32, 96), (64, 32)))
    q = [_mx(t, rule, element) for t in (x, w, dy, w.t(), dy.t(), x.t())]
    _assert_products(_run(recipe, x, w, dy), {"fprop": (q[0], q[1]), "dgrad": (q[2], q[3]), "wgrad": (q[4], q[5])})


def test_rotation_pays_where_some_tokens_are_outliers(request: Any) -> None:
    """Tokens 30 times as large as the rest share their blocks' scales. Unrotated the error is near .15, rotated near .06."""
    g = seeded(request)
    x, w, dy = (torch.randn(*shape, generator=g) for shape in ((1024, 64), (64, 64), (1024, 64)))
    outliers = torch.randperm(1024, generator=g)[:10]
    x[outliers] *= 30
    dy[outliers] *= 30
    exact = dy.double().t() @ x.double()
    errors = {recipe: relative_error(_run(recipe, x, w, dy)["wgrad"], exact) for recipe in ("mxfp4", "mxfp4_none")}
    assert errors["mxfp4"] < 0.75 * errors["mxfp4_none"], errors


def test_random_signs_follow_the_plans_seed_and_cancel(request: Any) -> None:
    g = seeded(request)
    x, w, dy = (torch.randn(*shape, generator=g) for shape in ((64, 32), (32, 32), (64, 32)))
    results = []
    for seed in (1, 1, 2):
        of = plan("mxfp4", wgrad={"random_signs": True})
        of = dataclasses.replace(of, precision=dataclasses.replace(of.precision, signs_seed=seed))
        weight = leaf(w)
        linear(x, weight, None, make_call(of, torch.float32)).backward(dy)
        results.append(weight.grad)
        assert relative_error(weight.grad, dy.t() @ x) < 0.25
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_all"])
@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_a_rotation_over_padded_tokens_still_cancels(request: Any, recipe: str, tokens: int) -> None:
    """With operands the format holds exactly after rotation, the product must be exact: one token of ones."""
    x, dy = torch.zeros(tokens, 32), torch.zeros(tokens, 32)
    x[0], dy[0] = 2.0, 4.0
    got = _run(recipe, x, torch.zeros(32, 32), dy)
    assert torch.equal(got["wgrad"], dy.t() @ x)
