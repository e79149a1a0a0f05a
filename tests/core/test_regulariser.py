"""Proximal maps of regularisers: minimisers, moduli, exact zeros, refusals."""

import math

import block_coordinate as reference
import numpy as np
import pytest
from scipy import optimize

from hidden_state_accountants import Regulariser

ALL = [
    Regulariser(),
    Regulariser(l1=0.3),
    Regulariser(l2=0.7),
    Regulariser(l1=0.2, l2=0.5, low=0.0),
    Regulariser(low=-0.3, high=0.4),
    Regulariser(l1=0.2, l2=0.3, low=0.1, high=0.6),
    Regulariser(group_lasso=0.6),
    Regulariser(group_lasso=0.6, group_axis=0),
    Regulariser(group_lasso=0.6, group_axis=-1, l1=0.1, l2=0.4),
    Regulariser(group_lasso=0.5, group_axis=1, l1=0.1, low=0.0),
]


def groups(shape, axis):
    """Index arrays of the groups."""
    index = np.arange(math.prod(shape)).reshape(shape)
    if axis is None or len(shape) < 2:
        return [index.ravel()]
    return [part.ravel() for part in np.moveaxis(index, axis, 0)]


def value(h, x, shape):
    """h(x) for x in the box, by its definition."""
    norms = sum(np.linalg.norm(x[g]) for g in groups(shape, h.group_axis))
    return h.l1 * np.abs(x).sum() + h.group_lasso * norms + h.l2 / 2 * (x @ x)


@pytest.mark.parametrize("shape", [(3, 2), (4,)])
@pytest.mark.parametrize("h", ALL, ids=str)
def test_it_is_the_minimiser(h, shape):
    """No small move from it, and no random point of the box, has a smaller objective."""
    rng = np.random.default_rng(0)
    for scale in (0.2, 2.0):
        x, eta = scale * rng.normal(size=math.prod(shape)), float(rng.uniform(0.2, 1.5))
        found = h.prox(x.reshape(shape), eta).ravel()
        assert ((found >= h.low) & (found <= h.high)).all()

        def objective(u, x=x, eta=eta):
            return value(h, u, shape) + (u - x) @ (u - x) / (2 * eta)

        least = objective(found)
        for size in (1e-4, 1e-2, 1.0):
            for _ in range(40):
                other = np.clip(found + size * rng.normal(size=x.shape), h.low, h.high)
                assert objective(other) >= least - 1e-12
        bounds = [(h.low, h.high)] * len(x)
        other = optimize.minimize(objective, found, bounds=bounds, method="L-BFGS-B").x
        assert objective(other) >= least - 1e-9


@pytest.mark.parametrize("h", ALL, ids=str)
def test_its_modulus_is_what_the_event_says(h):
    rng = np.random.default_rng(1)
    for _ in range(100):
        eta = float(rng.uniform(0.0, 2.0))
        one, two = rng.normal(size=(2, 3, 2)) * rng.uniform(0.01, 3)
        before = np.linalg.norm(one - two)
        after = np.linalg.norm(h.prox(one, eta) - h.prox(two, eta))
        assert after <= before / (1 + eta * h.strong_convexity) * (1 + 1e-12)
    if h == Regulariser(l2=h.l2):
        assert after == pytest.approx(before / (1 + eta * h.l2), rel=1e-12)


def test_small_numbers_and_small_groups_become_exactly_zero():
    x = np.array([[0.05, -0.05], [0.4, 3.0]])
    np.testing.assert_allclose(Regulariser(l1=0.1).prox(x, 0.5), [[0, 0], [0.35, 2.95]], atol=0)
    rows = Regulariser(group_lasso=0.2, group_axis=0).prox(x, 0.5)
    assert (rows[0] == 0).all()
    assert (rows[1] > 0).all()
    assert (Regulariser(group_lasso=0.2).prox(np.zeros((2, 2)), 0.0) == 0).all()


@pytest.mark.parametrize(("l1", "l2", "nonnegative"), [(0.3, 0.5, False), (0.1, 0.2, True)])
def test_the_prox_of_the_reference_is_the_same(l1, l2, nonnegative):
    points = np.linspace(-2, 2, 41)
    own = Regulariser(l1=l1, l2=l2, low=0.0 if nonnegative else -math.inf)
    np.testing.assert_allclose(
        reference.prox(points, 0.4, l1, l2, nonnegative), own.prox(points, 0.4), atol=1e-15
    )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"l1": -0.1}, ValueError, "l1"),
        ({"l2": math.inf}, ValueError, "l2"),
        ({"group_lasso": "1"}, TypeError, "group_lasso"),
        ({"low": 1.0, "high": 1.0}, ValueError, "low < high"),
        ({"low": math.nan}, ValueError, "low < high"),
        ({"group_axis": 0.5}, TypeError, "group_axis"),
        ({"group_lasso": 1.0, "high": 1.0}, ValueError, "no closed form"),
        ({"group_lasso": 1.0, "group_axis": 2}, ValueError, "an axis of every parameter, got 2"),
    ],
)
def test_impossible_values(arguments, error, text):
    with pytest.raises(error, match=text):
        Regulariser(**arguments).prox(np.ones((2, 2)), 0.1)
