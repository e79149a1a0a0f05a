"""Proximal maps after the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.proximal import Prox


class ProxGuard(Guard):
    """Notices a proximal map of the user's own that expands (rows 178, 179).

    Args:
        params: All trainable parameters.
        prox: The map.
        step_size: The step size of the next step.
    """

    def __init__(self, params: Sequence[nn.Parameter], prox: Prox, step_size: Callable[[], float]):
        self._params, self._prox, self._step_size = params, prox, step_size
        prox.start(params, step_size())

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step and what is taken on trust."""
        return self._prox.assumptions

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """How far the map moves the iterate away from the start, at the rate of this step."""
        return {"stretch": self._prox.stretch(self._params, self._step_size())}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if it expands."""
        if not values["stretch"] <= 1:
            raise UnsupportedRunError(
                f"step {piece.step} would use {self._prox}, which takes the iterate and the start "
                f"{values['stretch']:.6g} times as far apart as they are. Pass a nonexpansive map, "
                "the same one in every step, or a Regulariser."
            )

    def resume(self, steps: int) -> None:
        """Goes on from the loaded parameters."""
        self._prox.start(self._params, self._step_size())
