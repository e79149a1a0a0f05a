"""A network with auxiliary variables, whose weights DP-MBCD trains one layer at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import validate

_FEWEST_WIDTHS = 2


class AuxiliaryNetwork(nn.Module):
    r"""Linear layers without bias and ReLU, trained through auxiliary variables of every record.

    Activations :math:`x_{d+1}` and pre-activations :math:`u_d` of a record are variables of their
    own, tied to the network by squares:

    .. math::
        F(W, x, u) = \tfrac12 |W_D x_D - y|^2 + \tfrac{\gamma}{2} \sum_{d < D}
        \Big( |x_{d+1} - \mathrm{relu}(u_d)|^2 + |u_d - W_d x_d|^2 \Big)

    ``model(inputs)`` predicts: :math:`x_{d+1} = \mathrm{relu}(W_d x_d)`, shortened to `radius`.
    ``model(inputs, targets)`` starts there, sets :math:`x_D, \dots, x_1` and then every :math:`u_d`
    to the minimiser of F in it, `sweeps` times, shortens every x, and returns F of every record
    (without the first square of the sum, which has no weights). Its gradient in a layer sees that
    layer's square only. Nothing of a record is kept. Every layer is a block::

        model = AuxiliaryNetwork([64, 32, 10])
        engine = HiddenStatePrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.blocks(), lr=0.5), data_loader=loader,
            noise_multiplier=4.0, max_grad_norm=0.5, batch_order="cyclic",
            mechanism=BlockCoordinate())
        for features, one_hot in loader:
            def closure():
                optimizer.zero_grad()
                model(features, one_hot).mean().backward()
            optimizer.step(closure)

    Formal guarantees: none by itself. What one record does to a layer's update is bounded by the
    clip of the optimizer, and every layer is a mechanism of its own: epsilon is that of composition
    (docs/papers/block_coordinate.md). The bound S_g = gamma rho^2 of the paper is not used: it
    does not hold, because nothing bounds u_d - W_d x_d.

    Args:
        widths: Numbers of inputs, of the units of every hidden layer, and of outputs; at least two.
        radius: rho > 0; longer x are shortened to it. inf shortens none.
        penalty: gamma > 0.
        sweeps: How often the auxiliary variables are minimised, one after the other; >= 1.

    Raises:
        TypeError, ValueError: An argument has an impossible value.

    Source: Chen & Liu 2025 (arXiv 2407.08233), Problem (4) and Algorithm 4; (10) is Lemma 13 of
        Zeng et al. 2019 (arXiv 1803.00225). The variables start at the forward pass of every step,
        where the paper keeps them from epoch to epoch.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        radius: float = 1.0,
        penalty: float = 1.0,
        sweeps: int = 1,
    ):
        super().__init__()
        sizes = [validate.integer("widths", width, minimum=1) for width in widths]
        if len(sizes) < _FEWEST_WIDTHS:
            raise ValueError(
                f"Expected widths of inputs and outputs at least, got {widths!r}. Write for "
                "example [64, 32, 10]."
            )
        self.radius = validate.real("radius", radius, above=0, allow_inf=True)
        self.penalty = validate.magnitude("penalty", penalty, positive=True)
        self.sweeps = validate.integer("sweeps", sweeps, minimum=1)
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(m, n, bias=False) for m, n in pairs)

    def blocks(self) -> list[dict[str, Any]]:
        """One parameter group for each layer, for `torch.optim.SGD`."""
        return [{"params": [layer.weight]} for layer in self.layers]

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Predictions, shape (n, outputs); with `targets` of that shape F of every record, (n,)."""
        if targets is None:
            x = self._shortened(inputs.flatten(1))
            for layer in self.layers[:-1]:
                x = self._shortened(torch.relu(layer(x)))
            return self.layers[-1](x)
        with torch.no_grad():
            x, u = self._auxiliary(inputs.flatten(1), targets)
        aims, weights = [*u, targets], [self.penalty] * len(u) + [1.0]
        parts = zip(self.layers, x, aims, weights, strict=True)
        return sum(w / 2 * (layer(v) - aim).square().sum(dim=1) for layer, v, aim, w in parts)

    def _shortened(self, x: torch.Tensor) -> torch.Tensor:
        if self.radius == math.inf:
            return x
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return x * (self.radius / norms.clamp(min=self.radius))

    def _auxiliary(
        self, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """x_0 to x_D and u_0 to u_{D-1} of every record."""
        weights = [layer.weight.detach() for layer in self.layers]
        last = len(weights) - 1
        x, u = [self._shortened(inputs)], []
        for weight in weights[:-1]:
            u.append(x[-1] @ weight.T)
            x.append(self._shortened(torch.relu(u[-1])))
        for _ in range(self.sweeps):
            for d in range(last, 0, -1):
                aim, ratio = (targets, 1 / self.penalty) if d == last else (u[d], 1.0)
                x[d] = self._shortened(_tied(weights[d], aim, torch.relu(u[d - 1]), ratio))
            for d in range(last):
                u[d] = _before_relu(x[d] @ weights[d].T, x[d + 1])
        return x, u


def _tied(
    weight: torch.Tensor, aim: torch.Tensor, near: torch.Tensor, ratio: float
) -> torch.Tensor:
    r"""The x with the least :math:`ratio |W x - aim|^2 + |x - near|^2`, row by row; (11)."""
    square = ratio * weight.T @ weight
    square.diagonal().add_(1.0)
    right = ratio * aim @ weight + near
    return torch.linalg.solve(square, right, left=False)


def _before_relu(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    r"""The u with the least :math:`(after - relu(u))^2 + (u - before)^2`, by number; (10)."""
    low, high = before.clamp(max=0.0), ((before + after) / 2).clamp(min=0.0)
    of_low = after.square() + (low - before).square()
    of_high = (after - high).square() + (high - before).square()
    return torch.where(of_low <= of_high, low, high)
