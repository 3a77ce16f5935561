"""Vector comparisons: a lane mask from two operands; `v_cmpx` narrows the execution mask instead.

Source: CDNA, RDNA4 "VOPC". Inactive lanes give 0.
"""

from __future__ import annotations

import numpy as np

from primus_turbo_plugin.amdgcn.emulator.isa.alu import compare, vector
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array
from primus_turbo_plugin.amdgcn.emulator.waves import U32

_ORDERED = {
    "lt": (lambda a, b: a < b, "S0 < S1"),
    "eq": (lambda a, b: a == b, "S0 == S1"),
    "le": (lambda a, b: a <= b, "S0 <= S1"),
    "gt": (lambda a, b: a > b, "S0 > S1"),
    "ge": (lambda a, b: a >= b, "S0 >= S1"),
}
_FLOAT_ONLY = {
    "lg": (lambda a, b: (a < b) | (a > b), "S0 < S1 or S0 > S1"),
    "o": (lambda a, b: ~(np.isnan(a) | np.isnan(b)), "neither is NaN"),
    "u": (lambda a, b: np.isnan(a) | np.isnan(b), "one is NaN"),
    "neq": (lambda a, b: ~(a == b), "not S0 == S1"),
    "nlt": (lambda a, b: ~(a < b), "not S0 < S1"),
    "nle": (lambda a, b: ~(a <= b), "not S0 <= S1"),
    "ngt": (lambda a, b: ~(a > b), "not S0 > S1"),
    "nge": (lambda a, b: ~(a >= b), "not S0 >= S1"),
    "nlg": (lambda a, b: ~((a < b) | (a > b)), "not (S0 < S1 or S0 > S1)"),
}

for _kind in ("u16", "i16", "u32", "i32", "u64", "i64"):
    for _name, (_function, _meaning) in {**_ORDERED, "ne": (lambda a, b: a != b, "S0 != S1")}.items():
        compare(f"v_cmp_{_name}_{_kind} v_cmpx_{_name}_{_kind}", _kind, _function, f"mask = {_meaning}")
for _kind in ("f16", "f32", "f64"):
    for _name, (_function, _meaning) in {**_ORDERED, **_FLOAT_ONLY}.items():
        compare(f"v_cmp_{_name}_{_kind} v_cmpx_{_name}_{_kind}", _kind, _function, f"mask = {_meaning}")


def _float_class(a: Array, classes: Array) -> Array:
    """Bits: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf."""
    negative, infinite, zero = np.signbit(a), np.isinf(a), a == 0
    nan = np.isnan(a)
    denormal = (np.abs(a) < np.finfo(a.dtype).tiny) & ~zero & ~nan
    normal = ~(nan | infinite | zero | denormal)
    words = np.ascontiguousarray(a).view(np.dtype(f"u{a.dtype.itemsize}"))
    quiet = (words >> words.dtype.type(np.finfo(a.dtype).nmant - 1)) & words.dtype.type(1) == 1
    flags = [
        nan & ~quiet, nan & quiet, infinite & negative, normal & negative, denormal & negative, zero & negative,
        zero & ~negative, denormal & ~negative, normal & ~negative, infinite & ~negative,
    ]  # fmt: skip
    result = np.zeros(np.broadcast_shapes(a.shape, classes.shape), bool)
    for bit, flag in enumerate(flags):
        result |= flag & ((classes >> U32(bit)) & U32(1) == 1)
    return result


for _kind in ("f16", "f32", "f64"):
    vector(
        f"v_cmp_class_{_kind}", f"mask = {_kind} u32", _float_class, "mask = S0 is of one of the classes in S1",
        family="vector compare", source="CDNA, RDNA4: VOPC",
    )  # fmt: skip
