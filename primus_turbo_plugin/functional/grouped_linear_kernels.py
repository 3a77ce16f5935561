"""The kernels one layer of experts runs, chosen before its first forward and kept for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from primus_turbo_plugin.communication.agreement import agree
from primus_turbo_plugin.functional.linear_kernels import OPERANDS, Operand, operand_specs, question
from primus_turbo_plugin.kernels.grouped_operands import (
    depth_multiple,
    depth_spec,
    rows_spec,
    stack_weights,
    weight_spec,
)
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.registry import Backend, KernelRegistry, default_registry
from primus_turbo_plugin.kernels.requests import GroupedGemmRequest, GroupedQuantizeRequest, QuantizeRequest
from primus_turbo_plugin.kernels.tuning.table import tuning_table
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.presets import GEMM_OPERANDS
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies, QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.scale_layout import ROWS, ScaleLayout

_KIND: dict[str, Literal["rows", "depth"]] = {"fprop": "rows", "dgrad": "rows", "wgrad": "depth"}


@dataclass(frozen=True, slots=True)
class GroupedLinearKernels:
    """A backend for every grouped GEMM and every quantisation of a layer of experts.

    Attributes:
        plan: What was asked for.
        dtype: The dtype the GEMMs compute in and y, dx are returned in.
        wgrad_dtype: dtype of dw as the GEMM writes it: the weight's, or fp32 towards a `main_grad`.
        gemms: Backend of fprop, dgrad, wgrad.
        quantizers: Backend that quantises x, w, dy; those used as they are have none. w's is an ordinary one, expert by expert.
        weight_layouts: Layout of the MX scales of the weights that fprop and dgrad multiply, which those read as they are.
    """

    plan: ModulePlan
    dtype: torch.dtype
    wgrad_dtype: torch.dtype
    gemms: dict[str, Backend[GroupedGemmRequest]]
    quantizers: dict[str, Backend[Any]]
    weight_layouts: dict[str, ScaleLayout] = field(default_factory=dict)

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
    ) -> GroupedLinearKernels:
        """Chooses by the plan's orders, for forward and backward at once: what cannot run is refused before anything ran.

        Args:
            plan: Precision and kernel orders (`grouped_gemm`, `grouped_quantize`, `quantize` for weights, or the default).
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
        layouts: dict[str, ScaleLayout] = {}
        for gemm, kind in _KIND.items():
            a, b = (spec if spec.is_quantized else dtype for spec in _gemm_specs(plan, gemm))
            out_dtype, adds = (wgrad_dtype, accumulate) if gemm == "wgrad" else (dtype, False)
            request = GroupedGemmRequest(device=device.type, kind=kind, a=a, b=b, out_dtype=out_dtype, accumulate=adds)
            gemms[gemm] = registry.select(request.op, request, plan.kernels.get(request.op))
            layouts[gemm] = gemms[gemm].scale_layout(request)
        quantizers: dict[str, Any] = {}
        for operand in OPERANDS:
            row, column = operand_specs(plan, operand)
            if row or column:
                kind_of_request = QuantizeRequest if operand == "w" else GroupedQuantizeRequest
                wanted = kind_of_request(device=device.type, dtype=dtype, row_spec=row, col_spec=column)
                quantizers[operand] = registry.select(wanted.op, wanted, plan.kernels.get(wanted.op))
        chosen = cls(
            plan=plan,
            dtype=dtype,
            wgrad_dtype=wgrad_dtype,
            gemms=gemms,
            quantizers=quantizers,
            weight_layouts=layouts,
        )
        agree(question("experts", plan, device, dtype, wgrad_dtype, accumulate), chosen.choices)
        return chosen

    @property
    def choices(self) -> dict[str, str]:
        """What was chosen, by name: backends with what they cost beside, and the tuning table they are configured by."""
        found = {f"grouped {gemm} GEMM": _named(backend) for gemm, backend in self.gemms.items()}
        found |= {f"quantisation of experts' {name}": _named(backend) for name, backend in self.quantizers.items()}
        return found | {"tuned configurations": tuning_table(self.plan.tuning_file).digest}

    @property
    def token_multiple(self) -> int:
        """What every expert's tokens are padded to in the copies that wgrad multiplies; 1 where neither is quantised."""
        return depth_multiple(*(operand_specs(self.plan, operand)[1] for operand in ("x", "dy")))

    def multiply_rows(self, gemm: str, a: Operand, b: Operand, groups: Groups) -> Tensor:
        """y[rows of g] = a[rows of g] @ b[g].T: fprop and dgrad, [T, outputs]. Nothing in it may be empty but experts."""
        y: Tensor = self.gemms[gemm].kernels.grouped_gemm_nt(a, b, groups, out_dtype=self.dtype)
        return y

    def multiply_depth(self, a: Operand, b: Operand, groups: Groups, out: Tensor, *, accumulate: bool) -> Tensor:
        """out[g] (+)= a[:, rows of g] @ b[:, rows of g].T: wgrad, [experts, out, in]."""
        specs = self.plan.precision.gemm("wgrad")
        by_expert = all(spec.is_quantized and spec.block_shape[1] == 0 for spec in specs)
        dw: Tensor = self.gemms["wgrad"].kernels.grouped_gemm_depth(
            a, b, groups, out, accumulate=accumulate, scales_by_expert=by_expert
        )
        return dw

    def quantize(
        self,
        operand: str,
        t: Tensor,
        row: QuantSpec | None,
        column: QuantSpec | None,
        groups: Groups,
        padded: Groups,
        key: RoundingKey | None,
    ) -> Copies:
        """The row copy of x or dy [T, features] and its columnwise copy [features, padded T], where a spec is given."""
        if row is None and column is None:
            return None, None
        copies: Copies = self.quantizers[operand].kernels.grouped_quantize(
            t, row, column, groups, padded, key=key, signs_seed=self.plan.precision.signs_seed
        )
        return copies

    def quantize_weights(
        self, weight: Tensor, row: QuantSpec | None, column: QuantSpec | None, keys: Sequence[RoundingKey | None]
    ) -> Copies:
        """Copies of the weights [experts, out, in], each expert quantised alone: [experts * out, in] and [experts * in, out]."""
        if row is None and column is None:
            return None, None
        quantize_both = self.quantizers["w"].kernels.quantize_both
        seed = self.plan.precision.signs_seed
        copies = [quantize_both(w, row, column, key=key, signs_seed=seed) for w, key in zip(weight, keys)]
        row_copies, column_copies = zip(*copies)
        return self._stacked("fprop", row_copies), self._stacked("dgrad", column_copies)

    def _stacked(self, gemm: str, copies: Sequence[QuantizedTensor | None]) -> QuantizedTensor | None:
        """All experts' copies in one, scales as the GEMM reads them where its layout's tiles of 32 rows are of one expert."""
        present = [copy for copy in copies if copy is not None]
        if not present:
            return None
        layout = self.weight_layouts.get(gemm, "plain")
        fits = present[0].spec.is_mx and present[0].outer % ROWS == 0
        return stack_weights(present).with_scale_layout(layout if fits else "plain")


def _gemm_specs(plan: ModulePlan, gemm: str) -> list[QuantSpec]:
    """Specs of a GEMM's two operands as they are multiplied, all experts' in one."""
    found = []
    for operand, spec in zip(GEMM_OPERANDS[gemm], plan.precision.gemm(gemm)):
        if spec.is_quantized:
            spec = weight_spec(spec) if operand == "w" else depth_spec(spec) if gemm == "wgrad" else rows_spec(spec)
        found.append(spec)
    return found


def _named(backend: Backend[Any]) -> str:
    return f"{backend.name} ({backend.note})" if backend.note else backend.name
