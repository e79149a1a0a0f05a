"""Maps that put the iterates back into a convex set after every step, and move no two apart.

The theorems need of such a map that it is nonexpansive, |P(x) - P(y)| <= |x - y| for all parameters
together, that it is the same in every step and looks at no record, and a bound on the diameter of
what it maps to (docs/theory/theorem_a.md). Projections on convex sets are nonexpansive, and so is a
product of them on disjoint groups of parameters.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_accountants.guarantee import Topic
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.gradients.norms import ROUNDING, joint_norm
from hidden_state_adapters.opacus.users_map import UsersMap, distance, expands

_SLACK = 1 + ROUNDING


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"Expected {name} to be a real number, got {value!r}.")
    return float(value)


def _positive(name: str, value: Any) -> float:
    if not _real(name, value) > 0:
        raise ValueError(f"Expected {name} > 0, got {value!r}.")
    return float(value)


def _radii(radius: Any) -> float | tuple[float, ...]:
    if isinstance(radius, Iterable) and not isinstance(radius, str):
        return tuple(_positive("radius", r) for r in radius)
    return _positive("radius", radius)


def _radius(radius: Any) -> float:
    return _positive("radius", radius)


def _end(value: Any) -> float:
    return _real("the end of an interval", value)


class Projection:
    """A nonexpansive map of all trainable parameters into a convex set.

    Attributes:
        limit: What `figure` is at most inside of the set.
        measure: What `figure` says, in words.
    """

    limit: float = _SLACK
    measure: str

    def project(self, params: Sequence[nn.Parameter]) -> None:
        """Maps the parameters, in place, under no_grad."""
        raise NotImplementedError

    def figure(self, params: Sequence[nn.Parameter]) -> Figure:
        """A number that says how far outside of the set the parameters are."""
        raise NotImplementedError

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """Of the set, for parameters of these shapes; inf if it is not bounded.

        Raises:
            ValueError: The set has another number of parameters.
        """
        raise NotImplementedError

    def start(self, params: Sequence[nn.Parameter]) -> None:
        """A run starts, or goes on, from these parameters.

        Raises:
            UnsupportedRunError: The map is not nonexpansive.
        """

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step, and what is taken on trust."""
        yield Assumption.checked(f"projected on {self}", Topic.DOMAIN)


@attrs.frozen(repr=False)
class BallProjection(Projection):
    """On the ball around 0 of all parameters together.

    Args:
        radius: > 0.
    """

    measure = "norm over radius"
    radius: float = attrs.field(converter=_radius)

    def __repr__(self) -> str:
        return f"the ball of radius {self.radius:g} for all parameters together"

    @torch.no_grad()
    def project(self, params: Sequence[nn.Parameter]) -> None:
        """See `Projection.project`."""
        _shrink(params, self.radius)

    def figure(self, params: Sequence[nn.Parameter]) -> Figure:
        """See `Projection.figure`."""
        return joint_norm(params) / self.radius

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

    measure = "largest norm over radius"
    radius: float | Sequence[float] = attrs.field(converter=_radii)

    def __repr__(self) -> str:
        return f"a ball for every parameter, of radius {self.radius}"

    def _radii(self, params: Sequence[nn.Parameter]) -> Sequence[float]:
        if isinstance(self.radius, float):
            return [self.radius] * len(params)
        if len(self.radius) != len(params):
            raise ValueError(
                f"Expected one radius for each of the {len(params)} trainable parameters, got "
                f"{len(self.radius)}. Give as many, or one for all."
            )
        return self.radius

    @torch.no_grad()
    def project(self, params: Sequence[nn.Parameter]) -> None:
        """See `Projection.project`."""
        for param, radius in zip(params, self._radii(params), strict=True):
            _shrink([param], radius)

    def figure(self, params: Sequence[nn.Parameter]) -> Figure:
        """See `Projection.figure`."""
        pairs = zip(params, self._radii(params), strict=True)
        ratios = [joint_norm([param]) / radius for param, radius in pairs]
        return torch.stack([ratio.to(ratios[0].device) for ratio in ratios]).max()

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

    limit = 0.0
    measure = "largest distance to the interval"

    low: float = attrs.field(converter=_end)
    high: float = attrs.field(converter=_end)

    def __attrs_post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"Expected low < high, got {self.low!r} and {self.high!r}.")

    def __repr__(self) -> str:
        return f"the box from {self.low:g} to {self.high:g} in every coordinate"

    @torch.no_grad()
    def project(self, params: Sequence[nn.Parameter]) -> None:
        """See `Projection.project`."""
        for param in params:
            param.clamp_(*self._ends(param))

    def _ends(self, param: torch.Tensor) -> tuple[float, float]:
        """The ends as numbers of the parameter's type, not outside of the interval."""
        up, down = param.new_tensor(math.inf).cpu(), param.new_tensor(-math.inf).cpu()
        low, high = param.new_tensor(self.low).cpu(), param.new_tensor(self.high).cpu()
        if float(low) < self.low:
            low = torch.nextafter(low, up)
        if float(high) > self.high:
            high = torch.nextafter(high, down)
        return float(low), float(high)

    def figure(self, params: Sequence[nn.Parameter]) -> Figure:
        """See `Projection.figure`."""
        distances = [_distance_to(p.detach(), self.low, self.high) for p in params]
        return torch.stack([d.to(distances[0].device) for d in distances]).max()

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `Projection.diameter`: the diagonal."""
        return (self.high - self.low) * math.sqrt(sum(p.numel() for p in params))


class DeclaredProjection(Projection):
    """A function of the user, which is taken to be nonexpansive.

    At the start it is tried on random pairs of parameters, which must not come out farther apart
    than they went in. In every step a second application has to change nothing, and the iterate has
    to be within the diameter of the start.

    Args:
        function: Changes a list of tensors in place.
        diameter: Of the set that it maps to.
    """

    measure = "distance to its own projection, or to the start over the diameter,"

    def __init__(self, function: Callable[[list[torch.Tensor]], Any], diameter: float):
        self._map = UsersMap(function, "projection", "p.clamp_(-1, 1)")
        self._diameter = diameter
        self._start: list[torch.Tensor] = []

    def __repr__(self) -> str:
        return f"the set of {self._map}, of diameter {self._diameter:g}"

    def project(self, params: Sequence[nn.Parameter]) -> None:
        """See `Projection.project`."""
        self._map.apply(params)

    def figure(self, params: Sequence[nn.Parameter]) -> Figure:
        """See `Projection.figure`."""
        moved = distance(params, self._map.of(params)) / (ROUNDING * (1 + _size(params)))
        left = distance(params, self._start) / self._diameter
        return max(moved, left)

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `Projection.diameter`."""
        return self._diameter

    def start(self, params: Sequence[nn.Parameter]) -> None:
        """See `Projection.start`."""
        self._start = [p.detach().clone() for p in params]
        for before, after in self._map.trials(params):
            if expands(before, after) or not after <= self._diameter * _SLACK:
                raise UnsupportedRunError(
                    f"Expected a nonexpansive projection onto {self}, got a map that takes two "
                    f"points from distance {before:.6g} to {after:.6g}. Project on a convex set (a "
                    "normalisation does not), in place, and declare its diameter."
                )

    @property
    def assumptions(self) -> Iterator[Assumption]:
        """See `Projection.assumptions`."""
        yield Assumption.declared(
            f"projected on {self}, by a map that is nonexpansive, the same in every step and looks "
            "at no record",
            Topic.DOMAIN,
        )
        yield Assumption.checked("every iterate left alone by projection=, within the diameter")


_KNOWN = (BallProjection, BoxProjection, ParameterBallsProjection)


def projection_of(
    projection: Any, radius: float | None, diameter: float | None
) -> Projection | None:
    """The projection that `make_private` was told.

    Args:
        projection: A Projection, a function, or None.
        radius: projection_radius, or None.
        diameter: projection_diameter, or None.

    Raises:
        TypeError, ValueError: They have an impossible value, or contradict each other.
    """
    if radius is not None and projection is not None:
        raise ValueError(
            "Expected projection or projection_radius, got both. projection_radius is for the ball "
            "of all parameters together."
        )
    # What a subclass does is not known.
    is_function = projection is not None and type(projection) not in _KNOWN
    if is_function and (not callable(projection) or isinstance(projection, type)):
        raise TypeError(
            f"Expected projection to be {', '.join(kind.__name__ for kind in _KNOWN)}, a function "
            f"that changes a list of tensors in place, or None, got {projection!r}."
        )
    if is_function == (diameter is None):
        raise ValueError(
            f"Expected projection_diameter {'with' if is_function else 'only with'} a function as "
            f"projection, got {diameter!r}: it is the diameter of the set that the function maps "
            "to (math.inf if it is not bounded); of other projections it is known."
        )
    if is_function:
        assert diameter is not None
        return DeclaredProjection(projection, _positive("projection_diameter", diameter))
    if radius is not None:
        return BallProjection(_positive("projection_radius", radius))
    return None if projection is None else projection


def _shrink(params: Sequence[nn.Parameter], radius: float) -> None:
    """Projects the JOINT vector of `params` on the ball of `radius` around 0, in place.

    The radius is lowered by two units of rounding, so that the result lies inside the ball.
    """
    eps = max(torch.finfo(param.dtype).eps for param in params)
    factor = (radius * (1 - 2 * eps) / joint_norm(params)).clamp(max=1.0)
    for param in params:
        param.mul_(factor.to(device=param.device, dtype=param.dtype))


def _distance_to(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The largest distance of a number to an interval, in float64; not a number if one is none."""
    values = values.to(torch.float64)
    return torch.maximum(low - values, values - high).max().clamp(min=0.0)


def _size(params: Sequence[nn.Parameter]) -> float:
    return float(joint_norm(params))
