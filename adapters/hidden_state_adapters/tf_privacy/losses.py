r"""Losses whose per-example gradient is bounded and smooth: no clip acts, and c = 1 - lr * decay.

They are used like Keras' own losses with ``from_logits=True``. Each is the Huber envelope of the
loss in its name,

.. math:: L(z) = \min_u\; l(u) + h(z - u), \qquad
    h(v) = |v|^2/(2m) \text{ up to } |v| = mC, \text{ then } C|v| - mC^2/2

(docs/theory/moduli.md): convex, with gradients in the predictions no longer than `clip_norm` and
Lipschitz with the constant 1/(1/M + smoothing), M being that of the plain loss. Values and
gradients are computed in float64, eagerly, in graphs and under XLA. How long that takes depends on
the examples. A target that the loss is not made for, or a gradient that could not be certified,
gives a loss that is not a number, and the private optimizers refuse the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf

from hidden_state_accountants import LossGeometry, validate
from hidden_state_accountants.losses import envelope, scalar
from hidden_state_accountants.losses.arrays import Arrays
from hidden_state_accountants.losses.linear import PROBABILITY_SLACK
from hidden_state_accountants.losses.softmax import (
    NEWTON_STEPS,
    RESCUE_STEPS,
    SMALL_STEP,
    Point,
    SoftmaxEnvelope,
)
from hidden_state_adapters.tf_privacy import keras_api

TENSORFLOW = Arrays(
    exp=tf.exp,
    log=tf.math.log,
    sqrt=tf.sqrt,
    abs=tf.abs,
    sigmoid=tf.sigmoid,
    tanh=tf.tanh,
    where=tf.where,
    maximum=tf.maximum,
    minimum=tf.minimum,
    total=lambda array: tf.reduce_sum(array, axis=0),
    largest=lambda array: tf.reduce_max(array, axis=0),
    softmax=tf.nn.softmax,
    like=lambda numbers, array: tf.constant(numbers, array.dtype),
    when=lambda holds, function, array: function(),
)


class EnvelopeLoss(tf.keras.losses.Loss):
    """Base of the envelopes.

    Attributes:
        clip_norm: C.
        smoothing: m.
        curvature: M, the Lipschitz constant of the plain loss' gradient in the predictions; for
            `hidden_state_accountants.envelope_smoothing`.
    """

    curvature: float
    _geometry: ClassVar[Callable[..., LossGeometry]]
    _kink: ClassVar[str] = ""
    _least_clip_norm: ClassVar[float] = 0.0

    def __init__(
        self,
        clip_norm: float,
        smoothing: float = 0.0,
        reduction: str = keras_api.DEFAULT_REDUCTION,
        name: str | None = None,
    ):
        super().__init__(reduction=reduction, name=name)
        self.clip_norm = envelope.check_clip_norm(clip_norm, least=self._least_clip_norm)
        self.smoothing = envelope.check_smoothing(smoothing, needed_by=self._kink)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        own = {"clip_norm": self.clip_norm, "smoothing": self.smoothing, **self._more}
        return {**super().get_config(), **own}

    def geometry(self, feature_norm: float, bias: bool = False) -> LossGeometry:
        """Returns the loss of a linear model, as a function of its parameters.

        Args:
            feature_norm: A bound on the L2 norm of every record's features.
            bias: Whether a bias is trained as well.
        """
        own = {"clip_norm": self.clip_norm, "smoothing": self.smoothing, **self._more}
        return self._geometry(feature_norm, bias, **own)

    @property
    def _more(self) -> dict[str, Any]:
        """Other arguments."""
        return {}

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the losses of a batch, shape (examples,)."""
        y_pred = tf.convert_to_tensor(y_pred)
        if y_pred.dtype not in (tf.float32, tf.float64):
            raise TypeError(
                f"Expected predictions in float32 or float64, got {y_pred.dtype.name}. Train "
                "without mixed precision."
            )
        y_true = tf.convert_to_tensor(y_true)

        @tf.custom_gradient
        def losses(predictions: Any) -> tuple[Any, Callable[[Any], Any]]:
            # A tape would follow every step of the solver, only to be told the gradients below.
            known = tf.cast(tf.stop_gradient(predictions), tf.float64)
            values, gradients = self._evaluate(known, y_true)
            gradients = tf.cast(gradients, predictions.dtype)

            def backward(weights: Any) -> Any:
                missing = len(gradients.shape) - 1
                return tf.reshape(weights, [-1, *[1] * missing]) * gradients

            return tf.cast(values, predictions.dtype), backward

        return losses(y_pred)

    def _evaluate(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        """Values, shape (examples,), and gradients in float64."""
        raise NotImplementedError


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class EnvelopeCategoricalCrossentropy(EnvelopeLoss):
    """The envelope of CategoricalCrossentropy(from_logits=True); any number of classes.

    Called with probabilities and logits of shape (examples, classes). The gradients are certified
    to 1e-12 (1 + the largest difference of two logits of the example).

    Args:
        clip_norm: C, from 0.01 on; from sqrt(2) on it never acts.
        smoothing: m >= 0; of more than 0 is a smaller Lipschitz constant of the gradient.
        reduction: Reduction of Keras' losses; "none" for private training.
        name: Name of the loss.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
    """

    curvature = 0.5
    _geometry = LossGeometry.envelope_softmax_cross_entropy
    _least_clip_norm = envelope.LEAST_SOFTMAX_CLIP_NORM

    def _evaluate(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        if predictions.shape.rank != 2 or (predictions.shape[1] or 0) < 2:
            raise ValueError(
                "Expected logits of shape (examples, classes) with two classes or more, got "
                f"{predictions.shape[1:]} for each example."
            )
        return _of_logits(self, predictions, self._probabilities(predictions, targets))

    def _probabilities(self, logits: Any, targets: Any) -> Any:
        targets = _reshaped(tf.cast(targets, tf.float64), logits)
        sums = tf.reduce_sum(targets, axis=1, keepdims=True)
        is_fine = tf.reduce_all(targets >= 0, axis=1, keepdims=True)
        is_fine = is_fine & (tf.abs(sums - 1) <= PROBABILITY_SLACK)
        return tf.where(is_fine, targets / sums, math.nan)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class EnvelopeSparseCategoricalCrossentropy(EnvelopeCategoricalCrossentropy):
    """`EnvelopeCategoricalCrossentropy` called with classes, shape (examples,) or (examples, 1)."""

    def _probabilities(self, logits: Any, targets: Any) -> Any:
        if targets.shape.rank == 2 and targets.shape[1] == 1:
            targets = targets[:, 0]
        if targets.shape.rank != 1:
            raise ValueError(
                "Expected classes of shape (examples,) or (examples, 1), got targets of shape "
                f"{targets.shape[1:]} for each. Use EnvelopeCategoricalCrossentropy for "
                "probabilities."
            )
        one_hot = tf.one_hot(tf.cast(targets, tf.int64), logits.shape[1], dtype=tf.float64)
        return super()._probabilities(logits, one_hot)


def _of_logits(loss: EnvelopeLoss, logits: Any, probabilities: Any) -> tuple[Any, Any]:
    classes = int(logits.shape[1])
    found: tuple[Any, Any] = _softmax_envelope(
        logits, probabilities, classes, loss.clip_norm, loss.smoothing
    )
    return found


@tf.function(reduce_retracing=True, autograph=False)  # eagerly it is several times slower
def _softmax_envelope(
    logits: Any, probabilities: Any, classes: int, clip_norm: float, smoothing: float
) -> tuple[Any, Any]:
    z, t = (
        tf.transpose(tf.ensure_shape(rows, [None, classes])) for rows in (logits, probabilities)
    )
    problem = SoftmaxEnvelope.of(TENSORFLOW, z, t, clip_norm, smoothing)
    point = _solve(problem)
    return problem.value(point), tf.transpose(problem.gradient(point))


def _solve(problem: SoftmaxEnvelope) -> Point:
    """Returns the solutions; p is not a number where none was found that is certified."""
    start, is_pulled = problem.start()
    is_open = tf.reduce_any(is_pulled) if problem.smoothing == 0 else tf.constant(True)

    def step(number: Any, point: Point, is_open: Any) -> tuple[Any, Point, Any]:
        point, squares = problem.newton_step(point)
        is_open = tf.cond(
            tf.reduce_any(squares > SMALL_STEP),
            lambda: True,
            lambda: ~tf.reduce_all(problem.is_solved(problem.error(point))),
        )
        return number + 1, point, is_open

    _, point, is_open = tf.while_loop(
        lambda number, point, is_open: is_open & (number < NEWTON_STEPS),
        step,
        (tf.constant(0), start, is_open),
    )
    return tf.cond(is_open, lambda: _rescue(problem, point), lambda: point)


def _rescue(problem: SoftmaxEnvelope, point: Point) -> Point:
    """Solves in the slow way what is not solved."""
    _, state = tf.while_loop(
        lambda number, state: (number < RESCUE_STEPS) & ~tf.reduce_all(state.done),
        lambda number, state: (number + 1, problem.rescue_step(state)),
        (tf.constant(0), problem.rescue_start()),
    )
    found = problem.rescue_end(state)
    is_found = problem.is_solved(problem.error(found))
    found = found._replace(p=tf.where(is_found, found.p, math.nan))
    is_solved = problem.is_solved(problem.error(point))
    return Point(*(tf.where(is_solved, a, b) for a, b in zip(point, found, strict=True)))


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class EnvelopeBinaryCrossentropy(EnvelopeLoss):
    """The envelope of BinaryCrossentropy(from_logits=True) of one output.

    Called with targets in [0, 1] and logits, shape (examples,) or (examples, 1).

    Args:
        clip_norm: C; from 1 on it never acts.
        smoothing: m >= 0.
        reduction: Reduction of Keras' losses; "none" for private training.
        name: Name of the loss.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
    """

    curvature = 0.25
    _geometry = LossGeometry.envelope_logistic

    def _evaluate(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        return _of_one_output(
            scalar.logistic, lambda t: (t >= 0) & (t <= 1), self, predictions, targets
        )


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class EnvelopeHinge(EnvelopeLoss):
    """The envelope of the hinge loss, max(0, 1 - target * prediction), of one output.

    Called with targets -1 or 1 and predictions, shape (examples,) or (examples, 1).

    Args:
        clip_norm: C; from 1 on it never acts.
        smoothing: m > 0.
        reduction: Reduction of Keras' losses; "none" for private training.
        name: Name of the loss.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
    """

    curvature = math.inf
    _geometry = LossGeometry.envelope_hinge
    _kink = "hinge"

    def _evaluate(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        return _of_one_output(scalar.hinge, lambda t: tf.abs(t) == 1, self, predictions, targets)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class EnvelopeSquaredError(EnvelopeLoss):
    """The envelope of (scale/2) |prediction - target|**2 of an example; any number of outputs.

    Called with targets and predictions, shape (examples,) or (examples, outputs). The squares of an
    example's outputs are added up (MeanSquaredError takes their mean), and the clip acts on the
    gradient in all of them.

    Args:
        clip_norm: C.
        smoothing: m >= 0.
        scale: 1 for half the squared error; MeanSquaredError of one output has 2.
        reduction: Reduction of Keras' losses; "none" for private training.
        name: Name of the loss.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
    """

    _geometry = LossGeometry.envelope_squared_error

    def __init__(
        self,
        clip_norm: float,
        smoothing: float = 0.0,
        scale: float = 1.0,
        reduction: str = keras_api.DEFAULT_REDUCTION,
        name: str | None = None,
    ):
        super().__init__(clip_norm, smoothing, reduction, name)
        self.scale = validate.real("scale", scale, above=0)

    @property
    def curvature(self) -> float:  # type: ignore[override]
        """M."""
        return self.scale

    @property
    def _more(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def _evaluate(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        if predictions.shape.rank not in (1, 2):
            raise ValueError(
                "Expected predictions of shape (examples,) or (examples, outputs), got "
                f"{predictions.shape[1:]} for each example."
            )
        targets = _reshaped(tf.cast(targets, tf.float64), predictions)
        z, t = (
            tf.transpose(a if a.shape.rank == 2 else a[:, None]) for a in (predictions, targets)
        )
        values, gradients = scalar.squared_error(
            TENSORFLOW, z, t, self.clip_norm, self.smoothing, self.scale
        )
        return values, tf.reshape(tf.transpose(gradients), tf.shape(predictions))


OF_ONE_OUTPUT = (EnvelopeBinaryCrossentropy, EnvelopeHinge)
ENVELOPES = (
    EnvelopeCategoricalCrossentropy,
    EnvelopeSparseCategoricalCrossentropy,
    EnvelopeSquaredError,
    *OF_ONE_OUTPUT,
)


def _of_one_output(
    loss: Callable[..., tuple[Any, Any]],
    is_target: Callable[[Any], Any],
    settings: EnvelopeLoss,
    predictions: Any,
    targets: Any,
) -> tuple[Any, Any]:
    if predictions.shape.rank not in (1, 2) or predictions.shape[1:] not in ([], [1]):
        raise ValueError(
            "Expected predictions of one output, shape (examples,) or (examples, 1), got "
            f"{predictions.shape[1:]} for each example."
        )
    targets = _reshaped(tf.cast(targets, tf.float64), predictions)
    targets = tf.where(is_target(targets), targets, math.nan)
    values, gradients = loss(
        TENSORFLOW, predictions, targets, settings.clip_norm, settings.smoothing
    )
    return tf.reshape(values, [-1]), gradients


def _reshaped(targets: Any, predictions: Any) -> Any:
    """Returns the targets in the shape of the predictions, but for a last dimension of 1."""
    ranks = targets.shape.rank, predictions.shape.rank
    if ranks == (1, 2) and predictions.shape[1] == 1:
        targets = targets[:, None]
    elif ranks == (2, 1) and targets.shape[1] == 1:
        targets = targets[:, 0]
    if not targets.shape.is_compatible_with(predictions.shape):
        raise ValueError(
            f"Expected targets for the examples of the predictions, of shape "
            f"{predictions.shape[1:]} each, got others, of shape {targets.shape[1:]} each."
        )
    return targets
