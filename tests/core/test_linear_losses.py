"""The table of losses of linear models: its constants hold for its slopes, and are attained.

That the slopes are those of torch and Keras is tested in tests/opacus and tests/keras.
"""

import functools

import numpy as np
import pytest

from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.losses import linear
from hidden_state_accountants.losses.arrays import NUMPY

NORM, SQUARE = 1.5, 1.5**2 + 1  # of the features, with a 1 for the bias
WEIGHTS = np.array([0.5, 1.0, 3.0])
ROWS = 4000


def hot(random, shape):
    return np.eye(shape[1])[random.integers(shape[1], size=shape[0])]


def unit(random, shape):
    return random.integers(2, size=shape).astype(float)


def number(random, shape):
    return random.normal(size=shape)


FACTORIES = {
    "softmax": (linear.softmax, hot, (3, 4)),
    "softmax_smoothed": (functools.partial(linear.softmax, smoothing=0.3), hot, (3,)),
    "softmax_weighted": (functools.partial(linear.softmax, weights=WEIGHTS), hot, (3,)),
    "logistic": (linear.logistic, unit, (1, 3)),
    "logistic_sum": (functools.partial(linear.logistic, mean=False), unit, (3,)),
    "logistic_smoothed": (functools.partial(linear.logistic, smoothing=0.2), unit, (1,)),
    "logistic_weighted": (
        functools.partial(linear.logistic, weights=WEIGHTS, positive=WEIGHTS[::-1]), unit, (3,)),
    "squared_error": (functools.partial(linear.residual, scale=2.0), number, (1, 3)),
    "squared_error_sum": (functools.partial(linear.residual, mean=False), number, (3,)),
    "huber": (functools.partial(linear.residual, width=0.7), number, (1, 3)),
    "smooth_l1": (functools.partial(linear.residual, scale=4.0, width=0.25), number, (1, 3)),
    "log_cosh": (linear.log_cosh, number, (1, 3)),
}  # fmt: skip
CASES = [
    pytest.param(make(NUMPY, outputs), targets, outputs, id=f"{name}-{outputs}")
    for name, (make, targets, counts) in FACTORIES.items()
    for outputs in counts
]


def pairs(loss, make_targets, outputs, step):
    """Slopes at random predictions and at others that are a step away, and the step."""
    random, shape = np.random.default_rng(0), (ROWS, outputs)
    targets = make_targets(random, shape)
    assert loss.is_target is None or loss.is_target(targets).all()
    first = random.normal(scale=2.0, size=shape) * random.choice([0.1, 1, 10], (ROWS, 1))
    if make_targets is hot:  # two classes that are far above the others
        first[: ROWS // 2] = [20.0, 20.0, *[0.0] * (outputs - 2)]
    way = random.normal(size=shape)
    way *= step / np.linalg.norm(way, axis=1, keepdims=True)
    return loss.slopes(first, targets), loss.slopes(first + way, targets), way


@pytest.mark.parametrize(("loss", "make_targets", "outputs"), CASES)
def test_constants_hold_and_are_attained(loss, make_targets, outputs):
    geometry = loss.geometry(NORM, True)
    here, there, way = pairs(loss, make_targets, outputs, 0.1)
    steepest = (np.linalg.norm(here - there, axis=1) / np.linalg.norm(way, axis=1)).max()
    assert 0.9 * geometry.smoothness < SQUARE * steepest <= geometry.smoothness * (1 + 1e-9)
    if geometry.lipschitz is not None:
        longest = SQUARE**0.5 * np.linalg.norm(here, axis=1).max()
        assert 0.7 * geometry.lipschitz < longest <= geometry.lipschitz * (1 + 1e-9)


def clipped(slopes):
    """Opacus' clip, at a length within most slopes."""
    norms = np.linalg.norm(slopes, axis=1, keepdims=True)
    return slopes * np.minimum(1.0, 0.2 / (norms + 1e-6))


@pytest.mark.parametrize(("loss", "make_targets", "outputs"), CASES)
def test_what_a_clip_keeps_in_its_class(loss, make_targets, outputs):
    """Slopes of a convex loss, no less smooth, are cocoercive; of one output and squared errors."""
    here, there, way = pairs(loss, make_targets, outputs, 0.5)
    difference = clipped(there) - clipped(here)
    least = (difference**2).sum(axis=1) * SQUARE / loss.geometry(NORM, True).smoothness
    is_kept = bool(((difference * way).sum(axis=1) >= least - 1e-12).all())
    kind = loss.geometry(NORM, True).kind
    assert is_kept == (kind is LossKind.GENERALIZED_LINEAR)
    assert (kind is LossKind.GENERALIZED_LINEAR) or outputs > 1


def test_targets_that_the_constants_do_not_hold_for():
    nan, inf = float("nan"), float("inf")
    rows = np.array(
        [[0.5, 0.5], [1.0, 0.0], [0.5, 0.6], [1.5, 0.0], [0.0, -0.5], [nan, 1.0], [inf, 0.0]]
    )
    fits = [True, True, False, False, False, False, False]
    assert linear.softmax(NUMPY, 2).is_target(rows).tolist() == fits
    fits[2] = True
    assert linear.logistic(NUMPY, 2).is_target(rows).tolist() == fits
