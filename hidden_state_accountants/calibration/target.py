"""Evaluating runs against a target, and closing in on the parameter that just meets it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import optimize

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import text_up

MakeEvent = Callable[[Any], dp_accounting.DpEvent]
MakeAccountant = Callable[[], dp_accounting.PrivacyAccountant]

_MOST_EVALUATIONS = 200
_NEAR = 0.5  # log of mu over that of the target, at points through which a parabola is drawn
_ROUNDING = 1e-4  # an increase of epsilon that may be discretisation, not a trend


@attrs.define
class Target:
    """Evaluates runs against (epsilon, delta) and remembers what it saw."""

    epsilon: float
    delta: float
    make_event: MakeEvent
    make_accountant: MakeAccountant
    name: str
    for_one_position: bool
    seen: dict[float, float] = attrs.field(factory=dict)
    accountant: Any = None  # the last one
    event: dp_accounting.DpEvent | None = None  # the last one

    def meets(self, value: float) -> bool:
        return self.epsilon_of(value) <= self.epsilon

    def epsilon_of(self, value: float) -> float:
        if value not in self.seen:
            if len(self.seen) >= _MOST_EVALUATIONS:
                raise ValueError(
                    f"Expected the search for {self.name} to end within {_MOST_EVALUATIONS} "
                    f"evaluations, got as far as {value!r}. Allow a larger tolerance."
                )
            self.accountant = self.make_accountant()
            self.event = self.make_event(value)
            self.accountant.compose(self.event)
            records = getattr(getattr(self.accountant, "guarantee", None), "only_for", "")
            if records:
                validate.one_position(records, self.for_one_position)
            epsilon = float(self.accountant.get_epsilon(self.delta))
            if math.isnan(epsilon):
                raise ValueError(f"Expected a number epsilon, got nan for {self.name} = {value!r}.")
            self.seen[value] = epsilon
        return self.seen[value]

    @property
    def is_gaussian(self) -> bool:
        """Whether the last guarantee is known to be Gaussian."""
        return getattr(getattr(self.accountant, "guarantee", None), "mu", None) is not None

    def log_mu(self, value: float) -> float:
        """log of the mu whose Gaussian curve has this epsilon, over that of the target.

        Negative where the target is met. Nearly linear in the log of the parameter: exactly, with
        slope -1, for the noise of a Gaussian guarantee.
        """
        return gaussian_log_mu(self.epsilon_of(value), self.delta) - gaussian_log_mu(
            self.epsilon, self.delta
        )

    def check_monotone(self, increasing: bool) -> None:
        """Whether epsilon moved in one direction only, which the bisection relies on."""
        values = sorted(self.seen, reverse=increasing)
        for before, after in itertools.pairwise(values):
            if self.seen[after] > self.seen[before] * (1 + _ROUNDING) + _ROUNDING:
                raise ValueError(
                    f"Expected epsilon to {'grow' if increasing else 'fall'} with {self.name}, got "
                    f"{self.seen[before]:g} at {before:g} and {self.seen[after]:g} at {after:g}: "
                    "there is more than one crossing of the target. Search by hand."
                )


@functools.lru_cache(maxsize=_MOST_EVALUATIONS)
def gaussian_log_mu(epsilon: float, delta: float) -> float:
    """log of the mu of the Gaussian curve through (epsilon, delta > 0)."""
    if epsilon == math.inf:
        return math.inf

    def excess(log_mu: float) -> float:
        return delta_from_mu(math.exp(log_mu), epsilon) - delta

    low, high = -150.0, math.log(math.sqrt(2 * epsilon) + 40.0)
    if excess(low) >= 0:
        return low
    if excess(high) <= 0:
        return high
    return float(optimize.brentq(excess, low, high, xtol=1e-13))


def close_in(target: Target, meets: float, misses: float, tolerance: float) -> float:
    """Shrinks a bracket of positive ends until they are `tolerance` apart; the end that meets."""
    slow = 0
    while abs(meets - misses) > tolerance * meets:
        width = abs(math.log(meets / misses))
        middle = math.nan if slow >= 2 else beyond_the_crossing(target, meets, misses, tolerance)
        if not min(meets, misses) < middle < max(meets, misses):
            middle, slow = math.sqrt(meets * misses), 0
            if not min(meets, misses) < middle < max(meets, misses):
                break  # neighbouring doubles
        if target.meets(middle):
            meets = middle
        else:
            misses = middle
        slow = slow + 1 if abs(math.log(meets / misses)) > 0.5 * width else 0
    return meets


def beyond_the_crossing(target: Target, meets: float, misses: float, tolerance: float) -> float:
    """Where the target seems to be met exactly, and a little towards the farther end.

    In logarithms, a parabola through the three best points if they are near, a line through the two
    best ones, or through the ends of the bracket. What it hits is close to the crossing, so that
    the next bracket is narrow if it lies on the other side of it.
    """
    best = sorted(target.seen, key=lambda value: abs(target.log_mu(value)))
    ends = math.log(meets), math.log(misses)
    near = [value for value in best[:3] if abs(target.log_mu(value)) < _NEAR]
    for values, doubt in ((near[:3], 0.005), (best[:2], 0.01), ((meets, misses), 0.01)):
        crossing = log_crossing(target, values)
        if min(ends) < crossing < max(ends):
            nearer, farther = sorted(ends, key=lambda end: abs(end - crossing))
            margin = max(tolerance / 3, doubt * abs(crossing - nearer))
            return math.exp(crossing + math.copysign(margin, farther - crossing))
    return math.nan


def log_crossing(target: Target, values: Sequence[float]) -> float:
    """The logarithm of the value at which the polynomial through the given ones meets the target.

    A polynomial in the height over the target; nan if the heights do not fix one.
    """
    if len(values) < 2:
        return math.nan
    heights = [target.log_mu(value) for value in values]
    if min(values) <= 0 or not np.isfinite(heights).all() or len(set(heights)) < len(heights):
        return math.nan
    crossing = 0.0
    for i, value in enumerate(values):
        others = [height for j, height in enumerate(heights) if j != i]
        crossing += math.log(value) * math.prod(h / (h - heights[i]) for h in others)
    return crossing


def make_target(
    name: str,
    target_epsilon: float,
    delta: float,
    make: MakeEvent,
    make_accountant: MakeAccountant | None,
    relation: NeighboringRelation,
    group_size: int,
    for_one_position: bool,
) -> Target:
    """Checks the arguments that all calibrations share."""
    validate.integer("group_size", group_size, minimum=1)
    if make_accountant is not None and group_size > 1:
        raise ValueError(
            f"Expected group_size = 1 with a make_accountant, got {group_size}. Let it make "
            "accountants of that group_size."
        )
    validate.target_pair(target_epsilon, delta, ("target_epsilon", "delta"))
    return Target(
        validate.real("target_epsilon", target_epsilon, minimum=0),
        validate.real("delta", delta, above=0, remedy="Gaussian noise never reaches delta = 0."),
        make,
        make_accountant or (lambda: LastIterateAccountant(relation, group_size=group_size)),
        name,
        for_one_position,
    )


def check_tolerance(value: float) -> float:
    """A relative tolerance."""
    return validate.real("tolerance", value, minimum=1e-12, maximum=0.5)


def event_maker(make_event: Any, field: str) -> MakeEvent:
    """A function of the field from itself or from a run whose constant field it replaces."""
    if isinstance(make_event, dp_accounting.DpEvent):
        if not hasattr(make_event, field):
            raise TypeError(
                f"Expected a run with a {field}, got {make_event!r}. Pass a function of it."
            )
        if not isinstance(getattr(make_event, field), int | float):
            raise ValueError(
                f"Expected a constant {field} to replace, got a schedule. Pass a function that "
                "scales it."
            )
        return lambda value: attrs.evolve(make_event, **{field: value})
    if not callable(make_event):
        raise TypeError(f"Expected make_event to be a function or a run, got {make_event!r}.")
    return make_event


def unreachable(target: Target, value: float) -> str:
    """Why even `value` does not meet the target."""
    epsilon = target.epsilon_of(value)
    text = (
        f"Expected a target that some {target.name} meets, got epsilon {target.epsilon:g} at delta "
        f"{target.delta:g}: with {target.name} = {value:.6g} epsilon is {text_up(epsilon, 6)}. "
    )
    guarantee = getattr(target.accountant, "guarantee", None)
    if isinstance(target.event, LastIterateDpEvent):
        extra = target.event.cap_delta(target.accountant.neighboring_relation)
        if extra >= target.delta:
            return text + (
                f"The cap on the batches costs a delta of {extra:.3g} by itself, whatever the "
                "noise is. Raise max_batch_size or delta."
            )
    if epsilon == math.inf:
        return text + "Something is released without noise, or no finite guarantee is known."
    if target.name == "weight_decay" and guarantee is not None:
        why = dict(guarantee.alternatives).get("shifted_interpolation", "")
        text += f"The best bound is {guarantee.theorem}; more decay would not contract more. "
        text += f"Theorem A does not apply: {why}. " if "needs" in why else ""
        return text + "Add noise, or lower the learning rate."
    return text + "Epsilon levels off there: a part of the run does not depend on it."
