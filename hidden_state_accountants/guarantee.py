"""What is proved about a run: a privacy curve with its theorem and its assumptions."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Protocol

import attrs
import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation

from hidden_state_accountants import _validate
from hidden_state_accountants.gaussian import delta_from_mu, epsilon_from_mu


class Status(enum.Enum):
    """Who vouches for an assumption."""

    CHECKED = "checked"  # the software verified it on every step
    DECLARED = "declared"  # the user's word
    PUBLIC = "public"  # a value that an adversary may know


@attrs.frozen
class Assumption:
    """One thing that has to be true for the guarantee to hold."""

    text: str
    status: Status

    @classmethod
    def checked(cls, text: str) -> Assumption:
        """Verified by the software."""
        return cls(text, Status.CHECKED)

    @classmethod
    def declared(cls, text: str) -> Assumption:
        """Taken on the user's word."""
        return cls(text, Status.DECLARED)

    @classmethod
    def public(cls, text: str) -> Assumption:
        """Not secret."""
        return cls(text, Status.PUBLIC)

    def __str__(self) -> str:
        return f"{self.status.value}: {self.text}"


class Curve(Protocol):
    """A set of (epsilon, delta) pairs and Renyi divergences that hold together."""

    @property
    def mu(self) -> float | None:
        """The mu of mu-GDP, None if the curve is not Gaussian."""

    def epsilon(self, delta: float) -> float:
        """Smallest known epsilon for delta in [0, 1]."""

    def delta(self, epsilon: float) -> float:
        """Smallest known delta for epsilon in [0, inf]."""

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Upper bounds on the Renyi divergences of the orders."""

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        """A standard event with this curve under ADD_OR_REMOVE_ONE, if there is one."""


@attrs.frozen
class GaussianCurve:
    """mu-GDP: the trade-off of one observation of N(0, 1) against N(mu, 1)."""

    mu: float

    def epsilon(self, delta: float) -> float:
        return epsilon_from_mu(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        return delta_from_mu(self.mu, epsilon)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return orders * self.mu**2 / 2

    def to_dpevent(self) -> dp_accounting.DpEvent:
        if self.mu == 0:
            return dp_accounting.NoOpDpEvent()
        if self.mu == math.inf:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.GaussianDpEvent(1 / self.mu)


@attrs.frozen
class CurveWithDelta:
    """A curve that holds except with probability `extra`, which adds to every delta."""

    curve: Curve
    extra: float

    @property
    def mu(self) -> None:
        """Not Gaussian."""
        return None

    def epsilon(self, delta: float) -> float:
        return self.curve.epsilon(delta - self.extra) if delta > self.extra else math.inf

    def delta(self, epsilon: float) -> float:
        return min(1.0, self.curve.delta(epsilon) + self.extra)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return np.full(orders.shape, math.inf)

    def to_dpevent(self) -> None:
        return None


@attrs.frozen
class Guarantee:
    """A proved privacy guarantee of everything that was released.

    Attributes:
        curve: The numbers.
        neighboring_relation: The relation they hold for, in both directions.
        theorem: What proves them.
        assumptions: What has to be true, each checked, declared or public.
        alternatives: Name and reason of the bounds that do not apply or are larger.
    """

    curve: Curve
    neighboring_relation: NeighboringRelation
    theorem: str
    assumptions: tuple[Assumption, ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()

    @property
    def mu(self) -> float | None:
        """The mu of mu-GDP; None if the guarantee is not Gaussian."""
        return self.curve.mu

    def epsilon(self, delta: float) -> float:
        """The smallest proved epsilon at `delta` in [0, 1]."""
        return self.curve.epsilon(_validate.target_delta(delta))

    def delta(self, epsilon: float) -> float:
        """The smallest proved delta at `epsilon` >= 0."""
        return self.curve.delta(_validate.target_epsilon(epsilon))

    def rdp(self, orders: npt.ArrayLike) -> np.ndarray:
        """Upper bounds, shape as `orders`, on the Renyi divergences of orders > 1."""
        array = np.asarray(orders)
        if array.dtype.kind not in "fiu" or not (array > 1).all():
            raise ValueError(f"Expected orders > 1, got {orders!r}.")
        return self.curve.rdp(array.astype(np.float64))

    def to_dpevent(self) -> dp_accounting.DpEvent:
        """A standard event with the same curve, for accountants under ADD_OR_REMOVE_ONE.

        Raises:
            ValueError: No standard event has this curve.
        """
        event = self.curve.to_dpevent()
        if event is None:
            raise ValueError(f"No standard event expresses the guarantee by {self.theorem}.")
        return event

    def explain(self) -> str:
        """The theorem, the relation, the assumptions and the bounds that were not used."""
        lines = [
            f"theorem: {self.theorem}",
            f"neighboring relation: {self.neighboring_relation.name}",
        ]
        if self.mu is not None:
            lines.append(f"mu (Gaussian differential privacy): {self.mu:.6g}")
        lines += [f"assumption, {assumption}" for assumption in self.assumptions]
        lines += [f"not used: {name}: {reason}" for name, reason in self.alternatives]
        return "\n".join(lines)


def merge_assumptions(groups: Sequence[tuple[Assumption, ...]]) -> tuple[Assumption, ...]:
    """All assumptions once, in order of appearance."""
    return tuple(dict.fromkeys(assumption for group in groups for assumption in group))
