"""A run of DP-MBCD, step by step; every step updates every block once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.block_coordinate.bound import BlockCoordinate
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.guarantee import Assumption, Guarantee
from hidden_state_accountants.runs.base import Run, Step, check_in_bound
from hidden_state_accountants.runs.description import UNPROTECTED, Description, range_of
from hidden_state_accountants.runs.statement import statement_of

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
        step_size: eta, the `learning_rate` of every step.
        clip_norm: C > 0.
        batch_size: b.
        num_blocks: p.
        prox_strong_convexity: Of r.
        dataset_size: n, the records of an epoch; None if it is declared later.
        block_loss: As for the event; its `lipschitz` is compared with the gradients of every step.
            None if nothing is known, or if it is declared later.

    Raises:
        TypeError, ValueError: As `BlockCoordinateDpEvent`.
    """

    event_type = BlockCoordinateDpEvent
    declares = (
        "step_size",
        "clip_norm",
        "batch_size",
        "dataset_size",
        "block_loss",
        "prox_strong_convexity",
        "num_blocks",
    )
    series = ("noise_multiplier",)
    of_one_step: ClassVar = {"noise_variance": 0.0, "num_epochs": 1}
    later = ("dataset_size",)

    def __init__(
        self,
        *,
        step_size: float,
        clip_norm: float,
        batch_size: int,
        num_blocks: int,
        prox_strong_convexity: float = 0.0,
        dataset_size: int | None = None,
        block_loss: LossGeometry | None = None,
    ):
        super().__init__(
            step_size=step_size,
            clip_norm=clip_norm,
            batch_size=batch_size,
            dataset_size=dataset_size,
            block_loss=block_loss,
            prox_strong_convexity=prox_strong_convexity,
            num_blocks=num_blocks,
        )

    @classmethod
    def of_totals(
        cls,
        *,
        num_steps: int,
        noise_multiplier: float | Schedule,
        largest_norm: float,
        **settings: Any,
    ) -> BlockCoordinateRun:
        """A run whose steps were counted elsewhere, on the device.

        Args:
            num_steps: Steps taken, each an update of every block.
            noise_multiplier: z, a number or one for every step.
            largest_norm: The largest norm of a record's gradient for a block, before the clip.
            **settings: As for the constructor.

        Raises:
            TypeError, ValueError: No run can have these values.
        """
        run = cls(**settings)
        run._num_steps = validate.integer("num_steps", num_steps, minimum=0)
        noise = run._series["noise_multiplier"]
        if isinstance(noise_multiplier, Schedule):
            noise.values.extend(noise_multiplier.values)
            noise.lengths.extend(noise_multiplier.lengths)
        elif num_steps:
            noise.values, noise.lengths = [float(noise_multiplier)], [num_steps]
        run._largest_norm = float(largest_norm)
        run._check_noise()
        return run

    # What happens

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
        if not self._later and step.batch is not None:
            self._check_turn(step.batch, own.batches_per_epoch)
        validate.magnitude("noise_multiplier", step.noise_multiplier)
        norm = validate.real("largest_norm", step.largest_norm, minimum=0, allow_inf=True)
        check_in_bound(
            "block_loss.lipschitz", _lipschitz(self._template), norm, f"of step {number}"
        )

    # What is said about it

    def event(
        self, *, dataset_size: int | None = None, block_loss: LossGeometry | None = None
    ) -> BlockCoordinateDpEvent:
        """The event that happened, for `BlockCoordinateAccountant`.

        It has no releases within the run. If there were any, nothing is declared of the blocks'
        loss, so that the guarantee is one by composition, which covers them.

        Args:
            dataset_size: n, if it was not declared before: a multiple of the batch size.
            block_loss: If it was not declared before; its `lipschitz` is checked against the run.

        Raises:
            TypeError, ValueError: No step was taken, or no run can have these values.
            UnsupportedRunError: Unequal batches, an epoch that is not finished, gradients beyond
                `block_loss.lipschitz`, or something else was declared before.
        """
        self._check_has_steps()
        size, loss = self._told("dataset_size", dataset_size), self._told("block_loss", block_loss)
        event: BlockCoordinateDpEvent = attrs.evolve(
            self._template,
            dataset_size=size,
            num_epochs=self._epochs(size),
            noise_variance=self._noise_variance(),
            block_loss=loss,
        )
        check_in_bound("block_loss.lipschitz", _lipschitz(event), self._largest_norm, "of this run")
        if any(step < self._num_steps for step in self._release_steps):
            # Nothing is hidden between the steps then. Without a block_loss the run has no known
            # contraction, and its guarantee is composition, which counts every block as released
            # after each of its updates (docs/theory/block_coordinate.md).
            event = attrs.evolve(event, block_loss=None)
        return event

    def _epochs(self, dataset_size: int) -> int:
        size = validate.integer("dataset_size", dataset_size, minimum=1)
        batch_size = self._template.batch_size
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

    def sampled_rows(self) -> list[tuple[float, float, int]]:
        """One row with noise 0, which no accountant takes for private: blocks are not DP-SGD."""
        rate = self._template.batch_size / self._told("dataset_size", None)
        return [(0.0, rate, self._num_steps)] if self._num_steps else []

    @classmethod
    def describe(
        cls,
        event: BlockCoordinateDpEvent,
        relation: NeighboringRelation,
        delta: float,
        notes: Mapping[str, Any],
    ) -> Description:
        """As `Run.describe`; it reads none of the notes."""
        return Description(
            title="Privacy of the released blocks (last iterate only)",
            theory="docs/theory/block_coordinate.md",
            facts=(
                (
                    "run",
                    f"{event.num_epochs} epochs x {event.batches_per_epoch} fixed batches of "
                    f"{event.batch_size} records x {event.num_blocks} blocks, step size "
                    f"{event.step_size:g}",
                ),
                _noise_text(event, relation),
                ("prox", f"{event.prox_strong_convexity:g}-strongly convex"),
            ),
            run=(
                f"Noisy block coordinate descent performed over {event.dataset_size} examples with "
                f"{event.batch_size} examples per iteration in cyclic order on {event.num_blocks} "
                f"block(s), noise variance {range_of(event.noise_variances().ravel())}, gradient "
                f"sensitivity {event.sensitivity(relation):g}, step size {event.step_size:g}, for "
                f"{event.num_steps} iterations ({event.num_epochs} epochs) without microbatching."
            ),
            protects=(
                "This privacy guarantee protects the release of the blocks after the last "
                "iteration. It does not protect hidden variables, earlier blocks, " + UNPROTECTED
            ),
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
            "docs/block_coordinate.md"
        )

    # How it goes on elsewhere

    def private_state(self) -> dict[str, Any]:
        """The longest gradient."""
        return {"largest_norm": self._largest_norm}

    def _load_steps(self, state: Mapping[str, Any]) -> None:
        super()._load_steps(state)
        # A declared bound was compared step by step; nothing is known for one that comes later.
        unknown = math.inf if _lipschitz(self._template) == math.inf else 0.0
        self._largest_norm = validate.real(
            "largest_norm", state.get("largest_norm", unknown), minimum=0, allow_inf=True
        )
        self._check_noise()
        check_in_bound(
            "block_loss.lipschitz", _lipschitz(self._template), self._largest_norm, "of this run"
        )

    def _check_noise(self) -> None:
        covered = sum(self._series["noise_multiplier"].lengths)
        if covered != self._num_steps:
            raise ValueError(
                f"Expected noise_multiplier to cover {self._num_steps} steps, got {covered}."
            )
        for value in self._series["noise_multiplier"].values:
            validate.magnitude("noise_multiplier", value)


class BlockCoordinateAccount:
    """What an optimizer for DP-MBCD says about its run; a base beside the framework's."""

    _checked = ""  # what it checks at every step

    def _run(self, block_loss: LossGeometry | None) -> BlockCoordinateRun:
        """What was done; raises ValueError before the first step, and UnsupportedRunError."""
        raise NotImplementedError

    def _assumptions(self) -> tuple[Assumption, ...]:
        """What it adds to the assumptions of the bound."""
        return (Assumption.checked(self._checked),)

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
        run = self._run(block_loss)
        if neighboring_relation is not None:
            run.check_relation(neighboring_relation)
        return run.event(dataset_size=dataset_size, block_loss=block_loss)

    def report(
        self,
        delta: float,
        *,
        dataset_size: int,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        block_loss: LossGeometry | None = None,
    ) -> str:
        """A few lines to paste; see `privacy_event`.

        Args:
            delta: In [0, 1].
            dataset_size: n.
            neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.
            block_loss: What is known about the objective.

        Raises:
            TypeError, ValueError, UnsupportedRunError: As `privacy_event`.
        """
        run = self._run(block_loss)
        event = run.event(dataset_size=dataset_size, block_loss=block_loss)
        relation = validate.neighboring_relation(neighboring_relation)
        run.check_relation(relation)
        guarantee = best_guarantee(event, relation)
        assumptions = (*self._assumptions(), *guarantee.assumptions)
        return statement_of([event], guarantee, assumptions, delta).lines()


def _lipschitz(event: BlockCoordinateDpEvent) -> float:
    """The declared bound on all gradients; inf if there is none."""
    loss = event.block_loss
    return math.inf if loss is None or loss.lipschitz is None else loss.lipschitz


def _noise_text(event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> tuple[str, str]:
    variances = event.noise_variances().ravel()
    if event.clip_norm is None or not event.step_size:
        return (
            "noise",
            f"variance {range_of(variances)} for each unit of 2 x step size, gradient sensitivity "
            f"{event.sensitivity(relation):g}",
        )
    # 2 eta o = (eta z C / b)^2: Chen & Liu 2025, (6), arXiv 2407.08233
    unit = event.clip_norm / event.batch_size
    multipliers = np.sqrt(2 * variances / event.step_size) / unit
    gradients = "clipped to" if event.clipping_may_act else "never clipped,"
    bound = event.sensitivity(NeighboringRelation.REPLACE_SPECIAL)
    return (
        "noise multiplier",
        f"{range_of(multipliers)} on sums of gradients {gradients} {bound:g}",
    )
