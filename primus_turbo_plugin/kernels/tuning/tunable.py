"""`Tunable`: what an op brings to be tuned. A kernel module defines one and names it in `TUNABLE_MODULES`."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from primus_turbo_plugin.kernels.tuning.entry import Versions

K = TypeVar("K")
C = TypeVar("C")

TUNABLE_MODULES = (
    "primus_turbo_plugin.kernels.triton.gemm_tuning",
    "primus_turbo_plugin.kernels.triton.grouped_gemm_tuning",
)
"""Modules that define `TUNABLE`."""

NOT_INSTALLED = "none"


@dataclass(frozen=True, kw_only=True)
class Tunable(Generic[K, C]):
    """A kernel with a choice of configurations.

    Attributes:
        op: Backend and op, `triton.gemm_nt`.
        version: Goes up whenever the kernel's code or the meaning of a configuration changes: older entries then stop applying.
        key_type: Frozen dataclass of everything that changes code or choice, `arch` among it.
        config_type: Frozen dataclass of a configuration.
        default: The configuration without tuning, a pure function of the key.
        candidates: Configurations that can serve a key, the default first.
        struck_out: Those that were considered and cannot, with the reason.
        refusal: Why a configuration cannot serve a key, or None.
    """

    op: str
    version: int
    key_type: type[K]
    config_type: type[C]
    default: Callable[[K], C]
    candidates: Callable[[K], Sequence[C]]
    struck_out: Callable[[K], Sequence[tuple[C, str]]]
    refusal: Callable[[K, C], str | None]

    @property
    def versions(self) -> Versions:
        """The versions that a measurement made now would carry."""
        return Versions(torch=release_of("torch"), triton=triton_release(), kernels=self.version)


@functools.cache
def release_of(distribution: str) -> str:
    """Public release of an installed distribution, `2.11.0` of `2.11.0+cu130`; `none` where it is not installed."""
    try:
        return importlib.metadata.version(distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def triton_release() -> str:
    """Release of Triton, by whatever name this build of torch has it."""
    found = (release_of(name) for name in ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton"))
    return next((release for release in found if release != NOT_INSTALLED), NOT_INSTALLED)


@functools.cache
def tunables() -> dict[str, Tunable[Any, Any]]:
    """Op -> what can be tuned of it."""
    found = [importlib.import_module(name).TUNABLE for name in TUNABLE_MODULES]
    return {tunable.op: tunable for tunable in found}
