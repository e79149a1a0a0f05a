"""One run: its record, its batches and position, its own iterate, and whether it goes on."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_accountants.runs.run import Run, run_of
from hidden_state_adapters.batch_plans import hash_of
from hidden_state_adapters.opacus.apart import random_numbers_as_before
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.head import HeadRun
from hidden_state_adapters.opacus.loader import BatchCursor
from hidden_state_adapters.opacus.noise import whose_noise
from hidden_state_adapters.opacus.passes import Passes
from hidden_state_adapters.opacus.processes import Digest
from hidden_state_adapters.opacus.registry import AccountedRun, check_later_steps, note_branch
from hidden_state_adapters.opacus.sampled import SampledRun

_logger = logging.getLogger("hidden_state_accountants")

SECTION = "hidden_state_run"
"""Where a checkpoint holds the state of a run."""
_SCHEMA = 1
_SHOWN = 16  # records that are compared


class TrainingRun:
    """The state of a run between two steps, which the optimizer takes.

    Attributes:
        record: Record of every logical step.
        declared: Arguments of `make_private`, and what follows from them.
        accounted: Part that the accountant keeps, and that the model takes along.
        fields: Fields that are the same where it goes on, beside those of the record.
        cursor: Position of the run: number of steps, and the batch that the loop is working on.
        passes: Source of the gradients, which holds the last private iterate.
        optimizer: PrivateOptimizer that takes the steps.
        modules: The model that was passed, without wrappers, and as `make_private` returned it.
        is_loading: True while a checkpoint is being restored.
    """

    optimizer: Any
    modules: tuple[Any, ...] = ()
    _closed = ""
    is_loading = False

    def __init__(self, declared: DeclaredRun, noise_multiplier: float):
        self.declared, self.fields = declared, declared.fields(noise_multiplier)
        plan, loader = declared.plan, declared.arguments.data_loader
        algorithm = declared.mechanism.algorithm(declared, noise_multiplier)
        self.record: Run = algorithm.new_run(plan.fields)
        self.accounted = AccountedRun(self.record, schedule=declared.schedule)
        if declared.group is not None:
            self.accounted.id = declared.group.run_id
        self.cursor = BatchCursor(
            plan.num_batches,
            loader.num_workers * (loader.prefetch_factor or 0),
            counts_steps=plan.draws_every_step,
        )
        declared.frozen.hold()
        made = SampledRun if declared.head is None else HeadRun
        self.passes: Passes = made(declared, self.cursor)
        # A script may keep the model alone, and train it in another run.
        weakref.finalize(self, _remove_all, self.passes.handles).atexit = False

    @property
    def num_steps(self) -> int:
        """The number of steps taken."""
        return self.cursor.steps_taken

    # What epsilon is about

    def check_iterate(self) -> None:
        """Raises UnsupportedRunError unless the parameters are those the last step left."""
        self.check_alive()
        self.check_not_refused()
        self.cursor.check_finished()
        self.passes.check_iterate(self.num_steps)

    def check_alive(self) -> None:
        """Raises UnsupportedRunError if the run was closed, or only its record was restored."""
        if self._closed:
            raise UnsupportedRunError(self._closed)
        if self.record.num_steps != self.num_steps and not self.accounted.failure:
            raise UnsupportedRunError(
                f"The optimizer took {self.num_steps} steps, but {self.record.num_steps} are "
                "recorded. Restore a run with engine.load_checkpoint, which restores model, "
                "record, hidden state and position together."
            )

    def check_not_refused(self) -> None:
        """Raises UnsupportedRunError if a step of this run was refused or interrupted."""
        if self.accounted.failure:
            raise UnsupportedRunError(
                "A step of this run was refused or interrupted. What ended the run may depend on "
                "the records, so no epsilon covers the model. Start again with another optimizer. "
                f"It was: {self.accounted.failure}"
            )

    def check_ended(self) -> None:
        """Checks a run whose last iterate counts as released."""
        if self.accounted.has_moved or self.num_steps:
            self.check_iterate()
            self.record.event()  # a run that ends within an epoch may have none, for good

    def close(self, reason: str) -> None:
        """Ends the run: every step raises UnsupportedRunError with `reason` from now on."""
        self._closed = reason
        self.passes.close()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The checked, the declared and the public assumptions."""
        declared = self.declared
        return (
            *self.optimizer.assumptions,
            *self.passes.assumptions,
            *(part.assumption for part in declared.maps.values()),
            whose_noise(self.optimizer),
            *([] if declared.group is None else declared.group.assumptions),
        )

    # Where it goes on

    def why_not_resumable(self, num_steps: int) -> str:
        """Returns the private state that the run needs to go on from a step, in words, or ""."""
        missing = [self.declared.plan.why_not_resumable(num_steps)]
        if num_steps:
            missing.insert(0, self.optimizer.why_not_resumable())
        return ", and ".join(filter(None, missing))

    def private_state(self) -> dict[str, Any]:
        """Returns plain types and tensors that restore hidden state and secret order. Secret."""
        state = self.declared.plan.private_state(self.num_steps)
        return {**state, **(self.optimizer.private_state() if self.num_steps else {})}

    def state_dict(self, *, include_private: bool) -> dict[str, Any]:
        """Returns the section of a checkpoint, in plain types.

        It never holds the state of the noise generator: with it the noise of the next steps would
        be known. The order of the records, and the error of DiceSGD, are in it only on request.
        """
        missing = self.why_not_resumable(self.num_steps)
        state: dict[str, Any] = {
            "schema": _SCHEMA,
            "run_id": self.accounted.id,
            "num_steps": self.num_steps,
            "fields": self.fields,
            "noise_multiplier": float(self.optimizer.noise_multiplier),
            "max_grad_norm": float(self.optimizer.max_grad_norm),
        }
        if include_private:
            state["private"] = self.private_state()
        elif missing:
            _logger.warning(
                "The checkpoint after step %d lacks %s, so the run cannot go on from it. Save with "
                "include_private_state=True, stays_private=True.",
                self.num_steps,
                missing,
            )
        return state

    def check_state(self, checkpoint: Mapping[str, Any], discard_later_steps: bool) -> None:
        """Raises unless the run can go on from a checkpoint; nothing is changed."""
        state = checkpoint.get(SECTION)
        runs = checkpoint["privacy_accountant_state_dict"].get("runs")
        if not isinstance(state, dict) or state.get("schema") != _SCHEMA or not runs:
            raise ValueError(
                f"Expected a checkpoint of HiddenStatePrivacyEngine with a run (schema {_SCHEMA}), "
                f"got entries {sorted(checkpoint)}. Save with engine.save_checkpoint."
            )
        stored = run_of(self.record.state_dict())
        stored.load_state_dict(runs[-1])  # names the field that differs
        for name, expected in self.fields.items():
            if state["fields"].get(name) != expected:
                raise ValueError(
                    f"The checkpoint is of another run: expected {name} = {expected!r}, got "
                    f"{state['fields'].get(name)!r}. Call make_private as before."
                )
        missing = self.why_not_resumable(stored.num_steps)
        if missing and "private" not in state:
            raise UnsupportedRunError(
                f"The checkpoint lacks {missing}: with another one it would not be the run that is "
                "accounted. Save with include_private_state=True, stays_private=True."
            )
        check_later_steps(state, discard_later_steps)

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores secret order and error, or raises ValueError; `resume` follows."""
        self.is_loading, private = True, state.get("private")
        if private is None:
            return
        if state["num_steps"]:
            self.optimizer.load_private_state(private)
        self.declared.plan.load_private_state(private)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from what record, hidden state and module hold, after they were restored."""
        self.is_loading = False
        self.accounted.id, self.accounted.failure = state["run_id"], ""
        self.optimizer.noise_multiplier = state["noise_multiplier"]
        self.optimizer.max_grad_norm = state["max_grad_norm"]
        self.optimizer.forget_pieces()
        self.passes.resume(self.record.num_steps)
        note_branch(self.accounted.id, self.record)


def _remove_all(handles: list[Any]) -> None:
    """Removes hooks; of the list as it is then."""
    for handle in handles:
        handle.remove()


def fields_in_common(
    declared: DeclaredRun, noise_multiplier: float, earlier: Sequence[AccountedRun]
) -> dict[str, Any]:
    """Returns the fields of a run that starts, which are equal in all processes."""
    arguments, plan = declared.arguments, declared.plan
    batches = arguments.batch_order
    return {
        **plan.fields,
        "seed of the order": Digest.of(batches.seed, batches.seed_is_secret),
        **declared.fields(noise_multiplier),
        "runs behind the weights": [(run.id, run.recorder.num_steps) for run in earlier],
        "weights of the initial model": _weights(declared.inner),
        "loss_geometry": repr(declared.loss),
        "records of the loader": Digest(hash_of(plan.records)),
        "data set": _shown(arguments.data_loader.dataset, plan.records),
    }


def fields_after_loading(run: TrainingRun) -> dict[str, Any]:
    """Returns the fields of a run that goes on, which are equal in all processes."""
    private = run.private_state() if run.why_not_resumable(run.num_steps) else {}
    return {
        "run": run.accounted.id,
        "number of steps": run.num_steps,
        "weights": _weights(run.declared.inner),
        "private state": Digest.of(*private.values()),
        "moments": Digest.of(*run.optimizer.state.values()),
    }


def _weights(module: nn.Module) -> Digest:
    return Digest.of(dict(module.named_parameters()), dict(module.named_buffers()))


def _shown(dataset: Any, records: Sequence[int]) -> tuple[int, Digest | None]:
    """Returns the size, and a hash of some records, or None if they are drawn at random."""
    places = np.linspace(0, len(records) - 1, min(_SHOWN, len(records))).astype(int).tolist()
    try:
        with random_numbers_as_before():
            first, again = (Digest.of(*(dataset[records[i]] for i in places)) for _ in range(2))
    except Exception:  # whatever a data set may raise that is not asked in its turn
        return len(dataset), None
    return len(dataset), first if first == again else None
