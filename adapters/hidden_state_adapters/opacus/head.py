"""A linear head that is all there is to train: its gradients follow from what goes in and out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.apart import Call
from hidden_state_adapters.opacus.batch import Taken
from hidden_state_adapters.opacus.criteria import KnownCriterion
from hidden_state_adapters.opacus.diagnosis import diagnosis
from hidden_state_adapters.opacus.frozen import FrozenPart
from hidden_state_adapters.opacus.gradients import (
    Figure,
    Piece,
    add_to_sum,
    any_of,
    counted_writes,
    differ,
)
from hidden_state_adapters.opacus.loader import tensors_of
from hidden_state_adapters.opacus.norms import (
    check_features,
    norms_of_norms,
    row_norms,
    to_precision,
)
from hidden_state_adapters.opacus.precision import check_arithmetic, exact_products
from hidden_state_adapters.opacus.source import ALONE, ONE_CALL, Hooks, Source, remove_all
from hidden_state_adapters.opacus.targets import Targets

TOLERANCE = 1e-2  # of the length of all slopes of a piece: bfloat16 in a loop passes
_ROUNDING_UNITS = 100.0
_LEAST = 1e-5  # of that length: what is less is not looked at, and may be rounding

_logger = logging.getLogger("hidden_state_accountants")
_uncompiled = torch.compiler.disable  # a compiled model would write what hooks keep into its graph


@attrs.define(eq=False)
class HeadPiece(Piece):
    """Of record i the gradient in the weights is the outer product of slopes_i and features_i.

    Of a head that is used at several positions of a record the gradients are formed, and kept where
    Opacus keeps them.

    Attributes:
        weight: Weight of the linear layer.
        features: Input of the layer, shape (rows, features); None at several positions.
        slopes: Gradient of the loss of every record in its outputs, shape (rows, outputs).
        feature_norms: Norms of the features, shape (rows,).
        slope_norms: Norms of the slopes, shape (rows,).
    """

    weight: Any = None
    features: Any = None
    slopes: Any = None
    feature_norms: Any = None
    slope_norms: Any = None

    def know(self, features: torch.Tensor, slopes: torch.Tensor) -> None:
        """Takes what the gradients follow from."""
        self.features, self.slopes = features, slopes
        self.feature_norms, self.slope_norms = row_norms(features), row_norms(slopes)

    def _norms(self) -> torch.Tensor:
        if self.features is None:
            return super()._norms()
        if len(self.params) == 2:
            ones = self.feature_norms.new_ones(())
            norms: torch.Tensor = self.slope_norms * torch.hypot(self.feature_norms, ones)
            return norms
        return norms_of_norms(
            [
                self.slope_norms * self.feature_norms if p is self.weight else self.slope_norms
                for p in self.params
            ]
        )

    def add_sums(
        self, weights: torch.Tensor | None, *others: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """See `Piece.add_sums`."""
        if self.features is None:
            return super().add_sums(weights, *others)
        with exact_products(self.features.device.type):
            totals, *rests = (self._sums(each) for each in (weights, *others))
        for param, total in zip(self.params, totals, strict=True):
            add_to_sum(param, total)
        return [list(sums) for sums in zip(*rests, strict=True)] or [[] for _ in self.params]

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
    """

    features: torch.Tensor
    outputs: torch.Tensor
    moved: Figure
    call: Call | None
    _writes: int = attrs.field(init=False)

    @_writes.default
    def _count(self) -> int:
        return counted_writes(self.features) + counted_writes(self.outputs)

    @property
    def was_written(self) -> bool:
        """Whether the loop changed features or outputs in place."""
        return self._count() != self._writes


class HeadRun(Source):
    """Takes the gradients of a linear head that is all there is to train.

    The loop gets the head's outputs as a leaf, computed from the run's own copy of the weights.
    Its backward pass leaves the slopes there. Of a known loss they are computed here from the
    targets of the batch that was drawn, and the loop's are only compared with them: a courtesy,
    as is the comparison of the weights. Neither goes into the step.

    Args:
        module: The module itself, not Opacus' wrapper.
        head: Linear layer that is trained.
        frozen: Parts that are kept in eval() mode.
        feature_norm: Declared bound on every record at the head, or None.
        known: Loss, where it is known.
        targets: Finds the targets of `known` among the tensors of a batch.
        **options: See `Source`.
    """

    # Opacus and users copy models with their hooks; a copy trains nothing here.
    _is_idle = True

    def __init__(
        self,
        module: nn.Module,
        head: nn.Linear,
        frozen: FrozenPart,
        *,
        feature_norm: float | None,
        known: KnownCriterion | None = None,
        targets: Targets | None = None,
        **options: Any,
    ):
        super().__init__(module, frozen, **options)
        self._head, self._weight, self._bias = head, head.weight, head.bias
        self._feature_norm, self._known, self._targets = feature_norm, known, targets
        self.computes_loss = known is not None
        self._modules = tuple(module.named_modules())
        self._hooks = None if self._is_composed else Hooks(self._modules)
        self._has_layers = module is not head
        self._passes: list[_Pass] = []
        self._used: list[_Pass] = []
        self._call: Call | None = None
        self._target: torch.Tensor | None = None
        self._first: torch.Tensor | None = None  # features of the first block of a step
        self._warns = True  # of a loop whose loss has a further term
        self._forget_gradients()
        self._is_idle = False
        self.handles = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            head.register_forward_hook(self._note, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    # In a pass

    @_uncompiled
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not self._is_idle:
            self._frozen.hold()
            self._frozen.check_batch_norm(self._modules)
            if self._has_loss:
                check_arithmetic(self.iterate.params)
            self._call = args, kwargs

    @_uncompiled
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._call = None

    @_uncompiled
    def _note(
        self, head: nn.Linear, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> torch.Tensor | None:
        if self._is_idle or not output.requires_grad:
            return None
        attached = args[0] if args else kwargs["input"]
        features = attached.detach()
        if self._feature_norm is not None and features.dim() != 2:
            raise UnsupportedRunError(
                f"Expected features of shape (records, {head.in_features}) at the linear layer, "
                f"got {tuple(features.shape[1:])} for each: several rows per record are not one "
                "linear prediction. Flatten them, or leave out criterion= and feature_norm=: "
                "every step then counts."
            )
        if self._hooks is not None:
            self._hooks.check()
            if attached.requires_grad and any(one.call is self._call for one in self._passes):
                raise UnsupportedRunError(
                    "Expected features that do not depend on the linear head, got those of a pass "
                    "in which the model called it before (shared weights?): no loss is known to be "
                    "convex in its weights then. Leave out criterion=, feature_norm= and "
                    "loss_geometry=: every step then counts."
                )
        is_other = head.weight is not self._weight or head.bias is not self._bias
        moved = is_other or self.iterate.moved()
        is_attached = self._is_composed and attached.requires_grad
        with exact_products(output.device.type):
            leaf = self._computed(attached if is_attached else features)
        if is_attached:
            leaf.retain_grad()
        else:
            leaf.requires_grad_()
        self._passes.append(_Pass(features, leaf, moved, self._call))
        return leaf

    def _computed(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the outputs at the weights of the last step, whatever the head holds."""
        weight = self.iterate.value(self._weight)
        bias = None if self._bias is None else self.iterate.value(self._bias).to(features.device)
        return F.linear(features.to(weight.dtype), weight.to(features.device), bias)

    # What the loop left

    def begin(self, step: int, params: Sequence[nn.Parameter], block: int) -> HeadPiece:
        """See `Source.begin`."""
        self._check_trained(step)
        self._check_penalty(step)
        used = [one for one in self._passes if one.outputs.grad is not None]
        is_once = len(used) < 2 or (self._feature_norm is None and used[0].call is not None)
        if not is_once or any(one.call is not used[0].call for one in used):
            raise UnsupportedRunError(
                f"step {step} got the gradients of {len(used)} batches, expected 1: "
                "gradient accumulation, two losses with a pass each, or several views of a record, "
                "and nobody sees whether row i of each is of one record. Call optimizer.step() "
                "after every backward(). For batches that do not fit into memory raise the "
                "batch_size of the DataLoader and let "
                "opacus.utils.batch_memory_manager.BatchMemoryManager split them. "
                f"{ONE_CALL if self._feature_norm is None else ''}"
            )
        self._used = used
        rows = len(self._records_first(used[0].features)) if used else 0
        return HeadPiece(step, params, block, rows, weight=self._weight)

    def _records_first(self, values: torch.Tensor) -> torch.Tensor:
        return values.movedim(self._dim, 0) if self._dim and values.dim() > 2 else values

    def _check_penalty(self, step: int) -> None:
        for param, (noisy, writes) in zip(self.iterate.params, self._gradients, strict=True):
            grad = param.grad
            is_as_left = grad is None or (grad is noisy and grad._version == writes)
            if not is_as_left and bool(grad.any()):  # type: ignore[union-attr]  # a penalty times 0 is none
                raise self._reached_beside(step, "the linear head reaches its parameters")

    def figures(self, piece: Any, batch: Taken) -> Mapping[str, Figure]:
        """Computes the gradients; what the loop did differently."""
        moved = any_of([self.iterate.moved(), *(one.moved for one in self._used)])
        if not piece.rows:
            piece.know(*(torch.zeros(0, n).to(self._weight) for n in self._weight.shape[::-1]))
            return {"moved": moved, "feature": 0.0, "gradient": 0.0}
        if any(one.was_written for one in self._used):
            raise UnsupportedRunError(
                f"step {piece.step}: what went into the linear head, or came out, was changed in "
                "place after the pass. Compute out of place."
            )
        with exact_products(self._weight.device.type):
            return {"moved": moved, **self._compute(piece, batch)}

    def _compute(self, piece: HeadPiece, batch: Taken) -> dict[str, Figure]:
        own = self._used[0]
        features = own.features.to(own.outputs.dtype)
        if len(self._used) > 1 or features.dim() != 2:
            self._keep_samples(piece.rows)
            return {"gradient": piece.largest_norm, **self._look_once(piece, self._features)}
        found: dict[str, Figure] = {}
        if self._known is None:
            piece.know(features, self._got(own, piece.rows))
        else:
            piece.know(features, self._slopes_of(own, piece, batch))
            factor, grad = (piece.rows if self._divides else 1), own.outputs.grad
            assert grad is not None
            found["off"] = torch.linalg.vector_norm(torch.sub(piece.slopes, grad, alpha=factor))
            found["slopes"] = torch.linalg.vector_norm(piece.slope_norms)
        found["feature"], found["gradient"] = piece.feature_norms.max(), piece.largest_norm
        if piece.block == 0:
            self._first = features
        elif self._first is not None:
            same = self._first.shape == features.shape
            found["other_inputs"] = differ(features, self._first) if same else True
        return {**found, **self._look_once(piece, self._features)}

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

    # The slopes of a known loss

    def _slopes_of(self, own: _Pass, piece: Piece, batch: Taken) -> torch.Tensor:
        assert self._known is not None
        output = own.outputs.detach()

        def misfit(target: torch.Tensor) -> float:
            """How far the slopes at a target are from the loop's; inf where there are none."""
            try:
                slopes = self._known.slopes(output, target)  # type: ignore[union-attr]
            except (TypeError, ValueError):
                return math.inf
            off = float(torch.linalg.vector_norm(slopes - self._got(own, piece.rows)))
            return math.inf if math.isnan(off) else off

        assert self._targets is not None
        self._target = self._targets.of(output, batch, misfit)
        try:
            return self._known.slopes(output, self._target)
        except (TypeError, ValueError) as error:
            raise UnsupportedRunError(f"The targets of the batch: {error}") from None

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if the loop does something else than the step."""
        is_nan = math.isnan(values["gradient"]) and self._known is not None
        if self._feature_norm is not None and not values["moved"]:
            check_features(piece.step, values.get("feature", 0.0), self._feature_norm)
        if is_nan and not values["moved"]:
            raise self._other_loss(piece)  # targets, or a loss, that have no gradient there
        super().judge(piece, values)
        off, length = values.get("off", 0.0), values.get("slopes", 0.0)
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

    def used(self, piece: Piece) -> None:
        """Starts the next piece."""
        self._used, self._passes, self._target = [], [], None

    def cleared(self) -> None:
        """Forgets the passes that a backward pass reached; the others may still wait for theirs."""
        self._passes = [one for one in self._passes if one.outputs.grad is None]

    def moved(self, piece: Piece) -> None:
        """The next gradients are none of this step's."""
        self._forget_gradients()

    def after(self, step: int) -> None:
        """The next piece is the first of a batch."""
        self._first = None

    def _forget_gradients(self) -> None:
        """Gradients that the parameters have now, as they are, are not of the loop's next loss."""
        grads = [p.grad for p in self.iterate.params]
        self._gradients = [(g, 0 if g is None else g._version) for g in grads]

    @property
    def call(self) -> Call | None:
        """See `Source.call`."""
        return self._used[0].call if self._used else None

    # Between the steps

    def resume(self, steps: int) -> None:
        """Goes on from the loaded weights."""
        super().resume(steps)
        self._passes = []
        self._forget_gradients()

    def close(self) -> None:
        """Leaves the module as it was."""
        remove_all(self.handles)
        self._passes = []

    def __reduce__(self) -> Any:
        return object.__new__, (type(self),)

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What holds by construction, what is looked at, and what is taken on trust."""
        if self._known is not None:
            yield Assumption.checked(
                "every step computed from the features that reached the head, the targets of the "
                "batch that was drawn, the formula of the loss and the last private iterate; the "
                f"loop's gradient at the outputs within {TOLERANCE:g} of its length, up to rounding"
            )
        if self._feature_norm is not None:
            yield Assumption.checked(f"feature norms at most {self._feature_norm:g}")
        if self._known is None:
            yield from self._of_the_loss()
        for one in super().assumptions:
            if self._module is not self._head or not one.text.startswith(ALONE):
                yield one  # a head alone mixes nothing
