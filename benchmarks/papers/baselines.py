r"""Three earlier bounds that the papers compare themselves with: D_alpha/alpha of constant runs.

With s and the diameter D in units of the noise on the iterate, c the modulus of the update, and
:math:`\theta_c(n) = c^{2(n-1)} / \sum_{j<n} c^{2j}`. All are Theorem A with shifts that are not the
best ones, which proves them. The formulas are those that other code evaluates: the papers' texts
were not at hand.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.kong_ribero_2025 import theta
from hidden_state_accountants.bounds.paper import in_units_of_noise
from hidden_state_accountants.process.noisy_process import noisy_process


def amplification_by_iteration(
    event: hsa.LastIterateDpEvent, relation: NeighboringRelation
) -> float:
    """Feldman, Mironov, Talwar, Thakurta 2018 (arXiv 1808.06651), Theorem 34; c at most 1.

    Equal shifts between two participations, the worst position of CYCLIC batches:
    mu**2 = s**2 ((E - 1)/l + 1/r), of E participations the last r steps before the end.
    """
    process = noisy_process(event, relation)
    left = np.maximum(event.num_steps - np.arange(process.period), 0)
    earlier = np.maximum(-(-left // process.period) - 1, 0)
    last = left - process.period * earlier
    s, _, _ = in_units_of_noise(process)
    return s**2 * float((earlier / process.period + theta(1.0, last)).max()) / 2


def altschuler_talwar(event: hsa.LastIterateDpEvent, relation: NeighboringRelation) -> float:
    """Altschuler & Talwar 2022 (arXiv 2205.13710) for FULL batches; c at most 1.

    mu = min over w of s sqrt(w) + D c sqrt(theta_c(w)), the noise split in the best proportion.
    """
    process = noisy_process(event, relation)
    s, _, diameter = in_units_of_noise(process)
    c, windows = float(process.contraction[0]), np.arange(1, event.num_steps + 1)
    windowed = s * np.sqrt(windows) + diameter * c * np.sqrt(theta(c, windows))
    return min(s * math.sqrt(event.num_steps), float(windowed.min())) ** 2 / 2


def ye_shokri(event: hsa.LastIterateDpEvent, relation: NeighboringRelation) -> float:
    """Ye & Shokri 2022 (arXiv 2203.05363) for FULL batches; c below 1.

    D_alpha/alpha = s**2 (1 + c)/(1 - c) (1 - ((1 + c)/2)**T), a balance of 1/2 in the diffusion.
    """
    process = noisy_process(event, relation)
    s, _, _ = in_units_of_noise(process)
    c = float(process.contraction[0])
    return s**2 * (1 + c) / (1 - c) * -math.expm1(event.num_steps * math.log1p((c - 1) / 2))
