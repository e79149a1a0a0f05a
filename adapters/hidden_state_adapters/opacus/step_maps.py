"""Maps after every step: a proximal map or a projection of all trainable parameters.

The theorems need of such a map that it is the same in every step and for all data sets, and that it
moves no two points apart, |P(x) - P(y)| <= |x - y| for all parameters together
(docs/theory/theorem_a.md). If it brings them closer, by 1/(1 + eta mu), they use that ("A prox
after the noise"), and the diameter of the set that it maps to; mu is read off a Regulariser and
never declared. That a function of the user's own is such a map is declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from hidden_state_accountants import Assumption, Regulariser, UnsupportedRunError, validate
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.regulariser import ProxOperations, group_axes
from hidden_state_adapters.opacus.gradients import ROUNDING, joint_norm


class StepMap:
    """A nonexpansive map of all trainable parameters.

    Attributes:
        name: Kind of the map: "projection", which the initial model has to be inside of, or "prox".
        strong_convexity: Modulus mu of the function whose proximal map it is, if it is known.
    """

    name: str = "projection"
    strong_convexity: float = 0.0

    def apply(self, params: Sequence[torch.Tensor], step_size: float) -> None:
        """Maps all parameters in place after a step of that size; gradients are switched off."""
        raise NotImplementedError

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """Returns the diameter of the set that it maps to; inf if it is not bounded.

        Raises:
            ValueError: The set has another number of parameters.
        """
        return math.inf

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """Checks that a run may start from these parameters.

        Raises:
            UnsupportedRunError: They are outside of the set.
            ValueError: It is not defined for them.
        """
        mapped = [p.detach().clone() for p in params]
        self.apply(mapped, step_size)
        moved = float(joint_norm([p - m for p, m in zip(params, mapped, strict=True)]))
        if not moved <= ROUNDING * (1 + float(joint_norm(params))):
            raise UnsupportedRunError(
                f"Expected an initial model inside {self!r}, got one outside, at distance "
                f"{moved:.6g}. Scale the parameters down (zeros are a good start), or enlarge the "
                "set."
            )

    @property
    def assumption(self) -> Assumption:
        """Assumption about the map, checked or declared."""
        return Assumption.checked(f"projected on {self}", Topic.DOMAIN)


class RegulariserProx(StepMap):
    """The proximal map of a public regulariser."""

    name = "prox"

    def __init__(self, regulariser: Regulariser):
        self._regulariser = regulariser
        self.strong_convexity = regulariser.strong_convexity

    def __repr__(self) -> str:
        return str(self._regulariser)

    @torch.no_grad()
    def apply(self, params: Sequence[torch.Tensor], step_size: float) -> None:
        """See `StepMap.apply`."""
        for param in params:
            param.copy_(self._regulariser.prox(param, step_size, TORCH_PROX))

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `StepMap.start`: every parameter has the axis of the groups."""
        self._regulariser.check_axes([param.shape for param in params])

    @property
    def assumption(self) -> Assumption:
        """See `StepMap.assumption`."""
        return Assumption.checked(self._regulariser.effect, Topic.REGULARISER)


def _radius(radius: Any) -> float:
    return validate.real("radius", radius, above=0)


def _radii(radius: Any) -> float | tuple[float, ...]:
    if isinstance(radius, Iterable) and not isinstance(radius, str):
        return tuple(map(_radius, radius))
    return _radius(radius)


def _end(value: Any) -> float:
    return validate.real("the end of an interval", value, allow_inf=True)


@attrs.frozen(repr=False)
class BallProjection(StepMap):
    """Projection on the ball around 0 of all parameters together.

    Args:
        radius: Radius > 0.
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
class ParameterBallsProjection(StepMap):
    """Projection of every parameter on a ball around 0 of its own.

    Args:
        radius: Radius of all, or one for each trainable parameter in the order of
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
class BoxProjection(StepMap):
    """Projection of every number of every parameter on an interval.

    Args:
        low: Lower end; -inf for none.
        high: Upper end, above `low`; inf for none.
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
        """See `StepMap.apply`; the ends are numbers of the parameter's type inside the interval."""
        for param in params:
            ends = torch.tensor((self.low, self.high), dtype=param.dtype)
            inwards = torch.nextafter(ends, ends.flip(0))
            (low, high), (above, below) = ends.tolist(), inwards.tolist()
            param.clamp_(low if low >= self.low else above, high if high <= self.high else below)

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `StepMap.diameter`: the diagonal."""
        return (self.high - self.low) * math.sqrt(sum(p.numel() for p in params))


class UsersMap(StepMap):
    """A function of the user's own, which changes a list of tensors in place.

    Args:
        function: Projection, of the list; or a prox, of the list and the step size, which is never
            taken to contract.
        diameter: Diameter of the set that a projection maps to; None for a prox.
    """

    def __init__(self, function: Callable[..., Any], diameter: float | None = None):
        self._function, self._diameter = function, math.inf
        self.name = "prox" if diameter is None else "projection"
        if diameter is not None:
            name = "the diameter of the projection"
            self._diameter = validate.real(name, diameter, above=0, allow_inf=True)

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        if self.name == "prox":
            return f"prox={name}"
        return f"the set of projection={name}, of diameter {self._diameter:g}"

    @torch.no_grad()
    def apply(self, params: Sequence[torch.Tensor], step_size: float) -> None:
        """See `StepMap.apply`."""
        further = (step_size,) if self.name == "prox" else ()
        given = list(params)
        returned = self._function(given, *further)
        if returned is not None or [*map(id, given)] != [*map(id, params)]:
            raise TypeError(
                f"Expected {self.name} to change the tensors of a list in place and to return "
                "None, got another result. Write for example p.clamp_(-1, 1) for each p."
            )

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """See `StepMap.diameter`."""
        return self._diameter

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `StepMap.start`."""
        if self.name == "projection":
            super().start(params, step_size)

    @property
    def assumption(self) -> Assumption:
        """See `StepMap.assumption`."""
        is_prox = self.name == "prox"
        does = "after the noise of every step acts" if is_prox else "projected on"
        return Assumption.declared(
            f"{does} {self!r}, by a map that is nonexpansive at every rate, looks at no record, "
            "and is the same function in all steps",
            Topic.REGULARISER if is_prox else Topic.DOMAIN,
        )


_PROJECTIONS = (BallProjection, BoxProjection, ParameterBallsProjection)


def maps_after(value: Any) -> dict[str, StepMap] | None:
    """Reads `make_private(after=)`: a prox before a projection; None for neither.

    Raises:
        TypeError: It is something else, or two of a kind.
    """
    items = value if isinstance(value, list) else [] if value is None else [value]
    made = [_step_map(item) for item in items]
    found = {part.name: part for part in made}
    if len(found) < len(made):
        raise TypeError(f"Expected a prox and a projection in after, got {made!r}.")
    return {name: found[name] for name in ("prox", "projection") if name in found} or None


def _step_map(item: Any) -> StepMap:
    if type(item) is Regulariser:  # what a subclass does is not known, here and below
        return RegulariserProx(item)
    if type(item) in _PROJECTIONS:
        return item  # type: ignore[no-any-return]
    is_pair = isinstance(item, tuple) and len(item) == 2 and item[1] is not None
    function, *diameter = item if is_pair else (item,)
    if callable(function) and not isinstance(function, type | Regulariser):
        return UsersMap(function, *diameter)
    raise TypeError(
        "Expected after to be a hidden_state_accountants.Regulariser, "
        f"{', '.join(kind.__name__ for kind in _PROJECTIONS)}, a function(list of tensors, step "
        "size), a pair (function(list of tensors), diameter of its set or math.inf), or a list of "
        f"a prox and a projection, got {item!r}."
    )


def _shrink(params: Sequence[torch.Tensor], radius: float) -> None:
    """Projects the JOINT vector of `params` on the ball of `radius` around 0, in place.

    The radius is lowered by two units of rounding, so that the result lies inside the ball.
    """
    eps = max(torch.finfo(param.dtype).eps for param in params)
    factor = (radius * (1 - 2 * eps) / joint_norm(params)).clamp(max=1.0)
    for param in params:
        param.mul_(factor.to(device=param.device, dtype=param.dtype))


def _group_norms(values: torch.Tensor, axis: int | None) -> torch.Tensor:
    axes = group_axes(values.dim(), axis)
    wide = values.double()
    norms = torch.linalg.vector_norm(wide, dim=axes, keepdim=True) if axes else wide.abs()
    return norms.to(values.dtype)


TORCH_PROX = ProxOperations(
    maximum=lambda values, other: torch.clamp(values, min=other),
    minimum=lambda values, other: torch.clamp(values, max=other),
    group_norms=_group_norms,
)
"""Operations of `Regulariser.prox` on tensors."""
