"""The fields of a run that are equal in all processes, compared before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np
from torch import nn

from hidden_state_adapters.batch_plans import hash_of
from hidden_state_adapters.opacus.apart import random_numbers_as_before
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.processes import Digest
from hidden_state_adapters.opacus.registry import AccountedRun
from hidden_state_adapters.opacus.run import TrainingRun

_PACKAGES = ("hidden-state-accountants", "dp-accounting", "opacus", "torch")
_OF_OPACUS = ("batch_first", "clipping", "grad_sample_mode", "loss_reduction", "wrap_model")
_SHOWN = 16  # records that are compared


def fields_in_common(
    declared: DeclaredRun, noise_multiplier: float, earlier: Sequence[AccountedRun]
) -> dict[str, Any]:
    """The fields of a run that starts, of the process that asks; values by name."""
    arguments, plan = declared.arguments, declared.plan
    batches = arguments.batch_order
    given = {name: getattr(arguments, name) for name in _OF_OPACUS}
    groups = [
        {k: v for k, v in g.items() if k != "params"} for g in declared.optimizer.param_groups
    ]
    return {
        "batch_order": plan.order.value,
        "seed of the order": Digest.of(batches.seed, batches.seed_is_secret),
        **declared.fields(noise_multiplier),
        "versions": {name: _version(name) for name in _PACKAGES},
        "model": str(arguments.module),
        "runs behind the weights": [(run.id, run.recorder.num_steps) for run in earlier],
        "weights of the initial model": _weights(declared.inner),
        "options of the optimizer": repr(groups),
        "criterion, as given": repr(arguments.criterion),
        "arguments for Opacus": repr(given),
        "noise_generator (given or not)": arguments.noise_generator is not None,
        "loss_geometry": repr(declared.loss),
        "batch_size": plan.batch_size,
        "sampling_rate": plan.sampling_rate,
        "number of batches": plan.num_batches,
        "max_batch_size": batches.max_batch_size,
        "records of the loader": Digest(hash_of(plan.records)),
        "data set": _shown(arguments.data_loader.dataset, plan.records),
    }


def fields_after_loading(run: TrainingRun) -> dict[str, Any]:
    """The fields of a run that goes on, of the process that loaded it; values by name."""
    private = run.private_state() if run.why_not_resumable(run.num_steps) else {}
    return {
        "run": run.id,
        "number of steps": run.num_steps,
        "weights": _weights(run.declared.inner),
        "private state": Digest.of(*private.values()),
        "moments": Digest.of(*run.optimizer.state.values()),
    }


def _weights(module: nn.Module) -> Digest:
    return Digest.of(dict(module.named_parameters()), dict(module.named_buffers()))


def _shown(dataset: Any, records: Sequence[int]) -> tuple[int, Digest | None]:
    """The size, and some of the records where they are the same whenever they are asked for."""
    places = np.linspace(0, len(records) - 1, min(_SHOWN, len(records))).astype(int).tolist()
    try:
        with random_numbers_as_before():
            first, again = (Digest.of(*(dataset[records[i]] for i in places)) for _ in range(2))
    except Exception:  # whatever a data set may raise that is not asked in its turn
        return len(dataset), None
    return len(dataset), first if first == again else None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
