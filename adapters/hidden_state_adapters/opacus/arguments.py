"""Arguments of `HiddenStatePrivacyEngine.make_private`: what is allowed and what it means."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from dp_accounting import DpEvent, NeighboringRelation
from torch import nn

from hidden_state_accountants import (
    BOUNDS,
    BatchOrder,
    LossGeometry,
    UnsupportedRunError,
)
from hidden_state_accountants.best_bound import why_none_applies
from hidden_state_accountants.events.batch_order import parse_batch_order
from hidden_state_adapters.opacus import geometry
from hidden_state_adapters.opacus import optimizer_checks as checks

_OPACUS_ARGUMENTS = {
    "batch_first", "clipping", "grad_sample_mode", "loss_reduction", "noise_generator",
    "rand_on_empty", "wrap_model",
}  # fmt: skip


def batch_order_of(batch_order: BatchOrder | str, poisson_sampling: bool | None) -> BatchOrder:
    """The batch order; raises ValueError for an unknown one or a contradiction."""
    order = parse_batch_order(batch_order)
    if poisson_sampling is not None and poisson_sampling != (order is BatchOrder.POISSON):
        raise UnsupportedRunError(
            f"Expected poisson_sampling = {order is BatchOrder.POISSON} with "
            f'batch_order="{order.value}", got {poisson_sampling!r}. Leave it out: batch_order '
            "says how the records are dealt."
        )
    return order


def check_order_seed(order: BatchOrder, seed: int | None, is_secret: bool) -> None:
    """Refuses a seed where it would give away an order that has to stay secret.

    Whoever knows the seed knows the order. SHUFFLED_ONCE is then a fixed order and accounted as
    CYCLIC. The others then have a known place of every record in every epoch or step; no bound
    here is about such runs, and composition over all of them is no better than CYCLIC.
    """
    if not isinstance(is_secret, bool):
        raise TypeError(f"Expected order_is_secret to be True or False, got {is_secret!r}.")
    if seed is None:
        if is_secret:
            raise ValueError(
                "Expected order_is_secret = False without an order_seed, got True: an order that "
                "is drawn without a seed is secret anyway. Leave it out."
            )
        return
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"Expected order_seed to be an integer or None, got {type(seed).__name__}.")
    if seed < 0:
        raise ValueError("Expected order_seed >= 0, got a negative number.")
    if order in (BatchOrder.CYCLIC, BatchOrder.FULL):
        raise ValueError(
            f'Expected order_seed = None with batch_order="{order.value}", which draws nothing. '
            'Use batch_order="shuffled_once".'
        )
    if order is not BatchOrder.SHUFFLED_ONCE and not is_secret:
        raise UnsupportedRunError(
            f'Expected order_seed = None with batch_order="{order.value}", got a seed: whoever '
            "knows it knows which steps used a record, and the guarantee rests on nobody knowing. "
            "Leave it out (the order then comes from the operating system's random source), use "
            'batch_order="shuffled_once" (a seed makes it public, accounted as cyclic), or say '
            "order_is_secret=True if the seed is random and never written down."
        )


def refuse_add_or_remove(relation: NeighboringRelation, order: BatchOrder) -> None:
    """Raises UnsupportedRunError for ADD_OR_REMOVE_ONE unless the batches are POISSON.

    Elsewhere a step divides the noise by the number of records, or by a batch size that belongs to
    it; runs on neighbouring data sets would differ in more than one gradient.
    """
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE and order is not BatchOrder.POISSON:
        raise UnsupportedRunError(
            "Expected neighboring_relation = REPLACE_SPECIAL or REPLACE_ONE, got "
            "ADD_OR_REMOVE_ONE: the divisor would be the number of records, which is what adding "
            "or removing changes. Use REPLACE_SPECIAL (a record against one with zero gradient)."
        )


def check_covered(event: DpEvent, relation: NeighboringRelation) -> None:
    """Raises UnsupportedRunError if no bound is about such a run under `relation`."""
    unmet = {
        bound.name: bound.check(event, relation)
        for bound in BOUNDS
        if bound.sound and isinstance(event, bound.event_type)
    }
    if all(unmet.values()):
        reasons = why_none_applies(event, unmet)
        raise UnsupportedRunError(f"No theorem here covers the run. {reasons}")


def check_opacus_arguments(arguments: dict[str, Any], order: BatchOrder) -> None:
    """Refuses arguments of Opacus' make_private that the run could not be checked with."""
    unknown = sorted(set(arguments) - _OPACUS_ARGUMENTS)
    if unknown:
        raise TypeError(f"Unknown argument of make_private: {', '.join(unknown)}.")
    if arguments.get("clipping", "flat") != "flat":
        raise UnsupportedRunError(
            f'Expected clipping = "flat", got {arguments["clipping"]!r}: the theorems need one '
            "fixed clip of the whole gradient of a record. Leave it out."
        )
    if arguments.get("rand_on_empty"):
        raise UnsupportedRunError(
            "Expected rand_on_empty = False, got True: it puts a made-up record into an empty "
            "batch, which the theorems do not know. Leave it out: empty batches work."
        )
    mode = arguments.get("grad_sample_mode", "hooks")
    if mode not in ("hooks", "functorch", "ew", "ghost"):
        raise UnsupportedRunError(
            f'Expected grad_sample_mode = "hooks", "functorch", "ew" or "ghost", got {mode!r}: the '
            "per-example gradients could not be checked."
        )
    if mode == "ew" and order is BatchOrder.POISSON:
        raise UnsupportedRunError(
            'Expected grad_sample_mode = "hooks" or "functorch" for Poisson batches, got "ew": '
            "torch's expanded weights stop at an empty batch, which Poisson sampling can draw."
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
