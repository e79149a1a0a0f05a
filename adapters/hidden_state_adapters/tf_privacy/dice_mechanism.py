"""The steps of DiceSGD for Keras: both sums of a batch, the noise, the error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from hidden_state_accountants import validate
from hidden_state_adapters.tf_privacy import optimizer_checks as checks
from hidden_state_adapters.tf_privacy.checked_optimizer import CheckedOptimizer, Gradients
from hidden_state_adapters.tf_privacy.dice_query import DiceSumQuery
from hidden_state_adapters.tf_privacy.dice_state import HiddenError
from hidden_state_adapters.tf_privacy.refusals import refusal


class DiceMechanism(CheckedOptimizer):
    """The steps of `DiceKerasSGDOptimizer` and `DiceKerasAdamOptimizer`; see the former."""

    _neutral_options: ClassVar = checks.NEUTRAL_AFTER_RELEASE

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None,
        *,
        error_l2_norm_clip: float | None,
        automatic: bool,
        expected_batch_size: int | None,
        learning_rate: Any,
        refusable: dict[str, Any],
        **kwargs: Any,
    ):
        checks.refuse_options(type(self).__name__, refusable, self._neutral_options)
        clip, noise = checks.clip_and_noise(l2_norm_clip, noise_multiplier)
        error_clip = clip
        if error_l2_norm_clip is not None:
            error_clip = validate.real("error_l2_norm_clip", error_l2_norm_clip, above=0)
            checks.check_scale("error_l2_norm_clip", error_clip)
        if not isinstance(automatic, bool):
            raise TypeError(f"Expected automatic to be True or False, got {automatic!r}.")
        if expected_batch_size is not None:
            expected_batch_size = validate.integer(
                "expected_batch_size", expected_batch_size, minimum=1
            )
        checks.check_learning_rate(learning_rate)
        error = HiddenError()
        query = DiceSumQuery(
            clip,
            noise,
            error_l2_norm_clip=error_clip,
            automatic=automatic,
            divisor=expected_batch_size,
            error=error,
        )
        super().__init__(
            query, checks.microbatches(num_microbatches), learning_rate=learning_rate, **kwargs
        )
        self._error = error
        self._settings = self._current_settings()

    @property
    def error_l2_norm_clip(self) -> float:
        """C_2, in units of the mean update."""
        return self._dp_sum_query.error_l2_norm_clip

    @property
    def automatic(self) -> bool:
        """Whether both clips normalise (Algorithm 4)."""
        return self._dp_sum_query.automatic

    @property
    def expected_batch_size(self) -> int | None:
        """B, the divisor of the sums; None for the number of rows of every batch."""
        return self._dp_sum_query.divisor

    def _current_settings(self) -> dict[str, Any]:
        return {
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self._num_microbatches,
            "error_l2_norm_clip": self.error_l2_norm_clip,
            "automatic": self.automatic,
            "expected_batch_size": self.expected_batch_size,
        }

    def _check_settings(self) -> None:
        now = self._current_settings()
        if now != self._settings:
            raise refusal(
                f"Expected {self._settings} as at construction, got {now}: the bound on DiceSGD is "
                "about constant values. (The learning rate may change.)"
            )

    # The step

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The noisy update, of a loss with one entry per example."""
        self._check_settings()
        return super()._compute_gradients(loss, var_list, grad_loss, tape)

    def _checked_loss(self, loss: Any) -> Any:
        rows_vary = self.expected_batch_size is not None
        loss = checks.check_loss(loss, self._num_microbatches, may_be_empty=rows_vary)
        if rows_vary and not loss.shape[0]:
            loss = _at_least_one_row(loss)
        self._dp_sum_query.rows = tf.shape(loss)[0]
        return loss

    def _problem(self, rows: tf.Tensor, variables: Sequence[Any]) -> tf.Tensor:
        query = self._dp_sum_query
        with tf.init_scope():
            iterations = self.iterations  # Keras makes the variable at the first use
        of_step = self._log.problem(
            rows,
            self._num_microbatches,
            variables,
            query.largest_norm,
            self._norm_bound(),
            rows_vary=self.expected_batch_size is not None,
        )
        of_run = self._error.problem(
            self._log.steps, iterations, query.error_norm, query.noise_fingerprint
        )
        return of_step + of_run

    def _raise_problem(self, problem: tf.Tensor) -> None:
        begun = self._error.begin(self.iterations)
        with tf.control_dependencies([begun]):  # it counts before anything can raise
            super()._raise_problem(problem)

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        """Keras' update of one variable and its slots, unless the step was refused."""
        assert self._gradients is not None
        update = super()._resource_apply_dense

        def take() -> tf.Tensor:
            update(grad, var, apply_state)
            return tf.constant(True)

        return tf.cond(self._gradients.is_fine, take, lambda: tf.constant(False))

    def _after_update(self, variables: Sequence[Any], gradients: Gradients) -> None:
        query = self._dp_sum_query
        self._error.finish(
            is_fine=gradients.is_fine,
            rows=gradients.rows,
            largest=query.largest_norm,
            noise=query.noise_fingerprint,
            errors=query.next_errors,
        )
        query.next_errors = []

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"{type(self).__name__}({settings})"


def _at_least_one_row(loss: tf.Tensor) -> tf.Tensor:
    """The loss; of an empty batch one entry that no variable changes: its step takes place, too."""
    row = tf.zeros(tf.concat([[1], tf.shape(loss)[1:]], 0), loss.dtype)
    return tf.concat([loss, row], 0)[: tf.maximum(tf.shape(loss)[0], 1)]
