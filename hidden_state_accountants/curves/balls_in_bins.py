r"""Balls in bins: a record is in one of l batches, uniformly, and every step is seen.

One draw is dominated by the pair of :math:`P = \frac1l \sum_k N(\mu e_k, I)` and
:math:`R = N(0, I)` in l dimensions. Under R its likelihood ratio is the mean A of l independent
lognormal :math:`X_k = e^{\mu g_k - \mu^2/2}`, and

.. math:: H_\varepsilon(P | R) = E (A - e^\varepsilon)_+, \qquad
          H_\varepsilon(R | P) = E (1 - e^\varepsilon A)_+.

Both are means of convex functions of A, so that a law that is larger in convex order has no smaller
divergence in either order: masses may be moved to two nodes beside them, their means kept, of every
X and of every partial mean (docs/theory/hidden_coins.md).
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import special

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import Curve, GaussianCurve
from hidden_state_accountants.curves.by_profile import ProfileCurve, hull_profile
from hidden_state_accountants.curves.gaussian import deltas_from_mu
from hidden_state_accountants.curves.profiles import Deltas, Profile

_FAR = 10.5  # deviations of a lognormal: 4e-26 of a Gaussian is beyond
_WIDEST, _RELATIVE = 0.03, 0.04  # spacing of the nodes' logarithms: in mu, and of themselves
_NEAREST = 0.1  # in deviations of the mean: nodes nearer to 1 are equally far apart
_NEGLIGIBLE = 1e-30  # mass of a node that is charged in full instead of being used
_AT_ONCE = 500_000  # numbers in an array
_ROUNDED_UP = 1 + 1e-9  # more than all rounding errors of masses and means
_MOST_MU = 20.0  # with which bins make no difference
_FEW = 400  # epsilons at which two bounds are joined


@functools.lru_cache(maxsize=64)  # epochs are alike, and composed again and again
def bins_curve(mu: float, bins: int, *, is_replaced: bool) -> Curve:
    """The curve of one draw of the batch of a record, one of `bins`, every step of which is seen.

    mu is the distance that the record makes in its batch, over all steps that it is used in. With
    `is_replaced` another record takes its place, in its batch; else it has none.
    """
    apart = 2 * mu if is_replaced else mu  # if the batch is known
    if bins == 1 or mu == 0 or not mu < _MOST_MU:
        return GaussianCurve(apart)
    profile, infinite = _profile(mu, bins)
    if is_replaced:
        profile = _replaced(profile, apart)
        infinite *= 2
    return ProfileCurve(profile, infinite, divergences=GaussianCurve(apart).rdp, largest_mu=apart)


def _profile(mu: float, bins: int) -> tuple[Profile, float]:
    """The divergences of both orders, and the mass that is charged in full."""
    nodes, law, lost = _law_of_mean(mu, bins)
    one = int(np.searchsorted(nodes, 1.0))  # is a node
    above, masses = nodes[one:], law[one:]
    # E (A - a)_+ at every node a >= 1, from sums of what is not negative.
    tails = np.cumsum(masses[:0:-1])[::-1]
    forward = np.append(np.cumsum((np.diff(above) * tails)[::-1])[::-1], 0.0)
    below, masses = nodes[: one + 1], law[: one + 1]
    # E (a - A)_+ / a at every node 0 < a <= 1; the last one first.
    heads = np.cumsum(masses[:-1])
    backward = np.append(0.0, np.cumsum(np.diff(below) * heads))[1:] / below[1:]
    together = max(forward[0], backward[-1])  # E (A - 1)_+ = E (1 - A)_+
    forward[0] = backward[-1] = together
    polygons = (
        profiles.polygon(np.log(above), forward * _ROUNDED_UP + lost),
        profiles.polygon(-np.log(below[:0:-1]), backward[::-1] * _ROUNDED_UP + lost),
    )
    return Profile(*polygons, float(-np.log(below[1]) + np.log(above[-1]))), lost


def _law_of_mean(mu: float, bins: int) -> tuple[np.ndarray, np.ndarray, float]:
    """A law on nodes that is larger in convex order than that of A; what is lost of it."""
    logs = _nodes(mu, bins)
    nodes = np.append(0.0, np.exp(logs))
    z = np.append(-math.inf, logs / mu + mu / 2)
    # Masses of the cells under R and P, from the tail that is the smaller one.
    mass, mean = (
        np.where(
            edges[1:] < 0,
            np.diff(special.ndtr(edges)),
            -np.diff(special.ndtr(-edges)),
        )
        for edges in (z, z - mu)
    )
    to_the_right = np.clip((mean - nodes[:-1] * mass) / np.diff(nodes), 0.0, mass)
    law = np.append(mass - to_the_right, 0.0)
    law[1:] += to_the_right
    lost = float(special.ndtr(mu - z[-1]) + bins * special.ndtr(-z[-1]))
    found: tuple[np.ndarray, int] | None = None
    size, rest = 1, bins
    while True:
        kept = law * np.maximum(nodes, 1.0) > _NEGLIGIBLE
        lost += float((law * (nodes + bins / size))[~kept].sum())
        law = np.where(kept, law, 0.0)
        if rest & 1:
            found = (law, size) if found is None else _joined(nodes, found, (law, size))
        rest >>= 1
        if not rest:
            break
        whole = law, size
        law, size = _joined(nodes, whole, whole)
    assert found is not None
    return nodes, found[0], lost


def _nodes(mu: float, bins: int) -> np.ndarray:
    """Logarithms of the nodes, 0 among them: close together where A mostly is."""
    near = _NEAREST * math.sqrt(math.expm1(min(mu * mu, 50.0)) / bins) / _RELATIVE

    def side(end: float) -> np.ndarray:
        found = [0.0]
        while found[-1] < end:
            found.append(found[-1] + min(_WIDEST * mu, _RELATIVE * math.hypot(found[-1], near)))
        return np.array(found)

    low, high = side(mu * (mu / 2 + _FAR)), side(mu * (mu / 2 + _FAR))
    return np.concatenate([-low[:0:-1], high])


def _joined(
    nodes: np.ndarray, first: tuple[np.ndarray, int], second: tuple[np.ndarray, int]
) -> tuple[np.ndarray, int]:
    """The law of the mean of two independent means, of so many terms each, on the nodes."""
    (p, n), (q, m) = first, second
    rows, columns = np.flatnonzero(p), np.flatnonzero(q)
    if first is second:  # every pair once
        upper = np.triu_indices(len(rows))
        i, j = rows[upper[0]], columns[upper[1]]
        twice = np.where(i == j, 1.0, 2.0)
    else:
        i, j = np.repeat(rows, len(columns)), np.tile(columns, len(rows))
        twice = np.ones(len(i))
    law = np.zeros(len(nodes))
    for k in range(0, len(i), _AT_ONCE):
        left, right = i[k : k + _AT_ONCE], j[k : k + _AT_ONCE]
        x = (n * nodes[left] + m * nodes[right]) / (n + m)
        mass = p[left] * q[right] * twice[k : k + _AT_ONCE]
        place = np.minimum(np.searchsorted(nodes, x, side="right") - 1, len(nodes) - 2)
        share = np.clip((x - nodes[place]) / (nodes[place + 1] - nodes[place]), 0.0, 1.0)
        law += np.bincount(place, mass * (1 - share), minlength=len(nodes))
        law += np.bincount(place + 1, mass * share, minlength=len(nodes))
    return law, n + m


def _replaced(pair: Profile, apart: float) -> Profile:
    r"""The divergence of P and its mirror image Q, with R between them, or with the batch revealed.

    .. math:: H_{x + y}(P | Q) \le H_x(P | R) + e^x H_y(R | Q), \qquad H_y(R | Q) = H_y(R | P)

    for any x and y, of which the best of many are taken; the smallest is not convex, but its hull
    is an upper bound as well.
    """
    reach = pair.largest
    epsilons = np.append(0.0, np.geomspace(1e-4 * reach, 1.5 * reach, _FEW - 1))
    x = np.concatenate([-epsilons[::-4], epsilons[1:]])
    y = epsilons[:, None] - x
    first = _at(pair.forward, pair.backward, x)
    second = _at(pair.backward, pair.forward, y)
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = first + np.exp(x) * second
    revealed = deltas_from_mu(apart, epsilons)
    return hull_profile((epsilons, np.minimum(np.nanmin(bounds, axis=1), revealed)))


def _at(own: Deltas, opposite: Deltas, epsilon: np.ndarray) -> np.ndarray:
    """A divergence at any epsilon: H_-e(P | Q) = 1 - e^-e + e^-e H_e(Q | P)."""
    size = np.abs(epsilon)
    below = -np.expm1(-size) + np.exp(-size) * opposite(size)
    return np.where(epsilon < 0, below, own(size))
