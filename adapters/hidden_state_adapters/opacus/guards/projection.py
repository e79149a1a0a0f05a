"""Iterates that are projected on a ball."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_accountants.guarantee import Topic
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.gradients.norms import ROUNDING, joint_norm
from hidden_state_adapters.opacus.guards.base import Guard, Piece


class ProjectionGuard(Guard):
    """Notices iterates outside the ball that the event's domain_diameter says they are in.

    Args:
        params: All trainable parameters.
        radius: Of the ball around 0.
    """

    def __init__(self, params: Sequence[nn.Parameter], radius: float):
        self._params, self._radius = params, radius

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step."""
        yield Assumption.checked(
            f"all parameters together projected on the ball of radius {self._radius:g}",
            Topic.DOMAIN,
        )

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """The norm of the iterate."""
        return {"norm": joint_norm(self._params)}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if it is outside."""
        check_inside(piece.step, values["norm"], self._radius)


def check_inside(step: int, norm: float, radius: float, remedy: str = "") -> None:
    """Raises UnsupportedRunError if an iterate of norm `norm` is outside the ball."""
    if not norm <= radius * (1 + ROUNDING):
        raise UnsupportedRunError(
            f"step {step} starts at norm {norm:.8g}, outside the ball of radius {radius:.8g}."
            f"{remedy}"
        )


@torch.no_grad()
def project_on_ball(params: Sequence[nn.Parameter], radius: float) -> None:
    """Projects the JOINT vector of all parameters on the L2 ball around 0, in place.

    The radius is lowered by two units of rounding, so that the result lies inside the ball.
    """
    eps = max(torch.finfo(param.dtype).eps for param in params)
    factor = (radius * (1 - 2 * eps) / joint_norm(params)).clamp(max=1.0)
    for param in params:
        param.mul_(factor.to(device=param.device, dtype=param.dtype))
