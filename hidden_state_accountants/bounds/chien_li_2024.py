r"""Chien & Li 2024 (arXiv 2410.01068): bounded domains, no convexity, Hölder gradients.

.. math:: D_\alpha \le \frac{\alpha}{2\sigma^2} \min_{\tau, \beta, a} \sum_{t > \tau}
          \Big( \frac{s_t^2}{\beta_t} + \frac{a_t^2}{1 - \beta_t} \Big)
          = \frac{\alpha}{2\sigma^2} \min_{\tau, a} \sum_{t > \tau} (s_t + a_t)^2
          \quad\text{with}\quad z_\tau = D_\tau,\; z_t = g(z_{t-1}) - a_t \ge 0,\; z_T = 0

g is the modulus of the update and D_tau tracks the distance of the two runs from the start. What is
published, what is sound and where the two differ: docs/theory/chien_li.md.
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special

from hidden_state_accountants.bounds.base import (
    PUBLISHED,
    SOUND,
    Citation,
    HiddenStateBound,
    Proof,
)
from hidden_state_accountants.bounds.constant_run import (
    ConstantRun,
    constant_run,
    unmet_for_constant_run,
)
from hidden_state_accountants.bounds.hoelder import MOST_STEPS
from hidden_state_accountants.bounds.solvers.optimal_shifts import ShiftProblem, least_mu
from hidden_state_accountants.curves.base import (
    Curve,
    GaussianCurve,
    GaussianMixtureCurve,
    RdpCurve,
)
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.process.conditions import (
    Unmet,
    UnmetCondition,
    linear_modulus,
    refusal_in_words,
    unless,
)

_UNSOUND = (
    "the divergence S_alpha of Definition 3.11 goes from the Gaussian to the mixture; the other "
    "direction is larger (1.5 to 195 times for q = 0.1), and an adversary sees that one. Use "
    "LastIterateAccountant"
)
_CHUNK = 512  # starts that are looked at together, the last ones first
_NODES = 401
_SPLITS = np.concatenate([np.linspace(0.05, 0.95, 19), 1 - np.geomspace(0.03, 1e-4, 6)])
_WINDOWS = 60


@attrs.frozen
class ChienLi(HiddenStateBound):
    """The smallest applicable bound of Chien & Li 2024.

    FULL: Theorems 3.1 (Lipschitz gradient) and 3.7 (Hölder gradient); CYCLIC: Theorem A.1, the
    given or the worst position; SHUFFLED_ONCE: Corollary A.3.

    Formal guarantees:
      - Relation: REPLACE_ONE (the paper's) and REPLACE_SPECIAL (its "zero-out" adjacency, half the
        sensitivity); ADD_OR_REMOVE_ONE for FULL batches, analysis="sound" only.
      - Released: the last iterate alone. Constant hyper-parameters.
      - analysis="sound": mu-GDP. The shifts of the paper's optimum, inside the shifted
        interpolation of Theorem A, which does not condition on a part of the noise; with this
        package's modulus (clipping, decoupled decay). Secret order: the mean over the positions.
      - analysis="published": the formulas as Renyi bounds, with the paper's own Lipschitz
        constants; WITHOUT_REPLACEMENT, for a Lipschitz gradient, by Theorem 3.12, which is unsound
        and sets `caveat`.
      - Every figure is the formula at a feasible (tau, beta, a). For a Lipschitz update it is the
        minimum; for a Hölder gradient the best point of a search.

    Source: Chien, Li 2024 (arXiv 2410.01068).
    """

    key = "chien_li"
    orders = (BatchOrder.FULL, BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE)
    is_linear = False
    analyses = (SOUND, PUBLISHED)
    # The last one for Hölder gradients: the same search, whose plans include these.
    dominated_by = ("shifted_interpolation", "shuffled_once", "hoelder")
    paper = Citation("Chien & Li 2024", "Theorems 3.1, 3.7, A.1", "2410.01068")

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A constant run, and for a Hölder gradient one that is short enough to optimise over."""
        orders = (*self.orders, *(() if self.sound else (BatchOrder.WITHOUT_REPLACEMENT,)))
        unmet = unmet_for_constant_run(event, relation, orders, published=not self.sound)
        if unmet or not linear_modulus(event.loss):
            return unmet
        if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
            return linear_modulus(event.loss)
        steps, needed = event.num_steps * len(_positions(event)), f"at most {MOST_STEPS} over all"
        return unless(steps <= MOST_STEPS, "steps to optimise", f"{needed} positions", f"{steps}")

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The smallest bound with the theorem that gives it."""
        theorem, run = _theorem_of(event), constant_run(event, relation)
        is_sampled = event.batch_order is BatchOrder.WITHOUT_REPLACEMENT
        if run.sensitivity in (0.0, math.inf):  # nothing to hide, or no noise
            curve = _curve(np.array([run.sensitivity]), self.sound)
        elif is_sampled:
            curve = RdpCurve(Theorem312.of(event, run))
        else:
            values, theorem = self._values(event, relation, run)
            curve = _curve(values, self.sound)
        reading = ", by shifted interpolation" if self.sound else ", as published"
        return Proof(
            curve=curve,
            theorem=self.citation.of(theorem) + reading,
            caveat=_UNSOUND if is_sampled else "",
        )

    def _values(
        self, event: LastIterateDpEvent, relation: NeighboringRelation, run: ConstantRun
    ) -> tuple[np.ndarray, str]:
        """2 D_alpha/alpha per equally likely position, and the theorem."""
        if linear_modulus(event.loss):
            return _hoelder_values(event, relation, run), _theorem_of(event)
        if self.sound:
            return _linear_values(event, run, run.contraction()), _theorem_of(event)
        return _published_values(event, run)

    def refusal(self, event: LastIterateDpEvent, unmet: tuple[UnmetCondition, ...]) -> str:
        """In the words of the paper."""
        return refusal_in_words(f"{_theorem_of(event)} ({self.citation.authors})", unmet)


def _theorem_of(event: LastIterateDpEvent) -> str:
    hoelder = event.loss is not None and event.loss.exponent != 1
    return {
        BatchOrder.FULL: "Theorem 3.7" if hoelder else "Theorem 3.1",
        BatchOrder.WITHOUT_REPLACEMENT: "Theorem 3.12",
        BatchOrder.SHUFFLED_ONCE: "Corollary A.3",
    }.get(event.batch_order, "Theorem A.1")


def _positions(event: LastIterateDpEvent) -> range:
    """The positions to look at: constant parameters make the batch processed last the worst."""
    if event.batch_order is BatchOrder.SHUFFLED_ONCE:
        return range(event.batches_per_epoch)
    position = event.record_position
    if position is None:
        in_order = event.batch_order is BatchOrder.CYCLIC
        position = (event.num_steps - 1) % event.batches_per_epoch if in_order else 0
    return range(position, position + 1)


def _curve(values: np.ndarray, sound: bool) -> Curve:
    """Of 2 D_alpha/alpha per equally likely position."""
    if not sound:
        return RdpCurve(functools.partial(_mean_over_positions, values))
    mus = np.sqrt(values)
    if len(mus) == 1:
        return GaussianCurve(float(mus[0]))
    return GaussianMixtureCurve(np.full(len(mus), 1 / len(mus)), mus)


def _mean_over_positions(values: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Corollary A.3; for one value the alpha * value/2 of the other theorems."""
    if len(values) == 1 or np.isinf(values).any():
        return orders * float(values.max()) / 2
    # Chien & Li 2024, Corollary A.3, arXiv 2410.01068
    exponents = ((orders - 1) * orders / 2)[..., None] * values
    return (special.logsumexp(exponents, axis=-1) - math.log(len(values))) / (orders - 1)


# --- the distance of the two runs ------------------------------------------------------------


def tracked_distance(
    run: ConstantRun, with_record: float, without_record: float, exponent: float, period: int
) -> np.ndarray:
    r"""D_0..D_T under shared noise, the record in the first step of every `period`.

    .. math:: D_t = \min(\kappa D_{t-1} + \ell_t D_{t-1}^\lambda + s_t,\;
              \kappa D_{t-1} + 2\eta K,\; R)

    Args:
        run: s, kappa, 2 eta K and R.
        with_record: l where the batch holds the record.
        without_record: l elsewhere.
        exponent: lambda.
        period: Steps from one participation to the next.
    """
    result, z = [0.0], 0.0
    for step in range(run.num_steps):
        holds = step % period == 0
        stretch = (with_record if holds else without_record) * z**exponent
        # Chien & Li 2024, Lemmas 3.5, 3.10 and A.2, arXiv 2410.01068
        moved = min(stretch + (run.sensitivity if holds else 0.0), run.drift)
        z = min(run.decay * z + moved, run.diameter)
        result.append(z)
    return np.array(result)


def closed_form_distance(contraction: float, run: ConstantRun) -> np.ndarray:
    """min(s sum_{t<tau} c^t, 2 eta K tau, R) for tau = 0..T, the distance of Theorem 3.1."""
    taus = np.arange(run.num_steps + 1, dtype=np.float64)
    with np.errstate(over="ignore"):
        sums = np.append(0.0, np.cumsum(contraction ** taus[:-1]))
        # Chien & Li 2024, Theorem 3.1, arXiv 2410.01068
        return np.minimum(np.minimum(run.sensitivity * sums, run.drift * taus), run.diameter)


# --- Theorems 3.1, 3.7 and A.1 ---------------------------------------------------------------


def _published_values(event: LastIterateDpEvent, run: ConstantRun) -> tuple[np.ndarray, str]:
    """With the constants of the paper."""
    stretch, theorem = run.learning_rate * run.gradient_lipschitz, _theorem_of(event)
    if event.batch_order is not BatchOrder.FULL:
        own = 1 + stretch * (run.batch_size - 1) / run.batch_size
        return _linear_values(event, run, 1 + stretch, own), theorem
    c = published_lipschitz(run)
    lipschitz = least_value(c, run.sensitivity, closed_form_distance(c, run), 1)
    hoelder = float(_linear_values(event, run, 1 + stretch)[0])
    return np.array([min(hoelder, lipschitz)]), "Theorem 3.7" if hoelder < lipschitz else theorem


def published_lipschitz(run: ConstantRun) -> float:
    """Lemma 3.4: 1 + eta L; 1 for convex and 1 - eta m for strongly convex losses, if unclipped."""
    eta, smoothness, kind = run.learning_rate, run.gradient_lipschitz, run.loss.kind
    not_convex = (LossKind.WEAKLY_CONVEX, LossKind.SMOOTH, LossKind.HOELDER)
    # Chien & Li 2024, Lemma 3.4, arXiv 2410.01068
    if run.clip_is_active or kind in not_convex or eta * smoothness > 2:
        return 1 + eta * smoothness
    if kind is LossKind.STRONGLY_CONVEX and eta * smoothness <= 1:
        return 1 - eta * run.loss.strong_convexity
    return 1.0


def _linear_values(
    event: LastIterateDpEvent, run: ConstantRun, contraction: float, own: float | None = None
) -> np.ndarray:
    """Theorem 3.1 or A.1 with recursive tracking; c is `own` where the record takes part."""
    own = contraction if own is None else own
    # c z <= kappa z + (c - kappa) z: the tracked distance keeps the whole modulus in one term.
    distance = tracked_distance(run, own - run.decay, contraction - run.decay, 1.0, run.period)
    lengths = (max(run.num_steps - position, 0) for position in _positions(event))
    return np.array(
        [least_value(contraction, run.sensitivity, distance[: n + 1], run.period) for n in lengths]
    )


def _hoelder_values(
    event: LastIterateDpEvent, relation: NeighboringRelation, run: ConstantRun
) -> np.ndarray:
    """Theorem 3.7 or A.1: (b - 1)/b of the terms are the same where the record takes part."""
    exponent = run.loss.exponent
    whole = run.learning_rate * run.gradient_lipschitz * run.noise_std ** (exponent - 1)
    own = whole * (run.batch_size - 1) / run.batch_size
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        own = whole  # all terms of the smaller batch are in both
    distance = tracked_distance(run, own, whole, exponent, run.period)
    values = []
    for position in _positions(event):
        steps = max(run.num_steps - position, 0)
        problem = ShiftProblem(
            decay=np.full(steps, run.decay),
            coefficient=np.full(steps, whole),
            cap=np.full(steps, math.inf),
            sensitivity=np.where(np.arange(steps) % run.period == 0, run.sensitivity, 0.0),
            noise_std=np.ones(steps),
            exponent=exponent,
            diameter=run.diameter,
            own_at_once=True,
        )
        values.append(least_mu(problem, distance[: steps + 1]) ** 2 if steps else 0.0)
    return np.array(values)


def least_value(contraction: float, sensitivity: float, distance: np.ndarray, period: int) -> float:
    r"""2 D_alpha/alpha: the minimum of Theorem 3.1 (period 1) or A.1 over tau and beta.

    With :math:`w_t = c^{-(t-\tau)}` a quadratic program under :math:`\sum_t w_t a_t \ge D_\tau`,
    solved by water-filling: :math:`s_t + a_t = \max(s_t, \xi w_t)`. The steps with the largest
    weights are raised, so that a bisection over their number finds xi, for all tau at once.

    Args:
        contraction: c >= 0.
        sensitivity: s, finite.
        distance: D_0..D_T, finite.
        period: The record is in the first step of so many, and in every period-th one after it.
    """
    num_steps = len(distance) - 1
    total = -(-num_steps // period)
    best = total * sensitivity**2  # tau = 0 is ordinary composition, D_0 = 0
    stop, chunk = num_steps, _CHUNK
    while stop > 0:
        taus = np.arange(max(0, stop - chunk), stop)
        best = min(
            best, float(_least_values(contraction, sensitivity, distance, taus, period).min())
        )
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
    if contraction >= 1:
        ratio, lowest, budget = 1 / contraction, 1.0, distance[taus]
        first = before * period - taus + 1.0
    else:
        ratio, lowest = contraction, 0.0
        with np.errstate(under="ignore"):
            budget = distance[taus] * contraction ** k.astype(np.float64)
        first = np.full(len(taus), float((num_steps - 1) % period))
    log = math.log(ratio) if ratio > 0 else -math.inf

    def power(exponent: np.ndarray | float) -> np.ndarray:
        with np.errstate(invalid="ignore", under="ignore"):
            return np.where(np.asarray(exponent) == 0, 1.0, np.exp(log * np.asarray(exponent)))

    def sums(order: int, number: np.ndarray, stride: float) -> np.ndarray:
        """Sum of r^(order * stride * e) over e < number."""
        if log == 0:
            return number.astype(np.float64)
        with np.errstate(invalid="ignore", under="ignore"):
            total = np.expm1(order * stride * log * number) / math.expm1(order * stride * log)
        return np.where(number > 0, total, 0.0)

    def covered(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums of w s and w^2 over the raised steps, the first q participations among them."""
        own = power(first) * sums(1, q, period) * sensitivity
        squares = power(2 * first) * sums(2, q, period)
        if period > 1:
            others = power(2 * lowest) * sums(2, k, 1.0)
            others = others - power(2 * first) * sums(2, count, period)
            squares = squares + np.maximum(others, 0.0)
        return own, squares

    low, high = np.zeros_like(count), count.copy()
    while (low < high).any():  # the largest q whose last participation is still raised
        q = (low + high + 1) // 2
        own, squares = covered(q - 1)
        weight = power(first + period * np.maximum(q - 1.0, 0.0))
        raised = (budget + own) * weight > sensitivity * squares
        active = low < high
        low = np.where(active & raised, q, low)
        high = np.where(active & ~raised, q - 1, high)
    own, squares = covered(low)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # Chien & Li 2024, Theorems 3.1 and A.1 at the best beta, arXiv 2410.01068
        level = np.where(budget > 0, (budget + own) / squares, 0.0)
        shifted = level * level * squares + (count - low) * sensitivity**2
    values = np.where(budget > 0, shifted, count * sensitivity**2)
    return np.where(np.isnan(values), math.inf, values)


# --- Theorem 3.12, as published: NOT a valid bound --------------------------------------------


def sampled_gaussian_divergence(
    orders: np.ndarray, sampling_rate: float, noise: np.ndarray | float
) -> np.ndarray:
    """S_alpha(q, sigma) of Definition 3.11; orders > 1 and noise > 0 broadcast."""
    orders, noise = np.broadcast_arrays(np.asarray(orders, float), np.asarray(noise, float))
    power = orders - 1
    log_out = np.log1p(-sampling_rate) if sampling_rate < 1 else -np.inf

    def mixture(u: np.ndarray, sigma: np.ndarray) -> np.ndarray:
        return np.logaddexp(log_out, np.log(sampling_rate) + u / sigma - 0.5 / sigma**2)

    def share(u: np.ndarray, sigma: np.ndarray) -> np.ndarray:
        log_in = np.log(sampling_rate) + u / sigma - 0.5 / sigma**2
        return np.exp(log_in - mixture(u, sigma))

    # The logarithm of the integrand -u^2/2 - (alpha - 1) log mixture(u) is concave: find its peak.
    low, high = -power / noise - 1, np.zeros_like(power)
    for _ in range(200):
        middle = (low + high) / 2
        rising = -middle - power * share(middle, noise) / noise > 0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    peak = (low + high) / 2
    weight = share(peak, noise)
    width = 1 / np.sqrt(1 + power * weight * (1 - weight) / noise**2)
    reach = np.arcsinh(12 / width)[..., None]
    v = reach * np.linspace(-1, 1, _NODES)
    u = peak[..., None] + width[..., None] * np.sinh(v)
    log_terms = (
        -(u**2) / 2
        - 0.5 * np.log(2 * np.pi)
        - power[..., None] * mixture(u, noise[..., None])
        + np.log(width[..., None] * np.cosh(v) * 2 * reach / (_NODES - 1))
    )
    return np.maximum(special.logsumexp(log_terms, axis=-1) / power, 0.0)


@attrs.frozen(eq=False)
class Theorem312:
    r"""epsilon(alpha) with one beta for all steps after tau: a feasible point per order.

    .. math:: \varepsilon(\alpha) = \min \sum_{t > \tau} S_\alpha(q, \beta_t \sigma/s)
              + \frac{\alpha a_t^2}{2 \sigma^2 (1 - \beta_t)}, \\
              S_\alpha(q, \sigma) =
              D_\alpha(N(0, \sigma^2) \| (1-q) N(0, \sigma^2) + q N(1, \sigma^2))

    The divergence of the other direction is larger, so that :math:`S_\alpha` alone under-reports.

    Attributes:
        num_steps: T.
        sensitivity: s > 0, in units of the noise.
        sampling_rate: q.
        lengths: The values of T - tau to try.
        costs: The least sum of a_t^2 that absorbs D_tau, for each of them.
    """

    num_steps: int
    sensitivity: float
    sampling_rate: float
    lengths: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(cls, event: LastIterateDpEvent, run: ConstantRun) -> Theorem312:
        """The theorem for the distances of a run."""
        stretch = run.learning_rate * run.gradient_lipschitz
        own = stretch * (run.batch_size - 1) / run.batch_size
        distance = tracked_distance(run, own, stretch, 1.0, 1)
        with np.errstate(under="ignore"):
            weights = np.cumsum((1 + stretch) ** (-2.0 * np.arange(1, run.num_steps + 1)))
        lengths = np.unique(np.geomspace(1, run.num_steps, _WINDOWS).astype(int))
        costs = distance[run.num_steps - lengths] ** 2 / weights[lengths - 1]
        return cls(run.num_steps, run.sensitivity, event.sampling_probability, lengths, costs)

    def __call__(self, orders: np.ndarray) -> np.ndarray:
        """epsilon of orders > 1."""
        orders = np.asarray(orders, dtype=np.float64)

        def step(beta: float) -> np.ndarray:
            noise = beta / self.sensitivity
            return sampled_gaussian_divergence(orders, self.sampling_rate, noise)

        best = self.num_steps * step(1.0)  # tau = 0
        for beta in _SPLITS:
            # Chien & Li 2024, Theorem 3.12, arXiv 2410.01068 (beta * sigma, as printed)
            own = step(beta)[..., None] * self.lengths
            total = own + orders[..., None] * self.costs / (2 * (1 - beta))
            best = np.minimum(best, total.min(axis=-1))
        return best
