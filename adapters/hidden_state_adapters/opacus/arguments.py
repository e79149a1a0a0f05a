"""Arguments of `HiddenStatePrivacyEngine.make_private`: what is allowed and what it means."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from dp_accounting import NeighboringRelation
from torch import nn

from hidden_state_accountants import BatchOrder, LossGeometry, UnsupportedRunError
from hidden_state_adapters.opacus import geometry
from hidden_state_adapters.opacus import optimizer_checks as checks

_OPACUS_ARGUMENTS = {
    "batch_first", "clipping", "grad_sample_mode", "loss_reduction", "noise_generator",
    "rand_on_empty", "wrap_model",
}  # fmt: skip


def supported_order(
    batch_order: BatchOrder | str,
    poisson_sampling: bool | None,
    max_batch_size: int | None,
    optimizer_class: type | None,
) -> BatchOrder:
    """CYCLIC or FULL; raises UnsupportedRunError for what this engine does not support."""
    supported = 'batch_order="cyclic" and "full"'
    value = getattr(batch_order, "value", batch_order)
    if value not in (BatchOrder.CYCLIC.value, BatchOrder.FULL.value):
        raise UnsupportedRunError(f"This engine supports {supported}, got {batch_order!r}.")
    if poisson_sampling:
        raise UnsupportedRunError(
            f"This engine supports {supported}, got poisson_sampling=True. Leave it out, or use "
            "opacus.PrivacyEngine for Poisson batches."
        )
    if max_batch_size is not None:
        raise UnsupportedRunError(
            f"Expected max_batch_size = None, got {max_batch_size!r}: it bounds Poisson batches, "
            f"and this engine supports {supported}. Leave it out."
        )
    if optimizer_class is not None:
        raise UnsupportedRunError(
            f"Expected optimizer_class = None, got {optimizer_class!r}: this engine supports plain "
            "SGD. Leave it out."
        )
    return BatchOrder(value)


def refuse_add_or_remove(relation: NeighboringRelation) -> None:
    """Raises UnsupportedRunError for ADD_OR_REMOVE_ONE.

    A step divides the noise by the number of records, or by a batch size that belongs to it; runs
    on neighbouring data sets would differ in more than one gradient.
    """
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        raise UnsupportedRunError(
            "Expected neighboring_relation = REPLACE_SPECIAL or REPLACE_ONE, got "
            "ADD_OR_REMOVE_ONE: the divisor would be the number of records, which is what adding "
            "or removing changes. Use REPLACE_SPECIAL (a record against one with zero gradient)."
        )


def check_opacus_arguments(arguments: dict[str, Any]) -> None:
    """Refuses arguments of Opacus' make_private that the run could not be checked with."""
    unknown = sorted(set(arguments) - _OPACUS_ARGUMENTS)
    if unknown:
        raise TypeError(f"Unknown argument of make_private: {', '.join(unknown)}.")
    if arguments.get("clipping", "flat") != "flat":
        raise UnsupportedRunError(
            f'Expected clipping = "flat", got {arguments["clipping"]!r}: the theorems need one '
            "fixed clip of the whole gradient of a record. Leave it out."
        )
    mode = arguments.get("grad_sample_mode", "hooks")
    if mode not in ("hooks", "functorch"):
        raise UnsupportedRunError(
            f'Expected grad_sample_mode = "hooks" or "functorch", got {mode!r}: the rows and norms '
            "of the per-example gradients could not be checked."
        )


def refuse_per_layer_clipping(max_grad_norm: Any) -> None:
    """Raises UnsupportedRunError for a list of clip norms."""
    if isinstance(max_grad_norm, list | tuple):
        raise UnsupportedRunError(
            f"Expected max_grad_norm to be one number, got {max_grad_norm!r}: a list clips every "
            "layer by itself, which is not supported. Pass the norm of the whole gradient of a "
            "record."
        )


def refuse_distributed(module: nn.Module) -> None:
    """Raises UnsupportedRunError for more than one process."""
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    workers = torch.distributed.get_world_size() if initialized else 1
    # Covers torch's, Opacus' and FSDP's wrappers.
    wrapped = any(word in type(module).__name__ for word in ("DataParallel", "FSDP"))
    if workers > 1 or wrapped:
        raise UnsupportedRunError(
            f"Expected one process, got {workers} with {type(module).__name__}: batch size, noise "
            "and order across processes are not checked yet. Train in a single process."
        )


def resolve_loss(
    module: nn.Module,
    criterion: Any,
    loss_geometry: LossGeometry | str | None,
    feature_norm: float | None,
    reduction: str,
) -> tuple[LossGeometry | None, nn.Linear | None]:
    """The loss geometry of the run and the linear layer whose inputs are to be measured."""
    if loss_geometry == "auto":
        loss = geometry.auto_loss_geometry(module, criterion, feature_norm, reduction)
        return loss, geometry.find_linear_head(module)
    if loss_geometry is not None and not isinstance(loss_geometry, LossGeometry):
        raise TypeError(
            f'Expected loss_geometry to be a LossGeometry, "auto" or None, got {loss_geometry!r}.'
        )
    geometry.check_reduction(criterion, reduction)
    if feature_norm is None:
        return loss_geometry, None
    _check_positive("feature_norm", feature_norm)
    head = geometry.find_linear_head(module)
    if loss_geometry is None or head is None:
        raise UnsupportedRunError(
            f"Expected feature_norm = None here, got {feature_norm!r}: it is checked at the one "
            'trainable nn.Linear of a model with loss_geometry="auto" or a declared LossGeometry. '
            "Leave it out, or declare the loss."
        )
    return loss_geometry, head


def domain_diameter(module: nn.Module, radius: float | None) -> float:
    """Twice the radius, inf for None; the initial parameters must be inside."""
    if radius is None:
        return math.inf
    _check_positive("projection_radius", radius)
    norm = float(checks.joint_norm([p for p in module.parameters() if p.requires_grad]))
    if not norm <= radius:
        raise UnsupportedRunError(
            f"Expected an initial model inside the ball of projection_radius = {radius:g}, got "
            f"norm {norm:.6g}. Scale the parameters down (zeros are a good start), or raise the "
            "radius."
        )
    return 2 * float(radius)


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"Expected {name} to be a real number, got {value!r}.")
    if not float(value) > 0:
        raise ValueError(f"Expected {name} > 0, got {value!r}.")
