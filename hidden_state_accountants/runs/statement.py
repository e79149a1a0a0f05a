"""Statement about a run, a line a fact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants.accountants import LastIterateAccountant, compose_guarantees
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.chen_liu_2025 import BlockCoordinate
from hidden_state_accountants.bounds.composition import composition_of
from hidden_state_accountants.events.batch_order import DealtEvent, rate_text
from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import fixed_up, text_up
from hidden_state_accountants.guarantee import Guarantee, Status, group_guarantee
from hidden_state_accountants.process.groups import run_of_groups
from hidden_state_accountants.process.noisy_process import process_of

_LABELS = {
    Status.CHECKED: "checked by the software",
    Status.DECLARED: "declared by you",
    Status.PUBLIC: "public",
}
_ABOUT_SEVERAL = (
    "epsilon and theorem are those of all together, the other lines are about the last one"
)
_MOST_RELEASES = 6  # steps that are listed one by one

Facts = Iterable[tuple[str, str]]
"""Labels and texts of lines."""


def privacy_statement(
    events: Sequence[DpEvent],
    guarantee: Guarantee,
    delta: float,
    beside: DpEvent | None = None,
    **notes: Any,
) -> str:
    """Returns what was run, what is proved of it, and what has to be true for that.

    About a dozen lines "label: text" to paste, and the assumptions of the guarantee, one a line. Of
    several runs the epsilons and the theorem are those of all together, the rest is about the last
    one.

    Args:
        events: The runs, in order; at least one.
        guarantee: Guarantee of all of them together.
        delta: Where epsilon is read, in [0, 1].
        beside: What else was released of the same records, if `guarantee` is about it as well.
        **notes: What the events do not say: `microbatch`, the examples of a record of a
            `LastIterateRun`, and `update`, what is said of an update that is not its event's;
            `update_rule`, the name of the optimizer behind a `DiceSgdRun`. Those that the last run
            has no use for are left out.

    Raises:
        TypeError: One of the events is not that of a run.
    """
    title, theory, facts = [description_of(event) for event in events][-1]
    several = len(events) > 1
    rows = [
        ("neighboring relation", guarantee.relation),
        ("theorem", guarantee.theorem + (f" ({theory})" if theory else "")),
    ]
    if guarantee.curve.mu is not None:
        rows.append(("mu (Gaussian differential privacy)", text_up(guarantee.curve.mu, 6)))
    if guarantee.caveat:
        rows.append(("NOT PROVEN", guarantee.caveat))
    if not all(isinstance(event, DiceSgdDpEvent) for event in events):
        every = _epsilon_of_every_iterate(events, guarantee, delta, beside)
        rows.append(("epsilon if every iterate were released", every))
    rows += facts(events[-1], guarantee.neighboring_relation, **notes)
    if several:
        rows.append(("runs", f"{len(events)}; {_ABOUT_SEVERAL}"))
    lines = [
        f"{title} ({len(events)} runs)" if several else title,
        f"epsilon = {fixed_up(guarantee.epsilon(delta), 4)} at delta = {delta:g}",
        *(f"{label}: {text}" for label, text in rows),
    ]
    for status, label in _LABELS.items():
        texts = [f"  - {a.text}" for a in guarantee.assumptions if a.status is status]
        lines += [f"{label}:", *texts] if texts else []
    return "\n".join(lines)


def _epsilon_of_every_iterate(
    events: Sequence[DpEvent], guarantee: Guarantee, delta: float, beside: DpEvent | None
) -> str:
    relation, size = guarantee.neighboring_relation, guarantee.group_size
    found = [with_every_iterate(run_of_groups(e, relation, size), relation) for e in events]
    if beside is not None:
        found.append(LastIterateAccountant(relation).compose(beside).guarantee)
    covered = [each for each in found if each is not None]
    if len(covered) < len(found):
        return "not computed"
    together = group_guarantee(compose_guarantees(covered, relation), size)
    return fixed_up(together.epsilon(delta), 4)


def with_every_iterate(event: Any, relation: NeighboringRelation) -> Guarantee | None:
    """The guarantee of the same run with every iterate released; None if none is known."""
    if isinstance(event, DiceSgdDpEvent):  # they are
        return best_guarantee(event, relation)
    if isinstance(event, BlockCoordinateDpEvent):
        # Composition of all updates, which asks for nothing about the loss.
        event = attrs.evolve(event, block_loss=None, update_lipschitz=None)
        return None if BlockCoordinate().check(event, relation) else best_guarantee(event, relation)
    return composition_of(event, relation)


# By the kind of the run: its title, the page that proves the theorem, and its facts


def _range(values: Iterable[float]) -> str:
    """The value that all have, or the smallest and the largest one."""
    values = tuple(values)
    low, high = f"{min(values):.6g}", f"{max(values):.6g}"
    return low if low == high else f"{low} to {high}"


def _dealt(event: DealtEvent, each: int = 1) -> str:
    """Order and sizes of the batches, of records of `each` examples."""
    microbatches = f" in microbatches of {each}" if each > 1 else ""
    return (
        f"{event.num_steps} steps x {event.batch_size * each} of {event.dataset_size * each} "
        f"records{microbatches}{rate_text(event.sampling_rate)}, {event.batch_order.value}"
    )


def _of_last_iterate(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    update: str = "",
    microbatch: int = 1,
    **_: Any,
) -> Facts:
    steps = event.release_steps
    released = f", and after steps {', '.join(map(str, steps[:_MOST_RELEASES]))}" if steps else ""
    if len(steps) > _MOST_RELEASES:
        released += f", ... ({len(steps)} in all)"
    yield "released", f"the last iterate{released}"
    epochs = event.num_steps / event.batches_per_epoch
    yield "run", f"{_dealt(event, microbatch)} ({epochs:g} epochs)"
    contraction, ratio = "any, every step counts (no loss is declared)", ""
    process = process_of(event, relation)
    if process is not None:
        contraction = f"c = {_range(process.contraction)}"
        acts = process.sensitivity > 0
        if acts.any():
            sizes = process.noise_std[acts] / process.sensitivity[acts]
            ratio = f", noise/sensitivity {_range(sizes)}"
    radius, prox = event.domain_diameter / 2, event.prox_strong_convexity
    parts = [
        f"{contraction}; learning rate {_range(event.per_step('learning_rate'))}",
        f"weight decay {_range(event.per_step('weight_decay'))}",
        *([f"prox of a {prox:g}-strongly convex regulariser"] if prox else []),
        f"radius {radius:g}" if radius < math.inf else "no projection",
    ]
    yield "update", update or ", ".join(parts)
    noise = f"multiplier {_range(event.per_step('noise_multiplier'))}"
    if microbatch > 1 and not event.is_microbatched:
        noise += " (half of the optimizer's: microbatches double the sensitivity)"
    clip = "none" if event.clip_norm is None else _range(event.per_step("clip_norm"))
    yield "noise", f"{noise}, clip norm {clip}{ratio}"


def _of_dice_sgd(
    event: DiceSgdDpEvent, relation: NeighboringRelation, update_rule: str = "any", **_: Any
) -> Facts:
    clip = "normalised to" if event.automatic else "clip norm"
    bound = "none declared" if event.gradient_bound == math.inf else f"{event.gradient_bound:g}"
    yield "run", f"{_dealt(event)}; update rule {update_rule}"
    yield "noise on the mean update", f"standard deviation {event.noise_std:.6g}"
    yield "gradients", f"{clip} {event.clip_norm:g}; bound before clipping: {bound}"
    yield "error", f"{clip} {event.error_clip_norm:g}"


def _of_block_coordinate(
    event: BlockCoordinateDpEvent, relation: NeighboringRelation, **_: Any
) -> Facts:
    yield (
        "run",
        f"{event.num_epochs} epochs x {event.batches_per_epoch} fixed batches of "
        f"{event.batch_size} records x {event.num_blocks} blocks, step size {event.step_size:g}",
    )
    variances = event.noise_variances().ravel()
    if event.clip_norm is None or not event.step_size:
        sensitivity = f"gradient sensitivity {event.sensitivity(relation):g}"
        unit = f"variance {_range(variances)} for each unit of 2 x step size"
        yield "noise", f"{unit}, {sensitivity}"
    else:
        # 2 eta o = (eta z C / b)^2: Chen & Liu 2025, (6), arXiv 2407.08233
        unit_of_noise = event.clip_norm / event.batch_size
        multipliers = np.sqrt(2 * variances / event.step_size) / unit_of_noise
        gradients = "clipped to" if event.clipping_may_act else "never clipped,"
        bound = event.sensitivity(NeighboringRelation.REPLACE_SPECIAL)
        text = f"{_range(multipliers)} on sums of gradients {gradients} {bound:g}"
        yield "noise multiplier", text
    yield "prox", f"{event.prox_strong_convexity:g}-strongly convex"


_DESCRIPTIONS: dict[type[DpEvent], tuple[str, str, Callable[..., Facts]]] = {
    LastIterateDpEvent: ("Privacy of the released model", "", _of_last_iterate),
    DiceSgdDpEvent: (
        "Privacy of all iterates (the error of the feedback stays hidden)",
        "docs/papers/dice_sgd.md",
        _of_dice_sgd,
    ),
    BlockCoordinateDpEvent: (
        "Privacy of the released blocks (last iterate only)",
        "docs/papers/block_coordinate.md",
        _of_block_coordinate,
    ),
}


def description_of(event: DpEvent) -> tuple[str, str, Callable[..., Facts]]:
    """The title, the page of the theory and the facts of a run; TypeError for another event."""
    for event_type, description in _DESCRIPTIONS.items():
        if isinstance(event, event_type):
            return description
    known = " or ".join(event_type.__name__ for event_type in _DESCRIPTIONS)
    raise TypeError(f"Expected an event of {known}, got {type(event).__name__}.")
