"""Curves that are known in two ways: by Renyi divergences and by composed privacy losses."""

from __future__ import annotations

import functools
import math

import numpy as np

from hidden_state_accountants.curves.composed_loss import ComposedLoss
from hidden_state_accountants.curves.losses import Losses
from hidden_state_accountants.curves.renyi import delta_from_rdp, epsilon_from_rdp

_LARGEST_EPSILON = 200.0  # beyond it the divergences are good enough, and a loss takes gigabytes


class RenyiOrLoss:
    """Epsilon and delta by divergences or by losses, whichever gives less.

    All privacy losses of the package are composed and evaluated here, by `ComposedLoss`, which adds
    the error of its arithmetic. Both figures are upper bounds, so the smaller one is.
    """

    @property
    def orders(self) -> np.ndarray:
        """The Renyi orders to convert from."""
        raise NotImplementedError

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Upper bounds on the Renyi divergences of the orders; inf where none is known."""
        raise NotImplementedError

    def privacy_losses(self) -> Losses | None:
        """Pessimistic privacy losses; None if one is not known."""
        raise NotImplementedError

    @functools.cached_property
    def _divergences(self) -> np.ndarray:
        return self.rdp(self.orders)

    @functools.cached_property
    def _composed(self) -> ComposedLoss | None:
        if np.isfinite(self._divergences).any():
            if epsilon_from_rdp(self.orders, self._divergences, 1e-5) > _LARGEST_EPSILON:
                return None
        parts = self.privacy_losses()
        return None if parts is None else ComposedLoss(parts)

    def rough_epsilon(self, delta: float) -> float:
        """Epsilon by the divergences alone."""
        return epsilon_from_rdp(self.orders, self._divergences, delta)

    def epsilon(self, delta: float) -> float:
        """The smallest known epsilon for delta in [0, 1]."""
        by_renyi = self.rough_epsilon(delta)
        by_loss = math.inf if self._composed is None else self._composed.epsilon(delta)
        return min(by_renyi, by_loss)

    def delta(self, epsilon: float) -> float:
        """The smallest known delta for epsilon in [0, inf]."""
        by_renyi = delta_from_rdp(self.orders, self._divergences, epsilon)
        by_loss = 1.0 if self._composed is None else self._composed.delta(epsilon)
        return min(by_renyi, by_loss)
