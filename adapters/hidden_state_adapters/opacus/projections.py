"""Maps that put the iterates back into a convex set after every step, and move no two apart.

The theorems need of such a map that it is nonexpansive, |P(x) - P(y)| <= |x - y| for all parameters
together, that it is the same in every step and looks at no record, and a bound on the diameter of
what it maps to (docs/theory/theorem_a.md). Projections on convex sets are nonexpansive, and so is a
product of them on disjoint groups of parameters.
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
from hidden_state_adapters.opacus.users_map import UsersMap, distance


def _radius(radius: Any) -> float:
    return validate.real("radius", radius, above=0)


def _radii(radius: Any) -> float | tuple[float, ...]:
    if isinstance(radius, Iterable) and not isinstance(radius, str):
        return tuple(_radius(r) for r in radius)
    return _radius(radius)


def _end(value: Any) -> float:
    return validate.real("the end of an interval", value, allow_inf=True)


class Projection:
    """A nonexpansive map of all trainable parameters into a convex set."""

    def project(self, params: Sequence[torch.Tensor]) -> None:
        """Maps the parameters, in place, under no_grad."""
        raise NotImplementedError

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """Of the set, for parameters of these shapes; inf if it is not bounded.

        Raises:
            ValueError: The set has another number of parameters.
        """
        raise NotImplementedError

    def start(self, params: Sequence[nn.Parameter]) -> None:
        """A run starts from these parameters.

        Raises:
            UnsupportedRunError: They are outside, or the map is not nonexpansive.
        """
        mapped = [p.detach().clone() for p in params]
        self.project(mapped)
        moved = distance(params, mapped)
        if not moved <= ROUNDING * (1 + float(joint_norm(params))):
            raise UnsupportedRunError(
                f"Expected an initial model inside {self}, got one outside, at distance "
                f"{moved:.6g}. Scale the parameters down (zeros are a good start), or enlarge the "
                "set."
            )

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What holds by construction, and what is taken on trust."""
        yield Assumption.checked(f"projected on {self}", Topic.DOMAIN)


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
    def project(self, params: Sequence[torch.Tensor]) -> None:
        """See `Projection.project`."""
        _shrink(params, self.radius)

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `Projection.diameter`."""
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
    def project(self, params: Sequence[torch.Tensor]) -> None:
        """See `Projection.project`."""
        for param, radius in zip(params, self._radii(params), strict=True):
            _shrink([param], radius)

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `Projection.diameter`: sqrt(sum (2 r)**2)."""
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
    def project(self, params: Sequence[torch.Tensor]) -> None:
        """See `Projection.project`."""
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
        """See `Projection.diameter`: the diagonal."""
        return (self.high - self.low) * math.sqrt(sum(p.numel() for p in params))


class DeclaredProjection(Projection):
    """A function of the user, which is taken to be nonexpansive; tried at the start.

    Args:
        function: Changes a list of tensors in place.
        diameter: Of the set that it maps to.
    """

    def __init__(self, function: Callable[[list[torch.Tensor]], Any], diameter: float):
        remedy = (
            "Project on a convex set (a normalisation does not), in place, and declare its "
            "diameter."
        )
        self._map = UsersMap(function, "projection", remedy)
        self._diameter = validate.real(
            "the diameter of the projection", diameter, above=0, allow_inf=True
        )

    def __repr__(self) -> str:
        return f"the set of {self._map}, of diameter {self._diameter:g}"

    def project(self, params: Sequence[torch.Tensor]) -> None:
        """See `Projection.project`."""
        self._map.apply(params)  # type: ignore[arg-type]

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `Projection.diameter`."""
        return self._diameter

    def start(self, params: Sequence[nn.Parameter]) -> None:
        """See `Projection.start`."""
        self._map.try_out(params, diameter=self._diameter)
        super().start(params)

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """See `Projection.assumptions`."""
        yield Assumption.declared(
            f"projected on {self}, by a map that is nonexpansive, the same in every step and looks "
            "at no record",
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
