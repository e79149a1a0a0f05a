"""What all sources of gradients have in common: the model between the steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.apart import (
    Call,
    Collated,
    losses_add_up,
    losses_are_apart,
    records_are_apart,
)
from hidden_state_adapters.opacus.batch import Taken
from hidden_state_adapters.opacus.frozen import FrozenPart
from hidden_state_adapters.opacus.gradients import (
    Figure,
    Piece,
)
from hidden_state_adapters.opacus.iterate import Iterate
from hidden_state_adapters.opacus.loader import tensors_of
from hidden_state_adapters.opacus.norms import check_gradients
from hidden_state_adapters.opacus.precision import check_precision, is_half

ALONE = "the model takes every record of a batch by itself"
LOSS_OF_RECORDS = (
    "the loss of a batch is the mean (or sum) of the losses of its records: no class weights or "
    "token counts in a mean, no contrastive terms"
)
ONE_CALL = (
    "Twins, several views, real and made-up records: make one module private whose forward() calls "
    "the network for each, and call it once. Or declare with make_private(loop_maps_records=True) "
    "that row i of every pass is made of record i alone, or of no record."
)
_IS_TRAINED = operator.attrgetter("requires_grad")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def remove_all(handles: Iterable[Any]) -> None:
    """Removes hooks."""
    for handle in handles:
        handle.remove()


class Hooks:
    """Refuses more hooks on a model than in its first training pass.

    Args:
        modules: Names and modules of the model.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]):
        self._modules = [part for _, part in modules]
        self._count: int | None = None

    def check(self) -> None:
        """Raises UnsupportedRunError if there are more than in the first call."""
        count = sum(len(getattr(part, kind)) for part in self._modules for kind in _HOOKS)
        if self._count is None:
            self._count = count
        elif count > self._count:
            raise UnsupportedRunError(
                "Expected the hooks of the first training pass, got further ones on the model: a "
                "hook can change what the step is computed from, and whether it mixes records was "
                "looked at without it. Register hooks before the first step, or remove them before "
                "the training pass."
            )


class Source:
    """Where the gradients of a run come from, and what is looked at of its model.

    A step asks `begin`, `figures` and `judge`, and tells `used`, `moved` and `after`. What one of
    them raises ends the run.

    Attributes:
        iterate: The weights that the last step left.
        handles: The hooks on the model, which do not outlive the run.
        ghost: Opacus' wrapper of the model if it clips in a second backward pass, or None.
        computes_loss: Whether the gradients follow from the formula of the loss.

    Args:
        module: The module itself, not Opacus' wrapper.
        frozen: What is kept in eval() mode.
        dim: The dimension that counts the records of what goes into the model.
        has_loss: Whether the loop's gradients have to be those of a loss that was declared.
        lipschitz: Of the loss of one record in the parameters, or None.
        is_composed: Whether every step counts, so that the loop may do what Opacus lets it do.
        collated: Batches of fewer records, as the loader would deal them.
        criterion: The loss of a batch that was passed, where the loop computes it; or None.
        divides: Whether the loss of a batch is divided by its number of records.
    """

    handles: list[Any]
    ghost: Any = None
    computes_loss = False
    _has_layers = True  # whether the model is more than a linear head

    def __init__(
        self,
        module: nn.Module,
        frozen: FrozenPart,
        *,
        dim: int,
        has_loss: bool,
        lipschitz: float | None,
        is_composed: bool,
        collated: Collated,
        criterion: Any,
        divides: bool,
    ):
        self._module, self._frozen, self._lipschitz = module, frozen, lipschitz
        self._dim, self._has_loss, self._is_composed = dim, has_loss, is_composed
        self._collated, self._criterion, self._divides = collated, criterion, divides
        self.iterate = Iterate(module)
        self._held = list(module.parameters())
        self._flags = list(map(_IS_TRAINED, self._held))
        self._dtypes = [param.dtype for param in self.iterate.params]
        self._is_apart: bool | None = None
        self._has_apart_losses: bool | None = None
        self._is_open = True  # whether records were not looked at yet

    # In a step

    def begin(self, step: int, params: Sequence[nn.Parameter], block: int) -> Piece:
        """Returns the gradients at hand, with the number of their records.

        Args:
            step: Number of the logical step.
            params: Parameters of the block.
            block: Number of the block.

        Raises:
            UnsupportedRunError: There are none, or of several batches, or something else is
                trained.
        """
        raise NotImplementedError

    def _check_trained(self, step: int) -> None:
        for param, dtype in zip(self.iterate.params, self._dtypes, strict=True):
            if param.dtype != dtype or not self._is_composed:
                check_precision("parameters", param)
        flags = list(map(_IS_TRAINED, self._held))
        is_larger = any(map(operator.gt, flags, self._flags))
        if is_larger or (flags != self._flags and not self._is_composed):
            trained = [n for n, p in self._module.named_parameters() if p.requires_grad]
            how = "can only shrink in" if self._is_composed else "is fixed for"
            raise UnsupportedRunError(
                f"step {step} trains {trained}, expected the parameters of the start: the set of "
                f"trainable parameters {how} a run. Start another run for another set."
            )

    def figures(self, piece: Any, batch: Taken) -> Mapping[str, Figure]:
        """Figures to be read from the device in one transfer; the gradients are there then.

        Args:
            piece: What `begin` returned.
            batch: Tensors that were drawn.
        """
        raise NotImplementedError

    def _look_once(
        self, piece: Piece, compute: Callable[[Call], list[torch.Tensor]]
    ) -> dict[str, Figure]:
        """Looks whether model or criterion mix records, once, on the first batch of several."""
        call = self.call
        if not self._is_open or piece.rows < 2 or call is None:
            return {}
        self._is_open = False
        if self._has_layers or self._collated.is_custom:
            further = self._collated.versions(call, piece)
            self._is_apart = records_are_apart(
                self._module, compute, call, piece.rows, self._dim, further
            )
        if self._criterion is not None and self._dim == 0:
            self._has_apart_losses = self._look_at_criterion(piece)
        adds_up = None
        if self._criterion is None and self._has_layers and self._dim == 0:
            adds_up = losses_add_up(self._module, compute, call, piece.rows)
        return {
            "mixed": self._is_apart is False,
            "mixing_loss": self._has_apart_losses is False,
            "mixing_output": adds_up is False,
        }

    def _look_at_criterion(self, piece: Piece) -> bool | None:
        try:
            outputs, tensors = self._outputs(piece), self._collated.tensors(piece)
        except Exception:  # whatever model, data set or collate_fn may raise that is called again
            return None
        return losses_are_apart(self._criterion, outputs, tensors, self._divides)

    def _outputs(self, piece: Piece) -> Sequence[torch.Tensor]:
        """What the model computes for the records of a piece."""
        raise NotImplementedError

    def _reached_beside(self, step: int, what: str) -> UnsupportedRunError:
        after = "" if self._is_composed else ", or after="
        return UnsupportedRunError(
            f"step {step}: something beside the outputs of {what}: a penalty in the loss, another "
            "use of the weights, or a hook on a parameter. It is inside no clip and in no bound, "
            "and would have no effect. Leave it out; a penalty is the optimizer's "
            f"weight_decay{after}."
        )

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if the values of the figures are wrong."""
        if values["moved"]:
            raise UnsupportedRunError(
                f"step {piece.step}: the parameters were changed outside the private optimizer, so "
                "that the loop trains another model than the step (load_state_dict, an average of "
                "weights, another optimizer, sharpness-aware training?). Load public weights "
                "before make_private, go on with a run by engine.load_checkpoint, and leave the "
                "weights alone then. Weights of another private run are never loaded: train its "
                "model itself (the engine composes its runs), or compose its event by hand, "
                "LastIterateAccountant().compose(event)."
            )
        self._judge_records(piece, values)
        check_gradients(piece.step, values["gradient"], self._lipschitz)

    def _judge_records(self, piece: Piece, values: Mapping[str, float]) -> None:
        if values.get("mixed"):
            raise UnsupportedRunError(
                f"step {piece.step}: the model mixes the records of a batch. What it computes for "
                "half of them is something else alone, or beside other records: every gradient "
                "then depends on all records, and no clip bounds what one of them does. Compute "
                "the output of every record from that record alone (nn.GroupNorm or nn.LayerNorm "
                "in place of statistics of the batch, constants in place of its mean or its "
                "largest norm; a fixed length, or a mask that leaves out the padding, in place of "
                "padding to the longest record of the batch)."
            )
        if values.get("mixing_loss"):
            raise UnsupportedRunError(
                f"step {piece.step}: the criterion that was passed mixes the records of a batch. "
                "The gradient of a record is another one in a part of the batch (class weights or "
                "a number of tokens in a mean, a contrastive term?), and no clip bounds what one "
                "record does to those of others. Compute the loss of every record by itself, with "
                'reduction="none", and take the mean over the records (docs/opacus.md, "The loss '
                'of a record").'
            )
        if values.get("mixing_output"):
            raise UnsupportedRunError(
                f"step {piece.step}: a number that the model returns for a batch, such as its "
                "loss, is not the mean or sum of those of both halves. In a mean over all tokens "
                "that are no padding, with class weights, or of pairs, one record changes the "
                "gradients of others, and no clip bounds that. Compute the loss of every record by "
                "itself from the outputs, and take the mean over the records (docs/opacus.md, "
                '"The loss of a record"). Return other numbers with .item().'
            )
        if values.get("other_inputs"):
            raise UnsupportedRunError(
                f"step {piece.step} follows training passes on different inputs, expected the same "
                "batch for every block. Draw batch and augmentation outside of the closure."
            )

    def used(self, piece: Piece) -> None:
        """The gradients at hand were added up."""

    def cleared(self) -> None:
        """The gradients that finished passes left were cleared."""

    def moved(self, piece: Piece) -> None:
        """The parameters of the piece were moved."""

    def after(self, step: int) -> None:
        """The logical step is complete."""

    @property
    def call(self) -> Call | None:
        """What the model was called with for the loop's loss."""
        raise NotImplementedError

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """The tensors among that."""
        return tuple(tensors_of(self.call))

    # Between the steps

    def resume(self, steps: int) -> None:
        """Goes on from what the model holds, after a checkpoint was loaded."""
        self.iterate.take()
        self.after(steps)

    def close(self) -> None:
        """Leaves the module as it was."""
        raise NotImplementedError

    def _of_the_loss(self) -> Iterable[Assumption]:
        """What is taken on trust of a loss that the loop computes."""
        looked = ""
        if self._has_apart_losses:
            looked = " (the criterion that was passed: looked at once, on the first batch)"
        yield Assumption.declared(f"{LOSS_OF_RECORDS}{looked}")

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is looked at, and what is taken on trust."""
        if self._lipschitz is not None:
            yield Assumption.checked(f"per-example gradient norms at most {self._lipschitz:g}")
        precision = "parameters in float32 or float64"
        if any(map(is_half, self.iterate.params)):
            precision = "parameters of which gradients are added up, and noise is drawn, in float32"
        yield Assumption.checked(f"{precision}, in every step those that the last one left")
        yield Assumption.checked(
            "buffers and what is frozen as at the start, whenever epsilon is asked for or the "
            "model is released"
        )
        if not self._is_composed:
            yield Assumption.checked("no more hooks on the model than in the first training pass")
        if not all(self._flags):
            yield Assumption.declared(
                "the frozen part of the model is public: it was not fitted to the private records, "
                "and it maps every record by itself"
            )
        if self._frozen:
            layers = "layers with running statistics in " if self._is_composed else ""
            yield Assumption.checked(
                f"{layers}the frozen part of the model in eval() mode, whenever the loop calls the "
                "model"
            )
        looked = ""
        if self._is_apart:
            looked = (
                " (looked at once, on the first batch: what it computed for each half was the same "
                "alone, and beside other records)"
            )
        yield Assumption.declared(f"{ALONE}{looked}")
