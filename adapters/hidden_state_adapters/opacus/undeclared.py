"""What is known about steps of which only noise and sampling rate are known: composition."""

from __future__ import annotations

import functools
import math

import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, Guarantee
from hidden_state_accountants.curves.base import Curve, GaussianCurve
from hidden_state_accountants.curves.standard import StandardCurve, StockEvent

Row = tuple[float, float, int]
"""Noise multiplier, sample rate, number of steps; as in Opacus' histories."""

UNDECLARED = (
    "No run was declared: epsilon is that of composition under Poisson sampling (every iterate may "
    "be released) and holds for Poisson loaders only (poisson_sampling=True). For other loaders, "
    "and for the last iterate, call engine.accountant.declare_run(batch_order=..., "
    "dataset_size=..., batch_size=..., loss_geometry=...) before training."
)
WRITTEN = (
    "The history was written directly, as make_private_with_epsilon does: epsilon is that of "
    "composition under Poisson sampling and ADD_OR_REMOVE_ONE. A declared run has another epsilon: "
    "find its noise with dp_accounting.calibrate_dp_mechanism and "
    "hidden_state_accountants.LastIterateAccountant, and call make_private."
)


@functools.lru_cache(maxsize=16)
def undeclared_guarantee(rows: tuple[Row, ...]) -> Guarantee:
    """Composition of Poisson-sampled Gaussian mechanisms, as stock Opacus accountants assume.

    Formal guarantees: ADD_OR_REMOVE_ONE; every iterate may be released; each record joins every
    batch independently with the sample rate.
    """
    return Guarantee(
        curve=_curve(rows),
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        theorem="composition of Poisson-sampled Gaussian mechanisms (no run was declared)",
        assumptions=(
            Assumption.declared("every record joins every batch independently (Poisson sampling)"),
            Assumption.declared("one record per person, clipped as one unit"),
        ),
    )


def _curve(rows: tuple[Row, ...]) -> Curve:
    mu_squared, sampled = 0.0, []
    for noise, rate, steps in rows:
        if not steps:
            continue
        if noise == 0:
            return GaussianCurve(math.inf)
        if rate >= 1:
            mu_squared += steps / noise**2
            continue
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        sampled.append(StockEvent(event, steps, NeighboringRelation.ADD_OR_REMOVE_ONE))
    mu = math.sqrt(mu_squared)
    return StandardCurve(tuple(sampled), gaussian_mu=mu) if sampled else GaussianCurve(mu)
