r"""Feldman, Mironov, Talwar, Thakurta 2018 (arXiv 1808.06651): amplification by iteration.

A record's participation is hidden by the noise of the steps from it to the next one:

.. math:: D_\alpha \le \frac{\alpha s^2}{2\sigma^2}\Big[\frac{E-1}{\ell} + \frac1r\Big]

for E participations, one in every l steps, the last one r steps before the end. What is proved, and
where the formula was read: docs/theory/baselines.md.
"""

from __future__ import annotations

import math

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.kong_ribero import sharpened_theorem_2_3
from hidden_state_accountants.bounds.solvers.constant_run import (
    constant_run,
    unmet_for_constant_run,
)
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import Unmet, linear_modulus, unless

_ORDERS = (BatchOrder.FULL, BatchOrder.CYCLIC)


def unmet_for_nonexpansive_run(event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
    """What keeps a FULL or CYCLIC run from equal steps that never move two models apart."""
    unmet = [
        *unmet_for_constant_run(event, relation, _ORDERS, published=False),
        *linear_modulus(event.loss),
    ]
    if unmet:
        return unmet
    modulus = constant_run(event, relation).contraction()
    needed = "a modulus of the update of at most 1 (a clip that never acts, or weight decay)"
    return unless(modulus <= 1, "contraction", needed, f"{modulus:g}")


@attrs.frozen
class AmplificationByIteration(HiddenStateBound):
    """Privacy amplification by iteration, for every pass over the data.

    Formal guarantees:
      - Relation: REPLACE_ONE (the paper's) and REPLACE_SPECIAL; ADD_OR_REMOVE_ONE for FULL batches.
      - Released: the last iterate alone. Constant hyper-parameters.
      - Conditions: FULL or CYCLIC batches, a modulus of the update of at most 1.
      - mu-GDP, by Theorem A with equal shifts between two participations, at the position of the
        record or the worst one. FULL batches are composition.

    Source: Feldman, Mironov, Talwar, Thakurta 2018 (arXiv 1808.06651), Theorem 34 as the authors'
    tutorial of TensorFlow Privacy evaluates it.
    """

    key = "amplification_by_iteration"
    dominated_by = ("shifted_interpolation",)
    paper = Citation("Feldman, Mironov, Talwar, Thakurta 2018", "Theorem 34", "1808.06651")

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A constant run whose update does not expand."""
        return unmet_for_nonexpansive_run(event, relation)

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """mu-GDP: a participation costs 1/n of its square if n steps hide it."""
        run = constant_run(event, relation)
        # Feldman et al. 2018, Theorem 34, arXiv 1808.06651v2: theta of Kong & Ribero with L = 1
        mu_squared = (
            math.inf
            if run.sensitivity == math.inf
            else sharpened_theorem_2_3(
                1.0, run.num_steps, run.period, run.position, run.sensitivity
            )
        )
        return Proof(
            curve=GaussianCurve(math.sqrt(mu_squared)),
            theorem=f"{self.citation.of(self.citation.theorem)}, by shifted interpolation",
        )
