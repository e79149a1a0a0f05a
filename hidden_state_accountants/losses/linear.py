"""Losses of a linear model: slopes, constants and targets of each, once for every framework.

A loss is a function of the predictions z of one example and of its targets t, which have one entry
for each output; arrays of both have the shape (examples, outputs). Proofs of the constants:
docs/theory/moduli.md, "Losses of a linear model".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from hidden_state_accountants.events.loss_geometry import LossGeometry
from hidden_state_accountants.losses.arrays import Array, Arrays

PROBABILITY_SLACK = 1e-5
"""Largest difference of a sum of probabilities from 1, by rounding."""

Slopes = Callable[[Array, Array], Array]
Geometry = Callable[[float, bool], LossGeometry]


@attrs.frozen(kw_only=True, eq=False)
class LinearLoss:
    """The loss of one example of a linear model.

    Attributes:
        slopes: Gradients in the predictions, of predictions and targets.
        geometry: Constants in the parameters, of a bound on the norm of the features and whether a
            bias is trained.
        is_target: Rows of targets for which the constants hold, of shape (examples,), as a function
            of a NumPy array or a torch tensor; None if they hold for all numbers.
        wanted: Description of these targets.
    """

    slopes: Slopes
    geometry: Geometry
    is_target: Callable[[Array], Array] | None = None
    wanted: str = "finite numbers"


def softmax(
    xp: Arrays, outputs: int, *, smoothing: float = 0.0, weights: np.ndarray | None = None
) -> LinearLoss:
    """Returns the cross-entropy of the softmax of the predictions.

    Args:
        xp: Operations of the framework.
        outputs: Number of classes.
        smoothing: Share of the uniform distribution in the targets.
        weights: Weights of the classes, float64; None for 1.
    """

    def slopes(z: Array, t: Array) -> Array:
        if smoothing:
            t = (1 - smoothing) * t + smoothing / outputs
        if weights is None:
            return xp.softmax(z) - t
        w = xp.like(weights, z)
        return xp.softmax(z) * (t @ w[:, None]) - t * w

    largest = 1.0 if weights is None else float(weights.max())

    def geometry(feature_norm: float, bias: bool) -> LossGeometry:
        one = LossGeometry.softmax_cross_entropy(feature_norm, bias)
        assert one.lipschitz is not None
        return LossGeometry.convex(largest * one.smoothness, largest * one.lipschitz)

    return LinearLoss(
        slopes=slopes,
        geometry=geometry,
        is_target=lambda t: (t >= 0).all(axis=1) & (abs(t.sum(axis=1) - 1) <= PROBABILITY_SLACK),
        wanted="vectors of probabilities",
    )


def logistic(
    xp: Arrays,
    outputs: int,
    *,
    mean: bool = True,
    smoothing: float = 0.0,
    weights: np.ndarray | None = None,
    positive: np.ndarray | None = None,
) -> LinearLoss:
    """Returns the binary cross-entropy of every output.

    Args:
        xp: Operations of the framework.
        outputs: Number of labels of an example.
        mean: True if the loss of an example is the mean over its outputs, False for the sum.
        smoothing: Share of 1/2 in the targets.
        weights: Weights of the outputs, float64; None for 1.
        positive: Weights of the positive labels of each output, float64; None for 1.
    """

    def slope(z: Array, t: Array) -> Array:
        if smoothing:
            t = (1 - smoothing) * t + smoothing / 2
        if positive is None:
            return xp.sigmoid(z) - t
        up = t * xp.like(positive, z)
        return (1 - t + up) * xp.sigmoid(z) - up

    factors = (np.ones(outputs) if weights is None else weights) / (outputs if mean else 1)
    largest = factors if positive is None else factors * np.maximum(positive, 1.0)

    def geometry(feature_norm: float, bias: bool) -> LossGeometry:
        return _sum(LossGeometry.logistic(feature_norm, bias), largest)

    return LinearLoss(
        slopes=_times(xp, factors, slope),
        geometry=geometry,
        is_target=lambda t: ((t >= 0) & (t <= 1)).all(axis=1),
        wanted="probabilities",
    )


def residual(
    xp: Arrays, outputs: int, *, mean: bool = True, scale: float = 1.0, width: float = math.inf
) -> LinearLoss:
    """Returns the squared error, or Huber's loss, of every output.

    Its derivative in a prediction is scale * clip(z - t, -width, width). The squared error keeps
    the class of one prediction under a clip, whatever the number of outputs.

    Args:
        xp: Operations of the framework.
        outputs: Number of predictions of an example.
        mean: True if the loss of an example is the mean over its outputs, False for the sum.
        scale: Second derivative at small residuals.
        width: Residual from which on the loss is linear.
    """
    share = scale / (outputs if mean else 1)
    factors = np.full(outputs, share)

    def slope(z: Array, t: Array) -> Array:
        gap = z - t
        return gap if width == math.inf else xp.minimum(xp.maximum(gap, -width), width)

    def geometry(feature_norm: float, bias: bool) -> LossGeometry:
        if width == math.inf:
            return LossGeometry.squared_error(feature_norm, bias, scale=share)
        return _sum(LossGeometry.huber(feature_norm, width, bias), factors)

    return LinearLoss(slopes=_times(xp, factors, slope), geometry=geometry)


def log_cosh(xp: Arrays, outputs: int) -> LinearLoss:
    """Returns the mean over the outputs of log cosh(z - t), with the constants of Huber's loss."""
    factors = np.full(outputs, 1 / outputs)

    def slope(z: Array, t: Array) -> Array:
        return xp.tanh(z - t)

    def geometry(feature_norm: float, bias: bool) -> LossGeometry:
        return _sum(LossGeometry.huber(feature_norm, 1.0, bias), factors)

    return LinearLoss(slopes=_times(xp, factors, slope), geometry=geometry)


BY_NAME: dict[str, Callable[[Arrays, int], LinearLoss]] = {
    "softmax_cross_entropy": softmax,
    "logistic": logistic,
    "squared_error": residual,
}
"""Losses by the names of their geometries, for operations and a number of outputs."""


def _times(xp: Arrays, factors: np.ndarray, slope: Slopes) -> Slopes:
    """Returns the slopes of a sum over the outputs of factors times a loss of one output."""
    first = float(factors[0])
    is_even = bool((factors == first).all())

    def slopes(z: Array, t: Array) -> Array:
        found = slope(z, t)
        if is_even:
            return found if first == 1 else first * found
        return xp.like(factors, z) * found

    return slopes


def _sum(one: LossGeometry, factors: np.ndarray) -> LossGeometry:
    """Returns the constants of a sum over the outputs of factors times a loss of one output."""
    assert one.lipschitz is not None
    kind = LossGeometry.generalized_linear if len(factors) == 1 else LossGeometry.convex
    length = float(np.linalg.norm(factors))
    return kind(float(factors.max()) * one.smoothness, length * one.lipschitz)
