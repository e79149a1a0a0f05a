"""Keras losses: one loss for every row, and which of them are losses of a linear model.

A run that hides its iterates takes the slopes and the constants of a loss from the one table,
`hidden_state_accountants.losses.linear`; its values are Keras' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import LossGeometry, UnsupportedRunError
from hidden_state_accountants.losses import linear
from hidden_state_accountants.losses.linear import LinearLoss
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.gradients import check_loss, for_each_row
from hidden_state_adapters.tf_privacy.losses import (
    ENVELOPES,
    OF_ONE_OUTPUT,
    TENSORFLOW,
    EnvelopeSparseCategoricalCrossentropy,
)

LEAVE_OUT = (
    "Leave out loss_geometry= and feature_norm=: every step then counts, whatever the model and "
    "its loss."
)
DECLARE = (
    f"{LEAVE_OUT} Or declare the loss of one linear layer yourself, if you proved its constants: "
    "loss_geometry= takes a hidden_state_accountants.LossGeometry."
)
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
            raise UnsupportedRunError(
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
            targets: Targets of a batch.
            outputs: Outputs of the model, one tensor.

        Raises:
            UnsupportedRunError: The loss has not one row for each example.
        """
        if tf.nest.is_nested(outputs) or tf.nest.is_nested(targets) or targets is None:
            raise UnsupportedRunError(
                "Expected one tensor of targets and one of outputs, got "
                f"{_type(targets)} and {_type(outputs)}. Concatenate several outputs."
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


def _type(value: Any) -> str:
    return "none" if value is None else type(value).__name__


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

    Args:
        losses: Loss of the user.
        activation: Activation of the head: "linear", "softmax", "sigmoid", or another name.
        outputs: Number of outputs of the head.
        y: Targets of all examples.

    Raises:
        UnsupportedRunError: Its constants are not known, or do not hold for a target; the text says
            why.
    """
    loss, kind = losses.keras_loss, _kind(losses.keras_loss)
    is_sparse, is_envelope = kind in _SPARSE, kind in ENVELOPES
    if is_envelope:
        _check_activation(activation, "linear", kind.__name__)
        if outputs != 1 and kind in OF_ONE_OUTPUT:
            raise UnsupportedRunError(
                f"Expected one output for {kind.__name__}, got {outputs}. Use Dense(1)."
            )
        geometry = loss.geometry
    else:
        known = _linear_loss(loss, kind, activation, outputs)
        geometry = known.geometry
    targets = labels(y, outputs) if is_sparse else numbers(y, outputs)
    if is_envelope:  # its values tell which targets it is made for
        values = losses(targets, tf.zeros([len(targets), outputs]))
        _check_targets(targets, np.isfinite(values), f"what {kind.__name__} is made for")
    elif not is_sparse:
        is_fine = np.True_ if known.is_target is None else known.is_target(targets)
        _check_targets(targets, is_fine, known.wanted)

    def evaluate(targets: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if is_envelope:  # which finds both together
            values, (slopes,) = losses.with_slopes(targets, (predictions,), tf.identity)
            return values, slopes
        values = losses(targets, tf.keras.activations.get(activation)(predictions))
        rows = tf.one_hot(targets, outputs) if is_sparse else targets
        return values, known.slopes(predictions, tf.cast(rows, predictions.dtype))

    return HeadLoss(
        name=getattr(loss, "__name__", kind.__name__),
        evaluate=evaluate,
        geometry=geometry,
        targets=tf.constant(targets, tf.int64 if is_sparse else tf.keras.backend.floatx()),
    )


def _linear_loss(loss: Any, kind: type, activation: str, outputs: int) -> LinearLoss:
    """Returns slopes, constants and targets of a loss of Keras.

    Raises:
        UnsupportedRunError: They are not known.
    """
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
    smoothing, delta = options.get("label_smoothing", 0.0), options.get("delta", 1.0)
    if not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
        raise UnsupportedRunError(
            f"Expected a number label_smoothing between 0 and 1, got {smoothing!r}: smoothed "
            "targets are no probabilities then."
        )
    if not isinstance(delta, int | float) or not 0 < delta < math.inf:
        raise UnsupportedRunError(f"Expected a number delta > 0, got {delta!r}. {DECLARE}")
    if undone == "softmax":
        return linear.softmax(TENSORFLOW, outputs, smoothing=smoothing)
    if undone == "sigmoid":
        return linear.logistic(TENSORFLOW, outputs, smoothing=smoothing)
    if kind is _losses.LogCosh:
        return linear.log_cosh(TENSORFLOW, outputs)
    if kind is _losses.MeanSquaredError:
        return linear.residual(TENSORFLOW, outputs, scale=2.0)
    return linear.residual(TENSORFLOW, outputs, width=float(delta))


def _check_activation(activation: str, expected: str, name: str) -> None:
    if activation != expected:
        raise UnsupportedRunError(
            f"Expected a last layer with activation {expected!r} for {name}, got "
            f"{activation!r}: the loss has unknown constants then. Use Dense(...) without "
            f"activation, and from_logits=True where the loss has it. {DECLARE}"
        )


def labels(y: Any, classes: int) -> np.ndarray:
    """Returns labels as integers, shape (examples,).

    Raises:
        UnsupportedRunError: They are not labels of so many classes.
    """
    found = np.asarray(y, dtype=np.float64)
    found = found.reshape(len(found), -1)
    fits = (found >= 0) & (found < classes) & (found == np.round(found))
    if found.shape[1] != 1 or not fits.all():
        bad = found[~fits.all(axis=1)][:1].tolist() or f"rows of {found.shape[1]}"
        raise UnsupportedRunError(f"Expected labels from 0 to {classes - 1} as targets, got {bad}.")
    return found[:, 0].astype(np.int64)


def numbers(y: Any, outputs: int) -> np.ndarray:
    """Returns targets with one number for each output, float64; never broadcast.

    Raises:
        UnsupportedRunError: There are more or fewer.
    """
    found = np.asarray(y, dtype=np.float64)
    found = found.reshape(len(found), -1)
    if found.shape[1] != outputs:
        raise UnsupportedRunError(
            f"Expected {outputs} targets for each example, one for every output, got "
            f"{found.shape[1]}: targets must have the shape of the outputs that they are compared "
            "with."
        )
    return found


def _check_targets(targets: np.ndarray, is_fine: Any, wanted: str) -> None:
    fits = np.isfinite(targets.reshape(len(targets), -1)).all(axis=1) & is_fine
    if not fits.all():
        bad = int(np.argmin(fits))
        raise UnsupportedRunError(
            f"Expected {wanted} as targets, got {targets[bad].tolist()} for example {bad} of the "
            "data set: the constants of the loss do not hold for it."
        )
