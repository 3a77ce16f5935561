"""`primus-turbo doctor --selftest`: every kernel that claims to serve this device, run on it and judged.

An op without cases is reported as not tested rather than left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from primus_turbo_plugin.diagnostics.selftest_cases import CASES, Case
from primus_turbo_plugin.kernels.registry import Backend, KernelRegistry


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """One kernel on one case.

    Attributes:
        op: The op.
        backend: The backend.
        case: The request in words.
        outcome: `passed`; `failed`; `not claimed` by the backend, so not run; `untested`: this op has no cases.
        detail: What was wrong, or the backend's reason; empty where it passed.
    """

    op: str
    backend: str
    case: str
    outcome: Literal["passed", "failed", "not claimed", "untested"]
    detail: str = ""


def run_selftest(registry: KernelRegistry, torch_device: str) -> tuple[CaseResult, ...]:
    """Runs every backend of every op on its cases. A kernel that raises has failed; the message is its detail."""
    results = []
    for op in registry.ops:
        cases = list(CASES[op](torch_device)) if op in CASES else []
        for name in registry.names(op):
            if not cases:
                results.append(CaseResult(op=op, backend=name, case="-", outcome="untested"))
            results += [_run(registry.backend(op, name), case, torch.device(torch_device)) for case in cases]
    return tuple(results)


def _run(backend: Backend[Any], case: Case, device: torch.device) -> CaseResult:
    request, check = case
    refusal = backend.supports(request)
    if refusal is not None:
        return CaseResult(op=backend.op, backend=backend.name, case=str(request), outcome="not claimed", detail=refusal)
    try:
        wrong = check(backend.kernels, device)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # what torch and Triton raise
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())}"
    outcome: Literal["passed", "failed"] = "failed" if wrong else "passed"
    return CaseResult(op=backend.op, backend=backend.name, case=str(request), outcome=outcome, detail=wrong or "")
