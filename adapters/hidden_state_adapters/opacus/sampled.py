"""Per-example gradients of any model, from Opacus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.layers.dp_rnn import RNNLinear
from opacus.utils.module_utils import trainable_modules
from torch import nn
from torch.utils._pytree import tree_leaves

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.apart import Call, halves, outputs_of
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.frozen import refuse_packed_sequences
from hidden_state_adapters.opacus.gradients import (
    Figure,
    Piece,
    any_of,
    counted_writes,
    differ,
    read,
    rows_of,
    why_not_records,
)
from hidden_state_adapters.opacus.loader import BatchCursor, tensors_of
from hidden_state_adapters.opacus.passes import ONE_CALL, Passes
from hidden_state_adapters.opacus.precision import (
    check_arithmetic,
    check_convolutions,
)
from hidden_state_adapters.opacus.wrappers import GhostModule


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
        if declared.arguments.is_ghost and not self._is_composed:
            raise UnsupportedRunError(
                'Expected grad_sample_mode = "hooks" with what asks for the gradient of every '
                'record (mechanism, loss_geometry, after), got "ghost": Opacus leaves only sums '
                "that are clipped. Leave it out."
            )
        module = self._module
        self._trained = [part for _, part in trainable_modules(module)]
        self._calls: list[Call] = []  # of the passes since the last piece that count
        self._open = 0  # the last ones of them, whose backward pass is not over
        self._counting = self._trained  # layers at which Opacus counts the records of a batch
        self._miscounted: set[nn.Module] = set()  # those of them that count something else
        self._whole = 0  # records of the batch that is looked at
        self._strayed: Figure = False  # whether a pass used other weights
        self._first: list[tuple[torch.Tensor, int]] = []  # what the first block of a step used
        self._is_idle = False
        self.handles = [module.register_forward_pre_hook(self._begin, with_kwargs=True)]
        refuse_packed_sequences(module)

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
        if self._is_idle or not (torch.is_grad_enabled() and self._is_training()):
            return
        if not self._is_composed:
            self._check_hooks()
        self._frozen.hold()
        self._frozen.check_batch_norm(self._modules)
        self._open = self._open + 1 if self._waits() else 1
        self._calls.append((args, kwargs))
        self._strayed = any_of([self._strayed, self._is_moved()])
        if self._has_loss:
            check_arithmetic(self.params)
            check_convolutions(self.params)

    def _is_training(self) -> bool:
        return any(part.training for part in self._trained)

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
        self._step = step
        if len(self._calls) > 1 and not self._maps_records:
            raise UnsupportedRunError(
                f"step {step} follows {len(self._calls)} training passes through the model, "
                "expected 1: Opacus adds row i of one to row i of the others, and nobody sees "
                "whether they are of one record. (A look at the outputs without torch.no_grad(), "
                "gradient accumulation, two losses with a pass each?) Evaluate in eval() mode or "
                "under torch.no_grad(), step once per pass, clear what a pass left that is not "
                "trained (optimizer.zero_grad(), after its backward pass), and save memory with "
                f"BatchMemoryManager instead of checkpointing. {ONE_CALL}"
            )
        piece = Piece(step, params, block)
        try:
            if self.ghost is None:
                piece.rows = rows_of(self._named(params), self._rows_of(self.inputs))
            else:
                piece.known_norms = self._norms_of_ghost()
                piece.rows = len(piece.known_norms)
        except UnsupportedRunError as problem:
            raise UnsupportedRunError(f"step {step}: {problem}") from None
        self._take_batch(step, piece.rows, block)
        is_other = self._has_other_batch(piece.rows)
        moved = any_of([self._is_moved(), self._strayed])
        largest, other_inputs = piece.largest_norm, block > 0 and self._has_other_inputs()
        if block == 0:
            self._first = [(x, counted_writes(x)) for x in self.inputs]
        self._whole = piece.rows
        mixes = self._look_once(piece, self._computed) if self._is_open else ""
        if self._miscounted:
            names = [name for name, part in self._modules if part in self._miscounted]
            raise UnsupportedRunError(f"step {step}: {why_not_records(names)}")
        found = read([is_other, moved, largest, other_inputs, error])
        is_other, moved, piece.longest, other_inputs, piece.error = found
        if is_other:
            raise self._other_inputs()
        self._judge(piece, moved, mixes, other_inputs)
        return piece

    def _named(self, params: Sequence[nn.Parameter]) -> dict[str, nn.Parameter]:
        known = {id(param): name for name, param in self._module.named_parameters()}
        return {known.get(id(param), str(i)): param for i, param in enumerate(params)}

    def _rows_of(self, values: Iterable[Any], dim: int | None = None) -> int | None:
        """Returns the rows of the first tensor that has some; None where nobody knows."""
        dim = self._dim if dim is None else dim
        tensors = (x for x in values if isinstance(x, torch.Tensor))
        return next((x.shape[dim] for x in tensors if x.dim() > dim), None)

    def _norms_of_ghost(self) -> torch.Tensor:
        norms = self.ghost._per_sample_gradient_norms  # that Opacus clipped with
        if norms is None:
            raise UnsupportedRunError(
                "got no gradients that Opacus clipped, expected the backward "
                'pass of the criterion that make_private returned: with grad_sample_mode="ghost" '
                "it makes the second pass, in which the gradients are clipped."
            )
        self.ghost.check_sums()
        return norms.detach()  # type: ignore[no-any-return]

    def _has_other_inputs(self) -> Figure:
        """Tells whether a block is updated on something else than the first one."""
        inputs = self.inputs
        if len(inputs) != len(self._first):
            return True
        pairs = zip(inputs, self._first, strict=True)
        return any_of(_is_other(x, old, writes) for x, (old, writes) in pairs)

    def _outputs(self, piece: Piece) -> Sequence[torch.Tensor]:
        call = self.call
        assert call is not None
        return outputs_of(self._module, self._computed, call, piece.rows)

    def _computed(self, call: Call) -> list[torch.Tensor]:
        args, kwargs = call
        rows = {self._rows_of([x]) for x in tensors_of(call)}
        parts = {len(half) for half in halves(self._whole)} - {1}  # what is broadcast fits all
        is_part = self._whole not in rows and not rows.isdisjoint(parts)
        seen: set[nn.Module] = set()

        def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            # A sequence that is as long as the batch has records stays so in a part of it.
            dim = 0 if isinstance(layer, RNNLinear) else self._dim
            if is_part and self._rows_of(inputs[:1], dim) == self._whole:
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
        self._calls, self._strayed = [], False
        if self.ghost is not None:
            self.ghost._per_sample_gradient_norms = None

    def after(self, step: int) -> None:
        """See `Passes.after`."""
        super().after(step)
        self._first, self._calls = [], []

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """The tensors that went into the model in all passes that count."""
        return tuple(tensors_of(self._calls))

    @property
    def call(self) -> Call | None:
        """See `Passes.call`."""
        return self._calls[0] if self._calls else None

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """The checked, the declared and the public assumptions."""
        yield from self._of_the_batches()
        yield from self._of_the_model()
        if self._maps_records:
            yield Assumption.declared(
                "of several passes before a step row i is made of record i alone, or of no record"
            )
        yield from self._of_the_gradients()


def _is_other(tensor: torch.Tensor, old: torch.Tensor, writes: int) -> Figure:
    if counted_writes(old) != writes:
        return True
    if tensor is old:
        return False
    kinds = [(x.dtype, x.shape, x.device) for x in (tensor, old)]
    return kinds[0] != kinds[1] or differ(tensor.detach(), old.detach())
