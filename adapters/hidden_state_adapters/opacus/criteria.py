"""Criteria that `loss_geometry="auto"` knows: their constants, and their gradients in the output.

Derivations: docs/theory/moduli.md, "Losses of a linear model".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from hidden_state_accountants import LossGeometry, UnsupportedRunError
from hidden_state_adapters.opacus.losses import (
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeHingeLoss,
    EnvelopeSquaredErrorLoss,
)

_SETTINGS = ("reduction", "label_smoothing", "delta", "beta")
_PROBABILITY_SLACK = 1e-5  # rounding of a sum of probabilities

_MODULES: dict[Callable[..., Any], type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.mse_loss: nn.MSELoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
}


def as_module(criterion: Any) -> Any:
    """The criterion as a module of torch.nn, whose attributes say what it computes.

    Functions of torch.nn.functional, also with settings bound by functools.partial, become the
    module of the same loss. nn.NLLLoss, which takes log-probabilities, becomes the cross-entropy
    that it is on the outputs before log_softmax. Everything else is returned as it is.

    Raises:
        UnsupportedRunError: A partial binds an argument by its position.
    """
    options: dict[str, Any] = {}
    function: Any = criterion
    if isinstance(criterion, functools.partial) and _module_of(criterion.func) is not None:
        if criterion.args:
            raise UnsupportedRunError(
                f"Expected settings of the criterion by keyword, got {len(criterion.args)} by "
                "position in functools.partial. Write partial(F.cross_entropy, "
                "label_smoothing=0.1)."
            )
        function, options = criterion.func, dict(criterion.keywords)
    kind = _module_of(function)
    if kind is not None:
        try:
            criterion = kind(**options)
        except TypeError as error:
            raise UnsupportedRunError(
                f"Expected settings that nn.{kind.__name__} knows, got {sorted(options)} for the "
                f"function {function.__name__}: {error}. Leave the others out."
            ) from None
    if type(criterion) is nn.NLLLoss:
        return nn.CrossEntropyLoss(
            weight=criterion.weight,
            ignore_index=criterion.ignore_index,
            reduction=criterion.reduction,
        )
    return criterion


def _module_of(function: Any) -> type[nn.Module] | None:
    return next((kind for known, kind in _MODULES.items() if function is known), None)


@attrs.frozen(eq=False)
class KnownCriterion:
    """What is known of one criterion.

    Attributes:
        criterion: As a module.
    """

    criterion: Any

    @property
    def fields(self) -> dict[str, Any]:
        """What it computes, in plain types."""
        found = {k: getattr(self.criterion, k) for k in _SETTINGS if hasattr(self.criterion, k)}
        weights = {k: getattr(self.criterion, k, None) for k in ("weight", "pos_weight")}
        given = {k: weight.tolist() for k, weight in weights.items() if weight is not None}
        return {"type": type(self.criterion).__name__, **found, **given}

    def geometry(self, norm: float, bias: bool, outputs: int) -> LossGeometry:
        """The loss of a record, as a function of the parameters of a linear layer.

        Raises:
            UnsupportedRunError: The loss of a record has no constants, or depends on others.
        """
        raise NotImplementedError

    def share(self, outputs: int) -> float:
        """What the loss of a record divides the sum over its outputs by."""
        return float(outputs) if self.criterion.reduction == "mean" else 1.0

    def gradient(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Of the sum of the losses of all outputs, shape (n, outputs); NaN at forbidden targets."""
        raise NotImplementedError

    def takes(self, target: torch.Tensor, output: torch.Tensor) -> bool:
        """Whether `target` has a form in which the targets of `output` may come."""
        return target.numel() == output.numel() and target.shape[:1] == output.shape[:1]

    def slopes(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss of every record in its outputs, shape (n, outputs).

        Args:
            output: Of the linear layer, shape (n, outputs), float32 or float64.
            target: What `takes` takes. NaN follows from targets that the loss is not made for.

        Raises:
            TypeError, ValueError: Such targets, of a loss that looks at them by itself.
        """
        gradient = self.gradient(output, target.to(output).reshape(output.shape))
        share = self.share(output.shape[1])
        return gradient if share == 1 else gradient / share


class _OfClasses(KnownCriterion):
    """A loss of class indices or of probabilities."""

    def takes(self, target: torch.Tensor, output: torch.Tensor) -> bool:
        """See `KnownCriterion.takes`."""
        if target.is_floating_point():
            return target.shape == output.shape
        return target.shape[:1] == output.shape[:1] and target.numel() == len(output)


class SoftmaxCriterion(_OfClasses):
    """nn.CrossEntropyLoss: with targets t and weights w the softmax p has gradient s p - w t."""

    def geometry(self, norm: float, bias: bool, outputs: int) -> LossGeometry:
        """See `KnownCriterion.geometry`."""
        criterion, default = self.criterion, nn.CrossEntropyLoss().ignore_index
        if criterion.ignore_index != default:
            raise UnsupportedRunError(
                f"criterion= needs ignore_index = {default}, got "
                f"{criterion.ignore_index}: ignored records rescale the others. Remove those "
                "records beforehand."
            )
        weight = _weights(criterion, "weight", (outputs,))
        if weight is not None and criterion.reduction == "mean":
            raise UnsupportedRunError(
                'Expected reduction = "sum" of a CrossEntropyLoss with class weights, got "mean": '
                "torch then divides by the sum of the weights of the batch, so that the label of "
                'one record rescales all others. Use CrossEntropyLoss(weight=..., reduction="sum") '
                'with make_private(..., loss_reduction="sum") and a learning rate divided by the '
                "batch size. The weights must not be computed from the private labels."
            )
        largest = 1.0 if weight is None else float(weight.max())
        return _scaled(LossGeometry.softmax_cross_entropy(norm, bias), largest)

    def share(self, outputs: int) -> float:
        """One loss for all outputs."""
        return 1.0

    def slopes(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """See `KnownCriterion.slopes`; a label that is no class is taken for none."""
        criterion = self.criterion
        if not target.is_floating_point():
            classes = torch.arange(output.shape[1], device=output.device)
            is_label = target.to(output.device).reshape(-1, 1) == classes
            if criterion.weight is None and not criterion.label_smoothing:
                return output.softmax(dim=1).sub_(is_label.to(output.dtype))
            target = is_label
        return self.gradient(output, target.to(output))

    def gradient(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """See `KnownCriterion.gradient`; targets are probabilities."""
        weight, smoothing = self.criterion.weight, self.criterion.label_smoothing
        weighted = (1 - smoothing) * target + smoothing / output.shape[1]
        if weight is not None:
            weighted = weighted * weight.to(output)
        gradient = output.softmax(dim=1) * weighted.sum(dim=1, keepdim=True) - weighted
        off = (target.sum(dim=1) - 1).abs() > _PROBABILITY_SLACK
        is_forbidden = off | (target < 0).any(dim=1)
        return torch.where(is_forbidden[:, None], math.nan, gradient)


class LogisticCriterion(KnownCriterion):
    """nn.BCEWithLogitsLoss: one or several labels for each record."""

    def geometry(self, norm: float, bias: bool, outputs: int) -> LossGeometry:
        """See `KnownCriterion.geometry`."""
        shape = (outputs,)
        largest = torch.ones(outputs, dtype=torch.float64)
        positive = _weights(self.criterion, "pos_weight", shape)
        if positive is not None:
            largest = largest * positive.clamp(min=1)
        weight = _weights(self.criterion, "weight", shape)
        if weight is not None:
            largest = largest * weight
        one = LossGeometry.logistic(norm, bias)
        if outputs == 1:
            return _scaled(one, float(largest.max()))
        return _sum_of(one, largest / self.share(outputs))

    def gradient(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """See `KnownCriterion.gradient`; targets are in [0, 1]."""
        weight, positive = self.criterion.weight, self.criterion.pos_weight
        down, up = (1 - target) * output.sigmoid(), target * (-output).sigmoid()
        gradient = down - (up if positive is None else positive.to(output) * up)
        if weight is not None:
            gradient = weight.to(output) * gradient
        return torch.where((target >= 0) & (target <= 1), gradient, math.nan)


class ResidualCriterion(KnownCriterion):
    r"""A loss l(v) of v = prediction minus target, with l'(v) = c clamp(v, -w, w) of each output.

    nn.MSELoss has c = 2 and no w, nn.HuberLoss c = 1 and w = delta, nn.SmoothL1Loss c = 1/beta and
    w = beta.
    """

    @property
    def _shape(self) -> tuple[float, float]:
        """c and w."""
        criterion = self.criterion
        if isinstance(criterion, nn.MSELoss):
            return 2.0, math.inf
        if isinstance(criterion, nn.HuberLoss):
            return 1.0, criterion.delta
        if not criterion.beta > 0:
            raise UnsupportedRunError(
                f"criterion= needs beta > 0, got {criterion.beta!r}: the absolute value "
                "is not smooth."
            )
        return 1 / criterion.beta, criterion.beta

    def geometry(self, norm: float, bias: bool, outputs: int) -> LossGeometry:
        """See `KnownCriterion.geometry`."""
        (curvature, width), share = self._shape, self.share(outputs)
        if width == math.inf:
            return LossGeometry.squared_error(norm, bias, scale=curvature / share)
        one = _scaled(LossGeometry.huber(norm, width, bias), curvature)
        return one if outputs == 1 else _sum_of(one, torch.ones(outputs) / share)

    def gradient(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """See `KnownCriterion.gradient`."""
        curvature, width = self._shape
        return curvature * (output - target).clamp(-width, width)


class EnvelopeCriterion(KnownCriterion):
    """A loss of `losses`, which knows its constants and checks its targets by itself."""

    def geometry(self, norm: float, bias: bool, outputs: int) -> LossGeometry:
        """See `KnownCriterion.geometry`."""
        if outputs != 1 and not self.criterion.takes_several_outputs:
            raise UnsupportedRunError(
                f"criterion= needs one output for {type(self.criterion).__name__}, got "
                f"{outputs}. Use a model with one output, or leave out criterion= and "
                "feature_norm=: every step then counts."
            )
        geometry: LossGeometry = self.criterion.geometry(norm, bias)
        return geometry

    def slopes(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """See `KnownCriterion.slopes`."""
        is_label = target.numel() != output.numel()
        target = target.to(output.device).reshape(-1 if is_label else output.shape)
        slopes: torch.Tensor = self.criterion.slopes(output, target)
        return slopes


class SoftmaxEnvelope(_OfClasses, EnvelopeCriterion):
    """EnvelopeCrossEntropyLoss."""


_KNOWN: dict[type, type[KnownCriterion]] = {
    nn.CrossEntropyLoss: SoftmaxCriterion,
    nn.BCEWithLogitsLoss: LogisticCriterion,
    nn.MSELoss: ResidualCriterion,
    nn.HuberLoss: ResidualCriterion,
    nn.SmoothL1Loss: ResidualCriterion,
    EnvelopeCrossEntropyLoss: SoftmaxEnvelope,
    EnvelopeBCEWithLogitsLoss: EnvelopeCriterion,
    EnvelopeSquaredErrorLoss: EnvelopeCriterion,
    EnvelopeHingeLoss: EnvelopeCriterion,
}

KNOWN_NAMES = ", ".join(
    f"{'nn.' if kind.__module__.startswith('torch.') else ''}{kind.__name__}"
    for kind in (*_KNOWN, nn.NLLLoss)
)


def known_criterion(criterion: Any) -> KnownCriterion | None:
    """What is known of a criterion, or None.

    Raises:
        UnsupportedRunError: As `as_module`.
    """
    module = as_module(criterion)
    kind = _KNOWN.get(type(module))
    return None if kind is None else kind(module)


def _scaled(loss: LossGeometry, factor: float) -> LossGeometry:
    """The geometry of `factor` times the loss."""
    assert loss.lipschitz is not None
    return attrs.evolve(
        loss, smoothness=factor * loss.smoothness, lipschitz=factor * loss.lipschitz
    )


def _sum_of(one: LossGeometry, factors: torch.Tensor) -> LossGeometry:
    """The geometry of a sum over outputs with parameters of their own, of factors times a loss."""
    assert one.lipschitz is not None
    return LossGeometry.convex(
        float(factors.max()) * one.smoothness,
        float(torch.linalg.vector_norm(factors, dtype=torch.float64)) * one.lipschitz,
    )


def _weights(criterion: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Weights of the outputs in float64, or None.

    Raises:
        UnsupportedRunError: They are not finite, or negative, or weights of something else.
    """
    weight = getattr(criterion, name)
    if weight is None:
        return None
    values = weight.detach().to(device="cpu", dtype=torch.float64)
    fits = values.numel() == 1 or tuple(values.shape) == shape
    if not (fits and torch.isfinite(values).all() and (values >= 0).all() and values.any()):
        raise UnsupportedRunError(
            f"criterion= needs {name} with one finite number >= 0 for each of the "
            f"{shape[0]} outputs, not all 0, got shape {tuple(values.shape)} with values from "
            f"{float(values.min()):g} to {float(values.max()):g}. Weights of single records "
            "belong into the data set, or leave them out."
        )
    return values.expand(shape)
