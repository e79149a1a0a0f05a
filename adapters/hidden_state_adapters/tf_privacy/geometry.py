"""`loss_geometry="auto"`: what a linear layer and a loss of Keras say about the loss.

The constants are proven in docs/theory/moduli.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from hidden_state_accountants import LossGeometry
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.losses import ENVELOPES, OF_ONE_OUTPUT, EnvelopeLoss
from hidden_state_adapters.tf_privacy.refusals import refusal

DECLARE = (
    "Or declare the loss yourself: loss_geometry= takes a hidden_state_accountants.LossGeometry, "
    "for example LossGeometry.convex(smoothness)."
)
_PROBABILITY_SLACK = 1e-5  # rounding of a sum of probabilities
_losses = keras_api.losses

Targets = Callable[[np.ndarray], np.ndarray]


def _any_target(targets: np.ndarray) -> np.ndarray:
    return np.ones(len(targets), bool)


def _probabilities(targets: np.ndarray) -> np.ndarray:
    return np.all((targets >= 0) & (targets <= 1), axis=1)


def _probability_vectors(targets: np.ndarray) -> np.ndarray:
    off = np.abs(targets.sum(axis=1) - 1)
    return np.all(targets >= 0, axis=1) & (off <= _PROBABILITY_SLACK)


@attrs.frozen
class LinearPrediction:
    """What goes into the loss.

    Attributes:
        feature_norm: Bound on the L2 norm of the features of every example.
        bias: Whether a bias is trained as well.
        outputs: Number of predictions of an example.
        activation: "linear", "softmax" or "sigmoid".
    """

    feature_norm: float
    bias: bool
    outputs: int
    activation: str


@attrs.frozen
class LossRule:
    r"""What is known about a loss of Keras as a function of linear predictions.

    Attributes:
        activation: The one that it undoes if ``from_logits`` is False; "" if it takes the
            predictions as they are.
        targets: Tells for every row of targets, of shape (rows, entries), whether the constants
            hold for it.
        wanted: What `targets` asks for, in words.
        curvature: Largest second derivative of the loss of one prediction.
        slope: Largest derivative of it; None if there is none. Only the squared error has none,
            and its second derivative is the same everywhere.
    """

    activation: str = ""
    targets: Targets = _any_target
    wanted: str = "numbers"
    curvature: float = 1.0
    slope: float | None = None

    def geometry(self, prediction: LinearPrediction) -> LossGeometry:
        """Of the mean over the predictions of an example; of softmax, which joins them."""
        square = prediction.feature_norm**2 + prediction.bias
        if self.activation == "softmax":
            return LossGeometry.softmax_cross_entropy(prediction.feature_norm, prediction.bias)
        number = prediction.outputs
        smoothness = self.curvature * square / number
        lipschitz = None if self.slope is None else self.slope * math.sqrt(square / number)
        if number == 1:
            return LossGeometry.generalized_linear(smoothness, lipschitz)
        return LossGeometry.convex(smoothness, lipschitz)


@attrs.frozen
class EnvelopeRule(LossRule):
    """The rule of an envelope loss, which says itself what is known of it.

    A target that it is not made for gives a loss that is no number, and the step is refused.

    Attributes:
        loss: It takes predictions as they are.
    """

    loss: EnvelopeLoss = attrs.field(kw_only=True)

    def geometry(self, prediction: LinearPrediction) -> LossGeometry:
        """Of all predictions of an example.

        Raises:
            UnsupportedRunError: There are several, and the loss takes one.
        """
        if prediction.outputs != 1 and isinstance(self.loss, OF_ONE_OUTPUT):
            raise refusal(
                f"Expected one output for {type(self.loss).__name__}, got {prediction.outputs}. "
                "Use Dense(1)."
            )
        return self.loss.geometry(prediction.feature_norm, prediction.bias)


_SPARSE = LossRule("softmax")
_CATEGORICAL = LossRule("softmax", _probability_vectors, "vectors of probabilities")
_BINARY = LossRule("sigmoid", _probabilities, "probabilities", curvature=0.25, slope=1.0)
_SQUARED = LossRule(curvature=2.0)
_LOG_COSH = LossRule(slope=1.0)


def _huber(options: Mapping[str, Any]) -> LossRule:
    delta = options.get("delta", 1.0)
    if not isinstance(delta, int | float) or not 0 < delta < math.inf:
        raise refusal(f'loss_geometry="auto" needs a number delta > 0, got {delta!r}. {DECLARE}')
    return LossRule(slope=float(delta))


_RULES: dict[type, LossRule | Callable[[Mapping[str, Any]], LossRule]] = {
    _losses.SparseCategoricalCrossentropy: _SPARSE,
    _losses.CategoricalCrossentropy: _CATEGORICAL,
    _losses.BinaryCrossentropy: _BINARY,
    _losses.MeanSquaredError: _SQUARED,
    _losses.Huber: _huber,
    _losses.LogCosh: _LOG_COSH,
}
_OF_FUNCTIONS: dict[Any, type] = {
    _losses.sparse_categorical_crossentropy: _losses.SparseCategoricalCrossentropy,
    _losses.categorical_crossentropy: _losses.CategoricalCrossentropy,
    _losses.binary_crossentropy: _losses.BinaryCrossentropy,
    _losses.mean_squared_error: _losses.MeanSquaredError,
    _losses.huber: _losses.Huber,
    _losses.log_cosh: _losses.LogCosh,
}
_NEUTRAL = {"axis": -1, "ignore_class": None}


def rule_of(loss: Any) -> tuple[LossRule, Mapping[str, Any]]:
    """What is known about a loss of Keras or an envelope loss, and its options.

    Args:
        loss: An object with ``reduction="none"``, or a function of tf.keras.losses.

    Raises:
        UnsupportedRunError: Its constants are not known; the text says why.
    """
    kind: Any = _OF_FUNCTIONS.get(loss, type(loss))
    rule = _RULES.get(kind)
    if kind in ENVELOPES:
        rule = EnvelopeRule(slope=loss.clip_norm, loss=loss)
    if rule is None:
        known = ", ".join(kind.__name__ for kind in _RULES)
        name = getattr(loss, "__name__", type(loss).__name__)
        raise refusal(
            f'loss_geometry="auto" knows the envelope losses of this package, and {known} of '
            f"Keras, got {name}. {DECLARE}"
        )
    options = keras_api.options_of(loss) if type(loss) is kind else {"reduction": "none"}
    if options["reduction"] != keras_api.NO_REDUCTION:
        raise refusal(
            f'Expected {kind.__name__}(reduction="none"), got {options["reduction"]!r}: the '
            "examples are averaged before their gradients can be clipped. Pass the object with "
            'reduction="none".'
        )
    for option, neutral in _NEUTRAL.items():
        if options.get(option, neutral) != neutral:
            raise refusal(
                f'loss_geometry="auto" needs {option} = {neutral} in {kind.__name__}, got '
                f"{options[option]!r}. {DECLARE}"
            )
    smoothing = options.get("label_smoothing", 0.0)
    if not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
        raise refusal(
            f"Expected a number label_smoothing between 0 and 1, got {smoothing!r}: smoothed "
            "targets are no probabilities then."
        )
    return (rule if isinstance(rule, LossRule) else rule(options)), options


def loss_geometry(loss: Any, prediction: LinearPrediction) -> LossGeometry:
    """The loss of one example as a function of kernel and bias.

    Args:
        loss: As for `rule_of`.
        prediction: Of the linear layer.

    Raises:
        UnsupportedRunError: Its constants are not known.
    """
    rule, options = rule_of(loss)
    undone = "linear"
    if rule.activation and not options.get("from_logits", False):
        undone = rule.activation
    if prediction.activation != undone:
        logits = f", from_logits={options['from_logits']}" if "from_logits" in options else ""
        raise refusal(
            f'loss_geometry="auto" needs a last layer with activation {undone!r} for '
            f"{type(loss).__name__}{logits}, got {prediction.activation!r}: the loss has unknown "
            "constants then. Use Dense(...) without activation, and from_logits=True where the "
            f"loss has it. {DECLARE}"
        )
    return rule.geometry(prediction)
