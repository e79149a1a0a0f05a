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
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import optimize

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.bounds.dice_sgd_2024 import largest_mu
from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.process.geometry import update_lipschitz

MakeEvent = Callable[[Any], dp_accounting.DpEvent]
MakeAccountant = Callable[[], dp_accounting.PrivacyAccountant]

_MOST_EVALUATIONS = 200
_FAR = 50.0  # log of mu over that of the target, where epsilon is infinite
_ROUNDING = 1e-4  # an increase of epsilon that may be discretisation, not a trend
_NOISE_FIELDS = ("noise_multiplier", "noise_std", "noise_variance")
_SO_MUCH_NOISE = 1e9  # times what composition needs: more would not help either
_MUCH_NOISE = 4.0
_SO_LITTLE_NOISE = 1e-12
_BELOW = 0.99  # times the noise that seems to meet it, a target is likely to be missed
_GRID = 1000  # weight decays


def calibrate_noise(
    target_epsilon: float,
    delta: float,
    make_event: MakeEvent | dp_accounting.DpEvent,
    *,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    make_accountant: MakeAccountant | None = None,
    group_size: int = 1,
    for_one_position: bool = False,
    tolerance: float = 1e-6,
) -> float:
    """The smallest noise multiplier that meets (target_epsilon, delta).

    The bracket starts at the noise that plain Gaussian composition needs, which the default
    accountant never exceeds, and shrinks by steps along the Gaussian curve of the last figure: a
    few evaluations where the guarantee is Gaussian.

    Formal guarantees: the accountant was asked for the run with the returned noise and its epsilon
    is at most `target_epsilon`. If epsilon falls with the noise, as it does for every accountant
    of this package, no noise multiplier below ``(1 - tolerance)`` times the result meets it.

    Args:
        target_epsilon: >= 0, finite.
        delta: In (0, 1).
        make_event: Maps a noise multiplier to a run; or a run whose own is replaced (noise_std of a
            DiceSgdDpEvent, noise_variance of a BlockCoordinateDpEvent).
        neighboring_relation: Of the default accountant.
        make_accountant: Makes a fresh accountant; `LastIterateAccountant` by default.
        group_size: Of the default accountant: how many records one person has at most.
        for_one_position: Whether runs with a `record_position` are meant: the target is then met
            for the records of one batch only.
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
        group_size=group_size,
        for_one_position=for_one_position,
    )
    validate.real("tolerance", tolerance, minimum=1e-12, maximum=0.5)
    start = group_size * _composition_noise(target)
    if not target.meets(start):
        more = start * min(math.exp(target.log_mu(start)) * 1.05, 16.0)
        if not target.meets(more) and not target.meets(start * _SO_MUCH_NOISE):
            raise ValueError(_unreachable(target, start * _SO_MUCH_NOISE))
    meets = min(z for z in target.seen if target.meets(z))
    misses = max((z for z in target.seen if not target.meets(z)), default=0.0)
    while misses == 0.0:
        lower = _less_noise(target, meets) * (1 - tolerance / 3)
        if lower < start * _SO_LITTLE_NOISE:
            return 0.0 if target.meets(0.0) else meets
        if target.meets(lower):
            meets = lower
        else:
            misses = lower
    result = _close_in(target, meets, misses, tolerance)
    target.check_monotone(increasing=False)
    return result


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
        **accounting: `neighboring_relation`, `make_accountant`, `group_size` and
            `for_one_position`, as for `calibrate_noise`.

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
    meets, misses = 1, most + 1
    while meets < most < misses:
        more = _more(target, meets, most)
        meets, misses = (more, misses) if target.meets(more) else (meets, more)
    if misses <= most:
        meets = int(_close_in(target, meets, misses, 0.5 / misses, round))
    target.check_monotone(increasing=True)
    return meets


def calibrate_weight_decay(
    target_epsilon: float,
    delta: float,
    event: LastIterateDpEvent,
    *,
    tolerance: float = 1e-6,
    **accounting: Any,
) -> float:
    r"""The smallest constant weight decay that meets (target_epsilon, delta).

    More decay contracts more, and so lowers epsilon, only up to a point: beyond it the update
    overshoots. The search stays where the modulus :math:`c(\eta, w)` falls with w at every
    learning rate :math:`\eta` of the run. For losses of smoothness M that is (theory, moduli)

    .. math:: \eta w \le 1 - \tfrac{\eta M}{2}\ \text{(convex, not clipped)}, \qquad
              \eta w \le 1 - \tfrac{3 \eta M}{8}\ \text{(convex, clipped)}.

    Sensitivity and noise do not depend on w, so that there epsilon falls with w.

    Formal guarantees: those of `calibrate_noise`.

    Args:
        target_epsilon: >= 0, finite.
        delta: In (0, 1).
        event: The run; its own weight decay is replaced.
        tolerance: Relative, in [1e-12, 0.5].
        **accounting: `neighboring_relation`, `make_accountant`, `group_size` and
            `for_one_position`, as for `calibrate_noise`.

    Returns:
        0 if the run needs no decay.

    Raises:
        UnsupportedRunError: The accountant does not cover the run.
        ValueError: No decay in that range meets the target; the text says why.
    """
    if not isinstance(event, LastIterateDpEvent):
        raise TypeError(f"Expected event to be a LastIterateDpEvent, got {event!r}.")
    make_event = _event_maker(attrs.evolve(event, weight_decay=0.0), "weight_decay")
    target = _Target("weight_decay", target_epsilon, delta, make_event, **accounting)
    validate.real("tolerance", tolerance, minimum=1e-12, maximum=0.5)
    if target.meets(0.0):
        return 0.0
    most = largest_useful_decay(event)
    if not target.meets(most):
        raise ValueError(_unreachable(target, most))
    meets = most
    while target.meets(misses := meets / 16):  # ends that can be compared on a logarithmic scale
        meets = misses
    result = _close_in(target, meets, misses, tolerance)
    target.check_monotone(increasing=False)
    return result


# Evaluating runs against a target, and closing in on what just meets it


@attrs.define
class _Target:
    """Evaluates runs against (epsilon, delta) and remembers what it saw."""

    name: str
    epsilon: float
    delta: float
    make_event: MakeEvent
    relation: NeighboringRelation = attrs.field(
        default=NeighboringRelation.REPLACE_SPECIAL,
        alias="neighboring_relation",
        kw_only=True,
        converter=validate.neighboring_relation,
    )
    make_accountant: MakeAccountant | None = attrs.field(default=None, kw_only=True)
    group_size: int = attrs.field(default=1, kw_only=True)
    for_one_position: bool = attrs.field(default=False, kw_only=True)
    seen: dict[float, float] = attrs.field(factory=dict, init=False)
    accountant: Any = attrs.field(default=None, init=False)  # the last one
    event: dp_accounting.DpEvent | None = attrs.field(default=None, init=False)  # the last one

    def __attrs_post_init__(self) -> None:
        validate.integer("group_size", self.group_size, minimum=1)
        if self.make_accountant is not None and self.group_size > 1:
            raise ValueError(
                f"Expected group_size = 1 with a make_accountant, got {self.group_size}. Let it "
                "make accountants of that group_size."
            )
        validate.target_pair(self.epsilon, self.delta, ("target_epsilon", "delta"))
        self.epsilon = validate.real("target_epsilon", self.epsilon, minimum=0)
        remedy = "Gaussian noise never reaches delta = 0."
        self.delta = validate.real("delta", self.delta, above=0, remedy=remedy)
        if self.make_accountant is None:
            relation, size = self.relation, self.group_size
            self.make_accountant = lambda: LastIterateAccountant(relation, group_size=size)

    def meets(self, value: float) -> bool:
        return self.epsilon_of(value) <= self.epsilon

    def epsilon_of(self, value: float) -> float:
        if value not in self.seen:
            if len(self.seen) >= _MOST_EVALUATIONS:
                raise ValueError(
                    f"Expected the search for {self.name} to end within {_MOST_EVALUATIONS} "
                    f"evaluations, got as far as {value!r}. Allow a larger tolerance."
                )
            assert self.make_accountant is not None
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


def _less_noise(target: _Target, meets: float) -> float:
    """Where the target may be missed; with care: a little noise can cost gigabytes."""
    if target.epsilon_of(meets) == 0:  # says nothing about how far away the target is
        return meets / 8
    crossing = meets * math.exp(target.log_mu(meets))  # if the guarantee is Gaussian
    if getattr(getattr(target.accountant, "guarantee", None), "mu", None) is not None:
        return crossing
    lower = max(crossing, meets / 8 if meets > 4 else meets / 2)
    if len(target.seen) > 1:  # where a line through the two least values meets the target
        a, b = sorted(target.seen)[:2]
        low, high = target.log_mu(a), target.log_mu(b)
        if math.isfinite(low) and math.isfinite(high) and low != high:
            below = _BELOW * a * (b / a) ** (-low / (high - low))
            lower = below if lower < below < meets else lower
    return lower


def _close_in(
    target: _Target,
    meets: float,
    misses: float,
    width: float,
    snap: Callable[[float], float] = float,
) -> float:
    """The value nearest to `misses` that was seen to meet the target, by Brent's method.

    Args:
        target: Is met by the one and missed by the other end of a bracket.
        meets: > 0.
        misses: > 0.
        width: Of the bracket at the end, in its logarithm.
        snap: The values that may be tried.
    """
    ends = {math.log(meets): meets, math.log(misses): misses}

    def height(logarithm: float) -> float:
        value = snap(ends.get(logarithm, math.exp(logarithm)))
        size = min(max(abs(target.log_mu(value)), 1e-300), _FAR)
        return -size if target.meets(value) else size

    optimize.brentq(height, *ends, xtol=width, maxiter=_MOST_EVALUATIONS)
    return min((v for v in target.seen if target.meets(v)), key=lambda v: abs(v - misses))


def _event_maker(make_event: Any, field: str) -> MakeEvent:
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


def _unreachable(target: _Target, value: float) -> str:
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


# Where a search starts


def _composition_noise(target: _Target) -> float:
    """The noise multiplier with which plain Gaussian composition meets the target; a start.

    Of DiceSGD: with which a record that takes part in every step does.
    """
    log_mu = gaussian_log_mu(target.epsilon, target.delta)
    try:
        event = target.make_event(1.0)
        mu, rate = gaussian_mu_and_rate(event, target.relation)
        if isinstance(event, DiceSgdDpEvent):
            mu = largest_mu(event, target.relation) or mu
    except (UnsupportedRunError, TypeError):
        return 1.0
    if not 0 < mu < math.inf or not math.isfinite(log_mu):
        return 1.0
    noise = min(max(mu / math.exp(log_mu) * (1 + 1e-12), 1e-60), 1e60)
    # Where there is much noise a sampled record counts about as its share.
    return min(noise, max(_MUCH_NOISE, 2 * rate * noise))


def gaussian_mu_and_rate(event: Any, relation: NeighboringRelation) -> tuple[float, float]:
    """The mu of an event's Gaussian mechanisms as if none was sampled, and the largest rate.

    The rate is the probability with which a record takes part: 1 where one is not sampled.
    """
    if hasattr(event, "as_composition"):
        event = attrs.evolve(event, max_batch_size=None)
        event = event.as_composition(relation, for_one_position=True)
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return (1 / event.noise_multiplier if event.noise_multiplier > 0 else math.inf), 1.0
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [gaussian_mu_and_rate(part, relation) for part in event.events]
        return math.hypot(*(mu for mu, _ in parts)), max((rate for _, rate in parts), default=1.0)
    inner = getattr(event, "event", None)
    if not isinstance(inner, dp_accounting.DpEvent):
        return 0.0, 1.0
    mu, rate = gaussian_mu_and_rate(inner, relation)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return math.sqrt(event.count) * mu, rate
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return mu, float(event.sampling_probability)
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        return mu, float(event.sample_size / event.source_dataset_size)
    return mu, 1.0


def _more(target: _Target, meets: int, most: int) -> int:
    """Where the target is met exactly if mu keeps growing as a power of the epochs."""
    before = max((n for n in target.seen if n < meets), default=None)
    power = 0.5  # of composition
    if before is not None:
        power = (target.log_mu(meets) - target.log_mu(before)) / math.log(meets / before)
    growth = math.log(16.0)
    if power > 0:
        growth = min(growth, -target.log_mu(meets) / power)
    return min(max(int(meets * math.exp(growth)), meets + 1), most)


def _epoch_maker(make_event: Any) -> MakeEvent:
    if hasattr(make_event, "num_epochs"):
        return lambda epochs: attrs.evolve(make_event, num_epochs=epochs)
    if isinstance(make_event, LastIterateDpEvent):
        if make_event.has_schedules or make_event.release_steps:
            raise ValueError(
                "Expected a run without schedules and release_steps, which belong to one length, "
                "got one with them. Pass a function of the number of epochs."
            )
    if hasattr(make_event, "num_steps"):
        per_epoch = make_event.batches_per_epoch
        return lambda epochs: attrs.evolve(make_event, num_steps=epochs * per_epoch)
    if not callable(make_event):
        raise TypeError(f"Expected make_event to be a function or a run, got {make_event!r}.")
    return make_event


def largest_useful_decay(event: LastIterateDpEvent) -> float:
    """The decay up to which every step's modulus falls with it, from a grid."""
    loss, rates = event.loss, event.per_step("learning_rate")
    if not rates.any() or loss is None or (loss.kind is LossKind.HOELDER and loss.exponent != 1):
        return 0.0
    clipped = np.zeros(event.num_steps, dtype=bool)
    if event.clip_norm is not None:
        limit = math.inf if loss.lipschitz is None else loss.lipschitz
        clipped = event.per_step("clip_norm") < limit
    decays = np.linspace(0.0, (1 - 1e-9) / float(rates.max()), _GRID + 1)
    falls = np.ones(_GRID, dtype=bool)
    kinds = np.unique(np.stack([rates, clipped]), axis=1).T
    for rate, flag in kinds[np.linspace(0, len(kinds) - 1, min(len(kinds), 50)).astype(int)]:
        flags = np.full(decays.shape, bool(flag))
        falls &= np.diff(update_lipschitz(loss, np.full(decays.shape, rate), decays, flags)) <= 0
    return float(decays[_GRID if falls.all() else np.argmin(falls)])
