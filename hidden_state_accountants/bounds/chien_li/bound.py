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
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special

from hidden_state_accountants.bounds.analysis import SOUND, check_analysis
from hidden_state_accountants.bounds.base import Citation, declared_assumptions
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
    refusal,
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
from hidden_state_accountants.guarantee import Assumption, Guarantee
from hidden_state_accountants.process.noisy_process import UnmetCondition

MOST_ORDERS = 1024
"""RESHUFFLED: Corollary A.3 averages over every sequence of positions, at most that many."""

_SOUND_ORDERS = (BatchOrder.FULL, BatchOrder.CYCLIC, *SECRET)
_UNSOUND = (
    "the divergence S_alpha of Definition 3.11 goes from the Gaussian to the mixture; the other "
    "direction is larger (1.5 to 195 times for q = 0.1), and an adversary sees that one. Use "
    "LastIterateAccountant"
)


@attrs.frozen
class ChienLi:
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

    analysis: str = attrs.field(default=SOUND, validator=check_analysis)
    event_type: type[dp_accounting.DpEvent] = LastIterateDpEvent
    # The last one for Hölder gradients: its search was never the worse one.
    dominated_by: tuple[str, ...] = ("shifted_interpolation", "shuffled_once", "hoelder")
    citation: Citation = Citation("Chien & Li 2024", "Theorems 3.1, 3.7, A.1", "2410.01068")

    @property
    def name(self) -> str:
        """Short, stable identifier."""
        return "chien_li" if self.sound else "chien_li_published"

    @property
    def sound(self) -> bool:
        """Whether the default accountant may use it."""
        return self.analysis == SOUND

    def check(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """The conditions that `event` does not meet; empty if the bound applies."""
        extra = () if self.sound else (BatchOrder.WITHOUT_REPLACEMENT,)
        orders = (*_SOUND_ORDERS, *extra)
        unmet = unmet_for_constant_run(event, relation, orders, published=not self.sound)
        if event.batch_order is BatchOrder.RESHUFFLED:
            sequences = _sequences(event.num_steps, event.batches_per_epoch)
            if sequences > MOST_ORDERS:
                unmet.append(
                    UnmetCondition(
                        "secret orders",
                        f"at most {MOST_ORDERS} sequences of positions to average over",
                        f"{sequences:g}",
                    )
                )
        return tuple(unmet)

    def guarantee(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Guarantee:
        """The smallest bound with the theorem that gives it.

        Raises:
            UnsupportedRunError: A condition of `check` is not met.
        """
        unmet = self.check(event, relation)
        theorem = theorem_of(event)
        if unmet:
            raise refusal(
                f"{theorem} ({self.citation.authors})", unmet, "Use LastIterateAccountant."
            )
        run = constant_run(event, relation)
        if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
            curve = _sampled(event, run)
        else:
            if run.sensitivity in (0.0, math.inf):  # nothing to hide, or no noise
                values = np.array([run.sensitivity])
            elif self.sound:
                values = sound_values(event, relation, run)
            else:
                values, theorem = published_values(event, run)
            curve = _curve(values, event.batch_order in SECRET, self.sound)
        assumptions = declared_assumptions(event)
        if event.batch_order not in (BatchOrder.FULL, BatchOrder.CYCLIC):
            assumptions = (
                *(a for a in assumptions if a != _PUBLIC_ORDER),
                Assumption.declared("the order is uniform, independent of the data and secret"),
                Assumption.public("batch size, hyper-parameters"),
            )
        sampled = event.batch_order is BatchOrder.WITHOUT_REPLACEMENT
        return Guarantee(
            curve=curve,
            neighboring_relation=relation,
            theorem=f"{theorem} ({self.citation.authors}, arXiv {self.citation.arxiv})"
            + (", by shifted interpolation" if self.sound else ", as published"),
            assumptions=assumptions,
            citations=(self.citation,),
            caveat=_UNSOUND if sampled else "",
        )


_PUBLIC_ORDER = Assumption.public("order of the batches, batch size, hyper-parameters")


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
    rate = event.batch_size / event.dataset_size
    return RdpCurve(Theorem312.of(whole, run.sensitivity, distance, rate))
