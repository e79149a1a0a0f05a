"""A run of DP-MBCD, step by step; every step updates every block once."""

from __future__ import annotations

from typing import ClassVar

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.chen_liu_2025 import BlockCoordinate
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.runs.base import Run, Step

_DELTA = 1e-5
_RELATIONS = (NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL)


class BlockCoordinateRun(Run):
    r"""Steps in which each of p blocks in turn made

    .. math::
        \theta \leftarrow \mathrm{Prox}_{\eta, r}\Big(\theta - \frac{\eta}{b}\Big(
            \sum_{i \in B} \mathrm{clip}_C(g_i) + \mathcal{N}(0, (z C)^2 I)\Big)\Big)

    with the gradient of every record for the block, as one vector, multiplied by exactly
    :math:`\min(1, C/|g_i|)`, and every step with b records. The noise multiplier z may differ from
    step to step.

    Args:
        **declared: As for `BlockCoordinateDpEvent`: `step_size` (the `learning_rate` of every
            step), `clip_norm`, `batch_size`, `dataset_size`, `num_blocks` and, as far as they are
            known, `prox_strong_convexity` and `block_loss`, whose `lipschitz` is compared with the
            gradients of every step.

    Raises:
        TypeError, ValueError: As `BlockCoordinateDpEvent`.
    """

    event_type = BlockCoordinateDpEvent
    series = ("noise_multiplier",)
    of_one_step: ClassVar = {"noise_variance": 0.0, "num_epochs": 1}

    @classmethod
    def _norm_bound(cls, event: BlockCoordinateDpEvent) -> tuple[str, float | None]:
        loss = event.block_loss
        return "block_loss.lipschitz", None if loss is None else loss.lipschitz

    def _check(self, step: Step) -> None:
        own, number = self._template, self._num_steps + 1
        expected = {
            "clip_norm": (step.clip_norm, own.clip_norm),
            "learning_rate": (step.learning_rate, own.step_size),
            "weight_decay": (step.weight_decay, 0.0),
            "rows": (step.rows, own.batch_size),
        }
        for name, (value, declared) in expected.items():
            if value != declared:
                raise UnsupportedRunError(
                    f"step {number} used {name} = {value}, expected {declared:g}: the bound on "
                    "DP-MBCD is about equal batches and constant values."
                )
        if step.batch is not None:
            self._check_turn(step.batch, own.batches_per_epoch)
        validate.magnitude("noise_multiplier", step.noise_multiplier)

    def _check_steps(self) -> None:
        super()._check_steps()
        for value in self._series["noise_multiplier"].values:
            validate.magnitude("noise_multiplier", value)

    def event(self) -> BlockCoordinateDpEvent:
        """The event that happened, for `BlockCoordinateAccountant`.

        It has no releases within the run. If there were any, nothing is declared of the blocks'
        loss, so that the guarantee is one by composition, which covers them.

        Raises:
            ValueError: No step was taken, or no run can have these values.
            UnsupportedRunError: Unequal batches, or an epoch that is not finished.
        """
        self._check_has_steps()
        event: BlockCoordinateDpEvent = attrs.evolve(
            self._template, num_epochs=self._epochs(), noise_variance=self._noise_variance()
        )
        if any(step < self._num_steps for step in self._release_steps):
            # Nothing is hidden between the steps then. Without a block_loss the run has no known
            # contraction, and its guarantee is composition, which counts every block as released
            # after each of its updates (docs/theory/block_coordinate.md).
            event = attrs.evolve(event, block_loss=None)
        return event

    def _epochs(self) -> int:
        size, batch_size = self._template.dataset_size, self._template.batch_size
        if size % batch_size:
            raise UnsupportedRunError(
                f"Expected dataset_size to be a multiple of the {batch_size} records of every "
                f"batch, got {size}: the bound needs equal batches. Leave {size % batch_size} "
                "records out for good (drop_last=True without shuffling), and count only the rest."
            )
        batches = size // batch_size
        if self._num_steps % batches:
            raise UnsupportedRunError(
                f"Expected whole epochs of {batches} steps, got {self._num_steps} steps. Finish "
                "the epoch; a number of steps that depends on the records has no guarantee."
            )
        return self._num_steps // batches

    def _noise_variance(self) -> float | Schedule:
        noise = self._series["noise_multiplier"].compressed()
        if isinstance(noise, Schedule):
            return Schedule([self._variance(value) for value in noise.values], noise.lengths)
        assert noise is not None  # there are steps
        return self._variance(noise)

    def _variance(self, noise_multiplier: float) -> float:
        own = self._template
        # 2 eta o = (eta z C / b)^2: Chen & Liu 2025, (6), arXiv 2407.08233
        return own.step_size * (noise_multiplier * own.clip_norm / own.batch_size) ** 2 / 2

    def check_relation(self, relation: NeighboringRelation | str) -> None:
        """Raises UnsupportedRunError for a relation that changes the number of records."""
        relation = validate.neighboring_relation(relation)
        if relation not in _RELATIONS:
            raise UnsupportedRunError(
                "Expected neighboring_relation REPLACE_SPECIAL or REPLACE_ONE, got "
                f"{relation.name}: every batch has the same number of records."
            )

    @classmethod
    def every_iterate(
        cls, event: BlockCoordinateDpEvent, relation: NeighboringRelation
    ) -> Guarantee | None:
        """Composition of all updates, which asks for nothing about the loss."""
        bound = BlockCoordinate()
        if bound.check(event, relation):
            return None
        return bound.guarantee(
            attrs.evolve(event, block_loss=None, update_lipschitz=None), relation
        )

    @classmethod
    def line_before(cls, event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> str:
        """Whether hidden iterates help, judged by the first two epochs."""
        ahead = attrs.evolve(event, num_epochs=2)
        every = cls.every_iterate(ahead, relation)
        if every is None or best_guarantee(ahead, relation).epsilon(_DELTA) < every.epsilon(_DELTA):
            return ""
        return (
            "no contraction: epsilon equals composition (every update of every block counts); see "
            "docs/papers/block_coordinate.md"
        )
