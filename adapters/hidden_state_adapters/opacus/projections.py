"""Convex sets on which the iterates are projected after every step.

Projections on convex sets are nonexpansive, and so is a product of them on disjoint groups of
parameters. The theorems also use the diameter of the set (docs/theory/theorem_a.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError, validate
from hidden_state_accountants.guarantee import Topic
from hidden_state_adapters.opacus.gradients.norms import ROUNDING, joint_norm
from hidden_state_adapters.opacus.step_maps import StepMap, UsersMap, distance


def _radius(radius: Any) -> float:
    return validate.real("radius", radius, above=0)


def _radii(radius: Any) -> float | tuple[float, ...]:
    if isinstance(radius, Iterable) and not isinstance(radius, str):
        return tuple(_radius(r) for r in radius)
    return _radius(radius)


def _end(value: Any) -> float:
    return validate.real("the end of an interval", value, allow_inf=True)


class Projection(StepMap):
    """A projection of all trainable parameters on a convex set."""

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `StepMap.start`: they are inside."""
        mapped = [p.detach().clone() for p in params]
        self.apply(mapped, step_size)
        moved = distance(params, mapped)
        if not moved <= ROUNDING * (1 + float(joint_norm(params))):
            raise UnsupportedRunError(
                f"Expected an initial model inside {self!r}, got one outside, at distance "
                f"{moved:.6g}. Scale the parameters down (zeros are a good start), or enlarge the "
                "set."
            )

    @property
    def assumption(self) -> Assumption:
        """See `StepMap.assumption`."""
        return Assumption.checked(f"projected on {self}", Topic.DOMAIN)


@attrs.frozen(repr=False)
class BallProjection(Projection):
    """On the ball around 0 of all parameters together.

    Args:
        radius: > 0.
    """

    radius: float = attrs.field(converter=_radius)

    def __repr__(self) -> str:
        return f"the ball of radius {self.radius:g} for all parameters together"

    @torch.no_grad()
    def apply(self, params: Sequence[torch.Tensor], step_size: float) -> None:
        """See `StepMap.apply`."""
        _shrink(params, self.radius)

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `StepMap.diameter`."""
        return 2 * self.radius


@attrs.frozen(repr=False)
class ParameterBallsProjection(Projection):
    """Every parameter on a ball around 0 of its own.

    Args:
        radius: One for all, or one for each trainable parameter in the order of
            `module.parameters()`.
    """

    radius: float | Sequence[float] = attrs.field(converter=_radii)

    def __repr__(self) -> str:
        return f"a ball for every parameter, of radius {self.radius}"

    def _radii(self, params: Sequence[torch.Tensor]) -> Sequence[float]:
        if isinstance(self.radius, float):
            return [self.radius] * len(params)
        if len(self.radius) != len(params):
            raise ValueError(
                f"Expected one radius for each of the {len(params)} trainable parameters, got "
                f"{len(self.radius)}. Give as many, or one for all."
            )
        return self.radius

    @torch.no_grad()
    def apply(self, params: Sequence[torch.Tensor], step_size: float) -> None:
        """See `StepMap.apply`."""
        for param, radius in zip(params, self._radii(params), strict=True):
            _shrink([param], radius)

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `StepMap.diameter`: sqrt(sum (2 r)**2)."""
        return 2 * math.hypot(*self._radii(params))


@attrs.frozen(repr=False)
class BoxProjection(Projection):
    """Every number of every parameter on an interval.

    Args:
        low: Its lower end; -inf for none.
        high: Its upper end, above `low`; inf for none.
    """

    low: float = attrs.field(converter=_end)
    high: float = attrs.field(converter=_end)

    def __attrs_post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"Expected low < high, got {self.low!r} and {self.high!r}.")

    def __repr__(self) -> str:
        return f"the box from {self.low:g} to {self.high:g} in every coordinate"

    @torch.no_grad()
    def apply(self, params: Sequence[torch.Tensor], step_size: float) -> None:
        """See `StepMap.apply`."""
        for param in params:
            param.clamp_(*self._ends(param))

    def _ends(self, param: torch.Tensor) -> tuple[float, float]:
        """The ends as numbers of the parameter's type, not outside of the interval."""
        up, down = (torch.tensor(x, dtype=param.dtype) for x in (math.inf, -math.inf))
        low, high = (torch.tensor(x, dtype=param.dtype) for x in (self.low, self.high))
        if float(low) < self.low:
            low = torch.nextafter(low, up)
        if float(high) > self.high:
            high = torch.nextafter(high, down)
        return float(low), float(high)

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `StepMap.diameter`: the diagonal."""
        return (self.high - self.low) * math.sqrt(sum(p.numel() for p in params))


class DeclaredProjection(UsersMap, Projection):
    """A function of the user's own, which maps to a set.

    Args:
        function: Of the list.
        diameter: Of the set.
    """

    kind = "projection"
    remedy = (
        "Project on a convex set (a normalisation does not), in place, and declare its diameter."
    )

    def __init__(self, function: Callable[[list[torch.Tensor]], Any], diameter: float):
        super().__init__(function)
        self._diameter = validate.real(
            "the diameter of the projection", diameter, above=0, allow_inf=True
        )

    def __repr__(self) -> str:
        return f"the set of {self}, of diameter {self._diameter:g}"

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `StepMap.diameter`."""
        return self._diameter

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `StepMap.start`."""
        super().start(params, step_size)
        Projection.start(self, params, step_size)

    @property
    def assumption(self) -> Assumption:
        """See `StepMap.assumption`."""
        return Assumption.declared(
            f"projected on {self!r}, by a map that is nonexpansive, the same in every step and "
            "looks at no record",
            Topic.DOMAIN,
        )


def _shrink(params: Sequence[torch.Tensor], radius: float) -> None:
    """Projects the JOINT vector of `params` on the ball of `radius` around 0, in place.

    The radius is lowered by two units of rounding, so that the result lies inside the ball.
    """
    eps = max(torch.finfo(param.dtype).eps for param in params)
    factor = (radius * (1 - 2 * eps) / joint_norm(params)).clamp(max=1.0)
    for param in params:
        param.mul_(factor.to(device=param.device, dtype=param.dtype))
