"""The gradients of a linear head, from what went into it and the slopes at what came out."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.criteria import KnownCriterion
from hidden_state_adapters.opacus.data.loader import tensors_of
from hidden_state_adapters.opacus.gradients.bounds import check_features
from hidden_state_adapters.opacus.gradients.figures import Figure, any_of, differ
from hidden_state_adapters.opacus.gradients.head import HeadGradients
from hidden_state_adapters.opacus.gradients.piece import Piece
from hidden_state_adapters.opacus.gradients.precision import exact_products
from hidden_state_adapters.opacus.gradients.samples import SampleGradients
from hidden_state_adapters.opacus.head.diagnosis import diagnosis
from hidden_state_adapters.opacus.head.passes import HeadPass, HeadPasses
from hidden_state_adapters.opacus.head.targets import Targets
from hidden_state_adapters.opacus.sources.apart import Call
from hidden_state_adapters.opacus.sources.base import ALONE, ONE_CALL, Source
from hidden_state_adapters.opacus.sources.frozen import FrozenPart

TOLERANCE = 1e-2  # of the length of all slopes of a piece: bfloat16 in a loop passes
_ROUNDING_UNITS = 100.0
_LEAST = 1e-5  # of that length: what is less is not looked at, and may be rounding

_logger = logging.getLogger("hidden_state_accountants")


class HeadRun(Source):
    """Takes the gradients of a linear head that is all there is to train.

    The loop gets the head's outputs as a leaf. What its backward pass leaves there are the slopes.
    Of a known loss (`KnownHeadRun`) they are computed here, and only compared with them.

    Args:
        module: The module itself, not Opacus' wrapper.
        head: The linear layer that is trained.
        frozen: What is kept in eval() mode.
        feature_norm: The declared bound on every record at the head, or None.
        **options: See `Source`.
    """

    def __init__(
        self,
        module: nn.Module,
        head: nn.Linear,
        frozen: FrozenPart,
        *,
        feature_norm: float | None,
        **options: Any,
    ):
        super().__init__(module, frozen, **options)
        self._head, self._feature_norm = head, feature_norm
        is_flat = feature_norm is not None
        self._passes = HeadPasses(
            module,
            head,
            self.iterate,
            frozen,
            is_flat=is_flat,
            has_loss=self._has_loss,
            is_composed=self._is_composed,
        )
        self.handles = self._passes.handles
        self._has_layers = module is not head
        self._used: list[HeadPass] = []
        self._first: torch.Tensor | None = None  # features of the first block of a step
        self._forget_gradients()

    # What the loop left

    def begin(self, piece: Piece) -> int:
        """See `Source.begin`."""
        self._check_trained(piece.step)
        self._check_penalty(piece)
        used = self._passes.used()
        is_once = len(used) < 2 or (self._feature_norm is None and used[0].call is not None)
        if not is_once or any(one.call is not used[0].call for one in used):
            raise UnsupportedRunError(
                f"step {piece.step} got the gradients of {len(used)} batches, expected 1: "
                "gradient accumulation, two losses with a pass each, or several views of a record, "
                "and nobody sees whether row i of each is of one record. Call optimizer.step() "
                "after every backward(). For batches that do not fit into memory raise the "
                "batch_size of the DataLoader and let "
                "opacus.utils.batch_memory_manager.BatchMemoryManager split them. "
                f"{ONE_CALL if self._feature_norm is None else ''}"
            )
        self._used = used
        return len(self._records_first(used[0].features)) if used else 0

    def _records_first(self, values: torch.Tensor) -> torch.Tensor:
        return values.movedim(self._dim, 0) if values.dim() > 2 else values

    def _check_penalty(self, piece: Piece) -> None:
        for param, (noisy, writes) in zip(self.iterate.params, self._gradients, strict=True):
            grad = param.grad
            is_as_left = grad is None or (grad is noisy and grad._version == writes)
            if not is_as_left and bool(grad.any()):  # a penalty times 0 is none
                raise self._reached_beside(piece.step, "the linear head reaches its parameters")

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Computes the gradients; what the loop did differently."""
        moved = any_of([self.iterate.moved(), *(one.moved for one in self._used)])
        if not piece.rows:
            empty = [torch.zeros(0, n).to(self._head.weight) for n in self._head.weight.shape[::-1]]
            piece.gradients = HeadGradients(self._head, *empty)
            return {"moved": moved, "feature": 0.0, "gradient": 0.0}
        if any(one.was_written for one in self._used):
            raise UnsupportedRunError(
                f"step {piece.step}: what went into the linear head, or came out, was changed in "
                "place after the pass. Compute out of place."
            )
        with torch.no_grad(), exact_products(self._head.weight.device.type):
            return {"moved": moved, **self._compute(piece)}

    def _compute(self, piece: Piece) -> dict[str, Figure]:
        parts = [
            (self._records_first(one.features), self._records_first(self._got(one, piece.rows)))
            for one in self._used
        ]
        features, got = parts[0]
        features = features.to(got.dtype)
        if len(parts) > 1 or features.dim() != 2:
            self._keep_samples(parts)
            piece.gradients = SampleGradients()
            return {"gradient": piece.largest_norm, **self._look_once(piece, self._features)}
        gradients = HeadGradients(self._head, features, self._slopes_of(piece, got))
        piece.gradients = gradients
        found: dict[str, Figure] = {
            "feature": gradients.feature_norms.max(),
            "gradient": piece.largest_norm,
            **self._compared(gradients, got),
        }
        if piece.block == 0:
            self._first = features
        elif self._first is not None:
            same = self._first.shape == features.shape
            found["other_inputs"] = differ(features, self._first) if same else True
        return {**found, **self._look_once(piece, self._features)}

    def _got(self, own: HeadPass, rows: int) -> torch.Tensor:
        """What the backward pass left at the outputs, of the loss of a record."""
        gradient = own.outputs.grad
        assert gradient is not None
        return gradient * rows if self._divides else gradient

    def _slopes_of(self, piece: Piece, got: torch.Tensor) -> torch.Tensor:
        return got

    def _compared(self, gradients: HeadGradients, got: torch.Tensor) -> dict[str, Figure]:
        return {}

    def _keep_samples(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keeps the gradient of every record, of a head that is used at several positions."""
        weight: Any = self._head.weight
        bias: Any = self._head.bias
        of_weight = [torch.einsum("n...k,n...d->nkd", s, x.to(s.dtype)) for x, s in parts]
        weight.grad_sample = torch.stack(of_weight).sum(0)
        if bias is not None:
            of_bias = [torch.einsum("n...k->nk", s) for _, s in parts]
            bias.grad_sample = torch.stack(of_bias).sum(0)

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

    def _judge_records(self, piece: Piece, values: Mapping[str, float]) -> None:
        if self._feature_norm is not None:
            check_features(piece.step, values["feature"], self._feature_norm)
        super()._judge_records(piece, values)

    def used(self, piece: Piece) -> None:
        """Starts the next piece."""
        self._used = []
        self._passes.forget()

    def cleared(self) -> None:
        """What was cleared does not count."""
        self._passes.cleared()

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
    def features(self) -> Sequence[torch.Tensor]:
        """What went into the head since the last piece."""
        return [one.features for one in self._used]

    @property
    def call(self) -> Call | None:
        """See `Source.call`."""
        return self._used[0].call if self._used else None

    # Between the steps

    def resume(self, steps: int) -> None:
        """Goes on from the loaded weights."""
        super().resume(steps)
        self._passes.forget()
        self._forget_gradients()

    def close(self) -> None:
        """Leaves the module as it was."""
        self._passes.close()

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What holds by construction, what is looked at, and what is taken on trust."""
        if self._feature_norm is not None:
            yield Assumption.checked(f"feature norms at most {self._feature_norm:g}")
        yield from self._of_the_loss()
        for one in super().assumptions:
            if self._module is not self._head or not one.text.startswith(ALONE):
                yield one  # a head alone mixes nothing


class KnownHeadRun(HeadRun):
    """Computes the slopes of a known loss from the targets of the batch that was drawn.

    The loop is compared with them, and the weights with the last iterate; both are a courtesy:
    neither goes into the step.

    Args:
        module: The module itself, not Opacus' wrapper.
        head: The linear layer that is trained.
        frozen: What is kept in eval() mode.
        known: The loss.
        targets: Finds those of a piece.
        **options: See `HeadRun`.
    """

    def __init__(
        self,
        module: nn.Module,
        head: nn.Linear,
        frozen: FrozenPart,
        *,
        known: KnownCriterion,
        targets: Targets,
        **options: Any,
    ):
        super().__init__(module, head, frozen, **options)
        self._known = known
        self._targets = targets
        self._target: torch.Tensor | None = None
        self._warns = True  # of a loop whose loss has a further term

    def _of_the_loss(self) -> Iterable[Assumption]:
        return ()

    def _slopes_of(self, piece: Piece, got: torch.Tensor) -> torch.Tensor:
        output = self._used[0].outputs.detach()
        self._target = self._targets.of(output, lambda target: self._misfit(output, target, got))
        try:
            return self._known.slopes(output, self._target)
        except (TypeError, ValueError) as error:
            raise UnsupportedRunError(f"The targets of the batch: {error}") from None

    def _misfit(self, output: torch.Tensor, target: torch.Tensor, got: torch.Tensor) -> float:
        """How far the slopes at `target` are from `got`; inf where the loss has none there."""
        try:
            off = float(torch.linalg.vector_norm(self._known.slopes(output, target) - got))
        except (TypeError, ValueError):
            return math.inf
        return math.inf if math.isnan(off) else off

    def _compared(self, gradients: HeadGradients, got: torch.Tensor) -> dict[str, Figure]:
        """How long the slopes are, and how far those of the loop are away."""
        return {
            "slopes": torch.linalg.vector_norm(gradients.slope_norms),
            "off": torch.linalg.vector_norm(gradients.slopes - got),
        }

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if the loop does something else than the step."""
        if math.isnan(values["gradient"]) and not values["moved"]:
            check_features(piece.step, values["feature"], self._feature_norm or math.inf)
            raise self._other_loss(piece)  # targets, or a loss, that have no gradient there
        super().judge(piece, values)
        off, length = values.get("off", 0.0), values.get("slopes", 0.0)
        if off <= _LEAST * length or off <= (rounding := self._rounding(piece.rows)):
            return
        if not off <= TOLERANCE * length + rounding:
            raise self._other_loss(piece)
        if self._warns:
            self._warns = False
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
        own, target = self._used[0], self._target
        assert target is not None
        with torch.no_grad():
            output, got = own.outputs.detach(), self._got(own, piece.rows)
            slopes_at = functools.partial(self._known.slopes, output)
            why = diagnosis(output, target, slopes_at, got)
        return UnsupportedRunError(
            f"step {piece.step}: the loop has gradients of another loss than "
            f"{self._known.criterion}: {why}. The step was not taken. Pass the loss that the loop "
            "computes as criterion=, and compute no other one with the outputs."
        )

    def used(self, piece: Piece) -> None:
        """Starts the next piece."""
        super().used(piece)
        self._target = None

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What holds by construction, what is looked at, and what is taken on trust."""
        yield Assumption.checked(
            "every step computed from the features that reached the head, the targets of the batch "
            "that was drawn, the formula of the loss and the last private iterate; the loop's "
            f"gradient at the outputs within {TOLERANCE:g} of its length, up to rounding"
        )
        yield from super().assumptions
