"""What torch's grouped GEMM is handed on a GPU: all that it checks, there or on the host, before anything is launched.

Its conditions for tokens are checked on the device and end the process, so that no test on a GPU can survive a breach. Here a
stand-in checks them, and on a CPU torch's own call multiplies, with its own checks of strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.torch_native import grouped_gemm
from tests.support.grouped import LOADS, on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
N, K = 72, 136


def strict_grouped_mm(calls: list[tuple[int, ...]]) -> Callable[..., Tensor]:
    """`torch._grouped_mm` by float64 products, for operands that it can read and whatever the offsets are.

    From GroupedMMUtils.h (layouts), GroupMM.cu (groups) and GroupMMCommon.cuh (the device's assertions) of torch.
    """

    def row_major(t: Tensor) -> bool:
        """As torch decides it: the other order first where both would do."""
        sizes, strides = t.shape[-2:], t.stride()[-2:]
        assert t.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in t.stride()[:-2]), "an expert's weight starts where TMA cannot"
        turned = strides[0] == 1 and strides[1] >= max(1, sizes[0])
        assert turned or (strides[1] == 1 and strides[0] >= max(1, sizes[1])), (t.shape, t.stride())
        assert strides[turned] % 8 == 0, (t.shape, t.stride())
        assert turned != (strides[1] == 1), "the launch takes it for the other order"
        return not turned

    def multiply(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        calls.append((a.dim(), b.dim()))
        assert a.dtype == b.dtype == BF16
        assert offs.dtype == torch.int32
        assert len(offs) < 1024
        a_rows, b_rows = row_major(a), row_major(b)
        ends = offs.tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends)]
        along_tokens = not a_rows if b.dim() == 3 else (a_rows or not b_rows)
        assert not along_tokens or all(size % 8 == 0 for size in sizes), f"a device-side assertion: {sizes}"
        padded = -(-b.shape[-1] // 8) * 8
        if b.dim() == 3:
            y = torch.full((a.shape[0], padded), math.nan, dtype=BF16, device=a.device)[:, : b.shape[-1]]
            for got, piece, weight in zip(y.split(sizes), a.split(sizes), b):
                got.copy_(piece.double() @ weight.double())
        else:
            y = torch.full((len(ends), a.shape[0], padded), math.nan, dtype=BF16, device=a.device)[..., : b.shape[-1]]
            for got, left, right in zip(y, a.split(sizes, 1), b.split(sizes)):
                got.copy_(left.double() @ right.double())
        return y

    return multiply


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch, "_grouped_mm", strict_grouped_mm(found), raising=False)
    return found


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng).to(BF16).to(DEVICE)


LAYOUTS: dict[str, Callable[[torch.Generator, int, int], Tensor]] = {
    "rows": lambda rng, t, f: normal(rng, t, f),
    "along tokens": lambda rng, t, f: normal(rng, f, t).t(),
    "along tokens, aligned": lambda rng, t, f: normal(rng, f, t + -t % 8)[:, :t].t(),
    "one row for all": lambda rng, t, f: normal(rng, 1, f).expand(t, f),
    "one number for all": lambda rng, t, f: normal(rng, 1, 1).expand(t, f),
    "columns of wider rows": lambda rng, t, f: normal(rng, t, f + 8)[:, 8:],
    "columns from an odd one": lambda rng, t, f: normal(rng, t, f + 8)[:, 1 : f + 1],
    "columns of odd rows": lambda rng, t, f: normal(rng, t, f + 3)[:, :f],
    "every other column": lambda rng, t, f: normal(rng, t, 2 * f)[:, ::2],
    "rows that overlap": lambda rng, t, f: normal(rng, 8 * t + f).as_strided((t, f), (8, 1)),
    "from an odd byte": lambda rng, t, f: normal(rng, t * f + 1)[1:].view(t, f),
}
"""Tokens `[t, f]`."""
WEIGHTS: dict[str, Callable[[torch.Generator, int, int, int], Tensor]] = {
    "along K": lambda rng, e, n, k: normal(rng, e, n, k),
    "along N": lambda rng, e, n, k: normal(rng, e, k, n).mT,
    "one for all": lambda rng, e, n, k: normal(rng, n, k).expand(e, n, k),
    "experts at odd starts": lambda rng, e, n, k: normal(rng, e, n * k + 3)[:, : n * k].unflatten(1, (n, k)),
    "experts inside": lambda rng, e, n, k: normal(rng, n, e, k).transpose(0, 1),
    "a part of odd rows": lambda rng, e, n, k: normal(rng, e, n, k + 1)[..., :k],
    "one row for all": lambda rng, e, n, k: normal(rng, e, 1, k).expand(e, n, k),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_tokens_of_any_experts_are_handed_over_as_torch_can_read_them(layout, load, rng, calls) -> None:
    """Counts that are no multiples of 8, which are most of them, stop the process where tokens are contiguous along tokens."""
    counts, make = LOADS[load], LAYOUTS[layout]
    groups = on_device(counts, DEVICE)
    x, weight = make(rng, sum(counts), K), normal(rng, len(counts), N, K)
    y = grouped_gemm.rows_by_grouped_mm(x, weight, groups, BF16)
    for got, piece, w in zip(y.split(list(counts)), x.split(list(counts)), weight):
        assert torch.equal(got, (piece.double() @ w.double().t()).to(BF16))
    dy = make(rng, sum(counts), N)
    out = torch.full((len(counts), N, K), math.nan, dtype=BF16, device=DEVICE)
    assert grouped_gemm.depth_by_grouped_mm(dy.t(), x.t(), groups, out) is out
    for got, left, right in zip(out, dy.split(list(counts)), x.split(list(counts))):
        assert torch.equal(got, (left.double().t() @ right.double()).to(BF16))
    assert calls == ([(2, 3), (2, 2)] if sum(counts) else [])


@pytest.mark.parametrize("layout", WEIGHTS)
def test_any_weights_are_handed_over_as_torch_can_read_them(layout, rng, calls) -> None:
    counts = LOADS["uneven"]
    x, weight = normal(rng, sum(counts), K), WEIGHTS[layout](rng, len(counts), N, K)
    y = grouped_gemm.rows_by_grouped_mm(x, weight, on_device(counts, DEVICE), BF16)
    for got, piece, w in zip(y.split(list(counts)), x.split(list(counts)), weight):
        assert torch.equal(got, (piece.double() @ w.double().t()).to(BF16))
    assert calls == [(2, 3)]


def test_sizes_of_one_row_and_one_expert_have_strides_that_torch_refuses(rng, calls) -> None:
    """Strides of a dimension of one element are any; `contiguous` leaves them, torch refuses them."""
    groups = on_device((1,), DEVICE)
    x = normal(rng, 3, 8, 17)[0, :1, :16]  # strides 17, 1
    weight = normal(rng, 5 * 16 * 8).as_strided((1, 8, 16), (3, 16, 1))
    assert x.is_contiguous()
    y = grouped_gemm.rows_by_grouped_mm(x, weight, groups, BF16)
    assert torch.equal(y, (x.double() @ weight[0].double().t()).to(BF16))
    out = torch.empty(1, 16, 16, dtype=BF16, device=DEVICE)
    grouped_gemm.depth_by_grouped_mm(x.t(), x.t(), groups, out)
    assert torch.equal(out[0], (x.double().t() @ x.double()).to(BF16))


def test_what_can_be_read_is_not_copied(rng, monkeypatch) -> None:
    """In training, x, dy and the weights are rows; a copy of them would cost more than the product of a small expert."""
    seen: list[int] = []

    def record(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        seen.extend((a.data_ptr(), b.data_ptr()))
        return torch.zeros((len(offs), a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2])).to(a)

    monkeypatch.setattr(torch, "_grouped_mm", record, raising=False)
    counts = LOADS["uneven"]
    groups, x, dy = on_device(counts, DEVICE), normal(rng, sum(counts), K), normal(rng, sum(counts), N)
    weight = normal(rng, len(counts), N, K)
    grouped_gemm.rows_by_grouped_mm(x, weight, groups, BF16)
    grouped_gemm.rows_by_grouped_mm(dy, weight.mT, groups, BF16)
    grouped_gemm.depth_by_grouped_mm(dy.t(), x.t(), groups, torch.empty(len(counts), N, K, dtype=BF16, device=DEVICE))
    assert seen == [t.data_ptr() for t in (x, weight, dy, weight, dy, x)]


@pytest.mark.parametrize(("n", "k"), [(65, 64), (64, 65), (1, 8), (8, 1), (12, 8)])
def test_sizes_that_it_cannot_read_are_refused_before_the_first_product(n, k, rng, calls) -> None:
    """In the forward pass already, by their names and with the remedy."""
    groups = on_device((3, 4), DEVICE)
    x, dy = normal(rng, 7, k), normal(rng, 7, n)
    with pytest.raises(ShapeError, match=rf"multiples of 8, got K = {k}, N = {n}\. Pad.*per_expert"):
        grouped_gemm.rows_by_grouped_mm(x, normal(rng, 2, n, k), groups, BF16)
    out = torch.empty(2, n, k, dtype=BF16, device=DEVICE)
    with pytest.raises(ShapeError, match=rf"multiples of 8, got M = {n}, N = {k}\. Pad.*per_expert"):
        grouped_gemm.depth_by_grouped_mm(dy.t(), x.t(), groups, out)
    assert not calls


def test_more_experts_than_one_block_of_threads_prepares_are_refused(rng, calls) -> None:
    counts = torch.ones(1024, dtype=torch.int64, device=DEVICE)
    x, weight = normal(rng, 1024, 8), normal(rng, 1024, 8, 8)
    with pytest.raises(ShapeError, match="at most 1023 experts in a call, got 1024"):
        grouped_gemm.rows_by_grouped_mm(x, weight, Groups.of(counts, 1024, torch.device(DEVICE)), BF16)
    groups = Groups.of(counts[:-1], 1023, torch.device(DEVICE))
    assert grouped_gemm.rows_by_grouped_mm(x[:-1], weight[:-1], groups, BF16).shape == (1023, 8)


@pytest.mark.parametrize("shape", [(0, 8, 8), (5, 0, 8), (5, 8, 0)])
def test_empty_sizes_ask_torch_nothing(shape, rng, calls) -> None:
    t, n, k = shape
    groups = on_device((t, 0), DEVICE)
    x, dy, weight = normal(rng, t, k), normal(rng, t, n), normal(rng, 2, n, k)
    y = grouped_gemm.rows_by_grouped_mm(x, weight, groups, BF16)
    assert torch.equal(y, torch.zeros(t, n, dtype=BF16, device=DEVICE))
    out = torch.full((2, n, k), math.nan, dtype=BF16, device=DEVICE)
    assert not grouped_gemm.depth_by_grouped_mm(dy.t(), x.t(), groups, out).any()
    assert not calls


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no _grouped_mm")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_itself_takes_it(layout, rng) -> None:
    """Its checks of strides are its own, on a CPU as on a GPU; its device-side ones, on a GPU."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("torch._grouped_mm is fast on sm90 and later only")
    counts, make = LOADS["uneven"], LAYOUTS[layout]
    groups, weight = on_device(counts, DEVICE), normal(rng, len(counts), N, K)
    x, dy = make(rng, sum(counts), K), make(rng, sum(counts), N)
    y = grouped_gemm.rows_by_grouped_mm(x, weight, groups, BF16)
    for got, piece, w in zip(y.split(list(counts)), x.split(list(counts)), weight):
        torch.testing.assert_close(got, (piece.double() @ w.double().t()).to(BF16))
    out = grouped_gemm.depth_by_grouped_mm(
        dy.t(), x.t(), groups, torch.empty(len(counts), N, K, dtype=BF16, device=DEVICE)
    )
    for got, left, right in zip(out, dy.split(list(counts)), x.split(list(counts))):
        torch.testing.assert_close(got, (left.double().t() @ right.double()).to(BF16))
