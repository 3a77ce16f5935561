"""A product as the kernel calls that a `GemmConfig` makes of it: decode into scratch, multiply, add up shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, Operand, OperandKey
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

_FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_FNUZ_DTYPES = {"e4m3": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2fnuz}
_FIRST_NAN = {"e4m3": 0x7F, "e5m2": 0x7C}
"""Magnitude codes from here on are NaN, or Inf."""
_SCRATCH_ROW_ELEMENTS = 8
"""Rows of a decoded copy start at multiples of 16 bytes."""
_WIDE_OFFSET = 1 << 30
"""Elements from a tile's corner from which offsets are computed in 64 bits; half of what 32 bits hold."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch, as data: `kernel[grid](**args, **constants, **options)`."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        self.kernel[self.grid](**self.args, **self.constants, **self.options)


@dataclass(frozen=True, slots=True)
class _Source:
    """An operand as a kernel reads it.

    Attributes:
        data: `[outer, stored / codes a byte]`.
        scale: `QuantizedTensor.block_scale`, or None.
        meta: `gemm_decode.OperandMeta`.
        stored: Length of the stored contraction.
        outer: Neighbours in memory are rows.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    meta: tuple[object, ...]
    stored: int
    outer: bool


def plan(
    a: Operand, b: Operand, bias: torch.Tensor | None, y: torch.Tensor, key: GemmKey, config: GemmConfig
) -> list[KernelCall]:
    """The calls, in order, after which y = a @ b.T (+ bias), or y += a @ b.T where the key says so.

    Scratch memory is allocated here and lives as long as the calls. `config` must suit the key (`gemm_config.refusal`).
    """
    calls: list[KernelCall] = []
    left, right = (_source(x, kind, key, config, calls) for x, kind in ((a, key.a), (b, key.b)))
    if config.loads == "descriptors":
        calls.append(_multiply_descriptors(left, right, bias, y, key, config))
    elif config.split_k > 1:
        parts = torch.empty(config.split_k, key.rows, key.cols, dtype=torch.float32, device=y.device)
        calls.append(_multiply_pointers(left, right, None, parts, key, config))
        calls.append(_sum_shares(parts, bias, y, key))
    else:
        calls.append(_multiply_pointers(left, right, bias, y, key, config))
    return calls


def decode_call(operand: QuantizedTensor, length: int) -> tuple[torch.Tensor, KernelCall]:
    """Scratch for bf16 `[outer, length]`, and the call that fills it: MX values, or FP8 codes without their fp32 scales."""
    from primus_turbo_plugin.kernels.triton.gemm_decode import OperandMeta, decode_kernel

    stride = -(-length // _SCRATCH_ROW_ELEMENTS) * _SCRATCH_ROW_ELEMENTS
    values = torch.empty(operand.outer, stride, dtype=torch.bfloat16, device=operand.device)[:, :length]
    rows, block_k = 16, 256
    args = {
        "data_ptr": operand.data, "scale_ptr": operand.block_scale, "out_ptr": values,
        "rows": operand.outer, "length": length, "stored": operand.padded_contraction,
        "stride_row": operand.data.stride(0), "stride_out": stride,
    }  # fmt: skip
    grid = (-(-length // block_k), -(-operand.outer // rows))
    constants = {"META": OperandMeta.of(operand), "ROWS": rows, "BLOCK_K": block_k}
    return values, KernelCall(decode_kernel, grid, args, constants, {"num_warps": 4})


def fnuz_call(operand: QuantizedTensor) -> tuple[torch.Tensor, KernelCall]:
    """Scratch for an FP8 operand's codes in the FNUZ encoding, and the call that fills it."""
    from primus_turbo_plugin.kernels.triton.gemm_decode import fnuz_kernel

    codes, element, block = torch.empty_like(operand.data), operand.spec.element_type.name, 4096
    args = {"data_ptr": operand.data, "out_ptr": codes, "size": codes.numel()}
    constants = {"FIRST_NAN": _FIRST_NAN[element], "BLOCK": block}
    call = KernelCall(fnuz_kernel, (-(-codes.numel() // block),), args, constants, {"num_warps": 4})
    return codes.view(_FNUZ_DTYPES[element]), call


def _source(operand: Operand, kind: OperandKey, key: GemmKey, config: GemmConfig, calls: list[KernelCall]) -> _Source:
    from primus_turbo_plugin.kernels.triton.gemm_decode import PLAIN, OperandMeta

    if not isinstance(operand, QuantizedTensor):
        return _Source(operand, None, PLAIN, operand.shape[1], kind.contiguous == "outer")
    operand, meta = operand.plain(), OperandMeta.of(operand)
    if config.units == "half" and config.decode == "scratch":
        values, call = decode_call(operand, key.contraction)
        calls.append(call)
        return _Source(values, operand.block_scale, meta.decoded(), key.contraction, False)
    data = operand.data
    if config.units == "fp8" and config.decode == "scratch":
        data, call = fnuz_call(operand)
        calls.append(call)
    elif config.units == "fp8":
        data = data.view(_FP8_DTYPES[kind.element])
    return _Source(data, operand.block_scale, meta, operand.padded_contraction, False)


def _multiply_pointers(
    a: _Source, b: _Source, bias: torch.Tensor | None, y: torch.Tensor, key: GemmKey, config: GemmConfig
) -> KernelCall:
    """The product into y `[M, N]`, or into its partial sums `[split_k, M, N]`."""
    from primus_turbo_plugin.kernels.triton.gemm_kernel import gemm_nt_kernel

    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    pieces = config.tiles(key) * config.split_k
    stride_om, stride_on = y.stride()[-2:]
    reach = [(block_m, a.data.stride(0)), (block_n, b.data.stride(0)), (block_m, stride_om), (block_n, stride_on)]
    reach += [(block_k, a.data.stride(1)), (block_k, b.data.stride(1))]
    args = {
        "a_ptr": a.data, "a_scale": a.scale, "b_ptr": b.data, "b_scale": b.scale, "bias_ptr": bias, "out_ptr": y,
        "M": key.rows, "N": key.cols, "length": key.contraction, "a_stored": a.stored, "b_stored": b.stored,
        "stride_am": a.data.stride(0), "stride_ak": a.data.stride(1),
        "stride_bn": b.data.stride(0), "stride_bk": b.data.stride(1),
        "stride_om": stride_om, "stride_on": stride_on,
    }  # fmt: skip
    constants = {
        "A": a.meta, "B": b.meta, "A_OUTER": a.outer, "B_OUTER": b.outer, "UNITS": config.units,
        "ACCUMULATE": key.accumulate and config.split_k == 1,
        "EVEN_M": key.rows % block_m == 0, "EVEN_N": key.cols % block_n == 0,
        "EVEN_K": key.contraction % block_k == 0 and min(a.stored, b.stored) >= key.contraction,
        "WIDE": max(block * abs(stride) for block, stride in reach) >= _WIDE_OFFSET,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": config.group_m, "XCDS": config.num_xcds,
        "SPLIT_K": config.split_k, "PARTS": config.epilogue_parts, "FNUZ": config.units == "fp8" and config.decode == "scratch",
        "PERSISTENT": config.persistent,
    }  # fmt: skip
    grid = (min(pieces, key.compute_units) if config.persistent else pieces,)
    return KernelCall(gemm_nt_kernel, grid, args, constants, _options(config))


def _multiply_descriptors(
    a: _Source, b: _Source, bias: torch.Tensor | None, y: torch.Tensor, key: GemmKey, config: GemmConfig
) -> KernelCall:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from primus_turbo_plugin.kernels.triton.gemm_descriptor_kernel import gemm_descriptor_kernel

    def describe(source: _Source, block: int) -> TensorDescriptor:
        if source.outer:
            return TensorDescriptor.from_tensor(source.data.t(), [config.block_k, block])
        return TensorDescriptor.from_tensor(source.data, [block, config.block_k])

    args = {
        "a_desc": describe(a, config.block_m), "a_scale": a.scale,
        "b_desc": describe(b, config.block_n), "b_scale": b.scale, "bias_ptr": bias,
        "out_desc": TensorDescriptor.from_tensor(y, [config.block_m, config.block_n // config.epilogue_parts]),
        "M": key.rows, "N": key.cols, "length": key.contraction, "a_stored": a.stored, "b_stored": b.stored,
    }  # fmt: skip
    constants = {
        "A": a.meta, "B": b.meta, "A_OUTER": a.outer, "B_OUTER": b.outer, "UNITS": config.units,
        "ACCUMULATE": key.accumulate, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "GROUP": config.group_m, "PARTS": config.epilogue_parts, "PERSISTENT": config.persistent,
    }  # fmt: skip
    tiles = config.tiles(key)
    grid = (min(tiles, key.compute_units) if config.persistent else tiles,)
    return KernelCall(gemm_descriptor_kernel, grid, args, constants, _options(config))


def _sum_shares(parts: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, key: GemmKey) -> KernelCall:
    from primus_turbo_plugin.kernels.triton.gemm_kernel import sum_shares_kernel

    rows, cols = 4, 256
    args = {
        "part_ptr": parts, "bias_ptr": bias, "out_ptr": y,
        "M": key.rows, "N": key.cols, "stride_om": y.stride(0), "stride_on": y.stride(1),
    }  # fmt: skip
    constants = {"SPLIT_K": parts.shape[0], "ACCUMULATE": key.accumulate, "ROWS": rows, "COLS": cols}
    return KernelCall(
        sum_shares_kernel, (-(-key.rows // rows), -(-key.cols // cols)), args, constants, {"num_warps": 4}
    )


def _options(config: GemmConfig) -> dict[str, int]:
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    amd = {"matrix_instr_nonkdim": config.matrix_instr_nonkdim, "waves_per_eu": config.waves_per_eu}
    return options | {name: value for name, value in amd.items() if value}
