"""The gradients at hand, and figures that are read from the device in one transfer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.norms import joint_norms, to_precision
from hidden_state_adapters.opacus.precision import exact_products, is_half

_NAMED = 4  # in an error

NO_GRADIENTS = (
    "got no per-example gradients for a trainable parameter. Call the private model in train() "
    "mode and backward() before step(), and let every parameter take part. (If that is so: a "
    "second pass without backward(), for an accuracy or a log, makes Opacus wait for its "
    "gradients: look at outputs under torch.no_grad(). Layers that are run again by activation "
    "checkpointing have none: save memory with BatchMemoryManager instead. Nor has a layer whose "
    "output at several positions is changed in place: use inplace=False in the activation.)"
)

Figure: TypeAlias = torch.Tensor | float
"""A number or truth value that is known, or a 0-dim tensor that nobody has waited for."""


def differ(value: torch.Tensor, other: torch.Tensor) -> Figure:
    """Whether two tensors of one type, shape and device differ in some element."""
    if is_on_host(value):
        return not torch.equal(value, other)  # leaves no mask behind, and stops early
    return (value != other).any()


def is_on_host(value: torch.Tensor) -> bool:
    """Whether nobody has to wait for the values of `value`."""
    return value.device.type == "cpu"


def any_of(flags: Iterable[Figure]) -> Figure:
    """Whether one of `flags` is true."""
    tensors = []
    for flag in flags:
        if isinstance(flag, torch.Tensor):
            tensors.append(flag)
        elif flag:
            return True
    if len(tensors) < 2:
        return tensors[0] if tensors else False
    return torch.stack([flag.to(tensors[0].device) for flag in tensors]).any()


def all_of(flags: Iterable[Figure]) -> Figure:
    """Whether all of `flags` are true."""
    flags = list(flags)
    if any(not flag for flag in flags if not isinstance(flag, torch.Tensor)):
        return False
    tensors = [flag for flag in flags if isinstance(flag, torch.Tensor)]
    if len(tensors) < 2:
        return tensors[0] if tensors else True
    return torch.stack([flag.to(tensors[0].device) for flag in tensors]).all()


def read(figures: Sequence[Figure]) -> list[float]:
    """Returns the values of all `figures`; one transfer from each device that has some."""
    values: list[Any] = list(figures)
    waiting = [place for place, x in enumerate(values) if isinstance(x, torch.Tensor)]
    for device in {values[place].device for place in waiting}:
        own = [place for place in waiting if values[place].device == device]
        tensors = [values[place] for place in own]
        waiting = [place for place in waiting if place not in own]
        if is_on_host(tensors[0]):
            found = [tensor.item() for tensor in tensors]
        else:
            types = (tensor.dtype for tensor in tensors)
            kind = functools.reduce(torch.promote_types, types, torch.float32)  # some lack float64
            found = torch.stack([tensor.to(kind) for tensor in tensors]).tolist()
        for place, value in zip(own, found, strict=True):
            values[place] = value
    return values


def counted_writes(tensor: torch.Tensor) -> int:
    """How often torch counted a write to a tensor.

    What was computed under inference_mode() has no count, and cannot be written outside of it.
    """
    return 0 if tensor.is_inference() else tensor._version


@attrs.define(eq=False)
class Piece:
    """The gradients at hand: of a batch or, under BatchMemoryManager, of a piece of one.

    Those of every record are where Opacus leaves them, with the parameters; a linear head knows
    them in another form.

    Attributes:
        step: Number of the logical step that it belongs to, from 1 on.
        params: Parameters whose gradients these are: all, or those of one block.
        block: Number of the block, from 0 on; 0 for an optimizer that has one.
        rows: Number of records.
        known_norms: Norms of the gradients before the clip, shape (rows,); None until they are
            computed.
        longest: Largest of these norms, as soon as it was read from the device.
        error: Length of DiceSGD's error, read likewise.
    """

    step: int
    params: Sequence[nn.Parameter]
    block: int = 0
    rows: int = 0
    known_norms: torch.Tensor | None = None
    longest: float = math.inf
    error: float = 0.0

    @property
    def norms(self) -> torch.Tensor:
        """Norms of the gradients for all `params` together, before the clip, shape (rows,)."""
        if self.known_norms is None:
            self.known_norms = self._norms()
        return self.known_norms

    @property
    def largest_norm(self) -> Figure:
        """The largest of the norms; 0 for no rows."""
        return self.norms.max() if self.rows else 0.0

    def _norms(self) -> torch.Tensor:
        return joint_norms([_stored(param) for param in self.params])

    def add_sums(
        self, weights: torch.Tensor | None, *others: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """Adds the sums of the gradients, each times its weight, to `summed_grad`.

        Args:
            weights: Weights of the records, shape (rows,), made from the norms; None for 1.
            *others: Further weights.

        Returns:
            For each of `params` the sums with each of `others`.
        """
        weights = torch.ones_like(self.norms) if weights is None else weights
        with exact_products(weights.device.type):
            return [self._add_sums(param, weights, *others) for param in self.params]

    def _add_sums(self, param: Any, *weights: torch.Tensor) -> list[torch.Tensor]:
        """Uses up the gradients that are with a parameter."""
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
