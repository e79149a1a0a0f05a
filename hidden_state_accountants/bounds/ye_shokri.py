r"""Ye & Shokri 2022 (arXiv 2203.05363): hidden states of mini-batches, strongly convex losses.

With :math:`\theta_c(n) = c^{2(n-1)} / \sum_{j<n} c^{2j}`, l batches per epoch, h = floor(l/2), E
participations and r steps from the last one on, that one included,

.. math:: \rho = \frac{s^2}{2\sigma^2}\Big[\theta_c(h)\,
          \frac{1 - c^{2(E-1)(l-h)}}{1 - c^{2(l-h)}} + \theta_c(r)\Big], \qquad
          D_\alpha \le \frac{1}{\alpha-1}\log \mathop{\mathrm{mean}}_r\, e^{(\alpha-1)\alpha\rho}

(the mean over secret positions; the largest rho if the order is public). What is proved, and where
the formulas were read: docs/theory/baselines.md.
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.block_coordinate.recursion import secret_position_rdp
from hidden_state_accountants.bounds.kong_ribero import theta
from hidden_state_accountants.bounds.solvers.constant_run import (
    ConstantRun,
    constant_run,
    unmet_for_constant_run,
)
from hidden_state_accountants.curves.base import RdpCurve
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import Unmet, linear_modulus, unless


@attrs.frozen
class YeShokri(HiddenStateBound):
    """Noisy gradient descent in full and mini-batches, as a Langevin diffusion.

    Formal guarantees:
      - Relation: REPLACE_ONE (the paper's) and REPLACE_SPECIAL; ADD_OR_REMOVE_ONE for FULL batches.
      - Released: the last iterate alone. Constant hyper-parameters.
      - Conditions: FULL, CYCLIC or SHUFFLED_ONCE batches (the paper's "shuffle and partition"), a
        modulus of the update below 1. The paper's sampling without replacement is not covered.
      - Renyi divergences. Each position's is at least alpha mu**2 / 2 of Theorem A, which proves
        them without a diffusion.

    Source: Ye & Shokri 2022 (arXiv 2203.05363), as the code of its authors and, for FULL batches,
    that of Bok, Su, Altschuler 2024 evaluate it.
    """

    key = "ye_shokri"
    dominated_by = ("shifted_interpolation", "shuffled_once")
    paper = Citation("Ye & Shokri 2022", "shuffle and partition", "2203.05363")

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A constant run whose update contracts."""
        orders = (BatchOrder.FULL, BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE)
        unmet = [
            *unmet_for_constant_run(event, relation, orders, published=False),
            *linear_modulus(event.loss),
        ]
        if unmet:
            return unmet
        modulus = constant_run(event, relation).contraction()
        needed = "a modulus of the update below 1 (weight decay, or a strongly convex loss)"
        return unless(modulus < 1, "contraction", needed, f"{modulus:g}")

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """Renyi divergences: of the worst position, or averaged over secret ones."""
        rates = rates_by_position(constant_run(event, relation))
        if event.batch_order is not BatchOrder.SHUFFLED_ONCE:
            rates = rates.max(keepdims=True)
        return Proof(
            curve=RdpCurve(functools.partial(secret_position_rdp, rates, 1)),
            theorem=self.citation.of(self.citation.theorem),
        )


def rates_by_position(run: ConstantRun) -> np.ndarray:
    """D_alpha/alpha for every position of the record, or for the one that is asked for."""
    positions = np.arange(run.period) if run.position is None else np.array([run.position])
    if run.sensitivity == math.inf:  # no noise
        return np.full(len(positions), math.inf)
    c, square = run.contraction(), run.sensitivity * run.sensitivity
    left = np.maximum(run.num_steps - positions, 0)  # steps from the first participation on
    if run.period == 1:
        # Ye & Shokri 2022, full batches, arXiv 2203.05363: a balance of 1/2 in the diffusion
        return np.atleast_1d(square * (1 + c) / (1 - c) * _one_less_power((1 + c) / 2, left))
    half = run.period // 2
    earlier = np.maximum(-(-left // run.period) - 1, 0)
    # Ye & Shokri 2022, shuffle and partition, arXiv 2203.05363: what an epoch adds, and forgets
    rest = 2 * (run.period - half)
    earlier_share = (
        theta(c, half) * _one_less_power(c, rest * earlier) / _one_less_power(c, np.array([rest]))
    )
    return square / 2 * (earlier_share + theta(c, left - run.period * earlier))


def _one_less_power(base: float, exponents: np.ndarray) -> np.ndarray:
    """1 - base**n without cancellation."""
    if base == 0:
        return (exponents > 0).astype(np.float64)
    return -np.expm1(exponents * math.log(base))
