"""Proximal maps that follow every noisy step, of public regularisers.

The theorems need of such a map that it is the same for all data sets, and that it moves no two
points apart; if it brings them closer, by 1/(1 + eta mu), they use that
(docs/theory/theorem_a.md, "A prox after the noise"). mu is read off a Regulariser and never
declared: a function of the user's own counts as one that does not contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import Assumption, Regulariser, UnsupportedRunError
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.regulariser import ProxOperations, group_axes
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.gradients.norms import ROUNDING
from hidden_state_adapters.opacus.users_map import UsersMap, expands


def _group_norms(values: torch.Tensor, axis: int | None) -> torch.Tensor:
    axes = group_axes(values.dim(), axis)
    wide = values.double()
    norms = torch.linalg.vector_norm(wide, dim=axes, keepdim=True) if axes else wide.abs()
    return norms.to(values.dtype)


TORCH_PROX = ProxOperations(
    maximum=lambda values, other: torch.clamp(values, min=other),
    minimum=lambda values, other: torch.clamp(values, max=other),
    group_norms=_group_norms,
)
"""What `Regulariser.prox` computes with on tensors."""


class Prox:
    """A nonexpansive map of all trainable parameters that depends on the rate of the step.

    Attributes:
        strong_convexity: mu of its regulariser, as far as it is known.
    """

    strong_convexity: float = 0.0

    def apply(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """Maps the parameters, in place, under no_grad."""
        raise NotImplementedError

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """A run starts, or goes on, from these parameters.

        Raises:
            UnsupportedRunError: The map is not nonexpansive.
            ValueError: The parameters are none that it is defined for.
        """

    def stretch(self, params: Sequence[nn.Parameter], step_size: float) -> Figure:
        """By how much it moves parameters away from the start, over the distance; or 0."""
        return 0.0

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step, and what is taken on trust."""
        raise NotImplementedError


class RegulariserProx(Prox):
    """The proximal map of a regulariser.

    Args:
        regulariser: Public.
    """

    def __init__(self, regulariser: Regulariser):
        self._regulariser = regulariser
        self.strong_convexity = regulariser.strong_convexity

    def __repr__(self) -> str:
        return str(self._regulariser)

    @torch.no_grad()
    def apply(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `Prox.apply`."""
        for param in params:
            param.copy_(self._regulariser.prox(param, step_size, TORCH_PROX))

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `Prox.start`: every parameter has the axis of the groups."""
        self._regulariser.check_axes([param.shape for param in params])

    @property
    def assumptions(self) -> Iterator[Assumption]:
        """See `Prox.assumptions`."""
        yield Assumption.checked(self._regulariser.effect, Topic.REGULARISER)


class DeclaredProx(Prox):
    """A function of the user, which is taken to be nonexpansive and never to contract.

    At the start it is tried on random pairs of parameters, which must not come out farther apart
    than they went in; in every step on the iterate and the start, at the rate of the step.

    Args:
        function: Of a list of tensors, which it changes in place, and the step size.
    """

    def __init__(self, function: Callable[[list[torch.Tensor], float], Any]):
        self._map = UsersMap(function, "prox", "p.clamp_(min=0)")
        self._start: list[torch.Tensor] = []

    def __repr__(self) -> str:
        return str(self._map)

    def apply(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `Prox.apply`."""
        self._map.apply(params, step_size)

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `Prox.start`."""
        self._start = [p.detach().clone() for p in params]
        for before, after in self._map.trials(params, step_size):
            if expands(before, after):
                raise UnsupportedRunError(
                    f"Expected a nonexpansive {self}, got a map that takes two points from "
                    f"distance {before:.6g} to {after:.6g}. Pass the proximal map of a convex "
                    "function (a normalisation or a hard threshold is none), or a Regulariser."
                )

    def stretch(self, params: Sequence[nn.Parameter], step_size: float) -> Figure:
        """See `Prox.stretch`."""
        iterate = [p.detach().clone() for p in params]
        start = [p.clone() for p in self._start]
        before, after = self._map.distances(iterate, start, params, step_size)
        return after / (before * (1 + ROUNDING) + ROUNDING)

    @property
    def assumptions(self) -> Iterator[Assumption]:
        """See `Prox.assumptions`."""
        yield Assumption.declared(
            f"after the noise of every step acts {self}, a map that is nonexpansive at every rate, "
            "looks at no record, and is the same function in all steps",
            Topic.REGULARISER,
        )
        yield Assumption.checked(f"no iterate is moved away from the start by {self}")


def prox_of(prox: Any) -> Prox | None:
    """The proximal map that `make_private` was told.

    Args:
        prox: A Regulariser, a function, or None.

    Raises:
        TypeError: It is neither.
    """
    if prox is None:
        return None
    if type(prox) is Regulariser:  # what a subclass does is not known
        return RegulariserProx(prox)
    if not callable(prox) or isinstance(prox, type | Regulariser):
        raise TypeError(
            "Expected prox to be a hidden_state_accountants.Regulariser, a function that changes a "
            f"list of tensors in place, given the step size, or None, got {prox!r}."
        )
    return DeclaredProx(prox)
