"""Scalar arithmetic, logic, shifts, bit operations and comparisons.

Source: CDNA "SOP1", "SOP2", "SOPC", "SOPK"; RDNA4 of the same names. Wave-wide, so the execution mask plays no part.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import EXEC
from primus_turbo_plugin.amdgcn.emulator.isa.alu import scalar
from primus_turbo_plugin.amdgcn.emulator.isa.functions import (
    add_carry,
    bit_field,
    bit_reverse,
    count_leading,
    count_ones,
    count_trailing,
    fma32,
    multiply_high,
    overflow_add,
    overflow_subtract,
    shift,
    subtract_borrow,
)
from primus_turbo_plugin.amdgcn.emulator.isa.registry import CDNA, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, Reader, scalar_reader
from primus_turbo_plugin.amdgcn.emulator.waves import U32, U64

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine


def _and_flag(value: Array) -> tuple[Array, Array]:
    """Result, and SCC = result is not zero."""
    return value, value != 0


# -- moves and selection ------------------------------------------------------------------------------------------------
scalar("s_mov_b32", "u32 = u32", lambda a: a, "D = S0")
scalar("s_movk_i32", "i32 = k16", lambda a: a, "D = sign-extended K")
scalar("s_mov_b64", "u64 = u64", lambda a: a, "D = S0")
scalar("s_cmov_b32", "u32 = u32 dst scc", lambda a, d, c: np.where(c, a, d), "if SCC: D = S0")
scalar("s_cmovk_i32", "i32 = k16 dst scc", lambda a, d, c: np.where(c, a, d), "if SCC: D = sign-extended K")
scalar("s_cselect_b32", "u32 = u32 u32 scc", lambda a, b, c: np.where(c, a, b), "D = SCC ? S0 : S1")
scalar("s_cselect_b64", "u64 = u64 u64 scc", lambda a, b, c: np.where(c, a, b), "D = SCC ? S0 : S1")

# -- addition, subtraction, multiplication --------------------------------------------------------------------------------
scalar("s_add_u32 s_add_co_u32", "u32 scc = u32 u32", add_carry, "D = S0 + S1; SCC = carry")
scalar("s_add_i32 s_add_co_i32", "i32 scc = i32 i32", overflow_add, "D = S0 + S1; SCC = overflow")
scalar("s_addk_i32 s_addk_co_i32", "i32 scc = k16 dst", overflow_add, "D = D + K; SCC = overflow")
scalar("s_sub_u32 s_sub_co_u32", "u32 scc = u32 u32", subtract_borrow, "D = S0 - S1; SCC = borrow")
scalar("s_sub_i32 s_sub_co_i32", "i32 scc = i32 i32", overflow_subtract, "D = S0 - S1; SCC = overflow")
scalar("s_addc_u32 s_add_co_ci_u32", "u32 scc = u32 u32 scc", add_carry, "D = S0 + S1 + SCC; SCC = carry")
scalar("s_subb_u32 s_sub_co_ci_u32", "u32 scc = u32 u32 scc", subtract_borrow, "D = S0 - S1 - SCC; SCC = borrow")
scalar("s_add_nc_u64 s_add_u64", "u64 = u64 u64", lambda a, b: a + b, "D = S0 + S1", archs=GFX1250)
scalar("s_sub_nc_u64 s_sub_u64", "u64 = u64 u64", lambda a, b: a - b, "D = S0 - S1", archs=GFX1250)
scalar("s_mul_i32", "u32 = u32 u32", lambda a, b: a * b, "D = S0 * S1")
scalar("s_mulk_i32", "i32 = k16 dst", lambda a, d: d * a, "D = D * K")
scalar("s_mul_hi_u32", "u32 = u32 u32", multiply_high, "D = (S0 * S1) >> 32")
scalar("s_mul_hi_i32", "i32 = i32 i32", multiply_high, "D = (S0 * S1) >> 32, signed")
scalar("s_mul_u64", "u64 = u64 u64", lambda a, b: a * b, "D = S0 * S1", archs=GFX1250)
scalar("s_abs_i32", "i32 scc = i32", lambda a: _and_flag(np.abs(a)), "D = |S0|; SCC = D != 0")
scalar("s_absdiff_i32", "i32 scc = i32 i32", lambda a, b: _and_flag(np.abs(a - b)), "D = |S0 - S1|; SCC = D != 0")


def _shift_add(a: Array, b: Array, amount: int) -> tuple[Array, Array]:
    """(a << amount) + b, and whether it does not fit 32 bits."""
    total = (a.astype(U64) << U64(amount)) + b.astype(U64)
    return total.astype(U32), total >> U64(32) != 0


for _n in (1, 2, 3, 4):
    scalar(
        f"s_lshl{_n}_add_u32",
        "u32 scc = u32 u32",
        partial(_shift_add, amount=_n),
        f"D = (S0 << {_n}) + S1; SCC = carry",
    )
scalar("s_min_i32", "i32 scc = i32 i32", lambda a, b: (np.minimum(a, b), a < b), "D = min; SCC = S0 is the minimum")
scalar("s_min_u32", "u32 scc = u32 u32", lambda a, b: (np.minimum(a, b), a < b), "D = min; SCC = S0 is the minimum")
scalar("s_max_i32", "i32 scc = i32 i32", lambda a, b: (np.maximum(a, b), a >= b), "D = max; SCC = S0 is the maximum")
scalar("s_max_u32", "u32 scc = u32 u32", lambda a, b: (np.maximum(a, b), a >= b), "D = max; SCC = S0 is the maximum")

# -- logic ----------------------------------------------------------------------------------------------------------------
_LOGIC = {
    "and": (lambda a, b: a & b, "D = S0 & S1"),
    "or": (lambda a, b: a | b, "D = S0 | S1"),
    "xor": (lambda a, b: a ^ b, "D = S0 ^ S1"),
    "nand": (lambda a, b: ~(a & b), "D = ~(S0 & S1)"),
    "nor": (lambda a, b: ~(a | b), "D = ~(S0 | S1)"),
    "xnor": (lambda a, b: ~(a ^ b), "D = ~(S0 ^ S1)"),
    "andn2": (lambda a, b: a & ~b, "D = S0 & ~S1"),
    "orn2": (lambda a, b: a | ~b, "D = S0 | ~S1"),
}
_RENAMED = {"andn2": "and_not1", "orn2": "or_not1"}
for _name, (_function, _meaning) in _LOGIC.items():
    for _bits in ("32", "64"):
        _names = f"s_{_name}_b{_bits}" + (f" s_{_RENAMED[_name]}_b{_bits}" if _name in _RENAMED else "")
        scalar(
            _names, f"u{_bits} scc = u{_bits} u{_bits}",
            lambda a, b, f=_function: _and_flag(f(a, b)), f"{_meaning}; SCC = D != 0",
        )  # fmt: skip
for _bits in ("32", "64"):
    scalar(f"s_not_b{_bits}", f"u{_bits} scc = u{_bits}", lambda a: _and_flag(~a), "D = ~S0; SCC = D != 0")

# -- shifts and bit fields ------------------------------------------------------------------------------------------------
for _bits in ("32", "64"):
    for _name, _kind, _left in (("lshl_b", "u", True), ("lshr_b", "u", False), ("ashr_i", "i", False)):
        scalar(
            f"s_{_name}{_bits}", f"{_kind}{_bits} scc = {_kind}{_bits} u32",
            lambda a, b, left=_left: _and_flag(shift(a, b, left)), f"D = S0 {'<<' if _left else '>>'} S1; SCC = D != 0",
        )  # fmt: skip
    for _kind in ("u", "i"):
        scalar(
            f"s_bfe_{_kind}{_bits}", f"{_kind}{_bits} scc = {_kind}{_bits} u32",
            lambda a, b: _and_flag(bit_field(a, b & U32(0x3F), (b >> U32(16)) & U32(0x7F))),
            "D = S1[22:16] bits of S0 from bit S1[5:0]; SCC = D != 0",
        )  # fmt: skip
scalar(
    "s_bfm_b32",
    "u32 = u32 u32",
    lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
    "D = S0 ones << S1",
)
scalar("s_brev_b32", "u32 = u32", bit_reverse, "D = S0 bit-reversed")
scalar("s_ff1_i32_b32 s_ctz_i32_b32", "i32 = u32", count_trailing, "D = trailing zeros, -1 for zero")
scalar("s_ff1_i32_b64 s_ctz_i32_b64", "i32 = u64", count_trailing, "D = trailing zeros, -1 for zero")
scalar("s_flbit_i32_b32 s_clz_i32_u32", "i32 = u32", count_leading, "D = leading zeros, -1 for zero")
scalar("s_bcnt1_i32_b32", "u32 scc = u32", lambda a: _and_flag(count_ones(a)), "D = ones in S0; SCC = D != 0")
scalar("s_bcnt1_i32_b64", "u32 scc = u64", lambda a: _and_flag(count_ones(a)), "D = ones in S0; SCC = D != 0")
scalar("s_bitset0_b32", "u32 = u32 dst", lambda a, d: d & ~(U32(1) << (a & U32(31))), "D[S0] = 0")
scalar("s_bitset1_b32", "u32 = u32 dst", lambda a, d: d | (U32(1) << (a & U32(31))), "D[S0] = 1")
scalar("s_bitcmp0_b32", "scc = u32 u32", lambda a, b: (a >> (b & U32(31))) & U32(1) == 0, "SCC = S0[S1] == 0")
scalar("s_bitcmp1_b32", "scc = u32 u32", lambda a, b: (a >> (b & U32(31))) & U32(1) == 1, "SCC = S0[S1] == 1")
scalar(
    "s_sext_i32_i8", "i32 = u32", lambda a: a.astype(np.uint8).view(np.int8).astype(np.int32), "D = sign-extended byte"
)
scalar(
    "s_sext_i32_i16",
    "i32 = u32",
    lambda a: a.astype(np.uint16).view(np.int16).astype(np.int32),
    "D = sign-extended half",
)
scalar(
    "s_pack_ll_b32_b16", "u32 = u32 u32", lambda a, b: (a & U32(0xFFFF)) | (b << U32(16)), "D = {S1[15:0], S0[15:0]}"
)
scalar(
    "s_pack_lh_b32_b16",
    "u32 = u32 u32",
    lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000)),
    "D = {S1[31:16], S0[15:0]}",
)
scalar(
    "s_pack_hh_b32_b16",
    "u32 = u32 u32",
    lambda a, b: (a >> U32(16)) | (b & U32(0xFFFF0000)),
    "D = {S1[31:16], S0[31:16]}",
)

# -- comparisons ----------------------------------------------------------------------------------------------------------
_COMPARE = {
    "eq": (lambda a, b: a == b, "=="), "lg": (lambda a, b: a != b, "!="), "gt": (lambda a, b: a > b, ">"),
    "ge": (lambda a, b: a >= b, ">="), "lt": (lambda a, b: a < b, "<"), "le": (lambda a, b: a <= b, "<="),
}  # fmt: skip
for _name, (_function, _symbol) in _COMPARE.items():
    for _kind in ("u32", "i32"):
        scalar(f"s_cmp_{_name}_{_kind}", f"scc = {_kind} {_kind}", _function, f"SCC = S0 {_symbol} S1")
        _immediate = "k16" if _kind == "i32" else "u32"
        scalar(f"s_cmpk_{_name}_{_kind}", f"scc = {_kind} {_immediate}", _function, f"SCC = S0 {_symbol} K", archs=CDNA)
    scalar(f"s_cmp_{_name}_f32", "scc = f32 f32", _function, f"SCC = S0 {_symbol} S1", archs=GFX1250)
    if _name in ("eq", "lg"):
        scalar(f"s_cmp_{_name}_u64", "scc = u64 u64", _function, f"SCC = S0 {_symbol} S1")
    if _name != "eq":
        _negated = "neq" if _name == "lg" else f"n{_name}"
        _test = _COMPARE["eq"][0] if _name == "lg" else _function
        scalar(
            f"s_cmp_{_negated}_f32", "scc = f32 f32", lambda a, b, f=_test: ~f(a, b),
            f"SCC = not (S0 {'==' if _name == 'lg' else _symbol} S1)", archs=GFX1250,
        )  # fmt: skip

# -- floating point (gfx1250) ---------------------------------------------------------------------------------------------
for _name, _function, _meaning in (
    ("add", lambda a, b: a + b, "S0 + S1"), ("sub", lambda a, b: a - b, "S0 - S1"), ("mul", lambda a, b: a * b, "S0 * S1"),
    ("min_num", np.fmin, "min(S0, S1)"), ("max_num", np.fmax, "max(S0, S1)"),
):  # fmt: skip
    scalar(f"s_{_name}_f32", "f32 = f32 f32", _function, f"D = {_meaning}", archs=GFX1250)
scalar("s_fmac_f32", "f32 = f32 f32 dst", fma32, "D = S0 * S1 + D", archs=GFX1250)
scalar("s_fmamk_f32 s_fmaak_f32", "f32 = f32 f32 f32", fma32, "D = S0 * S1 + S2", archs=GFX1250)
for _name, _function in (("trunc", np.trunc), ("floor", np.floor), ("ceil", np.ceil), ("rndne", np.rint)):
    scalar(f"s_{_name}_f32", "f32 = f32", _function, f"D = {_name}(S0)", archs=GFX1250)
scalar("s_cvt_f32_u32", "f32 = u32", lambda a: a.astype(np.float32), "D = float(S0)", archs=GFX1250)
scalar("s_cvt_f32_i32", "f32 = i32", lambda a: a.astype(np.float32), "D = float(S0)", archs=GFX1250)


# -- execution mask -------------------------------------------------------------------------------------------------------
def _bind_saveexec(instruction: Instruction) -> Execute:
    """D = EXEC; EXEC = f(S0, EXEC); SCC = EXEC != 0."""
    name = instruction.opcode.removeprefix("s_").split("_saveexec")[0]
    wide = instruction.opcode.endswith("64")
    combine = {
        "and": lambda s, e: s & e, "or": lambda s, e: s | e, "xor": lambda s, e: s ^ e,
        "andn2": lambda s, e: s & ~e, "and_not1": lambda s, e: s & ~e, "orn2": lambda s, e: s | ~e,
        "or_not1": lambda s, e: s | ~e, "andn1": lambda s, e: ~s & e, "and_not0": lambda s, e: ~s & e,
    }[name]  # fmt: skip
    target = instruction.operands[0].index
    read: Reader = scalar_reader(instruction.operands[1], "u64" if wide else "u32")

    def execute(machine: Machine) -> None:
        waves = machine.waves
        source = read(machine).copy()  # the destination may be the source
        if wide:
            old = waves.scalar64(EXEC)
            waves.write_scalar64(target, old)
            new = combine(source, old)
            waves.write_scalar64(EXEC, np.broadcast_to(new, old.shape))
        else:
            low = waves.scalar(EXEC).copy()
            waves.write_scalar(target, low)
            new = combine(source, low)
            waves.write_scalar(EXEC, np.broadcast_to(new, low.shape))
        waves.scc[waves.chosen] = new != 0

    return execute


for _bits, _archs, _names in (
    ("64", CDNA, "and or xor andn2 orn2 andn1"), ("32", GFX1250, "and or xor and_not1 or_not1 and_not0"),
):  # fmt: skip
    register(
        [f"s_{name}_saveexec_b{_bits}" for name in _names.split()], _bind_saveexec, family="scalar alu",
        source="CDNA, RDNA4: SOP1", meaning="D = EXEC; EXEC = f(S0, EXEC); SCC = EXEC != 0", archs=_archs,
    )  # fmt: skip
