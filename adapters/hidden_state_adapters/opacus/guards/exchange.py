"""Versions of a batch in which half of the records are others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from hidden_state_adapters.opacus.gradients.figures import Figure, any_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

_MOST_COPIED = 6  # records, in each half
_PARTS = 16  # of a batch, at most
_SMALL = 2**13  # numbers that are not worth a part of their own


@attrs.frozen(eq=False)
class Half:
    """A half of the records of a batch that is kept, and versions of the batch that agree in it.

    Attributes:
        call: The arguments of which some are tensors with an entry for every record.
        rows: Records of the batch.
        dim: The dimension that counts them, in every tensor that has one entry for each.
        kept: Positions of the half that is kept.
        others: What stands in place of the other half: positions, of shape (rows,), for each
            version.
        keeps_whole: Whether whole numbers are not scaled at all.
    """

    call: Call
    rows: int
    dim: int
    kept: torch.Tensor
    others: Sequence[torch.Tensor]
    keeps_whole: bool

    @property
    def numbers(self) -> range:
        """Of the versions in which the other half of the records are others."""
        return range(1, 1 + len(self.others))

    def version(self, number: int) -> Call:
        """The arguments in version `number`.

        In version 0 the other half are the records themselves. All agree in the half that is kept.
        """

        def exchanged(value: Any) -> Any:
            if not holds_records(value, self.rows, self.dim):
                return value
            made = torch.empty_like(value.detach())
            for part, kept, old, new in self._parts(value, number):
                mixed = torch.where(kept, _scaled(old, 0.5, self.keeps_whole), new)
                made.narrow(self.dim, part.start, len(part)).copy_(mixed)
            return made.requires_grad_(value.requires_grad)

        found: Call = tree_map(exchanged, self.call)
        return found

    def differs(self, number: int) -> Figure:
        """Whether version `number` is not version 0: with equal rows there is nothing to see."""
        return any_of(
            ((new != old) & ~kept).any()
            for value in tree_leaves(self.call)
            if holds_records(value, self.rows, self.dim)
            for _, kept, old, new in self._parts(value, number)
        )

    def _parts(
        self, value: torch.Tensor, number: int
    ) -> Iterator[tuple[range, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Some records at a time: what lies between takes several times the memory.

        Gives their positions, which of them are kept, the records, and those of the version.
        """
        whole = value.detach()
        is_kept = torch.zeros(self.rows, dtype=torch.bool).index_fill_(0, self.kept, True)
        shape = [1] * value.dim()
        shape[self.dim] = -1
        size = _part_size(whole, self.rows)
        for start in range(0, self.rows, size):
            part = range(start, min(start + size, self.rows))
            old = new = whole.narrow(self.dim, start, len(part))
            if number > 0:
                positions = self.others[number - 1][part.start : part.stop]
                new = whole.index_select(self.dim, positions.to(whole.device))
            if number == 1:
                new = _scaled(new, 0.25, self.keeps_whole)
            kept = is_kept[part.start : part.stop].to(whole.device).reshape(shape)
            yield part, kept, old, new

    def moved(self, before: Any, after: Any) -> Figure:
        """Whether results for records that were kept differ, by more than rounding.

        Raises:
            ValueError: No result has an entry for every record.
        """
        pairs = [
            (a, b)
            for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True)
            if holds_records(a, self.rows, self.dim) and a.is_floating_point()
        ]
        if not pairs:
            raise ValueError("Expected a result with an entry for every record, got none.")
        return any_of(are_apart(*_common(self._rows_kept(a), self._rows_kept(b))) for a, b in pairs)

    def _rows_kept(self, value: torch.Tensor) -> torch.Tensor:
        return value.index_select(self.dim, self.kept.to(value.device))


def _part_size(value: torch.Tensor, rows: int) -> int:
    """Of how many records a part is."""
    return max(-(-rows // _PARTS), _SMALL * rows // max(1, value.numel()))


def holds_records(value: Any, rows: int, dim: int) -> bool:
    """Whether `value` is a tensor with an entry for every record."""
    has_dim = isinstance(value, torch.Tensor) and value.dim() > dim
    return has_dim and value.shape[dim] == rows


def halves(call: Call, rows: int, dim: int, *, keeps_whole: bool = False) -> Iterator[Half]:
    """Each half of the records in turn, drawn at random, with others in place of the other half.

    These are, besides the records themselves, the next ones of the batch, and copies of a single
    one: of the largest, of the smallest, of that with the smallest label (-100 is ignored, say). So
    that rows which are equal in some respect (of norm 1, say) differ in it, numbers are scaled:
    by 1/2 in the rows that are kept, in all versions, and by 1/4 in the next ones.

    Every value is one that the batch holds, or lies between it and 0. Whole numbers stay whole, and
    those above 0 stay above it: they may be codes of categories, and an unknown code can stop a GPU
    for good.

    Args:
        call: Arguments of which some are tensors with an entry for every record.
        rows: Records of the batch, at least two.
        dim: The dimension that counts them.
        keeps_whole: Whether whole numbers are not scaled at all.
    """
    places = np.random.default_rng(0).permutation(rows)
    others = [torch.arange(rows).roll(1), *_copies(call, rows, dim)]
    for is_kept in (places >= rows // 2, places < rows // 2):
        kept = torch.from_numpy(np.flatnonzero(is_kept))
        yield Half(call, rows, dim, kept, others, keeps_whole)


def _copies(call: Call, rows: int, dim: int) -> list[torch.Tensor]:
    """Positions with one record everywhere: those that are extreme in one of the arguments."""
    extreme: dict[int, None] = {}
    for value in tree_leaves(call):
        if holds_records(value, rows, dim) and value.numel():
            entries = value.detach().transpose(0, dim).reshape(rows, -1)
            if value.is_floating_point():
                parts = entries.split(_part_size(entries, rows))  # each is copied into float64
                norms = [torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) for x in parts]
                sizes = torch.cat(norms)
            else:
                whole = entries.real if value.is_complex() else entries
                sizes = whole.sum(1, dtype=torch.float64)
            for found in (sizes.argmax(), sizes.argmin()):
                extreme[int(found)] = None
    return [torch.full((rows,), record) for record in list(extreme)[:_MOST_COPIED]]


def _scaled(value: torch.Tensor, factor: float, keeps_whole: bool) -> torch.Tensor:
    """`value` times `factor`; whole numbers rounded down, but not to 0, and none below 2."""
    if value.dtype == torch.bool or value.is_complex():
        return value
    smaller = (value * factor).floor().clamp(min=1).to(value.dtype)
    whole = torch.where((value < 2) | keeps_whole, value, smaller)
    if not value.is_floating_point():
        return whole
    return torch.where(value == value.round(), whole, factor * value)


def _common(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What both have, where a layer cuts its input to the longest record of the batch."""
    common = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
    return a[common], b[common]


def are_apart(a: torch.Tensor, b: torch.Tensor) -> Figure:
    """Whether two results of one computation differ by more than rounding.

    Rows that do not act on each other go through the same sums in both, so that they agree in every
    bit; only where a layer cuts its input to the longest record of the batch are sums of other
    lengths. eps^(2/3) of the largest result, 2e-5 in float32, is far above what that changes, and
    far below what half of a batch changes in its statistics.
    """
    if not a.numel():
        return False
    size = torch.nan_to_num(a.abs(), nan=0.0, posinf=0.0).max()
    limit = torch.finfo(a.dtype).eps ** (2 / 3) * size
    agree = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= limit)
    return ~agree.all()
