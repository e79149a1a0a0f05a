"""What a checkpoint holds beside Opacus' entries, and how it is checked before it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dp_accounting import NeighboringRelation

from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.runs.base import run_of
from hidden_state_adapters.opacus.criteria import KnownCriterion
from hidden_state_adapters.opacus.optimizer import PrivateOptimizer
from hidden_state_adapters.opacus.run.declared import DeclaredRun
from hidden_state_adapters.opacus.run.registry import check_later_steps

_logger = logging.getLogger("hidden_state_accountants")

SECTION = "hidden_state_run"
_SCHEMA = 1
_CRITERION_SETTINGS = ("reduction", "label_smoothing", "delta", "beta")


def fields_of(
    declared: DeclaredRun, noise_multiplier: float, relation: NeighboringRelation
) -> dict[str, Any]:
    """What has to be the same when a run goes on, beside what its recorder compares."""
    known, arguments = declared.known_criterion, declared.arguments
    optimizer_class = arguments.optimizer_class
    return {
        "neighboring_relation": relation.name,
        "noise_multiplier": float(noise_multiplier),
        "max_grad_norm": _plain(arguments.max_grad_norm),
        "loss_reduction": arguments.loss_reduction,
        "optimizer_class": None if optimizer_class is None else optimizer_class.__name__,
        "options": arguments.given_options(),
        "update_rule": type(declared.optimizer).__name__,
        "feature_norm": None if arguments.feature_norm is None else float(arguments.feature_norm),
        "prox": None if declared.prox is None else repr(declared.prox),
        "projection": None if declared.projection is None else repr(declared.projection),
        "criterion": None if known is None else _criterion_fields(known),
        **declared.schedule.fields(),
        "has_order_seed": declared.plan.is_seeded,
        "order_of_the_records": declared.plan.fingerprint(),
        "trainable_parameters": {
            name: [list(p.shape), str(p.dtype)]
            for name, p in declared.inner.named_parameters()
            if p.requires_grad
        },
    }


def _plain(norms: Any) -> Any:
    return [float(norm) for norm in norms] if isinstance(norms, list | tuple) else float(norms)


def _criterion_fields(known: KnownCriterion) -> dict[str, Any]:
    """Plain types; weights only where there are some, as in checkpoints from before them."""
    criterion = known.criterion
    settings = {k: getattr(criterion, k) for k in _CRITERION_SETTINGS if hasattr(criterion, k)}
    weights = {k: getattr(criterion, k, None) for k in ("weight", "pos_weight")}
    given = {k: weight.tolist() for k, weight in weights.items() if weight is not None}
    return {"type": type(criterion).__name__, **settings, **given}


def run_state(
    optimizer: PrivateOptimizer, run_id: str, fields: dict[str, Any], include_private: bool
) -> dict[str, Any]:
    """The section of a checkpoint, in plain types.

    It never holds the state of the noise generator: with it the noise of the next steps would be
    known. The order of the records, and the error of DiceSGD, are in it only on request.
    """
    steps = optimizer.num_steps
    missing = optimizer.why_not_resumable(steps)
    state: dict[str, Any] = {
        "schema": _SCHEMA,
        "run_id": run_id,
        "num_steps": steps,
        "fields": fields,
        "noise_multiplier": float(optimizer.noise_multiplier),
        "max_grad_norm": float(optimizer.max_grad_norm),
    }
    if include_private:
        state["private"] = optimizer.private_state()
    elif missing:
        only_order = missing == optimizer.context.plan.why_not_resumable(steps)
        _logger.warning(
            "The checkpoint after step %d lacks %s, so the run cannot go on from it. Save "
            "%swith include_private_state=True, stays_private=True.",
            steps,
            missing,
            "at the end of an epoch, or " if only_order else "",
        )
    return state


def load_private_state(optimizer: PrivateOptimizer, state: Mapping[str, Any]) -> None:
    """Restores the secret order, and the error of DiceSGD, of a section that was checked.

    Raises:
        ValueError: They are of another run, or damaged.
    """
    if "private" not in state:
        return
    optimizer.load_private_state(state["private"], state["num_steps"])


def check_state(
    checkpoint: Mapping[str, Any],
    optimizer: PrivateOptimizer,
    fields: dict[str, Any],
    discard_later_steps: bool,
) -> dict[str, Any]:
    """The section of a checkpoint that fits the current run; nothing is changed.

    Raises:
        ValueError: It is of another run (the text names the field), or steps that were taken after
            it would be forgotten.
        UnsupportedRunError: The secret order or the error that it needs is missing.
    """
    state = checkpoint.get(SECTION)
    runs = checkpoint["privacy_accountant_state_dict"].get("runs")
    if not isinstance(state, dict) or state.get("schema") != _SCHEMA or not runs:
        raise ValueError(
            f"Expected a checkpoint of HiddenStatePrivacyEngine with a run (schema {_SCHEMA}), got "
            f"entries {sorted(checkpoint)}. Save with engine.save_checkpoint."
        )
    declared = run_of(optimizer.run.state_dict())
    declared.load_state_dict(runs[-1])  # names the field that differs
    if state["num_steps"] != declared.num_steps:
        raise ValueError(
            f"The checkpoint is damaged: num_steps = {state['num_steps']}, but "
            f"{declared.num_steps} steps are recorded."
        )
    # Checkpoints of version 0.1 hold no options, prox and projection; what matters to epsilon is in
    # the record as well.
    stored = {name: fields[name] for name in ("options", "prox", "projection")} | state["fields"]
    for name, expected in fields.items():
        if stored.get(name) != expected:
            raise ValueError(
                f"The checkpoint is of another run: expected {name} = {expected!r}, got "
                f"{stored.get(name)!r}. Call make_private as before."
            )
    missing = optimizer.why_not_resumable(declared.num_steps)
    if missing and "private" not in state:
        raise UnsupportedRunError(
            f"The checkpoint lacks {missing}: with another one it would not be the run that is "
            "accounted. Save with include_private_state=True, stays_private=True."
        )
    check_later_steps(state, discard_later_steps)
    return state
