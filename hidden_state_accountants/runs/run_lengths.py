"""A list of numbers in which equal neighbours are stored once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hidden_state_accountants.events.schedule import Schedule


class RunLengths:
    """One value per step, run-length encoded while the steps are taken.

    Constant values cost O(1) memory however long the run is. `Schedule` is the immutable form.
    """

    __slots__ = ("lengths", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self.lengths: list[int] = []

    def append(self, value: float) -> None:
        """Adds the value of one more step."""
        if self.values and self.values[-1] == value:
            self.lengths[-1] += 1
        else:
            self.values.append(value)
            self.lengths.append(1)

    def compressed(self) -> float | Schedule:
        """The values of all steps, of which there is at least one; a number if all are equal."""
        return self.values[0] if len(self.values) == 1 else Schedule(self.values, self.lengths)

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"values": list(self.values), "lengths": list(self.lengths)}

    @classmethod
    def of_state(cls, name: str, state: Any) -> RunLengths:
        """Inverse of `state_dict`; errors call the numbers `name`.

        Raises:
            ValueError: The state is damaged.
        """
        runs = cls()
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"expected values and lengths, got {state!r}")
            if state["values"] or state["lengths"]:
                schedule = Schedule(state["values"], state["lengths"])
                runs.values, runs.lengths = list(schedule.values), list(schedule.lengths)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The state is damaged: {name}: {error}") from error
        return runs
