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

    def since(self, start: int, num_steps: int) -> float | Schedule:
        """The values of the steps start + 1 to num_steps, the last one; a number if all equal."""
        index, needed = len(self.values), num_steps - start
        while needed > 0:
            index -= 1
            needed -= self.lengths[index]
        if index == len(self.values) - 1:
            return self.values[-1]
        lengths = self.lengths[index:]
        lengths[0] += needed  # needed <= 0: what the first run holds too much
        return Schedule(self.values[index:], lengths)

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
