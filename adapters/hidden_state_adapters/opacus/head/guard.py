"""The head run's part of a step: computes every gradient itself, and compares the loop with it."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.criteria import KnownCriterion
from hidden_state_adapters.opacus.data.loader import BatchCursor, tensors_of
from hidden_state_adapters.opacus.gradients.exact import exact_products
from hidden_state_adapters.opacus.gradients.figures import Figure, any_of, differ
from hidden_state_adapters.opacus.gradients.head import HeadGradients
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.batch import holds_others
from hidden_state_adapters.opacus.guards.frozen import FrozenPart
from hidden_state_adapters.opacus.guards.gradients import GradientGuard
from hidden_state_adapters.opacus.guards.head import FeatureGuard
from hidden_state_adapters.opacus.guards.parameters import another_iterate, fingerprint
from hidden_state_adapters.opacus.guards.precision import check_precision
from hidden_state_adapters.opacus.head.apart import features_are_apart
from hidden_state_adapters.opacus.head.diagnosis import diagnosis
from hidden_state_adapters.opacus.head.iterate import Iterate
from hidden_state_adapters.opacus.head.passes import HeadPass, HeadPasses
from hidden_state_adapters.opacus.head.targets import Targets

TOLERANCE = 1e-2  # of the length of all slopes of a piece: bfloat16 in a loop passes
_ROUNDING_UNITS = 100.0
_IS_TRAINED = operator.attrgetter("requires_grad")
_FIRST_STEPS = 3  # in which the model's input is compared with the batch


class HeadRun(Guard):
    """Computes the gradients of a linear head from the batch that was dealt.

    The loop gets the head's outputs as a leaf. What its backward pass leaves there is compared with
    the closed form of the loss, the weights with the last iterate; both are a courtesy: neither
    goes into the step.

    Args:
        module: The module itself, not Opacus' wrapper.
        head: The linear layer that is trained.
        known: The loss.
        frozen: What is kept in eval() mode.
        targets: Finds those of a piece.
        cursor: Says which batch the loop is working on.
        feature_norm: The declared bound.
        lipschitz: Of the loss of one record in the parameters.
        divides: Whether the loss of a batch is divided by its number of rows.
        maps_records: Whether the loop maps records before the model, which was declared.
    """

    def __init__(
        self,
        module: nn.Module,
        head: nn.Linear,
        known: KnownCriterion,
        frozen: FrozenPart,
        targets: Targets,
        cursor: BatchCursor,
        *,
        feature_norm: float,
        lipschitz: float | None,
        divides: bool,
        maps_records: bool,
    ):
        self._module, self._head, self._targets, self._cursor = module, head, targets, cursor
        self._held = list(module.parameters())
        self._flags = list(map(_IS_TRAINED, self._held))
        self._known = copy.deepcopy(known)  # what a loop sets later changes nothing
        names = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = set(names)
        self.iterate = Iterate(head, names)
        self._passes = HeadPasses(module, head, self.iterate, frozen)
        self._divides, self._maps_records = divides, maps_records
        self._has_backbone, self._has_modes = len(self._held) > len(names), bool(frozen)
        self._bounds = (FeatureGuard(feature_norm, tuple), GradientGuard.of_lipschitz(lipschitz))  # type: ignore[arg-type]
        self._looked = 0  # steps whose inputs were compared
        self._is_apart: bool | None = None
        self._is_open = module is not head  # whether records were not looked at yet
        self._pass: HeadPass | None = None
        self._target: torch.Tensor | None = None
        self._first_features: torch.Tensor | None = None  # of the first block of a step
        self._rows_before = 0
        self._fixed = self._fixed_part()
        self._forget_gradients()

    # What the loop left

    def begin(self, piece: Piece) -> int:
        """The number of rows of the pass that the loop's loss came from.

        Raises:
            UnsupportedRunError: There is none, or several, or something else is trained.
        """
        self._check_parameters(piece)
        used = self._passes.used()
        if len(used) > 1:
            raise UnsupportedRunError(
                f"step {piece.step} got the gradients of {len(used)} batches, expected 1: "
                "gradient accumulation, two losses with a pass each, or several views of a record "
                "are not accounted, a record counts once for each. Call optimizer.step() after "
                "every backward(). For batches that do not fit into memory raise the batch_size "
                "of the DataLoader and let opacus.utils.batch_memory_manager.BatchMemoryManager "
                "split them."
            )
        self._pass = used[0] if used else None
        return 0 if self._pass is None else len(self._pass.features)

    def _check_parameters(self, piece: Piece) -> None:
        step, params = piece.step, self.iterate.params
        for param, (noisy, writes) in zip(params, self._gradients, strict=True):
            check_precision("parameters", param)
            grad = param.grad
            if grad is not None and (grad is not noisy or grad._version != writes):
                raise UnsupportedRunError(
                    f"step {step}: something beside the outputs of the linear head reaches its "
                    "parameters: a penalty in the loss, or another use of the weights. It is "
                    "inside no clip and in no bound. Use the optimizer's weight_decay, or prox=."
                )
        if list(map(_IS_TRAINED, self._held)) != self._flags:
            trained = [n for n, p in self._module.named_parameters() if p.requires_grad]
            raise UnsupportedRunError(
                f"step {step} trains {trained}, expected the parameters of the linear head as at "
                "the start: the set of trainable parameters is fixed for a run. Start another run "
                "for another set."
            )

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Computes the gradients; what the loop did differently."""
        found: dict[str, Figure] = {"moved": self.iterate.moved()}
        if not piece.rows or self._pass is None:
            empty = [torch.zeros(0, n).to(self._head.weight) for n in self._head.weight.shape[::-1]]
            piece.gradients = HeadGradients(self._head, *empty)
            return {**found, "feature": 0.0, "gradient": 0.0, "excess": 0.0}
        own = self._pass
        if own.was_written:
            raise UnsupportedRunError(
                f"step {piece.step}: what went into the linear head, or came out, was changed in "
                "place after the pass. Compute out of place."
            )
        found["moved"] = any_of([found["moved"], own.moved])
        with torch.no_grad(), exact_products(self._head.weight.device.type):
            found.update(self._compute(piece, own))
        return found

    def _compute(self, piece: Piece, own: HeadPass) -> dict[str, Figure]:
        output = own.outputs.detach()
        features = own.features.to(output.dtype)
        got = self._got(own)
        start = self._rows_before if piece.block == 0 else 0
        self._target = self._targets.of(
            piece.step,
            slice(start, start + piece.rows),
            output,
            lambda target: self._misfit(output, target, got),
        )
        slopes = self._slopes(output, self._target)
        gradients = piece.gradients = HeadGradients(self._head, features, slopes)
        slack = _ROUNDING_UNITS * torch.finfo(output.dtype).eps * math.sqrt(piece.rows)
        allowed = TOLERANCE * torch.linalg.vector_norm(gradients.slope_norms)
        shape = output.shape if self._target.numel() == output.numel() else self._target.shape
        size = self._known.size(output, self._target.to(output).reshape(shape)).max()
        allowed = allowed + slack * size
        found: dict[str, Figure] = {
            "feature": gradients.feature_norms.max(),
            "gradient": piece.largest_norm,
            "excess": torch.linalg.vector_norm(slopes - got) - allowed,
        }
        if piece.block == 0:
            self._first_features = features
        elif self._first_features is not None:
            same = self._first_features.shape == features.shape
            found["other_inputs"] = differ(features, self._first_features) if same else True
        return {**found, **self._looks(piece, own)}

    def _got(self, own: HeadPass) -> torch.Tensor:
        """What the backward pass left at the outputs, of the loss of a record."""
        gradient = own.outputs.grad
        assert gradient is not None
        return gradient * len(own.features) if self._divides else gradient

    def _slopes(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        try:
            return self._known.slopes(output, target)
        except (TypeError, ValueError) as error:
            raise UnsupportedRunError(f"The targets of the batch: {error}") from None

    def _misfit(self, output: torch.Tensor, target: torch.Tensor, got: torch.Tensor) -> float:
        """How far the slopes at `target` are from `got`; inf where the loss has none there."""
        try:
            off = float(torch.linalg.vector_norm(self._known.slopes(output, target) - got))
        except (TypeError, ValueError):
            return math.inf
        return math.inf if math.isnan(off) else off

    def _looks(self, piece: Piece, own: HeadPass) -> dict[str, Figure]:
        """What is looked at in the first steps only."""
        found: dict[str, Figure] = {}
        taken = self._cursor.taken
        if self._looked < _FIRST_STEPS and taken is not None and not self._maps_records:
            self._looked += 1
            found["other_records"] = any_of(
                [holds_others(self.inputs, taken.tensors), not taken.is_as_delivered]
            )
        if self._is_open and piece.rows > 1 and own.call is not None:
            self._is_open = False
            self._is_apart = features_are_apart(self._module, self._head, own.call, own.features)
            found["mixed"] = self._is_apart is False
        return found

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if the loop does something else than the step."""
        if values["moved"]:
            raise UnsupportedRunError(
                f"step {piece.step}: the parameters were changed outside the private optimizer, so "
                "that the loop trains another model than the step (load_state_dict, an average of "
                "weights, another optimizer, sharpness-aware training?). Load weights before "
                "make_private, or a run with engine.load_checkpoint, and leave them alone then."
            )
        features, gradients = self._bounds
        features.judge(piece, values)
        if math.isnan(values["gradient"]):  # of targets, or of a loss, that has no gradient there
            raise self._other_loss(piece)
        gradients.judge(piece, values)
        if values.get("mixed"):
            raise UnsupportedRunError(
                f"step {piece.step}: the model mixes the records of a batch. The features of half "
                "of them are others alone, or beside other records: every gradient then depends on "
                "all records, and no clip bounds what one of them does. Compute the features of "
                "every record from that record alone (nn.GroupNorm or nn.LayerNorm in place of "
                "statistics of the batch, constants in place of its mean or its largest norm)."
            )
        if values.get("other_records"):
            raise UnsupportedRunError(
                f"step {piece.step}: what went into the model is not what the loader dealt, moved, "
                "cast or reshaped. Whether the loop mixes records (mixup, statistics of the batch) "
                "nobody can see: map the records in the data set, the collate_fn or the model "
                "(call the private model, with its backbone inside). Or declare with "
                "loop_maps_records=True that the loop maps every record by itself."
            )
        if values.get("other_inputs"):
            raise UnsupportedRunError(
                f"step {piece.step} follows training passes on different inputs, expected the same "
                "batch for every block. Draw batch and augmentation outside of the closure."
            )
        if not values["excess"] <= 0:
            raise self._other_loss(piece)

    def _other_loss(self, piece: Piece) -> UnsupportedRunError:
        own, target, gradients = self._pass, self._target, piece.gradients
        assert own is not None
        assert target is not None
        assert gradients is not None
        with torch.no_grad():
            output, got = own.outputs.detach(), self._got(own)
            why = diagnosis(output, target, gradients.slopes, got)
        return UnsupportedRunError(
            f"step {piece.step}: the loop has gradients of another loss than "
            f"{self._known.criterion}: {why}. The step was not taken. Pass the loss that the loop "
            "computes as criterion=, and compute no other one with the outputs."
        )

    def used(self, piece: Piece) -> None:
        """Starts the next piece."""
        if piece.block == 0:
            self._rows_before += piece.rows
        self._pass = self._target = None
        self._passes.forget()

    def moved(self, piece: Piece) -> None:
        """The next gradients are none of this step's."""
        self._forget_gradients()

    def after(self, step: int) -> None:
        """The next piece is the first of a batch."""
        self._rows_before, self._first_features = 0, None

    def _forget_gradients(self) -> None:
        """Gradients that the parameters have now, as they are, are not of the loop's next loss."""
        grads = [p.grad for p in self.iterate.params]
        self._gradients = [(g, 0 if g is None else g._version) for g in grads]

    @property
    def features(self) -> Sequence[torch.Tensor]:
        """What went into the head since the last piece."""
        return () if self._pass is None else (self._pass.features,)

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """The tensors that went into the model for the loop's loss."""
        call = None if self._pass is None else self._pass.call
        return tuple(tensors_of(call))

    # Between the steps

    def iterate_figures(self) -> Mapping[str, Figure]:
        """Whether the model is the last iterate."""
        return {"moved": self.iterate.is_released(self._module)}

    def judge_iterate(self, steps: int, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if it is not, or its frozen part is another one."""
        if values["moved"]:
            raise another_iterate(steps)
        now = self._fixed_part()
        for name in now.keys() - self._fixed.keys():
            raise UnsupportedRunError(
                f"The model after step {steps} has {name}, which was not there at the start: it "
                "was not accounted, and a buffer may carry data of the records past the noise. "
                "Add parameters and buffers before make_private."
            )
        for name, (known, is_buffer) in self._fixed.items():
            if now.get(name) == (known, is_buffer):
                continue
            if not is_buffer:
                raise UnsupportedRunError(
                    f"The model after step {steps} has another value of the frozen parameter "
                    f"{name} than at the start: the frozen part of the model is public and stays "
                    "as it is. Start another run for another one."
                )
            raise UnsupportedRunError(
                f"A buffer of the module was changed during the run ({name}: running statistics, "
                "counters, caches?): it carries data of the records past the noise. Put the layer "
                "that writes it in eval() mode, or replace it."
            )

    def _fixed_part(self) -> dict[str, tuple[int, bool]]:
        """Fingerprints of buffers and of what is not trained, and whether it is a buffer."""
        found = {name: (fingerprint(b), True) for name, b in self._module.named_buffers()}
        trained = {id(p) for p in self.iterate.params}
        for name, param in self._module.named_parameters():
            if id(param) not in trained and name not in self._names:
                found[name] = fingerprint(param), False
        return found

    def resume(self, steps: int) -> None:
        """Goes on from the loaded weights."""
        self.iterate.take()
        self._fixed = self._fixed_part()
        self._passes.forget()
        self._forget_gradients()
        self.after(steps)

    def close(self) -> None:
        """Leaves the module as it was."""
        self._passes.close()

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What holds by construction, what is looked at, and what is taken on trust."""
        yield Assumption.checked(
            "every step computed from features and targets of the batch that was dealt, the "
            "formula of the loss and the last private iterate; the loop's gradient at the outputs "
            "compared with it"
        )
        for bound in self._bounds:
            yield from bound.assumptions
        if self._has_backbone:
            yield Assumption.declared(
                "the frozen part of the model is public: it was not fitted to the private records, "
                "and it maps every record by itself"
            )
        if self._has_modes:
            yield Assumption.checked("the frozen part of the model in eval() mode")
        if self._is_apart:
            yield Assumption.checked(
                "the model took every record by itself: the features of both halves of the first "
                "batch were those alone, and beside other records"
            )
        elif self._module is not self._head:
            yield Assumption.declared("the model takes every record of a batch by itself")
        if self._maps_records:
            yield Assumption.declared(
                "what the loop does to records before the model it does to every record by itself"
            )
