"""Norms of rows in float32 that no long sum makes shorter than they are."""

import math

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from torch import nn

from hidden_state_adapters.opacus.gradients import (
    clip_factors,
    gradients_of,
    joint_norms,
    row_norms,
    smallest_norm,
    to_precision,
)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 1000, 256 * 256 + 3])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_are_the_norms(rows, length):
    matrix = torch.randn(rows, length, dtype=torch.float64)
    expected = np.linalg.norm(matrix.numpy(), axis=1)
    np.testing.assert_allclose(row_norms(matrix).numpy(), expected, rtol=1e-13)


@pytest.mark.parametrize("transposed", [False, True])
def test_of_long_rows_in_float32(transposed):
    """vector_norm is off by 5e-3 and 7e-3 there."""
    matrix = torch.full((2, 4_000_000), 0.1)
    if transposed:
        matrix = matrix.t().contiguous().t()
    exact = 0.1 * 2000.0
    np.testing.assert_allclose(row_norms(matrix).numpy(), exact, rtol=1e-6)


def test_not_finite():
    matrix = torch.ones(3, 1000)
    matrix[0, 999], matrix[1, 3] = torch.nan, torch.inf
    norms = row_norms(matrix)
    assert norms.isnan().tolist() == [True, False, False]
    assert norms.isfinite().tolist() == [False, False, True]


def test_the_clip_uses_them():
    layer = nn.Linear(2_000_000, 1, bias=False)
    model = GradSampleModule(layer, loss_reduction="sum")
    model(torch.full((1, 2_000_000), 0.1)).sum().backward()
    norm = float(joint_norms([gradients_of(layer.weight)]))
    assert norm == pytest.approx(0.1 * 2_000_000**0.5, rel=1e-6)


def test_factors_without_digits_are_zero():
    factors = torch.tensor([1.0, 1e-37, 1e-40, 1e-45, 0.0], dtype=torch.float64)
    single = to_precision(factors, torch.float32)
    assert single.dtype == torch.float32
    assert single.tolist() == [1.0, pytest.approx(1e-37), 0.0, 0.0, 0.0]
    assert to_precision(factors, torch.float64).tolist() == factors.tolist()


def test_the_clip_is_exact():
    norms = torch.tensor([0.0, 0.3, 0.5, 2.0], dtype=torch.float64)
    factors = clip_factors(norms, 0.5)
    np.testing.assert_array_equal(factors, [1.0, 1.0, 1.0, 0.25])
    factors = clip_factors(norms, 0.5, 1e-100)
    np.testing.assert_allclose(factors * norms, [0.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_vector_is_longer_than_the_clip_norm_though_squares_underflow(dtype):
    """Coordinates of ever smaller size: a factor from a norm that underflowed would be huge."""
    smallest = smallest_norm([nn.Parameter(torch.zeros(1, dtype=dtype))])
    exponents = (
        torch.linspace(-45, 5, 400) if dtype is torch.float32 else torch.linspace(-320, 5, 400)
    )
    vectors = (torch.ones(400, 1000, dtype=torch.float64) * 10.0 ** exponents[:, None].double()).to(
        dtype
    )
    for least in (None, smallest):
        factors = clip_factors(joint_norms([vectors]), smallest, least)
        clipped = vectors.double() * factors.double()[:, None]
        # scaled before it is squared here, too
        lengths = clipped.abs().amax(dim=1) * math.sqrt(1000)
        assert torch.isfinite(lengths).all()
        assert lengths.max() <= smallest * (1 + 1e-5)
