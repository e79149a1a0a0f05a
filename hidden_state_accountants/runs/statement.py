"""What a person reads about a run: the report, and the line before training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.accountants import LastIterateAccountant, compose_guarantees
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.composition import Composition
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Assumption, Guarantee, Status
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    sampled_process,
    unmet_conditions,
)

_STEPS_LOOKED_AHEAD, _DELTA = 50_000, 1e-5


_EQUALS_COMPOSITION = "no contraction: epsilon equals composition (each epoch counts)"


def composition_epsilon(
    events: Sequence[LastIterateDpEvent | DiceSgdDpEvent],
    relation: NeighboringRelation,
    delta: float,
) -> float:
    """The epsilon with every iterate of every run released; inf if no such bound is known."""
    guarantees: list[Guarantee] = []
    for event in events:
        if isinstance(event, DiceSgdDpEvent):  # every iterate is released anyway
            guarantees.append(best_guarantee(event, relation))
        elif Composition().check(event, relation):
            return math.inf
        else:
            guarantees.append(Composition().guarantee(event, relation))
    return compose_guarantees(guarantees, relation).epsilon(delta)


def process_of(event: LastIterateDpEvent, relation: NeighboringRelation) -> NoisyProcess | None:
    """The contractive process of a run; of random batches that with batches of b records."""
    if unmet_conditions(event, relation, tuple(BatchOrder)):
        return None
    if event.batch_order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        return sampled_process(event, relation, event.batch_size)
    return noisy_process(event, relation)


def no_contraction_line(event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
    """One line on a run whose update does not contract; empty if it does or is projected.

    The run is looked at for ten epochs, or fewer if that is more than 50,000 steps.

    Args:
        event: One step of the run with its first hyper-parameters.
        relation: The neighbouring relation.
    """
    process = process_of(event, relation)
    if process is None:
        return f"{_EQUALS_COMPOSITION}; no loss geometry is declared"
    c = float(process.contraction[0])
    if c < 1 or event.domain_diameter < float("inf"):
        return ""
    reason = (
        f"one step stretches distances by up to c = {c:.6g}"
        if c > 1
        else "the update does not shrink distances (c = 1)"
    )
    if event.batch_order not in (BatchOrder.CYCLIC, BatchOrder.FULL):
        return (
            f"no contraction: {reason}; what the secret order gains is in get_epsilon (assuming "
            "the first step's hyper-parameters)"
        )
    epochs = min(10, _STEPS_LOOKED_AHEAD // event.batches_per_epoch)
    if epochs < 2:  # within one epoch the last batch always costs as much as under composition
        return f"no contraction: {reason} (assuming the first step's hyper-parameters)"
    ahead = attrs.evolve(event, num_steps=epochs * event.batches_per_epoch)
    last = LastIterateAccountant(relation).compose(ahead).get_epsilon(_DELTA)
    every = composition_epsilon([ahead], relation, _DELTA)
    gain = last / every if 0 < every < float("inf") else 1.0
    assuming = f"assuming delta = {_DELTA:g} and the first step's hyper-parameters"
    if gain > 0.999:
        return f"{_EQUALS_COMPOSITION}; {reason} ({assuming})"
    return (
        f"no contraction: {reason}; after {epochs} epochs epsilon is {gain:.3g} times that of "
        f"composition, thanks to the noise of the other batches only ({assuming})"
    )


def text_report(
    events: Sequence[LastIterateDpEvent | DiceSgdDpEvent],
    guarantee: Guarantee,
    assumptions: tuple[Assumption, ...],
    delta: float,
    projection_radius: float | None,
) -> str:
    """About a dozen lines to paste; the run described is the last one, a LastIterateDpEvent."""
    event, num_runs = events[-1], len(events)
    assert isinstance(event, LastIterateDpEvent)
    relation = guarantee.neighboring_relation
    epsilon_released = composition_epsilon(events, relation, delta)
    contraction, ratio = "unknown (no loss geometry declared)", "-"
    process = process_of(event, relation)
    if process is not None:
        contraction = f"c = {_range(process.contraction)}"
        acts = process.sensitivity > 0
        if acts.any():
            ratio = _range(process.noise_std[acts] / process.sensitivity[acts])
    released = ", ".join(map(str, event.release_steps[:6]))
    if len(event.release_steps) > 6:
        released += f", ... ({len(event.release_steps)} in all)"
    radius = "no projection" if projection_radius is None else f"radius {projection_radius:g}"
    noise, clip = _range(event.per_step("noise_multiplier")), _clip(event)
    rate, decay = _range(event.per_step("learning_rate")), _range(event.per_step("weight_decay"))
    by_status = {
        status: "; ".join(a.text for a in assumptions if a.status is status) for status in Status
    }
    return "\n".join(
        [
            f"Privacy of the released model{f' ({num_runs} runs)' if num_runs > 1 else ''}",
            f"epsilon = {guarantee.epsilon(delta):.4f} at delta = {delta:g}",
            f"neighboring relation: {relation.name}",
            f"theorem: {guarantee.theorem}",
            f"epsilon if every iterate were released: {epsilon_released:.4f}",
            f"released: the last iterate{f', and after steps {released}' if released else ''}",
            f"run: {event.num_steps} steps x {event.batch_size} of {event.dataset_size} records, "
            f"{event.batch_order.value} ({event.num_steps / event.batches_per_epoch:g} epochs)",
            f"update: {contraction}; learning rate {rate}, weight decay {decay}, {radius}",
            f"noise: multiplier {noise}, clip norm {clip}, noise/sensitivity {ratio}",
            f"checked at every step: {by_status[Status.CHECKED]}",
            f"declared (your word): {by_status[Status.DECLARED]}",
            f"public: {by_status[Status.PUBLIC] or '-'}",
        ]
    )


def _clip(event: LastIterateDpEvent) -> str:
    return "none" if event.clip_norm is None else _range(event.per_step("clip_norm"))


def _range(values: np.ndarray) -> str:
    low, high = float(np.min(values)), float(np.max(values))
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
