r"""Rules by which a private step moves variables along noisy gradients.

That of plain SGD is

.. math:: x \leftarrow \Pi_R\, \mathrm{prox}_{\eta h}((1 - \eta w) x - \eta \tilde g),

that of another optimizer is what Keras does along :math:`\tilde g`; `Update` reads which of them an
optimizer has. DiceSGD is a rule around another one (dice.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import Regulariser, UnsupportedRunError
from hidden_state_accountants.regulariser import ProxOperations, group_axes
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.trained_part import PRECISIONS

INFINITE = np.float64(math.inf)
_PLAIN: Mapping[str, Any] = {
    "momentum": 0.0,
    "nesterov": False,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
}
MOVED = (
    "The trainable variables were changed outside the private optimizer, or other variables are "
    "trained than before, so the model is not the iterate that was accounted. Leave them alone "
    "during the run."
)
TOO_LONG = (
    "A per-example gradient is longer than loss_geometry.lipschitz, or gradient_bound: the loss is "
    "not the declared one (sum instead of mean? class weights? a scaled loss?), or the features "
    "are longer than declared."
)
NOT_FINITE = "A per-example gradient is not finite, or the error of DiceSGD."


@attrs.frozen
class StepEntry:
    """The last step of a run."""

    steps: int = 0  # taken so far
    rows: int = 0  # records of the batch
    learning_rate: float = 0.0
    largest_norm: float = 0.0  # of a gradient before the clip
    problem: str = ""  # why the step ends the run


def are_same(pairs: Iterable[tuple[Any, Any]]) -> tf.Tensor:
    """Returns whether values are equal bit by bit, pair by pair."""
    same = [tf.reduce_all(tf.equal(_bits(now), _bits(left))) for now, left in pairs]
    return tf.reduce_all(tf.stack(same))


def _bits(value: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(value)
    return tf.bitcast(tensor, tf.int32 if tensor.dtype == tf.float32 else tf.int64)


def copies(variables: Sequence[Any]) -> list[Any]:
    """Returns the variables of all replicas, in place of each that is mirrored."""
    mirrored = tf.distribute.DistributedValues
    return [copy for v in variables for copy in (v.values if isinstance(v, mirrored) else [v])]


def together(act: Callable[..., Any], sums: Any, largest: tf.Tensor, rows: tf.Tensor) -> Any:
    """Calls a function with what all replicas have found; without a strategy with what is given.

    Sums over the examples and rows are added up, of the longest gradient the largest is taken.
    Variables that the function assigns are assigned in all replicas.
    """
    if not tf.distribute.has_strategy():
        return act(sums, largest, rows)

    def merged(strategy: Any, sums: Any, largest: Any, rows: Any) -> Any:
        def total(part: Any) -> tf.Tensor:
            return tf.add_n(strategy.experimental_local_results(part))

        longest = tf.stack(strategy.experimental_local_results(largest))
        return act(tf.nest.map_structure(total, sums), tf.reduce_max(longest), total(rows))

    return tf.distribute.get_replica_context().merge_call(merged, args=(sums, largest, rows))


# Rules


def _group_norms(values: tf.Tensor, axis: int | None) -> tf.Tensor:
    axes = group_axes(len(values.shape), axis)
    wide = tf.cast(values, tf.float64)
    norms = tf.sqrt(tf.reduce_sum(tf.square(wide), axis=axes, keepdims=True))
    return tf.cast(norms, values.dtype)


TENSORFLOW_PROX = ProxOperations(maximum=tf.maximum, minimum=tf.minimum, group_norms=_group_norms)
"""What `Regulariser.prox` computes with on tensors."""


class PlainSGD:
    """SGD with decoupled decay, proximal map and projection."""

    def __init__(
        self, *, decay: float = 0.0, prox: Regulariser | None = None, radius: float | None = None
    ):
        self._decay, self._prox, self._radius = decay, prox, radius

    def factors(self, norms: tf.Tensor, clip: float, dtype: Any) -> list[tf.Tensor]:
        """Returns the factors of the gradients of all examples, for each sum."""
        bound = tf.constant(clip, tf.float64)
        return [bound / tf.maximum(norms, bound)]

    def private_state(self) -> dict[str, Any]:
        """Returns what it keeps as plain types that restore it. Secret."""
        return {}

    def resume(self, private: Mapping[str, Any]) -> None:
        """Stands where another one stood; ValueError if what that one returned is damaged."""

    def direction(self, noisy: list[Any], rests: Sequence[Any], divisor: Any) -> tuple[Any, Any]:
        """Returns the tensors to move along, and whether what the rule keeps is finite."""
        return noisy, tf.constant(True)

    def move(self, variables: Sequence[Any], along: Sequence[Any], rate: Any) -> None:
        """Moves the variables."""
        for gradient, variable in zip(along, variables, strict=True):
            step, new = tf.cast(rate, gradient.dtype), variable.read_value()
            if self._decay:  # tf.cast of the decay would go through float32
                new *= 1 - step * tf.constant(self._decay, new.dtype)
            new -= step * gradient
            if self._prox is not None:
                new = self._prox.prox(new, step, TENSORFLOW_PROX)
            variable.assign(new)
        if self._radius is not None:
            _project(variables, self._radius)


class AnyOptimizer(PlainSGD):
    """An optimizer of Keras along the noisy gradients, with its own learning rate and count."""

    def __init__(self, apply: Callable[[Any, Any], Any]):
        super().__init__()
        self._apply = apply

    def move(self, variables: Sequence[Any], along: Sequence[Any], rate: Any) -> None:
        """See `PlainSGD.move`."""
        self._apply(along, variables)


def _project(variables: Sequence[Any], radius: float) -> None:
    """Projects the variables together on the ball around 0, in place.

    The radius is lowered by two units of rounding, so that the result lies inside the ball.
    """
    eps = max(float(np.finfo(v.dtype.as_numpy_dtype).eps) for v in variables)
    norm = joint_norm(variables)
    factor = tf.minimum(tf.constant(1.0, tf.float64), radius * (1 - 2 * eps) / norm)
    for variable in variables:
        variable.assign(variable.read_value() * tf.cast(factor, variable.dtype.base_dtype))


def joint_norm(parts: Sequence[Any]) -> tf.Tensor:
    """Returns the L2 norm of all parts as one vector, in float64, without over- or underflow."""
    doubles = [tf.cast(part, tf.float64) for part in parts]
    unit = tf.ones([], tf.float64)  # squares of float32 numbers are within float64
    if any(part.dtype.base_dtype == tf.float64 for part in parts):
        largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(part)) for part in doubles]))
        unit = tf.where(largest > 0, largest, tf.ones_like(largest))
        doubles = [part / unit for part in doubles]
    return unit * tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(part)) for part in doubles]))


# Optimizers of Keras


class Update:
    """Update of an optimizer of Keras along noisy gradients: plain SGD is done here, else by Keras.

    An optimizer with noise of this package says in `plain_update` how Keras moves along gradients
    that have it, and in `is_private_sgd` whether that is SGD.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]):
        scales = isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
        if scales or not keras_api.is_optimizer(optimizer):
            raise UnsupportedRunError(
                "Expected an optimizer of Keras without loss scaling in compile, got "
                f"{type(optimizer).__name__}. Train in float32 or float64."
            )
        self.optimizer = optimizer
        keras_api.build_optimizer(optimizer, variables)
        self._options = _options(optimizer)
        self.why_not_plain = _not_neutral(self._options)
        is_sgd = keras_api.is_sgd(optimizer) or getattr(optimizer, "is_private_sgd", False)
        self.is_plain_sgd = is_sgd and not self.why_not_plain
        self.weight_decay = float(self._options["weight_decay"] or 0.0)
        self.iterations = keras_api.iterations_of(optimizer)
        state = keras_api.state_of(optimizer)
        self.slots = [v for v in state if v.dtype.base_dtype in PRECISIONS]

    @property
    def name(self) -> str:
        """The optimizer in a few words."""
        name = getattr(self.optimizer, "update_rule", type(self.optimizer).__name__)
        return f"{name} with {self.why_not_plain}" if self.why_not_plain else name

    @property
    def given_rate(self) -> Any:
        """The learning rate as it was given: a number (a variable), a schedule, or a function."""
        return keras_api.given_rate(self.optimizer)

    def rate(self) -> tf.Tensor:
        """Returns the learning rate of the next update."""
        return keras_api.rate_of(self.optimizer)

    def check_options(self) -> None:
        """Raises UnsupportedRunError if an option was changed since the run began."""
        for name, value in _options(self.optimizer).items():
            if value != self._options[name]:
                raise UnsupportedRunError(
                    f"Expected {name} = {self._options[name]!r}, as when the run began, got "
                    f"{value!r}: the event has one update rule. Compile again for another run."
                )

    def rule(self, prox: Regulariser | None = None, radius: float | None = None) -> PlainSGD:
        """Returns the rule of a step; proximal map and projection need plain SGD."""
        if not self.is_plain_sgd:
            apply = functools.partial(keras_api.apply_gradients, self.optimizer)
            return AnyOptimizer(getattr(self.optimizer, "plain_update", apply))
        return PlainSGD(decay=self.weight_decay, prox=prox, radius=radius)

    def count(self, steps: Any) -> None:
        """Notes so many updates, where Keras does not make them and counts them itself."""
        if self.is_plain_sgd:
            self.iterations.assign_add(tf.cast(steps, self.iterations.dtype))
            keras_api.note_update(self.optimizer)


def _options(optimizer: Any) -> dict[str, Any]:
    options = {name: getattr(optimizer, name, None) for name in _PLAIN}
    options["use_ema"] = getattr(optimizer, "use_ema", False)
    options["weight_decay"] = getattr(optimizer, "weight_decay", None)
    return {**options, **keras_api.update_options(optimizer)}


def _not_neutral(options: Mapping[str, Any]) -> str:
    """Returns the first option that makes an update another one than that of plain SGD, or ""."""
    for name, value in options.items():
        if value and name != "weight_decay" and value != _PLAIN.get(name):
            return f"{name} = {value!r}"
    return ""
