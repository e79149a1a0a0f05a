"""`loss_geometry="auto"`: what a linear model and a known criterion say about the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hidden_state_accountants import LossGeometry, UnsupportedRunError
from hidden_state_adapters.opacus.losses import (
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeHingeLoss,
    EnvelopeLoss,
    EnvelopeSquaredErrorLoss,
)

_DECLARE = (
    "Or declare the loss yourself: loss_geometry= takes a hidden_state_accountants.LossGeometry, "
    "for example LossGeometry.convex(smoothness)."
)
_PASSIVE = (nn.Flatten, nn.Identity)  # change neither values nor what a record is


def find_linear_head(module: nn.Module) -> nn.Linear | None:
    """The only trainable layer of `module` if it is an nn.Linear, else None."""
    owners = [
        part
        for part in module.modules()
        if any(p.requires_grad for p in part.parameters(recurse=False))
    ]
    return owners[0] if len(owners) == 1 and type(owners[0]) is nn.Linear else None


def linear_head(module: nn.Module) -> nn.Linear:
    """The linear layer that is all there is to train in `module`, and comes last.

    What comes before it is frozen: a fixed public map of every record. That the head's output is
    the model's output is checked in every training pass (`guards.head.HeadWatch`).

    Raises:
        UnsupportedRunError: Something else is trained, or follows the head.
    """
    head = find_linear_head(module)
    frozen = head is not None and any(not p.requires_grad for p in head.parameters())
    if head is None or frozen:
        trained = [
            type(part).__name__
            for part in module.modules()
            if any(p.requires_grad for p in part.parameters(recurse=False))
        ]
        raise UnsupportedRunError(
            'loss_geometry="auto" needs a model in which one whole nn.Linear is trained and the '
            f"rest is frozen with requires_grad_(False), got trainable {', '.join(trained) or '-'}"
            f"{' with frozen parameters' if frozen else ''}. {_DECLARE}"
        )
    hooks = (*head._forward_hooks.values(), *head._forward_pre_hooks.values())
    if any(not _is_known_hook(hook) for hook in hooks):
        raise UnsupportedRunError(
            'loss_geometry="auto" needs a linear layer that computes nothing else, got a forward '
            f"hook on Linear. {_DECLARE}"
        )
    after = [type(part).__name__ for part in _after(module, head) if type(part) not in _PASSIVE]
    if after:
        raise UnsupportedRunError(
            'loss_geometry="auto" needs a model that ends with its linear layer, got '
            f"{', '.join(after)} after it. {_DECLARE}"
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

    Proof sketch for softmax cross-entropy with label smoothing: the smoothed target y is a
    probability vector, the gradient in the logits is p - y with |p - y| <= sqrt(2), and the Hessian
    diag(p) - p p^T does not depend on y; so the constants are those of hard labels.

    Args:
        module: The module itself, not Opacus' wrapper.
        criterion: nn.CrossEntropyLoss, EnvelopeCrossEntropyLoss or EnvelopeSquaredErrorLoss, or
            with one output nn.BCEWithLogitsLoss, nn.MSELoss, nn.HuberLoss, nn.SmoothL1Loss,
            EnvelopeBCEWithLogitsLoss or EnvelopeHingeLoss; no weights. The loop must use this very
            criterion, with targets that are class indices or probabilities.
        feature_norm: Bound on the L2 norm of every record at the linear layer.
        loss_reduction: "mean" or "sum", as given to make_private.

    Raises:
        UnsupportedRunError: The constants of the loss are not known.
        TypeError, ValueError: `feature_norm` is not a positive number.
    """
    if criterion is None:
        raise UnsupportedRunError(
            'loss_geometry="auto" needs the criterion of the training loop, got none. Pass '
            "criterion=, or declare loss_geometry."
        )
    if feature_norm is None:
        raise UnsupportedRunError(
            'loss_geometry="auto" needs a bound on the norm of the features, got none. Normalise '
            "the records and pass feature_norm=."
        )
    layer = linear_head(module)
    rule = _RULES.get(type(criterion))
    if rule is None:
        known = ", ".join(
            f"{'' if issubclass(kind, EnvelopeLoss) else 'nn.'}{kind.__name__}" for kind in _RULES
        )
        raise UnsupportedRunError(
            f'loss_geometry="auto" knows {known}, got {type(criterion).__name__}. {_DECLARE}'
        )
    check_reduction(criterion, loss_reduction)
    for name in ("weight", "pos_weight"):
        if getattr(criterion, name, None) is not None:
            raise UnsupportedRunError(
                f'loss_geometry="auto" needs {name} = None in the criterion: it scales the '
                f"gradients of some records. Remove it. {_DECLARE}"
            )
    if not isinstance(criterion, _OF_MANY_OUTPUTS) and layer.out_features != 1:
        raise UnsupportedRunError(
            f'loss_geometry="auto" needs one output for {type(criterion).__name__}, got '
            f"{layer.out_features}. {_DECLARE}"
        )
    return rule(criterion, feature_norm, layer.bias is not None)


def check_reduction(criterion: Any, loss_reduction: str) -> None:
    """Raises UnsupportedRunError if the criterion and Opacus' loss_reduction differ."""
    reduction = getattr(criterion, "reduction", loss_reduction)
    if reduction != loss_reduction:
        raise UnsupportedRunError(
            f"Expected a criterion with reduction = {loss_reduction!r} (the loss_reduction of "
            f"make_private), got {reduction!r}: per-example gradients would be off by the batch "
            "size. Make the two agree."
        )


def _cross_entropy(criterion: nn.CrossEntropyLoss, norm: float, bias: bool) -> LossGeometry:
    default = nn.CrossEntropyLoss().ignore_index
    if criterion.ignore_index != default:
        raise UnsupportedRunError(
            f'loss_geometry="auto" needs ignore_index = {default}, got {criterion.ignore_index}: '
            "ignored records rescale the others. Remove those records beforehand."
        )
    return LossGeometry.softmax_cross_entropy(norm, bias)


def _smooth_l1(criterion: nn.SmoothL1Loss, norm: float, bias: bool) -> LossGeometry:
    if not criterion.beta > 0:
        raise UnsupportedRunError(
            f'loss_geometry="auto" needs beta > 0, got {criterion.beta!r}: the absolute value is '
            "not smooth."
        )
    huber = LossGeometry.huber(norm, criterion.beta, bias)
    assert huber.lipschitz is not None
    return LossGeometry.generalized_linear(
        huber.smoothness / criterion.beta, huber.lipschitz / criterion.beta
    )


def _envelope(criterion: EnvelopeLoss, norm: float, bias: bool) -> LossGeometry:
    return criterion.geometry(norm, bias)


_OF_MANY_OUTPUTS = (nn.CrossEntropyLoss, EnvelopeCrossEntropyLoss, EnvelopeSquaredErrorLoss)

_RULES: dict[type, Callable[[Any, float, bool], LossGeometry]] = {
    nn.CrossEntropyLoss: _cross_entropy,
    nn.BCEWithLogitsLoss: lambda criterion, norm, bias: LossGeometry.logistic(norm, bias),
    nn.MSELoss: lambda criterion, norm, bias: LossGeometry.squared_error(norm, bias, scale=2.0),
    nn.HuberLoss: lambda criterion, norm, bias: LossGeometry.huber(norm, criterion.delta, bias),
    nn.SmoothL1Loss: _smooth_l1,
    EnvelopeCrossEntropyLoss: _envelope,
    EnvelopeBCEWithLogitsLoss: _envelope,
    EnvelopeSquaredErrorLoss: _envelope,
    EnvelopeHingeLoss: _envelope,
}
