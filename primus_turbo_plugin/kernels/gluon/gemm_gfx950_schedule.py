"""When what happens in a step of the gfx950 GEMMs' loop: the order of pieces, and after which of them memory is asked (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon

from primus_turbo_plugin.kernels.gluon.gemm_gfx950_tiles import is_half


@gluon.constexpr_function
def snake(r, pieces):
    """Column of the r-th piece: left to right in the first row of pieces, back in the second, and so on."""
    return r % pieces if r // pieces % 2 == 0 else pieces - 1 - r % pieces


@gluon.constexpr_function
def copy_region(q, upper, pieces):
    """After which piece the q-th copy starts: in the first half of a step, to have landed when it is waited for."""
    return min(q, upper * pieces // 2)


@gluon.constexpr_function
def scale_region(q, upper, pieces):
    """After which piece the scales of the q-th piece of the next tile are loaded: early as well, one after each."""
    return min(q + 3, upper * pieces - 2)


@gluon.constexpr_function
def read_region(q, upper, pieces, last, P):
    """After which piece the q-th operand of the next step is read: evenly; a third or quarter later where copies come first."""
    first = upper * pieces // (3 if is_half(P) else 4) if last else 0
    return first + q * (upper * pieces - first) // (upper + pieces)
