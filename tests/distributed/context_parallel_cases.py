"""What the tests of context parallelism share: groups, shares of tensors, the comparison with one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.functional.context_parallel import Algorithm, ContextParallel, reason_against_dealing_out
from primus_turbo_plugin.functional.context_parallel.merge import row_deltas
from primus_turbo_plugin.kernels.reference import attention as reference
from tests.functional.attention_oracle import relative_error
from tests.support.distributed import RankInfo

# Sums over ranks in another order: some roundings of 2^-24. bf16: one rounding each of two nearly equal numbers.
BARS = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2**-7}


def over_all(algorithm: Algorithm = "p2p", inner: int = 2) -> ContextParallel:
    """All ranks share the sequences; `inner` is the a2a size of `a2a+p2p`, whose groups are as Megatron makes them."""
    world = dist.get_world_size()
    levels = _levels(world, inner, dist.get_rank()) if algorithm == "a2a+p2p" else None
    return ContextParallel(group=dist.group.WORLD, algorithm=algorithm, levels=levels)


@functools.cache
def _levels(world: int, inner: int, rank: int) -> tuple[Any, Any]:
    near = [dist.new_group(list(range(first, first + inner))) for first in range(0, world, inner)]
    far = [dist.new_group(list(range(first, world, inner))) for first in range(inner)]
    return near[rank // inner], far[rank % inner]


def algorithms_for(heads: int, groups: int) -> list[Algorithm]:
    """Those that can deal out so many heads."""
    world = dist.get_world_size()
    usable: list[Algorithm] = ["p2p", "all_gather"]
    if reason_against_dealing_out(heads, groups, world) is None:
        usable.append("a2a")
    if world % 2 == 0 and reason_against_dealing_out(heads, groups, 2) is None:
        usable.append("a2a+p2p")
    return usable


def share(x: Tensor, info: RankInfo, dim: int = 0, rooms: list[int] | None = None) -> Tensor:
    """This rank's chunks of every sequence along `dim`, as Megatron's `get_batch_on_this_cp_rank` deals them out."""
    parts = []
    for sequence in x.split(rooms or [x.shape[dim]], dim):
        chunks = sequence.chunk(2 * info.world_size, dim)
        parts += [chunks[info.rank], chunks[2 * info.world_size - 1 - info.rank]]
    return torch.cat(parts, dim)


def inputs(
    tokens: tuple[int, ...], dtype: torch.dtype, heads: int = 4, groups: int = 2, v_dim: int = 6
) -> list[Tensor]:
    """q, k, v, drawn alike on every rank."""
    sizes = ((heads, 8), (groups, 8), (groups, v_dim))
    return [torch.randn(*tokens, *size, dtype=torch.float64).to(dtype) for size in sizes]


_plain_bwd = reference.attention_bwd


def _delta_from_output(dout: Tensor, *tensors: Any, delta: Tensor | None = None, **options: Any) -> Any:
    """The reference's backward with delta = sum(dout * out) of the rounded output, as flash kernels and the ring have it; the
    reference takes it from all of a row's probabilities. In bf16 the difference is larger than what is tested here."""
    out, lse = tensors[3], tensors[4]
    delta = row_deltas(dout, out, lse.dtype) if delta is None else delta
    return _plain_bwd(dout, *tensors, delta=delta, **options)


def check_against_one_rank(
    info: RankInfo,
    qkv: list[Tensor],
    run: Callable[..., Tensor],
    contexts: Iterable[ContextParallel],
    rooms: list[int] | None = None,
    **more: Tensor,
) -> None:
    """`run(q, k, v, context, **more)`: with each of `contexts` on shares, without on everything.

    `more` are inputs that every rank has whole, of whose gradients it finds a part.
    """
    reference.attention_bwd = _delta_from_output  # in this process of a @ranks test
    dtype = qkv[0].dtype
    whole = [x.clone().requires_grad_() for x in qkv]
    extra = {name: x.clone().requires_grad_() for name, x in more.items()}
    want = run(*whole, None, **extra)
    dout = torch.randn(want.shape).to(dtype)
    want_grads = torch.autograd.grad(want, [*whole, *extra.values()], dout)
    problems: list[str] = []  # raised at the end: a rank that leaves would keep the others waiting
    for context in contexts:
        local = [share(x, info, rooms=rooms).requires_grad_() for x in qkv]
        extra = {name: x.clone().requires_grad_() for name, x in more.items()}
        got = run(*local, context, **extra)
        got_grads = torch.autograd.grad(got, [*local, *extra.values()], share(dout, info, rooms=rooms))
        pairs = zip(("out", "dq", "dk", "dv"), (got, *got_grads[:3]), (want.detach(), *want_grads[:3]))
        for name, value, full in pairs:
            error = relative_error(value, share(full, info, rooms=rooms))
            if not error <= BARS[dtype] or value.dtype != dtype:
                problems.append(f"{context.algorithm} {name}: off by {error} in {value.dtype}")
        for name, grad, full in zip(more, got_grads[3:], want_grads[3:]):
            total, scale = grad.double(), grad.double().abs()
            dist.all_reduce(total)  # as finalize_model_grads does for parameters
            dist.all_reduce(scale)  # each rank rounds its part, and the parts may cancel
            error = float((total - full.double()).abs().max() / max(scale.max().item(), 0.5))
            if not error <= BARS[dtype]:
                problems.append(f"{context.algorithm} d{name}: off by {error}")
    assert not problems, problems
