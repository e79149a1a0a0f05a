"""Curves that are known in two ways: by Renyi divergences and by composed privacy losses."""

from __future__ import annotations

import functools
import math

import numpy as np

from hidden_state_accountants.curves.composed_loss import ComposedLoss
from hidden_state_accountants.curves.losses import Losses
from hidden_state_accountants.curves.renyi import delta_from_rdp, epsilon_from_rdp

_FEW = 24  # orders of a first look
_CLEARLY = 1.3  # times an epsilon by losses: all orders would not give less than it
_CLEARLY_OF_DELTAS = 1e3
_FEWEST = 2**6  # runs of a part that a shorter composition keeps some of


def power_of_two_below(count: int) -> int:
    """The largest power of two that is smaller; 0 if there are few runs."""
    return 2 ** ((count - 1).bit_length() - 1) if count >= _FEWEST else 0


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
    def _all_divergences(self) -> tuple[np.ndarray, np.ndarray]:
        """All orders, and the divergences there."""
        return self.orders, self.rdp(self.orders)

    @functools.cached_property
    def _few_divergences(self) -> tuple[np.ndarray, np.ndarray]:
        """A few orders, and the divergences there: a conversion is a few per cent larger."""
        orders = self.orders
        spread = np.geomspace(orders[0] - 1, orders[-1] - 1, _FEW) + 1
        spread = np.where(spread > 2, np.floor(spread), spread)  # integers are quicker
        few = orders[np.unique(np.searchsorted(orders, spread * (1 - 1e-12)))]
        return few, self.rdp(few)

    @functools.cached_property
    def _composed(self) -> ComposedLoss | None:
        parts = self.privacy_losses()
        return None if parts is None else ComposedLoss(parts)

    def rough_epsilon(self, delta: float) -> float:
        """Epsilon by a few of the divergences alone."""
        return epsilon_from_rdp(*self._few_divergences, delta)

    def epsilon(self, delta: float) -> float:
        """The smallest known epsilon for delta in [0, 1]."""
        by_loss = math.inf if self._composed is None else self._composed.epsilon(delta)
        if self.rough_epsilon(delta) > _CLEARLY * by_loss:
            return by_loss
        return min(epsilon_from_rdp(*self._all_divergences, delta), by_loss)

    def delta(self, epsilon: float) -> float:
        """The smallest known delta for epsilon in [0, inf]."""
        by_loss = 1.0 if self._composed is None else self._composed.delta(epsilon)
        if delta_from_rdp(*self._few_divergences, epsilon) > _CLEARLY_OF_DELTAS * by_loss:
            return by_loss
        return min(delta_from_rdp(*self._all_divergences, epsilon), by_loss)
