"""gemm_nt of plain or quantised operands (Triton): what it serves, and the one place where a product's configuration is chosen.

Two FP8 operands are multiplied by the FP8 units (sm90, gfx950, gfx1250; gfx942 after an exact conversion to its encoding), two MX
operands by the scaled matrix units of gfx950 and gfx1250. Everything else quantised becomes bf16, exactly, and is multiplied by
the bf16 units: the format's values, not its speed. `gemm_launch` makes the kernel calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.gemm_checks import check_gemm_nt, common_length
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton import gemm_config
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.gemm_defaults import triton_version
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, Operand, gpu_of, key_of
from primus_turbo_plugin.kernels.triton.gemm_launch import Program, facts, program_of
from primus_turbo_plugin.kernels.triton.gemm_tuning import TUNABLE
from primus_turbo_plugin.kernels.triton.launching import Answers, on_device, untraced
from primus_turbo_plugin.kernels.triton.targets import SCALED_MATRIX_UNITS, refusal
from primus_turbo_plugin.kernels.tuning.table import TuningTable, tuning_table
from primus_turbo_plugin.precision.quant_spec import QuantSpec


@untraced
def gemm_nt(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    config: GemmConfig | None = None,
    resolve: Callable[[GemmKey], GemmConfig] | None = None,
) -> torch.Tensor:
    """y = a @ b.T (+ bias), accumulated in fp32 and rounded once to `out_dtype`.

    Args:
        a: `[M, K]`, plain (bf16 or fp16, any strides) or quantised.
        b: `[N, K]`, plain or quantised. If one operand is rotated, the other must be rotated alike.
        out_dtype: dtype of the result; float32 when `out` is given.
        bias: `[N]`, added in fp32 before the rounding; not together with `out`.
        out: fp32 `[M, N]`, accumulated into in place and returned.
        into: `[M, N]` in `out_dtype`, written and returned; not together with `out`.
        config: How to compute it; None takes `resolve`'s choice.
        resolve: Chooses by the product's key, once for products that are alike; None is `resolve_config`. `Backend.tune` puts a
            tuning table here.

    Returns:
        `[M, N]` in `out_dtype`, or `out` or `into`.

    Raises:
        ShapeError: Shapes, dtypes, devices or rotations do not fit.
        ConfigError: `config` cannot serve this product.
    """
    alike = facts(a), facts(b), facts(bias), facts(out), facts(into), out_dtype, config, resolve
    program = _PROGRAMS.get(alike)
    given = into if out is None else out
    length = 0
    if program is None:
        check_gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out, into=into)
        length = common_length(a, b)
        if 0 in (a.shape[0], b.shape[0], length):
            y = _empty(a, b, out_dtype, bias, out)
            return y if into is None else into.copy_(y)
    y = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device) if given is None else given
    if program is None:
        key = key_of(a, b, y, length, bias=bias is not None, accumulate=out is not None)
        program = _PROGRAMS.keep(alike, _program(a, b, y, key, config or (resolve or resolve_config)(key)))
    with on_device(y.device):
        program.run(a, b, bias, y)
    return y


_PROGRAMS: Answers[Program] = Answers()


def _program(a: Operand, b: Operand, y: torch.Tensor, key: GemmKey, config: GemmConfig) -> Program:
    reason = gemm_config.refusal(key, config)
    if reason is not None:
        raise ConfigError(f"gemm_nt: {key} cannot be computed with {config}: {reason}. Choose one of candidates(key).")
    return program_of(a, b, y, key, config)


@torch.no_grad()
def _empty(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """A product without terms: zero, the bias, or what is there."""
    if out is not None:
        return out
    y = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    return y if bias is None else y.copy_(bias.expand_as(y))


def resolve_config(key: GemmKey) -> GemmConfig:
    """How a product is computed unless the caller says: as this package's own tuning table has it, else `default_config`."""
    return tuning_table().config(TUNABLE, key)


def tuned(table: TuningTable) -> Any:
    """These kernels, configured by a tuning table."""
    return SimpleNamespace(gemm_nt=functools.partial(gemm_nt, resolve=functools.partial(table.config, TUNABLE)))


def supports(request: GemmRequest) -> str | None:
    """None, or why this kernel cannot multiply these operands."""
    reason = refusal(request.device) or _triton_refusal()
    if reason is not None:
        return reason
    plain = {kind for kind in (request.a, request.b) if isinstance(kind, torch.dtype)}
    quantized = any(isinstance(kind, QuantSpec) for kind in (request.a, request.b))
    allowed = {torch.bfloat16} if quantized else {torch.bfloat16, torch.float16}
    if len(plain) > 1 or plain - allowed:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in plain))
        partner = (
            "a quantised operand is multiplied with bf16"
            if quantized
            else "plain operands must both be bf16 or both fp16"
        )
        return f"{partner}, got {names}"
    return None


def _triton_refusal() -> str | None:
    """Why the installed Triton cannot compile for this GPU, or None."""
    arch = gpu_of(torch.cuda.current_device())[0] if torch.cuda.is_available() else ""
    found, needed = triton_version(), _NEEDED_TRITON.get(arch, (3, 6))
    if found >= needed:
        return None
    return f"needs Triton {needed[0]}.{needed[1]} on {arch or 'this GPU'}, got {found[0]}.{found[1]}"


_NEEDED_TRITON = {"gfx1250": (3, 8)}
"""Triton 3.6 takes minutes for gfx1250 and spills thousands of registers."""

BACKEND = Backend(
    name="triton",
    request=GemmRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    matrix_units={
        arch: ("fp8", *SCALED_MATRIX_UNITS.get(arch, ())) for arch in ("sm90", "gfx942", "gfx950", "gfx1250")
    },
    tune=tuned,
)
