"""Noisy mini-batch block coordinate descent (DP-MBCD) for TF Privacy's Keras optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import attrs
import tensorflow as tf
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras import GenericDPSGDOptimizer

from hidden_state_accountants import LossGeometry, Regulariser, validate
from hidden_state_accountants.runs.base import Step
from hidden_state_accountants.runs.block_coordinate import (
    BlockCoordinateAccount,
    BlockCoordinateRun,
)
from hidden_state_adapters.tf_privacy.continuation import RunState
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.guards import settings
from hidden_state_adapters.tf_privacy.guards.step import refuse_tensor_float_32
from hidden_state_adapters.tf_privacy.mechanisms.block_coordinate.blocks import (
    Blocks,
    blocks_of,
    check_blocks,
    check_together,
)
from hidden_state_adapters.tf_privacy.mechanisms.block_coordinate.log import BlockLog
from hidden_state_adapters.tf_privacy.mechanisms.block_coordinate.model_steps import (
    BlockCoordinateUpdate,
)
from hidden_state_adapters.tf_privacy.noisy_mean import NoisyMean
from hidden_state_adapters.tf_privacy.optimizer import CheckedOptimizer, CheckedSGD
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.rules import PlainSGD
from hidden_state_adapters.tf_privacy.step_log import StepEntry
from hidden_state_adapters.tf_privacy.units import Units


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class BlockCoordinateKerasOptimizer(
    BlockCoordinateAccount, CheckedOptimizer, GenericDPSGDOptimizer, CheckedSGD
):
    r"""DP-MBCD: lists of variables are blocks, updated in turn on the same batch.

    `minimize(loss, blocks)` makes for each block, with the loss evaluated anew,

    .. math::
        \theta \leftarrow \mathrm{Prox}_{\eta, r}\Big(\theta - \frac{\eta}{b}\Big(
            \sum_{i \in B} \mathrm{clip}_C(\nabla_\theta f_i) + \mathcal{N}(0, (z C)^2 I)
        \Big)\Big), \qquad r = l_1 |\theta|_1 + \tfrac{l_2}{2} |\theta|^2

    with C = `l2_norm_clip`, z = `noise_multiplier`, the gradient of one example for one block
    clipped as one vector, and r restricted to :math:`\theta \ge 0` if `nonnegative`. In an own
    loop, or in the `train_step` of a model::

        blocks = [model.layers[0].trainable_variables, model.layers[1].trainable_variables]
        for x, y in cyclic_dataset(x_train, y_train, batch_size=100, drop_remainder=True):
            optimizer.minimize(lambda: loss(y, model(x, training=True)), blocks)
        print(optimizer.report(1e-5, dataset_size=5000))

    The loss has one entry per example (``reduction="none"``). `Model.fit` passes a tensor, which
    does for one block: all trainable variables.

    Formal guarantees:
      - Those of `privacy_event(...)` under `hidden_state_accountants.BlockCoordinateAccountant`:
        the blocks after the last step are released, nothing else. One block with a `block_loss`
        or a contracting prox may profit from hidden states; several blocks cost the composition
        of all their updates (docs/block_coordinate.md).
      - Checked at every update, which changes nothing otherwise: constant settings, equal batches,
        one row per example, finite gradients, the same blocks in the same order, variables that
        nobody else changed, a noise generator that was left alone. One that was refused,
        interrupted or not finished ends the run without an epsilon.
      - Your word: all else that is trained or changes is public (of one block: stands still), no
        layer mixes the examples of a batch (BatchNormalization), the batches are the same ones in
        every epoch, the loss is of one batch in all calls of a step, and the number of steps does
        not depend on the examples. Not covered: rounding.

    Args:
        l2_norm_clip: C, for each block.
        noise_multiplier: z, the standard deviation of the noise on a sum of gradients over C.
        num_microbatches: None, or the batch size: one example each.
        learning_rate: eta, a constant number.
        l1: Weight of the lasso, >= 0.
        l2: Weight of the squared norm, >= 0: r is l2-strongly convex.
        nonnegative: Whether the variables are kept >= 0.
        name: Of the optimizer.
        **kwargs: Arguments of tf.keras.optimizers.legacy.SGD at their neutral values.

    Raises:
        UnsupportedRunError: Momentum, gradient clipping by Keras, several replicas, loss scaling
            (mixed precision), a loss that is already reduced, a tensor for several blocks.
        TypeError, ValueError: An argument has an impossible value.

    Source: Chen & Liu 2025 (arXiv 2407.08233), Algorithm 1, with a constant step size and the
        gradients clipped (not the step size, which would depend on the examples).
    """

    _neutral_options = MappingProxyType({**settings.NEUTRAL, "gradient_accumulation_steps": 1})
    _log: BlockLog

    _checked = (
        "constant learning rate, clip norm, noise multiplier and prox; the clip of each block as "
        "one vector; finite gradients, the same number of rows each time; no variable of a block "
        "changed by others; all updates finished; a noise generator that was left alone"
    )

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        learning_rate: float = 0.01,
        l1: float = 0.0,
        l2: float = 0.0,
        nonnegative: bool = False,
        name: str = "BlockCoordinateKerasOptimizer",
        **kwargs: Any,
    ):
        settings.refuse_options(type(self).__name__, kwargs, self._neutral_options)
        clip, noise = settings.clip_and_noise(l2_norm_clip, noise_multiplier)
        if isinstance(learning_rate, tf.keras.optimizers.schedules.LearningRateSchedule):
            raise refusal(
                f"Expected a constant learning_rate, got {learning_rate!r}: the bound on DP-MBCD "
                "is about one step size."
            )
        rate = validate.magnitude("learning_rate", learning_rate)
        weights = {"l1": validate.magnitude("l1", l1), "l2": validate.magnitude("l2", l2)}
        for weight, value in weights.items():
            settings.check_scale(weight, value)
        if not isinstance(nonnegative, bool):
            raise TypeError(f"Expected nonnegative to be True or False, got {nonnegative!r}.")
        prox = Regulariser(
            l1=weights["l1"], l2=weights["l2"], low=0.0 if nonnegative else -math.inf
        )
        super().__init__(
            NoisyMean(PlainSGD(lambda: self._decayed_lr(tf.float32), prox=prox), clip, noise),
            settings.microbatches(num_microbatches),
            learning_rate=rate,
            name=name,
        )
        self._l1, self._l2, self._nonnegative = weights["l1"], weights["l2"], nonnegative
        self._log = BlockLog()
        self._turn: int | None = None
        self._is_begun: Any = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks, p; 0 before the first step."""
        return len(self._log.blocks)

    @property
    def num_steps(self) -> int:
        """The number of steps taken; each updates every block."""
        return self._log.read_run().taken // max(self.num_blocks, 1)

    def minimize(
        self, loss: Any, var_list: Any, grad_loss: Any = None, name: Any = None, tape: Any = None
    ) -> Any:
        """Updates every block once.

        Args:
            loss: A function without arguments that returns a vector with the loss of each example;
                called once for each block. For one block also such a tensor, with its `tape`.
            var_list: A list of blocks, which are lists of variables; or one list of variables.
            grad_loss: Not supported.
            name: Of the operation.
            tape: Of a loss that is a tensor.

        Raises:
            UnsupportedRunError: The run is not covered; the text says why.
        """
        blocks = blocks_of(var_list)
        if len(blocks) > 1 and (not callable(loss) or tape is not None):
            raise refusal(
                f"Expected a function as loss, got a tensor or a tape: the loss is evaluated anew "
                f"for each of the {len(blocks)} blocks. In Model.fit override train_step and call "
                "optimizer.minimize(lambda: ..., blocks) there (docs/block_coordinate.md)."
            )
        self._fix_blocks(blocks)
        result = None
        try:
            for turn, block in enumerate(blocks):
                self._turn = turn
                pairs = self._compute_gradients(loss, list(block), grad_loss, tape)
                result = self.apply_gradients(pairs, name=name)
        finally:
            self._turn = None
        return result

    def _fix_blocks(self, blocks: Blocks) -> None:
        if not self._log.blocks:
            check_blocks(blocks)
            self._log.blocks = blocks
        elif [[v.ref() for v in block] for block in self._log.blocks] != [
            [v.ref() for v in block] for block in blocks
        ]:
            raise refusal(
                "Expected the blocks of the first step, got other variables or another order: one "
                "run trains the same blocks throughout. Use another optimizer for other blocks."
            )

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The noisy mean of the clipped gradients of one block."""
        if self._turn is None:
            self._fix_blocks(blocks_of(var_list))
            if self.num_blocks > 1:
                raise refusal(
                    f"Expected minimize(loss, blocks), got _compute_gradients for "
                    f"{self.num_blocks} blocks: each is updated before the gradients of the next "
                    "are taken."
                )
            var_list = list(self._log.blocks[0])
        self._is_begun = self._log.begin()
        return super()._compute_gradients(loss, var_list, grad_loss, tape)

    def _problem(self, rows: tf.Tensor, largest: tf.Tensor, variables: Sequence[Any]) -> tf.Tensor:
        rate = self._decayed_lr(variables[0].dtype.base_dtype)
        return self._log.problem_of_update(
            is_begun=self._is_begun,
            rows=rows,
            expected_rows=self._num_microbatches,
            largest_norm=largest,
            noise_is_fresh=self._mean.noise_is_fresh,
            settings=[
                tf.cast(rate, tf.float64),
                tf.constant(self.l2_norm_clip, tf.float64),
                tf.constant(self.noise_multiplier, tf.float64),
            ],
        )

    # What kind of run its steps are

    _declarable = "block_loss"

    def check_start(self, units: Units, variables: Sequence[Any], declared: Declared) -> None:
        """As every mechanism's; a declared curvature needs full float32."""
        super().check_start(units, variables, declared)
        if self.known_loss(declared) is not None:
            refuse_tensor_float_32()

    def known_loss(self, declared: Declared) -> LossGeometry | None:
        """Of the one block."""
        return declared.geometry or declared.block_loss

    @property
    def last_step(self) -> StepEntry:
        """What the last update of a block did, and how many steps were finished."""
        entry = super().last_step
        return attrs.evolve(entry, steps=entry.steps // max(self.num_blocks, 1))

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Whether the variables are all of the blocks, as the last update left them.

        Raises:
            UnsupportedRunError: They are not those of the blocks.
        """
        check_together(self._log.blocks, variables)
        return super().is_iterate(self._log.variables)

    def new_run(self, units: Units, declared: Declared) -> BlockCoordinateRun:
        """Of which the last blocks are released."""
        return BlockCoordinateRun(
            batch_size=units.batch_size,
            dataset_size=units.examples,
            block_loss=self.known_loss(declared),
            **self._constants(),
        )

    def _constants(self) -> dict[str, Any]:
        return {
            "step_size": self._log.read_run().learning_rate,
            "clip_norm": self.l2_norm_clip,
            "num_blocks": self.num_blocks,
            "prox_strong_convexity": self._l2,
        }

    def step_of(self, entry: StepEntry) -> Step:
        """As every mechanism's, with the longest gradient of all blocks so far."""
        longest = self._log.read_run().largest_norm
        return attrs.evolve(super().step_of(entry), largest_norm=longest)

    def check_run(self) -> None:
        """Every update that was begun was finished, and every step updated all blocks."""
        run = self._log.read_run()
        if run.begun != run.taken or run.taken % max(self.num_blocks, 1):
            raise refusal(
                f"Of {run.begun} updates of {self.num_blocks} blocks {run.taken} were finished, "
                "the others refused, interrupted or not applied. What ended the run may depend on "
                "the examples, and the bound is about a number of steps that does not. Start again "
                "with another optimizer."
            )

    @property
    def blocks(self) -> Blocks:
        """The lists of variables; empty before the first step."""
        return self._log.blocks

    def resume(self, state: RunState, variables: Sequence[Any]) -> None:
        """As every mechanism's, with the blocks of before; also raises if the noise was another."""
        noise = state.run["noise_multiplier"]["values"]
        if noise != [self.noise_multiplier]:
            raise ValueError(
                f"Expected noise_multiplier = {noise}, that of the run so far, got "
                f"{self.noise_multiplier}. Construct the optimizer as before."
            )
        super().resume(state, variables)
        self._fix_blocks(tuple(tuple(variables[i] for i in block) for block in state.blocks))
        run, loss = state.run["declared"], self.known_loss(state.declared)
        longest = math.inf if loss is None or loss.lipschitz is None else loss.lipschitz
        settings_of_run = run["step_size"], run["clip_norm"], self.noise_multiplier
        self._log.resume_run(
            state.num_batches, state.units.batch_size, settings_of_run, longest
        )  # each gradient was compared with the declared bound

    def checked(self, units: Units) -> list[str]:
        """What every update checks."""
        return [self._checked]

    def for_model(self) -> tuple[BlockCoordinateUpdate, dict[str, Any]]:
        """A `BlockCoordinateUpdate` of one block, as in `Model.fit`, and what a model is told.

        Raises:
            UnsupportedRunError: It took steps, or is of a subclass.
        """
        told = self._leave_to_model()
        low = 0.0 if self._nonnegative else -math.inf
        prox = Regulariser(l1=self._l1, l2=self._l2, low=low)
        rule = BlockCoordinateUpdate(tf.keras.optimizers.SGD(self._given_rate))
        return rule, {**told, "prox": None if prox == Regulariser() else prox}

    # What is said about a run that nobody recorded

    def _run(self, block_loss: LossGeometry | None) -> BlockCoordinateRun:
        run = self._log.read_run()
        if not run.begun:
            raise ValueError("Expected at least one step, got none yet.")
        self.check_run()
        if not self._log.has_written(self._log.variables):
            raise refusal(
                "The variables were changed after the last step, so they are not the iterate that "
                "is accounted. Leave them alone, or go back to what the last step left."
            )
        return BlockCoordinateRun.of_totals(
            num_steps=self.num_steps,
            noise_multiplier=self.noise_multiplier,
            largest_norm=run.largest_norm,
            batch_size=self.last_step.rows,
            **self._constants(),
        )

    def report(self, delta: float, **declared: Any) -> str:
        """As `BlockCoordinateAccount.report`, unless the variables come from a private run.

        Raises:
            TypeError, ValueError, UnsupportedRunError: As there, or such a run is not counted.
        """
        self.training.refuse_earlier_runs()
        return super().report(delta, **declared)

    def get_config(self) -> dict[str, Any]:
        """All arguments of the constructor as plain types; see Keras."""
        base: dict[str, Any] = tf.keras.optimizers.legacy.SGD.get_config(self)
        config = {
            "name": base["name"],
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self._num_microbatches,
            "learning_rate": base["learning_rate"],
            "l1": self._l1,
            "l2": self._l2,
            "nonnegative": self._nonnegative,
        }
        return self._with_runs(config)
