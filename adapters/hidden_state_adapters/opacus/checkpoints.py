"""What a checkpoint holds beside Opacus' entries, and how it is checked before it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dp_accounting import NeighboringRelation

from hidden_state_accountants import RunRecorder, UnsupportedRunError
from hidden_state_adapters.opacus.declared_run import DeclaredRun
from hidden_state_adapters.opacus.optimizer import HiddenStateOptimizer

_logger = logging.getLogger("hidden_state_accountants")

SECTION = "hidden_state_run"
_SCHEMA = 1
_CRITERION_SETTINGS = ("reduction", "label_smoothing", "delta", "beta")

_branches: dict[str, list[RunRecorder]] = {}
"""The recorders of this process, by run: a run that was resumed has several."""


def note_branch(run_id: str, recorder: RunRecorder) -> None:
    """Remembers that `recorder` records (a branch of) a run."""
    recorders = _branches.setdefault(run_id, [])
    if recorder not in recorders:
        recorders.append(recorder)


def fields_of(
    declared: DeclaredRun, noise_multiplier: float, relation: NeighboringRelation
) -> dict[str, Any]:
    """What has to be the same when a run goes on, beside what its recorder compares."""
    criterion = declared.watched_criterion
    return {
        "neighboring_relation": relation.name,
        "noise_multiplier": float(noise_multiplier),
        "max_grad_norm": float(declared.max_grad_norm),
        "loss_reduction": declared.loss_reduction,
        "feature_norm": None if declared.feature_norm is None else float(declared.feature_norm),
        "criterion": None
        if criterion is None
        else {
            "type": type(criterion).__name__,
            **{k: getattr(criterion, k) for k in _CRITERION_SETTINGS if hasattr(criterion, k)},
        },
        **declared.schedule.fields(),
        "has_order_seed": declared.plan.is_seeded,
        "order_of_the_records": declared.plan.fingerprint(),
        "trainable_parameters": {
            name: [list(p.shape), str(p.dtype)]
            for name, p in declared.inner.named_parameters()
            if p.requires_grad
        },
    }


def run_state(
    optimizer: HiddenStateOptimizer, run_id: str, fields: dict[str, Any], include_private: bool
) -> dict[str, Any]:
    """The section of a checkpoint, in plain types.

    It never holds the state of the noise generator: with it the noise of the next steps would be
    known. The order of the records is in it only on request.
    """
    plan, steps = optimizer.context.plan, optimizer.context.recorder.num_steps
    state: dict[str, Any] = {
        "schema": _SCHEMA,
        "run_id": run_id,
        "num_steps": steps,
        "fields": fields,
        "noise_multiplier": float(optimizer.noise_multiplier),
        "max_grad_norm": float(optimizer.max_grad_norm),
    }
    if include_private:
        state["private"] = plan.private_state(steps)
    elif plan.why_not_resumable(steps):
        _logger.warning(
            "The checkpoint after step %d lacks %s, so the run cannot go on from it. Save at the "
            "end of an epoch, or with include_private_state=True, stays_private=True.",
            steps,
            plan.why_not_resumable(steps),
        )
    return state


def check_state(
    checkpoint: Mapping[str, Any],
    optimizer: HiddenStateOptimizer,
    fields: dict[str, Any],
    discard_later_steps: bool,
) -> dict[str, Any]:
    """The section of a checkpoint that fits the current run; nothing is changed.

    Raises:
        ValueError: It is of another run (the text names the field), or steps that were taken after
            it would be forgotten.
        UnsupportedRunError: The secret order that it needs is missing.
    """
    state = checkpoint.get(SECTION)
    runs = checkpoint["privacy_accountant_state_dict"].get("runs")
    if not isinstance(state, dict) or state.get("schema") != _SCHEMA or not runs:
        raise ValueError(
            f"Expected a checkpoint of HiddenStatePrivacyEngine with a run (schema {_SCHEMA}), got "
            f"entries {sorted(checkpoint)}. Save with engine.save_checkpoint."
        )
    declared = RunRecorder.from_state_dict(optimizer.context.recorder.state_dict())
    declared.load_state_dict(runs[-1])  # names the field that differs
    if state["num_steps"] != declared.num_steps:
        raise ValueError(
            f"The checkpoint is damaged: num_steps = {state['num_steps']}, but "
            f"{declared.num_steps} steps are recorded."
        )
    for name, expected in fields.items():
        if state["fields"].get(name) != expected:
            raise ValueError(
                f"The checkpoint is of another run: expected {name} = {expected!r}, got "
                f"{state['fields'].get(name)!r}. Call make_private as before."
            )
    missing = optimizer.context.plan.why_not_resumable(declared.num_steps)
    if missing and "private" not in state:
        raise UnsupportedRunError(
            f"The checkpoint lacks {missing}: another order would not be the run that is "
            "accounted. Save with include_private_state=True, stays_private=True."
        )
    check_later_steps(state, discard_later_steps)
    return state


def check_later_steps(state: Mapping[str, Any], discard_later_steps: bool) -> None:
    """Raises ValueError if this process took steps after the state that would be forgotten."""
    steps = state["num_steps"]
    branches = _branches.get(state["run_id"], [])
    released = [r for branch in branches for r in branch.release_steps if r > steps]
    if released:
        raise ValueError(
            f"Expected the newest released state of the run, got that of step {steps}: the iterate "
            f"after step {max(released)} was released and would be forgotten. Load the checkpoint "
            "of that step or a later one."
        )
    furthest = max((branch.num_steps for branch in branches), default=0)
    if furthest > steps and not discard_later_steps:
        raise ValueError(
            f"Expected the newest state of the run, got that of step {steps}: {furthest} steps "
            "were taken. If nothing computed by the later ones was ever shown to anybody, nor made "
            "you go back, say discard_later_steps=True; it becomes a listed assumption."
        )
