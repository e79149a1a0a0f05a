"""Per-example gradients of a batch: norms that float32 does not spoil, clip factors and sums."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.precision import exact_products, is_half

_NAMED = 4  # in an error
_BLOCK = 256

OPACUS_CLIP_OFFSET = 1e-6
"""Opacus clips with the factor min(1, C / (norm + 1e-6))."""

ROUNDING = 1e-6
"""Rounding in float32 of a norm that is exactly at its bound."""

_SLACK = ROUNDING + torch.finfo(torch.float32).eps

NO_GRADIENTS = (
    "got no per-example gradients for a trainable parameter. Call the private model in train() "
    "mode and backward() before step(), and let every parameter take part. (A second pass without "
    "backward() makes Opacus wait: look at outputs under torch.no_grad(). Activation checkpointing "
    "and in-place changes of an output at several positions leave none.)"
)

Figure: TypeAlias = torch.Tensor | float
"""A number or truth value that is known, or a 0-dim tensor that nobody has waited for."""


def differ(value: torch.Tensor, other: torch.Tensor) -> Figure:
    """Tells whether two tensors of one type, shape and device differ in some element."""
    if is_on_host(value):
        return not torch.equal(value, other)  # leaves no mask behind, and stops early
    return (value != other).any()


def is_on_host(value: torch.Tensor) -> bool:
    """Tells whether nobody has to wait for the values of a tensor."""
    return value.device.type == "cpu"


def any_of(flags: Iterable[Figure]) -> Figure:
    """Tells whether one of `flags` is true."""
    return functools.reduce(operator.or_, flags, False)  # type: ignore[arg-type]


def all_of(flags: Iterable[Figure]) -> Figure:
    """Tells whether all of `flags` are true."""
    return functools.reduce(operator.and_, flags, True)  # type: ignore[arg-type]


def read(figures: Sequence[Figure]) -> list[float]:
    """Returns the values of all `figures`, by one transfer from the device."""
    values: list[Any] = list(figures)
    places = [place for place, x in enumerate(values) if isinstance(x, torch.Tensor)]
    tensors = [values[place] for place in places]
    if all(map(is_on_host, tensors)):
        found = [tensor.item() for tensor in tensors]
    else:
        device = next(x.device for x in tensors if not is_on_host(x))
        types = (tensor.dtype for tensor in tensors)
        kind = functools.reduce(torch.promote_types, types, torch.float32)  # some lack float64
        found = torch.stack([tensor.to(device, kind) for tensor in tensors]).tolist()
    for place, value in zip(places, found, strict=True):
        values[place] = value
    return values


def counted_writes(tensor: torch.Tensor) -> int:
    """Returns the number of writes to a tensor that torch counted; none of inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """Returns the norms of the rows of a matrix, in its precision.

    On a CPU torch adds up the squares of a row one after the other: in float32 the norm of ten
    million numbers can be 0.8 per cent too small, and what is clipped by it as much too long. Here
    the sums are short, and sums of sums.
    """
    length = rows.shape[1]
    if length <= _BLOCK:
        return torch.linalg.vector_norm(rows, dim=1)
    count, rest = divmod(length, _BLOCK)
    whole = rows[:, : length - rest] if rest else rows
    blocks = torch.linalg.vector_norm(whole.reshape(len(rows), count, _BLOCK), dim=2)
    if rest:
        last = torch.linalg.vector_norm(rows[:, length - rest :], dim=1, keepdim=True)
        blocks = torch.cat([blocks, last], dim=1)
    return row_norms(blocks)


def joint_norms(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the norms of vectors of which every tensor has a part, shape (vectors, ...)."""
    # The shape in full: an empty batch has nothing that -1 could be computed from.
    norms = [row_norms(part.reshape(len(part), math.prod(part.shape[1:]))) for part in parts]
    kind = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
    return torch.linalg.vector_norm(torch.stack([norm.to(kind) for norm in norms]), dim=0)


def joint_norm(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """Returns the L2 norm of all parameters as one vector, computed in float64 (0-dim)."""
    parts = [torch.linalg.vector_norm(p.detach(), dtype=torch.float64) for p in params]
    return torch.stack([part.to(parts[0].device) for part in parts]).norm()


def smallest_norm(params: Sequence[nn.Parameter]) -> float:
    """Returns the smallest norm that is reliable in the coarsest precision of `params`.

    Squares of coordinates underflow: below sqrt(tiny) a computed norm can be far too small, and a
    factor made from it far too large. At 1e8 times that the squares that are lost cannot matter.
    """
    return 1e8 * math.sqrt(max(torch.finfo(p.dtype).tiny for p in params))


def check_clip_norms(params: Sequence[nn.Parameter], **clip_norms: float) -> None:
    """Raises ValueError for clip norms so small that norms near them are not reliable."""
    smallest = smallest_norm(params)
    for name, value in clip_norms.items():
        if value < smallest:
            raise ValueError(
                f"Expected {name} >= {smallest:.3g} in this precision, got {value:g}: squares of "
                "shorter vectors underflow. Use float64 parameters, or scale the loss up."
            )


def opacus_clip_factors(norms: torch.Tensor, clip_norm: float) -> torch.Tensor:
    r"""Returns what DPOptimizer multiplies gradients of length `norms` with.

    .. math:: \min(1, C / (|v| + 10^{-6}))
    """
    # Opacus 1.6, optimizers/optimizer.py
    return (norms + OPACUS_CLIP_OFFSET).reciprocal_().mul_(clip_norm).clamp_(max=1.0)


def clip_factors(norms: torch.Tensor, bound: float, smallest: float | None = None) -> torch.Tensor:
    r"""Returns what vectors of length `norms` are multiplied with.

    .. math:: \min(1, C/|v|), \qquad \text{automatic: } C/|v|, \text{ and 0 at 0}

    Without Opacus' 1e-6 beside the norm: with it e - clip(e) would not vanish at short e.

    Args:
        norms: Lengths, of any shape.
        bound: Clip norm C.
        smallest: Length below which automatic clipping takes a vector for 0, so that the result is
            no longer than C; None to clip.
    """
    # ZBWH24, Section 2.1 and Appendix C.4, arXiv 2311.14632
    factors = bound / norms
    if smallest is None:
        return factors.clamp(max=1.0)
    return torch.where(norms >= smallest, factors, torch.zeros_like(norms))


def to_precision(factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns clip factors in `dtype`; 0 where few digits are left, and one could double."""
    return nn.functional.hardshrink(factors.to(dtype), torch.finfo(dtype).tiny)


def check_gradients(step: int, largest: float, lipschitz: float | None) -> None:
    """Raises UnsupportedRunError if gradients are longer than declared, or not finite."""
    if lipschitz is not None and not largest <= lipschitz * (1 + _SLACK):
        raise UnsupportedRunError(
            f"step {step} has a per-example gradient of norm {largest:.8g}, expected at most "
            f"the declared lipschitz = {lipschitz:.8g}: another loss (a sum, class weights?), or "
            "longer features than declared. Declare the loss that the loop computes."
        )
    if not math.isfinite(largest):
        raise UnsupportedRunError(
            f"step {step} has a per-example gradient whose norm is not finite (or a square "
            "overflows): no clip bounds it. Look for a division by 0, or scale the loss down."
        )


def check_clip_margin(clip_norm: float, lipschitz: float | None) -> None:
    """Refuses a clip norm so close above `lipschitz` that Opacus' clip still acts."""
    if lipschitz is None or clip_norm < lipschitz:
        return
    needed = lipschitz * (1 + 2 * ROUNDING) + OPACUS_CLIP_OFFSET
    if clip_norm < needed:
        raise UnsupportedRunError(
            f"Expected max_grad_norm >= {needed:.9g} or below lipschitz = {lipschitz:.9g}, got "
            f"{clip_norm:.9g}: Opacus clips with min(1, C / (norm + 1e-6)), which still shortens "
            "gradients as long as the bound. "
            f"Raise max_grad_norm: {needed * (1 + 1e-5):.6g} will do."
        )


Sums: TypeAlias = Callable[[Sequence[torch.Tensor | None]], Iterable[Sequence[torch.Tensor]]]
"""Function of weights of the records, one tensor (or None for 1) for each sum; returns the sums of
every parameter."""


@attrs.define(eq=False)
class Piece:
    """Gradients at hand: of a batch or, under BatchMemoryManager, of a physical batch.

    Attributes:
        step: Number of the logical step that it belongs to, from 1 on.
        params: Parameters whose gradients these are: all, or those of one block.
        block: Number of the block, from 0 on; 0 for an optimizer that has one.
        norms: Norms of the gradients of the records before the clip, shape (rows,).
        sums: Function that adds the gradients up.
        longest: Largest of the norms, as it was read from the device.
        error: Length of DiceSGD's error, read likewise.
    """

    step: int
    params: Sequence[nn.Parameter]
    block: int
    norms: torch.Tensor
    sums: Sums
    longest: float = math.inf
    error: float = 0.0

    def add_sums(self, *weights: torch.Tensor | None) -> list[list[torch.Tensor]]:
        """Adds sums of the gradients, each times its weight, to `summed_grad`.

        Args:
            *weights: Weights of the records, shape (rows,), made from the norms; None for 1. The
                sums with the first ones are added.

        Returns:
            The sums with the others, for each of `params`.
        """
        rests = []
        with exact_products(self.norms.device.type):
            for param, (total, *rest) in zip(self.params, self.sums(weights), strict=True):
                before = param.summed_grad  # type: ignore[attr-defined]
                param.summed_grad = total if before is None else before + total  # type: ignore[attr-defined]
                rests.append(rest)
        return rests


def sums_of_records(
    params: Sequence[nn.Parameter], weights: Sequence[torch.Tensor | None]
) -> Iterable[Sequence[torch.Tensor]]:
    """Yields sums of the gradients that Opacus left with the parameters, and uses them up."""
    for param in params:
        own: Any = param.grad_sample  # type: ignore[attr-defined]
        _check_processed_flag(own)
        sample = gradients_of(param)
        # einsum("i,i...") does the same by way of a batched product, slower for short rows.
        rows = sample.reshape(len(sample), sample.shape[1:].numel())
        ones = rows.new_ones(len(rows))
        kept = [ones if w is None else to_precision(w, rows.dtype) for w in weights]
        joint = kept[0] if len(kept) == 1 else torch.stack(kept)
        yield (joint @ rows).reshape(len(kept), *sample.shape[1:]).unbind()
        _mark_as_processed(own)


def gradients_of(param: nn.Parameter) -> torch.Tensor:
    """Returns the per-example gradients of the one batch that a parameter holds."""
    sample: Any = param.grad_sample  # type: ignore[attr-defined]
    own: torch.Tensor = sample[0] if isinstance(sample, list) else sample
    # A sum that is rounded to few bits moves by more than the clip norm with one record.
    return own.to(torch.float32 if is_half(param) else param.dtype)


def rows_of(params: Mapping[str, nn.Parameter], expected: int | None) -> int:
    """Returns the number of per-example gradients of the one batch that `params` hold.

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
                    f"got the gradients of {len(sample)} batches, expected 1: a record may be in "
                    "several of them, and counts once for each. Call zero_grad() and backward() "
                    "once per step; BatchMemoryManager splits a larger batch_size into pieces."
                )
            sample = sample[0]
        if sample is None:
            raise UnsupportedRunError(NO_GRADIENTS)
        rows[name] = len(sample)
    if len(set(rows.values())) == 1:
        return next(iter(rows.values()))
    expected = max(rows.values()) if expected is None else expected
    names = [name for name, count in rows.items() if count != expected]
    once = [name for name in names if rows[name] == 1]
    if once and expected > 1:
        raise UnsupportedRunError(
            f"expected a gradient of {once[0]} for every record, got one for the whole batch: what "
            "goes into its layer has one row, which is broadcast over the batch (positions "
            "torch.arange(length)[None]). Expand it to the batch (positions.expand(len(x), -1))."
        )
    raise UnsupportedRunError(why_not_records(names))


def why_not_records(names: Sequence[str]) -> str:
    """Says why the rows of gradients of parameters or layers are of something else than records."""
    return (
        f"expected gradients of {', '.join(names[:_NAMED])} for every record, got rows of "
        "something else: Opacus counts records along the first dimension of what goes into a "
        "layer. Pass the batch first, with batch_first=True in layers of sequences."
    )
