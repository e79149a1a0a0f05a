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
from hidden_state_adapters.tf_privacy.trained_part import PRECISIONS, refuse_added_losses

# Of TensorFlow, where products are broken, and since when they are mended.
_FINE, _MENDED = (2, 15), (2, 22)
_LONGEST_BLOCK = 256  # entries


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


def times(found: ExampleGradients, weights: tf.Tensor) -> ExampleGradients:
    """Returns the gradients of losses times weights."""
    return attrs.evolve(
        found,
        losses=found.losses * tf.cast(weights, found.losses.dtype),
        norms=found.norms * weights,
        weighted_sum=lambda factors: found.weighted_sum(factors * weights),
    )


# Row by row


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

    def weighted_sum(factors: tf.Tensor) -> list[tf.Tensor]:
        kept = [
            _left_out(rows, length, factors) if has_padding else rows
            for rows, length in zip(gradients, lengths, strict=True)
        ]
        return [tf.tensordot(tf.cast(factors, rows.dtype), rows, 1) for rows in kept]

    return ExampleGradients(outputs, losses, tf.sqrt(tf.add_n(lengths)), weighted_sum)


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
            f"({error!s:.200}): every example is differentiated by itself. Write the loss or the "
            "layer with operations on whole tensors (tf.where for tf.cond)."
        ) from error


def check_loss(
    loss: Any,
    num_microbatches: int | None,
    *,
    may_be_empty: bool = False,
    may_have_axes: bool = False,
) -> Any:
    """Returns the loss of a batch if it has one entry per example, as far as can be seen here.

    A row `may_have_axes`, of which TensorFlow Privacy takes the mean, where rows are known not to
    depend on each other.
    """
    loss = tf.convert_to_tensor(loss)
    rank, rows = loss.shape.rank, loss.shape[0] if loss.shape.rank else None
    if loss.dtype not in PRECISIONS:
        raise UnsupportedRunError(
            f"Expected a loss in float32 or float64, got {loss.dtype.name}. Train without mixed "
            "precision."
        )
    if not rank:
        raise UnsupportedRunError(
            "Expected a loss with one entry per example, got "
            f"{'a scalar' if rank == 0 else 'one of unknown rank'}: examples that were averaged "
            'cannot be clipped. Use reduction="none" in the loss, and no kernel_regularizer or '
            "add_loss."
        )
    # A second axis that is as long as the first, or unknown, may be one of examples.
    may_be_broadcast = any(n != 1 and (None in (n, rows) or n == rows) for n in loss.shape[1:])
    if may_be_broadcast and not may_have_axes:
        raise UnsupportedRunError(
            f"Expected a loss of shape (examples,), got {tuple(loss.shape[1:])} for each: targets "
            "of shape (b,) beside outputs of shape (b, 1) are broadcast to (b, b). Give both the "
            "same shape; or take the mean of each row."
        )
    if rows == 0 and not may_be_empty:
        raise UnsupportedRunError("Expected at least one example in a batch, got none.")
    if None not in (rows, num_microbatches) and rows != num_microbatches:
        raise UnsupportedRunError(
            "Expected num_microbatches = None, or one for each example of the batch, got "
            f"{num_microbatches}. Leave it out."
        )
    return loss


class RowByRow:
    """Gradients of every example alone, for any model, each computed from a batch of one."""

    training = True  # the mode of the model

    def __init__(self, model: Any, losses: Any, variables: Sequence[Any]):
        self._model, self._losses, self._variables = model, losses, list(variables)
        for layer in model._flatten_layers():
            _refuse_text_and_loops(layer)
            _refuse_broken_products(layer)
            if isinstance(layer, tf.keras.layers.LayerNormalization):
                # Without oneDNN one output of Keras 2's fused operation is a single number, where
                # vectorized_map expects a part for each example.
                layer._fused = False

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


def _refuse_text_and_loops(layer: Any) -> None:
    if isinstance(layer, keras_api.layers.TextVectorization):
        raise UnsupportedRunError(
            f"Expected numbers as examples, got text for {layer.name}, which TensorFlow cannot "
            "vectorize. Call the layer before fit, x = layer(x), and make the model without it."
        )
    if isinstance(layer, tf.keras.layers.RNN) and layer.trainable_weights and not layer.unroll:
        raise UnsupportedRunError(
            f"Expected recurrent layers with unroll=True, got {layer.name} without: TensorFlow "
            "cannot vectorize the gradients of a loop, and every example is clipped by itself. "
            f"Pass {type(layer).__name__}(..., unroll=True)."
        )


def _refuse_broken_products(layer: Any) -> None:
    """Refuses layers whose products oneDNN reads beyond the end of a matrix for.

    In TensorFlow 2.21 on a CPU (not in 2.15; versions between count as 2.21) a product of rank 4 or
    more, one factor of which is the same for a part of the axes, may be made of whatever lies in
    memory behind this factor, the rows of other examples among it (tensorflow#117700). Keras makes
    such ones of attention in a batch of one.
    """
    release = tuple(int(part) for part in tf.__version__.split(".")[:2])
    is_product = any(kind in type(layer).__name__ for kind in ("Attention", "Einsum"))
    if is_product and _FINE < release < _MENDED and _pywrap_util_port.IsMklEnabled():
        raise UnsupportedRunError(
            f"Expected right products of sequences, got TensorFlow {tf.__version__} with oneDNN "
            f"and {layer.name}: it reads beyond the end of a matrix (tensorflow#117700). Set "
            "TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported."
        )


# From linear layers


class ThroughLinearLayers:
    """Gradients of models whose trained variables are kernels and biases of `Dense` layers."""

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
        wanted = {id(variable) for variable in variables}
        layers, own = [], set[int]()
        for layer in filter(keras_api.is_plain_dense, model._flatten_layers()):
            ids = {id(variable) for variable in keras_api.trained(layer)}
            if ids & wanted and len(ids) == 1 + bool(layer.use_bias):
                layers.append(layer)
                own |= ids
        found = cls(model, losses, layers, variables)
        return found if own == wanted and found._is_called_once(examples) else None

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
        indices = sorted(index for index, *_ in calls)
        shapes = [features.shape for _, features, _ in calls]
        return indices == list(range(len(self._layers))) and all(
            len(shape) == 2 == shape[0] for shape in shapes
        )

    def gradients(self, examples: Any, targets: Any) -> ExampleGradients:
        """Returns those of a batch."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            with self._watched(tape) as calls:
                outputs = self._model(examples, training=True)
        refuse_added_losses(self._model)
        logits = getattr(outputs, "_keras_logits", None)  # of Keras' softmax and sigmoid
        parts = (outputs,) if logits is None else (outputs, logits)
        losses, by_parts = self._losses.with_slopes(targets, parts, _joined)
        calls.sort(key=lambda call: call[0])
        linear = [linear for *_, linear in calls]
        slopes = tape.gradient(parts, linear, by_parts, unconnected_gradients="zero")
        products = [
            (layer, features, at_least(features), slope)
            for layer, (_, features, _), slope in zip(self._layers, calls, slopes, strict=True)
        ]
        return of_products(products, outputs, losses, self._variables)

    @contextlib.contextmanager
    def _watched(self, tape: tf.GradientTape) -> Iterator[list[tuple[int, Any, Any]]]:
        """Collects of every call the place of the layer, what goes in, and the linear part."""
        calls: list[tuple[int, Any, Any]] = []

        def watched(index: int, layer: Any) -> Callable[[Any], Any]:
            def call(inputs: Any, **_: Any) -> Any:
                inputs = tf.cast(inputs, layer.kernel.dtype)
                linear = linear_part(layer, inputs)
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


def linear_part(layer: Any, features: Any) -> Any:
    """Returns what a `Dense` layer makes of features before its activation."""
    linear = tf.matmul(features, keras_api.tensor_of(layer.kernel))
    return tf.nn.bias_add(linear, keras_api.tensor_of(layer.bias)) if layer.use_bias else linear


def _joined(outputs: Any, logits: tf.Tensor | None = None) -> Any:
    """Returns outputs that carry the logits, which Keras' losses take in their place."""
    if logits is None:
        return outputs
    joined = tf.identity(outputs)
    joined._keras_logits = logits
    return joined


def of_products(
    products: Sequence[tuple[Any, tf.Tensor, tf.Tensor, tf.Tensor]],
    outputs: Any,
    losses: tf.Tensor,
    variables: Sequence[Any],
) -> ExampleGradients:
    """Returns those of layers whose gradient of one example is a product.

    Args:
        products: Tuples of a `Dense` layer, its features of every example, their squared lengths,
            as of `at_least`, and the slopes of the losses by its linear part.
        outputs: Outputs of the model.
        losses: Losses of shape (rows,).
        variables: Variables that the gradients are of.
    """
    wanted = {id(variable) for variable in variables}

    def own(layer: Any) -> tuple[int, int | None]:
        bias = id(keras_api.tensor_of(layer.bias)) if layer.use_bias else None
        return id(keras_api.tensor_of(layer.kernel)), bias

    squares = []
    for layer, _, lengths, slopes in products:
        has_kernel, has_bias = (float(one in wanted) for one in own(layer))
        squares.append(at_least(slopes) * (lengths * has_kernel + has_bias))

    def weighted_sum(factors: tf.Tensor) -> list[tf.Tensor]:
        sums = {}
        for layer, features, lengths, slopes in products:
            kernel, bias = own(layer)
            kept = tf.cast(factors, slopes.dtype)[:, tf.newaxis]
            weighted = tf.math.multiply_no_nan(slopes, kept)  # 0 times NaN is 0
            some = _left_out(features, lengths, factors)
            sums[kernel] = tf.matmul(some, weighted, transpose_a=True)
            if bias is not None:
                sums[bias] = tf.reduce_sum(weighted, 0)
        return [sums[id(variable)] for variable in variables]

    return ExampleGradients(outputs, losses, tf.sqrt(tf.add_n(squares)), weighted_sum)


# Models that take every example by itself, told by their structure

_ANY_SETTINGS = (
    "Dense", "Embedding", "Dropout", "GaussianNoise", "GaussianDropout", "ReLU", "LeakyReLU", "ELU",
    "Activation", "Flatten", "Rescaling", "Normalization", "Add", "Multiply", "Conv1D", "Conv2D",
    "DepthwiseConv2D", "SeparableConv2D", "ZeroPadding2D", "MaxPooling1D", "MaxPooling2D",
    "AveragePooling2D", "GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalMaxPooling1D",
    "GlobalMaxPooling2D",
)  # fmt: skip
# No tensor has the axis of the examples only, so that the last axis is never this one.
_SOME_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "InputLayer": lambda layer: len(layer.output.shape) > 1,
    "Reshape": lambda layer: len(layer.target_shape) > 0,
    "Softmax": lambda layer: layer.axis == -1,
    "Concatenate": lambda layer: layer.axis == -1 or layer.axis > 0,
    "BatchNormalization": lambda layer: not layer.trainable,  # by constants
}
_LAYERS: dict[Any, Callable[[Any], bool]] = {
    getattr(keras_api.layers, name): holds
    for name, holds in {**dict.fromkeys(_ANY_SETTINGS, lambda _: True), **_SOME_SETTINGS}.items()
}
_PRIVATE_MODELS = "hidden_state_adapters.tf_privacy.model"
# Entry by entry, or over the last axis.
_ACTIVATIONS = (
    *(
        getattr(tf.keras.activations, name)
        for name in ("linear", "relu", "sigmoid", "tanh", "softmax", "elu", "selu", "gelu",
                     "softplus", "softsign", "swish", "exponential", "hard_sigmoid")
    ),
    *(tf.nn.relu, tf.nn.tanh, tf.nn.elu, tf.nn.selu, tf.nn.gelu, tf.nn.leaky_relu, tf.nn.swish),
)  # fmt: skip


def takes_examples_alone(model: Any, examples: Any) -> bool:
    """Returns whether every output of a model depends on its own example only.

    It does in a `Sequential` or functional model of Keras' own layers, with settings that leave
    the axis of the examples alone. No values are looked at, so that it holds for every batch. A
    layer that is missing here costs time and nothing else.
    """
    return (
        all(len(part.shape) > 1 for part in tf.nest.flatten(examples))
        and not keras_api.has_other_operations(model)
        and all(map(_is_alone, model._flatten_layers()))
    )


def _is_alone(layer: Any) -> bool:
    if "call" in vars(layer):
        return False
    if isinstance(layer, tf.keras.Model):
        own = keras_api.is_of_keras(layer) or type(layer).__module__ == _PRIVATE_MODELS
        return own and isinstance(layer, (tf.keras.Sequential, keras_api.Functional))
    activation = getattr(layer, "activation", None)
    is_known = type(layer) in _LAYERS and _LAYERS[type(layer)](layer)
    return is_known and (activation is None or any(activation is one for one in _ACTIVATIONS))
