"""`loss_geometry="auto"`: what a linear model and a known criterion say about the loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opacus.utils.module_utils import trainable_modules
from torch import nn

from hidden_state_accountants import LossGeometry, UnsupportedRunError
from hidden_state_adapters.opacus.criteria import (
    KNOWN_NAMES,
    SoftmaxCriterion,
    as_module,
    known_criterion,
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
_PASSIVE = (nn.Flatten, nn.Identity)  # change neither values nor what a record is
# Is part of the loss, and changes nothing where it was applied before.
_PASSIVE_BEFORE_SOFTMAX = (*_PASSIVE, nn.LogSoftmax)


def find_linear_head(module: nn.Module) -> nn.Linear | None:
    """The only trainable layer of `module` if it is an nn.Linear, else None."""
    owners = [part for _, part in trainable_modules(module)]
    return owners[0] if len(owners) == 1 and type(owners[0]) is nn.Linear else None


def check_convexity(
    loss: LossGeometry | str | None, module: nn.Module, blocks: Iterable[Iterable[nn.Parameter]]
) -> None:
    """Raises UnsupportedRunError for a convex loss of several trained layers.

    Args:
        loss: As declared; "auto" has one layer anyway.
        module: The module itself, not Opacus' wrapper.
        blocks: The parameters that are moved together.
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


def linear_head(module: nn.Module, passive: Iterable[type] = _PASSIVE) -> nn.Linear:
    """The linear layer that is all there is to train in `module`, and comes last.

    What comes before it is frozen: a fixed public map of every record. That the loss is that of the
    head's output is checked at every step (`head.run.KnownHeadRun`).

    Args:
        module: The module itself, not Opacus' wrapper.
        passive: What may follow in an nn.Sequential.

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
    """What follows `head` in the nn.Sequential containers that hold it."""
    if type(module) is not nn.Sequential:
        return []
    children = list(module)
    for index, child in enumerate(children):
        if any(part is head for part in child.modules()):
            return [*_after(child, head), *children[index + 1 :]]
    return []


def _is_known_hook(hook: Any) -> bool:
    """Whether Opacus or this package registered a hook: those leave the values alone."""
    return getattr(hook, "__module__", "").startswith(("opacus.", "hidden_state_adapters."))


def auto_loss_geometry(
    module: nn.Module, criterion: Any, feature_norm: float | None, loss_reduction: str = "mean"
) -> LossGeometry:
    """The loss of a linear model trained with `criterion` on features of bounded norm.

    Constants: docs/theory/moduli.md, "Losses of a linear model".

    Args:
        module: The module itself, not Opacus' wrapper.
        criterion: nn.CrossEntropyLoss, nn.NLLLoss (behind log_softmax), nn.BCEWithLogitsLoss,
            nn.MSELoss, nn.HuberLoss or nn.SmoothL1Loss, or the function of torch.nn.functional for
            it, with any number of outputs; EnvelopeCrossEntropyLoss or EnvelopeSquaredErrorLoss, or
            with one output EnvelopeBCEWithLogitsLoss or EnvelopeHingeLoss. Weights are those of
            outputs; for cross-entropy they need reduction="sum". The loop must use this loss, with
            targets that are class indices or probabilities.
        feature_norm: Bound on the L2 norm of every record at the linear layer.
        loss_reduction: "mean" or "sum", as given to make_private.

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
    known = known_criterion(criterion)
    is_softmax = isinstance(known, SoftmaxCriterion)
    layer = linear_head(module, _PASSIVE_BEFORE_SOFTMAX if is_softmax else _PASSIVE)
    if known is None:
        raise UnsupportedRunError(
            f"criterion= with feature_norm= knows {KNOWN_NAMES} and their functions in "
            f"torch.nn.functional, got {_name(criterion)}. {_DECLARE}"
        )
    check_reduction(criterion, loss_reduction)
    return known.geometry(feature_norm, layer.bias is not None, layer.out_features)


def _name(criterion: Any) -> str:
    if isinstance(criterion, type):
        return f"the type {criterion.__name__} instead of an object"
    return str(getattr(criterion, "__name__", type(criterion).__name__))


def check_reduction(criterion: Any, loss_reduction: str) -> None:
    """Raises UnsupportedRunError if the criterion and Opacus' loss_reduction differ."""
    reduction = getattr(as_module(criterion), "reduction", loss_reduction)
    if reduction != loss_reduction:
        raise UnsupportedRunError(
            f"Expected a criterion with reduction = {loss_reduction!r} (the loss_reduction of "
            f"make_private), got {reduction!r}: per-example gradients would be off by the batch "
            "size. Make the two agree."
        )


def refuse_weights_of_the_batch(criterion: Any) -> None:
    """Raises UnsupportedRunError for a mean over records that their weights divide."""
    module = as_module(criterion)
    is_softmax = isinstance(module, nn.CrossEntropyLoss | nn.NLLLoss)
    if is_softmax and module.weight is not None and module.reduction == "mean":
        raise UnsupportedRunError(
            f"Expected no class weights in a mean, got {type(module).__name__}(weight=...): it is "
            "divided by the weights of all records of the batch, so that the gradient of one "
            'record depends on the others. Use reduction="none" here, and take the .mean() of the '
            "losses in the loop: the weights may stay."
        )
