"""A linear head that is all there is to train: its gradients follow from what goes in and out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.apart import Call
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.diagnosis import REMEDY, diagnosis
from hidden_state_adapters.opacus.gradients import (
    Figure,
    Piece,
    any_of,
    counted_writes,
    differ,
    read,
)
from hidden_state_adapters.opacus.loader import BatchCursor, tensors_of
from hidden_state_adapters.opacus.norms import check_features, row_norms, to_precision
from hidden_state_adapters.opacus.passes import ONE_CALL, Passes
from hidden_state_adapters.opacus.precision import check_arithmetic, exact_products

TOLERANCE = 1e-2  # of the length of all slopes of a piece: bfloat16 in a loop passes
_ROUNDING_UNITS = 100.0
_LEAST = 1e-5  # of that length: what is less is not looked at, and may be rounding

_ONE = torch.ones(())

_logger = logging.getLogger("hidden_state_accountants")


@attrs.define(eq=False)
class HeadPiece(Piece):
    """Gradients of a linear head; that of record i is the product of slopes_i and features_i.

    Of a head that is used at several positions of a record the gradients are formed, and kept where
    Opacus keeps them.

    Attributes:
        weight: Weight of the linear layer.
        features: Input of the layer, shape (rows, features); None at several positions.
        slopes: Gradient of the loss of every record in its outputs, shape (rows, outputs).
        slope_norms: Norms of the slopes, shape (rows,).
    """

    weight: Any = None
    features: Any = None
    slopes: Any = None
    slope_norms: Any = None

    def know(self, features: torch.Tensor, slopes: torch.Tensor) -> Figure:
        """Takes what the gradients follow from, and returns the largest norm of the features."""
        self.features, self.slopes = features, slopes
        lengths, self.slope_norms = row_norms(features), row_norms(slopes)
        largest = lengths.max() if self.rows else 0.0
        if len(self.params) == 2:
            self.known_norms = self.slope_norms * torch.hypot(lengths, _ONE)
        else:
            is_weight = self.params[0] is self.weight
            self.known_norms = self.slope_norms * lengths if is_weight else self.slope_norms
        return largest

    def add_sums(
        self, weights: torch.Tensor | None, *others: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """See `Piece.add_sums`."""
        if self.features is None:
            return super().add_sums(weights, *others)
        with exact_products(self.features.device.type):
            totals, *rests = (self._sums(each) for each in (weights, *others))
        for param, total in zip(self.params, totals, strict=True):
            before = param.summed_grad
            param.summed_grad = total if before is None else before + total
        return [list(sums) for sums in zip(*rests, strict=True)]

    def _sums(self, weights: torch.Tensor | None) -> list[torch.Tensor]:
        slopes = self.slopes
        if weights is not None:
            slopes = slopes * to_precision(weights, slopes.dtype)[:, None]
        return [
            slopes.T @ self.features if p is self.weight else slopes.sum(dim=0) for p in self.params
        ]


@attrs.define(eq=False)
class _Pass:
    """One pass of a batch through the head.

    Attributes:
        features: Input of the head.
        outputs: Leaf that the loop got: its backward pass leaves the slopes there, and no gradient
            at the parameters of the head.
        moved: Whether the weights of the pass were not those of the last step.
        call: Arguments of the model; None where the loop called the head by itself.
        writes: Number of writes to both before the loop got the outputs.
    """

    features: torch.Tensor
    outputs: torch.Tensor
    moved: Figure
    call: Call | None
    writes: int


class HeadRun(Passes):
    """Computes the gradients of a linear head that is all there is to train.

    The loop gets the head's outputs as a leaf, computed from the run's own copy of the weights.
    Its backward pass leaves the slopes there. Of a known loss they are computed here from the
    targets of the batch that was drawn, and the loop's are only compared with them: a courtesy,
    as is the comparison of the weights. Neither goes into the step.

    Args:
        declared: Run whose model is such a head, or ends with it.
        cursor: Position of the loop among the batches.
    """

    # Opacus and users copy models with their hooks; a copy trains nothing here.
    _is_idle = True

    def __init__(self, declared: DeclaredRun, cursor: BatchCursor):
        super().__init__(declared, cursor)
        head, norm = declared.head, declared.arguments.feature_norm
        assert head is not None
        self._head, self._weight, self._bias = head, head.weight, head.bias
        self._feature_norm = None if norm is None else float(norm)
        self._known, self._targets_of = declared.known_criterion, declared.arguments.targets
        self._place: int | None = None  # of the targets among the tensors of a batch
        self.computes_loss = self._known is not None
        self._has_layers = self._module is not head
        self._passes: list[_Pass] = []
        self._used: list[_Pass] = []
        self._call: Call | None = None
        self._target: torch.Tensor | None = None
        self._first: torch.Tensor | None = None  # features of the first block of a step
        self._warns = True  # of a loop whose loss has a further term
        self._forget_gradients()
        self._is_idle = False
        self.handles = [
            self._module.register_forward_pre_hook(self._begin, with_kwargs=True),
            head.register_forward_hook(self._note, with_kwargs=True, prepend=True),
        ]
        if self._has_layers:
            end = self._module.register_forward_hook(self._end, always_call=True)
            self.handles.append(end)

    # In a pass; a compiled model would write what a hook keeps into its graph

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._begin)(module, args, kwargs)  # type: ignore[no-any-return]
        if torch.is_grad_enabled() and not self._is_idle:
            if self._has_layers:
                self._frozen.hold()
                self._frozen.check_batch_norm(self._modules)
            if self._has_loss:
                check_arithmetic(self.params)
            self._call = args, kwargs
        return None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._call = None

    def _note(
        self, head: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._note)(head, args, kwargs, output)  # type: ignore[no-any-return]
        if self._is_idle or not output.requires_grad:
            return None
        call = self._call
        if not self._has_layers:
            self._call = None
        attached = args[0] if args else kwargs["input"]
        features = attached.detach()
        if self._feature_norm is not None and features.dim() != 2:
            raise UnsupportedRunError(
                f"Expected features of shape (records, {head.in_features}) at the linear layer, "
                f"got {tuple(features.shape[1:])} for each: several rows per record are not one "
                "linear prediction. Flatten them, or leave out criterion= and feature_norm=: "
                "every step then counts."
            )
        if not self._is_composed:
            self._check_hooks()
            if attached.requires_grad and any(one.call is call for one in self._passes):
                raise UnsupportedRunError(
                    "Expected features that do not depend on the linear head, got those of a pass "
                    "in which the model called it before (shared weights?): no loss is known to be "
                    "convex in its weights then. Leave out criterion=, feature_norm= and "
                    "loss_geometry=: every step then counts."
                )
        is_other = head.weight is not self._weight or head.bias is not self._bias
        moved = is_other or self._is_moved()
        is_attached = self._is_composed and attached.requires_grad
        with exact_products(output.device.type):
            leaf = self._computed(attached if is_attached else features)
        if is_attached:
            leaf.retain_grad()
        else:
            leaf.requires_grad_()
        writes = counted_writes(features) + leaf._version
        self._passes.append(_Pass(features, leaf, moved, call, writes))
        return leaf

    def _computed(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the outputs at the weights of the last step, whatever the head holds."""
        weight, bias = self._weight, self._bias
        for param, own in zip(self.params, self._own, strict=True):
            own = own.to(features.device)
            weight, bias = (own, bias) if param is weight else (weight, own)
        return F.linear(features.to(weight.dtype), weight, bias)

    # What the loop left

    def take(
        self, step: int, params: Sequence[nn.Parameter], block: int, error: Figure
    ) -> HeadPiece:
        """See `Passes.take`."""
        self._step, used = step, [one for one in self._passes if one.outputs.grad is not None]
        for param, (noisy, writes) in zip(self.params, self._gradients, strict=True):
            grad = param.grad
            is_as_left = grad is None or (grad is noisy and grad._version == writes)
            if not is_as_left and bool(grad.any()):  # type: ignore[union-attr]  # a penalty times 0 is none
                raise self._reached_beside("the linear head reaches its parameters")
        if len(used) > 1:
            self._check_views(used)
        self._used, rows = used, len(self._records_first(used[0].features)) if used else 0
        self._take_batch(step, rows, block)
        piece = HeadPiece(step, params, block, rows, weight=self._weight)
        moved = any_of([self._is_moved(), *[one.moved for one in used]])
        is_other = self._has_other_batch(rows)
        for one in used:
            if counted_writes(one.features) + one.outputs._version != one.writes:
                raise UnsupportedRunError(
                    f"step {step}: what went into the linear head, or came out, was changed in "
                    "place after the pass. Compute out of place."
                )
        with exact_products(self._weight.device.type):
            figures = self._compute(piece)
            mixes = self._look_once(piece, self._features) if self._is_open else ""
        is_other, moved, piece.error, *figures = read([is_other, moved, error, *figures])
        if is_other:
            raise self._other_inputs()
        self._judge_loss(piece, moved, mixes, *figures)
        return piece

    def _check_views(self, used: Sequence[_Pass]) -> None:
        is_once = self._feature_norm is None and used[0].call is not None
        if is_once and all(one.call is used[0].call for one in used):
            return
        raise UnsupportedRunError(
            f"step {self._step} got the gradients of {len(used)} batches, expected 1: "
            "gradient accumulation, two losses with a pass each, or several views of a record, "
            "and nobody sees whether row i of each is of one record. Call optimizer.step() "
            "after every backward(). For batches that do not fit into memory raise the "
            "batch_size of the DataLoader and let "
            "opacus.utils.batch_memory_manager.BatchMemoryManager split them. "
            f"{ONE_CALL if self._feature_norm is None else ''}"
        )

    def _records_first(self, values: torch.Tensor) -> torch.Tensor:
        return values.movedim(self._dim, 0) if self._dim and values.dim() > 2 else values

    def _compute(self, piece: HeadPiece) -> list[Figure]:
        """Computes the gradients.

        Returns:
            The largest norm of a gradient and of a record at the head; how far the slopes are from
            the loop's, and their length; whether a block has other inputs than the first one.
        """
        if not piece.rows:
            piece.know(*(torch.zeros(0, n).to(self._weight) for n in self._weight.shape[::-1]))
            return [0.0] * 5
        own = self._used[0]
        features, grad = own.features.to(own.outputs.dtype), own.outputs.grad
        assert grad is not None
        if len(self._used) > 1 or features.dim() != 2:
            self._keep_samples(piece.rows)
            return [piece.largest_norm, 0.0, 0.0, 0.0, 0.0]
        off: Figure = 0.0
        length: Figure = 0.0
        if self._known is None:
            largest = piece.know(features, self._got(own, piece.rows))
        else:
            output = own.outputs.detach()
            self._target = target = self._find_target(output, own, piece.rows)
            try:
                slopes = self._known.slopes(output, target)
            except (TypeError, ValueError) as error:
                raise UnsupportedRunError(f"The targets of the batch: {error}") from None
            largest = piece.know(features, slopes)
            factor = piece.rows if self._divides else 1
            off = torch.linalg.vector_norm(torch.sub(slopes, grad, alpha=factor))
            length = torch.linalg.vector_norm(piece.slope_norms)
        other: Figure = False
        if piece.block == 0:
            self._first = features
        elif self._first is not None:
            other = self._first.shape != features.shape or differ(features, self._first)
        return [piece.largest_norm, largest, off, length, other]

    def _got(self, own: _Pass, rows: int) -> torch.Tensor:
        """What the backward pass left at the outputs, of the loss of a record."""
        gradient = own.outputs.grad
        assert gradient is not None
        return gradient * rows if self._divides else gradient

    def _keep_samples(self, rows: int) -> None:
        """Keeps the gradient of every record, of a head that is used at several positions."""
        parts = [
            (self._records_first(one.features), self._records_first(self._got(one, rows)))
            for one in self._used
        ]
        weight, bias = self._weight, self._bias
        of_weight = [torch.einsum("n...k,n...d->nkd", s, x.to(s.dtype)) for x, s in parts]
        weight.grad_sample = torch.stack(of_weight).sum(0)  # type: ignore[attr-defined]
        if bias is not None:
            of_bias = [torch.einsum("n...k->nk", s) for _, s in parts]
            bias.grad_sample = torch.stack(of_bias).sum(0)  # type: ignore[attr-defined]

    def _features(self, call: Call) -> list[torch.Tensor]:
        """What reaches the head in a pass, and what the model makes of its outputs."""
        kept: list[torch.Tensor] = []

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept.append((args[0] if args else kwargs["input"]).detach())

        handle = self._head.register_forward_pre_hook(note, with_kwargs=True)
        try:
            found = self._module(*call[0], **call[1])
        finally:
            handle.remove()
        return [*kept, *(x for x in tensors_of(found) if x.is_floating_point())]

    def _outputs(self, piece: Piece) -> Sequence[torch.Tensor]:
        return [self._used[0].outputs]

    # The targets of the batch that was drawn

    def _find_target(self, output: torch.Tensor, own: _Pass, rows: int) -> torch.Tensor:
        """Returns the targets of the batch or piece at hand, always in the same place of a batch.

        Raises:
            UnsupportedRunError: The batch has none, or the loop wrote to them.
        """
        known, (tensors, unwritten) = self._known, self._drawn()
        assert known is not None
        if self._targets_of is not None:
            place = len(tensors) - 1
        elif self._place is None:
            place = self._place_of(tensors, output, self._got(own, rows))
        else:
            place = self._place
        target = tensors[place] if 0 <= place < len(tensors) else None
        if self._targets_of is None and target is not None and not known.takes(target, output):
            target = None
        if target is None:
            raise self._not_found(tensors, output)
        if all(target is not one for one in unwritten):
            raise UnsupportedRunError(
                "Expected the targets that the loader drew, got a tensor that the loop changed in "
                f"place: no step can be computed from it. Compute out of place. {REMEDY}"
            )
        if self._targets_of is not None:
            target = self._mapped(target, self._targets_of, output)
        self._place = place
        return target

    def _place_of(
        self, tensors: Sequence[torch.Tensor], output: torch.Tensor, got: torch.Tensor
    ) -> int:
        """Returns which tensor may be the targets: of several that which explains the gradient."""
        known = self._known
        assert known is not None

        def misfit(place: int) -> float:
            """Returns how far the slopes at targets are from the loop's; inf if there are none."""
            try:
                off = float(torch.linalg.vector_norm(known.slopes(output, tensors[place]) - got))
            except (TypeError, ValueError):
                return math.inf
            return math.inf if math.isnan(off) else off

        places = [i for i, t in enumerate(tensors) if known.takes(t, output)]
        if len(places) < 2:
            return places[0] if places else -1
        return min(reversed(places), key=misfit)

    def _mapped(
        self,
        drawn: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
        output: torch.Tensor,
    ) -> torch.Tensor:
        target = function(drawn)
        if self._place is None and len(target) > 1:
            halves = [function(half) for half in drawn.tensor_split(2)]
            if not torch.equal(torch.cat(halves), target):
                raise UnsupportedRunError(
                    "Expected targets= to map every target by itself, got a function whose result "
                    "for half of a batch is not half of its result: one record would change the "
                    "targets of others."
                )
        if self._known is not None and not self._known.takes(target, output):
            raise self._not_found([target], output)
        return target

    def _not_found(
        self, tensors: Sequence[torch.Tensor], output: torch.Tensor
    ) -> UnsupportedRunError:
        shapes = ", ".join(f"{tuple(t.shape[1:])} of {t.dtype}" for t in tensors) or "no tensors"
        assert self._known is not None
        return UnsupportedRunError(
            f"Expected targets for {type(self._known.criterion).__name__} at outputs of shape "
            f"{tuple(output.shape[1:])} for each record in the batch that the loader dealt, got "
            f"{shapes}. {REMEDY}"
        )

    # What the loop did differently

    def _judge_loss(
        self,
        piece: HeadPiece,
        moved: float,
        mixes: str,
        longest: float,
        feature: float,
        off: float,
        length: float,
        other: float,
    ) -> None:
        piece.longest = longest
        if not moved:
            if self._feature_norm is not None:
                check_features(piece.step, feature, self._feature_norm)
            if math.isnan(longest) and self._known is not None:
                raise self._other_loss(piece)  # targets, or a loss, that have no gradient there
        self._judge(piece, moved, mixes, other)
        if off <= _LEAST * length or off <= (rounding := self._rounding(piece.rows)):
            return
        if not off <= TOLERANCE * length + rounding:
            raise self._other_loss(piece)
        if self._warns:
            self._warns = False
            assert self._known is not None
            _logger.warning(
                "step %d: the gradient of the loop's loss at the outputs is that of %s, and a "
                "little more. A further term of the loss (an entropy bonus, distillation, a "
                "penalty on outputs) is not trained: every step is that of the criterion alone. A "
                "step in which the term is more than %g of the gradient will be refused, and ends "
                "the run. Leave the term out; or compute the loss in float32, if it has none.",
                piece.step, self._known.criterion, TOLERANCE,
            )  # fmt: skip

    def _rounding(self, rows: int) -> float:
        """How far slopes may be apart for their rounding alone: near a minimum they are short."""
        output, target = self._used[0].outputs.detach(), self._target
        assert target is not None
        size = 1 + float(output.abs().max())
        if target.is_floating_point():
            size += float(target.abs().max())
        units = _ROUNDING_UNITS * torch.finfo(output.dtype).eps * math.sqrt(rows)
        return units * (self._lipschitz or 1.0) * size  # the constant holds the weights of outputs

    def _other_loss(self, piece: Piece) -> UnsupportedRunError:
        own, target, known = self._used[0], self._target, self._known
        assert target is not None
        assert known is not None
        output, got = own.outputs.detach(), self._got(own, piece.rows)
        why = diagnosis(output, target, lambda targets: known.slopes(output, targets), got)
        return UnsupportedRunError(
            f"step {piece.step}: the loop has gradients of another loss than "
            f"{known.criterion}: {why}. The step was not taken. Pass the loss that the loop "
            "computes as criterion=, and compute no other one with the outputs."
        )

    # After the piece

    def used(self) -> None:
        """See `Passes.used`."""
        self._used, self._passes, self._target = [], [], None

    def cleared(self) -> None:
        """Forgets the passes that a backward pass reached; the others may still wait for theirs."""
        self._passes = [one for one in self._passes if one.outputs.grad is None]

    def keep(self) -> None:
        """See `Passes.keep`; the next gradients are none of this step's."""
        super().keep()
        self._forget_gradients()

    def after(self, step: int) -> None:
        """See `Passes.after`."""
        super().after(step)
        self._first = None

    def _forget_gradients(self) -> None:
        """Gradients that the parameters have now, as they are, are not of the loop's next loss."""
        grads = [p.grad for p in self.params]
        self._gradients = [(g, 0 if g is None else g._version) for g in grads]

    @property
    def call(self) -> Call | None:
        """See `Passes.call`."""
        return self._used[0].call if self._used else None

    # Between the steps

    def resume(self, steps: int) -> None:
        """Goes on from the loaded weights."""
        super().resume(steps)
        self._passes = []
        self._forget_gradients()

    def close(self) -> None:
        """See `Passes.close`."""
        super().close()
        self._passes = []

    def _of_the_gradients(self) -> Iterable[Assumption]:
        if self._known is not None:
            yield Assumption.checked(
                "every step computed from the features that reached the head, the targets of the "
                "batch that was drawn, the formula of the loss and the last private iterate; the "
                f"loop's gradient at the outputs within {TOLERANCE:g} of its length, up to rounding"
            )
        if self._feature_norm is not None:
            yield Assumption.checked(f"feature norms at most {self._feature_norm:g}")
        if self._known is None:
            yield from super()._of_the_gradients()
