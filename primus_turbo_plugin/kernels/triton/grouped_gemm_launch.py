"""A grouped product as the kernel calls that a `GemmConfig` makes of it: decode into scratch, then multiply.

A `GroupedProgram` is everything about them but the tensors, as a `gemm_launch.Program` is of an ordinary product.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, Operand
from primus_turbo_plugin.kernels.triton.gemm_launch import (
    CallLauncher,
    KernelCall,
    Slot,
    Source,
    Tensors,
    descriptor_slot,
    options_of,
    reaches_far,
    source_of,
)
from primus_turbo_plugin.kernels.triton.grouped_gemm_key import GroupedGemmKey, average_tokens
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class GroupedProgram:
    """The calls of one grouped product, in order, without its tensors.

    Attributes:
        left: How a is read.
        right: How b is read; of a plain weight `[groups, N, K]`, one expert's.
        weight: A plain weight is read as it is, or as one matrix of all experts' rows, or of all their columns; None for what is
            no such weight.
        calls: The calls, tensors as Slots; `out` and `offsets` among them.
        walk: Of `rows`, whose grid follows from the tokens: (rows of a tile, groups, tiles side by side, most programs).
        any_length: Any number of tokens with the same `tokens_class` has this program: no integer but the grid depends on it.
    """

    left: Source
    right: Source
    weight: Literal["whole", "rows", "columns"] | None
    calls: tuple[KernelCall, ...]
    walk: tuple[int, int, int, int] | None
    any_length: bool
    _launchers: list[CallLauncher] = field(default_factory=list, repr=False)

    def tensors(self, a: Operand, b: Operand, groups: Groups, out: torch.Tensor) -> Tensors:
        """Slot -> tensor. Scratch is allocated here and lives as long as the mapping."""
        found = {**self.left.tensors(a), "out": out, "offsets": groups.offsets}
        if self.weight is None or isinstance(b, QuantizedTensor):
            return {**found, **self.right.tensors(b)}
        if self.weight == "rows":
            b = b.flatten(0, 1)
        elif self.weight == "columns":
            b = b.transpose(1, 2).flatten(0, 1)
        return {**found, "b": b, "b_scale": None}

    def bound(self, a: Operand, b: Operand, groups: Groups, out: torch.Tensor) -> list[KernelCall]:
        """The calls with their tensors."""
        tensors = self.tensors(a, b, groups, out)
        return [call.bind(tensors) for call in self.calls]

    def run(self, a: Operand, b: Operand, groups: Groups, out: torch.Tensor) -> None:
        """Launches the calls. The tensors must have the facts the program was built for."""
        if not self._launchers:
            self._launchers[:] = [CallLauncher(call) for call in self.calls]  # at once: backward has threads of its own
        tensors = self.tensors(a, b, groups, out)
        *decoding, multiply = self._launchers
        for launcher in decoding:
            launcher.run(tensors)
        multiply.run(tensors, None if self.walk is None else _grid_of_rows(groups.total, *self.walk))


def _grid_of_rows(tokens: int, block_m: int, groups: int, tiles_n: int, most: int) -> tuple[int]:
    """Programs of a product of rows: one a tile, an expert's last rows taking one more, or as many as run at once."""
    return (min((-(-tokens // block_m) + groups) * tiles_n, most),)


def tokens_class(groups: Groups, out_row_bytes: int) -> tuple[int, ...]:
    """What of the number of tokens changes a product's configuration, or code: whether there is more than one (strides of one
    row mean nothing), and whether the result's offsets fit in 31 bits.
    """
    return average_tokens(groups), min(groups.total, 2), groups.total * out_row_bytes < 1 << 31


def plan_rows(
    a: Operand, b: Operand, groups: Groups, y: torch.Tensor, key: GroupedGemmKey, config: GemmConfig
) -> list[KernelCall]:
    """The calls of `rows_program`, with their tensors."""
    return rows_program(a, b, groups, y, key, config).bound(a, b, groups, y)


def rows_program(
    a: Operand, b: Operand, groups: Groups, y: torch.Tensor, key: GroupedGemmKey, config: GemmConfig
) -> GroupedProgram:
    """The program after which y[rows of g] = a[rows of g] @ b[g].T."""
    from primus_turbo_plugin.kernels.triton.grouped_gemm_descriptor_kernel import grouped_rows_descriptor_kernel
    from primus_turbo_plugin.kernels.triton.grouped_gemm_kernel import grouped_rows_kernel

    cols, count = y.shape[1], groups.count
    flat = b if isinstance(b, QuantizedTensor) else b[0]
    left, right, calls = _sources(a, flat, replace(key.dense, contraction=key.inner), config)
    stride_bg = b.stride(0) if isinstance(b, torch.Tensor) else cols * right.strides[0]
    weight: Literal["whole", "rows", "columns"] = "whole"
    args = {
        "a_scale": Slot("a_scale"), "b_scale": Slot("b_scale"), "out_ptr": Slot("out"), "offsets_ptr": Slot("offsets"),
        "N": cols, "length": key.inner, "a_stored": left.stored, "b_stored": right.stored, "stride_om": y.stride(0),
        "stride_bsg": _scales_a_group(b, cols),
    }  # fmt: skip
    constants = {**_constants(left, right, config), "GROUPS": count, "SEARCH": max(_power_of_two(count), 2)}
    walk = config.block_m, count, -(-cols // config.block_n), key.compute_units
    grid = _grid_of_rows(y.shape[0], *walk)
    if config.loads == "descriptors":
        weight = "columns" if right.outer else "rows"
        args |= {
            "a_desc": Slot("a", (config.block_m, config.block_k)),
            "b_desc": Slot("b", (config.block_k, config.block_n) if right.outer else (config.block_n, config.block_k)),
        }  # fmt: skip
        del constants["A_OUTER"]
        constants["FLATTEN"] = config.persistent
        multiply = KernelCall(grouped_rows_descriptor_kernel, grid, args, constants, options_of(config))
    else:
        args |= {
            "a_ptr": Slot("a"), "b_ptr": Slot("b"), "stride_am": left.strides[0], "stride_ak": left.strides[1],
            "stride_bg": stride_bg, "stride_bn": right.strides[0], "stride_bk": right.strides[1],
        }  # fmt: skip
        constants |= _pointer_constants(left, right, y.stride(0), key, config, even_n=cols % config.block_n == 0)
        constants["EVEN_K"] = key.inner % config.block_k == 0 and min(left.stored, right.stored) >= key.inner
        multiply = KernelCall(grouped_rows_kernel, grid, args, constants, options_of(config))
    plain = weight if isinstance(b, torch.Tensor) else None
    return GroupedProgram(left, right, plain, (*calls, multiply), walk, any_length=left.scratch is None)


def plan_depth(
    a: Operand, b: Operand, groups: Groups, out: torch.Tensor, key: GroupedGemmKey, config: GemmConfig, *, multiple: int
) -> list[KernelCall]:
    """The calls of `depth_program`, with their tensors."""
    return depth_program(a, b, groups, out, key, config, multiple=multiple).bound(a, b, groups, out)


def depth_program(
    a: Operand, b: Operand, groups: Groups, out: torch.Tensor, key: GroupedGemmKey, config: GemmConfig, *, multiple: int
) -> GroupedProgram:
    """The program after which out[g] (+)= a[:, rows of g] @ b[:, rows of g].T.

    Args:
        multiple: What all offsets are multiples of.
    """
    from primus_turbo_plugin.kernels.triton.grouped_gemm_descriptor_kernel import grouped_depth_descriptor_kernel
    from primus_turbo_plugin.kernels.triton.grouped_gemm_kernel import grouped_depth_kernel

    rows, cols = out.shape[1:]
    left, right, calls = _sources(a, b, replace(key.dense, contraction=groups.total), config)
    kinds = (left, key.a), (right, key.b)
    left, right = (replace(x, meta=x.meta.scaled_once()) if kind.block == "rowwise" else x for x, kind in kinds)
    args: dict[str, Any] = {
        "a_ptr": Slot("a"), "a_scale": Slot("a_scale"), "b_ptr": Slot("b"), "b_scale": Slot("b_scale"),
        "out_ptr": Slot("out"), "offsets_ptr": Slot("offsets"), "M": rows, "N": cols,
        "a_stored": _stored(a, left), "b_stored": _stored(b, right),
        "stride_am": left.strides[0], "stride_ak": left.strides[1], "stride_bn": right.strides[0],
        "stride_bk": right.strides[1], "stride_og": out.stride(0), "stride_om": out.stride(1),
    }  # fmt: skip
    constants = {
        **_constants(left, right, config), "GROUPS": groups.count, "MULTIPLE": multiple, "ACCUMULATE": key.accumulate
    }  # fmt: skip
    tiles = -(-rows // config.block_m) * -(-cols // config.block_n) * groups.count
    pointers = _pointer_constants(left, right, out.stride(1), key, config, even_n=cols % config.block_n == 0)
    if config.loads == "descriptors":
        args |= {
            "a_desc": descriptor_slot(left, config.block_m, config), "b_desc": descriptor_slot(right, config.block_n, config)
        }  # fmt: skip
        constants["WIDE"] = pointers["WIDE"]
        multiply = KernelCall(grouped_depth_descriptor_kernel, (tiles,), args, constants, options_of(config))
    else:
        constants |= {**pointers, "EVEN_K": multiple % config.block_k == 0}
        grid = (min(tiles, key.compute_units),)
        multiply = KernelCall(grouped_depth_kernel, grid, args, constants, options_of(config))
    plain = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return GroupedProgram(left, right, None, (*calls, multiply), None, any_length=plain)


def _sources(a: Operand, b: Operand, key: GemmKey, config: GemmConfig) -> tuple[Source, Source, list[KernelCall]]:
    """How both operands are read, and the calls that decode them."""
    calls: list[KernelCall] = []
    left, right = (source_of(n, x, kind, key, config, calls) for n, x, kind in (("a", a, key.a), ("b", b, key.b)))
    return left, right, calls


def _constants(left: Source, right: Source, config: GemmConfig) -> dict[str, Any]:
    return {
        "A": left.meta, "B": right.meta, "A_OUTER": left.outer, "B_OUTER": right.outer, "UNITS": config.units,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP": config.group_m,
        "PARTS": config.epilogue_parts,
    }  # fmt: skip


def _pointer_constants(
    left: Source, right: Source, stride_om: int, key: GroupedGemmKey, config: GemmConfig, *, even_n: bool
) -> dict[str, Any]:
    reach = [(config.block_m, left.strides[0]), (config.block_n, right.strides[0]), (config.block_m, stride_om)]
    reach += [(config.block_k, left.strides[1]), (config.block_k, right.strides[1])]
    return {
        "EVEN_N": even_n, "WIDE": reaches_far(reach), "XCDS": config.num_xcds,
        "FNUZ": config.units == "fp8" and config.decode == "scratch",
    }  # fmt: skip


def _stored(operand: Operand, source: Source) -> int:
    """Stored contraction, from which scales' places follow; a constant for plain tensors, whose length differs in every step."""
    return source.stored if isinstance(operand, QuantizedTensor) else 0


def _scales_a_group(b: Operand, cols: int) -> int:
    """Scales of one expert's weight."""
    if not isinstance(b, QuantizedTensor):
        return 0
    height = b.spec.block_shape[0]
    return -(-cols // height) * b.plain().block_scale.shape[1]


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
