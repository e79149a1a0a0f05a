"""What an optimizer for DP-MBCD did, as an event and in words; for the adapters."""

from __future__ import annotations

import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.bounds.block_coordinate.bound import BlockCoordinate
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.process.geometry import update_lipschitz

_RELATIONS = (NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL)
# Rounding in float32 of a norm that is exactly at its bound.
_SLACK = 1e-6


@attrs.frozen(kw_only=True)
class BlockCoordinateRun:
    r"""Steps in which each of p blocks in turn made

    .. math::
        \theta \leftarrow \mathrm{Prox}_{\eta, r}\Big(\theta - \frac{\eta}{b}\Big(
            \sum_{i \in B} \mathrm{clip}_C(g_i) + \mathcal{N}(0, (z C)^2 I)\Big)\Big)

    with the gradient of every record for the block, as one vector, multiplied by exactly
    :math:`\min(1, C/|g_i|)`, and every step with b records.

    Attributes:
        step_size: eta.
        clip_norm: C > 0.
        noise_multiplier: z, a number or one for every step.
        batch_size: b.
        num_steps: The number of updates of each block.
        num_blocks: p.
        prox_strong_convexity: Of r.
        largest_norm: The largest norm of a record's gradient for a block, before the clip.
    """

    step_size: float
    clip_norm: float
    noise_multiplier: float | Schedule
    batch_size: int
    num_steps: int
    num_blocks: int
    prox_strong_convexity: float
    largest_norm: float

    def event(
        self,
        *,
        dataset_size: int,
        neighboring_relation: NeighboringRelation,
        block_loss: LossGeometry | None = None,
    ) -> BlockCoordinateDpEvent:
        """The event under the relation, which has to be that of the accountant.

        Args:
            dataset_size: n, the records of an epoch.
            neighboring_relation: REPLACE_SPECIAL (a record may move the sum by C), or REPLACE_ONE
                (by 2 C).
            block_loss: As for the event; its `lipschitz` is checked against the run.

        Raises:
            TypeError, ValueError: An argument has an impossible value.
            UnsupportedRunError: Unequal batches, an epoch that is not finished, another relation,
                or gradients beyond `block_loss.lipschitz`.
        """
        epochs = self._epochs(dataset_size)
        if validate.neighboring_relation(neighboring_relation) not in _RELATIONS:
            raise UnsupportedRunError(
                "Expected neighboring_relation REPLACE_SPECIAL or REPLACE_ONE, got "
                f"{neighboring_relation.name}: every batch has the same number of records."
            )
        if block_loss is not None and not isinstance(block_loss, LossGeometry):
            raise TypeError(f"Expected block_loss to be a LossGeometry or None, got {block_loss!r}")
        bound = self._gradient_bound(block_loss)
        is_replaced = neighboring_relation is NeighboringRelation.REPLACE_ONE
        return BlockCoordinateDpEvent(
            step_size=self.step_size,
            noise_variance=self._noise_variance(),
            gradient_sensitivity=bound * (2 if is_replaced else 1),
            batch_size=self.batch_size,
            dataset_size=dataset_size,
            num_epochs=epochs,
            block_loss=block_loss,
            prox_strong_convexity=self.prox_strong_convexity,
            update_lipschitz=self._unclipped_modulus(block_loss),
            num_blocks=self.num_blocks,
        )

    def _epochs(self, dataset_size: int) -> int:
        size = validate.integer("dataset_size", dataset_size, minimum=1)
        if not self.num_steps:
            raise ValueError("Expected at least one step, got none yet.")
        if size % self.batch_size:
            raise UnsupportedRunError(
                f"Expected dataset_size to be a multiple of the {self.batch_size} records of every "
                f"batch, got {size}: the bound needs equal batches. Leave {size % self.batch_size} "
                "records out for good (drop_last=True without shuffling), and count only the rest."
            )
        batches = size // self.batch_size
        if self.num_steps % batches:
            raise UnsupportedRunError(
                f"Expected whole epochs of {batches} steps, got {self.num_steps} steps. Finish the "
                "epoch; a number of steps that depends on the records has no guarantee."
            )
        return self.num_steps // batches

    def _noise_variance(self) -> float | Schedule:
        def variance(multiplier: float) -> float:
            # 2 eta o = (eta z C / b)^2: Chen & Liu 2025, (6), arXiv 2407.08233
            return self.step_size * (multiplier * self.clip_norm / self.batch_size) ** 2 / 2

        noise = self.noise_multiplier
        if isinstance(noise, Schedule):
            return Schedule([variance(value) for value in noise.values], noise.lengths)
        return variance(noise)

    def _is_never_clipped(self, loss: LossGeometry | None) -> bool:
        return loss is not None and loss.lipschitz is not None and loss.lipschitz <= self.clip_norm

    def _gradient_bound(self, loss: LossGeometry | None) -> float:
        if loss is None or loss.lipschitz is None:
            return self.clip_norm
        if not self.largest_norm <= loss.lipschitz * (1 + _SLACK):
            raise UnsupportedRunError(
                f"Expected block_loss.lipschitz >= {self.largest_norm:.8g}, the largest gradient "
                f"of this run, got {loss.lipschitz:.8g}. A bound has to be proven from the loss "
                "and the norm of the features, not read off a run. Correct it, or leave it out."
            )
        return min(self.clip_norm, loss.lipschitz)

    def _unclipped_modulus(self, loss: LossGeometry | None) -> float | None:
        """The modulus where no clip acts, which the event cannot always tell from S_g."""
        if loss is None or not self._is_never_clipped(loss) or self.num_blocks > 1:
            return None
        if loss.kind is LossKind.HOELDER and loss.exponent != 1:
            return None
        eta, zero, active = np.array([self.step_size]), np.zeros(1), np.array([False])
        return float(update_lipschitz(loss, eta, zero, active)[0])

    def report(
        self,
        delta: float,
        *,
        dataset_size: int,
        neighboring_relation: NeighboringRelation,
        block_loss: LossGeometry | None = None,
        checked: str,
    ) -> str:
        """About a dozen lines to paste.

        Args:
            delta: In [0, 1].
            dataset_size: As for `event`, like the next two.
            neighboring_relation: The relation of the guarantee.
            block_loss: What is declared.
            checked: What the optimizer checked at every step.

        Raises:
            TypeError, ValueError, UnsupportedRunError: As `event`.
        """
        validate.target_delta(delta)
        event = self.event(
            dataset_size=dataset_size,
            neighboring_relation=neighboring_relation,
            block_loss=block_loss,
        )
        guarantee = BlockCoordinate().guarantee(event, neighboring_relation)
        gradients = "clipped to" if not self._is_never_clipped(block_loss) else "never clipped,"
        return "\n".join(
            [
                "Privacy of the released blocks (last iterate only)",
                f"epsilon = {guarantee.epsilon(delta):.4f} at delta = {delta:g}",
                f"neighboring relation: {neighboring_relation.name}",
                f"theorem: {guarantee.theorem} (docs/theory/block_coordinate.md)",
                f"run: {event.num_epochs} epochs x {event.batches_per_epoch} fixed batches of "
                f"{event.batch_size} records x {event.num_blocks} blocks, step size "
                f"{event.step_size:g}",
                f"noise multiplier: {_range(self.noise_multiplier)} on sums of gradients "
                f"{gradients} {self._gradient_bound(block_loss):g}",
                f"prox: {event.prox_strong_convexity:g}-strongly convex",
                f"checked at every step: {checked}",
                "declared (your word): " + "; ".join(a.text for a in guarantee.assumptions),
            ]
        )


class BlockCoordinateAccount:
    """What an optimizer for DP-MBCD says about its run; a base beside the framework's."""

    _checked = ""  # what it checks at every step

    def _run(self, block_loss: LossGeometry | None) -> BlockCoordinateRun:
        """What was done; raises ValueError before the first step, and UnsupportedRunError."""
        raise NotImplementedError

    def privacy_event(
        self,
        *,
        dataset_size: int,
        neighboring_relation: NeighboringRelation,
        block_loss: LossGeometry | None = None,
    ) -> BlockCoordinateDpEvent:
        """The run that really happened, for `hidden_state_accountants.BlockCoordinateAccountant`.

        Args:
            dataset_size: n, the number of records of an epoch: a multiple of the batch size.
            neighboring_relation: That of the accountant: REPLACE_SPECIAL or REPLACE_ONE, under
                which one record moves a sum of clipped gradients by C or 2 C. There is no default,
                because an event of one relation says too little about the other.
            block_loss: The curvature of every per-record objective as a function of its block,
                before clipping, for ALL records that could have been in the data. The gradients of
                this run are checked against its `lipschitz`. Of use for one block only.

        Raises:
            TypeError, ValueError: No step was taken, or no run can have these values.
            UnsupportedRunError: The run was another one.
        """
        return self._run(block_loss).event(
            dataset_size=dataset_size,
            neighboring_relation=neighboring_relation,
            block_loss=block_loss,
        )

    def report(
        self,
        delta: float,
        *,
        dataset_size: int,
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
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
        return self._run(block_loss).report(
            delta,
            dataset_size=dataset_size,
            neighboring_relation=neighboring_relation,
            block_loss=block_loss,
            checked=self._checked,
        )


def _range(value: float | Schedule) -> str:
    values = value.values if isinstance(value, Schedule) else (value,)
    low, high = min(values), max(values)
    return f"{low:.6g}" if math.isclose(low, high) else f"{low:.6g} to {high:.6g}"
