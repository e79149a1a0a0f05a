"""The step of a linear head with a known loss, from features, targets and the last iterate."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.apart import Call
from hidden_state_adapters.opacus.criteria import REMEDY, diagnosis
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.gradients import (
    ROUNDING,
    Figure,
    Piece,
    check_gradients,
    counted_writes,
    read,
    row_norms,
    to_precision,
)
from hidden_state_adapters.opacus.loader import BatchCursor, tensors_of
from hidden_state_adapters.opacus.passes import Passes
from hidden_state_adapters.opacus.precision import exact_products

TOLERANCE = 1e-2  # of the length of all slopes of a piece: bfloat16 in a loop passes
_ROUNDING_UNITS = 100.0
_ONE = torch.ones(())


class _Pass(NamedTuple):
    """One pass of a batch through the head.

    Attributes:
        features: Input of the head.
        outputs: Leaf that the loop got: its backward pass leaves the slopes there, and no gradient
            at the parameters of the head.
        is_moved: True if the weights of the model were not those of the last step.
        call: Arguments of the model; None where the loop called the head by itself.
        writes: Number of writes to both before the loop got the outputs.
    """

    features: torch.Tensor
    outputs: torch.Tensor
    is_moved: Figure
    call: Call | None
    writes: int


class HeadRun(Passes):
    """Computes the gradients of a linear head, which is all there is to train, of a known loss.

    The loop gets the head's outputs as a leaf, computed from the run's own copy of the weights. The
    slopes are computed from them and the targets of the batch that was drawn. What the loop's
    backward pass left at the leaf is only compared with them: a courtesy, as is the comparison of
    the weights. Neither goes into the step, which moves the own copy.

    Args:
        declared: Run whose model is such a head, or ends with it.
        cursor: Position of the loop among the batches.
    """

    def __init__(self, declared: DeclaredRun, cursor: BatchCursor):
        super().__init__(declared, cursor)
        head: Any = declared.head
        arguments = declared.arguments
        self._head, self._weight, self._bias = head, head.weight, head.bias
        self._feature_norm = float(arguments.feature_norm)  # type: ignore[arg-type]
        self._known: Any = declared.known_criterion
        self._divides, self._targets_of = arguments.loss_reduction == "mean", arguments.targets
        self._passes: list[_Pass] = []
        self._call: Call | None = None
        self._is_idle = False
        self.handles = [head.register_forward_hook(self._note, with_kwargs=True, prepend=True)]
        if self._has_layers:
            begin = self._module.register_forward_pre_hook(self._begin, with_kwargs=True)
            end = self._module.register_forward_hook(self._end, always_call=True)
            self.handles += [begin, end]

    # In a pass; a compiled model would write what a hook keeps into its graph

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._begin)(module, args, kwargs)  # type: ignore[no-any-return]
        if torch.is_grad_enabled() and not self._is_idle:
            self._declared.frozen.hold()
            self._declared.frozen.check_batch_norm(self._modules)
            self._call = args, kwargs
        return None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._call = None  # what reaches the head later did not go through the model

    def _note(
        self, head: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._note)(head, args, kwargs, output)  # type: ignore[no-any-return]
        if self._is_idle or not output.requires_grad:
            return None
        call, self._call = self._call if self._has_layers else (args, kwargs), None
        inputs = args[0] if args else kwargs["input"]
        if inputs.dim() != 2:
            raise UnsupportedRunError(
                f"Expected features of shape (records, {head.in_features}) at the linear layer, "
                f"got {tuple(inputs.shape[1:])} for each: several rows per record are not one "
                "linear prediction. Flatten them."
            )
        self._check_hooks()
        if call is None and inputs.requires_grad:
            raise UnsupportedRunError(
                "Expected features that do not depend on the linear head, got those of a pass "
                "in which the model called it before: no loss is known to be convex then. Leave "
                "out criterion= and feature_norm=: every step then counts."
            )
        is_other = head.weight is not self._weight or head.bias is not self._bias
        features = inputs.detach()
        with exact_products(output.device.type):
            outputs = F.linear(features.to(self.own[0].dtype), *self.own).requires_grad_()
        is_moved = is_other or self._is_moved()
        writes = counted_writes(features) + outputs._version
        self._passes.append(_Pass(features, outputs, is_moved, call, writes))
        return outputs

    # In a step

    def take(self, step: int, params: Sequence[nn.Parameter], block: int, error: Figure) -> Piece:
        """See `Passes.take`."""
        used = [one for one in self._passes if one.outputs.grad is not None]
        self._check_reached(step)
        if len(used) > 1:
            raise UnsupportedRunError(
                f"step {step} got the gradients of {len(used)} batches, expected 1. Call "
                "optimizer.step() after every backward(); for batches that do not fit into memory "
                "raise the batch_size of the DataLoader and use BatchMemoryManager."
            )
        rows = len(used[0].features) if used else 0
        self._calls = [one.call for one in used if one.call is not None]
        self._take_batch(step, rows, block)
        if not rows:
            empty = [self._weight.new_zeros(0, size) for size in (*self._weight.shape, 1)]
            sums = functools.partial(_sums_of_layer, self._weight, empty[1], empty[0], params)
            (length,) = read([error])
            return Piece(step, params, block, empty[2][:, 0], sums, 0.0, length)
        own = used[0]
        if counted_writes(own.features) + own.outputs._version != own.writes:
            raise UnsupportedRunError(
                f"step {step}: what went into the linear head, or came out, was changed in place "
                "after the pass. Compute out of place."
            )
        is_other = self._has_other_batch(rows)
        features, outputs = own.features.to(own.outputs.dtype), own.outputs.detach()
        target = self._target(outputs)
        with exact_products(outputs.device.type):
            try:
                slopes = self._known.slopes(outputs, target)
            except (TypeError, ValueError) as problem:
                raise UnsupportedRunError(f"The targets of the batch: {problem}") from None
            looks = self._is_open and rows > 1 and bool(self._calls)
            mixes = self._mixing(self._features, rows) if looks else ""
        lengths, sizes = row_norms(features), row_norms(slopes)
        if len(params) == 2:
            norms = sizes * torch.hypot(lengths, _ONE)
        else:
            norms = sizes * lengths if params[0] is self._weight else sizes
        got: Any = own.outputs.grad
        off = torch.linalg.vector_norm(torch.sub(slopes, got, alpha=rows if self._divides else 1))
        figures = [is_other, own.is_moved, self._is_other_block(block), error]
        figures += [lengths.max(), norms.max(), off, torch.linalg.vector_norm(sizes)]
        is_other, is_moved, is_other_block, length, feature, longest, off, size = read(figures)
        self._judge(is_other, is_moved, is_other_block, mixes)
        if not feature <= self._feature_norm * (1 + ROUNDING):
            raise UnsupportedRunError(
                f"step {step} used features of norm {feature:.8g}, expected at most feature_norm = "
                f"{self._feature_norm:.8g}. Scale every record down to it, after all augmentation."
            )
        if math.isnan(longest):
            raise self._other_loss(own, target)  # targets, or a loss, that have no gradient there
        check_gradients(step, longest, self._declared.lipschitz)
        if not off <= TOLERANCE * size + self._rounding_if(off, size, outputs, target):
            raise self._other_loss(own, target)
        sums = functools.partial(_sums_of_layer, self._weight, features, slopes, params)
        return Piece(step, params, block, norms, sums, longest, length)

    def _check_reached(self, step: int) -> None:
        """Raises UnsupportedRunError if the loss reaches the parameters beside the outputs."""
        for param in self.params:
            if param.grad is not None and bool(param.grad.any()):  # a penalty times 0 is none
                raise UnsupportedRunError(
                    f"step {step}: something beside the outputs of the linear head reaches its "
                    "parameters (a penalty in the loss, another use of the weights, a hook), and "
                    "would have no effect. A penalty is the optimizer's weight_decay, or after=."
                )

    def _target(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the targets of the batch that was drawn: its last tensor that may be some.

        Raises:
            UnsupportedRunError: There is none, or the loop wrote to it.
        """
        known, function, (tensors, unwritten) = self._known, self._targets_of, self._drawn()
        takes = (t for t in reversed(tensors) if function is not None or known.takes(t, outputs))
        drawn = target = next(takes, None)
        if drawn is not None and all(drawn is not one for one in unwritten):
            raise UnsupportedRunError(
                "Expected the targets that the loader drew, got a tensor that the loop changed in "
                f"place. Compute out of place. {REMEDY}"
            )
        if drawn is not None and function is not None:
            target = function(drawn)
            if self._is_open and len(target) > 1:
                halves = [function(half) for half in drawn.tensor_split(2)]
                if not torch.equal(torch.cat(halves), target):
                    raise UnsupportedRunError(
                        "Expected targets= to map every target by itself, got a function whose "
                        "result for half of a batch is not half of its result: one record would "
                        "change the targets of others."
                    )
        if target is not None and known.takes(target, outputs):
            return target
        shown = tensors if target is None else [target]
        shapes = ", ".join(f"{tuple(t.shape[1:])} of {t.dtype}" for t in shown) or "no tensors"
        raise UnsupportedRunError(
            f"Expected targets for {type(known.criterion).__name__} at outputs of shape "
            f"{tuple(outputs.shape[1:])} for each record in the batch that the loader dealt, got "
            f"{shapes}. {REMEDY}"
        )

    def _rounding_if(
        self, off: float, size: float, outputs: torch.Tensor, target: torch.Tensor
    ) -> float:
        """Returns how far slopes may be apart by rounding, if it matters.

        Near a minimum they are short.
        """
        if off <= TOLERANCE * size:
            return 0.0
        largest = 1 + float(outputs.abs().max())
        if target.is_floating_point():
            largest += float(target.abs().max())
        units = _ROUNDING_UNITS * torch.finfo(outputs.dtype).eps * math.sqrt(len(outputs))
        return units * (self._declared.lipschitz or 1.0) * largest  # which holds their weights

    def _other_loss(self, own: _Pass, target: torch.Tensor) -> UnsupportedRunError:
        known, got = self._known, own.outputs.grad
        assert got is not None
        got = got * len(got) if self._divides else got
        why = diagnosis(known, own.outputs.detach(), target, got)
        return UnsupportedRunError(
            f"step {self._step}: the loop has gradients of another loss than {known.criterion}: "
            f"{why}. Pass the loss that the loop computes as criterion=, and compute no other one "
            "with the outputs."
        )

    def _features(self, call: Call) -> list[torch.Tensor]:
        """Returns what reaches the head in a pass, and what the model makes of its outputs."""
        kept: list[torch.Tensor] = []

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept.append((args[0] if args else kwargs["input"]).detach())

        handle = self._head.register_forward_pre_hook(note, with_kwargs=True)
        try:
            found = self._module(*call[0], **call[1])
        finally:
            handle.remove()
        return [*kept, *(x for x in tensors_of(found) if x.is_floating_point())]

    # After the piece

    def used(self) -> None:
        """See `Passes.used`."""
        super().used()
        self._passes = []

    def cleared(self) -> None:
        """Forgets the passes that a backward pass reached; the others may still wait for theirs."""
        self._passes = [one for one in self._passes if one.outputs.grad is None]

    def after(self, step: int) -> None:
        """See `Passes.after`; what gradients the parameters have next is not of this step."""
        super().after(step)
        for param in self.params:
            param.grad = None

    def resume(self, steps: int) -> None:
        """See `Passes.resume`."""
        super().resume(steps)
        self._passes = []

    def close(self) -> None:
        """See `Passes.close`."""
        super().close()
        self._passes = []

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """The assumptions of `Passes`, and those about the gradients."""
        yield from super().assumptions
        yield Assumption.checked(
            "every step computed from the features that reached the head, the targets of the batch "
            "that was drawn, the formula of the loss and the last private iterate; the loop's "
            f"gradient at the outputs within {TOLERANCE:g} of its length, up to rounding, below "
            "which it has no effect"
        )
        yield Assumption.checked(f"feature norms at most {self._feature_norm:g}")


def _sums_of_layer(
    weight: nn.Parameter,
    features: torch.Tensor,
    slopes: torch.Tensor,
    params: Sequence[nn.Parameter],
    weights: Sequence[torch.Tensor | None],
) -> Iterator[Sequence[torch.Tensor]]:
    """Yields sums of the gradients of a linear layer: that of a record is slopes times features."""
    scaled = [
        slopes if w is None else slopes * to_precision(w, slopes.dtype)[:, None] for w in weights
    ]
    for param in params:
        yield [own.T @ features if param is weight else own.sum(dim=0) for own in scaled]
