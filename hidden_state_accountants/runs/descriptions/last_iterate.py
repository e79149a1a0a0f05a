"""What a statement says of noisy SGD of which the last iterate is released."""

from __future__ import annotations

import math

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants.events.batch_order import BatchOrder, rate_text
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    sampled_process,
    unmet_conditions,
)
from hidden_state_accountants.runs.descriptions.base import (
    UNPROTECTED,
    Description,
    Other,
    range_of,
)

_WITHOUT_OTHER = (BatchOrder.POISSON, BatchOrder.FULL)
_MOST_RELEASES = 6  # that are listed one by one


def description(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    microbatch: int = 1,
    *,
    update: str = "",
) -> Description:
    """The texts of a run.

    Args:
        event: The run.
        relation: Of the guarantee.
        microbatch: Examples in a microbatch, which is a record of the event.
        update: What is said of the update instead, or "".
    """
    # With Poisson batches there is no other algorithm; a full batch is not a sample. Nobody adds or
    # removes microbatches.
    has_other = not (event.is_microbatched or event.batch_order in _WITHOUT_OTHER)
    other = Other(
        "Epsilon of ANOTHER algorithm, Poisson batches (*):",
        _with_poisson_batches(event),
        NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    footnote = (
        "(*) Not this run. It draws every batch anew with Poisson sampling, at the same noise, and "
        "releases all checkpoints; its figure is for ADD_OR_REMOVE_ONE adjacency. A run over fixed "
        "batches must not be reported with it."
    )
    return Description(
        title="Privacy of the released model",
        facts=_facts(event, relation, update),
        run=_run_text(event, microbatch),
        protects=_released_text(event),
        others=(other,) if has_other else (),
        footnote=footnote if has_other else "",
    )


def process_of(event: LastIterateDpEvent, relation: NeighboringRelation) -> NoisyProcess | None:
    """The contractive process of a run; of random batches that with batches of b records."""
    if unmet_conditions(event, relation, tuple(BatchOrder)):
        return None
    if event.batch_order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        return sampled_process(event, relation, event.batch_size)
    return noisy_process(event, relation)


def _with_poisson_batches(event: LastIterateDpEvent) -> LastIterateDpEvent | None:
    if isinstance(event.noise_multiplier, Schedule) or isinstance(event.clip_norm, Schedule):
        return None  # one subsampled mechanism for every value: slow
    return attrs.evolve(event, batch_order=BatchOrder.POISSON, record_position=None)


def _facts(
    event: LastIterateDpEvent, relation: NeighboringRelation, update: str
) -> tuple[tuple[str, str], ...]:
    contraction, ratio = "unknown (no loss geometry declared)", "-"
    process = process_of(event, relation)
    if process is not None:
        contraction = f"c = {range_of(process.contraction)}"
        acts = process.sensitivity > 0
        if acts.any():
            ratio = range_of(process.noise_std[acts] / process.sensitivity[acts])
    released = ", ".join(map(str, event.release_steps[:_MOST_RELEASES]))
    if len(event.release_steps) > _MOST_RELEASES:
        released += f", ... ({len(event.release_steps)} in all)"
    radius = event.domain_diameter / 2
    projection = f"radius {radius:g}" if radius < math.inf else "no projection"
    clip = "none" if event.clip_norm is None else range_of(event.per_step("clip_norm"))
    rate, decay = (range_of(event.per_step(name)) for name in ("learning_rate", "weight_decay"))
    return (
        ("released", f"the last iterate{f', and after steps {released}' if released else ''}"),
        (
            "run",
            f"{event.num_steps} steps x {event.batch_size} of {event.dataset_size} records"
            f"{rate_text(event.sampling_rate)}, "
            f"{event.batch_order.value} ({event.num_steps / event.batches_per_epoch:g} epochs)",
        ),
        (
            "update",
            update
            or f"{contraction}; learning rate {rate}, weight decay {decay}{_prox(event)}, "
            f"{projection}",
        ),
        (
            "noise",
            f"multiplier {range_of(event.per_step('noise_multiplier'))}, clip norm {clip}, "
            f"noise/sensitivity {ratio}",
        ),
    )


def _prox(event: LastIterateDpEvent) -> str:
    if not event.prox_strong_convexity:
        return ""
    return f", prox of a {event.prox_strong_convexity:g}-strongly convex regulariser"


def _run_text(event: LastIterateDpEvent, microbatch: int) -> str:
    clip = "no clipping"
    if event.clip_norm is not None:
        clip = f"clip norm {range_of(event.per_step('clip_norm'))}"
    halved, grouped = "", "without microbatching"
    if microbatch > 1:
        if not event.is_microbatched:
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
        f"order{rate_text(event.sampling_rate)}, "
        f"noise multiplier {range_of(event.per_step('noise_multiplier'))}{halved}, {clip}, "
        f"learning rate {range_of(event.per_step('learning_rate'))}, weight decay "
        f"{range_of(event.per_step('weight_decay'))}{_prox(event)} and {projection}, for "
        f"{event.num_steps} "
        f"iterations ({event.num_steps / event.batches_per_epoch:g} epochs) {grouped}."
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
        "protect other checkpoints, " + UNPROTECTED
    )
