"""Which kernel serves what on this device, and whether it emulates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from primus_turbo_plugin.devices import FORMATS, Device
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.kernels.attention import AttentionRequest
from primus_turbo_plugin.kernels.registry import Backend, Choice, KernelRegistry
from primus_turbo_plugin.kernels.requests import GemmRequest, GroupedGemmRequest, QuantizeRequest, Request
from primus_turbo_plugin.precision.module_plan import KernelOrders
from primus_turbo_plugin.precision.presets import GEMM_OPERANDS
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import LinearPrecision


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Who serves a request.

    Attributes:
        op: The request's op.
        request: The request in words.
        formats: Formats of the operands of a GEMM or of attention; empty for other ops.
        backend: None where nobody does.
        emulated: Why quantised products run without units for their format; None where they have them, or need none.
        refusals: (backend, reason) of those that come first in the order and refused.
        notable: Of these, the ones that a user put into an order, or that are written for this device.
        note: The backend's own: what it costs beside.
    """

    op: str
    request: str
    formats: tuple[str, ...]
    backend: str | None
    emulated: str | None
    refusals: tuple[tuple[str, str], ...]
    note: str = ""
    notable: tuple[tuple[str, str], ...] = ()


def gemm_formats(request: Request) -> tuple[str, ...]:
    """The formats of the operands of a GEMM or of attention, `bf16` for plain ones; empty for other ops."""
    if isinstance(request, AttentionRequest):
        return ("fp8",) if request.fp8 else ()
    if not isinstance(request, GemmRequest | GroupedGemmRequest):
        return ()
    kinds = (request.a, request.b)
    return tuple(dict.fromkeys(str(kind.format) if isinstance(kind, QuantSpec) else "bf16" for kind in kinds))


def emulation(device: Device, formats: tuple[str, ...], backend: Backend[Any]) -> str | None:
    """Why `backend` emulates GEMMs of operands in these formats on this device; None where it need not."""
    quantized = [name for name in formats if name != "bf16"]
    arch = device.capabilities.arch
    mixed = "fp8" in quantized and len(quantized) > 1  # no instruction takes scales of rows with scales of blocks
    if not quantized or (set(formats) <= set(backend.matrix_units.get(arch, ())) and not mixed):
        return None
    missing = [why for name in quantized if (why := device.capabilities.emulation(name)) is not None]
    why = missing[0] if missing else f"{backend.name} does not use {arch}'s units for {' x '.join(formats)}"
    return f"emulated by dequantising, numerics equal, no speed-up: {why}"


def describe(choice: Choice, device: Device) -> Served:
    """A registry's choice as the report shows it."""
    formats = gemm_formats(choice.request)
    return Served(
        op=choice.request.op,
        request=str(choice.request),
        formats=formats,
        backend=choice.backend.name if choice.backend else None,
        emulated=emulation(device, formats, choice.backend) if choice.backend else None,
        refusals=tuple(choice.refusals.items()),
        note=choice.backend.note if choice.backend else "",
        notable=tuple(choice.notable.items()),
    )


def who_serves(
    registry: KernelRegistry, device: Device, orders: Mapping[str, Iterable[str]] | None = None
) -> list[Served]:
    """Who serves typical requests of every op.

    Raises:
        ConfigError: An order names an op or a backend that does not exist.
    """
    return [describe(choice, device) for choice in registry.explain(device.torch_device, orders)]


def format_summary(device: Device, served: Iterable[Served]) -> dict[str, str]:
    """Format -> how its GEMMs run: by whom, natively or emulated and why."""
    summary = {}
    rows = {row.formats: row for row in served if row.op == GemmRequest.op}
    native = "" if device.capabilities.vendor == "cpu" else "native, "
    for name in FORMATS:
        row = rows.get((name,))
        if row is not None:
            status = row.emulated or (f"{native}by {row.backend}" if row.backend else None)
            summary[name] = status or "; ".join(f"{backend}: {reason}" for backend, reason in row.refusals)
    return summary


def requests_of(precision: LinearPrecision, torch_device: str) -> list[Request]:
    """Every kernel call of a BF16 model's linear layer under `precision`: three GEMMs and the quantisations they need."""
    bf16 = torch.bfloat16
    found: list[Request] = []
    copies = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}
    for operand, (row_gemm, column_gemm) in copies.items():
        row, column = precision.spec(row_gemm, operand), precision.spec(column_gemm, operand)
        if row.is_quantized or column.is_quantized:
            found.append(
                QuantizeRequest(
                    device=torch_device,
                    dtype=bf16,
                    row_spec=row if row.is_quantized else None,
                    col_spec=column if column.is_quantized else None,
                )
            )
    for gemm in GEMM_OPERANDS:
        a, b = (spec if spec.is_quantized else bf16 for spec in precision.gemm(gemm))
        is_wgrad = gemm == "wgrad"
        out_dtype = torch.float32 if is_wgrad else bf16
        found.append(GemmRequest(device=torch_device, a=a, b=b, out_dtype=out_dtype, accumulate=is_wgrad))
    return found


def attention_status(device: Device, served: Iterable[Served]) -> str:
    """How FP8 attention runs here: natively, or emulated and why."""
    row = next(row for row in served if row.op == AttentionRequest.op and row.formats == ("fp8",))
    if row.backend is None:
        return "; ".join(f"{backend}: {reason}" for backend, reason in row.refusals)
    native = "by " if device.capabilities.vendor == "cpu" else "FP8 matrix units, by "
    return row.emulated or f"{native}{row.backend}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unserved:
    """Requests of one op that nobody in the order serves, for the same reasons.

    Attributes:
        op: The op.
        requests: The requests in words.
        reasons: (backend, reason) in the order asked.
    """

    op: str
    requests: tuple[str, ...]
    reasons: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        more = f" and {len(self.requests) - 1} more" if len(self.requests) > 1 else ""
        reasons = "; ".join(f"{backend}: {reason}" for backend, reason in self.reasons)
        return f"no allowed backend can do {self.requests[0]}{more} ({reasons})"


def unserved(
    precision: LinearPrecision, kernels: KernelOrders, registry: KernelRegistry, torch_device: str
) -> list[Unserved]:
    """What nobody serves of a linear layer; empty where all is served.

    Raises:
        ConfigError: An order names an op or a backend that does not exist.
    """
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for request in requests_of(precision, torch_device):
        try:
            registry.select(request.op, request, kernels.get(request.op))
        except UnsupportedError as error:
            groups.setdefault((request.op, tuple(error.reasons.items())), []).append(str(request))
    return [Unserved(op=op, requests=tuple(found), reasons=reasons) for (op, reasons), found in groups.items()]
