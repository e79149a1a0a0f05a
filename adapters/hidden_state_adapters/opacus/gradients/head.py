"""The per-example gradients of a linear head: products of what went in and of the loss' slopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import nn

from hidden_state_adapters.opacus.gradients.norms import norms_of_norms, row_norms, to_precision
from hidden_state_adapters.opacus.gradients.precision import exact_products


@attrs.define(eq=False)
class HeadGradients:
    """Of record i the gradient in the weights is the outer product of slopes_i and features_i.

    Attributes:
        head: The linear layer.
        features: What went in, shape (rows, features).
        slopes: The gradient of the loss of every record in its outputs, shape (rows, outputs).
        feature_norms: Shape (rows,).
        slope_norms: Shape (rows,).
    """

    head: nn.Linear
    features: torch.Tensor
    slopes: torch.Tensor
    feature_norms: torch.Tensor = attrs.field(init=False)
    slope_norms: torch.Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.feature_norms, self.slope_norms = row_norms(self.features), row_norms(self.slopes)

    def norms(self, params: Sequence[nn.Parameter]) -> torch.Tensor:
        """The norms of the gradients for all `params` of the layer together, shape (rows,)."""
        if len(params) == 2:
            return self.slope_norms * torch.hypot(
                self.feature_norms, torch.ones_like(self.feature_norms)
            )
        parts = [
            self.slope_norms * self.feature_norms if p is self.head.weight else self.slope_norms
            for p in params
        ]
        return norms_of_norms(parts)

    def add_sums(
        self, params: Sequence[nn.Parameter], weights: torch.Tensor, *others: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """See `piece.Gradients.add_sums`."""
        with exact_products(self.features.device.type):
            totals, *rests = (self._sums(params, each) for each in (weights, *others))
        for param, total in zip(params, totals, strict=True):
            holder: Any = param
            holder.summed_grad = total if holder.summed_grad is None else holder.summed_grad + total
        return [list(sums) for sums in zip(*rests, strict=True)] or [[] for _ in params]

    def _sums(self, params: Sequence[nn.Parameter], weights: torch.Tensor) -> list[torch.Tensor]:
        slopes = self.slopes * to_precision(weights, self.slopes.dtype)[:, None]
        return [
            slopes.T @ self.features if p is self.head.weight else slopes.sum(dim=0) for p in params
        ]
