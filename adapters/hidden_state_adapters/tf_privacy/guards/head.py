"""The one linear layer that is trained, and the features that reach it from every example."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_accountants.runs.base import SLACK
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.geometry import DECLARE, LinearPrediction, LossRule
from hidden_state_adapters.tf_privacy.refusals import refusal

_ACTIVATIONS = {
    tf.keras.activations.linear: "linear",
    tf.keras.activations.softmax: "softmax",
    tf.keras.activations.sigmoid: "sigmoid",
}
_SOFTMAX_OPERATIONS = ("Softmax", "Sigmoid")


class LinearHead:
    """A `Dense` layer that is all there is to train in a model.

    What comes before it is frozen: a fixed public map of every example.

    Args:
        model: A Keras model or layer that is built.

    Raises:
        UnsupportedRunError: Something else is trained.
    """

    def __init__(self, model: Any):
        trained = {variable.ref() for variable in keras_api.trained(model)}
        heads = [
            layer
            for layer in model._flatten_layers()
            if keras_api.is_plain_dense(layer)
            and trained == {variable.ref() for variable in keras_api.trained(layer)}
        ]
        if len(heads) != 1:
            names = ", ".join(sorted(variable.name for variable in keras_api.trained(model)))
            raise refusal(
                'loss_geometry="auto" and feature_norm need a model in which one Dense layer is '
                "trained and the rest is frozen (layer.trainable = False), got trainable variables "
                f"{names}. {DECLARE}"
            )
        self._model, self._layer = model, heads[0]

    @property
    def has_bias(self) -> bool:
        """Whether a bias is trained as well."""
        return bool(self._layer.use_bias)

    def prediction(self, feature_norm: float) -> LinearPrediction:
        """What the layer makes of features of bounded norm.

        Raises:
            UnsupportedRunError: Its activation is none of linear, softmax and sigmoid.
        """
        activation = _ACTIVATIONS.get(self._layer.activation)
        if activation is None:
            name = getattr(self._layer.activation, "__name__", repr(self._layer.activation))
            raise refusal(
                'loss_geometry="auto" needs a Dense layer without activation, got '
                f"{self._layer.name} with {name}: its predictions are not linear. {DECLARE}"
            )
        return LinearPrediction(
            feature_norm=feature_norm,
            bias=self.has_bias,
            outputs=int(self._layer.units),
            activation=activation,
        )

    def check_examples(
        self, batches: Iterable[tuple[Any, Any]], feature_norm: float, rule: LossRule | None
    ) -> None:
        """Looks at the features, and the targets, of every example of the data set.

        Args:
            batches: Pairs of examples and targets, in order.
            feature_norm: What the L2 norm of the features may be.
            rule: Of the loss; None if the targets do not matter.

        Raises:
            UnsupportedRunError: Features are longer, or they are not what the layer makes a
                prediction of; or the constants of the loss do not hold for a target.
        """
        first = 0
        for norms, targets in self._measured(batches):
            worst = int(np.argmax(np.where(np.isnan(norms), np.inf, norms)))
            if not norms[worst] <= feature_norm * (1 + SLACK):
                raise refusal(
                    f"Expected features of norm at most feature_norm = {feature_norm:.8g} at the "
                    f"linear layer, got {norms[worst]:.8g} for example {first + worst} of the data "
                    "set. Scale every example down to the declared norm by itself, or declare a "
                    "larger one."
                )
            if rule is not None:
                _check_targets(targets, rule, first)
            first += len(norms)

    def largest_norm(self, batches: Iterable[tuple[Any, Any]]) -> float:
        """Of the features of all examples; errors as `check_examples`."""
        return max(float(np.max(norms)) for norms, _ in self._measured(batches))

    def _measured(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[np.ndarray, Any]]:
        """For every batch the L2 norms of its features, shape (rows,), and its targets."""
        for index, (examples, targets) in enumerate(batches):
            features = self.features(examples)
            if not index and not np.array_equal(features, self.features(examples)):
                raise refusal(
                    "Expected features that are a fixed map of the examples, got other ones from "
                    "the same examples in training mode (Dropout or noise before the head?): their "
                    "norm is not known. Call these layers with training=False, or leave them out. "
                    f"{DECLARE}"
                )
            yield np.linalg.norm(features.astype(np.float64), axis=1), targets

    def features(self, examples: Any) -> np.ndarray:
        """What the layer gets of a batch in a training pass, shape (rows, entries).

        Raises:
            UnsupportedRunError: They are not what the layer makes a prediction of.
        """
        with self._watched() as calls:
            output = self._model(examples, training=True)
        if len(calls) != 1 or calls[0][1] is not output:
            raise refusal(
                f"Expected the output of the model to be that of {self._layer.name}, got something "
                f"else after {len(calls)} calls of the layer: the loss is then not the one of a "
                f"linear prediction. End the model with this layer. {DECLARE}"
            )
        features = calls[0][0]
        if not tf.is_tensor(features) or not hasattr(features, "numpy") or features.ndim != 2:
            raise refusal(
                f"Expected features of shape (examples, entries) at {self._layer.name}, got "
                f"{features!r}: several rows of an example are not one linear prediction, and the "
                "features of a model whose call is a tf.function cannot be measured. Flatten "
                f"them, or leave tf.function to the loop. {DECLARE}"
            )
        return features.numpy()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[tuple[Any, Any]]]:
        """Collects what goes into the layer and comes out of it."""
        calls: list[tuple[Any, Any]] = []
        call = self._layer.call

        def watched(features: Any, **mode: Any) -> Any:
            output = call(features, **mode)
            calls.append((features, output))
            return output

        vars(self._layer)["call"] = watched  # past Keras' bookkeeping of attributes
        try:
            yield calls
        finally:
            del vars(self._layer)["call"]


def gives_logits(output: Any) -> bool:
    """Whether Keras computes a cross-entropy from what went into this softmax or sigmoid.

    Otherwise it clips the probabilities, and the loss of a probability below 1e-7 has no gradient.
    (`_get_logits` in keras/src/backend.py, TensorFlow 2.15.)

    Args:
        output: Of a model, in the mode in which it is trained.
    """
    if hasattr(output, "_keras_logits"):
        return True
    is_symbolic = tf.is_tensor(output) and not hasattr(output, "numpy")
    return is_symbolic and output.op.type in _SOFTMAX_OPERATIONS


def _check_targets(targets: Any, rule: LossRule, first: int) -> None:
    rows = np.asarray(targets)
    rows = rows.reshape(len(rows), -1)
    bad = np.flatnonzero(~rule.targets(rows))
    if len(bad):
        raise refusal(
            f"Expected {rule.wanted} as targets, got {rows[bad[0]].tolist()} for example "
            f"{first + bad[0]} of the data set: the constants of the loss do not hold for it."
        )
