"""Criteria of torch as losses of a linear model, and the linear head of a model."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from opacus.utils.module_utils import trainable_modules
from torch import nn

from hidden_state_accountants import LossGeometry, UnsupportedRunError
from hidden_state_accountants.losses import linear
from hidden_state_accountants.losses.linear import LinearLoss
from hidden_state_adapters.opacus.losses import (
    TORCH,
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeHingeLoss,
    EnvelopeLoss,
    EnvelopeSquaredErrorLoss,
)
from hidden_state_adapters.trained_layers import why_not_convex

_LEAVE_OUT = (
    "Leave out criterion= and feature_norm= (and loss_geometry=): every step then counts, whatever "
    "the model and its loss."
)
_DECLARE = (
    f"{_LEAVE_OUT} Or declare the loss of one linear layer yourself, if you proved its constants: "
    "loss_geometry= takes a hidden_state_accountants.LossGeometry."
)
REMEDY = (
    "A loop that maps labels (to -1 and 1, to probabilities, by a scale) passes make_private "
    "targets=, the function of the loader's last tensor that it applies; every record by itself."
)
_ALIKE = 1e-3  # of the length of slopes that are told apart
_PASSIVE = (nn.Flatten, nn.Identity)  # change neither values nor what a record is
_FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.mse_loss: nn.MSELoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
}


# Criteria


def as_module(criterion: Any) -> Any:
    """Returns the criterion as a module of torch.nn, whose attributes say what it computes.

    Functions of torch.nn.functional, also with settings bound by functools.partial, become the
    module of the same loss. nn.NLLLoss, which takes log-probabilities, becomes the cross-entropy
    that it is on the outputs before log_softmax. Everything else is returned as it is.

    Raises:
        UnsupportedRunError: A partial binds an argument by its position, or an unknown one.
    """
    is_partial = isinstance(criterion, functools.partial)
    function, options = (criterion.func, criterion.keywords) if is_partial else (criterion, {})
    kind = next((kind for known, kind in _FUNCTIONS.items() if function is known), None)
    if kind is not None:
        if is_partial and criterion.args:
            raise UnsupportedRunError(
                f"Expected settings of the criterion by keyword, got {len(criterion.args)} by "
                "position in functools.partial. Write partial(F.cross_entropy, "
                "label_smoothing=0.1)."
            )
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


@attrs.frozen(eq=False)
class KnownCriterion:
    """A criterion that is the loss of a linear model.

    Attributes:
        criterion: Module, a copy: what a loop sets later changes nothing.
        loss: Loss of one record.
    """

    criterion: nn.Module
    loss: LinearLoss

    @classmethod
    def of(cls, criterion: Any, outputs: int) -> KnownCriterion:
        """Returns what is known of a criterion of a layer with so many outputs.

        Raises:
            UnsupportedRunError: The loss of a record has no known constants, or depends on others.
        """
        module = as_module(criterion)
        if type(module) not in _KNOWN:
            raise UnsupportedRunError(
                f"criterion= with feature_norm= knows {_KNOWN_NAMES} and their functions in "
                f"torch.nn.functional, got {_name(criterion)}. {_DECLARE}"
            )
        module = copy.deepcopy(module)
        return cls(module, _KNOWN[type(module)](module, outputs))

    @property
    def fields(self) -> dict[str, Any]:
        """Settings of the criterion, in plain types."""
        names = "reduction", "label_smoothing", "delta", "beta", "weight", "pos_weight"
        found = {k: getattr(self.criterion, k) for k in names if hasattr(self.criterion, k)}
        plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
        kept = {k: v for k, v in plain.items() if v is not None}
        return {"type": type(self.criterion).__name__, **kept}

    def takes(self, target: torch.Tensor, output: torch.Tensor) -> bool:
        """Tells whether `target` has a form in which the targets of `output` may come."""
        if not isinstance(self.criterion, nn.CrossEntropyLoss | EnvelopeCrossEntropyLoss):
            return target.numel() == output.numel() and target.shape[:1] == output.shape[:1]
        if target.is_floating_point():
            return target.shape == output.shape
        return target.shape[:1] == output.shape[:1] and target.numel() == len(output)

    def slopes(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the loss of every record in its outputs, shape (n, outputs).

        NaN follows from targets that the loss is not made for.

        Raises:
            TypeError, ValueError: Such targets, of an envelope.
        """
        target, is_target = target.to(output.device), self.loss.is_target
        if isinstance(self.criterion, EnvelopeLoss):
            is_label = target.numel() != output.numel()
            return self.loss.slopes(output, target.reshape(-1 if is_label else output.shape))
        if isinstance(self.criterion, nn.CrossEntropyLoss) and not target.is_floating_point():
            count = output.shape[1]
            labels = target.reshape(-1).long().clamp(-1, count).add_(1)
            target = _one_hot(count, output.dtype, output.device).index_select(0, labels)
            fits = None
        else:
            target = target.to(output.dtype).reshape(output.shape)
            fits = None if is_target is None else is_target(target)
        slopes: torch.Tensor = self.loss.slopes(output, target)
        return slopes if fits is None else slopes.where(fits[:, None], math.nan)


@functools.lru_cache
def _one_hot(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the probabilities that labels from -1 on stand for; of what is no class NaN."""
    rows = torch.eye(count + 2, count, dtype=dtype, device=device).roll(1, dims=0)
    rows[[0, -1]] = math.nan
    return rows


def _cross_entropy(criterion: nn.CrossEntropyLoss, outputs: int) -> LinearLoss:
    if criterion.ignore_index != -100:  # torch's default
        raise UnsupportedRunError(
            f"criterion= needs ignore_index = -100, got {criterion.ignore_index}: ignored records "
            "rescale the others. Remove those records beforehand."
        )
    refuse_weights_of_the_batch(criterion)
    weights = _weights(criterion, "weight", outputs)
    return linear.softmax(TORCH, outputs, smoothing=criterion.label_smoothing, weights=weights)


def _smooth_l1(criterion: nn.SmoothL1Loss, outputs: int) -> LinearLoss:
    beta = criterion.beta
    if not beta > 0:
        raise UnsupportedRunError(
            f"criterion= needs beta > 0, got {beta!r}: the absolute value is not smooth."
        )
    return linear.residual(TORCH, outputs, mean=_is_mean(criterion), scale=1 / beta, width=beta)


def _envelope(criterion: EnvelopeLoss, outputs: int) -> LinearLoss:
    if outputs != 1 and not criterion.takes_several_outputs:
        raise UnsupportedRunError(
            f"criterion= needs one output for {type(criterion).__name__}, got {outputs}. Use a "
            "model with one output, or leave out criterion= and feature_norm=: every step then "
            "counts."
        )
    return LinearLoss(slopes=criterion.slopes, geometry=criterion.geometry)


_KNOWN: dict[type, Callable[[Any, int], LinearLoss]] = {
    nn.CrossEntropyLoss: _cross_entropy,
    nn.BCEWithLogitsLoss: lambda c, k: linear.logistic(
        TORCH,
        k,
        mean=_is_mean(c),
        weights=_weights(c, "weight", k),
        positive=_weights(c, "pos_weight", k),
    ),
    nn.MSELoss: lambda c, k: linear.residual(TORCH, k, mean=_is_mean(c), scale=2.0),
    nn.HuberLoss: lambda c, k: linear.residual(TORCH, k, mean=_is_mean(c), width=c.delta),
    nn.SmoothL1Loss: _smooth_l1,
    EnvelopeCrossEntropyLoss: _envelope,
    EnvelopeBCEWithLogitsLoss: _envelope,
    EnvelopeSquaredErrorLoss: _envelope,
    EnvelopeHingeLoss: _envelope,
}
_KNOWN_NAMES = ", ".join(
    f"{'nn.' if kind.__module__.startswith('torch.') else ''}{kind.__name__}"
    for kind in (*_KNOWN, nn.NLLLoss)
)


def _is_mean(criterion: Any) -> bool:
    return bool(criterion.reduction == "mean")


def _weights(criterion: nn.Module, name: str, outputs: int) -> np.ndarray | None:
    """Returns weights of the outputs in float64, or None.

    Raises:
        UnsupportedRunError: They are not finite, or negative, or weights of something else.
    """
    weight = getattr(criterion, name)
    if weight is None:
        return None
    values: np.ndarray = weight.detach().double().cpu().numpy()
    fits = values.size == 1 or values.shape == (outputs,)
    if not (fits and np.isfinite(values).all() and (values >= 0).all() and values.any()):
        raise UnsupportedRunError(
            f"criterion= needs {name} with one finite number >= 0 for each of the "
            f"{outputs} outputs, not all 0, got shape {values.shape} with values from "
            f"{values.min():g} to {values.max():g}. Weights of single records "
            "belong into the data set, or leave them out."
        )
    return np.full(outputs, values.reshape(-1))


def _name(criterion: Any) -> str:
    if isinstance(criterion, type):
        return f"the type {criterion.__name__} instead of an object"
    return str(getattr(criterion, "__name__", type(criterion).__name__))


def check_reduction(criterion: Any, loss_reduction: str) -> None:
    """Raises UnsupportedRunError if the criterion and Opacus' loss_reduction differ."""
    reduction = getattr(as_module(criterion), "reduction", loss_reduction)
    if reduction == "batchmean":  # nn.KLDivLoss: the mean over the records
        reduction = "mean"
    if reduction != loss_reduction:
        raise UnsupportedRunError(
            f"Expected a criterion with reduction = {loss_reduction!r} (the loss_reduction of "
            f"make_private), got {reduction!r}: per-example gradients would be off by the batch "
            "size. Make the two agree."
        )


def refuse_weights_of_the_batch(criterion: Any) -> None:
    """Raises UnsupportedRunError for a mean over records that their weights divide."""
    module = as_module(criterion)
    is_softmax = isinstance(module, nn.CrossEntropyLoss)
    if is_softmax and module.weight is not None and _is_mean(module):
        raise UnsupportedRunError(
            f"Expected no class weights in a mean, got {type(module).__name__}(weight=...): it is "
            "divided by the weights of all records of the batch, so that the label of one record "
            'rescales all others. Use CrossEntropyLoss(weight=..., reduction="sum") with '
            'make_private(..., loss_reduction="sum") and a learning rate divided by the batch '
            'size; or, without feature_norm=, reduction="none" here, and take the .mean() of the '
            "losses in the loop. The weights must not be computed from the private labels."
        )


# Another loss than the declared one


def diagnosis(
    known: KnownCriterion, output: torch.Tensor, target: torch.Tensor, got: torch.Tensor
) -> str:
    """Describes why the loop's loss is not the declared one, in words that a user recognises.

    Args:
        known: Declared criterion.
        output: Output of the head, shape (rows, outputs).
        target: Targets of the batch that was drawn.
        got: Slopes that the backward pass left, of the loss of a record.
    """
    slopes = known.slopes(output, target)
    if not torch.isfinite(got).all():
        return "its gradients are not finite. Look for a division by 0 or a log of 0"
    is_label = not target.is_floating_point() and output.shape[1] > 1
    if is_label and not ((target >= 0) & (target < output.shape[1])).all():
        return (
            "a target is no class (ignore_index?): ignored records rescale the gradients of the "
            "others. Remove those records beforehand"
        )
    if not torch.isfinite(slopes).all():
        return f"the loss is not made for targets of the batch (no probabilities?). {REMEDY[:-1]}"
    return (
        _broadcast(known, output, target, got)
        or _factors(target, slopes, got, is_label)
        or (_softmax(output, target, slopes, got) if is_label else "")
        or "another loss, a hook, other weights in the training pass, or other targets than those "
        f"of the batch that the loader dealt. {REMEDY[:-1]}"
    )


def _broadcast(
    known: KnownCriterion, output: torch.Tensor, target: torch.Tensor, got: torch.Tensor
) -> str:
    """Describes every output beside the targets of all records."""
    rows = len(got)
    if rows < 2 or output.shape[1] > 1:
        return ""
    sums = sum(known.slopes(output, target.roll(shift, dims=0)) for shift in range(rows))
    if not _are_alike(got, sums / rows):
        return ""
    return (
        "it compares every output with the targets of all records: shapes (b, 1) of the outputs "
        "and (b,) of the targets are broadcast to (b, b). Use target.unsqueeze(1) or "
        "output.squeeze(1)"
    )


def _factors(target: torch.Tensor, slopes: torch.Tensor, got: torch.Tensor, is_label: bool) -> str:
    """Describes rows that have the right direction and another length."""
    squares = (slopes * slopes).sum(dim=1)
    factors = (got * slopes).sum(dim=1) / squares.clamp(min=torch.finfo(squares.dtype).tiny)
    if not _are_alike(got, factors[:, None] * slopes):
        return ""
    rows, told = len(got), squares > 1e-6 * squares.max()
    low, high = float(factors[told].min()), float(factors[told].max())
    if high - low <= _ALIKE * abs(high):
        if rows > 1 and abs(high - rows) < 0.01 * rows:
            return (
                "its gradients are as many times as long as the batch has records, as with "
                'reduction="sum". Use reduction="mean", or make_private(..., loss_reduction="sum")'
            )
        if rows > 1 and abs(high * rows - 1) < 0.01:
            return "its gradients are too short: divided by the number of records twice"
        return (
            f"its gradients are {high:.4g} times as long: a scaled or doubled loss, a GradScaler, "
            "a hook, and at zero weights label_smoothing or a temperature"
        )
    if is_label:
        labels = target.reshape(-1).to(factors.device)
        spread = [factors[told & (labels == k)] for k in labels.unique()]
        if all(float(f.max() - f.min()) <= _ALIKE * high for f in spread if len(f)):
            return (
                "each class is scaled by one number: class weights. Use CrossEntropyLoss(weight="
                '..., reduction="sum") with loss_reduction="sum", and pass it as criterion='
            )
    return f"its rows are scaled by {low:.3g} to {high:.3g}: weights of records, or a hook"


def _softmax(
    output: torch.Tensor, target: torch.Tensor, slopes: torch.Tensor, got: torch.Tensor
) -> str:
    """Describes smoothed labels, or the softmax slopes of other ones."""
    classes = output.shape[1]
    hot = F.one_hot(target.reshape(-1).to(output.device), classes).to(output)
    off, spread = got - slopes, hot - 1 / classes
    smoothing = float((off * spread).sum() / (spread * spread).sum())
    if _are_alike(off, smoothing * spread):
        return f"label_smoothing = {smoothing:.3g}. Pass the criterion that has it"
    probabilities = output.softmax(dim=1)
    other = F.one_hot((got - probabilities).argmin(dim=1), classes).to(output)
    if not _are_alike(got, probabilities - other):
        return ""
    return (
        "the outputs are paired with other targets than those of their records (shuffled, "
        f"flipped, of another batch?): a record would then act in several rows. {REMEDY[:-1]}"
    )


def _are_alike(got: torch.Tensor, expected: torch.Tensor) -> bool:
    norm = torch.linalg.vector_norm
    return bool(norm(got - expected) <= _ALIKE * norm(got))


# Models


def find_linear_head(module: nn.Module) -> nn.Linear | None:
    """Returns the only trainable layer of `module` if it is an nn.Linear, else None."""
    owners = [part for _, part in trainable_modules(module)]
    return owners[0] if len(owners) == 1 and type(owners[0]) is nn.Linear else None


def check_convexity(
    loss: LossGeometry | str | None, module: nn.Module, blocks: Iterable[Iterable[nn.Parameter]]
) -> None:
    """Raises UnsupportedRunError for a convex loss of several trained layers.

    Args:
        loss: Declared loss; "auto" has one layer anyway.
        module: Module without Opacus' wrapper.
        blocks: Parameters that are moved together.
    """
    if not isinstance(loss, LossGeometry):
        return
    owners = [part for _, part in trainable_modules(module)]
    layers = []
    for block in blocks:
        moved = set(block)
        own = [part for part in owners if not moved.isdisjoint(part.parameters(recurse=False))]
        layers.append([type(part).__name__ for part in own])
    if reason := why_not_convex(loss, layers):
        raise UnsupportedRunError(reason)


def auto_loss_geometry(
    module: nn.Module, criterion: Any, feature_norm: float | None, loss_reduction: str = "mean"
) -> LossGeometry:
    """Returns the loss of a linear model trained with `criterion` on features of bounded norm.

    What comes before the layer is frozen: a fixed public map of every record. That the loss is that
    of the layer's output is checked at every step.

    Args:
        module: Module without Opacus' wrapper.
        criterion: Loss that is known, or the function of torch.nn.functional for it. Weights are
            those of outputs; for cross-entropy they need reduction="sum".
        feature_norm: Bound on the L2 norm of every record at the linear layer.
        loss_reduction: Reduction as given to make_private, "mean" or "sum".

    Raises:
        UnsupportedRunError: The constants of the loss are not known.
        TypeError, ValueError: `feature_norm` is not a positive number.
    """
    if criterion is None:
        raise UnsupportedRunError(
            'loss_geometry="auto" needs the criterion of the training loop, got none. Pass '
            "criterion=, or leave out loss_geometry=: every step then counts."
        )
    if feature_norm is None:
        raise UnsupportedRunError(
            'loss_geometry="auto" needs a bound on the norm of the features, got none. Normalise '
            "the records and pass feature_norm=."
        )
    # A LogSoftmax is part of the loss, and changes nothing where it was applied before.
    is_softmax = isinstance(as_module(criterion), nn.CrossEntropyLoss)
    layer = _linear_head(module, (*_PASSIVE, nn.LogSoftmax) if is_softmax else _PASSIVE)
    loss = KnownCriterion.of(criterion, layer.out_features).loss
    check_reduction(criterion, loss_reduction)
    return loss.geometry(feature_norm, layer.bias is not None)


def _linear_head(module: nn.Module, passive: tuple[type, ...]) -> nn.Linear:
    """Returns the linear layer that is all there is to train, and comes last but for `passive`.

    Raises:
        UnsupportedRunError: Something else is trained, or follows the head.
    """
    head = find_linear_head(module)
    frozen = head is not None and any(not p.requires_grad for p in head.parameters())
    if head is None or frozen:
        trained = [type(part).__name__ for _, part in trainable_modules(module)]
        raise UnsupportedRunError(
            "criterion= and feature_norm= need a model in which one whole nn.Linear is trained and "
            "the rest is frozen with requires_grad_(False), got trainable "
            f"{', '.join(trained) or '-'}"
            f"{' with frozen parameters' if frozen else ''}. {_LEAVE_OUT}"
        )
    hooks = (*head._forward_hooks.values(), *head._forward_pre_hooks.values())
    if any(not _is_known_hook(hook) for hook in hooks):
        raise UnsupportedRunError(
            "criterion= and feature_norm= need a linear layer that computes nothing else, got a "
            f"forward hook on Linear. {_DECLARE}"
        )
    after = [type(part).__name__ for part in _after(module, head) if type(part) not in passive]
    if after:
        raise UnsupportedRunError(
            "criterion= and feature_norm= need a model that ends with its linear layer, got "
            f"{', '.join(after)} after it. {_LEAVE_OUT}"
        )
    return head


def _after(module: nn.Module, head: nn.Module) -> list[nn.Module]:
    """Returns what follows `head` in the nn.Sequential containers that hold it."""
    if type(module) is not nn.Sequential:
        return []
    children = list(module)
    for index, child in enumerate(children):
        if any(part is head for part in child.modules()):
            return [*_after(child, head), *children[index + 1 :]]
    return []


def _is_known_hook(hook: Any) -> bool:
    """Tells whether Opacus or this package registered a hook: those leave the values alone."""
    return getattr(hook, "__module__", "").startswith(("opacus.", "hidden_state_adapters."))
