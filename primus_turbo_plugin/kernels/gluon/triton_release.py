"""Which Triton is installed, asked without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")
"""Names under which it is packaged: its own, and those of torch's builds."""


def installed_release() -> str:
    """The version of the installed package, or what the module says where it is packaged under another name."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import triton

    return str(triton.__version__)


def refusal(oldest: tuple[int, int], feature: str) -> str | None:
    """Why the installed Triton cannot compile kernels that need `feature` of the release `oldest`, or None."""
    if importlib.util.find_spec("triton") is None:
        return "needs the triton package, which is not installed; it comes with torch's GPU builds"
    version = installed_release()
    if tuple(int(part) for part in version.split(".")[:2]) < oldest:
        return f"needs Triton {'.'.join(map(str, oldest))} or later for {feature}, found {version}"
    return None
