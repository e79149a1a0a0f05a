"""A value per training step, run-length encoded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec

import attrs
import numpy as np
import numpy.typing as npt
from dp_accounting import dp_event

from hidden_state_accountants import validate


@attrs.frozen(repr=False, init=False, slots=False)
class Schedule:
    """One non-negative value per step, stored as runs of equal values.

    The encoding is canonical: no run is empty and neighbouring runs differ, so two schedules are
    equal exactly when they prescribe the same value at every step.

    Args:
        values: The value of each run; finite and >= 0.
        lengths: The number of steps of each run; >= 1.

    Raises:
        TypeError: `values` or `lengths` is not a sequence of numbers.
        ValueError: A value is negative, NaN or infinite, a length is below one, or the two
            sequences differ in length.
    """

    values: tuple[float, ...]
    lengths: tuple[int, ...]

    def __init__(self, values: Iterable[float], lengths: Iterable[int]):
        array = validate.real_array("schedule values", _as_array(values))
        counts = np.asarray(_as_array(lengths))
        if counts.ndim != 1 or counts.dtype.kind not in "iu":
            raise TypeError(
                f"Expected schedule lengths to be integers, got dtype {counts.dtype} "
                f"and shape {counts.shape}."
            )
        if len(counts) != len(array):
            raise ValueError(
                f"Expected as many schedule lengths as values, got {len(counts)} lengths "
                f"and {len(array)} values."
            )
        if (counts < 1).any():
            raise ValueError(f"Expected schedule lengths >= 1, got {int(counts.min())}.")
        starts = np.flatnonzero(np.concatenate(([True], array[1:] != array[:-1])))
        object.__setattr__(self, "values", tuple(array[starts].tolist()))
        object.__setattr__(self, "lengths", tuple(np.add.reduceat(counts, starts).tolist()))

    @classmethod
    def from_sequence(cls, sequence: Iterable[float], name: str = "schedule") -> Schedule:
        """Encodes a sequence that holds one value per step; errors call it `name`."""
        array = validate.real_array(name, _as_array(sequence))
        return cls(array, np.ones(len(array), dtype=np.int64))

    def to_array(self) -> np.ndarray:
        """Returns the float64 array of shape (num_steps,)."""
        return np.repeat(*self._arrays)

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.values), np.asarray(self.lengths)

    @property
    def num_steps(self) -> int:
        """The number of steps the schedule covers."""
        return sum(self.lengths)

    def __repr__(self) -> str:
        if len(self.values) <= 3:
            return f"Schedule(values={self.values}, lengths={self.lengths})"
        return (
            f"Schedule({self.num_steps} steps in {len(self.values)} runs, "
            f"from {self.values[0]:g} to {self.values[-1]:g})"
        )

    # dp_accounting serialises the parts of an event with the method of the same name.
    to_named_tuple = dp_event.DpEvent.to_named_tuple


def parse_schedule(
    name: str, value: Any, num_steps: int, *, positive: bool = False, is_small: bool = False
) -> float | Schedule:
    """Parses the declaration of a field that may change while training; a number if it does not.

    Args:
        name: Name of the field.
        value: A number, a sequence with one entry per step, or a `Schedule`.
        num_steps: Number of steps that it has to cover.
        positive: True if it has to be above 0 at every step.
        is_small: True if a number below 1/`validate.LARGEST` is one, too.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, np.ndarray | list | tuple | range):
        value = Schedule.from_sequence(value, name)
    if not isinstance(value, Schedule):
        if is_small:
            return validate.real(name, value, minimum=0)
        return validate.magnitude(name, value, positive=positive)
    if value.num_steps != num_steps:
        raise ValueError(
            f"Expected {name} to cover num_steps = {num_steps} steps, got {value.num_steps}."
        )
    if positive and min(value.values) <= 0:
        raise ValueError(f"Expected {name} > 0 at every step, got {min(value.values)!r}.")
    if not is_small:
        validate.magnitude(name, min(filter(None, value.values), default=1.0))
        validate.magnitude(name, max(value.values))
    return value.values[0] if len(value.values) == 1 else value


def _as_array(sequence: Any) -> Any:
    return sequence if isinstance(sequence, np.ndarray) else list(sequence)


def per_step(value: float | Schedule, num_steps: int) -> np.ndarray:
    """Returns shape (num_steps,); a constant costs O(1) memory (a read-only broadcast)."""
    if isinstance(value, Schedule):
        return value.to_array()
    return np.broadcast_to(np.float64(value), (num_steps,))


def mapped(function: Callable[[float], float], value: float | Schedule) -> float | Schedule:
    """Applies a function to the value of every step."""
    if isinstance(value, Schedule):
        return Schedule(map(function, value.values), value.lengths)
    return function(value)


_Others = ParamSpec("_Others")


def same_in_all_steps(
    values: Callable[Concatenate[Any, _Others], np.ndarray],
) -> Callable[Concatenate[Any, _Others], np.ndarray]:
    """Computes what a function of a run returns per step once, if no hyper-parameter changes.

    Args:
        values: Maps an event (and more) to an array of shape (num_steps,) that depends on the
            hyper-parameters of each step alone. A constant one then costs O(1) memory (a read-only
            broadcast).
    """

    @functools.wraps(values)
    def per_step_values(event: Any, /, *args: _Others.args, **kwargs: _Others.kwargs) -> np.ndarray:
        one_step = event.one_step_if_constant()
        return np.broadcast_to(values(one_step, *args, **kwargs), (event.num_steps,))

    return per_step_values


def values_and_counts(per_step_values: npt.NDArray[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The different entries of an array of shape (T,), ascending, and how many steps have each."""
    is_broadcast = per_step_values.strides == (0,)
    if is_broadcast or (per_step_values == per_step_values[0]).all():
        return per_step_values[:1], np.array([len(per_step_values)])
    return np.unique(per_step_values, return_counts=True)
