"""Maps of all parameters that follow every step: proximal maps, and functions of the user's own.

The theorems need of such a map that it is the same in every step and for all data sets, and that it
moves no two points apart, |P(x) - P(y)| <= |x - y| for all parameters together
(docs/theory/theorem_a.md). If it brings them closer, by 1/(1 + eta mu), they use that ("A prox
after the noise"); mu is read off a Regulariser and never declared. A function cannot be read: it is
tried on random pairs at the start, and that it does not expand later is the user's word.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import Assumption, Regulariser, UnsupportedRunError
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.regulariser import ProxOperations, group_axes
from hidden_state_adapters.opacus.gradients.norms import ROUNDING, joint_norm

_SCALES = (0.01, 1.0, 100.0)
_CLOSENESS = (0.001, 1.0)
_PAIRS = 3


class StepMap:
    """A nonexpansive map of all trainable parameters.

    Attributes:
        strong_convexity: mu of the function whose proximal map it is, as far as it is known.
    """

    strong_convexity: float = 0.0

    def apply(self, params: Sequence[torch.Tensor], step_size: float) -> None:
        """Maps the parameters, in place, under no_grad.

        Args:
            params: All that are trained.
            step_size: Of the step before.
        """
        raise NotImplementedError

    def diameter(self, params: Sequence[nn.Parameter]) -> float:
        """Of the set that it maps to, for parameters of these shapes; inf if it is not bounded.

        Raises:
            ValueError: The set has another number of parameters.
        """
        return math.inf

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """A run starts from these parameters.

        Raises:
            UnsupportedRunError: They are outside of the set, or the map is not nonexpansive.
            ValueError: It is not defined for them.
        """
        raise NotImplementedError

    @property
    def assumption(self) -> Assumption:
        """What holds by construction, or is taken on trust."""
        raise NotImplementedError


class RegulariserProx(StepMap):
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
    def apply(self, params: Sequence[torch.Tensor], step_size: float) -> None:
        """See `StepMap.apply`."""
        for param in params:
            param.copy_(self._regulariser.prox(param, step_size, TORCH_PROX))

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `StepMap.start`: every parameter has the axis of the groups."""
        self._regulariser.check_axes([param.shape for param in params])

    @property
    def assumption(self) -> Assumption:
        """See `StepMap.assumption`."""
        return Assumption.checked(self._regulariser.effect, Topic.REGULARISER)


class UsersMap(StepMap):
    """A function of the user's own that changes a list of tensors in place.

    Args:
        function: Of the list, and of what `arguments` says.
    """

    kind: str
    remedy: str  # what to pass instead of a map that expands

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __str__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"{self.kind}={name}"

    def arguments(self, step_size: float) -> tuple[float, ...]:
        """What the function is called with beside the list."""
        return ()

    @torch.no_grad()
    def _mapped(self, params: Sequence[torch.Tensor], step_size: float) -> list[torch.Tensor]:
        """Copies of the parameters, mapped; the parameters stay as they are.

        Raises:
            TypeError: The function changes nothing in place.
        """
        copies = [p.detach().clone() for p in params]
        given = [(id(copy), copy.data_ptr()) for copy in copies]
        returned = self._function(copies, *self.arguments(step_size))
        if returned is not None or given != [(id(copy), copy.data_ptr()) for copy in copies]:
            raise TypeError(
                f"Expected {self.kind} to change the tensors of a list in place and to return "
                "None, got others. Write for example p.clamp_(-1, 1) for each p."
            )
        return copies

    @torch.no_grad()
    def apply(self, params: Sequence[torch.Tensor], step_size: float) -> None:
        """See `StepMap.apply`."""
        for param, mapped in zip(params, self._mapped(params, step_size), strict=True):
            param.copy_(mapped)

    def start(self, params: Sequence[nn.Parameter], step_size: float) -> None:
        """See `StepMap.start`.

        It maps random pairs, with the shapes of the parameters and up to 100 times their size.
        """
        size, diameter = max(1.0, float(joint_norm(params))), self.diameter(params)
        before = [p.detach().clone() for p in params]
        generator = torch.Generator().manual_seed(0)  # the noise of the run is not touched
        for scale, closeness, _ in itertools.product(_SCALES, _CLOSENESS, range(_PAIRS)):
            one = [_random(p, scale * size, generator) for p in params]
            two = [q + closeness * _random(q, scale * size, generator) for q in one]
            known = distance(one, two)
            found = distance(self._mapped(one, step_size), self._mapped(two, step_size))
            if distance(before, params) != 0:
                raise UnsupportedRunError(
                    f"Expected {self} to change the list of tensors that it is given, got one that "
                    "changed the parameters of the model itself. Loop over its argument, not over "
                    "model.parameters()."
                )
            slack = 1 + ROUNDING
            if not (found <= known * slack + ROUNDING and found <= diameter * slack):
                raise UnsupportedRunError(
                    f"Expected a nonexpansive {self}, got a map that takes two points from "
                    f"distance {known:.6g} to {found:.6g}. {self.remedy}"
                )


class DeclaredProx(UsersMap):
    """A function of the list and the step size, which is never taken to contract."""

    kind = "prox"
    remedy = (
        "Pass the proximal map of a convex function (a normalisation or a hard threshold is "
        "none), or a Regulariser."
    )

    def __repr__(self) -> str:
        return str(self)

    def arguments(self, step_size: float) -> tuple[float, ...]:
        """The step size."""
        return (step_size,)

    @property
    def assumption(self) -> Assumption:
        """See `StepMap.assumption`."""
        return Assumption.declared(
            f"after the noise of every step acts {self}, a map that is nonexpansive at every rate, "
            "looks at no record, and is the same function in all steps",
            Topic.REGULARISER,
        )


def distance(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Euclidean, of all tensors together, in float64."""
    pairs = zip(ones, others, strict=True)
    parts = [torch.linalg.vector_norm(p.detach().double() - o.detach().double()) for p, o in pairs]
    return math.hypot(*(float(part) for part in parts))


def _random(like: torch.Tensor, size: float, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(like.shape, generator=generator) * (size / math.sqrt(like.numel()))
    return values.to(like.detach())


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
