"""A product as the kernel calls that a `GemmConfig` makes of it: decode into scratch, multiply, add up shares.

A `Program` is everything about these calls but the tensors. It is built once for products that are alike in every fact that a
kernel was compiled for (`facts`), and then only binds tensors and launches; `launching.py` says why.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, Operand, OperandKey
from primus_turbo_plugin.kernels.triton.launching import facts as tensor_facts
from primus_turbo_plugin.kernels.triton.launching import repeater
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

_FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_FNUZ_DTYPES = {"e4m3": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2fnuz}
_FIRST_NAN = {"e4m3": 0x7F, "e5m2": 0x7C}
"""Magnitude codes from here on are NaN, or Inf."""
_SCRATCH_ROW_ELEMENTS = 8
"""Rows of a decoded copy start at multiples of 16 bytes."""
_DECODED_BY_16 = 1 << 20
"""Most rows decoded 16 by a program: CUDA has 65,535 programs along a grid's second axis. All experts' weights may have more."""
_WIDE_OFFSET = 1 << 30
"""Elements from a tile's corner from which offsets are computed in 64 bits; half of what 32 bits hold."""

Tensors = Mapping[str, "torch.Tensor | None"]


def facts(x: Operand | None) -> Hashable:
    """What kernels are compiled for, of one operand: `launching.facts` of its tensors, and what its codes mean."""
    if isinstance(x, QuantizedTensor):
        return x.spec, x.shape, x.signs_seed, x.scale_layout, tensor_facts(x.data), tensor_facts(x.block_scale)
    return tensor_facts(x)


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor among a call's arguments; with a block shape, for its tensor descriptor.

    Attributes:
        name: `a` or `b` (what the multiplying kernel reads); `a_codes`, `a_scale`, `a_scratch`; `bias`, `y` or `parts`.
        block: Rows and columns of a descriptor's tile, or None for the tensor itself.
        turned: The descriptor is that of the transposed tensor.
    """

    name: str
    block: tuple[int, int] | None = None
    turned: bool = False

    def bind(self, tensors: Tensors) -> Any:
        tensor = tensors[self.name]
        if self.block is None or tensor is None:
            return tensor
        from triton.tools.tensor_descriptor import TensorDescriptor

        tensor = tensor.t() if self.turned else tensor
        return TensorDescriptor(tensor, tensor.shape, tensor.stride(), list(self.block))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch, as data: `kernel[grid](**args, **constants, **options)`. Tensors are there, or Slots stand for them."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]

    def bind(self, tensors: Tensors) -> KernelCall:
        """The same call with its tensors."""
        args = {name: value.bind(tensors) if isinstance(value, Slot) else value for name, value in self.args.items()}
        return KernelCall(self.kernel, self.grid, args, self.constants, self.options)

    def run(self) -> Any:
        """Launches it; returns the compiled kernel."""
        return self.kernel[self.grid](**self.args, **self.constants, **self.options)


class CallLauncher:
    """Launches one call again and again: by Triton's JIT the first time, by the kernel that came of it from then on."""

    __slots__ = ("_compiled", "_described", "_latest", "_plain", "_template", "call")

    def __init__(self, call: KernelCall) -> None:
        values = {**call.args, **call.constants}
        self.call = call
        self._template = [values[name] for name in call.kernel.arg_names]
        slots = [(index, value) for index, value in enumerate(self._template) if isinstance(value, Slot)]
        self._plain = [(index, slot.name) for index, slot in slots if slot.block is None]
        self._described = [(index, _Described(slot)) for index, slot in slots if slot.block is not None]
        self._compiled: Any = None
        self._latest: tuple[tuple[int, ...], Any] = (), None

    def run(self, tensors: Tensors, grid: tuple[int, ...] | None = None) -> None:
        """Launches it, on another grid than the call's if one is given."""
        grid = self.call.grid if grid is None else grid
        if self._compiled is None:
            self._compiled = replace(
                self.call.bind(tensors), grid=grid
            ).run()  # None: Triton's interpreter compiles nothing
            return
        latest, launch = self._latest
        if latest != grid:
            launch = repeater(self._compiled, grid)
            self._latest = grid, launch
        args = self._template.copy()
        for index, name in self._plain:
            args[index] = tensors[name]
        for index, described in self._described:
            args[index] = described.bind(tensors)
        launch(*args)


class _Described:
    """The descriptor of a slot, again and again: its checks and all but its tensor and shape are the first one's."""

    __slots__ = ("_fields", "_kind", "_slot")

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._kind: Any = None
        self._fields: dict[str, Any] = {}

    def bind(self, tensors: Tensors) -> Any:
        if self._kind is None:
            first = self._slot.bind(tensors)
            self._fields = {**vars(first), "base": None}
            self._kind = type(first)
            return first
        tensor = tensors[self._slot.name]
        assert tensor is not None
        tensor = tensor.t() if self._slot.turned else tensor
        descriptor = object.__new__(self._kind)
        descriptor.__dict__.update(self._fields, base=tensor, shape=tensor.shape)
        return descriptor


@dataclass(frozen=True, slots=True)
class Source:
    """How a kernel reads an operand.

    Attributes:
        name: `a` or `b`.
        meta: `gemm_decode.OperandMeta`.
        stored: Length of the stored contraction.
        strides: Of what is read, `[outer, stored / codes a byte]`.
        outer: Neighbours in memory are rows.
        view: FP8 dtype as which codes are read, or None.
        scratch: Shape of the scratch copy that is read instead, or None; its rows may be cut to `stored`.
    """

    name: str
    meta: Any
    stored: int
    strides: tuple[int, int]
    outer: bool = False
    view: torch.dtype | None = None
    scratch: tuple[int, int] | None = None

    def tensors(self, operand: Operand) -> dict[str, torch.Tensor | None]:
        """What the slots of this operand hold; allocates its scratch."""
        name = self.name
        if not isinstance(operand, QuantizedTensor):
            return {name: operand, f"{name}_scale": None}
        operand = operand.plain()
        read = operand.data
        if self.scratch is not None:
            dtype = torch.bfloat16 if self.view is None else torch.uint8
            read = torch.empty(*self.scratch, dtype=dtype, device=operand.device)
            if self.view is None and self.scratch[1] != self.stored:
                read = read[:, : self.stored]
        found = {f"{name}_codes": operand.data, f"{name}_scale": operand.block_scale, f"{name}_scratch": read}
        return {name: read if self.view is None else read.view(self.view), **found}


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of one product, in order, without its tensors.

    Attributes:
        left: How a is read.
        right: How b is read.
        parts: Shape of the partial sums `[split_k, M, N]`, or None.
        calls: The calls, tensors as Slots.
    """

    left: Source
    right: Source
    parts: tuple[int, int, int] | None
    calls: tuple[KernelCall, ...]
    _launchers: list[CallLauncher] = field(default_factory=list, repr=False)

    def tensors(self, a: Operand, b: Operand, bias: torch.Tensor | None, y: torch.Tensor) -> Tensors:
        """Slot -> tensor. Scratch is allocated here and lives as long as the mapping."""
        found = {**self.left.tensors(a), **self.right.tensors(b), "bias": bias, "y": y}
        if self.parts is not None:
            found["parts"] = torch.empty(*self.parts, dtype=torch.float32, device=y.device)
        return found

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, y: torch.Tensor) -> None:
        """Launches the calls, after which y holds the product. The tensors must have the facts the program was built for."""
        if not self._launchers:
            self._launchers[:] = [CallLauncher(call) for call in self.calls]  # at once: backward has threads of its own
        tensors = self.tensors(a, b, bias, y)
        for launcher in self._launchers:
            launcher.run(tensors)


def plan(
    a: Operand, b: Operand, bias: torch.Tensor | None, y: torch.Tensor, key: GemmKey, config: GemmConfig
) -> list[KernelCall]:
    """The calls, with their tensors, after which y = a @ b.T (+ bias), or y += a @ b.T where the key says so."""
    program = program_of(a, b, y, key, config)
    tensors = program.tensors(a, b, bias, y)
    return [call.bind(tensors) for call in program.calls]


def program_of(a: Operand, b: Operand, y: torch.Tensor, key: GemmKey, config: GemmConfig) -> Program:
    """The program of a product. `config` must suit the key (`gemm_config.refusal`)."""
    calls: list[KernelCall] = []
    left, right = (source_of(n, x, kind, key, config, calls) for n, x, kind in (("a", a, key.a), ("b", b, key.b)))
    parts = (config.split_k, key.rows, key.cols) if config.split_k > 1 else None
    if config.loads == "descriptors":
        calls.append(_multiply_descriptors(left, right, key, config))
    elif parts is not None:
        calls.append(_multiply_pointers(left, right, "parts", (key.cols, 1), key, config))
        calls.append(_sum_shares(y.stride(), key, config))
    else:
        calls.append(_multiply_pointers(left, right, "y", y.stride(), key, config))
    return Program(left, right, parts, tuple(calls))


def source_of(
    name: str, operand: Operand, kind: OperandKey, key: GemmKey, config: GemmConfig, calls: list[KernelCall]
) -> Source:
    """How an operand is read; appends the call that decodes it, if one does."""
    from primus_turbo_plugin.kernels.triton.gemm_decode import PLAIN, OperandMeta

    if not isinstance(operand, QuantizedTensor):
        return Source(name, PLAIN, operand.shape[1], operand.stride(), kind.contiguous == "outer")
    meta, stored, strides = OperandMeta.of(operand), operand.padded_contraction, operand.data.stride()
    if config.units == "half" and config.decode == "scratch":
        width = -(-key.contraction // _SCRATCH_ROW_ELEMENTS) * _SCRATCH_ROW_ELEMENTS
        calls.append(_decode(name, operand, meta, key.contraction, width))
        return Source(name, meta.decoded(), key.contraction, (width, 1), scratch=(operand.outer, width))
    if config.units == "fp8" and config.decode == "scratch":
        calls.append(_to_fnuz(name, operand))
        view = _FNUZ_DTYPES[kind.element]
        return Source(name, meta, stored, strides, view=view, scratch=tuple(operand.data.shape))  # type: ignore[arg-type]
    return Source(name, meta, stored, strides, view=_FP8_DTYPES[kind.element] if config.units == "fp8" else None)


def _decode(name: str, operand: QuantizedTensor, meta: Any, length: int, width: int) -> KernelCall:
    """Fills scratch with bf16 `[outer, length]`: MX values, or FP8 codes without their fp32 scales."""
    from primus_turbo_plugin.kernels.triton.gemm_decode import decode_kernel

    rows, block_k = 16 if operand.outer <= _DECODED_BY_16 else 64, 256
    args = {
        "data_ptr": Slot(f"{name}_codes"), "scale_ptr": Slot(f"{name}_scale"), "out_ptr": Slot(f"{name}_scratch"),
        "rows": operand.outer, "length": length, "stored": operand.padded_contraction,
        "stride_row": operand.data.stride(0), "stride_out": width,
    }  # fmt: skip
    grid = (-(-length // block_k), -(-operand.outer // rows))
    return KernelCall(decode_kernel, grid, args, {"META": meta, "ROWS": rows, "BLOCK_K": block_k}, {"num_warps": 4})


def _to_fnuz(name: str, operand: QuantizedTensor) -> KernelCall:
    """Fills scratch with an FP8 operand's codes in the FNUZ encoding."""
    from primus_turbo_plugin.kernels.triton.gemm_decode import fnuz_kernel

    size, block = operand.data.numel(), 4096
    args = {"data_ptr": Slot(f"{name}_codes"), "out_ptr": Slot(f"{name}_scratch"), "size": size}
    constants = {"FIRST_NAN": _FIRST_NAN[operand.spec.element_type.name], "BLOCK": block}
    return KernelCall(fnuz_kernel, (-(-size // block),), args, constants, {"num_warps": 4})


def _multiply_pointers(
    a: Source, b: Source, result: str, strides: tuple[int, ...], key: GemmKey, config: GemmConfig
) -> KernelCall:
    """The product into `[M, N]` of those strides, or into partial sums `[split_k, M, N]`."""
    from primus_turbo_plugin.kernels.triton.gemm_kernel import gemm_nt_kernel

    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    pieces = config.tiles(key) * config.split_k
    reach = [(block_m, a.strides[0]), (block_n, b.strides[0]), (block_m, strides[0]), (block_n, strides[1])]
    reach += [(block_k, a.strides[1]), (block_k, b.strides[1])]
    args = {
        **_operands(a, b, key, config), "out_ptr": Slot(result),
        "stride_am": a.strides[0], "stride_ak": a.strides[1], "stride_bn": b.strides[0], "stride_bk": b.strides[1],
        "stride_om": strides[0], "stride_on": strides[1],
    }  # fmt: skip
    if config.split_k > 1:
        args["bias_ptr"] = None
    constants = {
        **_constants(a, b, key, config), "ACCUMULATE": key.accumulate and config.split_k == 1,
        "EVEN_M": key.rows % block_m == 0, "EVEN_N": key.cols % block_n == 0,
        "EVEN_K": key.contraction % block_k == 0 and min(a.stored, b.stored) >= key.contraction,
        "WIDE": reaches_far(reach),
        "XCDS": config.num_xcds, "SPLIT_K": config.split_k,
        "FNUZ": config.units == "fp8" and config.decode == "scratch",
    }  # fmt: skip
    grid = (min(pieces, key.compute_units) if config.persistent else pieces,)
    return KernelCall(gemm_nt_kernel, grid, args, constants, options_of(config))


def descriptor_slot(source: Source, block: int, config: GemmConfig) -> Slot:
    """The descriptor by which a kernel reads an operand, `block` rows of it at a time."""
    if source.outer:
        return Slot(source.name, (config.block_k, block), turned=True)
    return Slot(source.name, (block, config.block_k))


def _multiply_descriptors(a: Source, b: Source, key: GemmKey, config: GemmConfig) -> KernelCall:
    from primus_turbo_plugin.kernels.triton.gemm_descriptor_kernel import gemm_descriptor_kernel

    args = _operands(a, b, key, config)
    del args["a_ptr"], args["b_ptr"]
    args |= {
        "a_desc": descriptor_slot(a, config.block_m, config), "b_desc": descriptor_slot(b, config.block_n, config),
        "out_desc": Slot("y", (config.block_m, config.block_n // config.epilogue_parts)),
    }  # fmt: skip
    constants = {**_constants(a, b, key, config), "ACCUMULATE": key.accumulate}
    tiles = config.tiles(key)
    grid = (min(tiles, key.compute_units) if config.persistent else tiles,)
    return KernelCall(gemm_descriptor_kernel, grid, args, constants, options_of(config))


def _operands(a: Source, b: Source, key: GemmKey, config: GemmConfig) -> dict[str, Any]:
    """Arguments that both multiplying kernels take."""
    return {
        "a_ptr": Slot("a"), "a_scale": Slot("a_scale"), "b_ptr": Slot("b"), "b_scale": Slot("b_scale"), "bias_ptr": Slot("bias"),
        "M": key.rows, "N": key.cols, "length": key.contraction, "a_stored": a.stored, "b_stored": b.stored,
    }  # fmt: skip


def _constants(a: Source, b: Source, key: GemmKey, config: GemmConfig) -> dict[str, Any]:
    """Compile-time constants that both multiplying kernels take."""
    return {
        "A": a.meta, "B": b.meta, "A_OUTER": a.outer, "B_OUTER": b.outer, "UNITS": config.units,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP": config.group_m,
        "PARTS": config.epilogue_parts, "PERSISTENT": config.persistent,
    }  # fmt: skip


def _sum_shares(strides: tuple[int, ...], key: GemmKey, config: GemmConfig) -> KernelCall:
    from primus_turbo_plugin.kernels.triton.gemm_kernel import sum_shares_kernel

    rows, cols = 4, 256
    args = {
        "part_ptr": Slot("parts"), "bias_ptr": Slot("bias"), "out_ptr": Slot("y"),
        "M": key.rows, "N": key.cols, "stride_om": strides[0], "stride_on": strides[1],
    }  # fmt: skip
    constants = {"SPLIT_K": config.split_k, "ACCUMULATE": key.accumulate, "ROWS": rows, "COLS": cols}
    grid = (-(-key.rows // rows), -(-key.cols // cols))
    return KernelCall(sum_shares_kernel, grid, args, constants, {"num_warps": 4})


def reaches_far(reach: Iterable[tuple[int, int]]) -> bool:
    """Whether offsets inside a tile need 64 bits: (size, stride) of everything that is read or written."""
    return max(size * abs(stride) for size, stride in reach) >= _WIDE_OFFSET


def options_of(config: GemmConfig) -> dict[str, int]:
    """How a kernel is compiled."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    amd = {"matrix_instr_nonkdim": config.matrix_instr_nonkdim, "waves_per_eu": config.waves_per_eu}
    return options | {name: value for name, value in amd.items() if value}
