"""How curved the mean loss of every batch of a linear head is (row 124 of docs/guards.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hidden_state_accountants import Assumption, LossGeometry, UnsupportedRunError
from hidden_state_adapters.curved_batches import (
    ROUNDING,
    checked_curvature,
    curvature_matters,
    remedy,
)
from hidden_state_adapters.tf_privacy.guards.head import LinearHead
from hidden_state_adapters.tf_privacy.refusals import refusal


def check_batches(
    loss: LossGeometry,
    feature_norm: float | None,
    model: Any,
    steps: Iterable[Iterable[Any]] | None,
) -> list[Assumption]:
    """Refuses batches of a linear head whose mean loss is more curved than declared.

    For M-smooth losses of records of norm at most B the mean loss of a batch is K-smooth with
    K = M lambda_max(X^T X)/(b B^2), X the features of the batch (docs/theory/curvature.md). All
    batches are looked at before the first step: what comes before the layer is a fixed map, and
    they are the same in every epoch.

    Args:
        loss: Declared; nothing is looked at unless its curvature says more than its smoothness.
        feature_norm: B, which every example was held against; None if it is not known.
        model: Of Keras. What is not one linear layer has a curvature that is the user's word.
        steps: The examples of every step of an epoch, in parts; None if every epoch has others.

    Returns:
        What was checked.

    Raises:
        UnsupportedRunError: A batch is more curved than declared, or the batches of the linear
            layer cannot be looked at.
    """
    if not curvature_matters(loss):
        return []
    try:
        head = LinearHead(model)
    except UnsupportedRunError:
        return []
    if feature_norm is None:
        raise refusal(
            f"Expected feature_norm= beside a loss_geometry with curvature = {loss.curvature:g}, "
            "got none: how curved a batch is depends on its features, which are looked at. Pass "
            "the bound on their norm, as for release_curvature."
        )
    if steps is None:
        raise refusal(
            f"Expected a loss_geometry without curvature, got {loss!r}: every epoch has other "
            "batches here, and they are looked at before the first step. Use shuffled_once, "
            "cyclic or full batches, or leave the curvature out."
        )
    has_bias = head.has_bias
    square = feature_norm**2 + has_bias
    assert loss.curvature is not None
    bound = loss.curvature * (1 + ROUNDING)
    for number, parts in enumerate(steps):
        rows = np.concatenate([head.features(part) for part in parts]).astype(np.float64)
        if has_bias:
            rows = np.c_[rows, np.ones(len(rows))]
        gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
        share = float(np.linalg.eigvalsh(gram)[-1]) / (len(rows) * square)
        if not share * loss.smoothness <= bound:
            raise refusal(
                f"batch {number} has a mean loss that is {share * loss.smoothness:.6g}-smooth, "
                f"expected at most curvature = {loss.curvature:.6g}. {remedy(loss)}"
            )
    return [checked_curvature(loss)]
