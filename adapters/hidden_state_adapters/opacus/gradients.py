"""Per-example gradients of a batch: norms that float32 does not spoil, clip factors and sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.precision import exact_products, is_half

_NAMED = 4  # in an error
_BLOCK = 256
_ONE = torch.ones(())

OPACUS_CLIP_OFFSET = 1e-6
"""Opacus clips with the factor min(1, C / (norm + 1e-6))."""

ROUNDING = 1e-6
"""Rounding in float32 of a norm that is exactly at its bound."""

_SLACK = ROUNDING + torch.finfo(torch.float32).eps

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
    """Tells whether two tensors of one type, shape and device differ in some element."""
    if is_on_host(value):
        return not torch.equal(value, other)  # leaves no mask behind, and stops early
    return (value != other).any()


def is_on_host(value: torch.Tensor) -> bool:
    """Tells whether nobody has to wait for the values of a tensor."""
    return value.device.type == "cpu"


def any_of(flags: Iterable[Figure]) -> Figure:
    """Tells whether one of `flags` is true."""
    return _decided(flags, True)


def all_of(flags: Iterable[Figure]) -> Figure:
    """Tells whether all of `flags` are true."""
    return _decided(flags, False)


def _decided(flags: Iterable[Figure], by: bool) -> Figure:
    """Returns `by` if one of the flags is, else the other truth value."""
    tensors = []
    for flag in flags:
        if isinstance(flag, torch.Tensor):
            tensors.append(flag)
        elif bool(flag) is by:
            return by
    if len(tensors) < 2:
        return tensors[0] if tensors else not by
    joint = torch.stack([flag.to(tensors[0].device) for flag in tensors])
    return joint.any() if by else joint.all()


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
    rows = [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts]
    norms = [row_norms(part) for part in rows]
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
        norms = [norm.to(device=norms[0].device, dtype=dtype) for norm in norms]
    if len(norms) == 2:  # weight and bias of one layer
        return torch.hypot(norms[0], norms[1])
    return torch.linalg.vector_norm(torch.stack(list(norms), dim=1), dim=1)


def joint_norm(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """Returns the L2 norm of all parameters as one vector, computed in float64 (0-dim)."""
    parts = [torch.linalg.vector_norm(p.detach(), dtype=torch.float64) for p in params]
    return torch.stack([part.to(parts[0].device) for part in parts]).norm()


def smallest_norm(params: Sequence[nn.Parameter]) -> float:
    """Returns the smallest norm that is reliable in the coarsest precision of `params`.

    Squares of coordinates underflow: below sqrt(tiny) a computed norm can be far too small, and a
    factor made from it far too large. At 1e8 times that the squares that are lost cannot matter.
    """
    tiny = max(torch.finfo(p.dtype).tiny for p in params)
    return 1e8 * math.sqrt(tiny)


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


def check_features(step: int, largest: float, bound: float) -> None:
    """Raises UnsupportedRunError if features are longer than declared."""
    if not largest <= bound * (1 + ROUNDING):
        raise UnsupportedRunError(
            f"step {step} used features of norm {largest:.8g}, expected at most "
            f"feature_norm = {bound:.8g}. The step was not taken. Scale every record "
            "down to the declared norm, after all augmentation."
        )


def check_gradients(step: int, largest: float, lipschitz: float | None) -> None:
    """Raises UnsupportedRunError if gradients are longer than declared, or not finite."""
    if lipschitz is not None and not largest <= lipschitz * (1 + _SLACK):
        raise UnsupportedRunError(
            f"step {step} has a per-example gradient of norm {largest:.8g}, expected at most "
            f"the declared lipschitz = {lipschitz:.8g}. The loss is not the declared one (sum "
            "instead of mean? class weights? a scaled loss?) or the features are longer than "
            "declared. The step was not taken. Declare the loss that the loop computes, and "
            "scale every record down to the declared norm."
        )
    if not math.isfinite(largest):
        raise UnsupportedRunError(
            f"step {step} has a per-example gradient whose norm is not finite (or a square "
            "overflows): no clip bounds it. The step was not taken. Look for a division by 0, "
            "or scale the loss down."
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
            "gradients that are as long as the bound. Raise max_grad_norm a little: "
            f"{needed * (1 + 1e-5):.6g} will do."
        )


@attrs.define(eq=False)
class Piece:
    """Gradients at hand: of a batch or, under BatchMemoryManager, of a physical batch.

    Those of the records are where Opacus leaves them, with the parameters. Those of a linear layer
    may be given by its features and slopes instead: that of record i is their product.

    Attributes:
        step: Number of the logical step that it belongs to, from 1 on.
        params: Parameters whose gradients these are: all, or those of one block.
        block: Number of the block, from 0 on; 0 for an optimizer that has one.
        rows: Number of records.
        known_norms: Norms of the gradients before the clip, shape (rows,); None until they are
            computed.
        longest: Largest of these norms, as soon as it was read from the device.
        error: Length of DiceSGD's error, read likewise.
        weight: Weight of the linear layer.
        features: Input of the layer, shape (rows, features); None where Opacus has gradients.
        slopes: Gradient of the loss of every record in its outputs, shape (rows, outputs).
    """

    step: int
    params: Sequence[nn.Parameter]
    block: int = 0
    rows: int = 0
    known_norms: torch.Tensor | None = None
    longest: float = math.inf
    error: float = 0.0
    weight: Any = None
    features: Any = None
    slopes: Any = None

    def follow_from(
        self, weight: nn.Parameter, features: torch.Tensor, slopes: torch.Tensor
    ) -> tuple[Figure, torch.Tensor]:
        """Takes features and slopes, and returns the largest norm of those and all of these."""
        self.weight, self.features, self.slopes = weight, features, slopes
        lengths, sizes = row_norms(features), row_norms(slopes)
        if len(self.params) == 2:
            self.known_norms = sizes * torch.hypot(lengths, _ONE)
        else:
            self.known_norms = sizes * lengths if self.params[0] is weight else sizes
        return lengths.max() if self.rows else 0.0, sizes

    @property
    def norms(self) -> torch.Tensor:
        """Norms of the gradients for all `params` together, before the clip, shape (rows,)."""
        if self.known_norms is None:
            self.known_norms = joint_norms([_stored(param) for param in self.params])
        return self.known_norms

    @property
    def largest_norm(self) -> Figure:
        """The largest of the norms; 0 for no rows."""
        return self.norms.max() if self.rows else 0.0

    def add_sums(self, *weights: torch.Tensor | None) -> list[list[torch.Tensor]]:
        """Adds sums of the gradients, each times its weight, to `summed_grad`.

        Args:
            *weights: Weights of the records, shape (rows,), made from the norms; None for 1. The
                sums with the first ones are added.

        Returns:
            The sums with the others, for each of `params`.
        """
        with exact_products(self.norms.device.type):
            found = self._of_records(weights) if self.features is None else self._of_layer(weights)
            rests = []
            for param, (total, *rest) in zip(self.params, found, strict=True):
                before = param.summed_grad  # type: ignore[attr-defined]
                param.summed_grad = total if before is None else before + total  # type: ignore[attr-defined]
                rests.append(rest)
        return rests

    def _of_layer(self, weights: Any) -> Iterator[Sequence[torch.Tensor]]:
        slopes = [
            self.slopes if w is None else self.slopes * to_precision(w, self.slopes.dtype)[:, None]
            for w in weights
        ]
        joint = slopes[0] if len(slopes) == 1 else torch.cat(slopes, dim=1)
        for param in self.params:
            total = joint.T @ self.features if param is self.weight else joint.sum(dim=0)
            yield total.chunk(len(slopes)) if len(slopes) > 1 else (total,)

    def _of_records(self, weights: Any) -> Iterator[Sequence[torch.Tensor]]:
        """Uses up the gradients that are with the parameters."""
        kept = [torch.ones_like(self.norms) if w is None else w for w in weights]
        joint = kept[0] if len(kept) == 1 else torch.stack(kept)
        for param in self.params:
            own: Any = param.grad_sample  # type: ignore[attr-defined]
            _check_processed_flag(own)
            sample = _stored(param)
            # einsum("i,i...") does the same by way of a batched product, slower for short rows.
            rows = sample.reshape(len(sample), sample.shape[1:].numel())
            total = to_precision(joint, sample.dtype).to(sample.device) @ rows
            yield total.reshape(len(kept), *sample.shape[1:]).unbind()
            _mark_as_processed(own)


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
    """Says why the rows of gradients of parameters or layers are of something else than records."""
    return (
        f"expected gradients of {', '.join(names[:_NAMED])} for every record, got rows of "
        "something else: Opacus counts records along the first dimension of what goes into a "
        "layer, and here another one comes first (the sequence, as in attention without "
        "batch_first=True?). Pass the batch first, with batch_first=True in the layer, or flatten "
        "what is no record into another dimension."
    )


def _stored(param: nn.Parameter) -> torch.Tensor:
    """Returns the per-example gradients of the one batch that a parameter holds."""
    sample: Any = param.grad_sample  # type: ignore[attr-defined]
    own: torch.Tensor = sample[0] if isinstance(sample, list) else sample
    # A sum that is rounded to few bits moves by more than the clip norm with one record.
    return own.to(torch.float32 if is_half(param) else param.dtype)
