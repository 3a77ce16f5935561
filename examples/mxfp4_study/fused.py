"""What lies between the linears of the study's model: norm with the residual sum, rotary heads, SwiGLU, cross entropy.

On a GPU one Triton kernel each way; elsewhere the same formulas in plain torch, which autograd differentiates. Without fusing,
these take half of the step's time at the study's size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_EPS = 1e-5
_TOKENS_A_SUM = 16
"""Tokens whose terms of a norm's weight gradient one program adds up."""


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """s = x + delta, and RMS norm of s.

    Args:
        x: fp32 [..., hidden], the residual stream.
        delta: bf16 [..., hidden] to be added, or None.
        weight: fp32 [hidden].

    Returns:
        s fp32, and the norm in bf16.
    """
    if x.is_cuda:
        s, y = _AddNorm.apply(x, delta, weight)
        return s, y
    s = x if delta is None else x + delta
    with torch.autocast(x.device.type, enabled=False):
        return s, F.rms_norm(s, weight.shape, weight, _EPS).bfloat16()


def split_heads(qkv: Tensor, table: tuple[Tensor, Tensor], heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k turned by their place, and v: [batch, seq, heads, dim] of qkv [batch, seq, (heads + 2 kv_heads) dim].

    Args:
        qkv: bf16.
        table: cos and sin, fp32 [seq, dim / 2] each.
        heads: Of q.
        kv_heads: Of k and of v.
    """
    if qkv.is_cuda:
        q, k, v = _SplitHeads.apply(qkv, *table, heads, kv_heads)
        return q, k, v
    parts = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
    rotated, v = parts.split([heads + kv_heads, kv_heads], 2)
    first, second = rotated.float().chunk(2, -1)
    cos, sin = (half[:, None] for half in table)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(qkv.dtype)
    q, k = rotated.split([heads, kv_heads], 2)
    return q, k, v


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) up of x [..., 2 width], gate in front, in fp32, rounded once."""
    if x.is_cuda:
        y: Tensor = _Swiglu.apply(x)
        return y
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens, in nats, of logits bf16 [tokens, vocab] and targets int64 [tokens]; fp32."""
    if logits.is_cuda:
        loss: Tensor = _CrossEntropy.apply(logits, targets)
        return loss
    return F.cross_entropy(logits.float(), targets)


def _block(width: int) -> dict[str, int]:
    """A block that holds a row, and warps for it."""
    block = 1 << (width - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


class _AddNorm(Function):
    """Saves s, the weight and a number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        from examples.mxfp4_study.fused_kernels import add_norm_fwd

        x, delta = x.contiguous(), None if delta is None else delta.contiguous()
        width, tokens = x.shape[-1], x.numel() // x.shape[-1]
        y = torch.empty_like(x, dtype=torch.bfloat16)
        rstd = torch.empty(tokens, device=x.device)
        s = x if delta is None else torch.empty_like(x)
        add_norm_fwd[(tokens,)](x, delta, weight, s, y, rstd, _EPS, WIDTH=width, **_block(width))
        ctx.save_for_backward(s, rstd, weight)
        ctx.set_materialize_grads(False)
        ctx.adds = None if delta is None else delta.dtype
        return (s.view_as(s) if delta is None else s), y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        from examples.mxfp4_study.fused_kernels import add_norm_bwd

        s, rstd, weight = ctx.saved_tensors
        width, tokens = s.shape[-1], rstd.numel()
        dx = torch.empty_like(s)
        ddelta = None if ctx.adds is None else torch.empty_like(s, dtype=ctx.adds)
        programs = -(-tokens // _TOKENS_A_SUM)
        shares = torch.empty(programs, width, device=s.device)
        add_norm_bwd[(programs,)](
            dy.contiguous(), None if ds is None else ds.contiguous(), s, rstd, weight, dx, ddelta, shares, tokens,
            ROWS=_TOKENS_A_SUM, WIDTH=width, **_block(width),
        )  # fmt: skip
        return dx, ddelta, shares.sum(0)


class _SplitHeads(Function):
    """Saves the table alone; q, k, v [batch, seq, heads, dim]."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = qkv.contiguous().unflatten(-1, (heads + 2 * kv_heads, -1))
        shares = parts.split([heads, kv_heads, kv_heads], 2)
        made = tuple(torch.empty(share.shape, dtype=qkv.dtype, device=qkv.device) for share in shares)
        for turn, share, to in zip((1, 1, 0), shares, made):
            _move_heads(share, to, cos, sin, turn)
        ctx.save_for_backward(cos, sin)
        return made[0], made[1], made[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        batch, seq, _, dim = gradients[0].shape
        counts = [gradient.shape[2] for gradient in gradients]
        dqkv = torch.empty(batch, seq, sum(counts), dim, dtype=gradients[0].dtype, device=cos.device)
        for turn, gradient, to in zip((-1, -1, 0), gradients, dqkv.split(counts, 2)):
            _move_heads(gradient if gradient.stride(-1) == 1 else gradient.contiguous(), to, cos, sin, turn)
        return dqkv.flatten(2), None, None, None, None


def _move_heads(source: Tensor, to: Tensor, cos: Tensor, sin: Tensor, turn: int) -> None:
    from examples.mxfp4_study.fused_kernels import move_heads

    batch, seq, heads, dim = source.shape
    move_heads[(seq, batch)](
        source, *source.stride()[:3], to, *to.stride()[:3], cos, sin,
        HEADS=heads, HALF=dim // 2, TURN=turn, ROWS=1 << (heads - 1).bit_length(), num_warps=1,
    )  # fmt: skip


class _Swiglu(Function):
    """Saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from examples.mxfp4_study.fused_kernels import swiglu_fwd

        x = x.contiguous()
        ctx.save_for_backward(x)
        width = x.shape[-1] // 2
        y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
        swiglu_fwd[(x.numel() // x.shape[-1], -(-width // 1024))](x, y, width, BLOCK=1024)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        from examples.mxfp4_study.fused_kernels import swiglu_bwd

        (x,) = ctx.saved_tensors
        width, dx = x.shape[-1] // 2, torch.empty_like(x)
        swiglu_bwd[(x.numel() // x.shape[-1], -(-width // 1024))](x, dy.contiguous(), dx, width, BLOCK=1024)
        return dx


class _CrossEntropy(Function):
    """Saves the gradient of the logits, which the forward's one pass makes too."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        from examples.mxfp4_study.fused_kernels import cross_entropy_fwd_bwd

        logits, targets = logits.contiguous(), targets.contiguous()
        tokens, width = logits.shape
        losses = torch.empty(tokens, device=logits.device)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        cross_entropy_fwd_bwd[(tokens,)](logits, targets, losses, gradient, 1.0 / tokens, WIDTH=width, **_block(width))
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return losses.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * dloss, None
