"""From tensors and options to launches of the FP8 attention kernels (Triton). As attention_launch.py, nothing is read back."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.reference.attention_fp8 import MIN_EXPONENT, P_SCALE
from primus_turbo_plugin.kernels.triton import attention_launch as launch
from primus_turbo_plugin.kernels.triton.attention_fp8_fwd import Fp8Meta, attention_fp8_fwd_kernel
from primus_turbo_plugin.kernels.triton.attention_fp8_quantize import attention_quantize_kernel
from primus_turbo_plugin.kernels.triton.attention_launch import Launch, Problem
from primus_turbo_plugin.kernels.triton.attention_tile import AttentionMeta
from primus_turbo_plugin.kernels.triton.attention_tiles import Tile
from primus_turbo_plugin.precision.attention import BLOCK_TOKENS
from primus_turbo_plugin.precision.formats import E4M3, ElementType

Units = Literal["ocp", "fnuz"] | None
"""What the device's FP8 matrix units read; None: it has none, and codes are multiplied as bf16 numbers."""

CODES: dict[Units, torch.dtype] = {"ocp": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz, None: torch.bfloat16}
_MIN_CONTRACTION = 32  # of an FP8 matrix instruction
_INT32_MAX = 2**31 - 1


class Codes(NamedTuple):
    """A tensor's quantised copies; see attention_fp8_quantize.py.

    Attributes:
        rows: `[batch * heads, slots * BLOCK_TOKENS, columns]`, or None.
        columns: `[batch * heads, columns, slots * BLOCK_TOKENS]`, or None.
        scales: fp32 `[batch * heads, slots]`.
    """

    rows: Tensor | None
    columns: Tensor | None
    scales: Tensor


def split_columns(dim: int) -> tuple[int, int]:
    """(d0, d1) as `attention_launch.split_dim`, each a contraction that FP8 units take."""
    first, second = launch.split_dim(max(dim, _MIN_CONTRACTION))
    second = max(second, _MIN_CONTRACTION) if second else 0
    return (2 * first, 0) if second == first else (first, second)


def query_slots(tokens: int, problem: Problem) -> int:
    """Blocks of the queries of a head; packed, an upper bound."""
    return launch._slots(tokens, problem.starts_q, 2 if problem.cp_size > 1 else 1, BLOCK_TOKENS)


def key_slots(tokens: int, problem: Problem) -> int:
    """The same of the keys, which are whole sequences."""
    return launch._slots(tokens, problem.starts_k, 1, BLOCK_TOKENS)


def new_codes(x: Tensor, slots: int, units: Units, *, rows: bool = False, columns: bool = False) -> Codes:
    """Room for the copies of x `[batch, tokens, heads, dim]`."""
    lines, length = x.shape[0] * x.shape[2], slots * BLOCK_TOKENS
    by_row = x.new_empty(lines, length, sum(split_columns(x.shape[3])), dtype=CODES[units]) if rows else None
    by_column = x.new_empty(lines, launch.padded(x.shape[3]), length, dtype=CODES[units]) if columns else None
    return Codes(by_row, by_column, x.new_empty(lines, slots, dtype=torch.float32))


def quantize_launch(
    x: Tensor, codes: Codes, problem: Problem, units: Units, *, keys: bool, element: ElementType = E4M3,
    values: Tensor | None = None,
) -> Launch:  # fmt: skip
    """Writes `codes`, and decoded `values` bf16 like x if given. `keys`: x are keys or values, not queries or dout."""
    halves = 1 if keys or problem.cp_size == 1 else 2
    cu, starts = (problem.cu_k, problem.starts_k) if keys else (problem.cu_q, problem.starts_q)
    batch, tokens, heads, dim = x.shape
    slots = codes.scales.shape[1]
    args = {
        "x": x, "codes": codes.rows, "codes_t": codes.columns, "scales": codes.scales, "values": values,
        "cu": cu, "starts": starts, "heads": heads, "tokens": tokens,
        "sequences": 0 if cu is None else cu.shape[0] - 1, "slots": slots,
        "cp_rank": problem.cp_rank, "cp_size": 1 if keys else problem.cp_size,
        **launch._strides("x", x), **launch._strides("v", x if values is None else values),
    }  # fmt: skip
    columns = 0 if codes.rows is None else codes.rows.shape[2]
    columns_t = 0 if codes.columns is None else codes.columns.shape[1]
    constants = {
        "DIM": dim, "D": max(launch.padded(dim), _power_of_two(columns)), "COLUMNS": columns, "COLUMNS_T": columns_t,
        "BLOCK": BLOCK_TOKENS, "MANTISSA": element.mantissa_bits, "EMIN": 128 - element.bias, "EMAX": element.emax,
        "MIN_EXPONENT": MIN_EXPONENT, "HALF": units == "fnuz", "PACKED": cu is not None, "HALVES": halves,
    }  # fmt: skip
    return Launch(attention_quantize_kernel, (slots, heads, batch), args, constants, {"num_warps": 8})


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, codes: tuple[Codes, Codes, Codes], out: Tensor, lse: Tensor, problem: Problem,
    tile: Tile, *, units: Units, tma: bool,
) -> Launch:  # fmt: skip
    """The forward kernel on the codes of q (rows), k (rows) and v (columns); q, k and v themselves give shapes only."""
    q_codes, k_codes, v_codes = codes
    assert q_codes.rows is not None
    assert k_codes.rows is not None
    assert v_codes.columns is not None
    meta = _meta(q, k, v, out, problem, tile, tma)
    fp8 = _fp8_meta(meta, units, apart=tma)
    args = {
        "q": q_codes.rows, "k": k_codes.rows, "v_t": v_codes.columns,
        "k_desc": _descriptor(k_codes.rows, (tile.block_n, meta.d0), tma),
        "k_desc1": _descriptor(k_codes.rows, (tile.block_n, meta.d1), tma) if meta.d1 else None,
        "v_desc": _descriptor(v_codes.columns, (meta.dv, tile.block_n), tma),
        "q_scales": q_codes.scales, "k_scales": k_codes.scales, "v_scales": v_codes.scales,
        "out": out, "lse": lse, "sinks": problem.sinks, **launch.shared_args(q, k, problem),
        "q_slots": q_codes.scales.shape[1], "k_slots": k_codes.scales.shape[1],
        **launch._strides("o", out), **launch._mask_strides(problem),
    }  # fmt: skip
    del args["grad_scale"]
    constants = {
        "META": meta, "FP8": fp8, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "HEADS_FIRST": tile.heads_first,
        "MASKED_STAGES": 1 if meta.masked else tile.masked_stages or tile.num_stages,  # see attention_launch.py
    }  # fmt: skip
    grid = q_codes.scales.numel() * (BLOCK_TOKENS // tile.block_m)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Launch(attention_fp8_fwd_kernel, (grid,), args, constants, options)


def _meta(q: Tensor, k: Tensor, v: Tensor, out: Tensor, problem: Problem, tile: Tile, tma: bool) -> AttentionMeta:
    d0, d1 = split_columns(q.shape[3])
    meta = launch.meta_of(q, k, v, problem, tile, tma=tma, both_ways=False)
    wide = max(out.stride()[1:]) * max(tile.block_m, meta.dv) > _INT32_MAX
    return meta._replace(d0=d0, d1=d1, wide=wide)


def _fp8_meta(meta: AttentionMeta, units: Units, *, apart: bool) -> Fp8Meta:
    half = 0.5 if units == "fnuz" else 1.0  # what a code's number is of its value
    return Fp8Meta(
        columns=meta.d0 + meta.d1,
        block=BLOCK_TOKENS,
        units=units is not None,
        apart=apart,
        p_bits=math.log2(P_SCALE * half),
        v_factor=1.0 / half,
        s_factor=1.0 / (half * half),
    )


def _descriptor(x: Tensor, block: tuple[int, int], wanted: bool) -> Any:
    """Of a tensor `[lines, rows, columns]`, as one of `lines * rows` rows."""
    if not wanted:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    flat = x.view(-1, x.shape[2])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), list(block))


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
