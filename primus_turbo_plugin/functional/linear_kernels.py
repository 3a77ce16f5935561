"""The kernels one linear layer runs, chosen before its first forward and kept for its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from primus_turbo_plugin.communication.agreement import agree
from primus_turbo_plugin.kernels.registry import Backend, KernelRegistry, default_registry
from primus_turbo_plugin.kernels.requests import GemmRequest, QuantizeRequest
from primus_turbo_plugin.kernels.tuning.table import tuning_table
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.presets import GEMM_OPERANDS
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.scale_layout import ScaleLayout

Operand: TypeAlias = Tensor | QuantizedTensor
Specs: TypeAlias = tuple[QuantSpec | None, QuantSpec | None]
"""Of an operand's row copy and of its columnwise copy, each where that is quantised."""

OPERANDS = ("x", "w", "dy")
"""The three tensors of a linear; each has a row copy for one GEMM and a columnwise copy for another."""

_ROW_GEMM = {"x": "fprop", "w": "fprop", "dy": "dgrad"}
_COLUMN_GEMM = {"x": "wgrad", "w": "dgrad", "dy": "wgrad"}


@dataclass(frozen=True, slots=True)
class LinearKernels:
    """A backend for every GEMM and every quantisation of a layer.

    Attributes:
        plan: What was asked for.
        dtype: The dtype the GEMMs compute in and y, dx are returned in.
        wgrad_dtype: dtype of dw as the GEMM writes it: the weight's, or fp32 towards a `main_grad`.
        gemms: Backend of fprop, dgrad, wgrad.
        quantizers: Backend that quantises x, w, dy; those used as they are have none.
        scale_layouts: Layout of the MX scales of x, w, dy: the one that both GEMMs which multiply an operand read as it is.
        specs: The plan's specs of x, w, dy, looked up once: a call asks for them a dozen times.
        is_stochastic: Whether the plan rounds anything stochastically.
        fused: Fused quantisations looked for so far, and what was found (functional/fused_quantize.py).
    """

    plan: ModulePlan
    dtype: torch.dtype
    wgrad_dtype: torch.dtype
    gemms: dict[str, Backend[GemmRequest]]
    quantizers: dict[str, Backend[QuantizeRequest]]
    scale_layouts: dict[str, ScaleLayout] = field(default_factory=dict)
    specs: dict[str, Specs] = field(init=False)
    is_stochastic: bool = field(init=False)
    fused: dict[Any, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", {operand: operand_specs(self.plan, operand) for operand in OPERANDS})
        object.__setattr__(self, "is_stochastic", self.plan.precision.is_stochastic)

    @classmethod
    def select(
        cls,
        plan: ModulePlan,
        device: torch.device,
        dtype: torch.dtype,
        *,
        wgrad_dtype: torch.dtype,
        accumulate: bool,
        registry: KernelRegistry | None = None,
    ) -> LinearKernels:
        """Chooses by the plan's orders, for forward and backward at once: what cannot run is refused before anything ran.

        Args:
            plan: Precision and kernel orders.
            device: Where the tensors are.
            dtype: Of x (and of the weight as it is multiplied).
            wgrad_dtype: Of dw as the GEMM writes it.
            accumulate: Whether the wgrad GEMM adds to an existing fp32 dw.
            registry: The backends to choose from; None for all of this package, configured by the plan's tuning file.

        Raises:
            UnsupportedError: A GEMM or a quantisation is served by no backend in the plan's order; holds every reason.
            ConfigError: Another rank of the job has chosen otherwise for the same plan.
        """
        registry = default_registry(plan.tuning_file) if registry is None else registry
        gemms: dict[str, Any] = {}
        wanted_layouts: dict[str, ScaleLayout] = {}
        for gemm in GEMM_OPERANDS:
            a, b = (spec if spec.is_quantized else dtype for spec in plan.precision.gemm(gemm))
            out_dtype, adds = (wgrad_dtype, accumulate) if gemm == "wgrad" else (dtype, False)
            request = GemmRequest(device=device.type, a=a, b=b, out_dtype=out_dtype, accumulate=adds)
            gemms[gemm] = registry.select("gemm_nt", request, plan.kernels.get("gemm_nt"))
            wanted_layouts[gemm] = gemms[gemm].scale_layout(request)
        quantizers: dict[str, Any] = {}
        for operand in OPERANDS:
            row, column = operand_specs(plan, operand)
            if row or column:
                wanted = QuantizeRequest(device=device.type, dtype=dtype, row_spec=row, col_spec=column)
                quantizers[operand] = registry.select("quantize", wanted, plan.kernels.get("quantize"))
        layouts: dict[str, ScaleLayout] = {}
        for operand in quantizers:
            row_layout, column_layout = (wanted_layouts[gemm[operand]] for gemm in (_ROW_GEMM, _COLUMN_GEMM))
            layouts[operand] = row_layout if row_layout == column_layout else "plain"
        chosen = cls(
            plan=plan,
            dtype=dtype,
            wgrad_dtype=wgrad_dtype,
            gemms=gemms,
            quantizers=quantizers,
            scale_layouts=layouts,
        )
        agree(question("a linear", plan, device, dtype, wgrad_dtype, accumulate), chosen.choices)
        return chosen

    @property
    def choices(self) -> dict[str, str]:
        """What was chosen, by name: backends, and the tuning table they are configured by."""
        found = {f"{gemm} GEMM": backend.name for gemm, backend in self.gemms.items()}
        found |= {f"quantisation of {operand}": backend.name for operand, backend in self.quantizers.items()}
        return found | {"tuned configurations": tuning_table(self.plan.tuning_file).digest}

    def gemm_nt(
        self, gemm: str, a: Operand, b: Operand, out: Tensor | None = None, *, into: Tensor | None = None
    ) -> Tensor:
        """a [M, K] @ b [N, K].T -> [M, N]. M, N or K may be 0.

        Args:
            gemm: `fprop`, `dgrad`, `wgrad`.
            a: Left operand.
            b: Right operand.
            out: fp32, added to in place.
            into: Of the result's dtype, written.
        """
        out_dtype = self.wgrad_dtype if gemm == "wgrad" else self.dtype
        (rows, contraction), columns = a.shape, b.shape[0]
        if not (rows and contraction and columns):
            nothing = a_like(a, rows, columns, out_dtype) if out is None else out
            return nothing if into is None else into.copy_(nothing)
        multiply = self.gemms[gemm].kernels.gemm_nt
        y: Tensor = (
            multiply(a, b, out_dtype=out_dtype, out=out)
            if into is None
            else multiply(a, b, out_dtype=out_dtype, into=into)
        )
        return y

    def quantize(
        self,
        operand: str,
        t: Tensor,
        row: QuantSpec | None,
        column: QuantSpec | None,
        key: RoundingKey | None,
        *,
        shard: bool = False,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """The row copy of t [rows, columns] and its columnwise copy [columns, rows], each where a spec is given.

        Scales lie as the GEMMs read them, except those of a `shard`, which is put together with others first.
        """
        if row is None and column is None:
            return None, None
        copies: tuple[QuantizedTensor | None, QuantizedTensor | None] = self.quantizers[operand].kernels.quantize_both(
            t,
            row,
            column,
            key=key,
            signs_seed=self.plan.precision.signs_seed,
            scale_layout=self.scale_layout(operand, shard=shard),
        )
        return copies

    def wanted_specs(self, operand: str, *, row: bool, column: bool) -> Specs:
        """Specs of the copies to be quantised: of those wanted, the ones that are not taken as they are."""
        row_spec, column_spec = self.specs[operand]
        return row_spec if row else None, column_spec if column else None

    def scale_layout(self, operand: str, *, shard: bool = False) -> ScaleLayout:
        """Layout of an operand's MX scales."""
        return "plain" if shard else self.scale_layouts.get(operand, "plain")


def question(
    layer: str, plan: ModulePlan, device: torch.device, dtype: torch.dtype, wgrad_dtype: torch.dtype, accumulate: bool
) -> str:
    """Everything that the choice for a kind of layer follows from, but the machine: ranks that ask the same must get the same."""
    specs = ", ".join(f"{gemm} {' x '.join(map(str, plan.precision.gemm(gemm)))}" for gemm in GEMM_OPERANDS)
    order = plan.kernels.to_value() or "default"
    out = f"dw {wgrad_dtype}{' accumulated' if accumulate else ''}"
    return f"the kernels of {layer} in {plan.recipe} ({specs}; {dtype}, {out}, {device.type}, order {order})"


def operand_specs(plan: ModulePlan, operand: str) -> Specs:
    """Specs of an operand's row copy and columnwise copy; None where that GEMM takes it unquantised."""
    specs = (plan.precision.spec(gemm[operand], operand) for gemm in (_ROW_GEMM, _COLUMN_GEMM))
    row, column = (spec if spec.is_quantized else None for spec in specs)
    return row, column


def a_like(a: Operand, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """What a GEMM without terms gives."""
    return torch.zeros(rows, columns, dtype=dtype, device=a.device)
