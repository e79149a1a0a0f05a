"""Common parts of the papers' theorems: conditions, units, and Theorem A, which is sound."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special

from hidden_state_accountants.bounds.base import PUBLISHED, SOUND, HiddenStateBound, Proof
from hidden_state_accountants.bounds.data_order import ShuffledOnce
from hidden_state_accountants.bounds.hoelder import Hoelder
from hidden_state_accountants.bounds.shifted_interpolation import ShiftedInterpolation
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.conditions import Unmet
from hidden_state_accountants.process.noisy_process import NoisyProcess


class PaperBound(HiddenStateBound):
    """The theorems of a paper: soundly, by Theorem A, or as they are printed.

    `analysis="sound"` is what Theorem A proves under the conditions of the paper, averaged over a
    secret order and with the modulus of a Hölder gradient where the run has one. The paper's shifts
    are among those that Theorem A optimises over, so that its own argument proves no less.
    """

    analyses = (SOUND, PUBLISHED)
    dominated_by = ("shifted_interpolation", "shuffled_once", "hoelder")

    @abc.abstractmethod
    def paper_conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """The conditions of the paper that the event does not meet."""

    @abc.abstractmethod
    def published(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """Proof as the paper states it."""

    def theorem_of(self, event: LastIterateDpEvent) -> str:
        """The theorem of the paper that is about the run."""
        return self.citation.theorem

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Those of the paper, and then those of the bound that proves it."""
        unmet = self.paper_conditions(event, relation)
        if unmet or not self.sound:
            return unmet
        return list(_proved_by(event).check(event, relation))

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """Proves by Theorem A, or as the paper states."""
        if not self.sound:
            return self.published(event, relation)
        bound = _proved_by(event)
        proof = bound.prove(event, relation)
        theorem = f"{self.cited(self.theorem_of(event))}, by {proof.theorem}"
        return attrs.evolve(proof, theorem=theorem, citations=(bound.citation,))


def _proved_by(event: LastIterateDpEvent) -> HiddenStateBound:
    if conditions.linear_modulus(event.loss):
        return Hoelder()
    is_secret = event.batch_order is BatchOrder.SHUFFLED_ONCE
    return ShuffledOnce() if is_secret else ShiftedInterpolation()


def unmet_for_constant_run(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    orders: Sequence[BatchOrder],
    *,
    published: bool,
) -> Unmet:
    """Conditions of theorems on constant runs; `published` adds what only their own text needs."""
    of_paper = (NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL)
    relations = of_paper if published else tuple(NeighboringRelation)
    return [
        *conditions.batches(event, relation, orders, relations),
        *conditions.declared_loss(event),
        *conditions.constant_parameters(event),
        *conditions.last_iterate_alone(event),
        *conditions.unless(
            not published or not np.any(event.per_step("weight_decay") > 0),
            "weight decay",
            'weight_decay = 0 (analysis="sound" covers decoupled decay)',
            f"{event.weight_decay!r}",
        ),
        *conditions.unless(
            not published or not event.prox_strong_convexity,
            "proximal map",
            'prox_strong_convexity = 0 (analysis="sound" does not need it to be)',
            f"{event.prox_strong_convexity!r}",
        ),
    ]


def in_units_of_noise(process: NoisyProcess) -> tuple[float, float, float]:
    """s, 2 eta K and the diameter R of a constant run, over the noise of a step on the iterate."""
    lengths = [process.sensitivity[0], process.drift[0], process.domain_diameter]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.array(lengths) / process.noise_std[0]
    # A step that moves nothing needs no noise: 0/0 counts as 0.
    s, drift, diameter = np.nan_to_num(ratios, nan=0.0, posinf=math.inf).tolist()
    return s, drift, diameter


def mean_over_positions(rates: np.ndarray, orders: np.ndarray) -> np.ndarray:
    r"""D_alpha where the record's position is secret and uniform, and rho_j given it.

    .. math:: D_\alpha \le \frac{1}{\alpha - 1} \log \frac{1}{l} \sum_j e^{(\alpha-1)\alpha\rho_j}
    """
    if not np.isfinite(rates).all():
        return np.full(orders.shape, np.inf)
    exponents = ((orders - 1) * orders)[..., None] * rates
    top = exponents.max(axis=-1)
    # log mean e^x; the second form cancels for small x, the first overflows for large ones
    small = np.log1p(np.expm1(np.minimum(exponents, 1.0)).mean(axis=-1))
    large = special.logsumexp(exponents, axis=-1) - np.log(len(rates))
    return np.where(top < 1, small, large) / (orders - 1)
