r"""Three earlier bounds of the last iterate, in forms that are proved: docs/theory/baselines.md.

With :math:`\theta_c(n) = c^{2(n-1)} / \sum_{j<n} c^{2j}` and a record in one of every l steps, E
times, the last time r steps before the end (that one included):

* Feldman, Mironov, Talwar, Thakurta 2018 (arXiv 1808.06651): the noise of the steps up to the next
  participation hides one, :math:`\mu^2 = \frac{s^2}{\sigma^2}\big[\frac{E-1}{l} + \frac1r\big]`.
* Altschuler & Talwar 2022 (arXiv 2205.13710): with p participations in the last w steps

  .. math:: \mu = \frac1\sigma \min_{w \le T} \Big( s\sqrt{p} + D \Big/
            \Big(\sum_{i=1}^{w} c^{-2i}\Big)^{1/2} \Big)

* Ye & Shokri 2022 (arXiv 2203.05363): with h = floor(l/2), and the mean over secret positions,

  .. math:: \rho = \frac{s^2}{2\sigma^2}\Big[\theta_c(h)\,
            \frac{1 - c^{2(E-1)(l-h)}}{1 - c^{2(l-h)}} + \theta_c(r)\Big], \qquad
            D_\alpha \le \frac{1}{\alpha-1}\log \mathop{\mathrm{mean}}_r\, e^{(\alpha-1)\alpha\rho}

All of them are shifts of Theorem A, which is never larger.
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.kong_ribero_2025 import theta
from hidden_state_accountants.bounds.paper import (
    in_units_of_noise,
    mean_over_positions,
    unmet_for_constant_run,
)
from hidden_state_accountants.curves.base import GaussianCurve, RdpCurve
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import Unmet, linear_modulus, unless
from hidden_state_accountants.process.noisy_process import NoisyProcess, noisy_process


class _Baseline(HiddenStateBound):
    """A constant run whose update does not expand.

    Formal guarantees, of all of them:
      - Relation: REPLACE_ONE (the papers') and REPLACE_SPECIAL; ADD_OR_REMOVE_ONE for FULL batches.
      - Released: the last iterate alone. Constant hyper-parameters.
    """

    dominated_by = ("shifted_interpolation", "shuffled_once")
    contracts: ClassVar[bool] = False

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A constant run whose update does not expand, or contracts."""
        unmet = [
            *unmet_for_constant_run(event, relation, self.orders, published=False),
            *linear_modulus(event.loss),
        ]
        if unmet:
            return unmet
        modulus = float(noisy_process(event, relation).contraction[0])
        needed = "a modulus of the update of at most 1 (a clip that never acts, or weight decay)"
        if self.contracts:
            needed = "a modulus of the update below 1 (weight decay, or a strongly convex loss)"
        is_met = modulus < 1 or (modulus == 1 and not self.contracts)
        return unless(is_met, "contraction", needed, f"{modulus:g}")

    def _gaussian(self, mu: float) -> Proof:
        theorem = f"{self.cited(self.paper.theorem)}, by shifted interpolation"
        return Proof(curve=GaussianCurve(mu), theorem=theorem)


def _participations(
    event: LastIterateDpEvent, process: NoisyProcess
) -> tuple[np.ndarray, np.ndarray]:
    """E - 1 and r for every position of the record, or for the one that is asked for."""
    position = event.record_position
    positions = np.arange(process.period) if position is None else np.array([position])
    left = np.maximum(event.num_steps - positions, 0)  # steps from the first participation on
    earlier = np.maximum(-(-left // process.period) - 1, 0)
    return earlier, left - process.period * earlier


class AmplificationByIteration(_Baseline):
    """Privacy amplification by iteration, for every pass over the data.

    Formal guarantees:
      - FULL or CYCLIC batches, a modulus of the update of at most 1.
      - mu-GDP, by Theorem A with equal shifts between two participations, at the position of the
        record or the worst one. FULL batches are composition.

    Source: Feldman, Mironov, Talwar, Thakurta 2018 (arXiv 1808.06651), Theorem 34 as the authors'
    tutorial of TensorFlow Privacy evaluates it.
    """

    key = "amplification_by_iteration"
    paper = Citation("Feldman, Mironov, Talwar, Thakurta 2018", "Theorem 34", "1808.06651")

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """mu-GDP: a participation costs 1/n of its square if n steps hide it."""
        process = noisy_process(event, relation)
        earlier, last = _participations(event, process)
        # Feldman et al. 2018, Theorem 34, arXiv 1808.06651v2
        shares = earlier / process.period + theta(1.0, last)
        return self._gaussian(in_units_of_noise(process)[0] * math.sqrt(shares.max()))


class AltschulerTalwar(_Baseline):
    """The bound that stops growing: a convex loss on a bounded domain.

    Formal guarantees:
      - FULL or CYCLIC batches, a modulus of the update of at most 1. Without a domain it is
        composition. The paper's random batches are not covered here.
      - mu-GDP, by Theorem A with shifts that undo every participation at once and, beside it, the
        diameter; the noise is split in the best proportion instead of in halves.

    Source: the argument of Altschuler & Talwar 2022 (arXiv 2205.13710), in a form that
    docs/theory/baselines.md proves; the constants of the paper's statements are not reproduced.
    """

    key = "altschuler_talwar"
    paper = Citation("Altschuler & Talwar 2022", "the argument by the diameter", "2205.13710")

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """mu-GDP of the best window, or of composition."""
        process, steps = noisy_process(event, relation), event.num_steps
        s, _, diameter = in_units_of_noise(process)
        if s == math.inf:  # no noise
            return self._gaussian(math.inf)
        position, period = event.record_position, process.period
        if position is None:
            position = (steps - 1) % period  # that of the batch processed last
        windows = np.append(steps, _windows())
        windows = windows[windows <= steps]
        before = np.maximum(0, -((position - (steps - windows)) // period))
        composed = s * np.sqrt(max(0, -((position - steps) // period)) - before)
        if diameter == math.inf:
            return self._gaussian(float(composed[0]))
        c = float(process.contraction[0])
        # Altschuler & Talwar 2022, arXiv 2205.13710: composition of the window, and the diameter
        left = diameter * c * np.sqrt(theta(c, windows))
        return self._gaussian(float(min(composed[0], (composed + left).min())))


@functools.cache
def _windows() -> np.ndarray:
    """Every length up to 10,000, then lengths that differ by a ten-thousandth."""
    return np.unique(np.geomspace(1, 2.0**40, 300_000).astype(np.int64))


class YeShokri(_Baseline):
    """Noisy gradient descent in full and mini-batches, as a Langevin diffusion.

    Formal guarantees:
      - FULL, CYCLIC or SHUFFLED_ONCE batches (the paper's "shuffle and partition"), a modulus of
        the update below 1. The paper's sampling without replacement is not covered.
      - Renyi divergences. Each position's is at least alpha mu**2 / 2 of Theorem A, which proves
        them without a diffusion.

    Source: Ye & Shokri 2022 (arXiv 2203.05363), as the code of its authors and, for FULL batches,
    that of Bok, Su, Altschuler 2024 evaluate it.
    """

    key = "ye_shokri"
    orders = (BatchOrder.FULL, BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE)
    contracts = True
    paper = Citation("Ye & Shokri 2022", "shuffle and partition", "2203.05363")

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """Renyi divergences: of the worst position, or averaged over secret ones."""
        rates = _rates_by_position(event, noisy_process(event, relation))
        if event.batch_order is not BatchOrder.SHUFFLED_ONCE:
            rates = rates.max(keepdims=True)
        return Proof(
            curve=RdpCurve(functools.partial(mean_over_positions, rates)),
            theorem=self.cited(self.paper.theorem),
        )


def _rates_by_position(event: LastIterateDpEvent, process: NoisyProcess) -> np.ndarray:
    """D_alpha/alpha for every position of the record, or for the one that is asked for."""
    c, s = float(process.contraction[0]), in_units_of_noise(process)[0]
    earlier, last = _participations(event, process)
    if s == math.inf:  # no noise
        return np.full(len(last), math.inf)
    if process.period == 1:
        # Ye & Shokri 2022, full batches, arXiv 2203.05363: a balance of 1/2 in the diffusion
        return s * s * (1 + c) / (1 - c) * _one_less_power((1 - c) / 2, earlier + last)
    half = process.period // 2
    # Ye & Shokri 2022, shuffle and partition, arXiv 2203.05363: what an epoch adds, and forgets
    rest = 2 * (process.period - half)
    pooled = _one_less_power(1 - c, rest * earlier) / _one_less_power(1 - c, np.array([rest]))
    return s * s / 2 * (theta(c, half) * pooled + theta(c, last))


def _one_less_power(less: float, exponents: np.ndarray) -> np.ndarray:
    """1 - (1 - less)**n without cancellation, for bases that round to 1 as well."""
    if less == 1:
        return (exponents > 0).astype(np.float64)
    return -np.expm1(exponents * math.log1p(-less))
