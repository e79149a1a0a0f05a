"""A linear head on fixed features: the one model whose hidden iterates a theorem covers.

The features of all examples are made once, before the first step, measured and held. A step reads
features, targets, kernel and bias, and nothing else of the user's program, so that nothing that
changes later in what comes before the head has an influence on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import LossGeometry, UnsupportedRunError
from hidden_state_accountants.runs.run import SLACK
from hidden_state_adapters.public_numbers import warn_of_longest
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.gradients import (
    ExampleGradients,
    at_least,
    linear_part,
    of_products,
    takes_examples_alone,
)
from hidden_state_adapters.tf_privacy.losses import (
    DECLARE,
    LEAVE_OUT,
    Evaluate,
    RowLosses,
    is_squared_error,
    known_loss,
)
from hidden_state_adapters.tf_privacy.settings import Declared

_SINGLY = (
    "the gradient of every example is that of a batch of this example alone: made row by row, or "
    "from slopes of the loss that were, where all layers are Keras' own and take every example by "
    "itself"
)
_IN_CLOSED_FORM = (
    "gradients in closed form, of kernel and bias of the head alone, from features that were made "
    "before the first step"
)
_BY_STRUCTURE = "by layers that are Keras' own and take every example by itself"
_MADE_TWICE = (
    "twice, the second time in other batches, drawn at random, and a few also alone and beside "
    "longer ones, with the same result"
)
_WHERE_HIDDEN = (
    "hidden iterates are accounted for one trained Dense layer on fixed features, with a loss of "
    "known constants. Other models, deep networks among them, gain nothing"
)
_NO_NORM = (
    "feature_norm=, a bound on the L2 norm of every example's features at the last layer, was not "
    "given: with it the loss is known, and the iterates before the last one are hidden"
)
_BLOCK = 256  # examples of a pass
_LONGER = 1000.0  # examples beside others, in a pass that the data do not have
_ALONE = 16  # examples whose features are made once more, by themselves
_CLOSE = 1e-4  # of features that were made in another batch
_ACTIVATIONS = {
    tf.keras.activations.linear: "linear",
    tf.keras.activations.softmax: "softmax",
    tf.keras.activations.sigmoid: "sigmoid",
}


class Head:
    """A `Dense` layer that is all there is to train in a model, and the last thing in it."""

    def __init__(self, model: Any):
        trained = {id(variable): variable.name for variable in keras_api.trained(model)}
        plain = filter(keras_api.is_plain_dense, model._flatten_layers())
        heads = [one for one in plain if set(trained) == set(map(id, keras_api.trained(one)))]
        if len(heads) != 1:
            raise UnsupportedRunError(
                "Expected a model in which one Dense layer is trained, and the rest frozen "
                "(layer.trainable = False), with feature_norm=, got trainable variables "
                f"{', '.join(sorted(trained.values()))}. {LEAVE_OUT}"
            )
        self._model, self.layer = model, heads[0]
        own = self.layer.activation
        self.activation = _ACTIVATIONS.get(own) or str(getattr(own, "__name__", repr(own)))

    def features(self, x: Any) -> tf.Tensor:
        """Returns the features of every example at the layer, shape (examples, entries).

        Raises:
            UnsupportedRunError: They are no fixed map of each example alone, or the model ends with
                something else than the layer.
        """
        number = int(tf.nest.flatten(x)[0].shape[0])

        def of(first: int, *, training: bool = False) -> tf.Tensor:
            rows = tf.nest.map_structure(lambda part: part[first : first + _BLOCK], x)
            return self._pass(rows, training=training)

        blocks = [of(first) for first in range(0, number, _BLOCK)]
        found = blocks[0] if len(blocks) == 1 else tf.concat(blocks, 0)
        if not _are_close(of(0, training=True), blocks[0]):
            raise UnsupportedRunError(
                "Expected features that are a fixed map of the examples, got other ones in "
                "training mode (Dropout or noise before the head?): their norm is not known. Call "
                f"these layers with training=False. {LEAVE_OUT}"
            )
        if not takes_examples_alone(self._model, x):
            self._check_alone(x, found)
        return found

    def _check_alone(self, x: Any, features: tf.Tensor) -> None:
        """Makes all features once more, in other batches, and those of a few examples alone.

        Batches that are drawn at random have nothing in common with those of before: an example
        that changes the features of its neighbours has other neighbours. Some have much longer
        ones than the data hold: a guard against long examples acts on none of these.
        """
        number = len(features)
        count = max(2, -(-number // _BLOCK))  # batches of one example, where there are two
        batches = np.array_split(np.random.default_rng().permutation(number), count)
        alone = np.linspace(0, number - 1, min(number, _ALONE)).astype(int)
        chosen = [(rows, len(rows)) for rows in [*batches, *alone[:, np.newaxis]] if len(rows)]
        for rows, own in [*chosen, (batches[0], len(batches[0]) // 2)]:
            some = tf.nest.map_structure(lambda part, rows=rows: tf.gather(part, rows), x)
            if own < len(rows):
                some = tf.nest.map_structure(lambda part, own=own: _lengthened(part, own), some)
            made = self._pass(some, training=False)[:own]
            if not _are_close(made, tf.gather(features, rows[:own])):
                raise UnsupportedRunError(
                    "Expected features of every example by itself, got other ones for examples in "
                    "another batch, beside longer ones, or alone: means, norms and ranks over the "
                    "batch before the head have to go. Clipping bounds nothing then."
                )

    def _pass(self, examples: Any, *, training: bool) -> tf.Tensor:
        """Returns what goes into the layer in one pass of the model."""
        calls: list[tuple[Any, Any]] = []
        call = self.layer.call

        def watched(features: Any, **mode: Any) -> Any:
            output = call(features, **mode)
            calls.append((features, output))
            return output

        vars(self.layer)["call"] = watched  # past Keras' bookkeeping of attributes
        try:
            output = self._model(examples, training=training)
        finally:
            del vars(self.layer)["call"]
        # Keras 2 also calls the layers of a Sequential model on symbols, for other numbers of rows.
        known = [call for call in calls if hasattr(call[0], "numpy")]
        if len(known) != 1 or known[0][1] is not output or known[0][0].ndim != 2:
            raise UnsupportedRunError(
                f"Expected the output of the model to be that of {self.layer.name} on features of "
                f"shape (examples, entries), got something else after {len(known)} calls of the "
                f"layer. End the model with it, outside of a tf.function. {LEAVE_OUT}"
            )
        return tf.cast(known[0][0], self.layer.kernel.dtype)


@attrs.frozen(eq=False)
class HeadRun:
    """Gradients of a head, from features and the slopes of the loss."""

    layer: Any
    features: tf.Tensor  # of all examples, shape (examples, entries)
    targets: Any  # of all examples, as `evaluate` wants them
    evaluate: Evaluate
    variables: Sequence[Any] = ()  # that the gradients are of

    @property
    def inputs(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Features and their squared lengths, which a step reads beside the targets."""
        return self.features, at_least(self.features)

    def gradients(self, inputs: tuple[Any, Any], targets: Any) -> ExampleGradients:
        """Returns those of a batch of `inputs`."""
        linear = linear_part(self.layer, inputs[0])
        losses, slopes = self.evaluate(targets, linear)
        outputs = linear if self.layer.activation is None else self.layer.activation(linear)
        return of_products([(self.layer, *inputs, slopes)], outputs, losses, self.variables)


@attrs.frozen
class Known:
    """Knowledge about the loss of a run before its first step."""

    declared: Declared  # that the run is accounted with
    head: HeadRun | None = None  # gradients, if the loss is known
    checked: str = _SINGLY  # of the gradients
    why_not: str = ""  # the loss is known, where it was neither declared nor of no use


def look_at(
    model: Any, losses: RowLosses, x: Any, y: Any, declared: Declared, *, is_of_use: bool
) -> Known:
    """Makes the features of a head run, and reads off what is known of its loss.

    `is_of_use` says whether a geometry that is not asked for would be of use: of plain SGD.
    """
    given, norm, keras_loss = declared.geometry, declared.feature_norm, losses.keras_loss
    is_of_use &= given is None and math.isinf(declared.gradient_bound)
    if norm is None:
        _check_squared_error(given, keras_loss, model, x)
        return Known(declared, why_not=_without_norm(model, losses, y) if is_of_use else "")
    if tf.nest.is_nested(y):
        raise UnsupportedRunError("Expected one array of targets beside feature_norm, got several.")
    head = Head(model)
    features = head.features(x)
    _check_norms(features, norm)
    _check_smoothness(given, keras_loss, head, features)
    if not declared.is_automatic and not is_of_use:
        return Known(declared)
    try:
        loss = known_loss(losses, head.activation, head.layer.units, y.numpy())
    except UnsupportedRunError as error:
        if declared.is_automatic:
            raise
        return Known(declared, why_not=str(error).removesuffix(DECLARE).strip(" ."))
    known = attrs.evolve(
        declared,
        loss_geometry=loss.geometry(norm, bool(head.layer.use_bias)),
        source=f"that of {loss.name} and one linear layer on features of norm at most {norm:g}, "
        "which every example of the data set has",
    )
    how = _BY_STRUCTURE if takes_examples_alone(model, x) else _MADE_TWICE
    run = HeadRun(head.layer, features, loss.targets, loss.evaluate)
    return Known(known, run, f"{_IN_CLOSED_FORM}, {how}")


def _without_norm(model: Any, losses: RowLosses, y: Any) -> str:
    """Returns why nothing is known of a loss where no bound on the features was given."""
    try:
        head = Head(model)
        known_loss(losses, head.activation, head.layer.units, y.numpy())
    except (UnsupportedRunError, AttributeError):  # several arrays of targets
        return _WHERE_HIDDEN
    return _NO_NORM


def _check_squared_error(given: LossGeometry | None, keras_loss: Any, model: Any, x: Any) -> None:
    """Checks a declared geometry of the squared error of a linear layer, if it is one."""
    if given is None or not is_squared_error(keras_loss):
        return
    try:
        head = Head(model)
        features = head.features(x)
    except UnsupportedRunError:
        return  # nothing is known of such a model
    _check_smoothness(given, keras_loss, head, features)


def _check_norms(features: tf.Tensor, feature_norm: float) -> None:
    """Raises UnsupportedRunError, which names the example, for features longer than their bound."""
    norms = np.linalg.norm(features.numpy().astype(np.float64), axis=1)
    warn_of_longest(norms, feature_norm)
    worst = int(np.argmax(np.where(np.isnan(norms), np.inf, norms)))
    if not norms[worst] <= feature_norm * (1 + SLACK):
        raise UnsupportedRunError(
            f"Expected features of norm at most feature_norm = {feature_norm:.8g} at the "
            f"linear layer, got {norms[worst]:.8g} for example {worst} of the data "
            "set. Scale every example down to the declared norm by itself."
        )


def _check_smoothness(
    declared: LossGeometry | None, keras_loss: Any, head: Head, features: tf.Tensor
) -> None:
    """Raises UnsupportedRunError if the squared error of the data exceeds a declared smoothness.

    No gradient shows it: the squared error has no Lipschitz constant that steps are compared with.
    """
    is_squared = is_squared_error(keras_loss) and head.activation == "linear"
    if declared is None or not is_squared or declared.exponent != 1:
        return
    square = float(tf.reduce_max(tf.reduce_sum(tf.square(tf.cast(features, tf.float64)), 1)))
    smoothness = 2 * (square + bool(head.layer.use_bias)) / head.layer.units
    if not smoothness <= declared.smoothness * (1 + 2 * SLACK):
        raise UnsupportedRunError(
            f"Expected loss_geometry with smoothness >= {smoothness:.6g}, the curvature of Keras' "
            f"MeanSquaredError at the longest features of the data, got {declared.smoothness:.6g}. "
            "Keras' loss has no factor 1/2: leave loss_geometry out, and pass feature_norm=."
        )


def _lengthened(part: tf.Tensor, own: int) -> tf.Tensor:
    """Returns rows of which those after `own` are much longer; whole numbers may be indices."""
    if not part.dtype.is_floating:
        return part
    factors = tf.where(tf.reduce_all(part == tf.round(part), axis=0), 1.0, _LONGER)
    return tf.concat([part[:own], tf.cast(factors, part.dtype) * part[own:]], 0)


def _are_close(found: tf.Tensor, expected: tf.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    length = np.abs(expected.numpy())
    room = _CLOSE * float(np.max(length, initial=0.0, where=np.isfinite(length)))
    return np.allclose(found, expected, rtol=0, atol=room, equal_nan=True)
