"""Losses of a linear head: value, slope and constants of each, in one table.

A run that hides its iterates differentiates the loss itself, by the slopes that stand here, and is
accounted with the constants that stand beside them (proven in docs/theory/moduli.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import LossGeometry
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.gradients import check_loss
from hidden_state_adapters.tf_privacy.losses import ENVELOPES, OF_ONE_OUTPUT
from hidden_state_adapters.tf_privacy.refusals import refusal

LEAVE_OUT = (
    "Leave out loss_geometry= and feature_norm=: every step then counts, whatever the model and "
    "its loss."
)
DECLARE = (
    f"{LEAVE_OUT} Or declare the loss of one linear layer yourself, if you proved its constants: "
    "loss_geometry= takes a hidden_state_accountants.LossGeometry."
)
_PROBABILITY_SLACK = 1e-5  # rounding of a sum of probabilities
_losses = keras_api.losses

Evaluate = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


class RowLosses:
    """The user's loss of every example, whatever reduction it has over a batch.

    A loss of one example with several entries is their mean, or their sum if that is the reduction,
    as Keras computes it for a batch of one.

    Args:
        given: What the user passed as the loss.

    Raises:
        UnsupportedRunError: It is none, or there are several.
    """

    def __init__(self, given: Any):
        if tf.nest.is_nested(given) and len(tf.nest.flatten(given)) == 1:
            (given,) = tf.nest.flatten(given)  # ["mse"]
        if given is None or tf.nest.is_nested(given):
            what = "none" if given is None else "several"
            raise refusal(
                f"Expected one loss for the one output of the model, got {what}: "
                "compile(loss=...) with a name, a function or an object of Keras. (Several losses "
                "can be added up in one function of several outputs that are concatenated.)"
            )
        loss = tf.keras.losses.get(given)
        self._sums = getattr(loss, "reduction", None) == "sum"
        if isinstance(loss, tf.keras.losses.Loss):
            loss = keras_api.without_reduction(loss)
        self.keras_loss = loss

    def __call__(self, targets: Any, outputs: Any) -> tf.Tensor:
        """Losses of shape (examples,).

        Args:
            targets: Of a batch.
            outputs: Of the model, one tensor.

        Raises:
            UnsupportedRunError: The loss has not one row for each example.
        """
        if tf.nest.is_nested(outputs) or tf.nest.is_nested(targets) or targets is None:
            raise refusal(
                "Expected one tensor of targets and one of outputs, got "
                f"{_kind(targets)} and {_kind(outputs)}. Concatenate several outputs."
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

        found: tuple[Any, Any] = tf.vectorized_map(of_row, (targets, parts))
        return found


def _kind(value: Any) -> str:
    return "none" if value is None else type(value).__name__


@attrs.frozen(kw_only=True, eq=False)
class HeadLoss:
    """The loss of one example as a function of the linear predictions of a head.

    Attributes:
        name: Of the loss.
        evaluate: Of targets and predictions, shape (rows, outputs): the values, shape (rows,), and
            their slopes by the predictions.
        geometry: Of a bound on the norm of the features, and whether there is a bias.
        targets: Of all examples, as numbers of shape (rows, outputs).
    """

    name: str
    evaluate: Evaluate
    geometry: Callable[[float, bool], LossGeometry]
    targets: tf.Tensor


# Rows of the table


def _softmax(targets: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    values = tf.nn.softmax_cross_entropy_with_logits(targets, predictions)
    return values, tf.nn.softmax(predictions) - targets


def _mean(
    value: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    slope: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> Evaluate:
    """Of the mean over the predictions of an example of a loss of one prediction."""

    def evaluate(targets: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.reduce_mean(value(targets, predictions), 1)
        return values, slope(targets, predictions) / predictions.shape[1]

    return evaluate


_SIGMOID = _mean(
    lambda t, z: tf.nn.sigmoid_cross_entropy_with_logits(labels=t, logits=z),
    lambda t, z: tf.sigmoid(z) - t,
)
_SQUARED = _mean(lambda t, z: tf.square(z - t), lambda t, z: 2 * (z - t))
_LOG_COSH = _mean(
    lambda t, z: z - t + tf.math.softplus(-2 * (z - t)) - math.log(2),
    lambda t, z: tf.tanh(z - t),
)


def _huber(delta: float) -> Evaluate:
    def value(t: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
        inner = tf.clip_by_value(z - t, -delta, delta)
        return inner * (z - t) - tf.square(inner) / 2

    return _mean(value, lambda t, z: tf.clip_by_value(z - t, -delta, delta))


def _probabilities(targets: np.ndarray) -> np.ndarray:
    return np.all((targets >= 0) & (targets <= 1), axis=1)


def _vectors(targets: np.ndarray) -> np.ndarray:
    off = np.abs(targets.sum(axis=1) - 1)
    return np.all(targets >= 0, axis=1) & (off <= _PROBABILITY_SLACK)


@attrs.frozen
class _Row:
    """One loss of Keras.

    Attributes:
        kind: Its class.
        function: Its function.
        evaluate: Value and slope; of Huber's loss made of its delta.
        curvature: Largest second derivative of the loss of one prediction.
        slope: Largest derivative of it, likewise; None if there is none.
        activation: What the head may end with where from_logits is False.
        is_target: Tells for every row of targets whether the constants hold for it.
        wanted: What it asks for, in words.
    """

    kind: type
    function: Any
    evaluate: Any
    curvature: float = 1.0
    slope: float | None = None
    activation: str = ""
    is_target: Callable[[np.ndarray], np.ndarray] = lambda targets: np.isfinite(targets).all(axis=1)
    wanted: str = "finite numbers"

    def geometry(self, outputs: int, slope: float | None) -> Callable[[float, bool], LossGeometry]:
        """Of the mean over the predictions of an example; of softmax, which joins them."""
        if self.activation == "softmax":
            return LossGeometry.softmax_cross_entropy

        def of(feature_norm: float, bias: bool) -> LossGeometry:
            square = feature_norm**2 + bias
            smoothness = self.curvature * square / outputs
            lipschitz = None if slope is None else slope * math.sqrt(square / outputs)
            if outputs == 1:
                return LossGeometry.generalized_linear(smoothness, lipschitz)
            return LossGeometry.convex(smoothness, lipschitz)

        return of


_TABLE = (
    _Row(
        _losses.SparseCategoricalCrossentropy,
        _losses.sparse_categorical_crossentropy,
        _softmax,
        activation="softmax",
    ),
    _Row(
        _losses.CategoricalCrossentropy,
        _losses.categorical_crossentropy,
        _softmax,
        activation="softmax",
        is_target=_vectors,
        wanted="vectors of probabilities",
    ),
    _Row(
        _losses.BinaryCrossentropy,
        _losses.binary_crossentropy,
        _SIGMOID,
        curvature=0.25,
        slope=1.0,
        activation="sigmoid",
        is_target=_probabilities,
        wanted="probabilities",
    ),
    _Row(_losses.MeanSquaredError, _losses.mean_squared_error, _SQUARED, curvature=2.0),
    _Row(_losses.Huber, _losses.huber, _huber),
    _Row(_losses.LogCosh, _losses.log_cosh, _LOG_COSH, slope=1.0),
)
_NEUTRAL = {"axis": -1, "ignore_class": None}


def is_squared_error(loss: Any) -> bool:
    """Whether it is Keras' mean squared error."""
    return loss is _losses.mean_squared_error or type(loss) is _losses.MeanSquaredError


def known_loss(loss: Any, activation: str, outputs: int, y: Any) -> HeadLoss:
    """What the table says of a loss, and the targets that it is evaluated with.

    Args:
        loss: An object with ``reduction="none"``, or a function of tf.keras.losses.
        activation: Of the head: "linear", "softmax", "sigmoid", or another name.
        outputs: Of the head.
        y: The targets of all examples.

    Raises:
        UnsupportedRunError: Its constants are not known, or do not hold for a target; the text says
            why.
    """
    if type(loss) in ENVELOPES:
        return _envelope(loss, activation, outputs, y)
    row = next((r for r in _TABLE if loss is r.function or type(loss) is r.kind), None)
    if row is None:
        known = ", ".join(row.kind.__name__ for row in _TABLE)
        name = getattr(loss, "__name__", type(loss).__name__)
        raise refusal(
            f'loss_geometry="auto" knows the envelope losses of this package, and {known} of '
            f"Keras, got {name}. {DECLARE}"
        )
    options = {} if loss is row.function else keras_api.options_of(loss)
    name = row.kind.__name__
    for option, neutral in _NEUTRAL.items():
        if options.get(option, neutral) != neutral:
            raise refusal(
                f'loss_geometry="auto" needs {option} = {neutral} in {name}, got '
                f"{options[option]!r}. {DECLARE}"
            )
    logits = options.get("from_logits", False)
    _check_activation(activation, row.activation if row.activation and not logits else "", name)
    evaluate, slope = row.evaluate, row.slope
    if evaluate is _huber:
        delta = options.get("delta", 1.0)
        if not isinstance(delta, int | float) or not 0 < delta < math.inf:
            raise refusal(
                f'loss_geometry="auto" needs a number delta > 0, got {delta!r}. {DECLARE}'
            )
        evaluate, slope = _huber(float(delta)), float(delta)
    is_sparse = row.kind is _losses.SparseCategoricalCrossentropy
    targets = one_hot(y, outputs) if is_sparse else numbers(y, outputs)
    _check_targets(targets, row.is_target, row.wanted)
    smoothing = options.get("label_smoothing", 0.0)
    if not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
        raise refusal(
            f"Expected a number label_smoothing between 0 and 1, got {smoothing!r}: smoothed "
            "targets are no probabilities then."
        )
    classes = outputs if row.activation == "softmax" else 2
    return HeadLoss(
        name=getattr(loss, "__name__", name),
        evaluate=evaluate,
        geometry=row.geometry(outputs, slope),
        targets=_constant(
            targets * (1 - smoothing) + smoothing / classes if smoothing else targets
        ),
    )


def _envelope(loss: Any, activation: str, outputs: int, y: Any) -> HeadLoss:
    """The row of an envelope loss, which says itself what is known of it."""
    name = type(loss).__name__
    _check_activation(activation, "", name)
    if outputs != 1 and isinstance(loss, OF_ONE_OUTPUT):
        raise refusal(f"Expected one output for {name}, got {outputs}. Use Dense(1).")
    is_sparse = name == "EnvelopeSparseCategoricalCrossentropy"
    targets = one_hot(y, outputs) if is_sparse else numbers(y, outputs)

    def evaluate(targets: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        known = tf.cast(predictions, tf.float64)
        values, slopes = loss.of_numbers(known, tf.cast(targets, tf.float64))
        return tf.cast(values, predictions.dtype), tf.cast(slopes, predictions.dtype)

    values, _ = evaluate(tf.constant(targets), tf.zeros(targets.shape, tf.float64))
    _check_targets(targets, lambda _: np.isfinite(values.numpy()), f"what {name} is made for")
    return HeadLoss(
        name=name, evaluate=evaluate, geometry=loss.geometry, targets=_constant(targets)
    )


def _constant(targets: np.ndarray) -> tf.Tensor:
    return tf.constant(targets, tf.keras.backend.floatx())


def _check_activation(activation: str, undone: str, name: str) -> None:
    if activation == (undone or "linear"):
        return
    raise refusal(
        f'loss_geometry="auto" needs a last layer with activation {undone or "linear"!r} for '
        f"{name}, got {activation!r}: the loss has unknown constants then. Use Dense(...) without "
        f"activation, and from_logits=True where the loss has it. {DECLARE}"
    )


def one_hot(y: Any, classes: int) -> np.ndarray:
    """Labels as rows with one 1, float64.

    Raises:
        UnsupportedRunError: They are not labels of so many classes.
    """
    labels = np.asarray(y, dtype=np.float64)
    labels = labels.reshape(len(labels), -1)
    fits = (labels >= 0) & (labels < classes) & (labels == np.round(labels))
    if labels.shape[1] != 1 or not fits.all():
        bad = labels[~fits.all(axis=1)][:1].tolist() or f"rows of {labels.shape[1]}"
        raise refusal(f"Expected labels from 0 to {classes - 1} as targets, got {bad}.")
    return np.eye(classes)[labels[:, 0].astype(int)]


def numbers(y: Any, outputs: int) -> np.ndarray:
    """Targets with one number for each output, float64; never broadcast.

    Raises:
        UnsupportedRunError: There are more or fewer.
    """
    targets = np.asarray(y, dtype=np.float64)
    targets = targets.reshape(len(targets), -1)
    if targets.shape[1] != outputs:
        raise refusal(
            f"Expected {outputs} targets for each example, one for every output, got "
            f"{targets.shape[1]}: targets must have the shape of the outputs that they are "
            "compared with."
        )
    return targets


def _check_targets(
    targets: np.ndarray, is_target: Callable[[np.ndarray], np.ndarray], wanted: str
) -> None:
    bad = np.flatnonzero(~is_target(targets))
    if len(bad):
        raise refusal(
            f"Expected {wanted} as targets, got {targets[bad[0]].tolist()} for example {bad[0]} of "
            "the data set: the constants of the loss do not hold for it."
        )
