"""The records of both kinds of runs: of the last iterate, and of DiceSGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hidden_state_accountants import DiceSgdDpEvent, RunRecorder
from hidden_state_adapters.opacus.dice_recorder import DiceRecorder

Recorder = RunRecorder | DiceRecorder


def recorder_of(state: Mapping[str, Any]) -> Recorder:
    """The recorder, with its steps, that a `state_dict` is of.

    Raises:
        ValueError: The state is damaged.
    """
    if state["declared"].get("type") == DiceSgdDpEvent.__name__:
        return DiceRecorder.from_state_dict(state)
    return RunRecorder.from_state_dict(state)


def history_rows(recorder: Recorder) -> list[tuple[float, float, int]]:
    """A run as rows of Opacus' histories: noise multiplier, sample rate, steps.

    Whoever reads such rows takes them for DP-SGD, and DiceSGD shows more than that: its noise is
    given as 0, which no accountant takes for private.
    """
    state = recorder.state_dict()
    rate = state["declared"]["batch_size"] / state["declared"]["dataset_size"]
    if isinstance(recorder, DiceRecorder):
        return [(0.0, rate, recorder.num_steps)] if recorder.num_steps else []
    runs = state["runs"]["noise_multiplier"]
    return [
        (value, rate, length) for value, length in zip(runs["values"], runs["lengths"], strict=True)
    ]
