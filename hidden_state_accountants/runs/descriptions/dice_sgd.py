"""What a statement says of DiceSGD, of which every iterate is released."""

from __future__ import annotations

import math

from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.dice_sgd.bound import DiceSgd
from hidden_state_accountants.events.batch_order import rate_text
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import fixed_up
from hidden_state_accountants.runs.descriptions.base import Description, Other


def description(
    event: DiceSgdDpEvent, relation: NeighboringRelation, delta: float, update_rule: str
) -> Description:
    """The texts of a run.

    Args:
        event: The run.
        relation: Of the guarantee.
        delta: Where the epsilon that the paper would claim is read.
        update_rule: Name of the optimizer that the noisy updates go through.
    """
    plain = LastIterateDpEvent(
        noise_multiplier=event.noise_std * event.batch_size / event.clip_norm,
        learning_rate=1.0,
        clip_norm=event.clip_norm,
        batch_size=event.batch_size,
        dataset_size=event.dataset_size,
        num_steps=event.num_steps,
        batch_order=event.batch_order,
        sampling_rate=event.sampling_rate,
    )
    clip = "normalised to" if event.automatic else "clip norm"
    bound = "none declared" if event.gradient_bound == math.inf else f"{event.gradient_bound:g}"
    return Description(
        title="Privacy of all iterates (the error of the feedback stays hidden)",
        theory="docs/theory/dice_sgd.md",
        facts=(
            ("published", _published(event, relation, delta)),
            (
                "run",
                f"{event.num_steps} steps x {event.batch_size} of {event.dataset_size} records"
                f"{rate_text(event.sampling_rate)}, "
                f"{event.batch_order.value}; update rule {update_rule}",
            ),
            ("noise on the mean update", f"standard deviation {event.noise_std:.6g}"),
            ("gradients", f"{clip} {event.clip_norm:g}; bound before clipping: {bound}"),
            ("error", f"{clip} {event.error_clip_norm:g}"),
        ),
        run=(
            f"DiceSGD performed over {event.dataset_size} examples with {event.batch_size} "
            f"examples per iteration in {event.batch_order.value} order"
            f"{rate_text(event.sampling_rate)}, noise multiplier "
            f"{plain.noise_multiplier:.6g}, gradients {clip} {event.clip_norm:g}, error {clip} "
            f"{event.error_clip_norm:g}, for {event.num_steps} iterations "
            f"({event.num_steps / event.batches_per_epoch:g} epochs) without microbatching."
        ),
        protects=(
            "This privacy guarantee protects the release of all model checkpoints in addition to "
            "the final model, and of all that is computed from them. It does not protect the "
            "error of the feedback, or losses and metrics of the training data."
        ),
        released="Epsilon of all released models:",
        others=(Other("Epsilon of ANOTHER algorithm, DP-SGD (*):", plain, relation),),
        footnote=(
            "(*) Not this run: DP-SGD with the same batches, clip norm and noise, without error "
            "feedback. DiceSGD must not be reported with it."
        ),
    )


def _published(event: DiceSgdDpEvent, relation: NeighboringRelation, delta: float) -> str:
    bound = DiceSgd(analysis="published")
    unmet = bound.check(event, relation)
    if unmet:
        return f"{bound.citation} does not apply: " + "; ".join(map(str, unmet))
    claim = bound.guarantee(event, relation)
    epsilon = fixed_up(claim.epsilon(delta), 4)
    return f"{bound.citation} would claim epsilon = {epsilon}; do not use it: {claim.caveat}"
