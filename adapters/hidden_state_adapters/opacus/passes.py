"""The training passes of a loop for one step, compared with the run: weights, batch, records."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from dp_accounting import NeighboringRelation
from torch import nn
from torch.utils.data import default_collate

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE
from hidden_state_adapters.opacus.apart import Call, Collated, records_are_apart, records_first
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.gradients import (
    Figure,
    Piece,
    all_of,
    any_of,
    counted_writes,
    differ,
    read,
)
from hidden_state_adapters.opacus.loader import BatchCursor, leaves_of, plain_collate, tensors_of
from hidden_state_adapters.opacus.precision import is_half

_IS_TRAINED = operator.attrgetter("requires_grad")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SIMPLE = (torch.Tensor, bool, int, str, type(None))  # lengths, names and switches may change
_MIXING_MODEL = (
    "the model mixes the records of a batch: what it computes for half of them is something else "
    "alone, or beside other records, and no clip bounds one of them. Compute every output from one "
    "record (nn.GroupNorm in place of batch statistics, a mask in place of padding to the longest)."
)
_CHANGED = (
    "were changed outside the private optimizer (load_state_dict, an average of weights, another "
    "optimizer?). Load public weights before make_private, go on by engine.load_checkpoint, and "
    "train the model of an earlier private run itself: the engine composes the runs."
)


class Passes:
    """Holds the last private iterate, and compares the passes of a loop with the declared run.

    Buffers, and what is not trained, are compared with the start where somebody asks about the
    model. Every tensor that goes into the model has to be one of the batch whose turn it is,
    wherever it was moved to and in whatever shape and type. Floats and other objects, which may
    hold statistics of the batch, stay those of the first pass. Where the loop may map records,
    tensors are compared only if it fetches ahead, and so holds two batches when it steps.

    A step calls `take`, which returns its gradients, `used` when they were added up, `keep` or
    `show` when the parameters move, and `after` at its end.

    Attributes:
        params: Parameters that are trained.
        own: What the last private step left in each of them.
        handles: Hooks on the model, which do not outlive the run.
        ghost: Opacus' wrapper of the model if it clips in a second backward pass, or None.
        index: Index of the batch of the step within the epoch.
        rows: Number of records of the pieces of that batch so far.
        skips_step: True if more pieces follow the last one.

    Args:
        declared: Run whose model is trained.
        cursor: Position of the loop among the batches.
    """

    handles: list[Any]
    own: list[torch.Tensor]
    ghost: Any = None
    index: int | None = None
    rows = 0
    skips_step = False
    # Opacus and users copy models with their hooks; a copy trains nothing here.
    _is_idle = True

    def __init__(self, declared: DeclaredRun, cursor: BatchCursor):
        arguments = declared.arguments
        self._declared, self._cursor, self._plan = declared, cursor, declared.plan
        self._module, self._loader = declared.inner, arguments.data_loader
        self._is_composed: bool = declared.mechanism.is_composed
        self._dim = 0 if arguments.batch_first else 1  # of the inputs, which counts records
        self._compares = not (self._is_composed or arguments.loop_maps_records)
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
        self._has_layers = self._module is not declared.head  # a head alone mixes nothing
        self._calls: list[Call] = []  # of the passes that count for the step
        self._first: list[tuple[torch.Tensor, int]] = []  # of the first block, and their writes
        self._step = self._piece_rows = 0
        self._of_piece: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None
        self._constants: list[Any] | None = None  # of the first pass
        self._is_open = True  # whether records were not looked at yet
        self._is_apart: bool | None = None
        self._take_weights()

    # The weights

    def _take_weights(self) -> None:
        self.own = [p.detach().clone() for p in self.params]
        self._fixed = self._fixed_part()

    def keep(self) -> None:
        """Takes what the parameters are for the iterate."""
        for param, own in zip(self.params, self.own, strict=True):
            own.copy_(param)

    def show(self) -> None:
        """Puts the iterate into the parameters."""
        for param, own in zip(self.params, self.own, strict=True):
            param.copy_(own)

    def own_of(self, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Returns the iterate in some of the parameters."""
        by_id = {id(p): own for p, own in zip(self.params, self.own, strict=True)}
        return [by_id[id(param)] for param in params]

    def _is_moved(self, params: Sequence[torch.Tensor] | None = None) -> Figure:
        """Tells whether the model holds other numbers than the last step left."""
        return any_of(map(_are_other_numbers, params or self.params, self.own))

    def check_iterate(self, steps: int) -> None:
        """Raises UnsupportedRunError unless the model is what `steps` steps left.

        Also where other objects are in the places of its parameters.
        """
        params = dict(self._module.named_parameters())
        is_there = all(name in params for name in self._names)
        moved = self._is_moved([params[name] for name in self._names]) if is_there else True
        if read([moved])[0]:
            raise UnsupportedRunError(
                f"After step {steps} the parameters {_CHANGED} To end with an earlier iterate, "
                "call engine.release() where it is the current one, and ask for epsilon before it "
                "is put in."
            )
        was, now = self._fixed, self._fixed_part()
        for name in was.keys() | now.keys():
            if now.get(name) != was.get(name):
                raise UnsupportedRunError(
                    f"The buffer or frozen parameter {name} has another value after step {steps} "
                    "than at the start, or was not there: what is frozen is public, and a buffer "
                    "(running statistics, counters) carries data of the records past the noise. "
                    "Put the layer that writes it in eval() mode."
                )

    def _fixed_part(self) -> dict[str, bytes]:
        """Returns fingerprints of buffers and of what is not trained."""
        fixed = {n: p for n, p in self._module.named_parameters() if n not in self._names}
        fixed.update(self._module.named_buffers())
        return {name: fingerprint(value) for name, value in fixed.items()}

    # In a pass

    def _check_hooks(self) -> None:
        """Raises UnsupportedRunError if there are other hooks than in the first pass."""
        if self._known_hooks is None:
            self._known_hooks = {k: hook for hooks in self._hooks for k, hook in hooks.items()}
        if all(key in self._known_hooks for hooks in self._hooks for key in hooks):
            return
        known = list(self._known_hooks.values())  # a loop may take one off and put it on again
        if any(hook not in known for hooks in self._hooks for hook in hooks.values()):
            raise UnsupportedRunError(
                "Expected the hooks of the first training pass, got further ones on the model: a "
                "hook can change what the step is computed from. Register hooks before the first "
                "step, or remove them before the training pass."
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
        self._calls = []

    def cleared(self) -> None:
        """Forgets passes whose gradients were cleared."""

    def after(self, step: int) -> None:
        """Starts the batch after that of logical step `step`, which is complete."""
        self.index, self.rows, self.skips_step, self._of_piece = None, 0, False, None
        self._calls, self._first = [], []
        self._cursor.steps_taken = step
        self._cursor.forget()

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """The tensors that went into the model in the passes that count."""
        return tuple(tensors_of(self._calls))

    def check_trained(self, step: int) -> None:
        """Raises UnsupportedRunError unless the parameters of the start are trained."""
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
        leaves = list(leaves_of(self._calls))
        if self._compares:
            self._check_constants([leaf for leaf in leaves if not isinstance(leaf, _SIMPLE)])
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return holds_others(inputs, self._drawn()[1], self._dim)

    def _check_constants(self, others: list[Any]) -> None:
        """Raises UnsupportedRunError if the model was called with other floats or objects."""
        if self._constants is None:
            self._constants = others
        if len(others) != len(self._constants) or not all(map(_is_same, others, self._constants)):
            kinds = sorted({type(leaf).__name__ for leaf in (*others, *self._constants)})
            raise UnsupportedRunError(
                f"step {self._step}: the model was called with another value of {', '.join(kinds)} "
                "than in the first pass, which may come from the whole batch (its mean). Compute "
                "it from one record in the data set; loop_maps_records=True declares a public one."
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
        remedy = "Iterate the private loader to its end, and step once per batch."
        if self._cursor.is_bypassed:  # as by a Trainer that replaces samplers
            remedy = (
                "Another loader was built around the private batches: give the Trainer the private "
                "loader in a way that leaves it alone."
            )
        elif self._cursor.was_fetched_ahead:
            remedy = (
                "This loop fetches ahead: give the model what the loader delivered, as it is, and "
                "fetch at most one batch ahead."
            )
        return UnsupportedRunError(
            f"step {self._step} used {used}, expected batch {expected}: every batch of the private "
            f"loader is used in order, exactly once per epoch{empty}. {remedy}"
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
            "cast or reshaped, or was changed in place: it may mix records (mixup). Map records in "
            f"the data set, collate_fn or model, or declare loop_maps_records=True.{again}"
        )

    def _is_other_block(self, block: int) -> Figure:
        """Tells whether a block is updated on something else than the first one of its step."""
        inputs = self.inputs
        if block == 0:
            self._first = [(tensor, counted_writes(tensor)) for tensor in inputs]
            return False
        if len(self._first) != len(inputs):
            return True
        pairs = zip(inputs, self._first, strict=True)
        return any_of(_is_other(tensor, *first) for tensor, first in pairs)

    def _judge(self, is_other: float, is_moved: float, is_other_block: float, mixes: str) -> None:
        """Raises UnsupportedRunError if records or weights of the pass are not those of the run."""
        if is_other:
            raise self._other_inputs()
        if is_moved:
            raise UnsupportedRunError(f"step {self._step}: the parameters {_CHANGED}")
        if mixes:
            raise UnsupportedRunError(f"step {self._step}: {mixes}")
        if is_other_block:
            raise UnsupportedRunError(
                f"step {self._step} follows training passes on different inputs, expected the same "
                "batch for every block. Draw batch and augmentation outside of the closure."
            )

    # What the model does to the records

    def _mixing(self, compute: Callable[[Call], Sequence[torch.Tensor]], rows: int) -> str:
        """Says how the model mixes records, once, of the first batch of several."""
        self._is_open = False
        if self._has_layers or self._collated.is_custom:
            call = self._calls[0]
            further = self._collated.versions(call, self._step, rows)
            if self._dim:
                compute, call, further = records_first(compute, call, rows, further)
            self._is_apart = records_are_apart(self._module, compute, call, rows, further)
        return _MIXING_MODEL if self._is_apart is False else ""

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
            if self._declared.relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
                yield declared(
                    "sampling_rate and batch_size of Batches are public constants that were not "
                    "computed from the records or their number, and neither is the number of steps"
                )
        if plain_collate(self._loader) is not default_collate:
            yield declared("collate_fn takes every record of a batch by itself")

    def _of_the_model(self) -> Iterable[Assumption]:
        checked, declared = Assumption.checked, Assumption.declared
        if self._declared.lipschitz is not None:
            yield checked(f"per-example gradient norms at most {self._declared.lipschitz:g}")
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
        if self._declared.frozen:
            layers = "layers with running statistics in " if self._is_composed else ""
            yield checked(
                f"{layers}the frozen part of the model in eval() mode, whenever the loop calls the "
                "model"
            )
        if self._has_layers:
            looked = (
                " (looked at once, on the first batch: what it computed for each half was the "
                "same alone, and beside other records)"
            )
            alone = "the model takes every record of a batch by itself"
            yield declared(f"{alone}{looked if self._is_apart else ''}")


def _are_other_numbers(param: torch.Tensor, own: torch.Tensor) -> Figure:
    if param.shape != own.shape or param.dtype != own.dtype:
        return True
    return differ(param, own if param.device == own.device else own.to(param.device))


def _is_same(value: Any, first: Any) -> bool:
    return value is first or (isinstance(value, float) and value == first)


def _is_other(tensor: torch.Tensor, first: torch.Tensor, writes: int) -> Figure:
    if counted_writes(first) != writes:
        return True
    if tensor is first:
        return False
    kinds = [(x.dtype, x.shape, x.device) for x in (tensor, first)]
    return kinds[0] != kinds[1] or differ(tensor.detach(), first.detach())


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
