r"""Keras losses: one loss for every row, which of them are losses of a linear model, and envelopes.

A run that hides its iterates takes the slopes and the constants of a loss from the one table,
`hidden_state_accountants.losses.linear`; its values are Keras' own.

Losses whose per-example gradient is bounded and smooth (no clip acts, and c = 1 - lr * decay) are
used like Keras' own with ``from_logits=True``. Each is the Huber envelope of the loss in its name,

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

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import LossGeometry, UnsupportedRunError, validate
from hidden_state_accountants.losses import envelope, linear, scalar
from hidden_state_accountants.losses.arrays import Arrays
from hidden_state_accountants.losses.linear import PROBABILITY_SLACK, LinearLoss
from hidden_state_accountants.losses.softmax import (
    NEWTON_STEPS,
    RESCUE_STEPS,
    SMALL_STEP,
    Point,
    SoftmaxEnvelope,
)
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.gradients import check_loss, for_each_row

_losses = keras_api.losses
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
    _names: ClassVar[tuple[str, ...]] = ("clip_norm", "smoothing")
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
        return {**super().get_config(), **self._settings}

    def geometry(self, feature_norm: float, bias: bool = False) -> LossGeometry:
        """Returns the loss of a linear model on features of at most this L2 norm."""
        return self._geometry(feature_norm, bias, **self._settings)

    @property
    def _settings(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self._names}

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the losses of a batch, shape (examples,)."""
        targets = tf.cast(tf.convert_to_tensor(y_true), tf.float64)

        @tf.custom_gradient
        def losses(predictions: Any) -> tuple[Any, Callable[[Any], Any]]:
            # A tape would follow every step of the solver, only to be told the gradients below.
            known = tf.cast(tf.stop_gradient(predictions), tf.float64)
            values, gradients = self._evaluate(known, targets)
            gradients = tf.cast(gradients, predictions.dtype)

            def backward(weights: Any) -> Any:
                missing = len(gradients.shape) - 1
                return tf.reshape(weights, [-1, *[1] * missing]) * gradients

            return tf.cast(values, predictions.dtype), backward

        return losses(tf.convert_to_tensor(y_pred))

    def _evaluate(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        """Returns values, shape (examples,), and gradients, of numbers in float64."""
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
        targets = _shaped_like(predictions, targets)
        sums = tf.reduce_sum(targets, axis=1, keepdims=True)
        are_fine = tf.reduce_all(targets >= 0, axis=1, keepdims=True)
        are_fine = are_fine & (tf.abs(sums - 1) <= PROBABILITY_SLACK)
        probabilities = tf.where(are_fine, targets / sums, math.nan)
        classes = int(predictions.shape[1])
        found: tuple[Any, Any] = _softmax_envelope(
            predictions, probabilities, classes, self.clip_norm, self.smoothing
        )
        return found


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class EnvelopeSparseCategoricalCrossentropy(EnvelopeCategoricalCrossentropy):
    """`EnvelopeCategoricalCrossentropy` called with classes, shape (examples,) or (examples, 1)."""

    def _evaluate(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        targets = _shaped_like(predictions[..., 0], targets)
        classes = tf.cast(targets, tf.int64)
        one_hot = tf.one_hot(classes, predictions.shape[-1], dtype=tf.float64)
        return super()._evaluate(predictions, one_hot)


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


class _OfNumbers(EnvelopeLoss):
    _loss: ClassVar[Callable[..., tuple[Any, Any]]]
    _is_target: ClassVar[Any]
    has_one_output: ClassVar[bool] = True

    def _evaluate(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        kind, rows = type(self), tf.shape(predictions)[0]
        if self.has_one_output and predictions.shape[1:] not in ([], [1]):
            raise ValueError(
                "Expected predictions of one output, shape (examples,) or (examples, 1), got "
                f"{predictions.shape[1:]} for each example."
            )
        targets = _shaped_like(predictions, targets)
        targets = tf.where(kind._is_target(targets), targets, math.nan)
        z, t = (tf.transpose(tf.reshape(part, [rows, -1])) for part in (predictions, targets))
        values, gradients = kind._loss(TENSORFLOW, z, t, **self._settings)
        return tf.reshape(values, [-1]), tf.reshape(tf.transpose(gradients), tf.shape(predictions))


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class EnvelopeBinaryCrossentropy(_OfNumbers):
    """The envelope of BinaryCrossentropy(from_logits=True) of one output.

    Called with targets in [0, 1] and logits, shape (examples,) or (examples, 1). Arguments and
    errors are those of `EnvelopeCategoricalCrossentropy`; from C = 1 on it never acts.
    """

    curvature = 0.25
    _geometry = LossGeometry.envelope_logistic
    _loss = scalar.logistic
    _is_target = staticmethod(lambda t: (t >= 0) & (t <= 1))


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class EnvelopeHinge(_OfNumbers):
    """The envelope of the hinge loss, max(0, 1 - target * prediction), of one output.

    Called with targets -1 or 1 and predictions, shape (examples,) or (examples, 1). Arguments and
    errors are those of `EnvelopeCategoricalCrossentropy`, with m > 0; from C = 1 on it never acts.
    """

    curvature = math.inf
    _geometry = LossGeometry.envelope_hinge
    _kink = "hinge"
    _loss = scalar.hinge
    _is_target = staticmethod(lambda t: tf.abs(t) == 1)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class EnvelopeSquaredError(_OfNumbers):
    """The envelope of (scale/2) |prediction - target|**2 of an example; any number of outputs.

    Called with targets and predictions, shape (examples,) or (examples, outputs). The squares of an
    example's outputs are added up (MeanSquaredError takes their mean), and the clip acts on the
    gradient in all of them. Arguments and errors are those of `EnvelopeCategoricalCrossentropy`.

    Args:
        scale: 1 for half the squared error; MeanSquaredError of one output has 2.
    """

    has_one_output = False
    _geometry = LossGeometry.envelope_squared_error
    _loss = scalar.squared_error
    _is_target = staticmethod(tf.math.is_finite)
    _names = ("clip_norm", "smoothing", "scale")

    def __init__(
        self,
        clip_norm: float,
        smoothing: float = 0.0,
        scale: float = 1.0,
        reduction: str = keras_api.DEFAULT_REDUCTION,
        name: str | None = None,
    ):
        super().__init__(clip_norm, smoothing, reduction, name)
        self.scale = self.curvature = validate.real("scale", scale, above=0)


ENVELOPES = (
    EnvelopeCategoricalCrossentropy,
    EnvelopeSparseCategoricalCrossentropy,
    EnvelopeSquaredError,
    EnvelopeBinaryCrossentropy,
    EnvelopeHinge,
)


def _shaped_like(predictions: Any, targets: Any) -> Any:
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


# What is known of a loss

LEAVE_OUT = "Leave out loss_geometry= and feature_norm=: every step then counts."
DECLARE = (
    f"{LEAVE_OUT} Or declare a hidden_state_accountants.LossGeometry, if you proved its constants."
)
Evaluate = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


class RowLosses:
    """The user's loss of every example, whatever reduction it has over a batch.

    A loss of one example with several entries is their mean, or their sum if that is the reduction,
    as Keras computes it for a batch of one.
    """

    def __init__(self, given: Any):
        if tf.nest.is_nested(given) and len(tf.nest.flatten(given)) == 1:
            (given,) = tf.nest.flatten(given)  # ["mse"]
        if given is None or tf.nest.is_nested(given):
            raise UnsupportedRunError(
                "Expected one loss for the one output of the model, got "
                f"{'none' if given is None else 'several'}: compile(loss=...) with a name, a "
                "function or an object of Keras. Several can be added up in one function."
            )
        loss = tf.keras.losses.get(given)
        self._sums = getattr(loss, "reduction", None) == "sum"
        if isinstance(loss, tf.keras.losses.Loss):
            loss = keras_api.without_reduction(loss)
        self.keras_loss = loss

    def __call__(self, targets: Any, outputs: Any) -> tf.Tensor:
        """Returns losses of shape (examples,)."""
        if tf.nest.is_nested(outputs) or tf.nest.is_nested(targets) or targets is None:
            kinds = [type(part).__name__ for part in (targets, outputs)]
            raise UnsupportedRunError(
                "Expected one tensor of targets and one of outputs, got "
                f"{' and '.join(kinds)}. Concatenate several outputs."
            )
        targets, outputs = tf.convert_to_tensor(targets), tf.convert_to_tensor(outputs)
        # As Keras' container of losses does it, so that targets are not broadcast.
        if targets.shape.rank == 1 and outputs.shape.rank == 2:
            targets = tf.expand_dims(targets, -1)
        for is_kind in ("is_floating", "is_integer"):
            if getattr(targets.dtype, is_kind) and getattr(outputs.dtype, is_kind):
                targets = tf.cast(targets, outputs.dtype)
        losses = check_loss(
            self.keras_loss(targets, outputs), None, may_be_empty=True, may_have_axes=True
        )
        axes = list(range(1, losses.shape.rank))
        return (tf.reduce_sum if self._sums else tf.reduce_mean)(losses, axes) if axes else losses

    def with_slopes(
        self, targets: Any, parts: tuple[tf.Tensor, ...], outputs_of: Callable[..., tf.Tensor]
    ) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        """Returns losses of shape (examples,) and slopes, each example from a batch of one.

        Args:
            targets: Targets of a batch.
            parts: Tensors that the slopes are by, each with an axis of the examples first.
            outputs_of: Function that gives the outputs of some examples from their parts.
        """

        def of(targets: Any, parts: Any, take: Any) -> tuple[Any, Any]:
            with tf.GradientTape() as tape:
                tape.watch(parts)
                values = take(self(targets, outputs_of(*parts)))
            return values, tape.gradient(values, parts, unconnected_gradients="zero")

        if type(self.keras_loss) in ENVELOPES:
            # They take every example by itself, in a loop that cannot be vectorized.
            return of(targets, parts, lambda values: values)

        def of_row(row: Any) -> tuple[Any, Any]:
            target, own = tf.nest.map_structure(lambda part: part[tf.newaxis], row)
            value, slopes = of(target, own, lambda values: values[0])
            return value, tuple(slope[0] for slope in slopes)

        found: tuple[Any, Any] = for_each_row(of_row, (targets, parts))
        return found


@attrs.frozen(eq=False)
class HeadLoss:
    """Loss of one example of a linear layer, whose constants are known.

    Attributes:
        name: Name of the loss.
        evaluate: Function that gives losses, shape (examples,), and their slopes by the linear
            predictions, of `targets` and predictions.
        geometry: Function that gives the constants in the parameters, of a bound on the norm of the
            features and whether a bias is trained.
        targets: Targets of all examples, checked.
    """

    name: str
    evaluate: Evaluate
    geometry: Callable[[float, bool], LossGeometry]
    targets: tf.Tensor


# By class: the function of Keras, and the activation of the head where from_logits is False.
_LINEAR: dict[Any, tuple[Any, str]] = {
    _losses.SparseCategoricalCrossentropy: (_losses.sparse_categorical_crossentropy, "softmax"),
    _losses.CategoricalCrossentropy: (_losses.categorical_crossentropy, "softmax"),
    _losses.BinaryCrossentropy: (_losses.binary_crossentropy, "sigmoid"),
    _losses.MeanSquaredError: (_losses.mean_squared_error, "linear"),
    _losses.Huber: (_losses.huber, "linear"),
    _losses.LogCosh: (_losses.log_cosh, "linear"),
}
_SPARSE = (_losses.SparseCategoricalCrossentropy, EnvelopeSparseCategoricalCrossentropy)
_NEUTRAL = {"axis": -1, "ignore_class": None}


def _kind(loss: Any) -> type:
    """Returns the class of a loss, or of the loss that a function of Keras computes."""
    return next((kind for kind, (function, _) in _LINEAR.items() if loss is function), type(loss))


def is_squared_error(loss: Any) -> bool:
    """Returns whether it is Keras' mean squared error."""
    return _kind(loss) is _losses.MeanSquaredError


def known_loss(losses: RowLosses, activation: str, outputs: int, y: Any) -> HeadLoss:
    """Returns what is known of a loss, and the targets that it is evaluated with.

    Raises:
        UnsupportedRunError: Constants are not known, or do not hold for a target.
    """
    loss, kind = losses.keras_loss, _kind(losses.keras_loss)
    if kind in ENVELOPES:
        return _known_envelope(losses, kind, activation, outputs, y)
    known, is_sparse = _linear_loss(loss, kind, activation, outputs), kind in _SPARSE
    targets = _targets_of(y, 1 if is_sparse else outputs)
    if is_sparse:
        are_fine = (targets >= 0) & (targets < outputs) & (targets == np.round(targets))
        _check_targets(targets, are_fine[:, 0], f"labels from 0 to {outputs - 1}")
        targets = targets[:, 0].astype(np.int64)
    else:
        are_fine = np.True_ if known.is_target is None else known.is_target(targets)
        _check_targets(targets, are_fine, known.wanted)
        targets = targets.astype(tf.keras.backend.floatx())

    def evaluate(targets: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = losses(targets, tf.keras.activations.get(activation)(predictions))
        rows = tf.one_hot(targets, outputs) if is_sparse else targets
        return values, known.slopes(predictions, tf.cast(rows, predictions.dtype))

    name = getattr(loss, "__name__", kind.__name__)
    return HeadLoss(name, evaluate, known.geometry, tf.constant(targets))


def _known_envelope(
    losses: RowLosses, kind: Any, activation: str, outputs: int, y: Any
) -> HeadLoss:
    _check_activation(activation, "linear", kind.__name__)
    if outputs != 1 and getattr(kind, "has_one_output", False):
        raise UnsupportedRunError(
            f"Expected one output for {kind.__name__}, got {outputs}. Use Dense(1)."
        )
    targets = _targets_of(y, 1 if kind in _SPARSE else outputs)
    values = losses(targets, tf.zeros([len(targets), outputs]))  # which tell what it is made for
    _check_targets(targets, np.isfinite(values), f"what {kind.__name__} is made for")

    def evaluate(targets: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values, (slopes,) = losses.with_slopes(targets, (predictions,), tf.identity)
        return values, slopes

    held = tf.constant(targets, tf.keras.backend.floatx())
    return HeadLoss(kind.__name__, evaluate, losses.keras_loss.geometry, held)


def _linear_loss(loss: Any, kind: type, activation: str, outputs: int) -> LinearLoss:
    """Returns slopes, constants and targets of a loss of Keras."""
    name = kind.__name__
    if kind not in _LINEAR:
        known = ", ".join(kind.__name__ for kind in _LINEAR)
        raise UnsupportedRunError(
            f"Expected one of the envelope losses of this package, or {known} of "
            f"Keras, got {getattr(loss, '__name__', name)}. {DECLARE}"
        )
    options, undone = keras_api.options_of(loss) if isinstance(loss, kind) else {}, _LINEAR[kind][1]
    for option, neutral in _NEUTRAL.items():
        if options.get(option, neutral) != neutral:
            raise UnsupportedRunError(
                f"Expected {option} = {neutral} in {name}, whose constants are known then, got "
                f"{options[option]!r}. {DECLARE}"
            )
    _check_activation(activation, "linear" if options.get("from_logits") else undone, name)
    smoothing = options.get("label_smoothing", 0.0)
    if not 0 <= smoothing <= 1:
        raise UnsupportedRunError(
            f"Expected label_smoothing from 0 to 1, got {smoothing!r}: smoothed targets are no "
            f"probabilities then, and gradients longer. {DECLARE}"
        )
    if undone == "softmax":
        return linear.softmax(TENSORFLOW, outputs, smoothing=smoothing)
    if undone == "sigmoid":
        return linear.logistic(TENSORFLOW, outputs, smoothing=smoothing)
    if kind is _losses.LogCosh:
        return linear.log_cosh(TENSORFLOW, outputs)
    if kind is _losses.MeanSquaredError:
        return linear.residual(TENSORFLOW, outputs, scale=2.0)
    return linear.residual(TENSORFLOW, outputs, width=float(options.get("delta", 1.0)))


def _check_activation(activation: str, expected: str, name: str) -> None:
    if activation != expected:
        raise UnsupportedRunError(
            f"Expected a last layer with activation {expected!r} for {name}, got "
            f"{activation!r}: the loss has unknown constants then. Use Dense(...) without "
            f"activation, and from_logits=True where the loss has it. {DECLARE}"
        )


def _targets_of(y: Any, number: int) -> np.ndarray:
    """Returns so many targets of each example, float64; never broadcast."""
    found = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
    if found.shape[1] != number:
        raise UnsupportedRunError(
            f"Expected {number} targets for each example, got {found.shape[1]}: they must have the "
            "shape of the outputs that they are compared with."
        )
    return found


def _check_targets(targets: np.ndarray, are_fine: Any, wanted: str) -> None:
    fits = np.isfinite(targets).all(axis=1) & are_fine
    if not fits.all():
        bad = int(np.argmin(fits))
        raise UnsupportedRunError(
            f"Expected {wanted} as targets, got {targets[bad].tolist()} for example {bad} of the "
            "data set: the constants of the loss do not hold for it."
        )
