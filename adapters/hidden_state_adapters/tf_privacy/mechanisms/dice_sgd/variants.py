"""DiceSGD for Keras: Algorithms 2 and 4 (automatic=True) with SGD, Algorithm 3 with Adam."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras import (
    GenericDPAdamOptimizer,
    GenericDPSGDOptimizer,
)

from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.optimizer import DiceOptimizer


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class DiceKerasSGDOptimizer(DiceOptimizer, GenericDPSGDOptimizer):
    r"""DPKerasSGDOptimizer that feeds back, clipped again, what the clip cut off.

    .. math::
        v_t = \frac1B \sum_{i \in B_t} \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e_t, C_2), \quad
        e_{t+1} = e_t + \frac1B \sum_{i \in B_t} g_i - v_t, \quad e_0 = 0

    and Keras' SGD takes a step along :math:`v_t + \mathcal{N}(0, \sigma_1^2 I)`,
    :math:`\sigma_1 = \text{noise_multiplier} \cdot C_1 / B`. All variables are clipped as one
    vector with exactly min(1, C/|v|). It is used like DPKerasSGDOptimizer: the loss must be a
    vector with one entry per example (``reduction="none"``), in `Model.fit` (graph, eager or XLA;
    `HiddenStateCallback` records the run) and in own loops that call `minimize`, or
    `_compute_gradients` and `apply_gradients`.

    Formal guarantees:
      - Those of `privacy_event(...)` under `hidden_state_accountants.DiceSgdAccountant`: all
        iterates, all noisy updates and all that is computed from them are released. So momentum,
        Nesterov and learning rates that depend on released values are covered: they never see
        :math:`v_t` without noise. The error's recursion does not know them.
      - The error is in no file (.keras, .h5, SavedModel, tf.train.Checkpoint, weights), config,
        pickle, copy or text. So a loaded or copied optimizer starts ANOTHER run with e = 0; the
        record of the old one does not go on. Compose the events of both.
      - Checked in every step, and the step is not taken otherwise: constant settings, the same
        variables, which nobody else changed, finite per-example gradients, a noise generator that
        was left alone. A step that is refused, or whose gradients are not applied, ends the run. In
        eager mode the error is an UnsupportedRunError, in a graph tf.errors.InvalidArgumentError.
        XLA compiles no assertions: there the callback raises, and `privacy_event`.
      - Not covered: rounding of floating-point numbers; how the batches were dealt, and that one
        row is one example, are the user's word. `last_step` shows values without noise.

    Args:
        l2_norm_clip: C_1 > 0.
        noise_multiplier: Standard deviation of the noise on the SUM of clipped gradients over C_1,
            as everywhere in TF Privacy. At equal noise the epsilon is larger than that of DP-SGD.
        num_microbatches: None, or the number of rows: one example each.
        error_l2_norm_clip: C_2 > 0, in units of the MEAN update; None is C_1, as the paper
            recommends. One example moves the clipped mean by C_1 / B, but can move the clipped
            error by up to 2 C_2 in every step: without a gradient bound choose it far smaller.
        automatic: Normalise instead of clip: C v/|v|, and 0 at 0. A gradient bound is then of no
            use.
        expected_batch_size: B, the public divisor of the sums, for batches of varying size
            (Poisson, accounted with probability B/N; take the step of an empty batch, too). For
            fixed shapes fill such a batch up with rows whose loss is multiplied by 0. None: every
            batch has the same number of rows, and that is B.
        learning_rate: A number or a LearningRateSchedule.
        momentum: As in Keras.
        nesterov: As in Keras.
        decay: As in Keras.
        name: Of the optimizer.
        **kwargs: Other arguments of tf.keras.optimizers.legacy.SGD, and
            gradient_accumulation_steps, at their neutral values.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: Gradient clipping by Keras, accumulation of gradients, several
            replicas, loss scaling, a loss that is reduced already. From a step: the run is not
            covered; the text says why.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 and 4.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        error_l2_norm_clip: float | None = None,
        automatic: bool = False,
        expected_batch_size: int | None = None,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        decay: float = 0.0,
        name: str = "DiceKerasSGDOptimizer",
        **kwargs: Any,
    ):
        super().__init__(
            l2_norm_clip,
            noise_multiplier,
            num_microbatches,
            error_l2_norm_clip=error_l2_norm_clip,
            automatic=automatic,
            expected_batch_size=expected_batch_size,
            learning_rate=learning_rate,
            refusable=kwargs,
            momentum=momentum,
            nesterov=nesterov,
            decay=decay,
            name=name,
        )

    def get_config(self) -> dict[str, Any]:
        """All arguments of the constructor as plain types; see Keras. It holds no error."""
        base: dict[str, Any] = tf.keras.optimizers.legacy.SGD.get_config(self)
        names = ("name", "learning_rate", "momentum", "nesterov", "decay")
        return self._with_runs({**self._settings, **{name: base[name] for name in names}})

    def for_model(self) -> tuple[Any, dict[str, Any]]:
        """A `DiceUpdate` of Keras' SGD, and what a model is told for it.

        Raises:
            UnsupportedRunError: It took steps, or is of a subclass.
        """
        sgd = tf.keras.optimizers.legacy.SGD
        return self._update_of(sgd, "momentum", nesterov=self.nesterov)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class DiceKerasAdamOptimizer(DiceOptimizer, GenericDPAdamOptimizer):
    r"""Keras' Adam on the noisy updates of DiceSGD.

    .. math::
        \tilde v_t = v_t + \mathcal{N}(0, \sigma_1^2 I), \quad
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \tilde v_t, \quad
        s_t = \beta_2 s_{t-1} + (1 - \beta_2) \tilde v_t^2

    The noise is inside the moments, so they and all options of Adam are post-processing: the run
    costs what DiceSGD costs, and the moments may be in a checkpoint. Update :math:`v_t`, error,
    arguments, formal guarantees and errors: see `DiceKerasSGDOptimizer`.

    Two misprints of the algorithm are put right: the second moment decays with 1 - beta_2 (not
    beta^2), and the bias corrections count steps from 1 (not 0: division by zero). Keras adds
    epsilon before the bias correction.

    Args:
        l2_norm_clip: C_1.
        noise_multiplier: Standard deviation of the noise on the sum over C_1.
        num_microbatches: None, or the number of rows.
        error_l2_norm_clip: C_2.
        automatic: Normalise instead of clip.
        expected_batch_size: B, for batches of varying size.
        learning_rate: A number or a LearningRateSchedule.
        beta_1: As in Keras, as are the next four.
        beta_2: Of the second moment.
        epsilon: Beside its root.
        amsgrad: Whether the largest second moment counts.
        decay: Of the learning rate.
        name: Of the optimizer.
        **kwargs: As `DiceKerasSGDOptimizer`.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithm 3.
    """

    update_rule = "Adam"

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        error_l2_norm_clip: float | None = None,
        automatic: bool = False,
        expected_batch_size: int | None = None,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        decay: float = 0.0,
        name: str = "DiceKerasAdamOptimizer",
        **kwargs: Any,
    ):
        super().__init__(
            l2_norm_clip,
            noise_multiplier,
            num_microbatches,
            error_l2_norm_clip=error_l2_norm_clip,
            automatic=automatic,
            expected_batch_size=expected_batch_size,
            learning_rate=learning_rate,
            refusable=kwargs,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            decay=decay,
            name=name,
        )

    def get_config(self) -> dict[str, Any]:
        """All arguments of the constructor as plain types; see Keras. It holds no error."""
        base: dict[str, Any] = tf.keras.optimizers.legacy.Adam.get_config(self)
        names = ("name", "learning_rate", "beta_1", "beta_2", "epsilon", "amsgrad", "decay")
        return self._with_runs({**self._settings, **{name: base[name] for name in names}})

    def for_model(self) -> tuple[Any, dict[str, Any]]:
        """As `DiceKerasSGDOptimizer`, of Keras' Adam."""
        adam = tf.keras.optimizers.legacy.Adam
        options = {"epsilon": self.epsilon, "amsgrad": self.amsgrad}
        return self._update_of(adam, "beta_1", "beta_2", **options)
