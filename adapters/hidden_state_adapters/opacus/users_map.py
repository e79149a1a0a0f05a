"""Maps of all parameters that are functions of the user's own: applied to copies, and tried.

What a theorem needs of such a map, that it moves no two points apart, cannot be read off a
function. It is tried on random pairs, and nothing but the tensors that it is given may move: of a
function that changes the model behind its argument the trials would see the identity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.norms import ROUNDING, joint_norm

_SCALES = (0.01, 1.0, 100.0)
_CLOSENESS = (0.001, 1.0)
_PAIRS = 3

Tensors = list[torch.Tensor]


class UsersMap:
    """A function that changes a list of tensors in place.

    Args:
        function: Of the list, and what else it is called with.
        argument: Of `make_private`, as which it was passed.
        example: What may be done with a tensor p of the list.
    """

    def __init__(self, function: Callable[..., Any], argument: str, example: str):
        self._function, self._argument, self._example = function, argument, example

    def __str__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"{self._argument}={name}"

    @torch.no_grad()
    def of(self, params: Sequence[nn.Parameter], *arguments: Any) -> Tensors:
        """Copies of the parameters, mapped; the parameters stay as they are."""
        copies = [p.detach().clone() for p in params]
        self._map(copies, params, *arguments)
        return copies

    @torch.no_grad()
    def apply(self, params: Sequence[nn.Parameter], *arguments: Any) -> None:
        """Maps the parameters in place."""
        for param, mapped in zip(params, self.of(params, *arguments), strict=True):
            param.copy_(mapped)

    def trials(
        self, params: Sequence[nn.Parameter], *arguments: Any
    ) -> Iterator[tuple[float, float]]:
        """The distances of random pairs before and after the map.

        Args:
            params: The pairs have their shapes, and up to 100 times their size.
            *arguments: What else the function is called with.
        """
        size = max(1.0, float(joint_norm(params)))
        generator = torch.Generator().manual_seed(0)  # the noise of the run is not touched
        for scale, closeness, _ in itertools.product(_SCALES, _CLOSENESS, range(_PAIRS)):
            one = [_random(p, scale * size, generator) for p in params]
            two = [q + closeness * _random(q, scale * size, generator) for q in one]
            yield self.distances(one, two, params, *arguments)

    @torch.no_grad()
    def distances(
        self, one: Tensors, two: Tensors, params: Sequence[nn.Parameter], *arguments: Any
    ) -> tuple[float, float]:
        """The distance of two points before and after the map, which changes them in place."""
        before = distance(one, two)
        for point in (one, two):
            self._map(point, params, *arguments)
        return before, distance(one, two)

    def _map(self, copies: Tensors, params: Sequence[nn.Parameter], *arguments: Any) -> None:
        """Maps `copies` in place; raises unless that is all that the function changes."""
        known = [p.detach().clone() for p in params]
        given = [(id(copy), copy.data_ptr()) for copy in copies]
        returned = self._function(copies, *arguments)
        if returned is not None:
            raise TypeError(
                f"Expected {self._argument} to change a list of tensors in place and to return "
                f"None, got {type(returned).__name__}. Write for example {self._example} for each "
                "p."
            )
        if given != [(id(copy), copy.data_ptr()) for copy in copies]:
            raise TypeError(
                f"Expected {self._argument} to change the tensors of the list in place, got others "
                "in their place: the parameters would stay as they are. Write for example "
                f"{self._example} for each p."
            )
        pairs = zip(params, known, strict=True)
        if not all(torch.equal(p.detach().nan_to_num(), q.nan_to_num()) for p, q in pairs):
            raise UnsupportedRunError(
                f"Expected {self} to change the list of tensors that it is given, got one that "
                "changed the parameters of the model itself: nobody would see whether it expands. "
                "Loop over its argument, not over model.parameters()."
            )


def expands(before: float, after: float) -> bool:
    """Whether a pair came out farther apart than it went in, or not as numbers."""
    return not after <= before * (1 + ROUNDING) + ROUNDING


def distance(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Euclidean, of all tensors together, in float64."""
    pairs = zip(ones, others, strict=True)
    parts = [torch.linalg.vector_norm(p.detach().double() - o.double()) for p, o in pairs]
    return math.hypot(*(float(part) for part in parts))


def _random(like: torch.Tensor, size: float, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(like.shape, generator=generator) * (size / math.sqrt(like.numel()))
    return values.to(like.detach())
