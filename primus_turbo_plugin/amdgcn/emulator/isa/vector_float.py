"""Vector floating point: float32, float16 and float64 arithmetic, transcendentals, division helpers.

Source: CDNA "VOP1", "VOP2", "VOP3A"; RDNA4 of the same names. Transcendentals are computed in double and rounded once, so
they are at least as accurate as hardware's (1 ulp) and not bit-identical to it. Denormals are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import numpy as np

from primus_turbo_plugin.amdgcn.emulator.isa.alu import scalar, vector
from primus_turbo_plugin.amdgcn.emulator.isa.functions import fma16, fma32
from primus_turbo_plugin.amdgcn.emulator.isa.registry import GFX950, GFX1250
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array

_op = partial(vector, family="vector float")
F16, F32, F64 = np.float16, np.float32, np.float64
_function: Callable[..., Array]


def _rounded(function: Callable[[Array], Array], dtype: type = F32) -> Callable[[Array], Array]:
    """A function evaluated in double, rounded once."""
    return lambda a: function(a.astype(F64)).astype(dtype)


# -- add, multiply, fused multiply-add --------------------------------------------------------------------------------------
for _kind, _fma in (("f32", fma32), ("f16", fma16)):
    _op(f"v_add_{_kind}", f"{_kind} = {_kind} {_kind}", lambda a, b: a + b, "D = S0 + S1")
    _op(f"v_sub_{_kind}", f"{_kind} = {_kind} {_kind}", lambda a, b: a - b, "D = S0 - S1")
    _op(f"v_subrev_{_kind}", f"{_kind} = {_kind} {_kind}", lambda a, b: b - a, "D = S1 - S0")
    _op(f"v_mul_{_kind}", f"{_kind} = {_kind} {_kind}", lambda a, b: a * b, "D = S0 * S1")
    _op(f"v_fma_{_kind}", f"{_kind} = {_kind} {_kind} {_kind}", _fma, "D = fma(S0, S1, S2)")
    _op(f"v_fmac_{_kind}", f"{_kind} = {_kind} {_kind} dst", _fma, "D = fma(S0, S1, D)")
    _op(
        f"v_fmaak_{_kind} v_fmamk_{_kind}",
        f"{_kind} = {_kind} {_kind} {_kind}",
        _fma,
        "D = fma(S0, S1, S2), one literal",
    )
_op("v_mul_legacy_f32 v_mul_dx9_zero_f32", "f32 = f32 f32",
    lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b), "D = S0 * S1, zero if either is zero")  # fmt: skip

# -- minima and maxima --------------------------------------------------------------------------------------------------------
for _kind in ("f32", "f16"):
    for _name, _function in (("min", np.fmin), ("max", np.fmax)):
        _op(
            f"v_{_name}_{_kind} v_{_name}_num_{_kind}", f"{_kind} = {_kind} {_kind}", _function,
            f"D = {_name}(S0, S1), numbers win over NaN",
        )  # fmt: skip
        _op(
            f"v_{_name}3_{_kind} v_{_name}3_num_{_kind}", f"{_kind} = {_kind} {_kind} {_kind}",
            lambda *a, f=_function: reduce(f, a), f"D = {_name}(S0, S1, S2), numbers win over NaN",
        )  # fmt: skip
    for _name, _function in (("minimum", np.minimum), ("maximum", np.maximum)):
        _op(
            f"v_{_name}_{_kind}",
            f"{_kind} = {_kind} {_kind}",
            _function,
            f"D = {_name}(S0, S1), NaN wins",
            archs=GFX1250,
        )
        _op(
            f"v_{_name}3_{_kind}", f"{_kind} = {_kind} {_kind} {_kind}",
            lambda *a, f=_function: reduce(f, a), f"D = {_name}(S0, S1, S2), NaN wins", archs=GFX950 | GFX1250,
        )  # fmt: skip
    _op(
        f"v_med3_{_kind} v_med3_num_{_kind}", f"{_kind} = {_kind} {_kind} {_kind}",
        lambda a, b, c: np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c)), "D = the middle of S0, S1, S2",
    )  # fmt: skip

# -- transcendentals and rounding ---------------------------------------------------------------------------------------------
_UNARY: dict[str, tuple[Callable[[Array], Array], str]] = {
    "exp": (np.exp2, "2 ** S0"), "log": (np.log2, "log2(S0)"), "rcp": (lambda a: 1 / a, "1 / S0"),
    "rsq": (lambda a: 1 / np.sqrt(a), "1 / sqrt(S0)"), "sqrt": (np.sqrt, "sqrt(S0)"),
    "sin": (lambda a: np.sin(2 * np.pi * a), "sin(2 pi S0)"), "cos": (lambda a: np.cos(2 * np.pi * a), "cos(2 pi S0)"),
    "fract": (lambda a: a - np.floor(a), "S0 - floor(S0)"), "trunc": (np.trunc, "trunc(S0)"),
    "floor": (np.floor, "floor(S0)"), "ceil": (np.ceil, "ceil(S0)"), "rndne": (np.rint, "round to nearest even"),
}  # fmt: skip
for _name, (_function, _meaning) in _UNARY.items():
    for _kind, _dtype in (("f32", F32), ("f16", F16)):
        _op(f"v_{_name}_{_kind}", f"{_kind} = {_kind}", _rounded(_function, _dtype), f"D = {_meaning}")
for _name in ("exp", "log", "rcp", "rsq", "sqrt"):
    scalar(
        f"v_s_{_name}_f32", "f32 = f32", _rounded(_UNARY[_name][0]), f"D = {_UNARY[_name][1]}, scalar", archs=GFX1250,
        family="scalar float", source="RDNA4: VOP3",
    )  # fmt: skip
_op("v_rcp_iflag_f32", "f32 = f32", _rounded(_UNARY["rcp"][0]), "D = 1 / S0")
_op("v_tanh_f32", "f32 = f32", _rounded(np.tanh), "D = tanh(S0)", archs=GFX1250)
_op("v_tanh_f16", "f16 = f16", _rounded(np.tanh, F16), "D = tanh(S0)", archs=GFX1250)
_op("v_ldexp_f32", "f32 = f32 i32", lambda a, b: np.ldexp(a.astype(F64), b).astype(F32), "D = S0 * 2 ** S1")
_op(
    "v_ldexp_f16",
    "f16 = f16 i16",
    lambda a, b: np.ldexp(a.astype(F64), b.astype(np.int32)).astype(F16),
    "D = S0 * 2 ** S1",
)
_op("v_frexp_exp_i32_f32", "i32 = f32", lambda a: np.frexp(np.nan_to_num(a, posinf=0, neginf=0))[1].astype(np.int32),
    "D = exponent of S0, mantissa in [0.5, 1)")  # fmt: skip
_op("v_frexp_mant_f32", "f32 = f32", lambda a: np.frexp(a)[0], "D = mantissa of S0 in [0.5, 1)")

# -- bfloat16 (gfx1250) -------------------------------------------------------------------------------------------------------
for _name, _function, _meaning in (
    ("add", lambda a, b: a + b, "S0 + S1"), ("sub", lambda a, b: a - b, "S0 - S1"), ("mul", lambda a, b: a * b, "S0 * S1"),
    ("min_num", np.fmin, "min(S0, S1)"), ("max_num", np.fmax, "max(S0, S1)"),
):  # fmt: skip
    _op(f"v_{_name}_bf16", "bf16 = bf16 bf16", _function, f"D = {_meaning}", archs=GFX1250, source="LLVM: gfx1250")
_op("v_fma_bf16", "bf16 = bf16 bf16 bf16", fma32, "D = fma(S0, S1, S2)", archs=GFX1250, source="LLVM: gfx1250")
for _name in ("exp", "log", "rcp", "rsq", "sqrt", "tanh"):
    _function = np.tanh if _name == "tanh" else _UNARY[_name][0]
    _op(
        f"v_{_name}_bf16", "bf16 = bf16", _rounded(_function), f"D = {_name}(S0)", archs=GFX1250, source="LLVM: gfx1250"
    )

# -- float64 ------------------------------------------------------------------------------------------------------------------
_op("v_add_f64", "f64 = f64 f64", lambda a, b: a + b, "D = S0 + S1")
_op("v_mul_f64", "f64 = f64 f64", lambda a, b: a * b, "D = S0 * S1")
_op("v_fma_f64", "f64 = f64 f64 f64", lambda a, b, c: _fma64(a, b, c), "D = S0 * S1 + S2")
_op("v_fmac_f64", "f64 = f64 f64 dst", lambda a, b, c: _fma64(a, b, c), "D = S0 * S1 + D")
_op("v_fmaak_f64 v_fmamk_f64", "f64 = f64 f64 f64", lambda a, b, c: _fma64(a, b, c), "D = S0 * S1 + S2, one literal of 64 bits",
    archs=GFX1250, source="LLVM: gfx1250")  # fmt: skip
for _name in ("rcp", "rsq", "sqrt", "fract", "trunc", "floor", "ceil", "rndne"):
    _op(f"v_{_name}_f64", "f64 = f64", _UNARY[_name][0], f"D = {_UNARY[_name][1]}")
_op("v_ldexp_f64", "f64 = f64 i32", lambda a, b: np.ldexp(a, b), "D = S0 * 2 ** S1")
_op("v_frexp_exp_i32_f64", "i32 = f64", lambda a: np.frexp(np.nan_to_num(a, posinf=0, neginf=0))[1].astype(np.int32),
    "D = exponent of S0, mantissa in [0.5, 1)")  # fmt: skip
_op("v_frexp_mant_f64", "f64 = f64", lambda a: np.frexp(a)[0], "D = mantissa of S0 in [0.5, 1)")
_op("v_min_f64 v_min_num_f64", "f64 = f64 f64", np.fmin, "D = min(S0, S1)")
_op("v_max_f64 v_max_num_f64", "f64 = f64 f64", np.fmax, "D = max(S0, S1)")


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """Rounded once where long double has 64 mantissa bits; a double product may differ in the last place."""
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(F64)
