"""Iterates that are projected on a convex set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.gradients.norms import ROUNDING
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.projections import Projection


class ProjectionGuard(Guard):
    """Notices iterates outside the set that the event's domain_diameter says they are in.

    Args:
        params: All trainable parameters.
        projection: On the set.
    """

    def __init__(self, params: Sequence[nn.Parameter], projection: Projection):
        self._params, self._projection = params, projection
        projection.start(params)

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step and what is taken on trust."""
        return self._projection.assumptions

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """How far outside the iterate is."""
        return {"outside": self._projection.figure(self._params)}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if it is outside."""
        self._check(f"step {piece.step} starts", values["outside"])

    def iterate_figures(self) -> Mapping[str, Figure]:
        """How far outside the iterate is."""
        return {"outside": self._projection.figure(self._params)}

    def judge_iterate(self, steps: int, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if it is outside."""
        self._check(f"The model after step {steps} is", values["outside"])

    def _check(self, what: str, figure: float) -> None:
        projection = self._projection
        if not figure <= projection.limit:
            raise UnsupportedRunError(
                f"{what} outside {projection}: {projection.measure} is {figure:.8g}, expected at "
                f"most {projection.limit:.8g}. Leave the parameters alone between the steps."
            )

    def resume(self, steps: int) -> None:
        """Goes on from the loaded parameters."""
        self._projection.start(self._params)


def check_inside(step: int, norm: float, radius: float, remedy: str = "") -> None:
    """Raises UnsupportedRunError if an iterate of norm `norm` is outside the ball."""
    if not norm <= radius * (1 + ROUNDING):
        raise UnsupportedRunError(
            f"step {step} starts at norm {norm:.8g}, outside the ball of radius {radius:.8g}."
            f"{remedy}"
        )
