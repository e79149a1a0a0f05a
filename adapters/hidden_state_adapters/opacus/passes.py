"""The passes of a loop for one step, beside the weights and the batch that the step is about."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
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
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.gradients import (
    Figure,
    Piece,
    all_of,
    any_of,
    differ,
    read,
)
from hidden_state_adapters.opacus.loader import BatchCursor, leaves_of, plain_collate, tensors_of
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
_SIMPLE = (torch.Tensor, bool, int, str, type(None))  # lengths, names and switches may change
_CHANGED = (
    "Weights of another private run are never loaded: train its model itself (the engine composes "
    "its runs), or compose its event by hand, LastIterateAccountant().compose(event)."
)

# Odd constants of splitmix64 (Steele, Lea & Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
_CHUNK = 2**22  # numbers at a time
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Passes:
    """Notes the training passes of a model, and compares them with the run that was declared.

    It holds the weights that the last private step left, whatever somebody did to those of the
    model. What is not trained, and the buffers, stay as they were at the start; that is looked at
    where somebody asks about the model.

    Every tensor that goes into the model has to be one of the batch whose turn it is: the same
    numbers, wherever they were moved to and in whatever shape and type. A float may be a statistic
    of the batch, and another object may hold one: both stay those of the first pass. Where the loop
    may map records tensors are compared only if it fetches ahead, and so holds two batches when it
    steps.

    A step calls `take`, which returns its gradients, `used` when they were added up, and `keep`
    when the parameters were moved. What one of them raises ends the run.

    Attributes:
        params: Parameters that are trained.
        handles: Hooks on the model, which do not outlive the run.
        ghost: Opacus' wrapper of the model if it clips in a second backward pass, or None.
        computes_loss: Whether the gradients follow from the formula of the loss.
        index: Index of the batch of the step within the epoch.
        rows: Number of records of the pieces of that batch so far.
        skips_step: Whether more pieces follow the last one.

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

    def __init__(self, declared: DeclaredRun, cursor: BatchCursor):
        arguments, known = declared.arguments, declared.known_criterion
        self._module, self._frozen, self._plan = declared.inner, declared.frozen, declared.plan
        self._loader, self._cursor, self._lipschitz = (
            arguments.data_loader,
            cursor,
            declared.lipschitz,
        )
        self._is_composed: bool = declared.mechanism.is_composed
        self._has_loss = declared.loss is not None and known is None
        self._divides = arguments.loss_reduction == "mean"
        # The dimension of what goes into the model that counts its records.
        self._dim = 0 if arguments.batch_first else 1
        self._maps_records = arguments.loop_maps_records
        self._compares = not (self._is_composed or self._maps_records)
        self._relation = declared.relation
        calls_it = arguments.is_ghost and declared.head is None  # record by record
        self._criterion = None if known is not None or calls_it else arguments.criterion
        self._collated = Collated(declared.plan, arguments.data_loader)
        self._modules = tuple(self._module.named_modules())
        parts = [part for _, part in self._modules]
        self._hooks = [] if self._is_composed else [getattr(p, k) for p in parts for k in _HOOKS]
        self._num_hooks: int | None = None
        trained = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        self.params: list[nn.Parameter] = list(trained.values())
        self._names = list(trained)
        self._held = list(self._module.parameters())
        self._flags = list(map(_IS_TRAINED, self._held))
        self._dtypes = [param.dtype for param in self.params]
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
            if own.device == param.device and own.dtype == param.dtype:
                own.copy_(param.detach())
            else:
                self._own[index] = param.detach().clone()

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

    def _fixed_part(self) -> dict[str, tuple[int, bool]]:
        """Returns fingerprints of buffers and of what is not trained, and which are buffers."""
        found = {name: (fingerprint(b), True) for name, b in self._module.named_buffers()}
        for name, param in self._module.named_parameters():
            if name not in self._names:
                found[name] = fingerprint(param), False
        return found

    # In a pass

    def _check_hooks(self) -> None:
        """Raises UnsupportedRunError if there are more hooks than in the first call."""
        count = sum(map(len, self._hooks))
        if self._num_hooks is None:
            self._num_hooks = count
        elif count > self._num_hooks:
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
            UnsupportedRunError: There are none, or of several batches, or something else is
                trained; or the loop did something else than the run that was declared.
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
        """What the model was called with for the loop's loss."""
        raise NotImplementedError

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """The tensors among that."""
        return tuple(tensors_of(self.call))

    def check_trained(self, step: int) -> None:
        """Raises UnsupportedRunError unless the parameters of the start are trained."""
        for param, dtype in zip(self.params, self._dtypes, strict=True):
            if param.dtype != dtype:
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
        others = [leaf for leaf in leaves if not isinstance(leaf, _SIMPLE)]
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
        return holds_others(inputs, self._drawn()[1], self._dim)

    def _batch_of_the_pass(self) -> int | None:
        """Which of the delivered batches went into the model, for an error."""
        taken = self._cursor.taken
        for batch in (*([] if taken is None else [taken]), *self._cursor.waiting):
            if not holds_others(self.inputs, batch.tensors, self._dim):
                return batch.index
        return None

    def _other_batch(self, index: int | None, expected: int | None) -> UnsupportedRunError:
        used = "no new batch" if index is None else f"batch {index}"
        empty = " (an empty batch is a step, too)" if self._plan.order in OF_RANDOM_SIZE else ""
        hint = ""
        if self._cursor.was_fetched_ahead:
            hint = (
                " This loop fetches ahead, or looked at other batches before this step: what goes "
                "into the model then has to be what the loader delivered, moved, cast or reshaped. "
                "Transform the records in the data set, the collate_fn or the model, and fetch at "
                "most one batch ahead, within a pass."
            )
        if self._cursor.is_bypassed:
            hint = (
                " Here another loader was built around the private batches, as a Trainer does that "
                "replaces samplers: give it the private loader in a way that leaves it alone."
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
        call = self.call
        if piece.rows < 2 or call is None:
            return ""
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
        if self._is_apart is False:
            return (
                "the model mixes the records of a batch. What it computes for half of them is "
                "something else alone, or beside other records: every gradient then depends on all "
                "records, and no clip bounds what one of them does. Compute the output of every "
                "record from that record alone (nn.GroupNorm or nn.LayerNorm in place of "
                "statistics of the batch, constants in place of its mean or its largest norm; a "
                "fixed length, or a mask that leaves out the padding, in place of padding to the "
                "longest record of the batch)."
            )
        if self._has_apart_losses is False:
            return (
                "the criterion that was passed mixes the records of a batch. The gradient of a "
                "record is another one in a part of the batch (class weights or a number of tokens "
                "in a mean, a contrastive term?), and no clip bounds what one record does to those "
                'of others. Compute the loss of every record by itself, with reduction="none", and '
                'take the mean over the records (docs/opacus.md, "The loss of a record").'
            )
        if adds_up is False:
            return (
                "a number that the model returns for a batch, such as its loss, is not the mean or "
                "sum of those of both halves. In a mean over all tokens that are no padding, with "
                "class weights, or of pairs, one record changes the gradients of others, and no "
                "clip bounds that. Compute the loss of every record by itself from the outputs, "
                'and take the mean over the records (docs/opacus.md, "The loss of a record"). '
                "Return other numbers with .item()."
            )
        return ""

    def _look_at_criterion(self, piece: Piece) -> bool | None:
        try:
            outputs, tensors = self._outputs(piece), self._collated.tensors(piece)
        except Exception:  # whatever model, data set or collate_fn may raise that is called again
            return None
        return losses_are_apart(self._criterion, outputs, tensors, self._divides)

    def _outputs(self, piece: Piece) -> Sequence[torch.Tensor]:
        """What the model computes for the records of a piece."""
        raise NotImplementedError

    def _reached_beside(self, what: str) -> UnsupportedRunError:
        after = "" if self._is_composed else ", or after="
        return UnsupportedRunError(
            f"step {self._step}: something beside the outputs of {what}: a penalty in the loss, "
            "another use of the weights, or a hook on a parameter. It is inside no clip and in no "
            "bound, and would have no effect. Leave it out; a penalty is the optimizer's "
            f"weight_decay{after}."
        )

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
        plan = self._plan
        yield Assumption.checked(plan.description)
        if self._compares:
            yield Assumption.checked(
                "every tensor that went into the model is one of the batch that the loader drew, "
                "moved, cast or reshaped"
            )
        elif not self._is_composed:
            yield Assumption.declared(
                "loop_maps_records=True: what the loop does to records before the model it does to "
                "every record by itself (no mixup, no mean or largest norm of the batch), and the "
                "records are those of the batch that the loader drew"
            )
        if plan.is_shared:
            yield Assumption.checked(
                "orders from 256 bits that one process drew from the operating system, by "
                "SHAKE-128, which is taken for random"
            )
        if not plan.is_secret:
            yield Assumption.public("order of the batches")
        if plan.is_secret and plan.is_seeded:
            yield Assumption.declared("seed of the order: random, and nobody else ever knows it")
        if plan.order in OF_RANDOM_SIZE:
            yield Assumption.declared("the sizes of the batches are shown to nobody")
            if self._relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
                yield Assumption.declared(
                    "sampling_rate and batch_size of Batches are public constants that were not "
                    "computed from the records or their number, and neither is the number of steps"
                )
        if plain_collate(self._loader) is not default_collate:
            yield Assumption.declared("collate_fn takes every record of a batch by itself")

    def _of_the_gradients(self) -> Iterable[Assumption]:
        """The assumption about a loss that the loop computes."""
        looked = ""
        if self._has_apart_losses:
            looked = (
                " (the criterion that was passed was looked at once, on the first batch; that the "
                "loop uses it was not)"
            )
        yield Assumption.declared(f"{LOSS_OF_RECORDS}{looked}")

    def _of_the_model(self) -> Iterable[Assumption]:
        if self._lipschitz is not None:
            yield Assumption.checked(f"per-example gradient norms at most {self._lipschitz:g}")
        precision = "parameters in float32 or float64"
        if any(map(is_half, self.params)):
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
        if self._has_layers:  # a head alone mixes nothing
            looked = ""
            if self._is_apart:
                looked = (
                    " (looked at once, on the first batch: what it computed for each half was the "
                    "same alone, and beside other records)"
                )
            yield Assumption.declared(f"{ALONE}{looked}")


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


def fingerprint(value: torch.Tensor) -> int:
    """Returns a number that changes with any bit, and with the places of the numbers."""
    kind = _BY_SIZE.get(value.element_size(), torch.uint8)
    flat = value.detach().contiguous().flatten().view(kind)
    total = 0
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + len(part), device=flat.device)
        mixed = (part + places * _GOLDEN) * _MIX  # integers wrap
        mixed = (mixed ^ (mixed >> 29)) * _GOLDEN
        total += int((mixed ^ (mixed >> 32)).sum())
    return total
