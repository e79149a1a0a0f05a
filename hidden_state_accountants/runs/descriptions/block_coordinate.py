"""What a statement says of DP-MBCD, of which the last blocks are released."""

from __future__ import annotations

import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
from hidden_state_accountants.runs.descriptions.base import UNPROTECTED, Description, range_of


def description(event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> Description:
    """The texts of a run.

    Args:
        event: The run.
        relation: Of the guarantee.
    """
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
            _noise(event, relation),
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
            "This privacy guarantee protects the release of the blocks after the last iteration. "
            "It does not protect hidden variables, earlier blocks, " + UNPROTECTED
        ),
    )


def _noise(event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> tuple[str, str]:
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
