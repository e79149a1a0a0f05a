"""The training passes of a loop for one step: the weights, the batch, and a linear head's step."""

from __future__ import annotations

import hashlib
import logging
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from dp_accounting import NeighboringRelation
from torch import nn
from torch.utils.data import default_collate

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE
from hidden_state_adapters.opacus.apart import (
    Call,
    Collated,
    losses_add_up,
    losses_are_apart,
    records_are_apart,
)
from hidden_state_adapters.opacus.criteria import REMEDY, diagnosis
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.gradients import (
    Figure,
    Piece,
    all_of,
    any_of,
    check_features,
    check_gradients,
    counted_writes,
    differ,
    read,
)
from hidden_state_adapters.opacus.loader import BatchCursor, leaves_of, plain_collate, tensors_of
from hidden_state_adapters.opacus.precision import (
    check_arithmetic,
    check_precision,
    exact_products,
    is_half,
)

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
_SIMPLE = (torch.Tensor, bool, int, str, type(None))  # lengths, names and switches may change
_MIXING_MODEL = (
    "the model mixes the records of a batch. What it computes for half of them is something else "
    "alone, or beside other records: every gradient then depends on all records, and no clip "
    "bounds what one of them does. Compute the output of every record from that record alone "
    "(nn.GroupNorm or nn.LayerNorm in place of statistics of the batch, constants in place of its "
    "mean or its largest norm; a fixed length, or a mask that leaves out the padding, in place of "
    "padding to the longest record of the batch)."
)
_MIXING_CRITERION = (
    "the criterion that was passed mixes the records of a batch. The gradient of a record is "
    "another one in a part of the batch (class weights or a number of tokens in a mean, a "
    "contrastive term?), and no clip bounds what one record does to those of others. Compute the "
    'loss of every record by itself, with reduction="none", and take the mean over the records '
    '(docs/opacus.md, "The loss of a record").'
)
_MIXING_LOSS = (
    "a number that the model returns for a batch, such as its loss, is not the mean or sum of "
    "those of both halves. In a mean over all tokens that are no padding, with class weights, or "
    "of pairs, one record changes the gradients of others, and no clip bounds that. Compute the "
    "loss of every record by itself from the outputs, and take the mean over the records "
    '(docs/opacus.md, "The loss of a record"). Return other numbers with .item().'
)
_CHANGED = (
    "Weights of another private run are never loaded: train its model itself (the engine composes "
    "its runs), or compose its event by hand, LastIterateAccountant().compose(event)."
)

TOLERANCE = 1e-2  # of the length of all slopes of a piece: bfloat16 in a loop passes
_ROUNDING_UNITS = 100.0
_LEAST = 1e-5  # of that length: what is less is not looked at, and may be rounding

_logger = logging.getLogger("hidden_state_accountants")


class Passes:
    """Notes the training passes of a model, and compares them with the run that was declared.

    It holds the weights that the last private step left. Buffers, and what is not trained, are
    compared with the start where somebody asks about the model.

    Every tensor that goes into the model has to be one of the batch whose turn it is, wherever it
    was moved to and in whatever shape and type. Floats and other objects, which may hold statistics
    of the batch, stay those of the first pass. Where the loop may map records tensors are compared
    only if it fetches ahead, and so holds two batches when it steps.

    A step calls `take`, which returns its gradients, `used` when they were added up, and `keep`
    when the parameters were moved. What one of them raises ends the run.

    Attributes:
        params: Parameters that are trained.
        handles: Hooks on the model, which do not outlive the run.
        ghost: Opacus' wrapper of the model if it clips in a second backward pass, or None.
        computes_loss: True if the gradients follow from the formula of the loss.
        index: Index of the batch of the step within the epoch.
        rows: Number of records of the pieces of that batch so far.
        skips_step: True if more pieces follow the last one.

    Args:
        declared: Run whose model is trained.
        cursor: Position of the loop among the batches.
    """

    handles: list[Any]
    ghost: Any = None
    computes_loss = False
    index: int | None = None
    rows = 0
    skips_step = False
    _has_layers = True  # whether the model is more than a linear head
    # Opacus and users copy models with their hooks; a copy trains nothing here.
    _is_idle = True

    def __init__(self, declared: DeclaredRun, cursor: BatchCursor):
        arguments, known = declared.arguments, declared.known_criterion
        self._module, self._frozen, self._plan = declared.inner, declared.frozen, declared.plan
        self._loader, self._cursor = arguments.data_loader, cursor
        self._lipschitz, self._relation = declared.lipschitz, declared.relation
        self._is_composed: bool = declared.mechanism.is_composed
        self._has_loss = declared.loss is not None and known is None
        self._divides = arguments.loss_reduction == "mean"
        # The dimension of what goes into the model that counts its records.
        self._dim = 0 if arguments.batch_first else 1
        self._maps_records = arguments.loop_maps_records
        self._compares = not (self._is_composed or self._maps_records)
        calls_it = arguments.is_ghost and declared.head is None  # record by record
        self._criterion = None if known is not None or calls_it else arguments.criterion
        self._collated = Collated(declared.plan, arguments.data_loader)
        self._modules = tuple(self._module.named_modules())
        parts = [part for _, part in self._modules]
        self._hooks = [] if self._is_composed else [getattr(p, k) for p in parts for k in _HOOKS]
        self._known_hooks: dict[int, Any] | None = None
        trained = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        self.params: list[nn.Parameter] = list(trained.values())
        self._names = list(trained)
        self._held = list(self._module.parameters())
        self._flags = list(map(_IS_TRAINED, self._held))
        self._step = self._piece_rows = 0
        self._of_piece: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None
        self._constants: list[Any] | None = None  # of the first pass
        self._is_open = True  # whether records were not looked at yet
        self._is_apart: bool | None = None
        self._has_apart_losses: bool | None = None
        self._take_weights()

    # The weights

    def _take_weights(self) -> None:
        """Takes what the model holds for what the last step left."""
        self._own = [p.detach().clone() for p in self.params]
        self._fixed = self._fixed_part()

    def keep(self) -> None:
        """Takes what a step left."""
        for index, (param, own) in enumerate(zip(self.params, self._own, strict=True)):
            if own.device != param.device or own.dtype != param.dtype:
                self._own[index] = own = torch.empty_like(param, requires_grad=False)
            own.copy_(param)

    def _is_moved(self, params: Sequence[torch.Tensor] | None = None) -> Figure:
        """Tells whether the model holds other numbers than the last step left."""
        flags = []
        for param, own in zip(params or self.params, self._own, strict=True):
            if param.shape != own.shape or param.dtype != own.dtype:
                return True
            flags.append(differ(param, own if own.device == param.device else own.to(param.device)))
        return any_of(flags)

    def check_iterate(self, steps: int) -> None:
        """Raises UnsupportedRunError unless the model is what `steps` steps left.

        Also where other objects are in the places of its parameters.
        """
        now = dict(self._module.named_parameters())
        is_there = all(name in now for name in self._names)
        moved = self._is_moved([now[name] for name in self._names]) if is_there else True
        if read([moved])[0]:
            raise UnsupportedRunError(
                f"The parameters were changed outside the private optimizer after step {steps}, so "
                "the model is not the iterate that was accounted (load_state_dict, an average of "
                "weights, another optimizer?). Load public weights before make_private, go on "
                "with a run by engine.load_checkpoint, and leave the weights alone then. "
                f"{_CHANGED} To end with an earlier iterate (or an average), call engine.release() "
                "where it is the current one, and ask for epsilon before it is put in."
            )
        fixed = self._fixed_part()
        for name in fixed.keys() - self._fixed.keys():
            raise UnsupportedRunError(
                f"The model after step {steps} has {name}, which was not there at the start: it "
                "was not accounted, and a buffer may carry data of the records past the noise. "
                "Add parameters and buffers before make_private."
            )
        for name, (known, is_buffer) in self._fixed.items():
            if fixed.get(name) == (known, is_buffer):
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

    def _fixed_part(self) -> dict[str, tuple[bytes, bool]]:
        """Returns fingerprints of buffers and of what is not trained, and which are buffers."""
        found = {name: (fingerprint(b), True) for name, b in self._module.named_buffers()}
        for name, param in self._module.named_parameters():
            if name not in self._names:
                found[name] = fingerprint(param), False
        return found

    # In a pass

    def _check_hooks(self) -> None:
        """Raises UnsupportedRunError if there are other hooks than in the first call."""
        if self._known_hooks is None:
            self._known_hooks = {k: hook for hooks in self._hooks for k, hook in hooks.items()}
        if all(key in self._known_hooks for hooks in self._hooks for key in hooks):
            return
        known = list(self._known_hooks.values())  # a loop may take one off and put it on again
        if any(hook not in known for hooks in self._hooks for hook in hooks.values()):
            raise UnsupportedRunError(
                "Expected the hooks of the first training pass, got further ones on the model: a "
                "hook can change what the step is computed from, and whether it mixes records was "
                "looked at without it. Register hooks before the first step, or remove them before "
                "the training pass."
            )

    # In a step

    def take(self, step: int, params: Sequence[nn.Parameter], block: int, error: Figure) -> Piece:
        """Returns the gradients at hand.

        Args:
            step: Number of the logical step.
            params: Parameters of the block.
            block: Number of the block.
            error: Length of DiceSGD's error, read from the device with all other numbers.

        Raises:
            UnsupportedRunError: There are none, or of several batches; or the loop did something
                else than the run that was declared.
        """
        raise NotImplementedError

    def used(self) -> None:
        """Starts the next piece: the gradients at hand were added up."""

    def cleared(self) -> None:
        """Forgets passes whose gradients were cleared."""

    def after(self, step: int) -> None:
        """Starts the batch after that of logical step `step`, which is complete."""
        self.index, self.rows, self.skips_step, self._of_piece = None, 0, False, None
        self._cursor.steps_taken = step
        self._cursor.forget()

    @property
    def call(self) -> Call | None:
        """Arguments that the model was called with for the loop's loss."""
        raise NotImplementedError

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """Tensors among them."""
        return tuple(tensors_of(self.call))

    def check_trained(self, step: int) -> None:
        """Raises UnsupportedRunError unless the parameters of the start are trained."""
        for param, own in zip(self.params, self._own, strict=True):
            if param.dtype != own.dtype:
                check_precision("parameters", param)
        flags = list(map(_IS_TRAINED, self._held))
        if flags == self._flags:
            return
        if any(map(operator.gt, flags, self._flags)) or not self._is_composed:
            trained = [n for n, p in self._module.named_parameters() if p.requires_grad]
            how = "can only shrink in" if self._is_composed else "is fixed for"
            raise UnsupportedRunError(
                f"step {step} trains {trained}, expected the parameters of the start: the set of "
                f"trainable parameters {how} a run. Start another run for another set."
            )

    # Which batch

    def _take_batch(self, step: int, rows: int, block: int) -> None:
        """Raises UnsupportedRunError unless a piece is of the batch whose turn it is."""
        cursor, self._step, self._piece_rows, self._of_piece = self._cursor, step, rows, None
        if block == 0:
            expected = cursor.expected_index
            try:
                index, self.skips_step = cursor.take()
            except UnsupportedRunError as error:
                raise UnsupportedRunError(f"step {step}: {error}") from None
            if index != expected:
                if cursor.was_fetched_ahead:
                    index = self._batch_of_the_pass()
                if index != expected:
                    raise self._other_batch(index, expected)
            self.index = index
            self.rows += rows
        size, used = self._plan.own_rows(step - 1), self.rows if block == 0 else rows
        if used == size or (self.skips_step and used < size):
            return
        if cursor.was_fetched_ahead and self._batch_of_the_pass() != self.index:
            raise self._other_batch(self._batch_of_the_pass(), self.index)
        if self._plan.order in OF_RANDOM_SIZE:  # how many is as secret as which ones
            raise UnsupportedRunError(
                f"step {step} used another number of rows than its batch has. Call the model on "
                "the batch as the loader made it."
            )
        is_whole = size == self._plan.batch_size
        what = "batch_size =" if is_whole else f"the records of its {self._plan.share.part},"
        raise UnsupportedRunError(f"step {step} used {used} rows, expected {what} {size}.")

    def _drawn(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Returns the tensors of the batch or piece at hand, and those that nobody wrote to.

        BatchMemoryManager has a loader of its own: the records of a piece are read once more.
        """
        if self._of_piece is None:
            taken = self._cursor.taken
            if taken is not None:
                self._of_piece = taken.tensors, taken.unwritten
            else:
                first, dataset = self.rows - self._piece_rows, self._loader.dataset
                places = self._plan.own_batch(self._step - 1)[first : self.rows]
                read_again = self._loader.collate_fn([dataset[i] for i in places])
                self._of_piece = (tuple(tensors_of(read_again)),) * 2
        return self._of_piece

    def _has_other_batch(self, rows: int) -> Figure:
        """Tells whether the pass was on something else than the batch whose turn it is."""
        if not rows or not (self._compares or self._cursor.was_fetched_ahead):
            return False
        if not self._compares:
            return holds_others(self.inputs, self._drawn()[1], self._dim)
        args, kwargs = self.call or ((), {})
        is_flat = not kwargs and all(isinstance(arg, torch.Tensor) for arg in args)
        leaves = args if is_flat else tuple(leaves_of((args, kwargs)))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._check_constants([leaf for leaf in leaves if not isinstance(leaf, _SIMPLE)])
        return holds_others(inputs, self._drawn()[1], self._dim)

    def _check_constants(self, others: list[Any]) -> None:
        """Raises UnsupportedRunError if the model was called with other floats or objects."""
        if self._constants is None:
            self._constants = others
        if len(others) != len(self._constants) or not all(map(_is_same, others, self._constants)):
            kinds = sorted({type(leaf).__name__ for leaf in (*others, *self._constants)})
            raise UnsupportedRunError(
                f"step {self._step}: the model was called with another value of {', '.join(kinds)} "
                "than in the first pass. It may come from the whole batch (its mean, its largest "
                "norm), which no clip bounds. Compute it in the data set, the collate_fn or the "
                "model, from one record. If it is public (a rate that falls with the epochs), "
                "declare that with loop_maps_records=True."
            )

    def _batch_of_the_pass(self) -> int | None:
        """Returns the index of the delivered batch that went into the model, for an error."""
        taken = self._cursor.taken
        for batch in (*([] if taken is None else [taken]), *self._cursor.waiting):
            if not holds_others(self.inputs, batch.tensors, self._dim):
                return batch.index
        return None

    def _other_batch(self, index: int | None, expected: int | None) -> UnsupportedRunError:
        used = "no new batch" if index is None else f"batch {index}"
        empty = " (an empty batch is a step, too)" if self._plan.order in OF_RANDOM_SIZE else ""
        hint = ""
        if self._cursor.is_bypassed:
            hint = (
                " Here another loader was built around the private batches, as a Trainer does that "
                "replaces samplers: give it the private loader in a way that leaves it alone."
            )
        elif self._cursor.was_fetched_ahead:
            hint = (
                " This loop fetches ahead, or looked at other batches before this step: what goes "
                "into the model then has to be what the loader delivered, moved, cast or reshaped. "
                "Transform the records in the data set, the collate_fn or the model, and fetch at "
                "most one batch ahead, within a pass."
            )
        return UnsupportedRunError(
            f"step {self._step} used {used}, expected batch {expected}: every batch of the private "
            f"loader is used in order, exactly once per epoch{empty}. Iterate the loader that "
            f"make_private returned to its end and step once per batch.{hint}"
        )

    def _other_inputs(self) -> UnsupportedRunError:
        """Returns why the pass was on something else than the batch."""
        used = self._batch_of_the_pass()
        if self._cursor.was_fetched_ahead and used != self.index:  # else it was changed in place
            return self._other_batch(used, self.index)
        again = ""
        if self._cursor.taken is None:
            again = (
                " (Pieces of BatchMemoryManager are read once more to be compared: a data set that "
                "draws random numbers has others then.)"
            )
        return UnsupportedRunError(
            f"step {self._step}: what went into the model is not what the loader drew, moved, "
            "cast or reshaped, or was changed in place. Whether the loop mixes records (mixup, "
            "statistics of the batch) nobody can see: map the records, and make masks and initial "
            "states, in the data set, the collate_fn or the model (call the private model, with "
            "its backbone inside). Or declare with loop_maps_records=True that the loop maps every "
            f"record by itself.{again}"
        )

    # What the model does to the records

    def _look_once(self, piece: Piece, compute: Callable[[Call], list[torch.Tensor]]) -> str:
        """Says how model or criterion mix records, once, of the first batch of several."""
        call, rows, dim = self.call, piece.rows, self._dim
        if rows < 2 or call is None:
            return ""
        self._is_open = False
        if self._has_layers or self._collated.is_custom:
            further = self._collated.versions(call, piece)
            self._is_apart = records_are_apart(self._module, compute, call, rows, dim, further)
        adds_up = None
        if self._criterion is not None and dim == 0:
            self._has_apart_losses = self._look_at_criterion(piece)
        elif self._criterion is None and self._has_layers and dim == 0:
            adds_up = losses_add_up(self._module, compute, call, rows)
        found = {
            _MIXING_MODEL: self._is_apart,
            _MIXING_CRITERION: self._has_apart_losses,
            _MIXING_LOSS: adds_up,
        }
        return next((text for text, is_fine in found.items() if is_fine is False), "")

    def _look_at_criterion(self, piece: Piece) -> bool | None:
        try:
            outputs, tensors = self._outputs(piece), self._collated.tensors(piece)
        except Exception:  # whatever model, data set or collate_fn may raise that is called again
            return None
        return losses_are_apart(self._criterion, outputs, tensors, self._divides)

    def _outputs(self, piece: Piece) -> Sequence[torch.Tensor]:
        """Returns what the model computes for the records of a piece."""
        raise NotImplementedError

    def _judge(self, piece: Piece, moved: float, mixes: str, other_inputs: float = False) -> None:
        """Raises UnsupportedRunError if weights, records or gradients are not those of the run."""
        if moved:
            raise UnsupportedRunError(
                f"step {piece.step}: the parameters were changed outside the private optimizer, so "
                "that the loop trains another model than the step (load_state_dict, an average of "
                "weights, another optimizer, sharpness-aware training?). Load public weights "
                "before make_private, go on with a run by engine.load_checkpoint, and leave the "
                f"weights alone then. {_CHANGED}"
            )
        if mixes:
            raise UnsupportedRunError(f"step {piece.step}: {mixes}")
        if other_inputs:
            raise UnsupportedRunError(
                f"step {piece.step} follows training passes on different inputs, expected the same "
                "batch for every block. Draw batch and augmentation outside of the closure."
            )
        check_gradients(piece.step, piece.longest, self._lipschitz)

    # Between the steps

    def resume(self, steps: int) -> None:
        """Goes on from what the model holds, after a checkpoint of `steps` steps was loaded."""
        self._cursor.resume_at(steps)
        self._take_weights()
        self.after(steps)

    def close(self) -> None:
        """Removes the hooks, Opacus' too: layers may be trained on inside another model."""
        for handle in self.handles:
            handle.remove()

    def __reduce__(self) -> Any:
        return object.__new__, (type(self),)

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """The checked, the declared and the public assumptions."""
        yield from self._of_the_batches()
        yield from self._of_the_gradients()
        yield from self._of_the_model()

    def _of_the_batches(self) -> Iterable[Assumption]:
        plan, checked, declared = self._plan, Assumption.checked, Assumption.declared
        yield checked(plan.description)
        if self._compares:
            yield checked(
                "every tensor that went into the model is one of the batch that the loader drew, "
                "moved, cast or reshaped"
            )
        elif not self._is_composed:
            yield declared(
                "loop_maps_records=True: what the loop does to records before the model it does to "
                "every record by itself (no mixup, no mean or largest norm of the batch), and the "
                "records are those of the batch that the loader drew"
            )
        if plan.is_shared:
            yield checked(
                "orders from 256 bits that one process drew from the operating system, by "
                "SHAKE-128, which is taken for random"
            )
        if not plan.is_secret:
            yield Assumption.public("order of the batches")
        elif plan.is_seeded:
            yield declared("seed of the order: random, and nobody else ever knows it")
        if plan.order in OF_RANDOM_SIZE:
            yield declared("the sizes of the batches are shown to nobody")
            if self._relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
                yield declared(
                    "sampling_rate and batch_size of Batches are public constants that were not "
                    "computed from the records or their number, and neither is the number of steps"
                )
        if plain_collate(self._loader) is not default_collate:
            yield declared("collate_fn takes every record of a batch by itself")

    def _of_the_gradients(self) -> Iterable[Assumption]:
        """Yields the assumption about a loss that the loop computes."""
        looked = (
            " (the criterion that was passed was looked at once, on the first batch; that the "
            "loop uses it was not)"
        )
        yield Assumption.declared(f"{LOSS_OF_RECORDS}{looked if self._has_apart_losses else ''}")

    def _of_the_model(self) -> Iterable[Assumption]:
        checked, declared = Assumption.checked, Assumption.declared
        if self._lipschitz is not None:
            yield checked(f"per-example gradient norms at most {self._lipschitz:g}")
        precision = "parameters in float32 or float64"
        if any(map(is_half, self.params)):
            precision = "parameters of which gradients are added up, and noise is drawn, in float32"
        yield checked(f"{precision}, in every step those that the last one left")
        yield checked(
            "buffers and what is frozen as at the start, whenever epsilon is asked for or the "
            "model is released"
        )
        if not self._is_composed:
            yield checked("no hooks on the model but those of the first training pass")
        if not all(self._flags):
            yield declared(
                "the frozen part of the model is public: it was not fitted to the private records, "
                "and it maps every record by itself"
            )
        if self._frozen:
            layers = "layers with running statistics in " if self._is_composed else ""
            yield checked(
                f"{layers}the frozen part of the model in eval() mode, whenever the loop calls the "
                "model"
            )
        if self._has_layers:  # a head alone mixes nothing
            looked = (
                " (looked at once, on the first batch: what it computed for each half was the "
                "same alone, and beside other records)"
            )
            yield declared(f"{ALONE}{looked if self._is_apart else ''}")


def _is_same(value: Any, first: Any) -> bool:
    return value is first or (isinstance(value, float) and value == first)


def holds_others(
    inputs: Sequence[torch.Tensor], batch: Sequence[torch.Tensor], dim: int = 0
) -> Figure:
    """Tells whether `inputs` are none, or one of them is not a tensor of `batch`.

    The loader may have the records, which `dim` counts in the inputs, in the first dimension.
    """
    if not inputs:
        return True
    if all(any(x is part for part in batch) for x in inputs):
        return False
    views = [[x, x.movedim(dim, 0)] if 0 < dim < x.dim() else [x] for x in inputs]
    return any_of([all_of([_differ(x, part) for x in own for part in batch]) for own in views])


def _differ(value: torch.Tensor, part: torch.Tensor) -> Figure:
    """Tells whether `value` is not `part`, moved to another device, cast or reshaped."""
    if value is part:
        return False
    if value.numel() != part.numel() or value.shape[:1] != part.shape[:1]:
        return True
    part = part.detach().to(device=value.device, dtype=value.dtype)
    return differ(value.detach().flatten(), part.flatten())


def fingerprint(value: torch.Tensor) -> bytes:
    """Returns a digest of the bits of a tensor."""
    flat = value.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy()).digest()


@attrs.define(eq=False)
class _Pass:
    """One pass of a batch through the head.

    Attributes:
        features: Input of the head.
        outputs: Leaf that the loop got: its backward pass leaves the slopes there, and no gradient
            at the parameters of the head.
        moved: True if the weights of the pass were not those of the last step.
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

    def __init__(self, declared: DeclaredRun, cursor: BatchCursor):
        super().__init__(declared, cursor)
        head: Any = declared.head
        norm = declared.arguments.feature_norm
        self._head, self._weight, self._bias = head, head.weight, head.bias
        self._feature_norm = None if norm is None else float(norm)
        self._known: Any = declared.known_criterion
        self._targets_of = declared.arguments.targets
        self._place: int | None = None  # of the targets among the tensors of a batch
        self.computes_loss = self._known is not None
        self._has_layers = self._module is not head
        self._passes: list[_Pass] = []
        self._used: list[_Pass] = []
        self._call: Call | None = None
        self._target: Any = None
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
            own = own if own.device == features.device else own.to(features.device)
            weight, bias = (own, bias) if param is weight else (weight, own)
        return F.linear(features.to(weight.dtype), weight, bias)

    # What the loop left

    def take(self, step: int, params: Sequence[nn.Parameter], block: int, error: Figure) -> Piece:
        """See `Passes.take`."""
        self._step, used = step, [one for one in self._passes if one.outputs.grad is not None]
        for param, (noisy, writes) in zip(self.params, self._gradients, strict=True):
            grad = param.grad
            is_as_left = grad is None or (grad is noisy and grad._version == writes)
            if not is_as_left and bool(grad.any()):  # type: ignore[union-attr]  # a penalty times 0 is none
                raise UnsupportedRunError(
                    f"step {step}: something beside the outputs of the linear head reaches its "
                    "parameters: a penalty in the loss, another use of the weights, or a hook on a "
                    "parameter. It is inside no clip and in no bound, and would have no effect. "
                    "Leave it out; a penalty is the optimizer's weight_decay"
                    f"{'' if self._is_composed else ', or after='}."
                )
        if len(used) > 1:
            self._check_views(used)
        self._used, rows = used, len(self._records_first(used[0].features)) if used else 0
        self._take_batch(step, rows, block)
        for one in used:
            if counted_writes(one.features) + one.outputs._version != one.writes:
                raise UnsupportedRunError(
                    f"step {step}: what went into the linear head, or came out, was changed in "
                    "place after the pass. Compute out of place."
                )
        piece = Piece(step, params, block, rows)
        is_other = self._has_other_batch(rows)
        moved = any_of([self._is_moved(), *[one.moved for one in used]])
        with exact_products(self._weight.device.type):
            figures = self._compute(piece)
            mixes = self._look_once(piece, self._features) if self._is_open else ""
        found = read([is_other, moved, error, piece.largest_norm, *figures])
        is_other, moved, piece.error, piece.longest, *figures = found
        if is_other:
            raise self._other_inputs()
        self._judge_loss(piece, moved, mixes, *figures)
        return piece

    def _check_views(self, used: Sequence[_Pass]) -> None:
        calls = {id(one.call) for one in used}
        if self._feature_norm is None and len(calls) == 1 and used[0].call is not None:
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

    def _compute(self, piece: Piece) -> Sequence[Figure]:
        """Computes the gradients.

        Returns:
            The largest norm of a record at the head; how far the slopes are from the loop's, and
            their length; whether a block has other inputs than the first one.
        """
        if not piece.rows:
            features, slopes = (torch.zeros(0, n).to(self._weight) for n in self._weight.T.shape)
            piece.follow_from(self._weight, features, slopes)
            return 0.0, 0.0, 0.0, 0.0
        own = self._used[0]
        features = own.features.to(own.outputs.dtype)
        if len(self._used) > 1 or features.dim() != 2:
            self._keep_samples(piece.rows)
            return 0.0, 0.0, 0.0, 0.0
        if self._known is None:
            largest, _ = piece.follow_from(self._weight, features, self._got(own, piece.rows))
            off = length = 0.0
        else:
            output = own.outputs.detach()
            self._target = target = self._find_target(output, own, piece.rows)
            try:
                slopes = self._known.slopes(output, target)
            except (TypeError, ValueError) as error:
                raise UnsupportedRunError(f"The targets of the batch: {error}") from None
            largest, sizes = piece.follow_from(self._weight, features, slopes)
            factor = piece.rows if self._divides else 1
            off = torch.linalg.vector_norm(torch.sub(slopes, own.outputs.grad, alpha=factor))
            length = torch.linalg.vector_norm(sizes)
        other: Figure = False
        if piece.block == 0:
            self._first = features
        elif self._first is not None:
            other = self._first.shape != features.shape or differ(features, self._first)
        return largest, off, length, other

    def _got(self, own: _Pass, rows: int) -> torch.Tensor:
        """Returns what the backward pass left at the outputs, of the loss of a record."""
        gradient: Any = own.outputs.grad
        return gradient * rows if self._divides else gradient  # type: ignore[no-any-return]

    def _keep_samples(self, rows: int) -> None:
        """Keeps the gradient of every record, of a head that is used at several positions."""
        parts = [
            (self._records_first(one.features), self._records_first(self._got(one, rows)))
            for one in self._used
        ]
        of_weight = [torch.einsum("n...k,n...d->nkd", s, x.to(s.dtype)) for x, s in parts]
        self._weight.grad_sample = torch.stack(of_weight).sum(0)
        if self._bias is not None:
            of_bias = [torch.einsum("n...k->nk", s) for _, s in parts]
            self._bias.grad_sample = torch.stack(of_bias).sum(0)

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

    def _outputs(self, piece: Piece) -> Sequence[torch.Tensor]:
        return [self._used[0].outputs]

    # The targets of the batch that was drawn

    def _find_target(self, output: torch.Tensor, own: _Pass, rows: int) -> torch.Tensor:
        """Returns the targets of the batch or piece at hand, always in the same place of a batch.

        Raises:
            UnsupportedRunError: The batch has none, or the loop wrote to them.
        """
        known, function, (tensors, unwritten) = self._known, self._targets_of, self._drawn()
        place = self._place
        if place is None and function is None:
            place = self._place_of(tensors, output, self._got(own, rows))
        elif place is None:
            place = len(tensors) - 1
        target = tensors[place] if 0 <= place < len(tensors) else None
        if target is None or not (function is not None or known.takes(target, output)):
            raise self._not_found(tensors, output)
        if all(target is not one for one in unwritten):
            raise UnsupportedRunError(
                "Expected the targets that the loader drew, got a tensor that the loop changed in "
                f"place: no step can be computed from it. Compute out of place. {REMEDY}"
            )
        if function is not None:
            drawn, target = target, function(target)
            if self._place is None and len(target) > 1:
                halves = [function(half) for half in drawn.tensor_split(2)]
                if not torch.equal(torch.cat(halves), target):
                    raise UnsupportedRunError(
                        "Expected targets= to map every target by itself, got a function whose "
                        "result for half of a batch is not half of its result: one record would "
                        "change the targets of others."
                    )
            if not known.takes(target, output):
                raise self._not_found([target], output)
        self._place = place
        return target

    def _place_of(
        self, tensors: Sequence[torch.Tensor], output: torch.Tensor, got: torch.Tensor
    ) -> int:
        """Returns which tensor may be the targets: of several that which explains the gradient."""
        known = self._known

        def misfit(place: int) -> float:
            """Returns how far the slopes at targets are from the loop's; inf if there are none."""
            try:
                off = float(torch.linalg.vector_norm(known.slopes(output, tensors[place]) - got))
            except (TypeError, ValueError):
                return math.inf
            return math.inf if math.isnan(off) else off

        places = [i for i, t in enumerate(tensors) if known.takes(t, output)]
        return min(reversed(places), key=misfit) if len(places) > 1 else (*places, -1)[0]

    def _not_found(
        self, tensors: Sequence[torch.Tensor], output: torch.Tensor
    ) -> UnsupportedRunError:
        shapes = ", ".join(f"{tuple(t.shape[1:])} of {t.dtype}" for t in tensors) or "no tensors"
        return UnsupportedRunError(
            f"Expected targets for {type(self._known.criterion).__name__} at outputs of shape "
            f"{tuple(output.shape[1:])} for each record in the batch that the loader dealt, got "
            f"{shapes}. {REMEDY}"
        )

    # What the loop did differently

    def _judge_loss(self, piece: Piece, moved: float, mixes: str, *figures: float) -> None:
        feature, off, length, other = figures
        if not moved:
            if self._feature_norm is not None:
                check_features(piece.step, feature, self._feature_norm)
            if math.isnan(piece.longest) and self._known is not None:
                raise self._other_loss(piece)  # targets, or a loss, that have no gradient there
        self._judge(piece, moved, mixes, other)
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
        """Returns how far slopes may be apart by rounding: near a minimum they are short."""
        output, target = self._used[0].outputs.detach(), self._target
        size = 1 + float(output.abs().max())
        if target.is_floating_point():
            size += float(target.abs().max())
        units = _ROUNDING_UNITS * torch.finfo(output.dtype).eps * math.sqrt(rows)
        return units * (self._lipschitz or 1.0) * size  # the constant holds the weights of outputs

    def _other_loss(self, piece: Piece) -> UnsupportedRunError:
        own, target, known = self._used[0], self._target, self._known
        output, got = own.outputs.detach(), self._got(own, piece.rows)
        why = diagnosis(known, output, target, got)
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
        """See `Passes.resume`."""
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
