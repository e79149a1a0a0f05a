r"""Chien & Li 2024 (arXiv 2410.01068): bounded domains, no convexity, Hölder gradients.

.. math:: D_\alpha \le \frac{\alpha}{2\sigma^2} \min_{\tau, \beta, a} \sum_{t > \tau}
          \Big( \frac{s_t^2}{\beta_t} + \frac{a_t^2}{1 - \beta_t} \Big)
          = \frac{\alpha}{2\sigma^2} \min_{\tau, a} \sum_{t > \tau} (s_t + a_t)^2
          \quad\text{with}\quad z_\tau = D_\tau,\; z_t = g(z_{t-1}) - a_t \ge 0,\; z_T = 0

g is the modulus of the update and D_tau tracks the distance of the two runs from the start. What is
published, what is sound and where the two differ: docs/papers/last_iterate.md.
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special

from hidden_state_accountants.bounds.base import Citation, Proof
from hidden_state_accountants.bounds.hoelder import MOST_STEPS
from hidden_state_accountants.bounds.paper import (
    PaperBound,
    in_units_of_noise,
    mean_over_positions,
    unmet_for_constant_run,
)
from hidden_state_accountants.bounds.solvers.optimal_shifts import ShiftProblem, least_mu
from hidden_state_accountants.curves.base import RdpCurve
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.process.conditions import Unmet, linear_modulus, unless
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    clips_act,
    noisy_process,
)

_UNSOUND = (
    "the divergence S_alpha of Definition 3.11 goes from the Gaussian to the mixture; the other "
    "direction is larger (1.5 to 195 times for q = 0.1), and an adversary sees that one. Use "
    "LastIterateAccountant"
)
_CHUNK = 512  # starts that are looked at together, the last ones first
_NODES = 401  # of the integral S_alpha, which has 12 digits with them
_SPLITS = np.concatenate([np.linspace(0.05, 0.95, 19), 1 - np.geomspace(0.03, 1e-4, 6)])
_WINDOWS = 60  # starts tau that are tried, on a geometric grid


@attrs.frozen
class ChienLi(PaperBound):
    """The smallest applicable bound of Chien & Li 2024.

    FULL: Theorems 3.1 (Lipschitz gradient) and 3.7 (Hölder gradient); CYCLIC: Theorem A.1, the
    given or the worst position; SHUFFLED_ONCE: Corollary A.3.

    Formal guarantees:
      - Relation: REPLACE_ONE (the paper's) and REPLACE_SPECIAL (its "zero-out" adjacency, half the
        sensitivity); ADD_OR_REMOVE_ONE for FULL batches, analysis="sound" only.
      - Released: the last iterate alone. Constant hyper-parameters.
      - analysis="sound": what Theorem A proves (`ShiftedInterpolation`, `ShuffledOnce`, `Hoelder`),
        which does not condition on a part of the noise and optimises over more shifts.
      - analysis="published": the formulas as Renyi bounds, with the paper's own Lipschitz
        constants; WITHOUT_REPLACEMENT, for a Lipschitz gradient, by Theorem 3.12, which is unsound
        and sets `caveat`.
      - Every published figure is the formula at a feasible (tau, beta, a). For a Lipschitz update
        it is the minimum; for a Hölder gradient the best point of a search.

    Source: Chien, Li 2024 (arXiv 2410.01068).
    """

    key = "chien_li"
    orders = (BatchOrder.FULL, BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE)
    is_linear = False
    paper = Citation("Chien & Li 2024", "Theorems 3.1, 3.7, A.1", "2410.01068")

    def paper_conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A constant run, and for a Hölder gradient one that is short enough to optimise over."""
        orders = (*self.orders, *(() if self.sound else (BatchOrder.WITHOUT_REPLACEMENT,)))
        unmet = unmet_for_constant_run(event, relation, orders, published=not self.sound)
        if unmet or self.sound or not linear_modulus(event.loss):
            return unmet
        if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
            return linear_modulus(event.loss)
        steps, needed = event.num_steps * len(_positions(event)), f"at most {MOST_STEPS} over all"
        return unless(steps <= MOST_STEPS, "steps to optimise", f"{needed} positions", f"{steps}")

    def theorem_of(self, event: LastIterateDpEvent) -> str:
        """By the order of the batches, and whether the gradient is Lipschitz."""
        hoelder = event.loss is not None and event.loss.exponent != 1
        return {
            BatchOrder.FULL: "Theorem 3.7" if hoelder else "Theorem 3.1",
            BatchOrder.WITHOUT_REPLACEMENT: "Theorem 3.12",
            BatchOrder.SHUFFLED_ONCE: "Corollary A.3",
        }.get(event.batch_order, "Theorem A.1")

    def published(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """A Rényi bound, with the constants of the paper."""
        theorem, caveat = self.theorem_of(event), ""
        if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
            # A sampled record replaces a stand-in: two clip norms under both relations.
            process = noisy_process(event, NeighboringRelation.REPLACE_ONE)
            curve, caveat = _theorem_3_12(event, process), _UNSOUND
        else:
            process = noisy_process(event, relation, is_linear=False)
            values, tracked = _published_values(event, process)
            # Chien & Li 2024, Corollary A.3, arXiv 2410.01068; alpha * rate for one position
            curve = RdpCurve(functools.partial(mean_over_positions, values / 2))
            theorem = "Theorem 3.7" if tracked else theorem
        return Proof(curve=curve, theorem=f"{self.cited(theorem)}, as published", caveat=caveat)


def _positions(event: LastIterateDpEvent) -> range:
    """The positions to look at: constant parameters make the batch processed last the worst."""
    if event.batch_order is BatchOrder.SHUFFLED_ONCE:
        return range(event.batches_per_epoch)
    position = (event.num_steps - 1) % event.batches_per_epoch
    return range(position, position + 1)


# --- Theorems 3.1, 3.7 and A.1 ---------------------------------------------------------------


def _published_values(event: LastIterateDpEvent, process: NoisyProcess) -> tuple[np.ndarray, bool]:
    """2 D_alpha/alpha per equally likely position; whether 3.7 tracks less than 3.1 does."""
    loss, lengths = event.loss, in_units_of_noise(process)
    assert loss is not None
    s = lengths[0]
    if s in (0.0, math.inf):  # nothing to hide, or no noise
        return np.array([s]), False
    eta, exponent = float(event.per_step("learning_rate")[0]), loss.exponent
    stretch = eta * _gradient_lipschitz(loss) * float(process.noise_std[0]) ** (exponent - 1)
    own = stretch * (event.batch_size - 1) / event.batch_size
    is_linear = event.batch_order is BatchOrder.FULL and exponent == 1
    if is_linear:
        own = stretch = _published_lipschitz(loss, eta, bool(clips_act(event)[0])) - 1
    distance = _tracked_distance(event.num_steps, lengths, own, stretch, exponent, process.period)
    values = []
    for position in _positions(event):
        steps = max(event.num_steps - position, 0)
        if exponent == 1:
            values.append(_least_value(1 + stretch, s, distance[: steps + 1], process.period))
            continue
        problem = ShiftProblem(
            decay=np.ones(steps),
            coefficient=np.full(steps, stretch),
            cap=np.full(steps, math.inf),
            sensitivity=np.where(np.arange(steps) % process.period == 0, s, 0.0),
            noise_std=np.ones(steps),
            exponent=exponent,
            diameter=lengths[2],
            own_at_once=True,
        )
        values.append(least_mu(problem, distance[: steps + 1]) ** 2 if steps else 0.0)
    return np.array(values), is_linear and stretch > 0


def _gradient_lipschitz(loss: LossGeometry) -> float:
    """L: Hessians between -m and M."""
    return max(loss.smoothness, loss.weak_convexity)


def _published_lipschitz(loss: LossGeometry, learning_rate: float, clip_is_active: bool) -> float:
    """Lemma 3.4: 1 + eta L; 1 for convex and 1 - eta m for strongly convex losses, if unclipped."""
    stretch, kind = learning_rate * _gradient_lipschitz(loss), loss.kind
    not_convex = (LossKind.WEAKLY_CONVEX, LossKind.SMOOTH, LossKind.HOELDER)
    # Chien & Li 2024, Lemma 3.4, arXiv 2410.01068
    if clip_is_active or kind in not_convex or stretch > 2:
        return 1 + stretch
    if kind is LossKind.STRONGLY_CONVEX and stretch <= 1:
        return 1 - learning_rate * loss.strong_convexity
    return 1.0


def _tracked_distance(
    num_steps: int,
    lengths: tuple[float, float, float],
    with_record: float,
    without_record: float,
    exponent: float,
    period: int,
) -> np.ndarray:
    r"""D_0..D_T under shared noise, the record in the first step of every `period`.

    .. math:: D_t = \min(D_{t-1} + \ell_t D_{t-1}^\lambda + s_t,\; D_{t-1} + 2\eta K,\; R)

    with l_t by whether the batch holds the record. For lambda = 1 and an update that does not
    expand this is min(s sum_{t<tau} c^t, R), the distance of Theorem 3.1; for one that expands it
    is that of Theorem 3.7, which is no larger.
    """
    sensitivity, drift, diameter = lengths
    result, z = [0.0], 0.0
    for step in range(num_steps):
        holds = step % period == 0
        stretch = (with_record if holds else without_record) * z**exponent
        # Chien & Li 2024, Lemmas 3.5, 3.10 and A.2, arXiv 2410.01068
        z = min(z + min(stretch + (sensitivity if holds else 0.0), drift), diameter)
        result.append(z)
    return np.array(result)


def _least_value(
    contraction: float, sensitivity: float, distance: np.ndarray, period: int
) -> float:
    r"""2 D_alpha/alpha: the minimum of Theorem 3.1 (period 1) or A.1 over tau and beta.

    With :math:`w_t = c^{-(t-\tau)}` a quadratic program under :math:`\sum_t w_t a_t \ge D_\tau`,
    solved by water-filling: :math:`s_t + a_t = \max(s_t, \xi w_t)`. Newton's method finds xi from
    above, for many tau at once: the participations that are raised are those of largest weights.
    c >= 1 unless every step holds the record (period 1); s and D_0..D_T are finite, s > 0.
    """
    num_steps = len(distance) - 1
    total = -(-num_steps // period)
    best = total * sensitivity**2  # tau = 0 is ordinary composition, D_0 = 0
    stop, chunk = num_steps, _CHUNK
    while stop > 0:
        taus = np.arange(max(0, stop - chunk), stop)
        values = _least_values(contraction, sensitivity, distance, taus, period)
        best = min(best, float(values.min()))
        if (total + -taus[0] // period) * sensitivity**2 >= best:  # each participation costs s^2
            break
        stop, chunk = stop - chunk, 2 * chunk
    return best


def _least_values(
    contraction: float, sensitivity: float, distance: np.ndarray, taus: np.ndarray, period: int
) -> np.ndarray:
    """The minimum over beta, per tau.

    Weights are r^o with r <= 1: r = 1/c and o = 1..k counted from tau, or for c < 1, multiplied by
    c^k, r = c and o = 0..k-1 counted from the end. Participations have o = first + period * e.
    """
    num_steps = len(distance) - 1
    k, before = num_steps - taus, -(-taus // period)  # steps, and participations up to tau
    count = -(-num_steps // period) - before
    with np.errstate(all="ignore"):
        if contraction >= 1:
            ratio, budget = 1 / contraction, distance[taus]
            first = ratio ** (before * period - taus + 1.0)
        else:
            ratio, budget, first = contraction, distance[taus] * contraction ** (1.0 * k), 1.0
        weights = ratio ** (period * np.arange(count.max(), dtype=np.float64))
        sums, squares = (np.append(0.0, np.cumsum(weights**n)) for n in (1, 2))
        others = np.zeros(len(taus))
        if period > 1:  # all steps without the record are raised
            every = np.cumsum(ratio ** (2.0 * np.arange(1, k.max() + 1)))
            others = np.maximum(every[k - 1] - first**2 * squares[count], 0.0)
        raised = count
        while True:
            square = first**2 * squares[raised] + others
            level = (budget + first * sums[raised] * sensitivity) / square
            found = np.searchsorted(-weights, -sensitivity / (level * first))
            if (found >= raised).all():
                break
            raised = np.minimum(raised, found)
        # Chien & Li 2024, Theorems 3.1 and A.1 at the best beta, arXiv 2410.01068
        shifted = level * level * square + (count - raised) * sensitivity**2
    values = np.where(budget > 0, shifted, count * sensitivity**2)
    return np.where(np.isnan(values), math.inf, values)


# --- Theorem 3.12, as published: NOT a valid bound --------------------------------------------


def sampled_gaussian_divergence(
    orders: np.ndarray, sampling_rate: float, noise: float
) -> np.ndarray:
    r"""S_alpha(q, sigma) of Definition 3.11, for orders > 1 and noise > 0.

    .. math:: S_\alpha(q, \sigma) =
              D_\alpha(N(0, \sigma^2) \| (1-q) N(0, \sigma^2) + q N(1, \sigma^2))
    """
    power = orders - 1
    log_out = math.log1p(-sampling_rate) if sampling_rate < 1 else -math.inf

    def log_in(u: np.ndarray) -> np.ndarray:
        return np.log(sampling_rate) + u / noise - 0.5 / noise**2

    def share(u: np.ndarray) -> np.ndarray:
        return np.exp(log_in(u) - np.logaddexp(log_out, log_in(u)))

    # The logarithm of the integrand -u^2/2 - (alpha - 1) log mixture(u) is concave: find its peak.
    low, high = -power / noise - 1, np.zeros_like(power)
    for _ in range(200):
        middle = (low + high) / 2
        rising = -middle - power * share(middle) / noise > 0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    peak = (low + high) / 2
    weight = share(peak)
    width = 1 / np.sqrt(1 + power * weight * (1 - weight) / noise**2)
    reach = np.arcsinh(12 / width)[..., None]
    v = reach * np.linspace(-1, 1, _NODES)
    u = peak[..., None] + width[..., None] * np.sinh(v)
    log_terms = (
        -(u**2) / 2
        - 0.5 * np.log(2 * np.pi)
        - power[..., None] * np.logaddexp(log_out, log_in(u))
        + np.log(width[..., None] * np.cosh(v) * 2 * reach / (_NODES - 1))
    )
    return np.maximum(special.logsumexp(log_terms, axis=-1) / power, 0.0)


def _theorem_3_12(event: LastIterateDpEvent, process: NoisyProcess) -> RdpCurve:
    """With T - tau steps after the start, and the least sum of a_t^2 that absorbs D_tau in them."""
    loss, lengths, steps = event.loss, in_units_of_noise(process), event.num_steps
    assert loss is not None
    if lengths[0] in (0.0, math.inf):  # nothing to hide, or no noise
        return RdpCurve(functools.partial(np.multiply, lengths[0]))
    stretch = float(event.per_step("learning_rate")[0]) * _gradient_lipschitz(loss)
    own = stretch * (event.batch_size - 1) / event.batch_size
    distance = _tracked_distance(steps, lengths, own, stretch, 1.0, 1)
    with np.errstate(under="ignore"):
        weights = np.cumsum((1 + stretch) ** (-2.0 * np.arange(1, steps + 1)))
    after = np.unique(np.geomspace(1, steps, _WINDOWS).astype(int))
    costs = distance[steps - after] ** 2 / weights[after - 1]
    noise = 1 / lengths[0], event.sampling_probability
    return RdpCurve(functools.partial(_sum_of_theorem_3_12, steps, after, costs, *noise))


def _sum_of_theorem_3_12(
    num_steps: int,
    after: np.ndarray,
    costs: np.ndarray,
    noise: float,
    sampling_rate: float,
    orders: np.ndarray,
) -> np.ndarray:
    r"""epsilon(alpha) with one beta for all steps after tau: a feasible point per order.

    .. math:: \varepsilon(\alpha) = \min \sum_{t > \tau} S_\alpha(q, \beta_t \sigma/s)
              + \frac{\alpha a_t^2}{2 \sigma^2 (1 - \beta_t)}

    The divergence of the other direction is larger, so that :math:`S_\alpha` alone under-reports.
    """
    best = num_steps * sampled_gaussian_divergence(orders, sampling_rate, noise)  # tau = 0
    for beta in _SPLITS:
        # Chien & Li 2024, Theorem 3.12, arXiv 2410.01068 (beta * sigma, as printed)
        step = sampled_gaussian_divergence(orders, sampling_rate, beta * noise)
        total = step[..., None] * after + orders[..., None] * costs / (2 * (1 - beta))
        best = np.minimum(best, total.min(axis=-1))
    return best
