"""A network with auxiliary variables, whose weights DP-MBCD trains one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hidden_state_accountants import validate

_FEWEST_WIDTHS = 2


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class AuxiliaryNetwork(tf.keras.Model):  # type: ignore[misc]
    r"""Dense layers without bias and ReLU, trained through auxiliary variables of every example.

    Activations :math:`x_{d+1}` and pre-activations :math:`u_d` of an example are variables of their
    own, tied to the network by squares:

    .. math::
        F(W, x, u) = \tfrac12 |W_D x_D - y|^2 + \tfrac{\gamma}{2} \sum_{d < D}
        \Big( |x_{d+1} - \mathrm{relu}(u_d)|^2 + |u_d - W_d x_d|^2 \Big)

    ``model(inputs)`` predicts: :math:`x_{d+1} = \mathrm{relu}(W_d x_d)`, shortened to `radius`.
    `lagrangian` starts there, sets :math:`x_D, \dots, x_1` and then every :math:`u_d` to the
    minimiser of F in it, `sweeps` times, shortens every x, and returns F of every example (without
    the first square of the sum, which has no weights). Its gradient in a layer sees that layer's
    square only. Nothing of an example is kept. Every layer is a block::

        model = AuxiliaryNetwork([64, 32, 10])
        optimizer = BlockCoordinateKerasOptimizer(0.5, 4.0, learning_rate=0.5)
        for x, y in cyclic_dataset(features, one_hot, batch_size=100):
            optimizer.minimize(lambda: model.lagrangian(x, y), model.blocks)
        print(optimizer.report(1e-5, dataset_size=len(features)))

    Formal guarantees: none by itself. What one example does to a layer's update is bounded by the
    clip of the optimizer, and every layer is a mechanism of its own: epsilon is that of composition
    (docs/block_coordinate.md). The paper's bound S_g = gamma rho^2 on the gradients is not used: it
    does not hold, because nothing bounds u_d - W_d x_d.

    Args:
        widths: Numbers of inputs, of the units of every hidden layer, and of outputs; at least two.
        radius: rho > 0; longer x are shortened to it. inf shortens none.
        penalty: gamma > 0.
        sweeps: How often the auxiliary variables are minimised, one after the other; >= 1.
        **kwargs: Of tf.keras.Model.

    Raises:
        TypeError, ValueError: An argument has an impossible value.

    Source: Chen & Liu 2025 (arXiv 2407.08233), Problem (4) and Algorithm 4; (10) is Lemma 13 of
        Zeng et al. 2019 (arXiv 1803.00225). The variables start at the forward pass of every step,
        where the paper keeps them from epoch to epoch.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        radius: float = 1.0,
        penalty: float = 1.0,
        sweeps: int = 1,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        sizes = [validate.integer("widths", width, minimum=1) for width in widths]
        if len(sizes) < _FEWEST_WIDTHS:
            raise ValueError(
                f"Expected widths of inputs and outputs at least, got {widths!r}. Write for "
                "example [64, 32, 10]."
            )
        self.widths = tuple(sizes)
        self.radius = validate.real("radius", radius, above=0, allow_inf=True)
        self.penalty = validate.magnitude("penalty", penalty, positive=True)
        self.sweeps = validate.integer("sweeps", sweeps, minimum=1)
        self._dense = [tf.keras.layers.Dense(n, use_bias=False) for n in sizes[1:]]
        for layer, size in zip(self._dense, sizes[:-1], strict=True):
            layer.build((None, size))
        self.built = True

    @property
    def blocks(self) -> list[list[Any]]:
        """The variables of every layer, for `BlockCoordinateKerasOptimizer.minimize`."""
        return [[layer.kernel] for layer in self._dense]

    def call(self, inputs: Any) -> tf.Tensor:
        """Predictions, shape (n, outputs)."""
        x = self._shortened(self._as_rows(inputs))
        for layer in self._dense[:-1]:
            x = self._shortened(tf.nn.relu(layer(x)))
        return self._dense[-1](x)

    def lagrangian(self, inputs: Any, targets: Any) -> tf.Tensor:
        """F of every example, shape (n,).

        Args:
            inputs: Shape (n, inputs), or any that flattens to it.
            targets: Shape (n, outputs).
        """
        targets = tf.cast(targets, self.compute_dtype)
        x, u = self._auxiliary(self._as_rows(inputs), targets)
        aims, weights = [*u, targets], [self.penalty] * len(u) + [1.0]
        parts = zip(self._dense, x, aims, weights, strict=True)
        return tf.add_n(
            [w / 2 * tf.reduce_sum((layer(v) - aim) ** 2, axis=1) for layer, v, aim, w in parts]
        )

    def _as_rows(self, inputs: Any) -> tf.Tensor:
        return tf.reshape(tf.cast(inputs, self.compute_dtype), (-1, self.widths[0]))

    def _shortened(self, x: tf.Tensor) -> tf.Tensor:
        if self.radius == math.inf:
            return x
        norms = tf.norm(x, axis=1, keepdims=True)
        return x * (self.radius / tf.maximum(norms, self.radius))

    def _auxiliary(
        self, inputs: tf.Tensor, targets: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """x_0 to x_D and u_0 to u_{D-1} of every example, constants for the gradient."""
        kernels = [tf.stop_gradient(layer.kernel) for layer in self._dense]
        last = len(kernels) - 1
        x, u = [self._shortened(inputs)], []
        for kernel in kernels[:-1]:
            u.append(x[-1] @ kernel)
            x.append(self._shortened(tf.nn.relu(u[-1])))
        for _ in range(self.sweeps):
            for d in range(last, 0, -1):
                aim, ratio = (targets, 1 / self.penalty) if d == last else (u[d], 1.0)
                x[d] = self._shortened(_tied(kernels[d], aim, tf.nn.relu(u[d - 1]), ratio))
            for d in range(last):
                u[d] = _before_relu(x[d] @ kernels[d], x[d + 1])
        return [tf.stop_gradient(v) for v in x], [tf.stop_gradient(v) for v in u]

    def get_config(self) -> dict[str, Any]:
        """All arguments of the constructor as plain types; see Keras."""
        own = {"radius": self.radius, "penalty": self.penalty, "sweeps": self.sweeps}
        return {**super().get_config(), "widths": list(self.widths), **own}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> AuxiliaryNetwork:
        """Inverse of `get_config`; see Keras."""
        return cls(**config)


def _tied(kernel: tf.Tensor, aim: tf.Tensor, near: tf.Tensor, ratio: float) -> tf.Tensor:
    r"""The x with the least :math:`ratio |W x - aim|^2 + |x - near|^2`, row by row; (11)."""
    square = ratio * kernel @ tf.transpose(kernel)
    square += tf.eye(len(kernel), dtype=kernel.dtype)
    right = ratio * aim @ tf.transpose(kernel) + near
    return tf.transpose(tf.linalg.solve(square, tf.transpose(right)))


def _before_relu(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    r"""The u with the least :math:`(after - relu(u))^2 + (u - before)^2`, by number; (10)."""
    low, high = tf.minimum(before, 0.0), tf.maximum((before + after) / 2, 0.0)
    of_low = after**2 + (low - before) ** 2
    of_high = (after - high) ** 2 + (high - before) ** 2
    return tf.where(of_low <= of_high, low, high)
