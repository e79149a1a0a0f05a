"""The Adam variant of DiceSGD for Keras (Algorithm 3)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras import GenericDPAdamOptimizer

from hidden_state_adapters.tf_privacy.dice_optimizer import DiceOptimizer


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

    _update_rule = "Adam"

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
        return {**self._settings, **{name: base[name] for name in names}}
