"""The Gaussian mechanism on a uniform batch of fixed size, one record replaced."""

from __future__ import annotations

import math

import attrs
import numpy as np

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.gaussian import epsilon_from_mu
from hidden_state_accountants.curves.losses import Losses, losses_of
from hidden_state_accountants.curves.sampled_pairs import sampled_rdp


@attrs.frozen
class SampledWithoutReplacementCurve:
    r"""C_q(G_mu): mu-GDP amplified by a batch that holds the record with probability q = b/n.

    .. math:: \delta\big(\log(1 + q(e^\varepsilon - 1))\big) = q\,\delta_\mu(\varepsilon),
              \qquad \varepsilon \ge 0

    (Balle, Barthe, Gaboardi 2018, arXiv 1807.01647 v2, Theorem 9; Dong, Roth, Su 2022, arXiv
    1905.02383 v3, Theorem 4.2: the pair is symmetric.) Stock accountants have its Renyi
    divergences only.

    Attributes:
        population: n.
        sample_size: b.
        step_mu: mu of the step whose batch is known to hold the record.
    """

    population: int
    sample_size: int
    step_mu: float

    @property
    def _rate(self) -> float:
        return self.sample_size / self.population

    @property
    def mu(self) -> float | None:
        """The mu of the mechanism where nothing is sampled or nothing private is left."""
        plain = self.sample_size == self.population or self.step_mu in (0, math.inf)
        return self.step_mu if plain else None

    def epsilon(self, delta: float) -> float:
        q = self._rate
        if delta >= q:
            return 0.0
        whole = epsilon_from_mu(self.step_mu, delta / q)
        if whole > 700:
            return whole + math.log(q) if math.log(q) + whole > 0 else 0.0
        return math.log1p(q * math.expm1(whole))

    def delta(self, epsilon: float) -> float:
        return float(self._profile.forward(np.array(epsilon)))

    @property
    def _profile(self) -> profiles.Profile:
        return profiles.without_replacement(profiles.gaussian(self.step_mu), self._rate)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return sampled_rdp(self._profile, self._rate, self.step_mu, self.step_mu, orders)

    def privacy_losses(self) -> Losses | None:
        return losses_of(self._profile)

    def to_dpevent(self) -> None:
        return None
