"""What every kind of run has in common: its steps are checked, counted, released and stored.

An adapter writes a run as a list of `Step`s. What follows from them (the event, the guarantee, a
state that a checkpoint can hold) is the same for all frameworks and belongs to the `Run`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import attrs
from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.advice import with_changes
from hidden_state_accountants.best_bound import best_guarantee, check_covered
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.plain_types import SCHEMA
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.guarantee import Guarantee

SLACK = 1e-6
"""Rounding in float32, relative, of a norm that is exactly at its bound."""

_KINDS: dict[type[DpEvent], type[Run]] = {}
_STATE = {"schema", "declared", "num_steps", "release_steps"}
_AnyRun = TypeVar("_AnyRun", bound="Run")


@attrs.frozen(kw_only=True)
class Step:
    """One logical step, with the values that it really used.

    Attributes:
        noise_multiplier: Standard deviation of the noise on the sum of gradients over clip_norm.
        clip_norm: None if the gradients were not clipped.
        learning_rate: Of the mean gradient.
        weight_decay: Decoupled.
        batch: Index of the batch within the epoch, where the batches have an order.
        rows: Records of the logical batch.
        largest_norm: Of the per-example gradients before the clip; 0 if it was not measured.
    """

    noise_multiplier: float
    clip_norm: float | None
    learning_rate: float = 1.0
    weight_decay: float = 0.0
    batch: int | None = None
    rows: int | None = None
    largest_norm: float = 0.0


class RunLengths:
    """One value per step; equal neighbours are stored once. `Schedule` is the immutable form."""

    __slots__ = ("lengths", "values")

    def __init__(self, values: list[float] | None = None, lengths: list[int] | None = None):
        self.values = values or []
        self.lengths = lengths or []

    @classmethod
    def of(cls, value: float | Schedule, num_steps: int) -> RunLengths:
        """A number for every step, or a schedule."""
        if isinstance(value, Schedule):
            return cls(list(value.values), list(value.lengths))
        return cls([float(value)], [num_steps]) if num_steps else cls()

    def append(self, value: float) -> None:
        """Adds the value of one more step."""
        if self.values and self.values[-1] == value:
            self.lengths[-1] += 1
        else:
            self.values.append(value)
            self.lengths.append(1)

    def compressed(self) -> float | Schedule | None:
        """The values of all steps: a number if all are equal, None if there is none."""
        if len(self.values) < 2:
            return self.values[0] if self.values else None
        return Schedule(self.values, self.lengths)

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"values": list(self.values), "lengths": list(self.lengths)}

    @classmethod
    def of_state(cls, name: str, state: Any) -> RunLengths:
        """Inverse of `state_dict`; a damaged state raises ValueError, which calls it `name`."""
        try:
            if not state["values"] and not state["lengths"]:
                return cls()
            return cls.of(Schedule(state["values"], state["lengths"]), 0)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The state is damaged: {name}: {error}") from error


class Run(abc.ABC):
    """Records a run step by step, and refuses a step that is not one of the declared run.

    A subclass is about one kind of event, for which it registers itself. It says which fields of
    the event the steps decide; all others are declared, and its arguments. The checks of a step,
    and the event are its own; the state follows from the fields. What a statement says of it is in
    `DESCRIPTIONS`.

    Args:
        **declared: The fields of the event that are the same in all steps, as the event takes them.

    Raises:
        TypeError, ValueError: As the event.

    Attributes:
        event_type: The kind of event that the run becomes.
        releases_every_iterate: Whether its guarantee covers every iterate, whatever is released.
        of_one_step: The fields that the steps decide, as those of an event of one step.
        series: The fields of a `Step` that are recorded one by one.
    """

    event_type: ClassVar[type[DpEvent]]
    releases_every_iterate: ClassVar[bool] = False
    of_one_step: ClassVar[Mapping[str, Any]]
    series: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _KINDS[cls.event_type] = cls

    def __init__(self, **declared: Any):
        # The constructor of the event is the one place that knows what is valid.
        self._start(self.event_type(**declared, **self.of_one_step))

    def _start(self, template: Any) -> None:
        self._template = template
        self._num_steps = 0
        self._release_steps: list[int] = []
        self._series = {name: RunLengths() for name in self.series}
        self._proved: dict[NeighboringRelation, tuple[tuple[int, int], Guarantee]] = {}

    @classmethod
    def of_totals(
        cls: type[_AnyRun], *, num_steps: int, largest_norm: float, **settings: Any
    ) -> _AnyRun:
        """A run whose steps were counted elsewhere, on the device.

        Args:
            num_steps: Steps taken.
            largest_norm: The largest norm of a gradient before the clip.
            **settings: As for the constructor; of what a step has, a number or a `Schedule`.

        Raises:
            TypeError, ValueError: No run can have these values.
            UnsupportedRunError: The steps are not those of the declared run.
        """
        series = {name: settings.pop(name) for name in cls.series}
        run = cls(**settings)
        run._num_steps = validate.integer("num_steps", num_steps, minimum=0)
        run._series = {name: RunLengths.of(v, run._num_steps) for name, v in series.items()}
        cls._check_norm(run._template, float(largest_norm), "of this run")
        run._check_steps()
        return run

    # What happens

    def add(self, step: Step) -> None:
        """Records one logical step; nothing is recorded if it raises.

        Raises:
            UnsupportedRunError: It is not a step of the declared run.
            TypeError, ValueError: No step can have these values.
        """
        self._check(step)
        self._check_norm(self._template, step.largest_norm, f"of step {self._num_steps + 1}")
        for name, values in self._series.items():
            value = getattr(step, name)
            if value is not None:
                values.append(float(value))
        self._num_steps += 1

    @abc.abstractmethod
    def _check(self, step: Step) -> None:
        """Refuses a step that is not the next one of the declared run."""

    @classmethod
    @abc.abstractmethod
    def _norm_bound(cls, event: Any) -> tuple[str, float | None]:
        """The name of the declared bound on all gradients, and its value."""

    @classmethod
    def _check_norm(cls, event: Any, largest_norm: float, where: str) -> None:
        """Refuses gradients (NaN among them) that are longer than the declared bound."""
        name, bound = cls._norm_bound(event)
        limit = math.inf if bound is None else bound
        if not largest_norm <= limit * (1 + SLACK):
            raise UnsupportedRunError(
                f"Expected {name} >= {largest_norm:.8g}, the largest gradient {where}, got "
                f"{limit:.8g}. A bound has to be proven from the loss and the norm of the "
                "features, not read off a run. Correct it, or leave it out."
            )

    def _check_turn(self, batch: int | None, batches_per_epoch: int) -> None:
        """Refuses a batch that does not follow in an epoch of fixed batches."""
        expected = self._num_steps % batches_per_epoch
        if batch != expected:
            raise UnsupportedRunError(
                f"step {self._num_steps + 1} used batch {batch}, expected batch {expected}: a "
                f"cyclic run visits batches 0 to {batches_per_epoch - 1} in order, each exactly "
                "once per epoch. Iterate the private loader to its end and step once per batch."
            )

    def release(self) -> None:
        """Marks the current iterate as released (again changes nothing)."""
        if self._num_steps and self._num_steps not in self._release_steps[-1:]:
            self._release_steps.append(self._num_steps)

    @property
    def num_steps(self) -> int:
        """The number of steps recorded so far."""
        return self._num_steps

    @property
    def release_steps(self) -> tuple[int, ...]:
        """The steps after which `release` was called."""
        return tuple(self._release_steps)

    # What is said about it

    @abc.abstractmethod
    def event(self) -> DpEvent:
        """The event that happened.

        Raises:
            ValueError: No step was recorded.
            UnsupportedRunError: The steps are not those of such a run.
        """

    def guarantee(self, relation: NeighboringRelation | str) -> Guarantee:
        """The best sound guarantee if the current iterate were the last one.

        Raises:
            ValueError: No step was recorded.
            UnsupportedRunError: No bound applies.
        """
        relation = validate.neighboring_relation(relation)
        self.check_relation(relation)
        now = self._num_steps, len(self._release_steps)
        if relation not in self._proved or self._proved[relation][0] != now:
            event = self.event()
            proved = with_changes(best_guarantee(event, relation), event, relation)
            self._proved[relation] = now, proved
        return self._proved[relation][1]

    def check_relation(self, relation: NeighboringRelation | str) -> None:
        """Raises UnsupportedRunError if no bound can cover such a run under `relation`."""
        check_covered(self._template, relation)

    def sampled_rows(self) -> list[tuple[float, float, int]]:
        """The run as rows of Opacus' histories: noise multiplier, sample rate, steps.

        Whoever reads such rows takes them for DP-SGD. A run that shows more than that has noise 0
        there, which no accountant takes for private.
        """
        rate = self._template.sampling_probability
        return [(0.0, rate, self._num_steps)] if self._num_steps else []

    @classmethod
    @abc.abstractmethod
    def every_iterate(cls, event: Any, relation: NeighboringRelation) -> Guarantee | None:
        """The guarantee of the same run with every iterate released; None if none is known."""

    @classmethod
    def line_before(cls, event: Any, relation: NeighboringRelation) -> str:
        """One line that should be known before training; empty if there is nothing to say.

        Args:
            event: One step of the run, with its first hyper-parameters.
            relation: Of the guarantee.
        """
        return ""

    def _check_has_steps(self) -> None:
        if not self._num_steps:
            raise ValueError("Expected at least one step, got none yet.")

    # How it goes on elsewhere

    def _declared(self) -> dict[str, Any]:
        """What is the same in all steps, as plain types; "type" names the kind of event."""
        of_steps = set(self.of_one_step) - {"num_steps"}
        plain = self._template.to_dict()
        return {name: value for name, value in plain.items() if name not in of_steps}

    def state_dict(self) -> dict[str, Any]:
        """Plain types (numbers, strings, lists, dictionaries) that restore the run.

        It holds nothing that is computed from the records: it is in every public checkpoint.
        """
        return {
            "schema": SCHEMA,
            "declared": self._declared(),
            "num_steps": self._num_steps,
            "release_steps": list(self._release_steps),
            "runs": {name: values.state_dict() for name, values in self._series.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, into an empty record of the same run.

        Raises:
            TypeError, ValueError: The declared runs differ (the text names the field), the state
                is damaged, or steps are recorded here already: spent budget is never forgotten.
                Nothing is changed then.
        """
        if self._num_steps:
            raise ValueError(
                f"Expected a recorder without steps, got one with {self._num_steps}: they were "
                "taken on the data and stay accounted. Restore into a fresh recorder."
            )
        self._check_state(state)
        steps = validate.integer("num_steps", state["num_steps"], minimum=0)
        releases = [
            validate.integer("release_steps", r, minimum=1, maximum=steps)
            for r in state["release_steps"]
        ]
        if releases != sorted(set(releases)):
            raise ValueError("The state is damaged: release_steps do not ascend.")
        before = vars(self).copy()
        self._num_steps, self._release_steps = steps, releases
        try:
            stored = dict(state["runs"])
            self._series = {n: RunLengths.of_state(n, stored.get(n)) for n in self.series}
            self._check_steps()
        except (TypeError, ValueError):
            vars(self).update(before)
            raise

    def _check_steps(self) -> None:
        """Refuses counted or restored steps that are not those of the declared run."""
        for name, values in self._series.items():
            covered = sum(values.lengths)
            if covered != self._num_steps and not (name == "clip_norm" and covered == 0):
                raise ValueError(
                    f"Expected {name} to cover {self._num_steps} steps, got {covered}: the state "
                    "is damaged."
                )

    def _check_state(self, state: Mapping[str, Any]) -> None:
        missing = (_STATE | {"runs"}) - set(state)
        if missing or state["schema"] != SCHEMA:
            raise ValueError(
                f"Expected the state of a {type(self).__name__} with schema {SCHEMA}, "
                f"got schema {state.get('schema')!r}, missing keys {sorted(missing)}."
            )
        own, other = self._declared(), dict(state["declared"])
        for name in ("type", *sorted(set(own) | set(other))):
            if own.get(name) != other.get(name):
                raise ValueError(
                    f"The state is of another run: expected {name} = {own.get(name)!r}, "
                    f"got {other.get(name)!r}."
                )

    @classmethod
    def from_state_dict(cls: type[_AnyRun], state: Mapping[str, Any]) -> _AnyRun:
        """A record of the run that a state declares, with its steps.

        Raises:
            TypeError, ValueError: The state is damaged, or of another kind of run.
        """
        run = cls.__new__(cls)
        run._start(cls.event_type.from_dict({**state["declared"], **cls.of_one_step}))
        run.load_state_dict(state)
        return run


def kind_of(event: DpEvent) -> type[Run]:
    """The kind of run that an event is about.

    Raises:
        TypeError: It is no event of a run.
    """
    for event_type in type(event).__mro__:
        if event_type in _KINDS:
            return _KINDS[event_type]
    raise TypeError(f"Expected an event of {_known()}, got {type(event).__name__}.")


def run_of(state: Mapping[str, Any]) -> Run:
    """The run, with its steps, that a `state_dict` is of.

    Raises:
        TypeError, ValueError: The state is damaged, or of no known kind of run.
    """
    declared = state.get("declared")
    name = declared.get("type") if isinstance(declared, Mapping) else None
    for event_type, kind in _KINDS.items():
        if event_type.__name__ == name:
            return kind.from_state_dict(state)
    raise ValueError(f"Expected the state of a run of {_known()}, got one of {name!r}.")


def _known() -> str:
    return " or ".join(event_type.__name__ for event_type in _KINDS)
