"""DP-MBCD for a model that owns its run: all blocks in turn on the batch of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import BatchOrder, LossGeometry
from hidden_state_accountants.runs.base import Run, Step
from hidden_state_accountants.runs.block_coordinate import BlockCoordinateRun
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy import keras_api, proximal
from hidden_state_adapters.tf_privacy.continuation import RunState
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.mechanism import Mechanism
from hidden_state_adapters.tf_privacy.mechanisms.block_coordinate.blocks import (
    Blocks,
    blocks_of,
    check_blocks,
    check_together,
    places_of,
)
from hidden_state_adapters.tf_privacy.owned.rule import UpdateRule
from hidden_state_adapters.tf_privacy.owned.settings import Settings
from hidden_state_adapters.tf_privacy.owned.steps import OwnedSteps, Update
from hidden_state_adapters.tf_privacy.rates import as_meant
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.step_log import StepEntry
from hidden_state_adapters.tf_privacy.units import Units

_CHECKED = (
    "constant learning rate, clip norm, noise multiplier and prox; the clip of each block as one "
    "vector; finite gradients, taken of each block at the values of that moment; blocks that are "
    "together all that is trained, changed by the model's own train_step only; a noise generator "
    "that was left alone"
)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class BlockCoordinateUpdate(UpdateRule):
    r"""Compiles a `HiddenStateModel` with DP-MBCD: lists of variables are updated in turn.

        model.compile(
            BlockCoordinateUpdate(
                tf.keras.optimizers.SGD(0.1),
                blocks=lambda: [layer.trainable_variables for layer in model.layers],
            ),
            loss,
        )

    In every step each block makes, with gradients taken anew at the current values of all blocks,

    .. math::
        \theta \leftarrow \mathrm{Prox}_{\eta, r}\Big(\theta - \frac{\eta}{b}\Big(
            \sum_{i \in B} \mathrm{clip}_C(\nabla_\theta f_i) + \mathcal{N}(0, (z C)^2 I)
        \Big)\Big)

    with C = `l2_norm_clip`, z = `noise_multiplier` and r = `prox` of the model, and the gradient of
    one example for one block clipped as one vector.

    Formal guarantees:
      - Those of `BlockCoordinateDpEvent`: the blocks after the last step are released. One block
        with a `loss_geometry` of the model may profit from hidden states; several blocks cost the
        composition of all their updates (docs/block_coordinate.md), and so does a run with releases
        before its end.
      - What the model checks of every step. A step that is refused moves no block. There are
        figures after whole epochs.

    Args:
        optimizer: Plain `SGD` with a constant learning rate eta, without momentum or decay.
        blocks: Lists of variables, or of their places in the model's trainable_variables (which is
            what a file of the model has), or a function that returns them, which is called when the
            run begins and when the model is saved; None for one block of all that is trained.

    Raises:
        UnsupportedRunError: From fit: batches that are not the same in every epoch, a projection,
            another optimizer, or blocks that are not all that is trained.

    Source: Chen & Liu 2025 (arXiv 2407.08233), Algorithm 1, with a constant step size and the
        gradients clipped.
    """

    knows_microbatches = False

    def __init__(self, optimizer: Any, blocks: Any = None):
        super().__init__(optimizer)
        self.blocks = blocks

    def steps(
        self, settings: Settings, optimizer: Any, plan: BatchPlan, variables: Sequence[Any]
    ) -> BlockSteps:
        """Those of DP-MBCD."""
        blocks = blocks_of(self.blocks, variables)
        return BlockSteps(settings, Update(optimizer, variables), plan, variables, blocks)

    def with_places(self, model: Any) -> BlockCoordinateUpdate:
        """With the places of the variables of each block."""
        if self.blocks is None:
            return self
        trained = keras_api.trained(model)
        return BlockCoordinateUpdate(None, places_of(blocks_of(self.blocks, trained), trained))

    def get_config(self) -> dict[str, Any]:
        """The blocks, as lists of places."""
        return {"blocks": self.blocks}


class BlockSteps(OwnedSteps):
    """Makes the steps of a model that is compiled with `BlockCoordinateUpdate`.

    Args:
        settings: Of the model.
        update: Of the compiled optimizer.
        plan: The batches.
        variables: Those that are trained.
        blocks: The same in lists.

    Raises:
        UnsupportedRunError: The bound on DP-MBCD does not know such a run.
    """

    _declarable = "block_loss"
    _composes = False

    def __init__(
        self,
        settings: Settings,
        update: Update,
        plan: BatchPlan,
        variables: Sequence[Any],
        blocks: Blocks,
    ):
        if plan.order not in (BatchOrder.CYCLIC, BatchOrder.FULL):
            raise refusal(
                'Expected batch_order="cyclic" or "full" with BlockCoordinateUpdate, got '
                f'"{plan.order.value}": the bound on DP-MBCD is about the same batches in every '
                "epoch. Pass it to the model."
            )
        check_blocks(blocks)
        check_together(blocks, variables)
        self._blocks = blocks
        super().__init__(settings, update, plan, variables)
        self._rate = as_meant(float(update.rate()))

    def _check_settings(self, settings: Settings, update: Update) -> None:
        if settings.projection_radius is not None:
            raise refusal(
                "Expected projection_radius = None with BlockCoordinateUpdate, got "
                f"{settings.projection_radius}: there is none in the "
                "algorithm. Use prox=Regulariser(l2=...)."
            )
        if not update.is_plain_sgd or update.weight_decay or callable(update.given_rate):
            what = update.name if not update.is_plain_sgd else "a weight_decay or a schedule"
            raise refusal(
                "Expected plain SGD with a constant learning rate in BlockCoordinateUpdate, got "
                f"{what}: the bound on DP-MBCD is about one step size. For a decay pass "
                "prox=Regulariser(l2=...) to the model."
            )

    def _check_replicas(self, update: Update) -> None:
        raise refusal(
            "Expected no distribution strategy with BlockCoordinateUpdate, got a MirroredStrategy: "
            "every block would wait for the one before in all replicas. Train in one."
        )

    @property
    def blocks(self) -> Blocks:
        """The lists of variables."""
        return self._blocks

    # As every mechanism's

    @property
    def kind(self) -> str:
        """The model's steps, with their update rule."""
        return f"{super().kind}, within BlockCoordinateUpdate"

    def resume(self, state: RunState, variables: Sequence[Any]) -> None:
        """As every mechanism's, with the blocks of before.

        Raises:
            ValueError: They are others.
        """
        own = tuple(map(tuple, places_of(self._blocks, variables)))
        if own != state.blocks:
            raise ValueError(
                f"Expected the blocks of the run so far, trainable variables {state.blocks}, got "
                f"{own}. Compile as before."
            )
        super().resume(state, variables)

    def known_loss(self, declared: Declared) -> LossGeometry | None:
        """Of the one block."""
        return declared.geometry

    def new_run(self, units: Units, declared: Declared) -> Run:
        """Of which the last blocks are released."""
        return BlockCoordinateRun(**self._constants())

    def _constants(self) -> dict[str, Any]:
        return {
            "step_size": self._rate,
            "clip_norm": self.l2_norm_clip,
            "batch_size": self._plan.batch_size,
            "num_blocks": len(self._blocks),
            "prox_strong_convexity": proximal.strong_convexity(self._settings.prox),
            "dataset_size": len(self._plan.records),
            "block_loss": self._loss,
        }

    def step_of(self, entry: StepEntry) -> Step:
        """As every mechanism's."""
        self._update.check_options()
        step = Mechanism.step_of(self, entry)
        return attrs.evolve(step, learning_rate=as_meant(step.learning_rate))

    def line_before(self, units: Units, relation: NeighboringRelation) -> str:
        """Whether hidden iterates help, of what is said of the loss."""
        if self._loss is None:
            return ""
        run = BlockCoordinateRun.of_totals(
            num_steps=units.batches,
            noise_multiplier=self.noise_multiplier,
            largest_norm=0.0,
            **self._constants(),
        )
        return run.line_before(run.event(), relation)

    def checked(self, units: Units) -> list[str]:
        """What every step checks."""
        return [_CHECKED]

    def declared(self, event: Any) -> list[str]:
        """Nothing beside what is so of every run."""
        return []
