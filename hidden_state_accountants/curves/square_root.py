"""The form in which published epsilons are often printed."""

from __future__ import annotations

import math

import attrs
import numpy as np


@attrs.frozen
class SquareRootCurve:
    """epsilon = sqrt(scale * log(1/delta)), with a Renyi divergence of alpha * scale / 2.

    Nothing satisfies it at small epsilons: it is what a paper claims, not what can be proved.
    """

    scale: float

    @property
    def mu(self) -> None:
        """Not Gaussian."""
        return None

    def epsilon(self, delta: float) -> float:
        if delta >= 1:
            return 0.0
        return math.sqrt(self.scale * math.log(1 / delta)) if delta > 0 else math.inf

    def delta(self, epsilon: float) -> float:
        if self.scale == math.inf or epsilon == 0:
            return 1.0
        return math.exp(-(epsilon**2) / self.scale)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return orders * self.scale / 2

    def privacy_losses(self) -> None:
        return None

    def to_dpevent(self) -> None:
        return None
