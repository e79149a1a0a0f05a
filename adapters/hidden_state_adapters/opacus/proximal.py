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

from hidden_state_accountants import Assumption, Regulariser
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.regulariser import ProxOperations, group_axes
from hidden_state_adapters.opacus.users_map import UsersMap


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
        """A run starts from these parameters.

        Raises:
            UnsupportedRunError: The map is not nonexpansive.
            ValueError: The parameters are none that it is defined for.
        """
        raise NotImplementedError

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What holds by construction, and what is taken on trust."""
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

    Args:
        function: Of a list of tensors, which it changes in place, and the step size.
    """

    def __init__(self, function: Callable[[list[torch.Tensor], float], Any]):
        remedy = (
            "Pass the proximal map of a convex function (a normalisation or a hard threshold is "
            "none), or a Regulariser."
        )
        self._map = UsersMap(function, "prox", remedy)

    def __repr__(self) -> str:
        return str(self._map)

    def apply(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `Prox.apply`."""
        self._map.apply(params, step_size)

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `Prox.start`: it is tried on random pairs."""
        self._map.try_out(params, step_size)

    @property
    def assumptions(self) -> Iterator[Assumption]:
        """See `Prox.assumptions`."""
        yield Assumption.declared(
            f"after the noise of every step acts {self}, a map that is nonexpansive at every rate, "
            "looks at no record, and is the same function in all steps",
            Topic.REGULARISER,
        )


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
