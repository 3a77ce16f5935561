"""`primus-turbo doctor --selftest`: every kernel that claims to serve this device, run on it and judged.

First every backend of every op of the registry, on requests; an op without cases is reported as not tested, not left out. Then,
on AMD GPUs, the kernels as the emulator runs them (selftest_targets.py): every tile, layout, tail and epilogue, which sizes of
requests might not choose.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from primus_turbo_plugin.diagnostics.selftest_cases import CASES
from primus_turbo_plugin.diagnostics.selftest_targets import target_tests
from primus_turbo_plugin.kernels.registry import KernelRegistry

Outcome = Literal["passed", "failed", "not claimed", "untested", "not run"]
_ORDER = ("quantize", "gemm_nt", "attention", "norm", "fused_quantize", "grouped_gemm", "grouped_quantize")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """One kernel on one case.

    Attributes:
        op: The op, or `kernel` for one run as the emulator runs it.
        backend: The backend, or the kernel's name.
        case: The request in words.
        outcome: `passed`; `failed`; `not claimed` by the backend, so not run; `untested`: this op has no cases; `not run`: the
            time was up before.
        detail: What was wrong, or the backend's reason; empty where it passed.
        seconds: How long it took, compiling included.
    """

    op: str
    backend: str
    case: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SelfTest:
    """One case of one kernel, not yet run.

    Attributes:
        op, backend, case: As in `CaseResult`.
        refusal: None, or why it is not run.
        check: Runs it on a device: None, or what is wrong. None where there is nothing to run.
    """

    op: str
    backend: str
    case: str
    refusal: str | None
    check: Callable[[torch.device], str | None] | None

    def result(self, outcome: Outcome, detail: str = "", seconds: float = 0.0) -> CaseResult:
        return CaseResult(
            op=self.op, backend=self.backend, case=self.case, outcome=outcome, detail=detail, seconds=seconds
        )

    @property
    def is_to_run(self) -> bool:
        """Whether there is something to run, that the backend claims."""
        return self.check is not None and self.refusal is None

    def run(self, device: torch.device) -> CaseResult:
        """A kernel that raises has failed; the message is its detail."""
        if self.check is None:
            return self.result("untested")
        if self.refusal is not None:
            return self.result("not claimed", self.refusal)
        began = time.perf_counter()
        try:
            wrong = self.check(device)
        except Exception as error:  # whatever torch, Triton or a kernel's own code raises
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())}"
        seconds = time.perf_counter() - began
        return self.result("failed", wrong, seconds) if wrong else self.result("passed", seconds=seconds)


def selftests(registry: KernelRegistry, torch_device: str) -> Sequence[SelfTest]:
    """All there is to run on a device, in the same order every time."""
    tests = []
    for op in registry.ops:
        cases = list(CASES[op](torch_device)) if op in CASES else []
        for name in registry.names(op):
            backend = registry.backend(op, name)
            if not cases:
                tests.append(SelfTest(op, name, "-", None, None))
            for request, check, *words in cases:
                case = ", ".join([str(request), *words])
                run = functools.partial(check, backend.kernels)
                tests.append(SelfTest(op, name, case, backend.supports(request), run))
    tests += [SelfTest("kernel", name, case, None, check) for name, case, check in target_tests(torch_device)]
    return tests


def in_order(tests: Sequence[SelfTest]) -> list[int]:
    """Numbers of the tests that are to run, the most telling first: whoever stops early has seen something of everything.

    One case of every backend of every op, then the others; ops in the order in which a training run would miss them, the
    reference and the kernels as emulated last.
    """
    seen: set[tuple[str, str]] = set()
    keys = []
    for number, test in enumerate(tests):
        if not test.is_to_run:
            continue
        is_first = test.op in _ORDER and test.backend != "reference" and (test.op, test.backend) not in seen
        seen.add((test.op, test.backend))
        place = _ORDER.index(test.op) if test.op in _ORDER else len(_ORDER)
        keys.append((not is_first, test.backend == "reference", place, number))
    return [key[-1] for key in sorted(keys)]


def run_selftest(registry: KernelRegistry, torch_device: str) -> tuple[CaseResult, ...]:
    """Runs everything in this process; `selftest_guard.run_guarded` survives kernels that do not return."""
    device = torch.device(torch_device)
    return tuple(test.run(device) for test in selftests(registry, torch_device))
