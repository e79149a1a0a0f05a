"""DP-MBCD: lists of variables are updated in turn on the same batch, each through a prox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.runs.algorithms import BlockCoordinate
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.algorithm import Algorithm, Blocks, UpdateRule, as_meant
from hidden_state_adapters.tf_privacy.settings import Declared, Settings
from hidden_state_adapters.tf_privacy.step import Update
from hidden_state_adapters.tf_privacy.trained_part import check_variables


def blocks_of(given: Any, trained: Sequence[Any] = ()) -> Blocks:
    """Returns the blocks of lists of variables or their places, of one list, or a function."""
    items = given() if callable(given) else given
    items = list(
        trained if items is None else items if isinstance(items, list | tuple) else [items]
    )
    nested = [isinstance(item, list | tuple) for item in items]
    if any(nested) and not all(nested):
        raise UnsupportedRunError(
            "Expected a list of variables or a list of such lists, got both in one list."
        )

    def variable(item: Any) -> Any:
        if isinstance(item, int) and 0 <= item < len(trained):
            return trained[item]
        return keras_api.tensor_of(item)

    return tuple(tuple(map(variable, block)) for block in (items if any(nested) else [items]))


def check_blocks(blocks: Blocks, trained: Sequence[Any]) -> None:
    """Raises UnsupportedRunError unless each trained variable is in one of the blocks, once."""
    own = [variable for block in blocks for variable in block]
    for item in own:
        if not isinstance(item, tf.Variable):
            raise UnsupportedRunError(
                f"Expected blocks of variables, got {item!r}. Pass layer.trainable_variables of "
                "one layer, or of several, for each block."
            )
    seen = [variable.ref() for variable in own]
    if not blocks or not all(blocks) or len(set(seen)) < len(seen):
        raise UnsupportedRunError(
            "Expected blocks that have variables, each variable in one block, got "
            f"{[[variable.name for variable in block] for block in blocks]}."
        )
    check_variables(own)
    given, own_refs = {variable.ref() for variable in trained}, set(seen)
    if given != own_refs:
        outside = [variable.deref().name for variable in given ^ own_refs]
        raise UnsupportedRunError(
            "Expected blocks that are together the trainable variables of the model, got "
            f"{sorted(outside)} in one and not in the other. Set layer.trainable = False for "
            "what is not trained."
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
        composition of all updates (docs/papers/block_coordinate.md), as does a run with releases
        before its end.
      - What the model checks of every step. A refused step ends the run. There are figures after
        whole epochs.

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

    why_one_replica = "every block would wait for the one before in all replicas"

    def __init__(self, optimizer: Any, blocks: Any = None):
        super().__init__(optimizer)
        self.blocks = blocks

    def check(self, settings: Settings, update: Update, plan: BatchPlan | None) -> None:
        """See `UpdateRule.check`."""
        if settings.projection_radius is not None:
            raise UnsupportedRunError(
                "Expected projection_radius = None with BlockCoordinateUpdate, got "
                f"{settings.projection_radius}: there is none in the algorithm. Leave it out."
            )
        if not update.is_plain_sgd or update.weight_decay or callable(update.given_rate):
            what = update.name if not update.is_plain_sgd else "a weight_decay or a schedule"
            raise UnsupportedRunError(
                "Expected plain SGD with a constant learning rate in BlockCoordinateUpdate, got "
                f"{what}: the bound on DP-MBCD is about one step size. For a decay pass "
                "prox=Regulariser(l2=...) to the model."
            )

    def blocks_of(self, variables: Sequence[Any]) -> Blocks:
        """See `UpdateRule.blocks_of`."""
        blocks = blocks_of(self.blocks, variables)
        check_blocks(blocks, variables)
        return blocks

    def described(self, steps: Algorithm, declared: Declared) -> BlockCoordinate:
        """See `UpdateRule.described`."""
        return BlockCoordinate(
            noise_multiplier=steps.noise_multiplier,
            clip_norm=steps.clip,
            step_size=as_meant(float(steps.update.rate())),
            num_blocks=len(steps.blocks),
            prox_strong_convexity=steps.settings.prox_strong_convexity,
            loss=declared.geometry,
        )

    def with_places(self, model: Any) -> BlockCoordinateUpdate:
        """See `UpdateRule.with_places`."""
        if self.blocks is None:
            return self
        trained = keras_api.trained(model)
        places = {variable.ref(): place for place, variable in enumerate(trained)}
        blocks = self.blocks_of(trained)
        return BlockCoordinateUpdate(None, [[places[v.ref()] for v in block] for block in blocks])

    def get_config(self) -> dict[str, Any]:
        """See `UpdateRule.get_config`."""
        return {"blocks": self.blocks}
