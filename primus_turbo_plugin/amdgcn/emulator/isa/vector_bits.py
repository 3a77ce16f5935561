"""Vector moves, logic, shifts and byte permutation.

Source: CDNA "VOP1", "VOP2", "VOP3A"; RDNA4 of the same names.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.isa.alu import VectorOperation, vector
from primus_turbo_plugin.amdgcn.emulator.isa.functions import (
    bit_field,
    bit_operation,
    bit_reverse,
    count_leading,
    count_ones,
    count_trailing,
    permute_bytes,
    shift,
)
from primus_turbo_plugin.amdgcn.emulator.isa.registry import ALL, CDNA, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array
from primus_turbo_plugin.amdgcn.emulator.waves import U32, U64

_op = partial(vector, family="vector bits")

# -- moves ----------------------------------------------------------------------------------------------------------------
_op("v_mov_b32", "u32 = u32", lambda a: a, "D = S0")
_op("v_mov_b16", "u16 = u16", lambda a: a, "D = S0", archs=GFX1250)
_op("v_mov_b64", "u64 = u64", lambda a: a, "D = S0")
_op(
    "v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32", "u32 = u32", lambda a: a, "D = S0",
    archs=CDNA, source="CDNA: VOP3P",
)  # fmt: skip
_op("v_cndmask_b32", "x32 = x32 x32 mask", lambda a, b, m: np.where(m, b, a), "D = mask ? S1 : S0")
_op("v_cndmask_b16", "u16 = u16 u16 mask", lambda a, b, m: np.where(m, b, a), "D = mask ? S1 : S0", archs=GFX1250)

# -- logic ----------------------------------------------------------------------------------------------------------------
for _bits, _kind in (("32", "u32"), ("16", "u16")):
    _archs = ALL if _bits == "32" else GFX1250
    _op(f"v_and_b{_bits}", f"{_kind} = {_kind} {_kind}", lambda a, b: a & b, "D = S0 & S1", archs=_archs)
    _op(f"v_or_b{_bits}", f"{_kind} = {_kind} {_kind}", lambda a, b: a | b, "D = S0 | S1", archs=_archs)
    _op(f"v_xor_b{_bits}", f"{_kind} = {_kind} {_kind}", lambda a, b: a ^ b, "D = S0 ^ S1", archs=_archs)
    _op(f"v_not_b{_bits}", f"{_kind} = {_kind}", lambda a: ~a, "D = ~S0", archs=_archs)
_op("v_xnor_b32", "u32 = u32 u32", lambda a, b: ~(a ^ b), "D = ~(S0 ^ S1)")
_op("v_and_or_b32", "u32 = u32 u32 u32", lambda a, b, c: (a & b) | c, "D = (S0 & S1) | S2")
_op("v_or3_b32", "u32 = u32 u32 u32", lambda a, b, c: a | b | c, "D = S0 | S1 | S2")
_op("v_xor3_b32", "u32 = u32 u32 u32", lambda a, b, c: a ^ b ^ c, "D = S0 ^ S1 ^ S2", archs=GFX1250)
_op("v_lshl_or_b32", "u32 = u32 u32 u32", lambda a, b, c: (a << (b & U32(31))) | c, "D = (S0 << S1) | S2")
_op("v_bfi_b32", "u32 = u32 u32 u32", lambda a, b, c: (a & b) | (~a & c), "D = (S0 & S1) | (~S0 & S2)")

# -- shifts ---------------------------------------------------------------------------------------------------------------
for _bits, _kind in (("32", "32"), ("16", "16"), ("64", "64")):
    _amount = "u16" if _bits == "16" else "u32"
    _op(
        f"v_lshlrev_b{_bits}",
        f"u{_kind} = {_amount} u{_kind}",
        lambda a, b: shift(b, a.astype(U32), True),
        "D = S1 << S0",
    )
    _op(
        f"v_lshrrev_b{_bits}",
        f"u{_kind} = {_amount} u{_kind}",
        lambda a, b: shift(b, a.astype(U32), False),
        "D = S1 >> S0",
    )
    _op(
        f"v_ashrrev_i{_bits}",
        f"i{_kind} = {_amount} i{_kind}",
        lambda a, b: shift(b, a.astype(U32), False),
        "D = S1 >> S0",
    )
_op(
    "v_bfe_u32",
    "u32 = u32 u32 u32",
    lambda a, b, c: bit_field(a, b & U32(31), c & U32(31)),
    "D = S2 bits of S0 from S1",
)
_op(
    "v_bfe_i32",
    "i32 = i32 u32 u32",
    lambda a, b, c: bit_field(a, b & U32(31), c & U32(31)),
    "D = S2 bits of S0 from S1",
)
_op(
    "v_bfm_b32",
    "u32 = u32 u32",
    lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
    "D = S0 ones << S1",
)
_op("v_bfrev_b32", "u32 = u32", bit_reverse, "D = S0 bit-reversed")
_op("v_ffbl_b32 v_ctz_i32_b32", "i32 = u32", count_trailing, "D = trailing zeros, -1 for zero")
_op("v_ffbh_u32 v_clz_i32_u32", "i32 = u32", count_leading, "D = leading zeros, -1 for zero")
_op("v_bcnt_u32_b32", "u32 = u32 u32", lambda a, b: count_ones(a) + b, "D = ones in S0 + S1")


# -- bytes ----------------------------------------------------------------------------------------------------------------
def _align(a: Array, b: Array, bits: Array) -> Array:
    """Low 32 bits of {S0, S1} >> bits."""
    both = (a.astype(U64) << U64(32)) | b.astype(U64)
    return (both >> bits.astype(U64)).astype(U32)


_op("v_perm_b32", "u32 = u32 u32 u32", permute_bytes, "D = bytes of {S0, S1} picked by S2")
_op("v_alignbit_b32", "u32 = u32 u32 u32", lambda a, b, c: _align(a, b, c & U32(31)), "D = {S0, S1} >> S2[4:0]")
_op(
    "v_alignbyte_b32",
    "u32 = u32 u32 u32",
    lambda a, b, c: _align(a, b, (c & U32(3)) * U32(8)),
    "D = {S0, S1} >> 8 * S2[1:0]",
)
_op("v_pack_b32_f16", "u32 = u16 u16", lambda a, b: a.astype(U32) | (b.astype(U32) << U32(16)), "D = {S1, S0} halves")
_op(
    "v_prng_b32",
    "u32 = u32",
    lambda a: (a << U32(1)) ^ np.where(a >> U32(31), U32(197), U32(0)),
    "D = next of a 32-bit LFSR",
)
_op("v_sat_pk_u8_i16", "u32 = u32", lambda a: _saturate_pair(a), "D = two halves saturated to bytes")


def _saturate_pair(a: Array) -> Array:
    low = np.clip(a.astype(np.uint16).view(np.int16), 0, 255).astype(U32)
    high = np.clip((a >> U32(16)).astype(np.uint16).view(np.int16), 0, 255).astype(U32)
    return low | (high << U32(8))


# -- any function of three bits -------------------------------------------------------------------------------------------
def _bind_bitop(instruction: Instruction) -> Execute:
    """D = table[{S0, S1, S2}] for every bit; the table is the `bitop3` modifier."""
    table = instruction.number("bitop3", 0)
    kind = "u16" if instruction.opcode.endswith("b16") else "u32"
    sources = len(instruction.operands) - 1

    def function(*values: Array) -> Array:
        words = [value.astype(U32) for value in values]
        if sources == 2:
            words.append(np.zeros((1, 1), U32))
        return bit_operation(table, *words)

    return VectorOperation(instruction, f"{kind} = " + " ".join([kind] * sources), function)


register(
    "v_bitop3_b32 v_bitop3_b16 v_bitop2_b32", _bind_bitop, family="vector bits", source="CDNA4: VOP3A; RDNA4",
    meaning="D = bitwise table lookup of S0, S1, S2", archs=frozenset({"gfx950", "gfx1250"}), modifiers=("bitop3", "op_sel"),
)  # fmt: skip
