"""What an adapter feeds at every step, and the event that really happened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry
from hidden_state_accountants.events.plain_types import SCHEMA
from hidden_state_accountants.events.schedule import Schedule

_DECLARED = (
    "batch_order",
    "batch_size",
    "dataset_size",
    "loss",
    "domain_diameter",
    "max_batch_size",
)
_FIELDS = ("noise_multiplier", "learning_rate", "clip_norm", "weight_decay")


class _Runs:
    """A run-length encoded list of numbers."""

    __slots__ = ("lengths", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self.lengths: list[int] = []

    def append(self, value: float) -> None:
        if self.values and self.values[-1] == value:
            self.lengths[-1] += 1
        else:
            self.values.append(value)
            self.lengths.append(1)

    def since(self, start: int, num_steps: int) -> float | Schedule:
        """The values of the steps start + 1 to num_steps, the last one."""
        index, needed = len(self.values), num_steps - start
        while needed > 0:
            index -= 1
            needed -= self.lengths[index]
        if index == len(self.values) - 1:
            return self.values[-1]
        lengths = self.lengths[index:]
        lengths[0] += needed  # needed <= 0: what the first run holds too much
        return Schedule(self.values[index:], lengths)


class RunRecorder:
    """Records a run step by step and checks the batches against the declared order.

    A step costs O(1) time; constant hyper-parameters cost O(1) memory however long the run is.

    Args:
        batch_order: A `BatchOrder` or its value.
        batch_size: b, the divisor and, unless POISSON, the number of rows of every batch.
        dataset_size: n.
        loss: See `LastIterateDpEvent`, as are the others.
        domain_diameter: inf if the iterates are not projected.
        max_batch_size: POISSON only.

    Raises:
        TypeError, ValueError: As `LastIterateDpEvent`.
    """

    def __init__(
        self,
        *,
        batch_order: BatchOrder | str,
        batch_size: int,
        dataset_size: int,
        loss: LossGeometry | None = None,
        domain_diameter: float = math.inf,
        max_batch_size: int | None = None,
    ):
        # The constructor of the event is the one place that knows what is valid.
        template = LastIterateDpEvent(
            noise_multiplier=1.0,
            learning_rate=0.0,
            clip_norm=1.0,
            batch_size=batch_size,
            dataset_size=dataset_size,
            num_steps=1,
            batch_order=batch_order,  # type: ignore[arg-type]
            loss=loss,
            domain_diameter=domain_diameter,
            max_batch_size=max_batch_size,
        )
        self._template = template
        self._period = (
            template.batches_per_epoch if template.batch_order is BatchOrder.CYCLIC else 1
        )
        self._runs = {name: _Runs() for name in _FIELDS}
        self._clips: bool | None = None
        self._last: tuple[float, float, float | None, float] | None = None
        self._num_steps = 0
        self._release_steps: list[int] = []

    @property
    def num_steps(self) -> int:
        """The number of steps recorded so far."""
        return self._num_steps

    @property
    def expected_batch_index(self) -> int:
        """The index within the epoch that the next batch must have."""
        return self._num_steps % self._period

    def step(
        self,
        *,
        noise_multiplier: float,
        learning_rate: float,
        clip_norm: float | None,
        weight_decay: float = 0.0,
        batch_index: int | None = None,
        batch_rows: int | None = None,
    ) -> None:
        """Records one logical step, with the values that the step really used.

        Args:
            noise_multiplier: Noise std on the sum over clip_norm.
            learning_rate: The step size that is about to be applied.
            clip_norm: None if gradients are not clipped.
            weight_decay: Decoupled.
            batch_index: Index of the batch within the epoch; required for CYCLIC.
            batch_rows: Rows of the logical batch; required for FULL and CYCLIC.

        Raises:
            UnsupportedRunError: The batch is not the declared one; nothing is recorded.
            TypeError, ValueError: A hyper-parameter has an impossible value.
        """
        self._check_batch(batch_index, batch_rows)
        arguments = (noise_multiplier, learning_rate, clip_norm, weight_decay)
        if arguments != self._last:
            self._check_values(*arguments)
            self._last = arguments
        for runs, value in zip(self._runs.values(), arguments, strict=True):
            if value is not None:
                runs.append(float(value))
        self._num_steps += 1

    def _check_values(
        self,
        noise_multiplier: float,
        learning_rate: float,
        clip_norm: float | None,
        weight_decay: float,
    ) -> None:
        validate.magnitude("noise_multiplier", noise_multiplier)
        rate = validate.magnitude("learning_rate", learning_rate)
        decay = validate.real("weight_decay", weight_decay, minimum=0)
        loss = self._template.loss
        if clip_norm is not None:
            validate.magnitude("clip_norm", clip_norm, positive=True)
        elif loss is None or loss.lipschitz is None:
            raise ValueError(
                "Expected loss.lipschitz when clip_norm is None, got none. Declare the bound on "
                "the per-example gradient norm, or clip."
            )
        if self._clips is not None and self._clips is not (clip_norm is not None):
            raise UnsupportedRunError(
                f"step {self._num_steps + 1} "
                f"{'clips' if clip_norm is not None else 'does not clip'} gradients, earlier steps "
                f"{'do' if self._clips else 'do not'}: clip in every step or in none."
            )
        if rate * decay >= 1:
            raise ValueError(
                f"Expected learning_rate * weight_decay < 1, got {rate * decay:g} "
                f"at step {self._num_steps + 1}. Lower one of them."
            )
        self._clips = clip_norm is not None

    def _check_batch(self, batch_index: int | None, batch_rows: int | None) -> None:
        order, step = self._template.batch_order, self._num_steps + 1
        if order is BatchOrder.CYCLIC and batch_index != self.expected_batch_index:
            raise UnsupportedRunError(
                f"step {step} used batch {batch_index}, expected batch "
                f"{self.expected_batch_index}: a cyclic run visits batches 0 to "
                f"{self._period - 1} in order, each exactly once per epoch. Iterate the private "
                "loader to its end and step once per batch."
            )
        size, largest = self._template.batch_size, self._template.max_batch_size
        if order is BatchOrder.POISSON:
            if largest is None:
                return
            if batch_rows is None:
                raise TypeError("Expected batch_rows for batches with a cap, got None.")
            if batch_rows > largest:
                raise UnsupportedRunError(
                    f"step {step} used {batch_rows} rows, more than max_batch_size = {largest}."
                )
        elif batch_rows is None:
            if order in (BatchOrder.FULL, BatchOrder.CYCLIC):
                raise TypeError(f"Expected batch_rows for {order.name} batches, got None.")
        elif batch_rows != size:
            raise UnsupportedRunError(
                f"step {step} used {batch_rows} rows, expected batch_size = {size}."
            )

    def release(self) -> None:
        """Marks the current iterate as released (again changes nothing)."""
        if self._num_steps and self._num_steps not in self._release_steps[-1:]:
            self._release_steps.append(self._num_steps)

    @property
    def is_constant(self) -> bool:
        """Whether no hyper-parameter has changed so far."""
        return all(len(runs.values) <= 1 for runs in self._runs.values())

    @property
    def release_steps(self) -> tuple[int, ...]:
        """The steps after which `release` was called."""
        return tuple(self._release_steps)

    def event(self, since: int = 0) -> LastIterateDpEvent:
        """The event that happened.

        Args:
            since: Leaves out the first `since` steps.

        Raises:
            ValueError: No step was recorded (since `since`).
        """
        steps = self._num_steps - validate.integer("since", since, minimum=0)
        if steps < 1:
            raise ValueError("Expected at least one recorded step, got none.")
        hyper_parameters: dict[str, Any] = {
            name: runs.since(since, self._num_steps) if runs.values else None  # None: not clipped
            for name, runs in self._runs.items()
        }
        return attrs.evolve(
            self._template,
            num_steps=steps,
            release_steps=tuple(step - since for step in self._release_steps if step > since),
            **hyper_parameters,
        )

    def check_relation(self, relation: NeighboringRelation) -> None:
        """Raises UnsupportedRunError if no theorem covers the declared order under `relation`."""
        self._template.as_composition(relation)

    def state_dict(self) -> dict[str, Any]:
        """Plain types (numbers, strings, lists, dictionaries) that restore the recorder."""
        declared = self._template.to_dict()
        for name in _FIELDS:
            declared.pop(name, None)
        return {
            "schema": SCHEMA,
            "declared": declared,
            "num_steps": self._num_steps,
            "release_steps": list(self._release_steps),
            "runs": {
                name: {"values": list(runs.values), "lengths": list(runs.lengths)}
                for name, runs in self._runs.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, into an empty recorder of the same run.

        Raises:
            ValueError: The declared runs differ (the text names the field), the state is damaged,
                or steps are recorded here already: spent budget is never forgotten.
        """
        if self._num_steps:
            raise ValueError(
                f"Expected a recorder without steps, got one with {self._num_steps}: they were "
                "taken on the data and stay accounted. Restore into a fresh recorder."
            )
        missing = {"schema", "declared", "num_steps", "release_steps", "runs"} - set(state)
        if missing or state["schema"] != SCHEMA:
            raise ValueError(
                f"Expected the state of a RunRecorder with schema {SCHEMA}, "
                f"got schema {state.get('schema')!r}, missing keys {sorted(missing)}."
            )
        own, other = self.state_dict()["declared"], dict(state["declared"])
        for name in sorted(set(own) | set(other)):
            if own.get(name) != other.get(name):
                raise ValueError(
                    f"The state is of another run: expected {name} = {own.get(name)!r}, "
                    f"got {other.get(name)!r}."
                )
        steps = validate.integer("num_steps", state["num_steps"], minimum=0)
        runs = {name: _restored_runs(name, state["runs"].get(name), steps) for name in _FIELDS}
        releases = [
            validate.integer("release_steps", r, minimum=1, maximum=steps)
            for r in state["release_steps"]
        ]
        if releases != sorted(set(releases)):
            raise ValueError("The state is damaged: release_steps do not ascend.")
        before = self.__dict__.copy()
        self._runs, self._num_steps, self._release_steps = runs, steps, releases
        self._clips = bool(runs["clip_norm"].lengths) if steps else None
        try:
            if steps:
                self.event()  # an impossible value raises
        except (TypeError, ValueError):
            self.__dict__.update(before)
            raise

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RunRecorder:
        """A recorder of the run that a state declares, with its steps."""
        declared = LastIterateDpEvent.from_dict(
            {**state["declared"], "noise_multiplier": 1.0, "learning_rate": 0.0, "clip_norm": 1.0}
        )
        recorder = cls(**{name: getattr(declared, name) for name in _DECLARED})
        recorder.load_state_dict(state)
        return recorder


def _restored_runs(name: str, state: Any, steps: int) -> _Runs:
    runs = _Runs()
    try:
        if state["values"] or state["lengths"]:
            schedule = Schedule(state["values"], state["lengths"])
            runs.values, runs.lengths = list(schedule.values), list(schedule.lengths)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"The state is damaged: {name}: {error}") from error
    covered = sum(runs.lengths)
    if covered != steps and not (name == "clip_norm" and covered == 0):
        raise ValueError(f"The state is damaged: {name} covers {covered} of {steps} steps.")
    return runs
