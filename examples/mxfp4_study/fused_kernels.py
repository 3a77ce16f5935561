"""Triton kernels between the linears of the study's model, each one pass over its tensors; `fused.py` calls them.

Rows are tokens. Everything is computed in fp32 and rounded once, at the store. Sums over tokens are taken in a fixed order, so
that a run repeats bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm_fwd(x_ptr, delta_ptr, weight_ptr, sum_ptr, y_ptr, rstd_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """s = x + delta;  y = s rstd weight, rstd = (mean(s^2) + eps)^-1/2. One program a token; delta_ptr may be None."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    col = tl.arange(0, BLOCK)
    inside = col < WIDTH
    s = tl.load(x_ptr + row + col, mask=inside, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        s += tl.load(delta_ptr + row + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + row + col, s, mask=inside)
    rstd = tl.rsqrt(tl.sum(s * s, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0)
    tl.store(y_ptr + row + col, (s * rstd * weight).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + tl.program_id(0), rstd)


@triton.jit
def add_norm_bwd(
    dy_ptr, dsum_ptr, sum_ptr, rstd_ptr, weight_ptr, dx_ptr, ddelta_ptr, dweight_ptr, tokens,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = ddelta = dsum + rstd (g - h mean(g h)), g = dy weight, h = s rstd; ROWS tokens' dy h are summed into a row of dweight.

    dsum_ptr (None: zero) is the gradient of the residual stream; ddelta_ptr may be None.
    """
    col = tl.arange(0, BLOCK)
    inside = col < WIDTH
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0)
    dweight = tl.zeros([BLOCK], tl.float32)
    for i in range(ROWS):
        token = tl.program_id(0) * ROWS + i
        here = inside & (token < tokens)
        place = token.to(tl.int64) * WIDTH + col
        dy = tl.load(dy_ptr + place, mask=here, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + token, mask=token < tokens, other=0.0)
        h = tl.load(sum_ptr + place, mask=here, other=0.0) * rstd
        g = dy * weight
        dx = rstd * (g - h * (tl.sum(g * h, 0) / WIDTH))
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + place, mask=here, other=0.0)
        tl.store(dx_ptr + place, dx, mask=here)
        if ddelta_ptr is not None:
            tl.store(ddelta_ptr + place, dx.to(ddelta_ptr.dtype.element_ty), mask=here)
        dweight += dy * h
    tl.store(dweight_ptr + tl.program_id(0).to(tl.int64) * WIDTH + col, dweight, mask=inside)


@triton.jit
def swiglu_fwd(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
    """y = silu(gate) up, x = [gate | up]."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    gate = tl.load(x_ptr + row * 2 * width + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * width + col, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_bwd(x_ptr, dy_ptr, dx_ptr, width, BLOCK: tl.constexpr):
    """dgate = dy up s (1 + gate (1 - s)), dup = dy gate s, s = sigmoid(gate)."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    gate = tl.load(x_ptr + row * 2 * width + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * width + col, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + col, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate, dup = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
    tl.store(dx_ptr + row * 2 * width + col, dgate.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + (row * 2 + 1) * width + col, dup.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def move_heads(
    from_ptr, from_batch, from_seq, from_head, to_ptr, to_batch, to_seq, to_head, cos_ptr, sin_ptr,
    HEADS: tl.constexpr, HALF: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One token's heads from one layout to another, turned forward (TURN 1), back (-1) or not (0). ROWS: HEADS or above, 2^n."""
    batch, place = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    head, col = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)[None, :]
    inside = head < HEADS
    source = from_ptr + batch * from_batch + place * from_seq + head * from_head + col
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if TURN != 0:
        cos = tl.load(cos_ptr + place * HALF + col)
        sin = tl.load(sin_ptr + place * HALF + col) * TURN
        first, second = first * cos - second * sin, second * cos + first * sin
    target = to_ptr + batch * to_batch + place * to_seq + head * to_head + col
    tl.store(target, first.to(to_ptr.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(to_ptr.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_fwd_bwd(
    logits_ptr, target_ptr, loss_ptr, dlogits_ptr, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """A token's loss, and scale (softmax - onehot) unless dlogits_ptr is None."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < WIDTH
    logits = tl.load(logits_ptr + row * WIDTH + col, mask=inside, other=-float("inf")).to(tl.float32)
    target = tl.load(target_ptr + row)
    top = tl.max(logits, 0)
    powers = tl.exp(logits - top)
    total = tl.sum(powers, 0)
    chosen = tl.load(logits_ptr + row * WIDTH + target).to(tl.float32)
    tl.store(loss_ptr + row, tl.log(total) + top - chosen)
    if dlogits_ptr is not None:
        gradient = (powers / total - tl.where(col == target, 1.0, 0.0)) * scale
        tl.store(dlogits_ptr + row * WIDTH + col, gradient.to(dlogits_ptr.dtype.element_ty), mask=inside)
