"""The one step of all private optimizers: checked before it is taken, recorded when it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import attrs
import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.runs.base import Run
from hidden_state_adapters.opacus.gradients.figures import is_on_host
from hidden_state_adapters.opacus.gradients.noise import (
    OwnNoise,
    add_noise,
    add_noise_to_sums,
    check_noise_source,
    take_noisy_sums,
)
from hidden_state_adapters.opacus.gradients.sums import is_ghost
from hidden_state_adapters.opacus.guards.base import Guards, Piece
from hidden_state_adapters.opacus.guards.batch import RowsGuard
from hidden_state_adapters.opacus.guards.gradients import GradientGuard
from hidden_state_adapters.opacus.guards.noise import NoiseGuard, NoiseMemory
from hidden_state_adapters.opacus.guards.settings import SettingsGuard
from hidden_state_adapters.opacus.head.guard import HeadRun
from hidden_state_adapters.opacus.mechanism import Mechanism
from hidden_state_adapters.opacus.run.context import RunContext
from hidden_state_adapters.opacus.run.group import AgreedError, Totals, refuse_group

_UNFINISHED = "a step was not finished"
_FIXED = {"run", "mechanism", "guards", "context", "group"}


class PrivateOptimizer(DPOptimizer):
    """Opacus' DPOptimizer with guards, a mechanism and the record of its run.

    `step` asks every guard, clips and adds up by the mechanism, adds Opacus' noise, records what is
    about to happen and lets the wrapped optimizer move the parameters. What is raised in between
    ends the run: whether it is raised may depend on the records, as much as a stop that looks at
    them. The optimizer cannot be copied or pickled: the copy's steps would be missing from epsilon.

    Attributes:
        mechanism_type: The mechanism; a subclass that names one is an `optimizer_class` of
            `make_private`.
        run: The record of the steps.
        mechanism: What it does in a step.
        guards: What stops it.
        context: What the engine knows about the run; None for an optimizer made by hand.
        group: The processes that train the run together; None for one.

    Args:
        optimizer: The optimizer that moves the parameters.
        noise_multiplier: As for DPOptimizer, as all arguments up to `secure_mode`.
        max_grad_norm: Clip norm.
        expected_batch_size: The divisor.
        loss_reduction: "mean" or "sum".
        generator: Source of the noise; None is one of our own, which no seed reaches.
        secure_mode: Needs torchcsprng.
        context: See above; for the engine.
        **options: Of the mechanism.
    """

    mechanism_type: ClassVar[type[Mechanism]]

    records_itself = True  # a step hook sees too little to account the step
    # GradScaler then hands its scale to `step`, which refuses, instead of skipping steps unseen.
    _step_supports_amp_scaling = True
    _piece: Piece | None = None

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        context: RunContext | None = None,
        **options: Any,
    ):
        check_noise_source(
            (p for group in optimizer.param_groups for p in group["params"]),
            generator,
            is_secure=secure_mode,
        )
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )
        if context is None:
            refuse_group(type(self).__name__)
        self._noise = OwnNoise()
        self.context = context
        self.group = None if context is None else context.declared.group
        self._totals = Totals(0, 0.0)  # of the current step
        self.mechanism = self.mechanism_type(self, **options)
        self._settings = SettingsGuard(
            self,
            lambda: self.mechanism.settings,
            self.mechanism.check_update_rule,
            self.mechanism.constant,
        )
        self._batch: RowsGuard
        self.run: Run
        if context is None:
            self.run, self._batch = self.mechanism.run_by_hand(), self.mechanism.rows_guard()
            self.guards = self._guards_by_hand()
        else:
            self.run, self._batch = context.run, context.batch
            self.guards = context.guards(self, self._settings, self.mechanism.guards())
        watch = None if context is None else context.watch
        self._iterate = watch.iterate if isinstance(watch, HeadRun) else None
        self._steps_taken = self.run.num_steps
        self._largest_norm = 0.0  # of the current step
        self._failure = self._closed = self._loose_noise = ""
        self._is_moving = self._has_moved = self._has_engine_hook = self._is_loading = False

    def _guards_by_hand(self) -> Guards:
        mechanism = self.mechanism
        return Guards(
            (
                self._settings,
                *mechanism.guards_by_hand(),
                self._batch,
                *mechanism.guards(),
                GradientGuard(),
                NoiseGuard(self, NoiseMemory()),
            )
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in vars(self):
            raise UnsupportedRunError(  # the steps would be recorded or checked elsewhere
                f"Expected {name} to stay what it is, got another {type(value).__name__}: it "
                "belongs to this run. Make another optimizer for another run."
            )
        super().__setattr__(name, value)

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Takes one step, or one piece of a step under BatchMemoryManager.

        Args:
            closure: Clears the gradients, and runs forward and backward pass on the batch; called
                once for every block of parameters. Its loss is not returned.

        Raises:
            UnsupportedRunError: The run is not the declared one; the text says which step and what.
                The step is then not taken.
        """
        why_not = ""
        if closure is None and len(self.mechanism.blocks) > 1:
            why_not = (
                "Expected optimizer.step(closure), got no closure: the gradients of each of the "
                f"{len(self.mechanism.blocks)} blocks are taken after the update of the block "
                "before. Put zero_grad(), forward and backward pass into a function."
            )
        self._admit(why_not)
        with self._ending_the_run_on_error():
            for block in range(len(self.mechanism.blocks)):
                if closure is not None:
                    with torch.enable_grad():
                        closure()
                if not self._use_gradients(block):
                    return
                self._move(is_last=block == len(self.mechanism.blocks) - 1)
            self._complete()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in DPOptimizer; gradients of the parameters become None, and take no memory."""
        super().zero_grad(set_to_none=True)

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Checks the run, then clips and adds noise; true if the parameters may move.

        Raises:
            UnsupportedRunError: The run is not the declared one, or there are several blocks.
        """
        why_not = ""
        if len(self.mechanism.blocks) > 1:
            why_not = (
                "Expected optimizer.step(closure), got a call of pre_step, which knows one block."
            )
        self._admit(why_not)
        with self._ending_the_run_on_error():
            proceeds = self._use_gradients(0)
        if proceeds:  # the noisy gradient may go anywhere now, and no step of it is recorded
            self._loose_noise = (
                f"pre_step() was called by hand and made the noisy gradient of step "
                f"{self._steps_taken + 1}, which was not recorded. Call step()."
            )
            self._note_move()
        return proceeds

    def _admit(self, why_not: str) -> None:
        self._check_alive()
        if self._failure:
            raise UnsupportedRunError(
                f"An earlier step of this run was refused, so the run cannot go on: {self._failure}"
            )
        try:
            self.guards.admit(self._steps_taken + 1)
            if why_not:
                raise UnsupportedRunError(why_not)
        except UnsupportedRunError as error:
            self._tell_not_admitted(str(error))
            raise

    def _tell_not_admitted(self, text: str) -> None:
        """Of several processes: ends the run if others would take the step."""
        if self.group is None:
            return
        try:
            self.group.refuse(text, is_admitted=False)
        except AgreedError as error:
            self._failure = str(error)
            raise

    @contextlib.contextmanager
    def _ending_the_run_on_error(self) -> Iterator[None]:
        self._is_moving, self._failure = False, _UNFINISHED  # until it is
        try:
            with self._telling_others():
                yield
            self._failure = ""
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            if self._is_moving:
                self._failure = (
                    f"step {self._steps_taken + 1} was interrupted while it changed the "
                    f"parameters: {self._failure}"
                )
            raise
        finally:
            self._piece = None

    @contextlib.contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Of several processes: what one raises ends the step in all of them."""
        try:
            yield
        except AgreedError:
            raise
        except Exception as error:
            if self.group is not None:
                self.group.refuse(str(error) or type(error).__name__, is_admitted=True)
            raise

    def _use_gradients(self, block: int) -> bool:
        params = self.mechanism.blocks[block]
        piece = Piece(step=self._steps_taken + 1, params=params, block=block)
        self.guards.before(piece)
        largest = self.guards.check_values(piece)["gradient"]
        self._largest_norm = max(self._largest_norm, largest)
        self._piece = piece
        # What DPOptimizer.pre_step does; the guard of the settings refuses a step hook.
        self.clip_and_accumulate()
        self._is_last_step_skipped = self._check_skip_next_step()
        if not self._is_last_step_skipped:
            self.add_noise()
            self.scale_grad()
        self.guards.used(piece)
        return not self._is_last_step_skipped

    def _move(self, *, is_last: bool) -> None:
        piece = self._piece
        assert piece is not None
        if is_last:
            totals = self._totals
            self.run.add(self.mechanism.step(self._batch.index, totals.rows, totals.largest_norm))
        self._note_move()
        if self._iterate is not None:
            self._iterate.put_back()
        self.mechanism.move(piece)
        self.mechanism.after_move(piece)
        if self._iterate is not None:
            self._iterate.keep()
        self.guards.moved(piece)
        self._piece = None

    def _note_move(self) -> None:
        self._is_moving = self._has_moved = True

    def _complete(self) -> None:
        self._steps_taken += 1
        self._largest_norm = 0.0
        self.guards.after(self._steps_taken)

    # Opacus' seams

    @property
    def params(self) -> list[nn.Parameter]:
        """The trainable parameters; within a step those of its block."""
        return list(super().params if self._piece is None else self._piece.params)

    @property
    def grad_samples(self) -> list[Any]:
        """As in DPOptimizer; with ghost clipping what the parameters hold in `grad_sample`."""
        params: list[Any] = self.params
        return [p.grad_sample for p in params] if is_ghost(params) else list(super().grad_samples)

    @property
    def accumulated_iterations(self) -> int:
        """As in DPOptimizer; 1 with ghost clipping. A step on several batches is refused."""
        return 1 if is_ghost(self.params) else int(super().accumulated_iterations)

    def clip_and_accumulate(self) -> None:
        """Adds the clipped gradients of the piece to summed_grad."""
        assert self._piece is not None
        self.mechanism.accumulate(self._piece)

    def add_noise(self) -> None:
        """Adds noise as Opacus does, to sums that are complete."""
        assert self._piece is not None
        piece, group = self._piece, self.group
        self.guards.before_noise(piece)
        self.mechanism.check_pieces(piece)
        self._totals = Totals(self._batch.rows, self._largest_norm)
        if group is None:
            self.mechanism.before_noise(piece)
            add_noise(self, self._noise)
            return
        if group.draws_noise:
            add_noise_to_sums(self, self._noise)
        self._totals = group.agree(self._settings_of(piece), *attrs.astuple(self._totals))
        group.add_up([p.summed_grad for p in self.params] + list(self.mechanism.further_sums()))
        self.mechanism.before_noise(piece)
        take_noisy_sums(self)

    def _settings_of(self, piece: Piece) -> str:
        """All that has to be the same in all processes that take this step, in words."""
        groups = [
            {k: v for k, v in sorted(group.items()) if k != "params" and not _is_on_device(v)}
            for group in self.param_groups
        ]
        block = f", block {piece.block}" if len(self.mechanism.blocks) > 1 else ""
        return (
            f"step {piece.step} on batch {self._batch.index}{block}, noise_multiplier = "
            f"{self.noise_multiplier!r}, max_grad_norm = {self.max_grad_norm!r}, options {groups}"
        )

    def scale_grad(self) -> None:
        """Divides as Opacus does; a step on several batches is refused."""
        if self.loss_reduction == "mean":
            for param in self.params:
                param.grad /= self.expected_batch_size  # type: ignore[operator]

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Takes the hook of the engine, which has nothing to do here; refuses any other.

        Raises:
            UnsupportedRunError: It is another one.
        """
        if self.context is None:
            raise UnsupportedRunError(
                f"Expected no step hook on {type(self).__name__}, got {fn!r}: an accountant behind "
                "it takes the run for DP-SGD and sees too little. Use optimizer.privacy_event(...) "
                "or optimizer.report(...); do your own work after step()."
            )
        if self._has_engine_hook:
            raise UnsupportedRunError(
                "Expected one step hook, got a second: attach_step_hook has a single slot, and the "
                "privacy engine uses it. Do your own work after optimizer.step()."
            )
        self._has_engine_hook = True

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Announces a piece of a batch (BatchMemoryManager calls it).

        Raises:
            UnsupportedRunError: The mechanism needs whole batches.
        """
        if do_skip and not self.mechanism.takes_pieces:
            raise UnsupportedRunError(
                "Expected whole batches, got a piece of one (BatchMemoryManager, "
                "signal_skip_step): every block needs the gradients of the whole batch anew."
            )
        self._batch.signal(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        return self._batch.skips_step if pop_next else self._batch.next_is_skipped

    # What the guarantee says about now

    @property
    def num_steps(self) -> int:
        """The number of steps taken."""
        return self._steps_taken

    def check_iterate(self) -> None:
        """Raises UnsupportedRunError unless the parameters are those the last step left."""
        self._check_alive()
        self.check_not_refused()
        self.guards.check_iterate(self._steps_taken)

    @property
    def has_moved(self) -> bool:
        """Whether parameters moved, if only in a step that was interrupted and not recorded."""
        return self._has_moved or self.num_steps > 0

    @property
    def was_refused(self) -> bool:
        """Whether a step was refused or interrupted."""
        return bool(self._failure or self._loose_noise)

    def check_not_refused(self) -> None:
        """Raises UnsupportedRunError if a step of this run was refused or interrupted."""
        failure = self._failure or self._loose_noise
        if failure:
            raise UnsupportedRunError(
                "A step of this run was refused or interrupted. What ended the run may depend on "
                "the records, and every bound is about a number of steps that does not: no epsilon "
                f"covers the model. Start again with another optimizer. It was: {failure}"
            )

    def _check_alive(self) -> None:
        if self._closed:
            raise UnsupportedRunError(self._closed)
        if self.run.num_steps != self._steps_taken and not self._failure:
            raise UnsupportedRunError(
                f"The optimizer took {self._steps_taken} steps, but {self.run.num_steps} are "
                "recorded. Restore a run with engine.load_checkpoint, which restores model, "
                "recorder, hidden state and position together."
            )

    def close(self, reason: str) -> None:
        """Ends the run: `step` raises UnsupportedRunError with `reason` from now on."""
        self._closed = reason
        self.guards.close()

    # Where the run goes on

    def why_not_resumable(self, num_steps: int) -> str:
        """What the run needs of the private state to go on after `num_steps` steps, or ""."""
        assert self.context is not None
        missing = [self.context.plan.why_not_resumable(num_steps)]
        if num_steps:
            missing.insert(0, self.mechanism.why_not_resumable())
        return ", and ".join(filter(None, missing))

    def private_state(self) -> dict[str, Any]:
        """Plain types and tensors that restore hidden state and secret order. Secret."""
        assert self.context is not None
        state = self.context.plan.private_state(self._steps_taken)
        return {**state, **(self.mechanism.private_state() if self._steps_taken else {})}

    def expect_checkpoint(self) -> None:
        """The engine is about to restore a checkpoint; `resume` follows."""
        self._is_loading = True

    def load_private_state(self, state: Mapping[str, Any], num_steps: int) -> None:
        """Restores what `private_state` returned; `resume` follows.

        Raises:
            ValueError: The state is of another run, or damaged.
        """
        assert self.context is not None
        if num_steps:
            self.mechanism.load_private_state(state, num_steps)
        self.context.plan.load_private_state(state)

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores the wrapped optimizer: its options, momentum and moments.

        Raises:
            UnsupportedRunError: They may hold gradients without noise.
        """
        self.mechanism.before_loading(state_dict, is_checkpoint=self._is_loading)
        super().load_state_dict(state_dict)
        self.mechanism.after_loading()

    def resume(self) -> None:
        """Goes on from what record, hidden state and module hold, after a checkpoint was loaded."""
        self._steps_taken = self.run.num_steps
        self._failure = self._loose_noise = ""
        self._is_loading, self._largest_norm = False, 0.0
        self.guards.resume(self._steps_taken)

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedRunError(
            f"{type(self).__name__} cannot be copied or pickled: the steps of a copy would be "
            f"missing from epsilon{self.mechanism.secret}. Use engine.save_checkpoint, or make "
            "another optimizer for another run."
        )


def _is_on_device(value: Any) -> bool:
    """Whether somebody would have to wait for a value."""
    return isinstance(value, torch.Tensor) and not is_on_host(value)
