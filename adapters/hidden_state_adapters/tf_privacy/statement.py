"""The privacy statement of a run, in the shape of TensorFlow Privacy's."""

from __future__ import annotations

import math
import textwrap

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    Guarantee,
    LastIterateAccountant,
    LastIterateDpEvent,
    Schedule,
    UnsupportedRunError,
    _validate,
)
from hidden_state_accountants.guarantee import Status

_MEANING = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "one example is added or removed",
    NeighboringRelation.REPLACE_ONE: "one example is replaced by another",
    NeighboringRelation.REPLACE_SPECIAL: (
        "one example is replaced by one with zero gradient, which is add-or-remove-one with the "
        "number of examples fixed and public"
    ),
}
_HEADINGS = {
    Status.CHECKED: "Checked",
    Status.DECLARED: "Declared (your word)",
    Status.PUBLIC: "Public",
}


def compute_last_iterate_privacy_statement(
    event: LastIterateDpEvent,
    delta: float,
    neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
) -> str:
    """What is protected, under which relation and assumptions, and the epsilons, as text.

    Formal guarantees: those of `LastIterateAccountant` for the event. Besides the epsilon of what
    is released the text gives that of the release of every iterate (ordinary composition), and
    that of another algorithm at the same noise (Poisson sampling), labelled as such.

    Args:
        event: The run, declared or recorded by `HiddenStateCallback`.
        delta: Where epsilon is read, in [0, 1].
        neighboring_relation: The relation of the guarantee.

    Raises:
        UnsupportedRunError: No theorem covers the event under the relation.
        TypeError, ValueError: An argument has an impossible value.
    """
    if not isinstance(event, LastIterateDpEvent):
        raise TypeError(f"Expected event to be a LastIterateDpEvent, got {type(event).__name__}.")
    accountant = LastIterateAccountant(_validate.neighboring_relation(neighboring_relation))
    guarantee = accountant.compose(event).guarantee
    return statement(event, guarantee, guarantee.assumptions, _validate.target_delta(delta))


def statement(
    event: LastIterateDpEvent,
    guarantee: Guarantee,
    assumptions: tuple[Assumption, ...],
    delta: float,
    microbatch: int = 1,
) -> str:
    """As `compute_last_iterate_privacy_statement`, for a guarantee that is known already.

    Args:
        event: The run.
        guarantee: Of it.
        assumptions: What has to be true.
        delta: Where epsilon is read.
        microbatch: Examples in a microbatch, which is a record of the event.
    """
    relation = guarantee.neighboring_relation
    lines = [
        _wrapped(
            f"Example-level DP with {relation.name} adjacency ({_MEANING[relation]}) at delta = "
            f"{delta}, computed by {guarantee.theorem}:"
        ),
        _line("Epsilon of the released model (last iterate):", guarantee.epsilon(delta)),
        _line("Epsilon if all checkpoints are released:", _all_released(event, relation, delta)),
    ]
    has_other = event.batch_order is not BatchOrder.POISSON
    if has_other:
        lines.append(
            _line("Epsilon of ANOTHER algorithm, Poisson batches (*):", _poisson(event, delta))
        )
    paragraphs = [
        _wrapped(_run_text(event, microbatch)),
        _wrapped(_released_text(event)),
        "\n".join(lines),
    ]
    if guarantee.caveat:
        paragraphs.append(_wrapped(f"NOT PROVEN: {guarantee.caveat}"))
    for status, heading in _HEADINGS.items():
        texts = [a.text for a in assumptions if a.status is status]
        if texts:
            paragraphs.append("\n".join([f"{heading}:", *map(_item, texts)]))
    paragraphs.append(
        _wrapped(
            "No user-level privacy guarantee is possible without a bound on the number of examples "
            "per user."
        )
    )
    if has_other:
        paragraphs.append(
            _wrapped(
                "(*) Not this run. It draws every batch anew with Poisson sampling, at the same "
                "noise, and releases all checkpoints; its figure is for ADD_OR_REMOVE_ONE "
                "adjacency. A run over fixed batches must not be reported with it."
            )
        )
    return "\n\n".join(paragraphs) + "\n"


def _standard_epsilon(event: dp_accounting.DpEvent, delta: float) -> float:
    """The epsilon of a standard event that has the relation folded into its noise."""
    accountant = LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    return accountant.compose(event).get_epsilon(delta)


def _all_released(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float
) -> float | None:
    try:
        return _standard_epsilon(event.as_composition(relation), delta)
    except UnsupportedRunError:
        return None


def _poisson(event: LastIterateDpEvent, delta: float) -> float | None:
    if isinstance(event.noise_multiplier, Schedule) or isinstance(event.clip_norm, Schedule):
        return None  # one subsampled mechanism for every value: slow
    sampled = attrs.evolve(event, batch_order=BatchOrder.POISSON, record_position=None)
    return _all_released(sampled, NeighboringRelation.ADD_OR_REMOVE_ONE, delta)


def _line(text: str, epsilon: float | None) -> str:
    return f"    {text:<50} " + ("  not computed" if epsilon is None else f"{epsilon:14.3f}")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, width=80)


def _item(text: str) -> str:
    return textwrap.fill(text, width=80, initial_indent="  - ", subsequent_indent="    ")


def _run_text(event: LastIterateDpEvent, microbatch: int) -> str:
    clip = "no clipping" if event.clip_norm is None else f"clip norm {_range(event, 'clip_norm')}"
    halved, grouped = "", "without microbatching"
    if microbatch > 1:
        halved = " (half of the optimizer's, because microbatches double the sensitivity)"
        grouped = f"with microbatches of {microbatch}"
    diameter = event.domain_diameter
    projection = (
        f"projection on a convex set of diameter {diameter:g}"
        if diameter < math.inf
        else "no projection"
    )
    return (
        f"Noisy gradient descent performed over {event.dataset_size * microbatch} examples with "
        f"{event.batch_size * microbatch} examples per iteration in {event.batch_order.value} "
        f"order, noise multiplier {_range(event, 'noise_multiplier')}{halved}, {clip}, learning "
        f"rate "
        f"{_range(event, 'learning_rate')}, weight decay {_range(event, 'weight_decay')} and "
        f"{projection}, for {event.num_steps} iterations "
        f"({event.num_steps / event.batches_per_epoch:g} epochs) {grouped}."
    )


def _released_text(event: LastIterateDpEvent) -> str:
    steps = event.release_steps
    if not steps:
        also = ""
    elif len(steps) <= 6:
        also = f", and of the models after iterations {', '.join(map(str, steps))}"
    else:
        also = f", and of {len(steps)} earlier models (iterations {steps[0]} to {steps[-1]})"
    return (
        f"This privacy guarantee protects the release of the final model{also}. It does not "
        "protect other checkpoints, averages of iterates, optimizer state, or losses and metrics "
        "of the training data or of intermediate models."
    )


def _range(event: LastIterateDpEvent, name: str) -> str:
    values = event.per_step(name)
    low, high = float(values.min()), float(values.max())
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
