r"""DiceSGD: what the clip cuts off is kept, unseen, and fed back clipped again.

.. math::
    v = \frac1B \sum_i \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e, C_2), \quad
    e \leftarrow e + \frac1B \sum_i g_i - v

and the rule of an optimizer moves along v with noise. (ZBWH24, arXiv 2311.14632.)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_accountants.runs.algorithms import DiceSGD
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy.algorithm import Algorithm, UpdateRule
from hidden_state_adapters.tf_privacy.settings import Declared, Settings, check_scale
from hidden_state_adapters.tf_privacy.step import PlainSGD, Update, joint_norm

# An automatic clip takes a vector for 0 below this part of its length, so that the factor stays
# within float32.
_SHORTEST = 1e-30


def clip_factor(norm: tf.Tensor, bound: float, dtype: Any, *, automatic: bool) -> tf.Tensor:
    r"""Returns the factor of a vector of this length, in float64.

    .. math:: \min(1, C/|v|), \qquad \text{automatic: } C/|v|, \text{ and 0 at 0}

    An automatic clip takes a vector for 0 whose coordinates may have lost their precision `dtype`.
    The result is never longer than C.
    """
    # ZBWH24, Section 2.1 and Appendix C.4, arXiv 2311.14632
    length = tf.constant(bound, tf.float64)
    if not automatic:
        return length / tf.maximum(norm, length)
    tiny = float(np.finfo(dtype.as_numpy_dtype).tiny)
    shortest = max(1e8 * math.sqrt(tiny), bound * _SHORTEST)
    return tf.where(norm >= shortest, length / norm, tf.zeros_like(norm))


def _scaled(parts: Sequence[Any], factor: tf.Tensor) -> list[Any]:
    return [tf.cast(factor, part.dtype) * part for part in parts]


def _added(parts: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [a + b for a, b in zip(parts, others, strict=True)]


class DiceRule(PlainSGD):
    """A rule along the noisy v, and the error e, one variable like each that is trained.

    The error is data of the examples without noise: TensorFlow variables in a plain object, which
    Keras and tf.train.Checkpoint do not find, so that they are in no file.

    Args:
        inner: Rule that moves the variables.
        variables: Variables that are trained.
        error_clip: Clip norm C_2 of the error.
        automatic: True if both clips normalise.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 and 4.
    """

    def __init__(
        self, inner: PlainSGD, variables: Sequence[Any], *, error_clip: float, automatic: bool
    ):
        super().__init__()
        self._inner, self._clip, self._automatic = inner, error_clip, automatic
        with tf.init_scope():
            zeros = [tf.zeros(v.shape, v.dtype.base_dtype) for v in variables]
            self._errors = [tf.Variable(zero, trainable=False) for zero in zeros]
        self._next: list[Any] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedRunError(
            "The error of DiceSGD cannot be copied or pickled: it holds data of the examples "
            "without noise."
        )

    def factors(self, norms: tf.Tensor, clip: float, dtype: Any) -> list[tf.Tensor]:
        """Returns the factors of the clipped gradients, and of what the clip cuts off."""
        factors = clip_factor(norms, clip, dtype, automatic=self._automatic)
        # Not the difference of two sums: what is not clipped leaves exactly nothing.
        return [factors, 1 - factors]

    def direction(self, noisy: list[Any], rests: Sequence[Any], divisor: Any) -> tuple[Any, Any]:
        """Returns the noisy mean and the clipped error, and keeps the next error for `move`."""
        errors = [error.read_value() for error in self._errors]
        norm = joint_norm(errors)
        factor = clip_factor(norm, self._clip, errors[0].dtype, automatic=self._automatic)
        # ZBWH24, Algorithm 2, lines 5 to 7, arXiv 2311.14632:
        # e <- [e - clip(e, C2)] + (1/B) sum_i [g_i - clip(g_i, C1)]
        left, added = _scaled(errors, 1 - factor), _scaled(rests[0], 1 / divisor)
        self._next = _added(left, added)
        return _added(noisy, _scaled(errors, factor)), tf.math.is_finite(norm)

    def move(self, variables: Sequence[Any], along: Sequence[Any], rate: Any) -> None:
        """Moves the variables by the inner rule, and the error."""
        self._inner.move(variables, along, rate)
        for variable, error in zip(self._errors, self._next, strict=True):
            variable.assign(error)

    # How it goes on elsewhere

    def private_state(self) -> dict[str, Any]:
        """Returns the error as plain types that restore it. Secret."""
        parts = [tf.io.serialize_tensor(error).numpy() for error in self._errors]
        return {"error": [base64.b64encode(part).decode() for part in parts]}

    def resume(self, private: Mapping[str, Any]) -> None:
        """See `PlainSGD.resume`; nothing is changed if the error is of other variables."""
        try:
            given = [base64.b64decode(part) for part in private["error"]]
            errors = [
                tf.ensure_shape(tf.io.parse_tensor(part, error.dtype), error.shape)
                for part, error in zip(given, self._errors, strict=True)
            ]
        except (KeyError, TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(f"The private state is damaged, or of others: {error}") from error
        for variable, value in zip(self._errors, errors, strict=True):
            variable.assign(value)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class DiceUpdate(UpdateRule):
    r"""Compiles a `HiddenStateModel` with DiceSGD: what the clip cuts off is fed back, clipped.

        model.compile(DiceUpdate(tf.keras.optimizers.AdamW(0.01), error_l2_norm_clip=0.01), loss)

    With C_1 = `l2_norm_clip` and z = `noise_multiplier` of the model, and b examples in a batch on
    average, the optimizer takes a step along :math:`v_t + \mathcal{N}(0, (z C_1 / b)^2 I)`,

    .. math::
        v_t = \frac1b \sum_{i \in B_t} \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e_t, C_2), \quad
        e_{t+1} = e_t + \frac1b \sum_{i \in B_t} g_i - v_t, \quad e_0 = 0

    in any order of the batches.

    Formal guarantees:
      - Those of `DiceSgdDpEvent`: all iterates and all noisy updates count as released, so any
        optimizer, option and learning rate is covered, and releases cost nothing.
      - The error is in no file, configuration, copy or text; a saved model that is trained further
        is another run, with e = 0, and both are composed.
      - What the model checks of every step, and that the error is finite.

    Args:
        optimizer: Optimizer of Keras, or its name. It may have no noise of its own.
        error_l2_norm_clip: C_2 > 0, in units of the MEAN update; None is C_1, as the paper
            recommends. Without a bound on the gradients choose it far smaller.
        automatic: Normalise instead of clip: C v/|v|, and 0 at 0.
        gradient_bound: G, a bound on the norm of the gradient of EVERY example that could have been
            in the data, before the clip; those of the run are compared with it. `loss_geometry` of
            the model says it, too.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: From fit: a projection or `max_batch_size`, which the bound does not
            know, or both `loss_geometry` and `gradient_bound`.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2, 3 (Adam) and 4 (automatic).
    """

    takes_gradient_bound = True

    def __init__(
        self,
        optimizer: Any,
        *,
        error_l2_norm_clip: float | None = None,
        automatic: bool = False,
        gradient_bound: float = math.inf,
    ):
        super().__init__(optimizer)
        if error_l2_norm_clip is not None:
            validate.real("error_l2_norm_clip", error_l2_norm_clip, above=0)
            check_scale("error_l2_norm_clip", error_l2_norm_clip)
        if not isinstance(automatic, bool):
            raise TypeError(f"Expected automatic to be True or False, got {automatic!r}.")
        self.error_l2_norm_clip, self.automatic = error_l2_norm_clip, automatic
        self.gradient_bound = Declared(gradient_bound=gradient_bound).gradient_bound

    def get_config(self) -> dict[str, Any]:
        """See `UpdateRule.get_config`."""
        return {
            "error_l2_norm_clip": self.error_l2_norm_clip,
            "automatic": self.automatic,
            "gradient_bound": None if math.isinf(self.gradient_bound) else self.gradient_bound,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DiceUpdate:
        """See `UpdateRule.from_config`."""
        given = {**config, "gradient_bound": config["gradient_bound"] or math.inf}
        return cls(None, **given)

    def declared(self, settings: Settings) -> Declared:
        """See `UpdateRule.declared`."""
        return attrs.evolve(settings.declared, gradient_bound=self.gradient_bound)

    def check(self, settings: Settings, update: Update, plan: BatchPlan | None) -> None:
        """See `UpdateRule.check`."""
        for name, why in DiceSGD.unknown.items():
            if getattr(settings, name) is not None:
                raise UnsupportedRunError(
                    f"Expected {name} = None with DiceUpdate, got {getattr(settings, name)}: {why}."
                    " Leave it out."
                )

    def moves_by(self, settings: Settings, update: Update, variables: Sequence[Any]) -> DiceRule:
        """See `UpdateRule.moves_by`."""
        clip: Any = self.error_l2_norm_clip or settings.l2_norm_clip
        return DiceRule(update.rule(), variables, error_clip=clip, automatic=self.automatic)

    def described(self, steps: Algorithm, declared: Declared) -> DiceSGD:
        """See `UpdateRule.described`."""
        return DiceSGD(
            noise_multiplier=steps.noise_multiplier,
            clip_norm=steps.clip,
            error_clip_norm=self.error_l2_norm_clip or steps.clip,
            automatic=self.automatic,
            gradient_bound=declared.longest_gradient,
            source=declared.source,
        )
