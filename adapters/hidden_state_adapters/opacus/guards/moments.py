"""What an optimizer keeps between steps: momentum and moments, made from noisy gradients only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.guards.base import Guard, Piece


def holds_tensors(state: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether the state of an optimizer, by parameter, holds momentum or moments."""
    return any(isinstance(v, torch.Tensor) for part in state.values() for v in part.values())


def _is_fresh(part: Mapping[str, Any]) -> bool:
    """Whether the state of a parameter is that before the first step: Adagrad makes one at once."""
    if "step" in part:
        return float(part["step"]) == 0
    return not holds_tensors({None: part})


def refuse_moments(optimizer: Optimizer) -> None:
    """Raises UnsupportedRunError if an optimizer took steps that nobody accounts."""
    if not all(_is_fresh(part) for part in optimizer.state.values()):
        raise UnsupportedRunError(
            f"Expected a {type(optimizer).__name__} that took no step, got one with a state "
            "(momentum, moments): it may hold gradients without noise, which the first steps "
            "would show. Construct a new one; engine.load_checkpoint restores the state of a "
            "run."
        )


def refuse_loaded_moments(state_dict: Mapping[str, Any]) -> None:
    """Raises UnsupportedRunError for moments that are not part of an engine's checkpoint."""
    if holds_tensors(state_dict["state"]):
        raise UnsupportedRunError(
            "Expected engine.load_checkpoint, got load_state_dict with momentum or moments: "
            "from elsewhere they may hold gradients without noise, which the steps would show."
        )


class MomentsGuard(Guard):
    """Notices momentum or moments that the last step did not leave: they may lack noise.

    Args:
        optimizer: The wrapped optimizer.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self.remember()

    def _now(self) -> list[tuple[torch.Tensor, int]]:
        parts = self._optimizer.state.values()
        tensors = [v for part in parts for v in part.values() if isinstance(v, torch.Tensor)]
        return [(tensor, tensor._version) for tensor in tensors]

    def remember(self) -> None:
        """Takes the current moments for those that the last step left."""
        self._moments = self._now()

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if they were written or replaced."""
        now = self._now()
        if len(now) != len(self._moments) or any(
            tensor is not old or version != old_version
            for (tensor, version), (old, old_version) in zip(now, self._moments, strict=True)
        ):
            raise UnsupportedRunError(
                f"step {piece.step} starts with momentum or moments that the last step did not "
                "leave: they may hold gradients without noise. Call step() of the private "
                "optimizer only, and load a state with its load_state_dict."
            )

    def moved(self, piece: Piece) -> None:
        """The step left new moments."""
        self.remember()
