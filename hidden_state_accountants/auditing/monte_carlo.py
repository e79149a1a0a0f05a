r"""Lower bounds on the epsilon of any trainer, from runs of it: nothing else is looked at.

>>> import numpy as np
>>> from hidden_state_accountants.auditing import monte_carlo_audit
>>> result = monte_carlo_audit(
...     lambda rng: rng.normal(0.0, 1.0), lambda rng: rng.normal(2.0, 1.0),
...     trials=2000, delta=1e-5, seed=0)
>>> 1.0 < result.epsilon < 11.6  # the truth is 11.6; 2000 runs cannot show more than about 5.5
True
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt
from scipy import stats

from hidden_state_accountants import validate
from hidden_state_accountants.auditing.evidence import Progress
from hidden_state_accountants.figures import text_down

Trainer = Callable[[np.random.Generator], npt.ArrayLike]
"""A run: from a random generator to what is released, a number or an array of fixed shape."""
Statistic = Callable[[np.ndarray], float]
"""From a release to a number; it may not depend on the releases that are tested."""

_REPORTS = 10


@attrs.frozen
class DirectionTest:
    """One direction: how often the test says "the first law" on fresh runs of each law.

    Attributes:
        sign: 1 or -1, and
        threshold: the test says "the first law" where sign * score >= threshold.
        probability: Clopper-Pearson lower bound on the probability of a hit.
        false_alarm_probability: Clopper-Pearson upper bound on that of a false alarm.
    """

    sign: int
    threshold: float
    probability: float
    false_alarm_probability: float

    def epsilon(self, delta: float) -> float:
        r"""The lower bound :math:`\log((p - \delta)/q)`, at least 0."""
        # Kairouz, Oh & Viswanath 2015, Theorem 2.1, arXiv 1311.0776v4: p <= e^eps q + delta
        if self.probability <= delta:
            return 0.0
        return max(0.0, math.log((self.probability - delta) / self.false_alarm_probability))

    def delta(self, epsilon: float) -> float:
        r"""The lower bound :math:`p - e^\varepsilon q`, at least 0."""
        log_excess = min(epsilon, 700.0) + math.log(self.false_alarm_probability)
        return max(0.0, self.probability - math.exp(min(log_excess, 1.0)))


@attrs.frozen
class MonteCarloAudit:
    """What the runs of a trainer show; see `monte_carlo_audit`.

    Attributes:
        forward: The data set against its neighbour.
        backward: The neighbour against the data set.
        target_delta: The delta of `epsilon`.
        confidence: The probability that everything here holds at once.
    """

    forward: DirectionTest
    backward: DirectionTest
    target_delta: float
    confidence: float

    @property
    def epsilon(self) -> float:
        """The lower bound on epsilon at `target_delta`, the larger of the two directions."""
        tests = (self.forward, self.backward)
        return max(test.epsilon(self.target_delta) for test in tests)

    def delta(self, epsilon: float) -> float:
        """The lower bound on delta at an epsilon >= 0."""
        epsilon = validate.real("epsilon", epsilon, minimum=0)
        return max(self.forward.delta(epsilon), self.backward.delta(epsilon))


def monte_carlo_audit(
    train: Trainer,
    train_neighbour: Trainer,
    *,
    trials: int,
    delta: float,
    confidence: float = 0.95,
    statistic: Statistic | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> MonteCarloAudit:
    r"""Audits a trainer as a black box, with Clopper-Pearson confidence intervals.

    Every law is run `trials` times. The first half of the runs fixes, for each direction, a score
    and a threshold; the other half is used once, to count how often the score reaches the
    threshold. With h hits on runs of one law and f on runs of the other, of m each, and
    :math:`\gamma = (1 - \text{confidence})/4`

    .. math::
        p = B^{-1}_{\gamma}(h, m - h + 1), \qquad q = B^{-1}_{1-\gamma}(f + 1, m - f), \qquad
        \varepsilon \ge \log\frac{p - \delta}{q}

    with the quantiles B of the beta distribution. The default score of a release is its projection
    on the difference of the two means of the first half, whitened by their pooled covariance
    (shrunk, so that it is invertible whatever the number of runs).

    Formal guarantees:
      - With probability at least `confidence` over the runs, every number of the result is a valid
        bound at once: each trainer's (epsilon, delta) guarantee for these two data sets has
        epsilon >= `epsilon`, and delta(epsilon) >= `delta(epsilon)` for every epsilon. The four
        intervals (two directions, two probabilities) fail with probability gamma each; scores and
        thresholds are fixed before the tested runs are looked at, so no other correction is due.
      - This needs that the runs are independent and identically distributed: the trainer takes all
        its randomness from the generator that it is given (or has fresh randomness of its own) and
        keeps no state. `statistic` must not have been chosen by looking at these runs.
      - Nothing is assumed about the trainer, the dimension or the score: a bad score or too few
        runs make the bound small, never wrong. m tested runs show at most about log(m / 4.4) at
        confidence 0.95. A small bound is no evidence of privacy.

    Args:
        train: A run on the data set.
        train_neighbour: A run on the neighbouring data set.
        trials: How often each of the two is run; at least 4.
        delta: The delta in [0, 1] at which thresholds are chosen and `epsilon` is stated.
        confidence: In (0, 1]; nothing is certain but an epsilon of 0.
        statistic: The score of a release, larger on the data set than on its neighbour or the other
            way round. None for the default.
        seed: Of the generators that the trainers are given; None for a fresh one.
        progress: Receives a line of text now and then.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of range, or a release or score is not finite.

    Source: Clopper & Pearson 1934 for the intervals; Jagielski, Ullman & Oprea 2020 (arXiv
    2006.07709 v1), section 4.1, for audits with them.
    """
    trials = validate.integer("trials", trials, minimum=4)
    delta = validate.real("delta", delta, minimum=0, maximum=1)
    confidence = validate.real("confidence", confidence, above=0, maximum=1)
    sequence = np.random.SeedSequence(seed)
    report = progress or (lambda line: None)
    first, second = (
        _releases(trainer, name, trials, child, report)
        for trainer, name, child in zip(
            (train, train_neighbour), ("train", "train_neighbour"), sequence.spawn(2), strict=True
        )
    )
    if first.shape != second.shape:
        raise ValueError(
            f"Expected releases of one shape, got {first.shape[1:]} and {second.shape[1:]}."
        )
    half = trials // 2
    if statistic is None:
        rows = [releases.reshape(trials, -1) for releases in (first, second)]
        direction = _whitened_difference(rows[0][:half], rows[1][:half])
        mine, other = (row @ direction for row in rows)
    else:
        mine, other = (np.array([float(statistic(r)) for r in part]) for part in (first, second))
    if not np.isfinite([mine, other]).all():
        raise ValueError("Expected a statistic with finite values, got one that is not finite.")
    gamma = (1 - confidence) / 4
    forward = _direction_test(mine, other, half, delta, gamma)
    backward = _direction_test(other, mine, half, delta, gamma)
    result = MonteCarloAudit(forward, backward, delta, confidence)
    report(f"audit: epsilon >= {text_down(result.epsilon, 4)} with confidence {confidence:g}")
    return result


def _releases(
    trainer: Trainer, name: str, trials: int, seed: np.random.SeedSequence, report: Progress
) -> np.ndarray:
    """The releases of independent runs; shape (trials, ...)."""
    releases: list[np.ndarray] = []
    every = max(1, trials // _REPORTS)
    for i, child in enumerate(seed.spawn(trials)):
        release = np.asarray(trainer(np.random.default_rng(child)), dtype=np.float64)
        if not np.isfinite(release).all() or (releases and release.shape != releases[0].shape):
            raise ValueError(
                f"Expected {name} to release finite arrays of one shape, got shape {release.shape} "
                f"in run {i}, or values that are not finite."
            )
        releases.append(release.copy())  # a trainer may reuse its buffer
        if (i + 1) % every == 0:
            report(f"audit: {name}, run {i + 1} of {trials}")
    return np.stack(releases)


def _whitened_difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The direction S^-1 (mean - mean'), S the pooled covariance, shrunk towards its diagonal."""
    centred = np.vstack([first - first.mean(axis=0), second - second.mean(axis=0)])
    runs, dimension = centred.shape
    difference = first.mean(axis=0) - second.mean(axis=0)
    variances = (centred**2).mean(axis=0)
    weight = dimension / (dimension + runs)
    ridge = weight * variances + 1e-12 * (float(variances.max()) or 1.0)
    # (ridge + X'X)^-1 by the smaller of the two systems (Woodbury)
    scaled = centred * math.sqrt((1 - weight) / runs)
    whitened = difference / ridge
    small = np.eye(runs) + (scaled / ridge) @ scaled.T if runs < dimension else None
    if small is not None:
        return whitened - (scaled.T @ np.linalg.solve(small, scaled @ whitened)) / ridge
    return np.linalg.solve(scaled.T @ scaled + np.diag(ridge), difference)


def _direction_test(
    mine: np.ndarray, other: np.ndarray, half: int, delta: float, gamma: float
) -> DirectionTest:
    """A threshold from the first `half` of the scores, its test on the rest."""

    def intervals(sign: int, levels: npt.ArrayLike, part: slice) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.sort(sign * mine[part]), np.sort(sign * other[part])
        hits, alarms = (len(x) - np.searchsorted(x, levels) for x in (a, b))
        return _clopper_pearson(hits, alarms, len(a), gamma)

    best, sign, threshold = -math.inf, 1, 0.0
    for candidate in (1, -1):
        levels = np.unique(candidate * np.concatenate([mine[:half], other[:half]]))
        p, q = intervals(candidate, levels, slice(half))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.where(p > delta, np.log((p - delta) / q), -np.inf)
        if value.max() >= best:
            best = float(value.max())
            sign, threshold = candidate, float(levels[np.argmax(value)])
    p, q = intervals(sign, threshold, slice(half, None))
    return DirectionTest(sign, threshold, float(p), float(q))


def _clopper_pearson(
    hits: np.ndarray, alarms: np.ndarray, trials: int, gamma: float
) -> tuple[np.ndarray, np.ndarray]:
    """One-sided bounds, each wrong with probability at most gamma."""
    # Clopper & Pearson 1934; a beta parameter of 0 stands for the ends of [0, 1]
    with np.errstate(all="ignore"):
        p = stats.beta.ppf(gamma, hits, trials - hits + 1)
        q = stats.beta.ppf(1 - gamma, alarms + 1, trials - alarms)
    return np.where(hits == 0, 0.0, p), np.where(alarms == trials, 1.0, q)
