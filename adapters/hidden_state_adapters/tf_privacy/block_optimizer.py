"""Noisy mini-batch block coordinate descent (DP-MBCD) as an optimizer of Keras."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    BatchOrder,
    BlockCoordinateDpEvent,
    LastIterateAccountant,
    LossGeometry,
    Regulariser,
    validate,
)
from hidden_state_accountants.guarantee import Assumption
from hidden_state_accountants.runs.assumptions import OF_EVERY_RUN
from hidden_state_accountants.runs.statement import Statement
from hidden_state_adapters.tf_privacy.blocks import (
    CHECKED,
    BlockCoordinateUpdate,
    BlockSteps,
    blocks_of,
)
from hidden_state_adapters.tf_privacy.optimizers import PrivateOptimizer, legacy, refuse_options
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.settings import Settings, check_scale


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class BlockCoordinateKerasOptimizer(PrivateOptimizer, legacy.SGD):
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
        of all their updates (docs/papers/block_coordinate.md).
      - Checked at every step, which changes nothing otherwise: a constant learning rate, equal
        batches, one row per example, finite gradients, the same blocks in the same order, variables
        that nobody else changed. One that was refused, interrupted or not finished ends the run
        without an epsilon.
      - Declared by you: all else that is trained or changes is public (of one block: stands still),
        no layer mixes the examples of a batch (BatchNormalization), the batches are the same ones
        in every epoch, the loss is of one batch in all calls of a step, and the number of steps
        does not depend on the examples. Not covered: rounding.

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
        neutral = {**self._neutral_options, "gradient_accumulation_steps": 1}
        refuse_options(type(self).__name__, kwargs, neutral)
        if isinstance(learning_rate, tf.keras.optimizers.schedules.LearningRateSchedule):
            raise refusal(
                f"Expected a constant learning_rate, got {learning_rate!r}: the bound on DP-MBCD "
                "is about one step size."
            )
        rate = validate.magnitude("learning_rate", learning_rate)
        weights = {"l1": validate.magnitude("l1", l1), "l2": validate.magnitude("l2", l2)}
        for weight, value in weights.items():
            check_scale(weight, value)
        if not isinstance(nonnegative, bool):
            raise TypeError(f"Expected nonnegative to be True or False, got {nonnegative!r}.")
        low = 0.0 if nonnegative else -math.inf
        prox = Regulariser(l1=weights["l1"], l2=weights["l2"], low=low)
        told = Settings(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            prox=None if prox == Regulariser() else prox,
            batch_order=BatchOrder.CYCLIC,
        )
        self._options = {**weights, "nonnegative": nonnegative}
        super().__init__(told, learning_rate=rate, name=name)

    @property
    def num_blocks(self) -> int:
        """The number of blocks, p; 0 before the first step."""
        return 0 if self._steps is None else len(self._steps.blocks)

    @property
    def num_steps(self) -> int:
        """The number of steps taken; each updates every block."""
        return self.last_step.steps

    def _rule(self) -> BlockCoordinateUpdate:
        return BlockCoordinateUpdate(None)

    def minimize(
        self, loss: Any, var_list: Any, grad_loss: Any = None, name: Any = None, tape: Any = None
    ) -> None:
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
                "optimizer.minimize(lambda: ..., blocks) there (docs/papers/block_coordinate.md)."
            )
        steps = self._steps_of([v for block in blocks for v in block])
        steps.trains_by(blocks)
        steps.iterate.begin()
        for block in blocks:
            pairs = super()._compute_gradients(loss, list(block), grad_loss, tape)
            self.apply_gradients(pairs, name=name)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The noisy mean of the clipped gradients of one block."""
        parts = blocks_of(var_list)
        steps = self._steps_of([variable for block in parts for variable in block])
        steps.trains_by(parts)
        if len(parts) > 1:
            raise refusal(
                f"Expected minimize(loss, blocks), got _compute_gradients for {len(parts)} blocks: "
                "each is updated before the gradients of the next are taken."
            )
        return super()._compute_gradients(loss, list(parts[0]), grad_loss, tape)

    def for_model(self) -> tuple[BlockCoordinateUpdate, dict[str, Any]]:
        """A `BlockCoordinateUpdate` of one block, as in `Model.fit`, and what a model is told.

        Raises:
            UnsupportedRunError: It took steps, or is of a subclass.
        """
        told = self._leave_to_model()
        return BlockCoordinateUpdate(tf.keras.optimizers.SGD(self._given_rate)), told

    def get_config(self) -> dict[str, Any]:
        """All arguments of the constructor as plain types; see Keras."""
        return self._config(legacy.SGD, **self._options)

    # What is said about a run that nobody recorded

    def privacy_event(
        self,
        *,
        dataset_size: int,
        neighboring_relation: NeighboringRelation | str | None = None,
        block_loss: LossGeometry | None = None,
    ) -> BlockCoordinateDpEvent:
        """The run that really happened, for `hidden_state_accountants.BlockCoordinateAccountant`.

        Args:
            dataset_size: n, the number of records of an epoch: a multiple of the batch size.
            neighboring_relation: That of the accountant, which decides how far one record moves a
                sum of clipped gradients. It is only checked: REPLACE_SPECIAL or REPLACE_ONE.
            block_loss: The curvature of every per-record objective as a function of its block,
                before clipping, for ALL records that could have been in the data. The gradients of
                this run are checked against its `lipschitz`. Of use for one block only.

        Raises:
            TypeError, ValueError: No step was taken, or no run can have these values.
            UnsupportedRunError: The run was another one.
        """
        steps: BlockSteps = self._recorded_steps()
        run = steps.run_so_far(dataset_size=dataset_size, block_loss=block_loss)
        if neighboring_relation is not None:
            run.check_relation(neighboring_relation)
        return run.event()

    def report(
        self,
        delta: float,
        *,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        **declared: Any,
    ) -> str:
        """A few lines to paste.

        Args:
            delta: In [0, 1].
            neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.
            **declared: `dataset_size` and `block_loss`, as for `privacy_event`.

        Raises:
            TypeError, ValueError, UnsupportedRunError: As `privacy_event`, or the variables come
                from a private run, which is not counted.
        """
        if self._steps is not None:
            self._steps.lineage.refuse_earlier_runs()
        event = self.privacy_event(neighboring_relation=neighboring_relation, **declared)
        guarantee = LastIterateAccountant(neighboring_relation).compose(event).guarantee
        assumptions = (Assumption.checked(CHECKED), *OF_EVERY_RUN, *guarantee.assumptions)
        return Statement([event], guarantee, assumptions, delta).lines()
