r"""Sums of clipped per-example gradients: from the layers where they are linear, or row by row.

The gradient of one example for the kernel of a linear layer is an outer product
:math:`x_i d_i^T` of what goes into the layer and of the gradient of its loss by what comes out. So
its length is :math:`|x_i|\,|d_i|`, and the sum of all, each times a factor, a product of matrices.
One backward pass gives the :math:`d_i` of all layers. (Goodfellow 2015, arXiv:1510.01799v2.)
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.rowwise import takes_examples_alone

Losses = Callable[[Any, Any], tf.Tensor]
"""Function of targets and outputs that gives one loss for each example."""

_PRECISIONS = (tf.float32, tf.float64)
# Of TensorFlow, where products are broken, and since when they are mended.
_FINE, _MENDED = (2, 15), (2, 22)
_LONGEST_BLOCK = 256  # entries


def squared_lengths(rows: tf.Tensor) -> tf.Tensor:
    """Returns the squared L2 norm of every row of shape (rows, ...), float64, shape (rows,).

    Squares are added up in the precision of the rows within blocks of at most 256 entries, which
    is as fast as it gets, and in float64 across them, so that no long sum is too small.
    """
    entries = rows.shape[1:].num_elements()
    count, block = -1, 1  # where the shape is not known
    if entries is not None:
        block = max(size for size in range(1, _LONGEST_BLOCK + 1) if entries % size == 0)
        count = entries // block  # -1 is none where there are no rows
    blocks = tf.reshape(rows, [tf.shape(rows)[0], count, block])
    return tf.reduce_sum(tf.cast(tf.reduce_sum(tf.square(blocks), 2), tf.float64), 1)


def sum_of_rows(rows: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Returns the sum of rows, each times its factor of shape (rows,), in their precision."""
    return tf.tensordot(tf.cast(factors, rows.dtype), rows, 1)


@attrs.frozen(eq=False)
class ExampleGradients:
    """Gradients of one batch before anything is clipped.

    Attributes:
        outputs: Outputs of the model; None of losses that an optimizer was given.
        losses: Losses of shape (rows,).
        norms: Norms of the gradient of every example, for all variables together; float64, shape
            (rows,).
        weighted_sum: Function of float64 factors of shape (rows,) that gives for every variable the
            sum over the examples of factor times gradient. A factor of 0 leaves an example out even
            if its gradient is not finite.
    """

    outputs: Any
    losses: tf.Tensor
    norms: tf.Tensor
    weighted_sum: Callable[[tf.Tensor], list[tf.Tensor]]


def of_rows(
    gradients: Sequence[tf.Tensor],
    losses: tf.Tensor,
    outputs: tf.Tensor | None = None,
    *,
    has_padding: bool,
) -> ExampleGradients:
    """Returns those of gradients that are all there, each with an axis of examples first.

    Only with `has_padding` rows with a factor of 0 are left out though they are not finite; XLA
    writes all rows anew for it.
    """
    lengths = [squared_lengths(gradient) for gradient in gradients]
    squares = tf.add_n(lengths)

    def weighted_sum(factors: tf.Tensor) -> list[tf.Tensor]:
        return [
            sum_of_rows(_left_out(rows, length, factors) if has_padding else rows, factors)
            for rows, length in zip(gradients, lengths, strict=True)
        ]

    return ExampleGradients(outputs, losses, tf.sqrt(squares), weighted_sum)


def times(found: ExampleGradients, weights: tf.Tensor) -> ExampleGradients:
    """Returns the same of losses times weights, which are those of the gradients as well."""
    return attrs.evolve(
        found,
        losses=found.losses * tf.cast(weights, found.losses.dtype),
        norms=found.norms * weights,
        weighted_sum=lambda factors: found.weighted_sum(factors * weights),
    )


def for_each_row(of_row: Callable[[Any], Any], rows: Any) -> Any:
    """Returns what a function gives for every row alone, by TensorFlow's `vectorized_map`."""
    try:
        return tf.vectorized_map(of_row, rows)
    except (TypeError, ValueError) as error:
        stacks = [one.__traceback__ for one in (error, error.__context__) if one is not None]
        frames = [frame for stack in stacks for frame in traceback.extract_tb(stack)]
        # AutoGraph may have raised the error again, without them.
        if not any(frame.filename.endswith("parallel_for/pfor.py") for frame in frames):
            raise
        raise UnsupportedRunError(
            "Expected a loss and a model that TensorFlow can vectorize, got one that it cannot "
            f"({error!s:.200}): every example is differentiated by itself, and vectorized_map "
            "does not take the gradients of tf.map_fn, tf.scan and tf.cond, among others. Write "
            "the loss or the layer with operations on whole tensors (tf.where for tf.cond)."
        ) from error


def check_loss(
    loss: Any,
    num_microbatches: int | None,
    *,
    may_be_empty: bool = False,
    may_have_axes: bool = False,
) -> Any:
    """Returns the loss if it has one entry per example, as far as can be seen here.

    Args:
        loss: Loss of a batch.
        num_microbatches: Number that was declared.
        may_be_empty: True if a batch may have no rows.
        may_have_axes: True if a row may have several entries, of which TensorFlow Privacy takes
            the mean: its rows are known not to depend on each other.
    """
    loss = tf.convert_to_tensor(loss)
    if loss.dtype not in _PRECISIONS:
        raise UnsupportedRunError(
            f"Expected a loss in float32 or float64, got {loss.dtype.name}. Train without mixed "
            "precision."
        )
    if loss.shape.rank is None:
        raise UnsupportedRunError(
            "Expected a loss of known rank with one entry per example, got one of unknown rank. "
            "Give it a shape with tf.ensure_shape."
        )
    if loss.shape.rank == 0:
        raise UnsupportedRunError(
            "Expected a loss with one entry per example, got a scalar: the examples were averaged "
            'before their gradients could be clipped. Use reduction="none" in the loss, and no '
            "kernel_regularizer or add_loss (weight_decay is outside the clip)."
        )
    if not may_have_axes and _may_be_broadcast(loss.shape):
        raise UnsupportedRunError(
            "Expected a loss of shape (examples,), one entry for each, got "
            f"{tuple(loss.shape[1:])} for each: targets of shape (b,) beside outputs of shape "
            "(b, 1) are broadcast to (b, b), and every entry depends on all examples. Give targets "
            "and outputs the same shape. If a row holds the losses of one example, take their "
            "mean, tf.reduce_mean(loss, axis=-1), as TensorFlow Privacy would."
        )
    rows = loss.shape[0]
    if rows == 0 and not may_be_empty:
        raise UnsupportedRunError("Expected at least one example in a batch, got none.")
    if None not in (rows, num_microbatches) and rows != num_microbatches:
        raise UnsupportedRunError(
            "Expected num_microbatches = None, or one for each example of the batch, got "
            f"{num_microbatches}. Microbatches of several examples double the sensitivity; leave "
            "num_microbatches out."
        )
    return loss


def _may_be_broadcast(shape: tf.TensorShape) -> bool:
    """Returns whether a second axis may be one of examples: as long as the first, or unknown."""
    return any(size != 1 and (None in (size, shape[0]) or size == shape[0]) for size in shape[1:])


class RowByRow:
    """Gradients of every example alone, for any model, each computed from a batch of one."""

    name = "row by row"
    training = True  # the mode of the model

    def __init__(self, model: Any, losses: Losses, variables: Sequence[Any]):
        self._model, self._losses, self._variables = model, losses, list(variables)
        _refuse_what_is_not_vectorized(model)
        _refuse_broken_products(model)
        _normalise_by_plain_operations(model)

    def gradients(self, examples: Any, targets: Any) -> ExampleGradients:
        """Returns those of a batch of at least one row."""
        gradients, losses, outputs = for_each_row(self.of_row, (examples, targets))
        return of_rows(gradients, losses, outputs, has_padding=True)

    def of_row(self, row: tuple[Any, Any]) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Returns gradients, loss and outputs of one example, without the axis of rows."""
        example, target = tf.nest.map_structure(lambda part: part[tf.newaxis], row)
        with tf.GradientTape() as tape:
            outputs = self._model(example, training=self.training)
            loss = self._losses(target, outputs)[0]
        refuse_added_losses(self._model)
        found = tape.gradient(loss, self._variables, unconnected_gradients="zero")
        return [tf.convert_to_tensor(g) for g in found], loss, outputs[0]


class ThroughLinearLayers:
    """Gradients of models whose trained variables are kernels and biases of `Dense` layers."""

    name = "from the linear layers"

    def __init__(self, model: Any, losses: Any, layers: Sequence[Any], variables: Sequence[Any]):
        self._model, self._losses, self._layers = model, losses, layers
        self._variables = list(variables)

    @classmethod
    def of(
        cls, model: Any, losses: Any, variables: Sequence[Any], examples: Any
    ) -> ThroughLinearLayers | None:
        """Returns it if the structure of the model tells that it gives the gradients, else None."""
        if not takes_examples_alone(model, examples):
            return None
        wanted = {v.ref() for v in variables}
        own = [
            (layer, {v.ref() for v in keras_api.trained(layer)})
            for layer in model._flatten_layers()
            if _is_linear(layer)
        ]
        layers = [layer for layer, refs in own if refs & wanted]
        if set().union(*(refs for _, refs in own if refs & wanted)) != wanted:
            return None
        found = cls(model, losses, layers, variables)
        return found if found._is_called_once(examples) else None

    def _is_called_once(self, examples: Any) -> bool:
        """Returns whether each layer is called with one row of features for every example."""

        def call(number: int) -> None:
            rows = tf.nest.map_structure(lambda part: tf.concat([part[:1]] * number, 0), examples)
            self._model(rows, training=False)

        # Keras 2 makes the graph of a Sequential model anew when it first sees another number.
        call(2)
        call(3)
        with tf.GradientTape() as tape, self._watched(tape) as calls:
            call(2)
        shapes = [features.shape for _, features, _ in calls]
        return self._are_all(calls) and all(len(shape) == 2 == shape[0] for shape in shapes)

    def _are_all(self, calls: Sequence[tuple[int, Any, Any]]) -> bool:
        return sorted(index for index, *_ in calls) == list(range(len(self._layers)))

    def gradients(self, examples: Any, targets: Any) -> ExampleGradients:
        """Returns those of a batch."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            with self._watched(tape) as calls:
                outputs = self._model(examples, training=True)
        refuse_added_losses(self._model)
        if not self._are_all(calls):
            raise UnsupportedRunError(
                "Expected every trained layer to be called once, as in the first batch, got "
                f"{len(calls)} calls of {len(self._layers)} layers."
            )
        logits = getattr(outputs, "_keras_logits", None)  # of Keras' softmax and sigmoid
        parts = (outputs,) if logits is None else (outputs, logits)
        losses, by_parts = self._losses.with_slopes(targets, parts, _joined)
        calls.sort(key=lambda call: call[0])
        slopes = tape.gradient(
            parts, [linear for *_, linear in calls], by_parts, unconnected_gradients="zero"
        )
        products = [
            Product(layer, features, at_least(features), slope)
            for layer, (_, features, _), slope in zip(self._layers, calls, slopes, strict=True)
        ]
        return of_products(products, outputs, losses, self._variables)

    @contextlib.contextmanager
    def _watched(self, tape: tf.GradientTape) -> Iterator[list[tuple[int, Any, Any]]]:
        """Collects of every call the place of the layer, what goes in, and the linear part."""
        calls: list[tuple[int, Any, Any]] = []

        def watched(index: int, layer: Any) -> Callable[[Any], Any]:
            def call(inputs: Any, **_: Any) -> Any:
                inputs = tf.cast(inputs, _kernel(layer).dtype.base_dtype)
                linear = tf.matmul(inputs, _kernel(layer))
                if layer.use_bias:
                    linear = tf.nn.bias_add(linear, keras_api.tensor_of(layer.bias))
                tape.watch(linear)
                calls.append((index, inputs, linear))
                return linear if layer.activation is None else layer.activation(linear)

            return call

        for index, layer in enumerate(self._layers):
            vars(layer)["call"] = watched(index, layer)  # past Keras' bookkeeping of attributes
        try:
            yield calls
        finally:
            for layer in self._layers:
                vars(layer).pop("call", None)


def _joined(outputs: Any, logits: tf.Tensor | None = None) -> Any:
    """Returns outputs that carry the logits, which Keras' losses take in their place."""
    if logits is None:
        return outputs
    joined = tf.identity(outputs)
    joined._keras_logits = logits
    return joined


@attrs.frozen(eq=False)
class Product:
    """Features and slopes of one linear layer for a batch.

    Attributes:
        layer: A `Dense` layer.
        features: Features that went in, of every example.
        lengths: Their squared lengths, as of `at_least`.
        slopes: Slopes of the losses by what came out of its linear part.
    """

    layer: Any
    features: tf.Tensor
    lengths: tf.Tensor
    slopes: tf.Tensor


def of_products(
    products: Sequence[Product],
    outputs: Any,
    losses: tf.Tensor,
    variables: Sequence[Any],
) -> ExampleGradients:
    """Returns those of layers whose gradient of one example is a product of features and slopes."""
    wanted = {variable.ref() for variable in variables}

    def parts(layer: Any) -> tuple[float, float]:
        bias = layer.use_bias and keras_api.tensor_of(layer.bias).ref() in wanted
        return float(_kernel(layer).ref() in wanted), float(bias)

    squares = []
    for product in products:
        has_kernel, has_bias = parts(product.layer)
        squares.append(at_least(product.slopes) * (product.lengths * has_kernel + has_bias))

    def weighted_sum(factors: tf.Tensor) -> list[tf.Tensor]:
        sums = {}
        for product in products:
            layer, slopes = product.layer, product.slopes
            kept = tf.cast(factors, slopes.dtype)[:, tf.newaxis]
            weighted = tf.math.multiply_no_nan(slopes, kept)  # 0 times NaN is 0
            features = _left_out(product.features, product.lengths, factors)
            sums[_kernel(layer).ref()] = tf.matmul(features, weighted, transpose_a=True)
            if layer.use_bias:
                sums[keras_api.tensor_of(layer.bias).ref()] = tf.reduce_sum(weighted, 0)
        return [sums[variable.ref()] for variable in variables]

    return ExampleGradients(outputs, losses, tf.sqrt(tf.add_n(squares)), weighted_sum)


def refuse_added_losses(model: Any) -> None:
    """Raises UnsupportedRunError if the pass that has just been made added losses."""
    if model.losses:
        raise UnsupportedRunError(
            "Expected no regularisation losses (kernel_regularizer, add_loss), got "
            f"{len(model.losses)} added in the forward pass: they are outside of the loss of an "
            "example. Drop them, or use the weight_decay of SGD."
        )


def _refuse_what_is_not_vectorized(model: Any) -> None:
    """Raises UnsupportedRunError for layers that vectorized_map cannot take."""
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras_api.layers.TextVectorization):
            raise UnsupportedRunError(
                f"Expected numbers as examples, got text for {layer.name}: vectorized_map, which "
                "clips every example by itself, cannot split strings. Call the layer before fit, "
                "x = layer(x), and make the model without it."
            )
        if isinstance(layer, tf.keras.layers.RNN) and layer.trainable_weights and not layer.unroll:
            raise UnsupportedRunError(
                f"Expected recurrent layers with unroll=True, got {layer.name} without: their "
                "steps are a loop of TensorFlow, whose gradients vectorized_map, which clips every "
                f"example by itself, cannot take. Pass {type(layer).__name__}(..., unroll=True), "
                "for sequences of a length that is known."
            )


def _normalise_by_plain_operations(model: Any) -> None:
    """Turns the fused operation of Keras 2's LayerNormalization off.

    vectorized_map takes every output of it for one that has a part for each example. Without oneDNN
    (on a GPU, and on a CPU with TF_ENABLE_ONEDNN_OPTS=0) one of them is a single number.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, tf.keras.layers.LayerNormalization):
            layer._fused = False


def _refuse_broken_products(model: Any) -> None:
    """Refuses layers whose products oneDNN reads beyond the end of a matrix for.

    In TensorFlow 2.21 on a CPU (not in 2.15; versions between count as 2.21) a product of rank 4 or
    more, one factor of which is the same for a part of the axes, may be made of whatever lies in
    memory behind this factor, the rows of other examples among it, and writes there as well
    (tensorflow#117700). Keras makes such ones of attention in a batch of one.
    """
    release = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if not _FINE < release < _MENDED or not _pywrap_util_port.IsMklEnabled():
        return
    for layer in model._flatten_layers(include_self=False):
        if any(kind in type(layer).__name__ for kind in ("Attention", "Einsum")):
            raise UnsupportedRunError(
                f"Expected a TensorFlow that multiplies every example with what belongs to it, got "
                f"{tf.__version__} with oneDNN, and {layer.name}, a layer with products of "
                "sequences: it reads beyond the end of a matrix there (tensorflow#117700). Set the "
                "environment variable TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported."
            )


def _kernel(layer: Any) -> Any:
    return keras_api.tensor_of(layer.kernel)


def _is_linear(layer: Any) -> bool:
    return (
        keras_api.is_plain_dense(layer)
        and layer.kernel.trainable
        and len(layer.trainable_weights) == 1 + bool(layer.use_bias)
    )


def at_least(rows: tf.Tensor) -> tf.Tensor:
    """Returns `squared_lengths` with what squares of small numbers lose, of factors of a norm.

    The other factor may be large, so that a length that is too small would not be clipped.
    """
    tiny = float(np.finfo(rows.dtype.as_numpy_dtype).tiny)
    return squared_lengths(rows) + tiny * tf.cast(tf.shape(rows)[-1], tf.float64)


def _left_out(rows: tf.Tensor, lengths: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Returns the rows, with 0 in those of factor 0 if any is not finite by its length."""

    def masked() -> tf.Tensor:
        is_kept = tf.reshape(tf.not_equal(factors, 0), [-1, *[1] * (rows.shape.rank - 1)])
        return tf.where(is_kept, rows, tf.zeros_like(rows))

    # To write all rows anew takes as long as what they are for.
    return tf.cond(tf.reduce_all(tf.math.is_finite(lengths)), lambda: rows, masked)
