"""What is said of one run, by its kind: the parts of a statement that depend on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.chen_liu_2025 import BlockCoordinate
from hidden_state_accountants.bounds.composition import composition_of
from hidden_state_accountants.bounds.dice_sgd_2024 import DiceSgd
from hidden_state_accountants.events.batch_order import BatchOrder, DealtEvent, rate_text
from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.figures import fixed_up
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.process.noisy_process import process_of

Notes = Mapping[str, Any]
"""What the event of a run does not say, by name."""

_UNPROTECTED = (
    "averages of iterates, optimizer state, or losses and metrics of the training data or of "
    "intermediate models."
)
_WITHOUT_OTHER = (BatchOrder.POISSON, BatchOrder.FULL)
_MOST_RELEASES = 6  # that are listed one by one


@attrs.frozen(kw_only=True)
class Description:
    """The texts of one run.

    Attributes:
        title: What is private; the first of the lines.
        theory: The page that proves the theorem, if it is not the paper.
        facts: Label and text of the lines about this kind of run.
        run: One sentence: what ran.
        protects: What is protected, and what is not.
        released: The label of the guarantee's epsilon among the figures.
        other_label: What the figure of another run is; empty if there is none.
        other: The guarantee of that run, with every iterate released; None if it is not known.
        footnote: About that run.
    """

    title: str
    theory: str = ""
    facts: tuple[tuple[str, str], ...]
    run: str
    protects: str
    released: str = "Epsilon of the released model (last iterate):"
    other_label: str = ""
    other: Callable[[], Guarantee | None] = lambda: None
    footnote: str = ""


def _range(values: Iterable[float]) -> str:
    """The value that all have, or the smallest and the largest one."""
    values = tuple(values)
    low, high = f"{min(values):.6g}", f"{max(values):.6g}"
    return low if low == high else f"{low} to {high}"


def _dealt(event: DealtEvent) -> str:
    return (
        f"{event.num_steps} steps x {event.batch_size} of {event.dataset_size} records"
        f"{rate_text(event.sampling_rate)}, {event.batch_order.value}"
    )


def _sentence(name: str, event: DealtEvent, how: str, each: int = 1) -> str:
    """What ran; a record of the event is `each` examples."""
    return (
        f"{name} performed over {event.dataset_size * each} examples with "
        f"{event.batch_size * each} examples per iteration in {event.batch_order.value} order"
        f"{rate_text(event.sampling_rate)}{how}, for {event.num_steps} iterations "
        f"({event.num_steps / event.batches_per_epoch:g} epochs) "
        f"{f'with microbatches of {each}' if each > 1 else 'without microbatching'}."
    )


def of_last_iterate(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float, notes: Notes
) -> Description:
    """Of SGD. Notes: `microbatch`, the examples of a record, and the `update`, if it is another."""
    # With Poisson batches there is no other algorithm; a full batch is not a sample. Nobody adds or
    # removes microbatches.
    has_other = not (event.is_microbatched or event.batch_order in _WITHOUT_OTHER)
    return Description(
        title="Privacy of the released model",
        facts=_facts(event, relation, notes.get("update", "")),
        run=_run_text(event, notes.get("microbatch", 1)),
        protects=_released_text(event),
        other_label="Epsilon of ANOTHER algorithm, Poisson batches (*):" if has_other else "",
        other=lambda: _with_poisson_batches(event),
        footnote=(
            "(*) Not this run. It draws every batch anew with Poisson sampling, at the same noise, "
            "and releases all checkpoints; its figure is for ADD_OR_REMOVE_ONE adjacency. A run "
            "over fixed batches must not be reported with it."
        )
        if has_other
        else "",
    )


def _with_poisson_batches(event: LastIterateDpEvent) -> Guarantee | None:
    if isinstance(event.noise_multiplier, Schedule) or isinstance(event.clip_norm, Schedule):
        return None  # one subsampled mechanism for every value: slow
    other = attrs.evolve(event, batch_order=BatchOrder.POISSON)
    return composition_of(other, NeighboringRelation.ADD_OR_REMOVE_ONE)


def _facts(
    event: LastIterateDpEvent, relation: NeighboringRelation, update: str
) -> tuple[tuple[str, str], ...]:
    contraction, ratio = "any, every step counts (no loss is declared)", ""
    process = process_of(event, relation)
    if process is not None:
        contraction = f"c = {_range(process.contraction)}"
        acts = process.sensitivity > 0
        if acts.any():
            sizes = process.noise_std[acts] / process.sensitivity[acts]
            ratio = f", noise/sensitivity {_range(sizes)}"
    released = ", ".join(map(str, event.release_steps[:_MOST_RELEASES]))
    if len(event.release_steps) > _MOST_RELEASES:
        released += f", ... ({len(event.release_steps)} in all)"
    radius = event.domain_diameter / 2
    projection = f"radius {radius:g}" if radius < math.inf else "no projection"
    clip = "none" if event.clip_norm is None else _range(event.per_step("clip_norm"))
    rate, decay = (_range(event.per_step(name)) for name in ("learning_rate", "weight_decay"))
    return (
        ("released", f"the last iterate{f', and after steps {released}' if released else ''}"),
        ("run", f"{_dealt(event)} ({event.num_steps / event.batches_per_epoch:g} epochs)"),
        (
            "update",
            update
            or f"{contraction}; learning rate {rate}, weight decay {decay}{_prox(event)}, "
            f"{projection}",
        ),
        (
            "noise",
            f"multiplier {_range(event.per_step('noise_multiplier'))}, clip norm {clip}{ratio}",
        ),
    )


def _prox(event: LastIterateDpEvent) -> str:
    if not event.prox_strong_convexity:
        return ""
    return f", prox of a {event.prox_strong_convexity:g}-strongly convex regulariser"


def _run_text(event: LastIterateDpEvent, microbatch: int) -> str:
    clip = "no clipping"
    if event.clip_norm is not None:
        clip = f"clip norm {_range(event.per_step('clip_norm'))}"
    halved = ""
    if microbatch > 1 and not event.is_microbatched:
        halved = " (half of the optimizer's, because microbatches double the sensitivity)"
    diameter = event.domain_diameter
    projection = (
        f"projection on a convex set of diameter {diameter:g}"
        if diameter < math.inf
        else "no projection"
    )
    return _sentence(
        "Noisy gradient descent",
        event,
        f", noise multiplier {_range(event.per_step('noise_multiplier'))}{halved}, {clip}, "
        f"learning rate {_range(event.per_step('learning_rate'))}, weight decay "
        f"{_range(event.per_step('weight_decay'))}{_prox(event)} and {projection}",
        microbatch,
    )


def _released_text(event: LastIterateDpEvent) -> str:
    steps = event.release_steps
    if not steps:
        also = ""
    elif len(steps) <= _MOST_RELEASES:
        also = f", and of the models after iterations {', '.join(map(str, steps))}"
    else:
        also = f", and of {len(steps)} earlier models (iterations {steps[0]} to {steps[-1]})"
    return (
        f"This privacy guarantee protects the release of the final model{also}. It does not "
        "protect other checkpoints, " + _UNPROTECTED
    )


def of_dice_sgd(
    event: DiceSgdDpEvent, relation: NeighboringRelation, delta: float, notes: Notes
) -> Description:
    """Of DiceSGD. Note: `update_rule`, the name of its optimizer."""
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
        theory="docs/papers/dice_sgd.md",
        facts=(
            ("published", _published(event, relation, delta)),
            ("run", f"{_dealt(event)}; update rule {notes.get('update_rule', 'any')}"),
            ("noise on the mean update", f"standard deviation {event.noise_std:.6g}"),
            ("gradients", f"{clip} {event.clip_norm:g}; bound before clipping: {bound}"),
            ("error", f"{clip} {event.error_clip_norm:g}"),
        ),
        run=_sentence(
            "DiceSGD",
            event,
            f", noise multiplier {plain.noise_multiplier:.6g}, gradients {clip} "
            f"{event.clip_norm:g}, error {clip} {event.error_clip_norm:g}",
        ),
        protects=(
            "This privacy guarantee protects the release of all model checkpoints in addition "
            "to the final model, and of all that is computed from them. It does not protect "
            "the error of the feedback, or losses and metrics of the training data."
        ),
        released="Epsilon of all released models:",
        other_label="Epsilon of ANOTHER algorithm, DP-SGD (*):",
        other=lambda: composition_of(plain, relation),
        footnote=(
            "(*) Not this run: DP-SGD with the same batches, clip norm and noise, without "
            "error feedback. DiceSGD must not be reported with it."
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


def of_block_coordinate(
    event: BlockCoordinateDpEvent, relation: NeighboringRelation, delta: float, notes: Notes
) -> Description:
    """Of DP-MBCD."""
    return Description(
        title="Privacy of the released blocks (last iterate only)",
        theory="docs/papers/block_coordinate.md",
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
        run=_sentence(
            "Noisy block coordinate descent",
            event,
            f" on {event.num_blocks} block(s), noise variance "
            f"{_range(event.noise_variances().ravel())}, gradient sensitivity "
            f"{event.sensitivity(relation):g}, step size {event.step_size:g}",
        ),
        protects=(
            "This privacy guarantee protects the release of the blocks after the last "
            "iteration. It does not protect hidden variables, earlier blocks, " + _UNPROTECTED
        ),
    )


def _noise_text(event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> tuple[str, str]:
    variances = event.noise_variances().ravel()
    if event.clip_norm is None or not event.step_size:
        return (
            "noise",
            f"variance {_range(variances)} for each unit of 2 x step size, gradient sensitivity "
            f"{event.sensitivity(relation):g}",
        )
    # 2 eta o = (eta z C / b)^2: Chen & Liu 2025, (6), arXiv 2407.08233
    unit = event.clip_norm / event.batch_size
    multipliers = np.sqrt(2 * variances / event.step_size) / unit
    gradients = "clipped to" if event.clipping_may_act else "never clipped,"
    bound = event.sensitivity(NeighboringRelation.REPLACE_SPECIAL)
    return (
        "noise multiplier",
        f"{_range(multipliers)} on sums of gradients {gradients} {bound:g}",
    )


DESCRIPTIONS: dict[type[DpEvent], Callable[..., Description]] = {
    LastIterateDpEvent: of_last_iterate,
    DiceSgdDpEvent: of_dice_sgd,
    BlockCoordinateDpEvent: of_block_coordinate,
}
"""By the type of the event: what is said of one, its relation, the delta of epsilons, and notes."""


def describer_of(event: DpEvent) -> Callable[..., Description]:
    """The function of `DESCRIPTIONS` for an event.

    Raises:
        TypeError: It is no event of a run.
    """
    for event_type, describe in DESCRIPTIONS.items():
        if isinstance(event, event_type):
            return describe
    known = " or ".join(event_type.__name__ for event_type in DESCRIPTIONS)
    raise TypeError(f"Expected an event of {known}, got {type(event).__name__}.")


def with_every_iterate(event: Any, relation: NeighboringRelation) -> Guarantee | None:
    """The guarantee of the same run with every iterate released; None if none is known."""
    if isinstance(event, DiceSgdDpEvent):  # they are
        return best_guarantee(event, relation)
    if isinstance(event, BlockCoordinateDpEvent):
        # Composition of all updates, which asks for nothing about the loss.
        event = attrs.evolve(event, block_loss=None, update_lipschitz=None)
        return None if BlockCoordinate().check(event, relation) else best_guarantee(event, relation)
    return composition_of(event, relation)
