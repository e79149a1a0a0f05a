r"""Altschuler & Talwar 2022 (arXiv 2205.13710): the diameter is all that the past can leave.

Over the last w steps the participations are composed with one part of the noise, and the other part
hides the diameter D. With the best split and p participations in the window

.. math:: D_\alpha \le \frac{\alpha}{2\sigma^2} \min_{w \le T}
          \Big( s\sqrt{p} + D \Big/ \Big(\sum_{i=1}^{w} c^{-2i}\Big)^{1/2} \Big)^2

or composition of all steps. What is proved, and how it was checked: docs/theory/baselines.md.
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.amplification_by_iteration import unmet_for_nonexpansive_run
from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.kong_ribero import theta
from hidden_state_accountants.bounds.solvers.constant_run import ConstantRun, constant_run
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import Unmet


@attrs.frozen
class AltschulerTalwar(HiddenStateBound):
    """The bound that stops growing: a convex loss on a bounded domain.

    Formal guarantees:
      - Relation: REPLACE_ONE (the paper's) and REPLACE_SPECIAL; ADD_OR_REMOVE_ONE for FULL batches.
      - Released: the last iterate alone. Constant hyper-parameters.
      - Conditions: FULL or CYCLIC batches, a modulus of the update of at most 1. Without a domain
        it is composition. The paper's random batches are not covered here.
      - mu-GDP, by Theorem A with shifts that undo every participation at once and, beside it, the
        diameter; the noise is split in the best proportion instead of in halves.

    Source: the argument of Altschuler & Talwar 2022 (arXiv 2205.13710), in a form that
    docs/theory/baselines.md proves; the constants of the paper's statements are not reproduced.
    """

    key = "altschuler_talwar"
    dominated_by = ("shifted_interpolation",)
    paper = Citation("Altschuler & Talwar 2022", "the argument by the diameter", "2205.13710")

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A constant run whose update does not expand."""
        return unmet_for_nonexpansive_run(event, relation)

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """mu-GDP of the best window."""
        mu = least_over_windows(constant_run(event, relation))
        return Proof(
            curve=GaussianCurve(mu),
            theorem=f"{self.citation.of(self.citation.theorem)}, by shifted interpolation",
        )


def least_over_windows(run: ConstantRun) -> float:
    """mu of the best window, or of composition."""
    if run.sensitivity == math.inf:  # no noise
        return math.inf
    position = run.last_position if run.position is None else run.position
    composed = run.sensitivity * math.sqrt(
        _participations(run, position, np.array([run.num_steps]))[0]
    )
    if run.diameter == math.inf:
        return float(composed)
    windows = _windows()
    windows = windows[windows <= run.num_steps]
    c = run.contraction()
    # Altschuler & Talwar 2022, arXiv 2205.13710: composition of the window, and the diameter
    left = run.diameter * c * np.sqrt(theta(c, windows))
    mus = run.sensitivity * np.sqrt(_participations(run, position, windows)) + left
    return float(min(composed, mus.min()))


def _participations(run: ConstantRun, position: int, windows: np.ndarray) -> np.ndarray:
    """How many of the last w steps hold the record."""

    def before(steps: np.ndarray) -> np.ndarray:
        return np.maximum(0, -((position - steps) // run.period))

    return before(np.array(run.num_steps)) - before(run.num_steps - windows)


@functools.cache
def _windows() -> np.ndarray:
    """Every length up to 10,000, then lengths that differ by a ten-thousandth."""
    return np.unique(np.geomspace(1, 2.0**40, 300_000).astype(np.int64))
