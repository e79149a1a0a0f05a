"""Maps of all parameters that are functions of the user's own: applied to copies, and tried once.

What a theorem needs of such a map, that it moves no two points apart, cannot be read off a
function. It is tried on random pairs at the start; that it does not expand later is the user's
word.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.norms import ROUNDING, joint_norm

_SCALES = (0.01, 1.0, 100.0)
_CLOSENESS = (0.001, 1.0)
_PAIRS = 3


class UsersMap:
    """A function that changes a list of tensors in place.

    Args:
        function: Of the list, and what else it is called with.
        kind: What it is, in a word.
        remedy: What to pass instead of a map that expands.
    """

    def __init__(self, function: Callable[..., Any], kind: str, remedy: str):
        self._function, self._kind, self._remedy = function, kind, remedy

    def __str__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"{self._kind}={name}"

    @torch.no_grad()
    def of(self, params: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        """Copies of the parameters, mapped; the parameters stay as they are.

        Raises:
            TypeError: The function changes nothing in place.
        """
        copies = [p.detach().clone() for p in params]
        given = [(id(copy), copy.data_ptr()) for copy in copies]
        returned = self._function(copies, *arguments)
        if returned is not None or given != [(id(copy), copy.data_ptr()) for copy in copies]:
            raise TypeError(
                f"Expected {self._kind} to change the tensors of a list in place and to return "
                "None, got others. Write for example p.clamp_(-1, 1) for each p."
            )
        return copies

    @torch.no_grad()
    def apply(self, params: Sequence[nn.Parameter], *arguments: Any) -> None:
        """Maps the parameters in place."""
        for param, mapped in zip(params, self.of(params, *arguments), strict=True):
            param.copy_(mapped)

    def try_out(
        self, params: Sequence[nn.Parameter], *arguments: Any, diameter: float = math.inf
    ) -> None:
        """Maps random pairs, with the shapes of the parameters and up to 100 times their size.

        Raises:
            UnsupportedRunError: A pair comes out farther apart than it went in, or than `diameter`;
                or the function changes the model behind its argument.
        """
        size = max(1.0, float(joint_norm(params)))
        before = [p.detach().clone() for p in params]
        generator = torch.Generator().manual_seed(0)  # the noise of the run is not touched
        for scale, closeness, _ in itertools.product(_SCALES, _CLOSENESS, range(_PAIRS)):
            one = [_random(p, scale * size, generator) for p in params]
            two = [q + closeness * _random(q, scale * size, generator) for q in one]
            known = distance(one, two)
            found = distance(self.of(one, *arguments), self.of(two, *arguments))
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
                    f"distance {known:.6g} to {found:.6g}. {self._remedy}"
                )


def distance(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Euclidean, of all tensors together, in float64."""
    pairs = zip(ones, others, strict=True)
    parts = [torch.linalg.vector_norm(p.detach().double() - o.detach().double()) for p, o in pairs]
    return math.hypot(*(float(part) for part in parts))


def _random(like: torch.Tensor, size: float, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(like.shape, generator=generator) * (size / math.sqrt(like.numel()))
    return values.to(like.detach())
