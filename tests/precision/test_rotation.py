"""Hadamard rotation: identities, order of the axis, signs, and the bits of the butterfly."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.precision.rotation import hadamard_matrix, rotate, rotation_signs, unrotate

SIZES = [16, 32, 64, 128]


def parity_hadamard(n: int) -> torch.Tensor:
    """The Sylvester matrix from its closed form, (-1)^popcount(i & j), fp64 and unnormalised."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)], dtype=torch.float64)


@pytest.mark.parametrize("n", SIZES)
def test_matrix_is_sylvesters_over_sqrt_n(n: int) -> None:
    torch.testing.assert_close(hadamard_matrix(n).double(), parity_hadamard(n) / n**0.5, rtol=1e-7, atol=0)


def test_h16_is_the_hadamard_matrix_times_a_quarter_exactly() -> None:
    assert torch.equal(hadamard_matrix(16).double(), parity_hadamard(16) * 0.25)


@pytest.mark.parametrize("n", SIZES)
def test_matrix_is_symmetric_and_its_own_inverse(n: int) -> None:
    h = hadamard_matrix(n).double()
    assert torch.equal(h, h.t())
    torch.testing.assert_close(h @ h, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("signed", [False, True], ids=["plain", "signed"])
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("n", SIZES)
def test_rotate_is_multiplication_by_d_h_along_the_axis(n: int, dim: int, signed: bool, rng: torch.Generator) -> None:
    x = torch.randn(3 * n if dim in (0, -2) else 5, 5 if dim in (0, -2) else 3 * n, generator=rng)
    signs = rotation_signs(n, seed=11) if signed else None
    factor = parity_hadamard(n) / n**0.5
    if signs is not None:
        factor = torch.diag(signs.double()) @ factor
    whole = torch.block_diag(factor, factor, factor)
    expected = x.double() @ whole if dim in (1, -1) else whole.t() @ x.double()
    torch.testing.assert_close(rotate(x, n, signs, dim).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", SIZES)
def test_two_sixteens_of_a_block_of_32_are_independent(n: int, rng: torch.Generator) -> None:
    """H16 on 32 elements is two transforms: the second half does not see the first."""
    x = torch.randn(4, 2 * n, generator=rng)
    changed = x.clone()
    changed[:, :n] += 1
    assert torch.equal(rotate(x, n)[:, n:], rotate(changed, n)[:, n:])
    assert not torch.equal(rotate(x, n)[:, :n], rotate(changed, n)[:, :n])


@pytest.mark.parametrize("n", SIZES)
def test_bits_are_those_of_butterflies_in_stride_order(n: int, rng: torch.Generator) -> None:
    """The order of the additions is part of the definition; this is that definition on Python floats rounded to fp32."""
    x = torch.randn(n, generator=rng) * 2.0 ** torch.randint(-12, 12, (n,), generator=rng)
    y = x.clone()
    stride = 1
    while stride < n:
        for i in range(n):
            if not i & stride:
                y[i], y[i + stride] = y[i] + y[i + stride], y[i] - y[i + stride]
        stride *= 2
    expected = y * (1.0 / n**0.5)
    assert torch.equal(rotate(x[None], n)[0], expected)
    assert torch.equal(rotate(x[:, None], n, dim=0)[:, 0], expected)


@pytest.mark.parametrize("n", SIZES)
def test_products_of_two_operands_rotated_alike_are_unchanged(n: int, rng: torch.Generator) -> None:
    a, b = torch.randn(7, 4 * n, generator=rng), torch.randn(9, 4 * n, generator=rng)
    signs = rotation_signs(n, seed=3)
    product = rotate(a, n, signs).double() @ rotate(b, n, signs).double().t()
    torch.testing.assert_close(product, a.double() @ b.double().t(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("n", SIZES)
def test_unrotate_undoes_rotate(n: int, dim: int, rng: torch.Generator) -> None:
    x = torch.randn(2 * n, 2 * n, generator=rng)
    signs = rotation_signs(n, seed=5)
    torch.testing.assert_close(unrotate(rotate(x, n, signs, dim), n, signs, dim), x, rtol=0, atol=5e-6)


def test_a_single_outlier_is_spread_over_its_run() -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = 16
    assert rotate(x, 16).abs().tolist() == [[4.0] * 16 + [0.0] * 16]


def test_strided_input_gives_the_bits_of_contiguous_input_and_is_left_alone(rng: torch.Generator) -> None:
    x = torch.randn(64, 96, generator=rng)
    view = x.t()
    for dim in (0, 1):
        before = view.clone()
        assert torch.equal(rotate(view, 16, None, dim), rotate(before, 16, None, dim))
        assert torch.equal(view, before)


@pytest.mark.parametrize("n", SIZES)
def test_signs_depend_on_the_seed_alone_and_are_balanced(n: int) -> None:
    assert torch.equal(rotation_signs(n, 7), rotation_signs(n, 7))
    many = torch.stack([rotation_signs(n, seed) for seed in range(200)])
    assert set(many.unique().tolist()) == {-1.0, 1.0}
    assert abs(many.mean().item()) < 4 / (200 * n) ** 0.5  # four standard deviations
    assert len({tuple(row.tolist()) for row in many}) > 190


def test_a_length_that_is_no_multiple_of_the_size_is_refused() -> None:
    with pytest.raises(ShapeError, match="multiple of 16"):
        rotate(torch.zeros(2, 40), 16)
