"""Grouped GEMMs of experts (Triton): what they serve, and the one place where a product's configuration is chosen.

Operands are multiplied as `kernels/triton/gemm.py` multiplies them: FP8 by FP8 units, MX by scaled matrix units where there are
any, all else as bf16, decoded once. Offsets stay on the device. `grouped_gemm_launch` makes the kernel calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import torch

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.kernels.grouped_checks import Operand, check_depth, check_rows
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GroupedGemmRequest
from primus_turbo_plugin.kernels.triton import gemm, grouped_gemm_key
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.gemm_launch import facts
from primus_turbo_plugin.kernels.triton.grouped_gemm_key import GroupedGemmKey, depth_key, rows_key
from primus_turbo_plugin.kernels.triton.grouped_gemm_launch import (
    GroupedProgram,
    depth_program,
    rows_program,
    tokens_class,
)
from primus_turbo_plugin.kernels.triton.grouped_gemm_tuning import TUNABLE
from primus_turbo_plugin.kernels.triton.launching import Answers, facts_but, on_device, untraced
from primus_turbo_plugin.kernels.tuning.table import TuningTable, tuning_table
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Resolve = Callable[[GroupedGemmKey], GemmConfig]
_PROGRAMS: Answers[GroupedProgram] = Answers()


@untraced
def grouped_gemm_nt(
    a: Operand,
    b: Operand,
    groups: Groups,
    *,
    out_dtype: torch.dtype,
    config: GemmConfig | None = None,
    resolve: Resolve | None = None,
) -> torch.Tensor:
    """y[rows of g] = a[rows of g] @ b[g].T for every group, in one launch beside those that decode operands.

    Args:
        a: `[T, K]`, plain (bf16 or fp16, any strides) or quantised along K with scales of single rows.
        b: `[groups, N, K]`, any strides; quantised `[groups * N, K]`.
        groups: Of a's rows; those of nobody are not written.
        out_dtype: dtype of the result.
        config: How to compute it; None takes `resolve`'s choice.
        resolve: Chooses by the product's key, once for products that are alike; None is `resolve_config`. `Backend.tune` puts a
            tuning table here.

    Returns:
        `[T, N]`.

    Raises:
        ShapeError: Shapes, devices or rotations do not fit.
        ConfigError: `config` cannot serve this product.
    """
    cols = b.shape[0] // groups.count if len(b.shape) == 2 else b.shape[1] if len(b.shape) == 3 else 0
    about = "rows", facts(b), facts(groups.offsets), out_dtype, config, resolve
    free = *about, _facts_but(a, 0), tokens_class(groups, cols * out_dtype.itemsize)
    exact = *about, facts(a), groups.total
    program = _PROGRAMS.get(free) or _PROGRAMS.get(exact)
    if program is None or a.shape[0] != groups.total:
        cols = check_rows(a, b, groups)
        if 0 in (a.shape[0], a.shape[1], cols):
            return torch.zeros(a.shape[0], cols, dtype=out_dtype, device=a.device)
    y = torch.empty(a.shape[0], cols, dtype=out_dtype, device=a.device)
    if program is None:
        key = rows_key(a, b, cols, groups, out_dtype)
        program = rows_program(a, b, groups, y, key, _checked(key, config, resolve))
        _PROGRAMS.keep(free if program.any_length else exact, program)
    with on_device(y.device):
        program.run(a, b, groups, y)
    return y


@untraced
def grouped_gemm_depth(
    a: Operand,
    b: Operand,
    groups: Groups,
    out: torch.Tensor,
    *,
    accumulate: bool,
    scales_by_expert: bool = False,
    config: GemmConfig | None = None,
    resolve: Resolve | None = None,
) -> torch.Tensor:
    """out[g] (+)= a[:, rows of g] @ b[:, rows of g].T for every group, in one launch beside those that decode operands.

    Args:
        a: `[M, T]`, plain (bf16 or fp16, any strides) or quantised along T.
        b: `[N, T]`, likewise.
        groups: Of the contraction; of quantised operands, `Groups.padded` to whole blocks.
        out: `[groups, M, N]`, contiguous along N. An empty group's becomes zero, or stays as it is with `accumulate`.
        accumulate: Add to `out`, which is float32 then.
        scales_by_expert: As in kernels/reference/grouped_gemm.py; such scales leave the sum.
        config: As in `grouped_gemm_nt`.
        resolve: As in `grouped_gemm_nt`.

    Returns:
        `out`.

    Raises:
        ShapeError: Shapes, dtypes, strides, devices or rotations do not fit.
        ConfigError: `config` cannot serve this product.
    """
    about = "depth", facts(groups.offsets), facts(out), accumulate, scales_by_expert, config, resolve
    free = *about, _facts_but(a, 1), _facts_but(b, 1), tokens_class(groups, 0)
    exact = *about, facts(a), facts(b), groups.total
    program = _PROGRAMS.get(free) or _PROGRAMS.get(exact)
    if program is None or not a.shape[1] == b.shape[1] == groups.total:
        check_depth(a, b, groups, out, accumulate=accumulate)
    if program is None:
        if out.stride(2) != 1 and out.shape[2] > 1:
            raise ShapeError(
                "grouped_gemm_depth (triton): out must be contiguous along its last axis, got strides "
                f"{list(out.stride())}."
            )
        if not out.numel():
            return out
        if groups.total == 0:
            return out if accumulate else out.zero_()
        key = depth_key(a, b, groups, out, accumulate=accumulate, scales_by_expert=scales_by_expert)
        config, multiple = _checked(key, config, resolve), offset_multiple(a, b)
        program = depth_program(a, b, groups, out, key, config, multiple=multiple)
        _PROGRAMS.keep(free if program.any_length else exact, program)
    with on_device(out.device):
        program.run(a, b, groups, out)
    return out


def _facts_but(x: Operand, dim: int) -> Hashable:
    """`facts` without the number of tokens, axis `dim`: routing gives experts another one in every step."""
    if isinstance(x, QuantizedTensor):
        parts = facts_but(x.data, dim), facts_but(x.block_scale, dim)
        return x.spec, x.shape[1 - dim], x.signs_seed, x.scale_layout, *parts
    return facts_but(x, dim) if x.dim() == 2 else facts(x)


def offset_multiple(a: Operand, b: Operand) -> int:
    """What all offsets into the contraction are multiples of: an operand's blocks and rotations do not span two groups."""
    return max(x.spec.contraction_multiple if isinstance(x, QuantizedTensor) else 1 for x in (a, b))


def _checked(key: GroupedGemmKey, config: GemmConfig | None, resolve: Resolve | None) -> GemmConfig:
    if config is None:
        return (resolve or resolve_config)(key)
    reason = grouped_gemm_key.refusal(key, config)
    if reason is not None:
        raise ConfigError(f"grouped_gemm: {key} cannot be computed with {config}: {reason}.")
    return config


def resolve_config(key: GroupedGemmKey) -> GemmConfig:
    """How a product is computed unless the caller says: as this package's own tuning table has it, else `default_config`."""
    return tuning_table().config(TUNABLE, key)


def tuned(table: TuningTable) -> Any:
    """These kernels, configured by a tuning table."""
    resolve = functools.partial(table.config, TUNABLE)
    return SimpleNamespace(
        grouped_gemm_nt=functools.partial(grouped_gemm_nt, resolve=resolve),
        grouped_gemm_depth=functools.partial(grouped_gemm_depth, resolve=resolve),
    )


def supports(request: GroupedGemmRequest) -> str | None:
    """None, or why these kernels cannot multiply these operands: the reasons of the ordinary GEMM."""
    return gemm.supports(request.dense())


BACKEND = Backend(
    name="triton",
    request=GroupedGemmRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    matrix_units=gemm.BACKEND.matrix_units,
    tune=tuned,
)
