"""The gradients at hand, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import nn

from hidden_state_adapters.opacus.gradients.figures import Figure


class Gradients(Protocol):
    """The gradients of every record of (a piece of) a batch, as far as a step needs them."""

    def norms(self, params: Sequence[nn.Parameter]) -> torch.Tensor:
        """The norms of the gradients for all `params` together, shape (rows,)."""
        ...

    def add_sums(
        self, params: Sequence[nn.Parameter], weights: torch.Tensor, *others: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """Adds the sums of the gradients, each times its weight, to `summed_grad`.

        Args:
            params: Parameters whose gradients are added up.
            weights: Shape (rows,), made from the norms.
            *others: Further weights.

        Returns:
            For each of `params` the sums with each of `others`.
        """
        ...


@attrs.define(eq=False)
class Piece:
    """The gradients at hand: of a batch or, under BatchMemoryManager, of a piece of one.

    Attributes:
        step: The number of the logical step that it belongs to, from 1 on.
        params: The parameters whose gradients these are: all, or those of one block.
        block: The number of the block, from 0 on; 0 for an optimizer that has one.
        rows: Records.
        gradients: Gradients of the records; None where Opacus clips and adds them up.
        known_norms: Norms of the gradients before the clip, shape (rows,); None until they are
            computed.
    """

    step: int
    params: Sequence[nn.Parameter]
    block: int = 0
    rows: int = 0
    gradients: Gradients | None = None
    known_norms: torch.Tensor | None = None

    @property
    def norms(self) -> torch.Tensor:
        """The norms of the gradients before the clip, shape (rows,)."""
        if self.known_norms is None:
            assert self.gradients is not None
            self.known_norms = self.gradients.norms(self.params)
        return self.known_norms

    def add_sums(self, weights: torch.Tensor, *others: torch.Tensor) -> list[list[torch.Tensor]]:
        """See `Gradients.add_sums`."""
        assert self.gradients is not None
        return self.gradients.add_sums(self.params, weights, *others)

    @property
    def largest_norm(self) -> Figure:
        """The largest of the norms; 0 for no rows."""
        return self.norms.max() if self.rows else 0.0
