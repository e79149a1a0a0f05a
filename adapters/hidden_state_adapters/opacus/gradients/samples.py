"""The per-example gradients that Opacus leaves with the parameters after backward()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.norms import joint_norms, to_precision
from hidden_state_adapters.opacus.gradients.precision import exact_products, is_half

_NAMED = 4  # in an error

NO_GRADIENTS = (
    "got no per-example gradients for a trainable parameter. Call the private model in train() "
    "mode and backward() before step(), and let every parameter take part. (If that is so: a "
    "second pass without backward(), for an accuracy or a log, makes Opacus wait for its "
    "gradients: look at outputs under torch.no_grad(). Layers that are run again by activation "
    "checkpointing have none: save memory with BatchMemoryManager instead. Nor has a layer whose "
    "output at several positions is changed in place: use inplace=False in the activation.)"
)


class SampleGradients:
    """Gradients of every record from Opacus' `GradSampleModule`, in at least float32."""

    def norms(self, params: Sequence[nn.Parameter]) -> torch.Tensor:
        """See `piece.Gradients.norms`."""
        return joint_norms([_stored(param) for param in params])

    def add_sums(
        self, params: Sequence[nn.Parameter], weights: torch.Tensor, *others: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """See `piece.Gradients.add_sums`; uses up the batch."""
        with exact_products(weights.device.type):
            return [self._add_sums(param, weights, *others) for param in params]

    def _add_sums(self, param: Any, *weights: torch.Tensor) -> list[torch.Tensor]:
        _check_processed_flag(param.grad_sample)
        sample = _stored(param)
        total, *rest = (
            _weighted_sum(to_precision(w, sample.dtype).to(sample.device), sample) for w in weights
        )
        param.summed_grad = total if param.summed_grad is None else param.summed_grad + total
        _mark_as_processed(param.grad_sample)
        return rest


def rows_of(params: Mapping[str, nn.Parameter], expected: int | None) -> int:
    """The number of per-example gradients of the one batch that `params` hold.

    Args:
        params: Parameters by name.
        expected: Number of rows that went into the model, as far as it is known; for an error.

    Raises:
        UnsupportedRunError: There are none, several batches were accumulated, or the parameters
            disagree.
    """
    rows = {}
    for name, param in params.items():
        sample = getattr(param, "grad_sample", None)
        if isinstance(sample, list):
            if len(sample) != 1:
                raise UnsupportedRunError(
                    f"got the gradients of {len(sample)} batches, expected 1: gradient "
                    "accumulation (several backward() before one step()) is not accounted: a "
                    "record may be in several of the batches, and counts once for each. Call "
                    "optimizer.zero_grad() after every step and backward() once per batch. For "
                    "batches that do not fit into memory raise the batch_size of the DataLoader "
                    "and let opacus.utils.batch_memory_manager.BatchMemoryManager split them."
                )
            sample = sample[0]
        if sample is None:
            raise UnsupportedRunError(NO_GRADIENTS)
        rows[name] = len(sample)
    if len(set(rows.values())) != 1:
        raise UnsupportedRunError(_why_rows_differ(rows, expected))
    return next(iter(rows.values()))


def _why_rows_differ(rows: Mapping[str, int], expected: int | None) -> str:
    expected = max(rows.values()) if expected is None else expected
    names = [name for name, count in rows.items() if count != expected]
    once = [name for name in names if rows[name] == 1]
    if once and expected > 1:
        return (
            f"expected a gradient of {once[0]} for every record, got one for the whole batch: what "
            "goes into its layer has one row, which is broadcast over the batch (positions "
            "torch.arange(length)[None]). Expand it to the batch (positions.expand(len(x), -1)), "
            "or freeze the parameter with requires_grad_(False)."
        )
    return why_not_records(names)


def why_not_records(names: Sequence[str]) -> str:
    """Why the rows of gradients are of something else than records.

    Args:
        names: Parameters or layers with such rows.
    """
    return (
        f"expected gradients of {', '.join(names[:_NAMED])} for every record, got rows of "
        "something else: Opacus counts records along the first dimension of what goes into a "
        "layer, and here another one comes first (the sequence, as in attention without "
        "batch_first=True?). Pass the batch first, with batch_first=True in the layer, or flatten "
        "what is no record into another dimension."
    )


def is_in_full_precision(param: Any) -> bool:
    """Tells whether the per-example gradients of a parameter are in more than half precision."""
    sample = param.grad_sample
    own: torch.Tensor = sample[0] if isinstance(sample, list) else sample
    return not is_half(own)


def sum_of(param: nn.Parameter) -> torch.Tensor:
    """The sum of the per-example gradients of the one batch that a parameter holds."""
    return _stored(param).sum(dim=0)


def _stored(param: Any) -> torch.Tensor:
    """The per-example gradients of the one batch that a parameter holds."""
    sample = param.grad_sample
    own: torch.Tensor = sample[0] if isinstance(sample, list) else sample
    # A sum that is rounded to few bits moves by more than the clip norm with one record.
    return own.to(torch.float32 if is_half(param) else param.dtype)


def _weighted_sum(weights: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    # einsum("i,i...") does the same by way of a batched product, slower for short rows.
    shape = sample.shape[1:]
    return (weights @ sample.reshape(len(sample), shape.numel())).reshape(shape)
