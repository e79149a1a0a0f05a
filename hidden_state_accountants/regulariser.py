"""Public regularisers of composite objectives, and their proximal maps in every framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from hidden_state_accountants import validate

Array = Any
"""An array of one framework."""

_TINY = 1e-30  # a number of float32: what a group of zeros is divided by


@attrs.frozen
class ProxOperations:
    """The operations of one framework on one array.

    Attributes:
        maximum, minimum: Of an array and an array or a number.
        group_norms: Array, axis: the L2 norms over all other axes, in a shape that broadcasts; of
            all entries if the axis is None.
    """

    maximum: Callable[..., Array]
    minimum: Callable[..., Array]
    group_norms: Callable[..., Array]


def group_axes(dimensions: int, axis: int | None) -> tuple[int, ...]:
    """The axes over which the norms of groups are taken; of vectors always all."""
    if axis is None or dimensions < 2:
        return tuple(range(dimensions))
    if not -dimensions <= axis < dimensions:
        raise ValueError(
            f"Expected group_axis to be an axis of every parameter, got {axis} for one of "
            f"{dimensions} dimensions. Use 0, 1, -1 or None."
        )
    return tuple(other for other in range(dimensions) if other != axis % dimensions)


def _group_norms(array: np.ndarray, axis: int | None) -> np.ndarray:
    axes = group_axes(array.ndim, axis)
    return np.sqrt(np.square(array).sum(axis=axes, keepdims=True))


_AN_AXIS = attrs.validators.optional(attrs.validators.instance_of(int))
NUMPY_PROX = ProxOperations(maximum=np.maximum, minimum=np.minimum, group_norms=_group_norms)


@attrs.frozen(kw_only=True)
class Regulariser:
    r"""A public convex function h of the parameters, which acts through its proximal map.

    .. math::
        h(x) = \lambda_1 |x|_1 + \gamma \sum_g |x_g|_2 + \tfrac{\lambda_2}{2} |x|^2
        \quad \text{for } low \le x \le high, \quad \infty \text{ elsewhere}

    After every noisy step of rate :math:`\eta` the parameters become
    :math:`\mathrm{prox}_{\eta h}(x) = \arg\min_u h(u) + |u - x|^2/(2 \eta)`: a soft threshold of
    :math:`\eta \lambda_1`, groups shortened by :math:`\eta \gamma`, division by
    :math:`1 + \eta \lambda_2`, and the box. Zeros are exact.

    Formal guarantees:
      - The map is nonexpansive, and Lipschitz with :math:`1/(1 + \eta \lambda_2)`, for all
        parameters together. The accounting reads :math:`\lambda_2` off this object: the event's
        `prox_strong_convexity` (docs/theory/theorem_a.md, "A prox after the noise").
      - It looks at no record: weights and ends are public constants.
      - A bounded box is not counted as a domain: its ends are rounded to the parameters' type. For
        a domain that counts project (`projection=`, `projection_radius=`).

    Args:
        l1: :math:`\lambda_1 \ge 0`, weight of the lasso.
        l2: :math:`\lambda_2 \ge 0`, weight of the halved squared norm.
        group_lasso: :math:`\gamma \ge 0`, weight of the norms of the groups.
        group_axis: A group has the entries of one parameter that share their index on this axis
            (of a torch weight 0 is an output and 1 an input, of a Keras kernel the other way
            round). None, and for vectors always: every parameter is a group.
        low: Lower end of the interval for every number; 0 keeps them non-negative.
        high: Upper end of the interval; above `low`.

    Raises:
        TypeError, ValueError: A weight is no finite number >= 0, or low >= high; or group_lasso
            with another interval than the whole line or the non-negative numbers, where the
            proximal map has no closed form.

    Source: Parikh & Boyd 2014, Proximal Algorithms, 6.5; group lasso with the others: Yu 2013, On
        Decomposing the Proximal Map, theorem 4.
    """

    l1: float = attrs.field(default=0.0, validator=validate.MAGNITUDE)
    l2: float = attrs.field(default=0.0, validator=validate.MAGNITUDE)
    group_lasso: float = attrs.field(default=0.0, validator=validate.MAGNITUDE)
    group_axis: int | None = attrs.field(default=None, validator=_AN_AXIS)
    low: float = attrs.field(default=-math.inf, converter=float)
    high: float = attrs.field(default=math.inf, converter=float)

    def __attrs_post_init__(self) -> None:
        ends = (self.low, self.high)
        if not self.low < self.high:
            raise ValueError(f"Expected low < high, got {self.low!r} and {self.high!r}.")
        if self.group_lasso and ends not in ((-math.inf, math.inf), (0.0, math.inf)):
            raise ValueError(
                f"Expected low = 0 or no ends with group_lasso, got {self.low!r} and "
                f"{self.high!r}: the proximal map of both together has no closed form. Leave one "
                "out."
            )

    @property
    def strong_convexity(self) -> float:
        """mu of h, which the event calls `prox_strong_convexity`."""
        return self.l2

    @property
    def effect(self) -> str:
        """Describes in words what it does in a run, for statements."""
        return (
            f"after the noise of every step the proximal map of {self}, with that step's learning "
            "rate"
        )

    def check_axes(self, shapes: Iterable[Sequence[int]]) -> None:
        """Raises ValueError if one of the parameters has no axis `group_axis`."""
        if self.group_lasso:
            for shape in shapes:
                group_axes(len(shape), self.group_axis)

    def prox(
        self, values: Array, step_size: Array, operations: ProxOperations = NUMPY_PROX
    ) -> Array:
        """The proximal map of one parameter.

        Args:
            values: Array of a framework.
            step_size: eta >= 0, a number or a scalar of the same type.
            operations: Array operations of the framework.

        Raises:
            ValueError: The parameter has no axis `group_axis`.
        """
        if self.l1:
            threshold = step_size * self.l1
            values = values - operations.maximum(operations.minimum(values, threshold), -threshold)
        if self.group_lasso:
            if self.low == 0:
                values = operations.maximum(values, 0.0)
            threshold = step_size * self.group_lasso
            norms = operations.group_norms(values, self.group_axis)
            longest = operations.maximum(operations.maximum(norms, threshold), _TINY)
            values = values * (1 - threshold / longest)
        if self.l2:
            values = values / (1 + step_size * self.l2)
        if self.low > -math.inf:
            values = operations.maximum(values, self.low)
        if self.high < math.inf:
            values = operations.minimum(values, self.high)
        return values

    def __str__(self) -> str:
        given = ((f, getattr(self, f.name)) for f in attrs.fields(Regulariser))
        inside = ", ".join(f"{f.name}={value:g}" for f, value in given if value != f.default)
        return f"Regulariser({inside})"


def regulariser_or_none(name: str, value: Any) -> Regulariser | None:
    """Returns what was passed as `name`.

    Raises:
        TypeError: It is neither a Regulariser (what a subclass does is not known) nor None.
    """
    if value is not None and type(value) is not Regulariser:
        raise TypeError(
            f"Expected {name} to be a hidden_state_accountants.Regulariser or None, got "
            f"{value!r}. Write for example {name}=Regulariser(l1=0.001)."
        )
    return value  # type: ignore[no-any-return]
