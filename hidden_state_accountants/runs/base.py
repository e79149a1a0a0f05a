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
from hidden_state_accountants.best_bound import best_guarantee, why_none_applies
from hidden_state_accountants.bounds import BOUNDS
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.plain_types import SCHEMA
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.runs.description import Description

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
    the event and the texts are its own; the state follows from the fields.

    Args:
        **declared: The fields of the event that are the same in all steps, as the event takes them.

    Raises:
        TypeError, ValueError: As the event.

    Attributes:
        event_type: The kind of event that the run becomes.
        releases_every_iterate: Whether its guarantee covers every iterate, whatever is released.
        of_one_step: The fields that the steps decide, as those of an event of one step.
        series: The fields of a `Step` that are recorded one by one.
        later: The fields that may be left open, since an optimizer may not see its data; `event`
            is told them.
    """

    event_type: ClassVar[type[DpEvent]]
    releases_every_iterate: ClassVar[bool] = False
    of_one_step: ClassVar[Mapping[str, Any]]
    series: ClassVar[tuple[str, ...]] = ()
    later: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _KINDS[cls.event_type] = cls

    def __init__(self, **declared: Any):
        self._declare(declared)

    def _declare(self, declared: Mapping[str, Any]) -> None:
        self._later = {name for name in self.later if declared.get(name) is None}
        standing_in = {
            "dataset_size": declared.get("batch_size"),
            "batch_order": BatchOrder.POISSON,
        }
        whole = {**declared, **{name: standing_in[name] for name in self._later}}
        # The constructor of the event is the one place that knows what is valid.
        self._template: Any = self.event_type(**whole, **self.of_one_step)
        self._num_steps = 0
        self._release_steps: list[int] = []
        self._series = {name: RunLengths() for name in self.series}
        self._fewest_rows = self._most_rows = 0
        self._largest_norm = 0.0
        self._proved: dict[NeighboringRelation, tuple[tuple[int, int], Guarantee]] = {}

    @classmethod
    def of_totals(
        cls: type[_AnyRun],
        *,
        num_steps: int,
        largest_norm: float,
        fewest_rows: int | None = None,
        most_rows: int | None = None,
        **settings: Any,
    ) -> _AnyRun:
        """A run whose steps were counted elsewhere, on the device.

        Args:
            num_steps: Steps taken.
            largest_norm: The largest norm of a gradient before the clip.
            fewest_rows: Of the batches; None if all have batch_size rows.
            most_rows: Likewise.
            **settings: As for the constructor; of what a step has, a number or a `Schedule`.

        Raises:
            TypeError, ValueError: No run can have these values.
            UnsupportedRunError: The steps are not those of the declared run.
        """
        series = {name: settings.pop(name) for name in cls.series}
        run = cls(**settings)
        run._num_steps = validate.integer("num_steps", num_steps, minimum=0)
        run._series = {name: RunLengths.of(v, run._num_steps) for name, v in series.items()}
        rows = run._template.batch_size
        run._set_totals(
            rows if fewest_rows is None else fewest_rows,
            rows if most_rows is None else most_rows,
            largest_norm,
        )
        run._check_steps()
        return run

    def _set_totals(self, fewest_rows: int, most_rows: int, largest_norm: float) -> None:
        self._fewest_rows = validate.integer("fewest_rows", fewest_rows, minimum=0)
        self._most_rows = validate.integer("most_rows", most_rows, minimum=self._fewest_rows)
        self._largest_norm = float(largest_norm)

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
        if step.rows is not None:
            self._fewest_rows = min(self._fewest_rows, step.rows) if self._num_steps else step.rows
            self._most_rows = max(self._most_rows, step.rows)
        self._largest_norm = max(self._largest_norm, float(step.largest_norm))
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
            self._proved[relation] = now, best_guarantee(self.event(), relation)
        return self._proved[relation][1]

    def check_relation(self, relation: NeighboringRelation | str) -> None:
        """Raises UnsupportedRunError if no bound can cover such a run under `relation`.

        Of a run that is declared later nothing is known yet.
        """
        if not self._later:
            check_covered(self._template, relation)

    def sampled_rows(self) -> list[tuple[float, float, int]]:
        """The run as rows of Opacus' histories: noise multiplier, sample rate, steps.

        Whoever reads such rows takes them for DP-SGD. A run that shows more than that has noise 0
        there, which no accountant takes for private.
        """
        told = attrs.evolve(self._template, dataset_size=self._told("dataset_size", None))
        return [(0.0, told.sampling_probability, self._num_steps)] if self._num_steps else []

    @classmethod
    @abc.abstractmethod
    def describe(
        cls, event: Any, relation: NeighboringRelation, delta: float, notes: Mapping[str, Any]
    ) -> Description:
        """What a `Statement` says of an event of this kind.

        Args:
            event: The run.
            relation: Of the guarantee.
            delta: Where epsilons are read.
            notes: What the event does not say; a subclass names what it reads.
        """

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

    def _told(self, name: str, value: Any, nothing: Any = None) -> Any:
        """What was declared of a field, before the steps or now.

        Args:
            name: Of the field of the event.
            value: What `event` is told; None for nothing.
            nothing: What the field is where nothing was declared.

        Raises:
            TypeError: It was not declared at all.
            UnsupportedRunError: Something else was declared before.
        """
        before = getattr(self._template, name)
        if value is None and name in self._later:
            raise TypeError(f"Expected {name}, which was not declared before, got None.")
        if value is None:
            return before
        if name not in self._later and before != nothing and value != before:
            raise UnsupportedRunError(
                f"Expected {name} = {before}, which was recorded, got {value}."
            )
        return value

    def _check_has_steps(self) -> None:
        if not self._num_steps:
            raise ValueError("Expected at least one step, got none yet.")

    # How it goes on elsewhere

    def _declared(self) -> dict[str, Any]:
        """What is the same in all steps, as plain types; "type" names the kind of event."""
        of_steps = set(self.of_one_step) - {"num_steps"}
        plain = self._template.to_dict()
        declared = {name: value for name, value in plain.items() if name not in of_steps}
        return declared | dict.fromkeys(sorted(self._later))

    def private_state(self) -> dict[str, Any]:
        """What `state_dict` leaves out, because it is computed from the records. Secret.

        Added to `state_dict` it restores what the steps are compared with if something about them
        is declared later; a run that was declared in full does not need it.
        """
        names = ("fewest_rows", "most_rows", "largest_norm")
        return {"totals": {name: getattr(self, f"_{name}") for name in names}}

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
            self._set_totals(**self._stored_totals(state))
            self._check_steps()
        except (TypeError, ValueError):
            vars(self).update(before)
            raise

    def _stored_totals(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The totals of a state; of one without them what is known all the same.

        A run that was declared in full was compared step by step. Nothing is known for a bound that
        comes later, and without the order of the batches not how many rows they had.
        """
        if "totals" in state or "batch_order" in self._later:
            stored = dict(state.get("totals") or {})
            if set(stored) != {"fewest_rows", "most_rows", "largest_norm"}:
                raise ValueError(f"The state is damaged: expected totals, got {stored!r}.")
            norm = stored["largest_norm"]
            stored["largest_norm"] = validate.real("largest_norm", norm, minimum=0, allow_inf=True)
            return stored
        rows = self._template.batch_size
        is_open = self._norm_bound(self._template)[1] in (None, math.inf)
        unknown = math.inf if is_open else 0.0
        return {"fewest_rows": rows, "most_rows": rows, "largest_norm": unknown}

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
        declared = {k: v for k, v in state["declared"].items() if v is not None}
        standing_in = {"dataset_size": declared.get("batch_size")}
        event = cls.event_type.from_dict({**standing_in, **declared, **cls.of_one_step})
        names = {field.name for field in attrs.fields(cls.event_type)} - set(cls.of_one_step)
        left_open = {n: None for n in cls.later if n in state["declared"] and n not in declared}
        run = cls.__new__(cls)
        run._declare({name: getattr(event, name) for name in names} | left_open)
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


def check_covered(event: DpEvent, relation: NeighboringRelation | str) -> None:
    """Raises UnsupportedRunError if no sound bound is about such a run under `relation`."""
    unmet = {}
    for bound in BOUNDS:
        if bound.sound and isinstance(event, bound.event_type):
            unmet[bound.name] = bound.check(event, relation)
            if not unmet[bound.name]:
                return
    raise UnsupportedRunError(f"No theorem here covers the run. {why_none_applies(event, unmet)}")
