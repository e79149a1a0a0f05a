"""The record of a DiceSGD run that an engine deals the batches of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from hidden_state_accountants import DiceSgdDpEvent, validate

_SCHEMA = 1


class DiceRecorder:
    """Counts the steps of a run whose settings are constant.

    It stands beside `hidden_state_accountants.RunRecorder` in an accountant: same names, same
    rules. Every iterate is covered, so a release changes no figure. It is remembered all the same,
    because a run may not go back to before it.

    Args:
        declared: The run; its number of steps is not looked at.
    """

    is_constant = True

    def __init__(self, declared: DiceSgdDpEvent):
        self._declared = attrs.evolve(declared, num_steps=1)
        self._num_steps = 0
        self._release_steps: list[int] = []

    @property
    def num_steps(self) -> int:
        """The number of steps recorded so far."""
        return self._num_steps

    @property
    def release_steps(self) -> tuple[int, ...]:
        """The steps after which `release` was called."""
        return tuple(self._release_steps)

    @property
    def declared(self) -> DiceSgdDpEvent:
        """The run with one step."""
        return self._declared

    def step(self) -> None:
        """Records one logical step."""
        self._num_steps += 1

    def release(self) -> None:
        """Remembers that the current iterate was released (again changes nothing)."""
        if self._num_steps and self._num_steps not in self._release_steps[-1:]:
            self._release_steps.append(self._num_steps)

    def event(self) -> DiceSgdDpEvent:
        """The event that happened.

        Raises:
            ValueError: No step was recorded.
        """
        if not self._num_steps:
            raise ValueError("Expected at least one recorded step, got none.")
        return attrs.evolve(self._declared, num_steps=self._num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Plain types (numbers, strings, lists, dictionaries) that restore the recorder."""
        return {
            "schema": _SCHEMA,
            "declared": self._declared.to_dict(),
            "num_steps": self._num_steps,
            "release_steps": list(self._release_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, into an empty recorder of the same run.

        Raises:
            ValueError: The declared runs differ (the text names the field), the state is damaged,
                or steps are recorded here already. Nothing is changed then.
        """
        if self._num_steps:
            raise ValueError(
                f"Expected a recorder without steps, got one with {self._num_steps}: they were "
                "taken on the data and stay accounted. Restore into a fresh recorder."
            )
        missing = {"schema", "declared", "num_steps", "release_steps"} - set(state)
        if missing or state["schema"] != _SCHEMA:
            raise ValueError(
                f"Expected the state of a DiceRecorder with schema {_SCHEMA}, got schema "
                f"{state.get('schema')!r}, missing keys {sorted(missing)}."
            )
        own, other = self._declared.to_dict(), dict(state["declared"])
        for name in sorted(set(own) | set(other)):
            if own.get(name) != other.get(name):
                raise ValueError(
                    f"The state is of another run: expected {name} = {own.get(name)!r}, "
                    f"got {other.get(name)!r}."
                )
        steps = validate.integer("num_steps", state["num_steps"], minimum=0)
        releases = [
            validate.integer("release_steps", r, minimum=1, maximum=steps)
            for r in state["release_steps"]
        ]
        if releases != sorted(set(releases)):
            raise ValueError("The state is damaged: release_steps do not ascend.")
        self._num_steps, self._release_steps = steps, releases

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> DiceRecorder:
        """A recorder of the run that a state declares, with its steps."""
        recorder = cls(DiceSgdDpEvent.from_dict(state["declared"]))
        recorder.load_state_dict(state)
        return recorder
