r"""What a private step makes of noisy gradients: plain SGD, or any optimizer of Keras.

A rule says what the gradients of the examples are multiplied with before they are added up, what
the update is along, how the variables move, and what it keeps. `PrivateStep` does all the rest.
Here are

.. math:: x \leftarrow \Pi_R\, \mathrm{prox}_{\eta h}((1 - \eta w) x - \eta \tilde g)

and what an optimizer of Keras does along :math:`\tilde g`; DiceSGD is a rule around another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_accountants import Regulariser
from hidden_state_accountants.regulariser import ProxOperations, group_axes
from hidden_state_accountants.runs.run import SLACK
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.refusals import refusal

_PLAIN: Mapping[str, Any] = {
    "momentum": 0.0,
    "nesterov": False,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
}
_PRECISIONS = (tf.float32, tf.float64)


def _group_norms(values: tf.Tensor, axis: int | None) -> tf.Tensor:
    axes = group_axes(len(values.shape), axis)
    wide = tf.cast(values, tf.float64)
    norms = tf.sqrt(tf.reduce_sum(tf.square(wide), axis=axes, keepdims=True))
    return tf.cast(norms, values.dtype)


TENSORFLOW_PROX = ProxOperations(maximum=tf.maximum, minimum=tf.minimum, group_norms=_group_norms)
"""What `Regulariser.prox` computes with on tensors."""


class PlainSGD:
    """SGD with decoupled decay, proximal map and projection.

    Attributes:
        decay: w.

    Args:
        rate: Gives the learning rate of the next update.
        count: Notes an update, if it is told that it was made; by default nobody has to.
        decay: w.
        prox: h, or None.
        radius: R, or None for no projection.
    """

    def __init__(
        self,
        rate: Callable[[], Any],
        count: Callable[[tf.Tensor], None] = lambda fine: None,
        *,
        decay: float = 0.0,
        prox: Regulariser | None = None,
        radius: float | None = None,
    ):
        self.rate, self.count, self.decay = rate, count, decay
        self._prox, self._radius = prox, radius

    def factors(self, norms: tf.Tensor, clip: float, dtype: Any) -> list[tf.Tensor]:
        """What the gradient of each example is multiplied with, for each sum that is wanted.

        Args:
            norms: Of the gradients, float64.
            clip: C.
            dtype: Of the gradients.
        """
        bound = tf.constant(clip, tf.float64)
        return [bound / tf.maximum(norms, bound)]

    def direction(self, noisy: list[Any], rests: Sequence[Any], divisor: Any) -> tuple[Any, Any]:
        """What the update is along, and what `finish` is given.

        Args:
            noisy: The noisy mean of the clipped gradients.
            rests: The other sums.
            divisor: Of the mean, float64.
        """
        return noisy, None

    def problem(self, steps: tf.Tensor) -> tf.Tensor:
        """An int64 `Problem` of the step after so many, 0 if the rule knows of none."""
        return tf.zeros([], tf.int64)

    def move(
        self, variables: Sequence[Any], gradients: Sequence[Any], rate: Any, fine: tf.Tensor
    ) -> None:
        """Moves the variables if the step is taken."""
        for gradient, variable in zip(gradients, variables, strict=True):
            step, old = tf.cast(rate, gradient.dtype), variable.read_value()
            # tf.cast of the decay would go through float32.
            kept = old * (1 - step * tf.constant(self.decay, old.dtype)) if self.decay else old
            new = kept - step * gradient
            if self._prox is not None:
                new = self._prox.prox(new, step, TENSORFLOW_PROX)
            # tf.where and not a factor 0: a refused gradient may hold NaN.
            variable.assign(tf.where(fine, new, old))

    def finish(self, variables: Sequence[Any], kept: Any, fine: tf.Tensor) -> None:
        """What follows when all variables have moved; nothing of a refused step.

        Args:
            variables: All that are trained.
            kept: What `direction` gave.
            fine: Whether the step is taken.
        """
        self.count(fine)
        if self._radius is not None:
            project(variables, self._radius, fine)


def project(variables: Sequence[Any], radius: float, is_fine: tf.Tensor) -> None:
    """Projects the variables together on the ball around 0, unless the step was refused.

    The radius is lowered by two units of rounding, so that the result lies inside the ball.

    Args:
        variables: What is projected, in place.
        radius: Of the ball.
        is_fine: Whether the step is taken.
    """
    eps = max(float(np.finfo(v.dtype.as_numpy_dtype).eps) for v in variables)
    norm = joint_norm(variables)
    factor = tf.minimum(tf.constant(1.0, tf.float64), radius * (1 - 2 * eps) / norm)
    factor = tf.where(is_fine, factor, tf.ones_like(factor))
    for variable in variables:
        variable.assign(variable.read_value() * tf.cast(factor, variable.dtype.base_dtype))


def check_within(variables: Sequence[Any], radius: float | None) -> None:
    """Refuses initial variables outside of the ball; None is no ball.

    Raises:
        UnsupportedRunError: They are.
    """
    if radius is None:
        return
    norm = float(joint_norm(variables))
    if not norm <= radius * (1 + SLACK):
        raise refusal(
            f"Expected initial variables within projection_radius = {radius:g} of 0, got norm "
            f"{norm:g}. Initialise smaller, or raise the radius."
        )


def joint_norm(parts: Sequence[Any]) -> tf.Tensor:
    """The L2 norm of all parts as one vector, in float64 (0-dim), without over- or underflow."""
    doubles = [tf.cast(part, tf.float64) for part in parts]
    unit = tf.ones([], tf.float64)  # squares of float32 numbers are within float64
    if any(part.dtype.base_dtype == tf.float64 for part in parts):
        largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(part)) for part in doubles]))
        unit = tf.where(largest > 0, largest, tf.ones_like(largest))
        doubles = [part / unit for part in doubles]
    return unit * tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(part)) for part in doubles]))


class AnyOptimizer(PlainSGD):
    """An optimizer of Keras along the noisy gradients, which counts its updates itself.

    Args:
        rate: As for `PlainSGD`.
        apply: Updates variables along gradients.
    """

    def __init__(self, rate: Callable[[], Any], apply: Callable[[Any, Any], Any]):
        super().__init__(rate)
        self._apply = apply

    def move(
        self, variables: Sequence[Any], gradients: Sequence[Any], rate: Any, fine: tf.Tensor
    ) -> None:
        """As for `PlainSGD`."""

        def update() -> tf.Tensor:
            self._apply(gradients, variables)
            return tf.constant(True)

        tf.cond(fine, update, lambda: tf.constant(False))


def refuse_noise(optimizer: Any) -> None:
    """Raises UnsupportedRunError if an optimizer would clip and add noise a second time."""
    kinds = type(optimizer).__mro__
    is_theirs = any(kind.__module__.startswith("tensorflow_privacy.") for kind in kinds)
    if hasattr(optimizer, "for_model"):
        what = f"{type(optimizer).__name__} within another rule, or after compile"
        remedy = "Pass it to compile alone; or "
    elif is_theirs or hasattr(optimizer, "_dp_sum_query"):
        what = f"one of TensorFlow Privacy, {type(optimizer).__name__}"
        remedy = (
            "Pass CyclicDPKerasSGDOptimizer(...) with the same arguments, which leaves both to the "
            "model; or "
        )
    else:
        return
    raise refusal(
        f"Expected an optimizer without noise in compile, got {what}: the model clips and adds the "
        f"noise itself, and noise would be added twice. {remedy}tf.keras.optimizers.SGD(...), "
        "within DiceUpdate(...) or BlockCoordinateUpdate(...) for those, and l2_norm_clip and "
        "noise_multiplier to the model."
    )


class Update:
    """What an optimizer of Keras makes of noisy gradients.

    Plain SGD is done here, by the rule of the event; all else is Keras'. An optimizer with noise of
    this package says in `plain_update` how Keras moves along gradients that have it, and in
    `is_private_sgd` whether that is SGD.

    Args:
        optimizer: The compiled one.
        variables: Those that are trained.

    Raises:
        UnsupportedRunError: It scales losses.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]):
        if not keras_api.is_optimizer(optimizer):
            raise refusal(
                f"Expected an optimizer of Keras in compile, got {type(optimizer).__name__}."
            )
        if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
            raise refusal(
                "Expected a full-precision policy, got loss scaling (mixed_float16): clip and "
                "noise would act on the scaled gradient. Train in float32 or float64."
            )
        if getattr(optimizer, "loss_scale_factor", None) is not None:
            raise refusal(
                f"Expected loss_scale_factor = None, got {optimizer.loss_scale_factor}: the "
                "optimizer would divide the noisy gradients by it, of losses that were not scaled. "
                "Leave it out."
            )
        self.optimizer = optimizer
        keras_api.build_optimizer(optimizer, variables)
        self.options = self._options()
        is_sgd = keras_api.is_sgd(optimizer) or getattr(optimizer, "is_private_sgd", False)
        self.is_plain_sgd = is_sgd and self.why_not_plain == ""
        state = keras_api.state_of(optimizer)
        self.slots = [v for v in state if v.dtype.base_dtype in _PRECISIONS]

    def _options(self) -> dict[str, Any]:
        own = self.optimizer
        options = {name: getattr(own, name, None) for name in _PLAIN}
        options["use_ema"] = getattr(own, "use_ema", False)
        options["weight_decay"] = getattr(own, "weight_decay", None)
        return {**options, **keras_api.update_options(own)}

    @property
    def why_not_plain(self) -> str:
        """The first option that makes it another rule than plain SGD, or ""."""
        for name, value in self.options.items():
            neutral = _PLAIN.get(name)
            if name == "weight_decay" or value == neutral or not value:
                continue
            return f"{name} = {value!r}"
        return ""

    @property
    def name(self) -> str:
        """The optimizer in a few words."""
        name = getattr(self.optimizer, "update_rule", type(self.optimizer).__name__)
        return f"{name} with {self.why_not_plain}" if self.why_not_plain else name

    @property
    def given_rate(self) -> Any:
        """The learning rate as it was given: a number (a variable), a schedule, or a function."""
        return keras_api.given_rate(self.optimizer)

    @property
    def weight_decay(self) -> float:
        """Decoupled, of plain SGD; 0 for none."""
        return float(self.options["weight_decay"] or 0.0)

    @property
    def iterations(self) -> Any:
        """The count of Keras."""
        return keras_api.iterations_of(self.optimizer)

    def rate(self) -> tf.Tensor:
        """The learning rate of the next update."""
        return keras_api.rate_of(self.optimizer)

    def check_options(self) -> None:
        """Raises UnsupportedRunError if an option was changed since the run began."""
        for name, value in self._options().items():
            if value != self.options[name]:
                raise refusal(
                    f"Expected {name} = {self.options[name]!r}, as when the run began, got "
                    f"{value!r}: the event has one update rule. Compile again for another run."
                )

    def rule(self, prox: Regulariser | None = None, radius: float | None = None) -> PlainSGD:
        """What a step makes of noisy gradients; proximal map and projection need plain SGD."""
        if not self.is_plain_sgd:
            apply = functools.partial(keras_api.apply_gradients, self.optimizer)
            return AnyOptimizer(self.rate, getattr(self.optimizer, "plain_update", apply))
        return PlainSGD(self.rate, self.count, decay=self.weight_decay, prox=prox, radius=radius)

    def count(self, fine: tf.Tensor) -> None:
        """Notes an update, if it was made."""
        self.iterations.assign_add(tf.cast(fine, self.iterations.dtype))
        keras_api.note_update(self.optimizer)
