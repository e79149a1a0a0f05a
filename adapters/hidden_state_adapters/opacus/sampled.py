"""Per-example gradients of any model, from Opacus."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.utils.module_utils import trainable_modules
from torch import nn
from torch.utils._pytree import tree_leaves

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.apart import (
    Call,
    halves,
    losses_add_up,
    losses_are_apart,
    outputs_of,
)
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.frozen import refuse_packed_sequences
from hidden_state_adapters.opacus.gradients import (
    Figure,
    Piece,
    any_of,
    check_gradients,
    gradients_of,
    joint_norms,
    read,
    rows_of,
    sums_of_records,
    why_not_records,
)
from hidden_state_adapters.opacus.loader import BatchCursor, tensors_of
from hidden_state_adapters.opacus.passes import Passes
from hidden_state_adapters.opacus.precision import check_arithmetic, check_convolutions
from hidden_state_adapters.opacus.wrappers import GhostModule

LOSS_OF_RECORDS = (
    "the loss of a batch is the mean (or sum) of the losses of its records: no class weights or "
    "token counts in a mean, no contrastive terms"
)
_MIXING_CRITERION = (
    "the criterion that was passed mixes the records of a batch (class weights or a number of "
    "tokens in a mean, a contrastive term?), and no clip bounds one of them. Take the mean of "
    'losses with reduction="none" (docs/opacus.md, "The loss of a record").'
)
_MIXING_LOSS = (
    "a number that the model returns for a batch, such as its loss, is not the mean or sum of "
    "those of both halves: no clip bounds one record. Take the mean of the losses of the records "
    '(docs/opacus.md, "The loss of a record"); return other numbers with .item().'
)


class SampledRun(Passes):
    """Takes the gradients that Opacus computed for every record, at Opacus' trust.

    The training passes use the weights that the last step left.

    Args:
        declared: Run whose model is trained.
        cursor: Position of the loop among the batches.
    """

    _clears = False  # whether what was cleared is known not to count

    def __init__(self, declared: DeclaredRun, cursor: BatchCursor):
        super().__init__(declared, cursor)
        arguments = declared.arguments
        if arguments.is_ghost and not self._is_composed:
            raise UnsupportedRunError(
                'Expected grad_sample_mode = "hooks" with what asks for the gradient of every '
                'record (mechanism, loss_geometry, after), got "ghost": Opacus leaves only sums '
                "that are clipped. Leave it out."
            )
        self._maps_records = arguments.loop_maps_records
        self._divides = arguments.loss_reduction == "mean"
        # That of ghost clipping is called record by record.
        self._criterion = None if arguments.is_ghost else arguments.criterion
        self._has_apart_losses: bool | None = None
        self._trained = [part for _, part in trainable_modules(self._module)]
        self._open = 0  # the last passes, whose backward pass is not over
        self._counting = self._trained  # layers at which Opacus counts the records of a batch
        self._miscounted: set[nn.Module] = set()  # those of them that count something else
        self._whole = 0  # records of the batch that is looked at
        self._strayed: Figure = False  # whether a pass used other weights
        self._is_idle = False
        self.handles = [self._module.register_forward_pre_hook(self._begin, with_kwargs=True)]
        refuse_packed_sequences(self._module)

    def follow(self, private: Any) -> None:
        """Takes the module that `private_module` made, in which Opacus' hooks are."""
        if isinstance(private, GradSampleHooks):
            self._counting = list(private.iterate_submodules(self._module))
            self.handles += vars(self._module).get("autograd_grad_sample_hooks", [])
        if isinstance(private, GhostModule):
            self.ghost = private
        elif isinstance(private, GradSampleHooks):
            private.cleared, self._clears = self.cleared, True

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_idle or not torch.is_grad_enabled():
            return
        if not any(part.training for part in self._trained):
            return
        if not self._is_composed:
            self._check_hooks()
        self._declared.frozen.hold()
        self._declared.frozen.check_batch_norm(self._modules)
        self._open = self._open + 1 if self._waits() else 1
        self._calls.append((args, kwargs))
        self._strayed = any_of([self._strayed, self._is_moved()])
        if self._declared.loss is not None:
            check_arithmetic(self.params)
            check_convolutions(self.params)

    def _waits(self) -> bool:
        """Tells whether Opacus waits for the backward pass of some use of a parameter."""
        return any(getattr(param, "_forward_counter", 0) for param in self.params)

    def cleared(self) -> None:
        """Forgets finished passes, of which nothing is left; not those that wait."""
        if self._clears and not self._is_idle:
            self._calls = self._calls[-self._open :] if self._waits() else []
            self._strayed = self._strayed if self._calls else False

    def take(self, step: int, params: Sequence[nn.Parameter], block: int, error: Figure) -> Piece:
        """See `Passes.take`."""
        if len(self._calls) > 1 and not self._maps_records:
            raise UnsupportedRunError(
                f"step {step} follows {len(self._calls)} training passes through the model, "
                "expected 1: nobody sees whether row i of each is of one record. For gradient "
                "accumulation use BatchMemoryManager; look at outputs under torch.no_grad(). For "
                'twins, views and GANs see docs/opacus.md, "Siamese networks and GANs".'
            )
        try:
            norms = self._norms(params) if self.ghost is None else self._norms_of_ghost()
        except UnsupportedRunError as problem:
            raise UnsupportedRunError(f"step {step}: {problem}") from None
        rows = len(norms)
        self._take_batch(step, rows, block)
        is_other = self._has_other_batch(rows)
        is_moved = any_of([self._is_moved(), self._strayed])
        mixes = self._look(rows) if self._is_open and rows > 1 and self._calls else ""
        if self._miscounted:
            names = [name for name, part in self._modules if part in self._miscounted]
            raise UnsupportedRunError(f"step {step}: {why_not_records(names)}")
        largest = norms.max() if rows else 0.0
        found = read([is_other, is_moved, self._is_other_block(block), largest, error])
        is_other, is_moved, is_other_block, longest, length = found
        self._judge(is_other, is_moved, is_other_block, mixes)
        check_gradients(step, longest, self._declared.lipschitz)
        sums = functools.partial(sums_of_records, params)
        return Piece(step, params, block, norms, sums, longest, length)

    def _norms(self, params: Sequence[nn.Parameter]) -> torch.Tensor:
        known = {id(param): name for name, param in self._module.named_parameters()}
        named = {known.get(id(param), str(i)): param for i, param in enumerate(params)}
        rows_of(named, _rows_of(self.inputs, self._dim))
        return joint_norms([gradients_of(param) for param in params])

    def _norms_of_ghost(self) -> torch.Tensor:
        norms = self.ghost._per_sample_gradient_norms  # that Opacus clipped with
        if norms is None:
            raise UnsupportedRunError(
                "got no gradients that Opacus clipped, expected the backward pass of the criterion "
                'that make_private returned: with grad_sample_mode="ghost" it makes the second '
                "pass, in which the gradients are clipped."
            )
        self.ghost.check_sums()
        return norms.detach()  # type: ignore[no-any-return]

    # What model and criterion do to the records

    def _look(self, rows: int) -> str:
        """Says how model or criterion mix records, once, of the first batch of several."""
        self._whole, call = rows, self._calls[0]
        mixes = self._mixing(self._computed, rows)
        if mixes or self._dim:
            return mixes
        if self._criterion is None:
            adds_up = losses_add_up(self._module, self._computed, call, rows)
            return _MIXING_LOSS if adds_up is False else ""
        try:
            outputs = outputs_of(self._module, self._computed, call, rows)
            tensors = self._collated.tensors(self._step, rows)
        except Exception:  # whatever model, data set or collate_fn may raise that is called again
            return ""
        apart = losses_are_apart(self._criterion, outputs, tensors, self._divides)
        self._has_apart_losses = apart
        return _MIXING_CRITERION if apart is False else ""

    def _computed(self, call: Call) -> list[torch.Tensor]:
        args, kwargs = call
        rows = {_rows_of([x], 0) for x in tensors_of(call)}
        parts = {len(half) for half in halves(self._whole)} - {1}  # what is broadcast fits all
        is_part = self._whole not in rows and not (self._dim or rows.isdisjoint(parts))
        seen: set[nn.Module] = set()

        def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            # A sequence that is as long as the batch has records stays so in a part of it.
            if is_part and _rows_of(inputs[:1], 0) == self._whole:
                seen.add(layer)

        handles = [layer.register_forward_pre_hook(note) for layer in self._counting]
        try:
            found = tree_leaves(self._module(*args, **kwargs))
        finally:
            for handle in handles:
                handle.remove()
        self._miscounted |= seen  # not of a pass that failed: states are those of the whole batch
        return [x for x in found if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def used(self) -> None:
        """See `Passes.used`."""
        super().used()
        self._strayed = False
        if self.ghost is not None:
            self.ghost._per_sample_gradient_norms = None

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """The assumptions of `Passes`, and those about passes and loss of the loop."""
        yield from super().assumptions
        if self._maps_records:
            yield Assumption.declared(
                "of several passes before a step row i is made of record i alone, or of no record"
            )
        looked = (
            " (the criterion that was passed was looked at once, on the first batch; that the "
            "loop uses it was not)"
        )
        yield Assumption.declared(f"{LOSS_OF_RECORDS}{looked if self._has_apart_losses else ''}")
        norm = self._declared.arguments.feature_norm
        if norm is not None:
            yield Assumption.declared(f"feature norms at most {float(norm):g}")


def _rows_of(values: Iterable[Any], dim: int) -> int | None:
    """Returns the rows of the first tensor that has some; None where nobody knows."""
    tensors = (x for x in values if isinstance(x, torch.Tensor))
    return next((x.shape[dim] for x in tensors if x.dim() > dim), None)
