"""Why the loop's loss is not the declared one, in words; computed only then."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

REMEDY = (
    "A loop that maps labels (to -1 and 1, to probabilities, by a scale) passes make_private "
    "targets=, the function of the loader's last tensor that it applies; every record by itself."
)
_ALIKE = 1e-3  # of the length of slopes that are told apart


def diagnosis(
    output: torch.Tensor,
    target: torch.Tensor,
    slopes_at: Callable[[torch.Tensor], torch.Tensor],
    got: torch.Tensor,
) -> str:
    """Describes the difference in words that a user recognises.

    Args:
        output: Output of the head, shape (rows, outputs).
        target: Targets of the batch that was dealt.
        slopes_at: Function from targets to slopes of the declared loss, shape (rows, outputs).
        got: Slopes that the backward pass left, of the loss of a record.
    """
    slopes = slopes_at(target)
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
        _broadcast(output, target, slopes_at, got)
        or _factors(target, slopes, got, is_label)
        or (_softmax(output, target, slopes, got) if is_label else "")
        or "another loss, a hook, other weights in the training pass, or other targets than those "
        f"of the batch that the loader dealt. {REMEDY[:-1]}"
    )


def _broadcast(
    output: torch.Tensor,
    target: torch.Tensor,
    slopes_at: Callable[[torch.Tensor], torch.Tensor],
    got: torch.Tensor,
) -> str:
    """Describes every output beside the targets of all records."""
    rows = len(got)
    if rows < 2 or output.shape[1] > 1:
        return ""
    sums = sum(slopes_at(target.roll(shift, dims=0)) for shift in range(rows))
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
