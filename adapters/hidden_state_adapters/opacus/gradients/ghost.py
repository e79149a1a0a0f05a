"""Norms and weighted sums of per-example gradients that are never stored for the whole model.

A layer's per-example gradients follow from what went in and the loss's gradient in what came out.
Whatever is summed here is what was measured: the norm and the sum use the same per-example vectors,
so every summand, times its clip factor, is as short as the clip norm says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients import figures
from hidden_state_adapters.opacus.gradients.norms import row_norms, to_precision

Sampler = Callable[[nn.Module, list[torch.Tensor], torch.Tensor], dict[nn.Parameter, torch.Tensor]]
_CHUNK = 2**24  # numbers that per-example gradients of one layer may take at a time
_KEPT = 4  # times what is kept of a batch anyway
_MODERATE = 2.0**20
_LARGE = 2**16  # numbers


@attrs.frozen(eq=False)
class LayerUse:
    """One pass of a batch through a layer.

    Attributes:
        layer: The layer.
        activations: Its inputs, records first.
        backprops: Gradients of the records' losses in its output, records first.
        sampler: Opacus' rule for the per-example gradients.
    """

    layer: nn.Module
    activations: list[torch.Tensor]
    backprops: torch.Tensor
    sampler: Sampler
    _versions: list[int] = attrs.field(init=False)

    @_versions.default
    def _now(self) -> list[int]:
        return [t._version for t in (*self.activations, self.backprops)]

    def check(self) -> None:
        """Raises UnsupportedRunError unless the tensors are as captured."""
        if self._versions != self._now():
            raise UnsupportedRunError(
                f"the batch was written in place between backward() and step(), and ghost clipping "
                f"still needs what went into {type(self.layer).__name__}. Leave it alone until "
                "after optimizer.step()."
            )

    def check_rows(self) -> None:
        """Raises UnsupportedRunError unless there is one row per record."""
        rows = {len(t) for t in (*self.activations, self.backprops)}
        if len(rows) != 1:
            raise UnsupportedRunError(
                f"{type(self.layer).__name__} got and gave {sorted(rows)} rows, expected one per "
                "record: ghost clipping cannot tell them apart (packed sequences, EmbeddingBag). "
                'Use grad_sample_mode="hooks".'
            )


class LayerGradients:
    """Any layer, also used several times: gradients of some records at a time, made twice.

    Where those of all records take little memory beside what the layer kept of the batch (of
    convolutions they do), they are made once.

    Attributes:
        are_moderate: Whether the factors of all gradients are known not to be long.

    Args:
        uses: In one batch.
    """

    def __init__(self, uses: Sequence[LayerUse]):
        self.uses = tuple(uses)
        self._made: dict[nn.Parameter, torch.Tensor] = {}
        self.are_moderate = False

    @property
    def input_norms(self) -> torch.Tensor:
        """The norms of the rows that went in, in all uses; for inputs of two dimensions."""
        return torch.cat([_row_norms(use.activations[0]) for use in self.uses])

    @property
    def rows(self) -> int:
        """The number of records."""
        rows = {len(use.backprops) for use in self.uses}
        if len(rows) != 1:
            raise UnsupportedRunError(
                f"a layer was used with {sorted(rows)} rows in one pass, expected one per record. "
                'Use grad_sample_mode="hooks".'
            )
        return rows.pop()

    def norms(self, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """The norms of the per-example gradients, shape (rows,), of each of `params`."""
        if self._are_small(params):
            ((_, gradients),) = self._chunks(params)
            self._made = dict(zip(params, gradients, strict=True))
            return [_norms(gradient) for gradient in gradients]
        parts = [[_norms(g) for g in gradients] for _, gradients in self._chunks(params)]
        none = self.uses[0].backprops.new_zeros(0)
        return [torch.cat([none, *(part[i] for part in parts)]) for i in range(len(params))]

    def sums(
        self,
        params: Sequence[nn.Parameter],
        weights: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor],
    ) -> list[list[torch.Tensor]]:
        """For each of `params` the sums of its gradients with each of `weights`, (rows,).

        Args:
            params: As for `norms`.
            weights: Made from the norms.
            norms: What `norms` returned. A layer that gives longer gradients the second time
                (random numbers in its forward pass) does not get past the clip.
        """
        if all(p in self._made for p in params):  # what was measured
            made, self._made = self._made, {}
            return [[_weighted_sum(w, made[p], p.dtype) for w in weights] for p in params]
        totals = [[torch.zeros_like(p.detach()) for _ in weights] for p in params]
        for part, gradients in self._chunks(params):
            for total, gradient, measured in zip(totals, gradients, norms, strict=True):
                now, then = _norms(gradient), measured[part]
                kept = torch.where(now > then, then / now, torch.ones_like(now))
                for one, weight in zip(total, weights, strict=True):
                    factor = to_precision(weight[part] * kept.to(weight), one.dtype)
                    one += torch.einsum("i,i...", factor, gradient.to(one.dtype))
        return totals

    def _are_small(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether the gradients of all records may be kept from the norms to the sums."""
        numbers = self.rows * sum(p.numel() for p in params)
        kept = sum(t.numel() for use in self.uses for t in (*use.activations, use.backprops))
        return 0 < numbers <= min(_KEPT * kept, _CHUNK)

    def _chunks(self, params: Sequence[nn.Parameter]) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        size = max(1, _CHUNK // max(1, sum(p.numel() for p in params)))
        for start in range(0, self.rows, size):
            part = slice(start, start + size)
            made = [
                u.sampler(u.layer, [a[part] for a in u.activations], u.backprops[part])
                for u in self.uses
            ]
            if any(p not in gradients for p in params for gradients in made):
                raise UnsupportedRunError(
                    f"a trainable parameter of {type(self.uses[0].layer).__name__} is not one that "
                    "the layer works with (torch.nn.utils.weight_norm?). Use "
                    "torch.nn.utils.parametrizations."
                )
            # One by one, in a fixed order: the sum over the uses is rounded equally both times.
            yield part, [_add([gradients[p] for gradients in made]) for p in params]


def _norms(gradients: torch.Tensor) -> torch.Tensor:
    return row_norms(gradients.reshape(len(gradients), math.prod(gradients.shape[1:])))


def _weighted_sum(
    weights: torch.Tensor, gradients: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    shape = gradients.shape[1:]
    factors = to_precision(weights, dtype)
    return (factors @ gradients.to(dtype).reshape(len(gradients), shape.numel())).reshape(shape)


def _add(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


class LinearGradients(LayerGradients):
    r"""nn.Linear on one vector per record: the gradient is the outer product b a^T.

    .. math:: \|b_i a_i^T\| = \|b_i\| \|a_i\|, \qquad
        \sum_i w_i b_i a_i^T = \sum_i (w_i |a_i| b_i) (a_i / |a_i|)^T

    Weighted, a short factor can underflow, and be rounded up, though the product is long: hence the
    lengths on the right-hand side. Where all factors are at most 2^20 long, what underflows is
    2^-149 in a factor that is multiplied with 2^20, far below any clip norm that
    `norms.smallest_norm` allows: they are summed as they stand.
    """

    def __init__(self, uses: Sequence[LayerUse]):
        super().__init__(uses)
        (use,) = uses
        self._inputs, self._backprops = use.activations[0].to(use.backprops.dtype), use.backprops

    @functools.cached_property
    def input_norms(self) -> torch.Tensor:  # type: ignore[override]
        """The norms of the rows that went in, as they are in the step.

        A write that torch does not count (through numpy, `.data`) may come after the backward pass.
        """
        inputs = self._inputs
        is_large = inputs.dtype == torch.float32 and inputs.numel() >= _LARGE
        if not (is_large and figures.is_on_host(inputs)):
            return _row_norms(inputs)
        norms = row_norms(inputs)
        # Float32, a third of the time, will do where no square that counts under- or overflows.
        low, high = torch.aminmax(norms)
        is_reliable = low.item() >= 1 / _MODERATE and high.item() <= _MODERATE
        return norms.to(torch.float64) if is_reliable else _row_norms(inputs)

    def norms(self, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """The norms of the per-example gradients, shape (rows,), of each of `params`."""
        inputs, backprops = self.input_norms, _row_norms(self._backprops)
        if figures.is_on_host(inputs) and len(inputs):
            self.are_moderate = (inputs + backprops).max().item() <= _MODERATE
        # Goodfellow 2015, arXiv 1510.01799
        return [backprops * inputs if p.dim() == 2 else backprops for p in params]

    def sums(
        self,
        params: Sequence[nn.Parameter],
        weights: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor],
    ) -> list[list[torch.Tensor]]:
        """For each of `params` the sums of its gradients with each of `weights`, (rows,)."""
        inputs, backprops = self._inputs, self._backprops
        if self.are_moderate:
            sums = []
            for weight in weights:
                weighted = backprops * weight.to(backprops.dtype).unsqueeze(1)
                sums.append(
                    [
                        (weighted.T @ inputs if p.dim() == 2 else weighted.sum(dim=0)).to(p.dtype)
                        for p in params
                    ]
                )
            return [list(of_param) for of_param in zip(*sums, strict=True)]
        limits = torch.finfo(inputs.dtype)
        lengths = self.input_norms.clamp(limits.tiny, limits.max)
        inputs = inputs / lengths.to(inputs)[:, None]

        def total(p: nn.Parameter, weight: torch.Tensor) -> torch.Tensor:
            factors = weight * lengths if p.dim() == 2 else weight
            weighted = backprops * to_precision(factors, backprops.dtype)[:, None]
            return (weighted.T @ inputs if p.dim() == 2 else weighted.sum(dim=0)).to(p.dtype)

        return [[total(p, weight) for weight in weights] for p in params]


class EmbeddingGradients(LayerGradients):
    """nn.Embedding: one vector for every pair of a record and a token that it holds."""

    def __init__(self, uses: Sequence[LayerUse]):
        super().__init__(uses)
        use = self.uses[0]
        ids, size = use.activations[0], use.layer.num_embeddings
        each = math.prod(ids.shape[1:])
        rows = torch.arange(len(ids), device=ids.device).repeat_interleave(each)
        pairs, index = torch.unique(rows * size + ids.flatten(), return_inverse=True)
        vectors = use.backprops.reshape(len(index), use.layer.embedding_dim)
        self._rows, self._tokens = pairs // size, pairs % size
        self._vectors = vectors.new_zeros(len(pairs), vectors.shape[1]).index_add_(
            0, index, vectors
        )

    def norms(self, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """The norms of the per-example gradients, shape (rows,), of each of `params`."""
        squares = _row_norms(self._vectors).square()
        return [squares.new_zeros(self.rows).index_add_(0, self._rows, squares).sqrt()]

    def sums(
        self,
        params: Sequence[nn.Parameter],
        weights: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor],
    ) -> list[list[torch.Tensor]]:
        """For each of `params` the sums of its gradients with each of `weights`, (rows,)."""
        (param,) = params
        total = torch.zeros_like(param.detach())
        dtype = self._vectors.dtype
        factors = [to_precision(weight, dtype)[self._rows, None] for weight in weights]
        summands = [(factor * self._vectors).to(total.dtype) for factor in factors]
        return [[total.index_add(0, self._tokens, summand) for summand in summands]]


def _row_norms(array: torch.Tensor) -> torch.Tensor:
    # In float64: squares of a short factor underflow though the other one is long.
    return torch.linalg.vector_norm(array, dim=1, dtype=torch.float64)


def gradients_of(use: LayerUse) -> LayerGradients:
    """The fastest exact way to the gradients of one use of a layer."""
    use.check_rows()
    kind = type(use.layer)
    own = [getattr(use.layer, name, None) for name in ("weight", "bias")]
    if any(all(p is not q for q in own) for p in use.layer.parameters(recurse=False)):
        return LayerGradients([use])
    if kind is nn.Linear and use.backprops.dim() == use.activations[0].dim() == 2:
        return LinearGradients([use])
    if kind is nn.Embedding:
        return EmbeddingGradients([use])
    # Opacus' Gram matrices for longer inputs are out: where gradients of positions cancel, their
    # norm is off by the root of the precision, and the clip would not hold.
    return LayerGradients([use])
