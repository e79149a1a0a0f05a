r"""Chien & Li 2024 (arXiv 2410.01068): bounded domains, no convexity, Hölder gradients.

.. math:: D_\alpha \le \frac{\alpha}{2\sigma^2} \min_{\tau, \beta, a} \sum_{t > \tau}
          \Big( \frac{s_t^2}{\beta_t} + \frac{a_t^2}{1 - \beta_t} \Big)
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
from hidden_state_accountants.bounds.chien_li.sampled import Theorem312
from hidden_state_accountants.bounds.chien_li.theorems import (
    SECRET,
    hoelder_moduli,
    published_values,
    sound_values,
    theorem_of,
    tracked_distance,
)
from hidden_state_accountants.bounds.solvers.constant_run import (
    ConstantRun,
    constant_run,
    unmet_for_constant_run,
)
from hidden_state_accountants.curves.base import (
    Curve,
    GaussianCurve,
    GaussianMixtureCurve,
    RdpCurve,
)
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import (
    Unmet,
    UnmetCondition,
    refusal_in_words,
    unless,
)

MOST_ORDERS = 1024
"""RESHUFFLED: Corollary A.3 averages over every sequence of positions, at most that many."""

_SOUND_ORDERS = (BatchOrder.FULL, BatchOrder.CYCLIC, *SECRET)
_UNSOUND = (
    "the divergence S_alpha of Definition 3.11 goes from the Gaussian to the mixture; the other "
    "direction is larger (1.5 to 195 times for q = 0.1), and an adversary sees that one. Use "
    "LastIterateAccountant"
)


@attrs.frozen
class ChienLi(HiddenStateBound):
    """The smallest applicable bound of Chien & Li 2024.

    FULL: Theorems 3.1 (Lipschitz gradient) and 3.7 (Hölder gradient); CYCLIC: Theorem A.1, the
    given or the worst position; SHUFFLED_ONCE and RESHUFFLED: Corollary A.3.

    Formal guarantees:
      - Relation: REPLACE_ONE (the paper's) and REPLACE_SPECIAL (its "zero-out" adjacency, half the
        sensitivity); ADD_OR_REMOVE_ONE for FULL batches, analysis="sound" only.
      - Released: the last iterate alone. Constant hyper-parameters. RESHUFFLED: at most
        `MOST_ORDERS` sequences of positions.
      - analysis="sound": mu-GDP. The shifts of the paper's optimum, inside the shifted
        interpolation of Theorem A, which does not condition on a part of the noise; with this
        package's modulus (clipping, decoupled decay). Secret orders: the mean over the orders.
      - analysis="published": the formulas as Renyi bounds, with the paper's own Lipschitz
        constants; WITHOUT_REPLACEMENT by Theorem 3.12, which is unsound and sets `caveat`.
      - Every figure is the formula at a feasible (tau, beta, a). For a Lipschitz update it is the
        minimum; for a Hölder gradient the best point of a search.

    Source: Chien, Li 2024 (arXiv 2410.01068).
    """

    key = "chien_li"
    analyses = (SOUND, PUBLISHED)
    # The last one for Hölder gradients: its search was never the worse one.
    dominated_by = ("shifted_interpolation", "shuffled_once", "hoelder")
    paper = Citation("Chien & Li 2024", "Theorems 3.1, 3.7, A.1", "2410.01068")

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A constant run, and not too many secret orders."""
        extra = () if self.sound else (BatchOrder.WITHOUT_REPLACEMENT,)
        orders = (*_SOUND_ORDERS, *extra)
        sequences = 1.0
        if event.batch_order is BatchOrder.RESHUFFLED:
            sequences = _sequences(event.num_steps, event.batches_per_epoch)
        needed = f"at most {MOST_ORDERS} sequences of positions to average over"
        return [
            *unmet_for_constant_run(event, relation, orders, published=not self.sound),
            *unless(sequences <= MOST_ORDERS, "secret orders", needed, f"{sequences:g}"),
        ]

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The smallest bound with the theorem that gives it."""
        theorem, run = theorem_of(event), constant_run(event, relation)
        is_sampled = event.batch_order is BatchOrder.WITHOUT_REPLACEMENT
        if is_sampled:
            curve = _sampled(event, run)
        else:
            if run.sensitivity in (0.0, math.inf):  # nothing to hide, or no noise
                values = np.array([run.sensitivity])
            elif self.sound:
                values = sound_values(event, relation, run)
            else:
                values, theorem = published_values(event, run)
            curve = _curve(values, event.batch_order in SECRET, self.sound)
        reading = ", by shifted interpolation" if self.sound else ", as published"
        return Proof(
            curve=curve,
            theorem=self.citation.of(theorem) + reading,
            caveat=_UNSOUND if is_sampled else "",
        )

    def refusal(self, event: LastIterateDpEvent, unmet: tuple[UnmetCondition, ...]) -> str:
        """In the words of the paper."""
        return refusal_in_words(f"{theorem_of(event)} ({self.citation.authors})", unmet)


def _sequences(num_steps: int, period: int) -> float:
    """How many sequences of positions a run with fresh orders has; infinite beyond 1e15."""
    epochs = -(-num_steps // period)
    return math.inf if epochs * math.log10(period) > 15 else period**epochs


def _curve(values: np.ndarray, is_secret: bool, sound: bool) -> Curve:
    if sound:
        mus = np.sqrt(values)
        if not is_secret:
            return GaussianCurve(float(mus.max()))
        return GaussianMixtureCurve(np.full(len(mus), 1 / len(mus)), mus)
    return RdpCurve(functools.partial(_mean_over_orders, values))


def _mean_over_orders(values: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Corollary A.3; for one value the alpha * value/2 of the other theorems."""
    if len(values) == 1 or np.isinf(values).any():
        return orders * float(values.max()) / 2
    # Chien & Li 2024, Corollary A.3, arXiv 2410.01068
    exponents = ((orders - 1) * orders / 2)[..., None] * values
    return (special.logsumexp(exponents, axis=-1) - math.log(len(values))) / (orders - 1)


def _sampled(event: LastIterateDpEvent, run: ConstantRun) -> Curve:
    if run.sensitivity == math.inf:
        return GaussianCurve(math.inf)
    whole, own = hoelder_moduli(run, None)
    everywhere = np.ones(run.num_steps, dtype=bool)
    distance = tracked_distance(own, whole, run, everywhere)
    rate = event.sampling_probability
    return RdpCurve(Theorem312.of(whole, run.sensitivity, distance, rate))
