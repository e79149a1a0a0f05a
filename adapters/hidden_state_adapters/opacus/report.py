"""What a person reads: the report, the assumptions and the line before training."""

from __future__ import annotations

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    Guarantee,
    LastIterateAccountant,
    LastIterateDpEvent,
)
from hidden_state_accountants.guarantee import Status, merge_assumptions
from hidden_state_accountants.process import noisy_process, unmet_conditions
from hidden_state_adapters.opacus.optimizer import RunContext

_STEPS_LOOKED_AHEAD, _DELTA = 50_000, 1e-5


_EQUALS_COMPOSITION = "no contraction: epsilon equals composition (each epoch counts)"


def standard_epsilon(event: dp_accounting.DpEvent, delta: float) -> float:
    """The epsilon of a standard event that has the relation folded into its noise."""
    return (
        LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
        .compose(event)
        .get_epsilon(delta)
    )


def no_contraction_line(event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
    """One line on a run whose update does not contract; empty if it does or is projected.

    The run is looked at for ten epochs, or fewer if that is more than 50,000 steps.

    Args:
        event: One step of the run with its first hyper-parameters.
        relation: The neighbouring relation.
    """
    if unmet_conditions(event, relation):
        return f"{_EQUALS_COMPOSITION}; no loss geometry is declared"
    c = float(noisy_process(event, relation).contraction[0])
    if c < 1 or event.domain_diameter < float("inf"):
        return ""
    reason = (
        f"one step stretches distances by up to c = {c:.6g}"
        if c > 1
        else "the update does not shrink distances (c = 1)"
    )
    epochs = min(10, _STEPS_LOOKED_AHEAD // event.batches_per_epoch)
    if epochs < 2:  # within one epoch the last batch always costs as much as under composition
        return f"no contraction: {reason} (assuming the first step's hyper-parameters)"
    ahead = attrs.evolve(event, num_steps=epochs * event.batches_per_epoch)
    last = LastIterateAccountant(relation).compose(ahead).get_epsilon(_DELTA)
    every = standard_epsilon(ahead.as_composition(relation), _DELTA)
    gain = last / every if 0 < every < float("inf") else 1.0
    assuming = f"assuming delta = {_DELTA:g} and the first step's hyper-parameters"
    if gain > 0.999:
        return f"{_EQUALS_COMPOSITION}; {reason} ({assuming})"
    return (
        f"no contraction: {reason}; after {epochs} epochs epsilon is {gain:.3g} times that of "
        f"composition, thanks to the noise of the other batches only ({assuming})"
    )


def run_assumptions(guarantee: Guarantee, context: RunContext | None) -> tuple[Assumption, ...]:
    """The assumptions of the guarantee with what the adapter checks and takes on trust.

    Args:
        guarantee: Of all runs.
        context: Of the current run, if there is one.
    """
    checked = [
        "indices of the batches: b each, in the fixed order, each once per epoch, one step each",
        "plain SGD with equal groups; learning rate, decay, clip norm and noise as recorded",
        "parameters in float32 or float64, changed by the private optimizer only; no batch "
        "statistics, buffers unchanged",
    ]
    if context is not None and context.criterion is not None:
        checked.append("the criterion called once on the whole batch, one target per record")
    replaced = "projected on"
    if context is not None and context.lipschitz is not None:
        checked.append(f"per-example gradient norms at most {context.lipschitz:g}")
    if context is not None and context.feature_norm is not None:
        checked.append(f"feature norms at most {context.feature_norm:g}")
    if context is not None and context.projection_radius is not None:
        radius = context.projection_radius
        checked.append(f"all parameters together projected on the ball of radius {radius:g}")
    declared = (
        "every per-example gradient is that of the loss at one record of the delivered batch",
        "the initial model and the order of the records do not depend on the records",
    )
    return merge_assumptions(
        [
            tuple(Assumption.checked(text) for text in checked),
            tuple(Assumption.declared(text) for text in declared),
            tuple(a for a in guarantee.assumptions if replaced not in a.text),
            (Assumption.public("order of the batches, batch size, hyper-parameters"),),
        ]
    )


def text_report(
    event: LastIterateDpEvent,
    guarantee: Guarantee,
    assumptions: tuple[Assumption, ...],
    delta: float,
    epsilon: float,
    epsilon_released: float,
    projection_radius: float | None,
    num_runs: int,
) -> str:
    """About a dozen lines to paste; the run described is the last of `num_runs`."""
    relation = guarantee.neighboring_relation
    contraction, ratio = "unknown (no loss geometry declared)", "-"
    if not unmet_conditions(event, relation):
        process = noisy_process(event, relation)
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
            f"epsilon = {epsilon:.4f} at delta = {delta:g}",
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
