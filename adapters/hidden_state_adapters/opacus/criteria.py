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
from hidden_state_adapters.opacus.losses import TORCH, EnvelopeCrossEntropyLoss, EnvelopeLoss
from hidden_state_adapters.trained_layers import why_not_convex

REMEDY = (
    "A loop that maps labels (to -1 and 1, to probabilities, by a scale) passes make_private "
    "targets=, the function of the loader's last tensor that it applies; every record by itself."
)
_COMPOSE = "Leave out criterion= and feature_norm= (and loss_geometry=): every step then counts."
_PASSIVE = (nn.Flatten, nn.Identity)  # change neither values nor what a record is
_ALIKE = 1e-3  # of the length of slopes that are told apart
_FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.mse_loss: nn.MSELoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
}
_KNOWN_NAMES = ", ".join(f"nn.{kind.__name__}" for kind in _FUNCTIONS.values())


# Criteria


def as_module(criterion: Any) -> Any:
    """Returns the criterion as a module of torch.nn, whose attributes say what it computes.

    Functions of torch.nn.functional, also with settings bound by functools.partial, become the
    module of the same loss. nn.NLLLoss, which takes log-probabilities, becomes the cross-entropy
    that it is on the outputs before log_softmax. Everything else is returned as it is.
    """
    function, options = criterion, {}
    if isinstance(criterion, functools.partial) and not criterion.args:
        function, options = criterion.func, criterion.keywords
    kind = next((kind for known, kind in _FUNCTIONS.items() if function is known), None)
    module = criterion if kind is None else kind(**options)
    if type(module) is nn.NLLLoss:
        names = "weight", "ignore_index", "reduction"
        return nn.CrossEntropyLoss(**{name: getattr(module, name) for name in names})
    return module


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
        module = copy.deepcopy(as_module(criterion))
        return cls(module, _linear_loss(module, outputs))

    @property
    def fields(self) -> dict[str, Any]:
        """Settings of the criterion, in plain types."""
        names = "reduction", "label_smoothing", "delta", "beta", "weight", "pos_weight"
        found = {k: getattr(self.criterion, k, None) for k in names}
        plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
        kept = {k: v for k, v in plain.items() if v is not None}
        return {"type": type(self.criterion).__name__, **kept}

    def takes(self, target: torch.Tensor, output: torch.Tensor) -> bool:
        """Tells whether `target` has a form in which the targets of `output` may come."""
        has_labels = isinstance(self.criterion, nn.CrossEntropyLoss | EnvelopeCrossEntropyLoss)
        if has_labels and target.is_floating_point():
            return target.shape == output.shape
        count = len(output) if has_labels else output.numel()
        return target.shape[:1] == output.shape[:1] and target.numel() == count

    def slopes(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the loss of every record in its outputs, shape (n, outputs).

        NaN follows from targets that the loss is not made for.

        Raises:
            TypeError, ValueError: Such targets, of an envelope.
        """
        target = target.to(output.device)
        if isinstance(self.criterion, EnvelopeLoss):
            is_label = target.numel() != output.numel()
            return self.loss.slopes(output, target.reshape(-1 if is_label else output.shape))
        if isinstance(self.criterion, nn.CrossEntropyLoss) and not target.is_floating_point():
            count = output.shape[1]
            labels = target.reshape(-1).long().clamp(-1, count).add_(1)
            rows = _one_hot(count, output.dtype, output.device).index_select(0, labels)
            return self.loss.slopes(output, rows)
        target = target.to(output.dtype).reshape(output.shape)
        slopes: torch.Tensor = self.loss.slopes(output, target)
        if self.loss.is_target is None:
            return slopes
        return slopes.where(self.loss.is_target(target)[:, None], math.nan)


@functools.lru_cache
def _one_hot(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the probabilities that labels from -1 on stand for; of what is no class NaN."""
    rows = torch.eye(count + 2, count, dtype=dtype, device=device).roll(1, dims=0)
    rows[[0, -1]] = math.nan
    return rows


def _linear_loss(c: Any, outputs: int) -> LinearLoss:
    """Returns the loss of one record of a layer with so many outputs."""
    kind, is_mean = type(c), getattr(c, "reduction", "") == "mean"
    if kind is nn.CrossEntropyLoss:
        if c.ignore_index != -100:  # torch's default
            raise UnsupportedRunError(
                f"criterion= needs ignore_index = -100, got {c.ignore_index}: ignored records "
                "rescale the others. Remove those records beforehand."
            )
        refuse_weights_of_the_batch(c)
        weights = _weights(c, "weight", outputs)
        return linear.softmax(TORCH, outputs, smoothing=c.label_smoothing, weights=weights)
    if kind is nn.BCEWithLogitsLoss:
        weights, positive = (_weights(c, name, outputs) for name in ("weight", "pos_weight"))
        return linear.logistic(TORCH, outputs, mean=is_mean, weights=weights, positive=positive)
    if kind is nn.MSELoss:
        return linear.residual(TORCH, outputs, mean=is_mean, scale=2.0)
    if kind is nn.HuberLoss:
        return linear.residual(TORCH, outputs, mean=is_mean, width=c.delta)
    if kind is nn.SmoothL1Loss and c.beta > 0:  # else it is the absolute value
        return linear.residual(TORCH, outputs, mean=is_mean, scale=1 / c.beta, width=c.beta)
    if isinstance(c, EnvelopeLoss) and (outputs == 1 or c.takes_several_outputs):
        return LinearLoss(slopes=c.slopes, geometry=c.geometry)
    raise UnsupportedRunError(
        f"criterion= with feature_norm= knows {_KNOWN_NAMES}, their functions in "
        f"torch.nn.functional and the envelope losses, got {c!r} of {outputs} outputs. {_COMPOSE}"
    )


def _weights(criterion: nn.Module, name: str, outputs: int) -> np.ndarray | None:
    """Returns weights of the outputs in float64, or None; raises for weights of something else."""
    weight = getattr(criterion, name)
    if weight is None:
        return None
    values: np.ndarray = weight.detach().double().cpu().numpy()
    fits = values.size == 1 or values.shape == (outputs,)
    if not (fits and np.isfinite(values).all() and (values >= 0).all() and values.any()):
        raise UnsupportedRunError(
            f"criterion= needs {name} with a finite number >= 0 for each of the {outputs} outputs, "
            f"not all 0, got {values.tolist()!r}. Weights of single records belong into the data "
            "set."
        )
    return np.full(outputs, values.reshape(-1))


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
    if (
        isinstance(module, nn.CrossEntropyLoss)
        and module.weight is not None
        and module.reduction == "mean"
    ):
        raise UnsupportedRunError(
            f"Expected no class weights in a mean, got {type(module).__name__}(weight=...): the "
            "label of one record rescales all others. Use CrossEntropyLoss(weight=..., "
            'reduction="sum") with make_private(..., loss_reduction="sum") and a learning rate '
            "divided by the batch size."
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
    if not torch.isfinite(slopes).all():
        return (
            "the loss is not made for targets of the batch, its last tensor that fits (no class, "
            f"as with ignore_index or numbers of records; no probabilities). {REMEDY[:-1]}"
        )
    labels = None
    if not target.is_floating_point() and output.shape[1] > 1:
        labels = target.reshape(-1).to(output.device)
    return (
        _factors(labels, slopes, got)
        or ("" if labels is None else _other_labels(output, labels, slopes, got))
        or "another loss, a hook, other weights in the training pass, or other targets than those "
        f"of the batch that the loader dealt. {REMEDY[:-1]}"
    )


def _factors(labels: torch.Tensor | None, slopes: torch.Tensor, got: torch.Tensor) -> str:
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
        return f"its gradients are {high:.4g} times as long: a scaled or doubled loss, or a hook"
    if labels is not None:
        of_classes = [factors[told & (labels == k)] for k in labels[told].unique()]
        if all(float(f.max() - f.min()) <= _ALIKE * high for f in of_classes):
            return (
                "each class is scaled by one number: class weights. Use CrossEntropyLoss(weight="
                '..., reduction="sum") with loss_reduction="sum", and pass it as criterion='
            )
    return f"its rows are scaled by {low:.3g} to {high:.3g}: weights of records, or a hook"


def _other_labels(
    output: torch.Tensor, labels: torch.Tensor, slopes: torch.Tensor, got: torch.Tensor
) -> str:
    """Describes smoothed labels, or the softmax slopes of other ones."""
    classes = output.shape[1]
    off, spread = got - slopes, F.one_hot(labels, classes).to(output) - 1 / classes
    smoothing = float((off * spread).sum() / (spread * spread).sum())
    if _are_alike(off, smoothing * spread):
        return f"label_smoothing = {smoothing:.3g}. Pass the criterion that has it"
    probabilities = output.softmax(dim=1)
    others = F.one_hot((got - probabilities).argmin(dim=1), classes).to(output)
    if not _are_alike(got, probabilities - others):
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
    """Raises UnsupportedRunError for a convex loss of several layers that are moved together."""
    if not isinstance(loss, LossGeometry):  # "auto" has one layer
        return
    owners = [(part, set(part.parameters(recurse=False))) for _, part in trainable_modules(module)]
    layers = [
        [type(part).__name__ for part, own in owners if not own.isdisjoint(block)]
        for block in map(set, blocks)
    ]
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
    head = find_linear_head(module)
    if head is None or not all(p.requires_grad for p in head.parameters()):
        trained = [type(part).__name__ for _, part in trainable_modules(module)]
        raise UnsupportedRunError(
            "criterion= and feature_norm= need a model in which one whole nn.Linear is trained and "
            "the rest is frozen with requires_grad_(False), got trainable "
            f"{', '.join(trained) or '-'}{'' if head is None else ' in part'}. {_COMPOSE}"
        )
    hooks = (*head._forward_hooks.values(), *head._forward_pre_hooks.values())
    if not all(map(_is_known_hook, hooks)):
        raise UnsupportedRunError(
            "criterion= and feature_norm= need a linear layer that computes nothing else, got a "
            f"forward hook on Linear. {_COMPOSE}"
        )
    known = KnownCriterion.of(criterion, head.out_features)
    # A LogSoftmax is part of the loss, and changes nothing where it was applied before.
    is_softmax = isinstance(known.criterion, nn.CrossEntropyLoss)
    passive = (*_PASSIVE, nn.LogSoftmax) if is_softmax else _PASSIVE
    after = [type(part).__name__ for part in _after(module, head) if type(part) not in passive]
    if after:
        raise UnsupportedRunError(
            "criterion= and feature_norm= need a model that ends with its linear layer, got "
            f"{', '.join(after)} after it. {_COMPOSE}"
        )
    check_reduction(criterion, loss_reduction)
    return known.loss.geometry(feature_norm, head.bias is not None)  # type: ignore[arg-type]


def _after(module: nn.Module, head: nn.Module) -> list[nn.Module]:
    """Returns what follows `head` in the nn.Sequential containers that hold it."""
    if type(module) is not nn.Sequential:
        return []
    children = list(module)
    places = [k for k, child in enumerate(children) if any(p is head for p in child.modules())]
    return [*_after(children[places[0]], head), *children[places[0] + 1 :]]


def _is_known_hook(hook: Any) -> bool:
    """Tells whether Opacus or this package registered a hook: those leave the values alone."""
    return getattr(hook, "__module__", "").startswith(("opacus.", "hidden_state_adapters."))
