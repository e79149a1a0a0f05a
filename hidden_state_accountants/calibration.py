"""The parameter of a run that just meets a privacy target.

>>> import hidden_state_accountants as hsa
>>> run = hsa.LastIterateDpEvent(
...     noise_multiplier=1.0, learning_rate=0.5, clip_norm=1.4143, batch_size=500,
...     dataset_size=50_000, num_steps=20_000, batch_order="cyclic",
...     loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0), weight_decay=0.1)
>>> print(f"{hsa.calibrate_noise(1.0, 1e-5, run):.4f}")
3.7304
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation
from scipy import optimize

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import text_up

MakeEvent = Callable[[Any], dp_accounting.DpEvent]
MakeAccountant = Callable[[], dp_accounting.PrivacyAccountant]

_NOISE_FIELDS = ("noise_multiplier", "noise_std", "noise_variance")
_MUCH_NOISE = 8.0  # where a search begins: epsilon is quick to compute, and nearly Gaussian
_SO_MUCH_NOISE = 1e12  # more would not help either
_SO_LITTLE_NOISE = 1e-30  # variances are in squares of small units
_STEP = 8.0  # at most by so much a search goes down: a little noise can cost gigabytes
_FAR = 50.0  # log of mu over that of the target, where epsilon is infinite
_ROUNDING = 1e-4  # an increase of epsilon that may be discretisation, not a trend


def calibrate_noise(
    target_epsilon: float,
    delta: float,
    make_event: MakeEvent | dp_accounting.DpEvent,
    *,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    make_accountant: MakeAccountant | None = None,
    tolerance: float = 1e-6,
) -> float:
    """The smallest noise multiplier that meets (target_epsilon, delta).

    The search comes from much noise, by steps along the Gaussian curve of the last figure; beside
    something that the noise does not reach it closes in from both sides.

    Formal guarantees: the accountant was asked for the run with the returned noise and its epsilon
    is at most `target_epsilon`. If epsilon falls with the noise, as it does for every accountant
    of this package, no noise multiplier below ``(1 - tolerance)`` times the result meets it.

    Args:
        target_epsilon: >= 0. inf asks for no noise.
        delta: In (0, 1).
        make_event: Maps a noise multiplier to a run; or a run whose own is replaced (noise_std of a
            DiceSgdDpEvent, noise_variance of a BlockCoordinateDpEvent).
        neighboring_relation: Relation of the default accountant.
        make_accountant: Makes a fresh accountant, for groups of records for example;
            `LastIterateAccountant` by default.
        tolerance: Relative, in [1e-12, 0.5].

    Returns:
        0 if the run needs no noise.

    Raises:
        UnsupportedRunError: The accountant does not cover the run.
        ValueError: No noise meets the target; the text says why.
    """
    field = next((name for name in _NOISE_FIELDS if hasattr(make_event, name)), _NOISE_FIELDS[0])
    target = _Target(
        field,
        target_epsilon,
        delta,
        _event_maker(make_event, field),
        neighboring_relation=neighboring_relation,
        make_accountant=make_accountant,
    )
    validate.real("tolerance", tolerance, minimum=1e-12, maximum=0.5)
    if target.epsilon == math.inf and target.meets(0.0):
        return 0.0
    meets = _MUCH_NOISE
    if not target.meets(meets):
        crossing = 1.05 * meets * math.exp(min(target.log_mu(meets), 3 * _FAR))  # if Gaussian
        if not target.meets(crossing):
            if not target.meets(_SO_MUCH_NOISE):
                raise ValueError(_unreachable(target, _SO_MUCH_NOISE))
            return target.close_in(_SO_MUCH_NOISE, crossing, tolerance)
        meets = crossing
    while target.meets(misses := _less_noise(target, meets) * (1 - tolerance / 3)):
        meets = misses
        if meets < _SO_LITTLE_NOISE:
            return 0.0 if target.meets(0.0) else meets
    return target.close_in(meets, misses, tolerance)


def calibrate_epochs(
    target_epsilon: float,
    delta: float,
    make_event: MakeEvent | dp_accounting.DpEvent,
    *,
    max_epochs: int = 10_000,
    **accounting: Any,
) -> int:
    """The largest number of epochs, up to `max_epochs`, that meets (target_epsilon, delta).

    Epsilon grows with the epochs of a run with constant parameters: a longer run ends like the
    shorter one, from a state that already depends on the data. A bound that levels off below the
    target gives `max_epochs`: no number is too many for it. A schedule that belongs to one length
    may break this; the figures that the search meets are checked.

    Formal guarantees: those of `calibrate_noise`.

    Args:
        target_epsilon: >= 0, finite.
        delta: In (0, 1).
        make_event: Maps a number of epochs to a run; or a run without schedules and releases.
        max_epochs: >= 1.
        **accounting: `neighboring_relation` and `make_accountant`, as for `calibrate_noise`.

    Raises:
        UnsupportedRunError: The accountant does not cover the run.
        ValueError: One epoch is too many, or epsilon falls with the number of epochs.
    """
    target = _Target("epochs", target_epsilon, delta, _epoch_maker(make_event), **accounting)
    most = validate.integer("max_epochs", max_epochs, minimum=1)
    if not target.meets(1):
        least = text_up(target.epsilon_of(1), 6)
        raise ValueError(
            f"Expected target_epsilon >= {least}, what one epoch costs at delta "
            f"{target.delta:g}, got {target.epsilon:g}. Add noise."
        )
    meets = 1
    while meets < most and target.meets(misses := min(4 * meets, most)):
        meets = misses
    if meets == most:
        target.check_monotone()
        return most
    return int(target.close_in(meets, misses, 0.5 / misses))


class _Target:
    """Evaluates runs against (epsilon, delta) and remembers what it saw."""

    def __init__(
        self,
        name: str,
        epsilon: float,
        delta: float,
        make_event: MakeEvent,
        *,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        make_accountant: MakeAccountant | None = None,
    ):
        relation = validate.neighboring_relation(neighboring_relation)
        validate.target_pair(epsilon, delta, ("target_epsilon", "delta"))
        self.name, self.make_event = name, make_event
        is_noise = name in _NOISE_FIELDS
        self.epsilon = validate.real("target_epsilon", epsilon, minimum=0, allow_inf=is_noise)
        remedy = "Gaussian noise never reaches delta = 0."
        self.delta = validate.real("delta", delta, above=0, remedy=remedy)
        self.make_accountant = make_accountant or (lambda: LastIterateAccountant(relation))
        self.seen: dict[float, float] = {}

    def meets(self, value: float) -> bool:
        return self.epsilon_of(value) <= self.epsilon

    def epsilon_of(self, value: float) -> float:
        if value not in self.seen:
            accountant = self.make_accountant().compose(self.make_event(value))
            self.seen[value] = float(accountant.get_epsilon(self.delta))
        return self.seen[value]

    def log_mu(self, value: float) -> float:
        """log of the mu whose Gaussian curve has this epsilon, over that of the target.

        Negative where the target is met. Nearly linear in the log of the parameter: exactly, with
        slope -1, for the noise of a Gaussian guarantee.
        """
        return gaussian_log_mu(self.epsilon_of(value), self.delta) - gaussian_log_mu(
            self.epsilon, self.delta
        )

    def close_in(self, meets: float, misses: float, width: float) -> float:
        """The value nearest to `misses` seen to meet the target; of integers if `meets` is one."""
        ends = {math.log(meets): meets, math.log(misses): misses}

        def height(logarithm: float) -> float:
            value = ends.get(logarithm, math.exp(logarithm))
            value = round(value) if isinstance(meets, int) else value
            size = min(max(abs(self.log_mu(value)), 1e-300), _FAR)
            return -size if self.meets(value) else size

        optimize.brentq(height, *ends, xtol=width)
        self.check_monotone()
        return min((v for v in self.seen if self.meets(v)), key=lambda v: abs(v - misses))

    def check_monotone(self) -> None:
        """Raises ValueError unless epsilon moved in one direction only, as the bisection needs."""
        grows = self.name == "epochs"
        for before, after in itertools.pairwise(sorted(self.seen, reverse=grows)):
            if self.seen[after] > self.seen[before] * (1 + _ROUNDING) + _ROUNDING:
                raise ValueError(
                    f"Expected epsilon to {'grow' if grows else 'fall'} with {self.name}, got "
                    f"{self.seen[before]:g} at {before:g} and {self.seen[after]:g} at {after:g}: "
                    "there is more than one crossing of the target. Search by hand."
                )


@functools.lru_cache(maxsize=256)
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


def _less_noise(target: _Target, meets: float) -> float:
    """The noise that only just meets the target if the guarantee is Gaussian."""
    if target.epsilon_of(meets) == 0:  # says nothing about how far away the target is
        return meets / _STEP
    return meets * max(math.exp(target.log_mu(meets)), 1 / _STEP)


def _event_maker(make_event: Any, field: str) -> MakeEvent:
    """A function of the field from itself or from a run whose constant field it replaces."""
    if not isinstance(make_event, dp_accounting.DpEvent):
        return make_event  # type: ignore[no-any-return]
    if not isinstance(getattr(make_event, field, None), int | float):
        raise ValueError(
            f"Expected a run with a constant {field} to replace, got {make_event!r}. Pass a "
            "function that makes the run."
        )
    return lambda value: attrs.evolve(make_event, **{field: value})


def _epoch_maker(make_event: Any) -> MakeEvent:
    if hasattr(make_event, "num_epochs"):
        return _event_maker(make_event, "num_epochs")
    make = _event_maker(make_event, "num_steps")
    if make is make_event:
        return make
    if getattr(make_event, "has_schedules", False) or getattr(make_event, "release_steps", ()):
        raise ValueError(
            "Expected a run without schedules and release_steps, which belong to one length, "
            "got one with them. Pass a function of the number of epochs."
        )
    return lambda epochs: make(epochs * make_event.batches_per_epoch)


def _unreachable(target: _Target, value: float) -> str:
    """Why even `value` does not meet the target."""
    epsilon, event = target.epsilon_of(value), target.make_event(value)
    accountant = target.make_accountant().compose(event)
    text = (
        f"Expected a target that some {target.name} meets, got epsilon {target.epsilon:g} at delta "
        f"{target.delta:g}: with {target.name} = {value:.6g} epsilon is {text_up(epsilon, 6)}. "
    )
    if isinstance(event, LastIterateDpEvent):
        extra = event.cap_delta(accountant.neighboring_relation)
        if extra >= target.delta:
            return text + (
                f"The cap on the batches costs a delta of {extra:.3g} by itself, whatever the "
                "noise is. Raise max_batch_size or delta."
            )
    if epsilon == math.inf:
        return text + "Something is released without noise, or no finite guarantee is known."
    return text + "Epsilon levels off there: a part of the run does not depend on it."
