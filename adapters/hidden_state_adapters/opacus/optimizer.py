"""The one step of all private optimizers: checked before it is taken, recorded when it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.ledger import refuse_in_budget
from hidden_state_adapters.opacus.gradients.figures import is_on_host, read
from hidden_state_adapters.opacus.gradients.noise import OwnGenerator, check_noise_source
from hidden_state_adapters.opacus.gradients.piece import Piece
from hidden_state_adapters.opacus.gradients.precision import is_half
from hidden_state_adapters.opacus.mechanism import Mechanism
from hidden_state_adapters.opacus.run.group import AgreedError, Totals
from hidden_state_adapters.opacus.run.settings import Settings
from hidden_state_adapters.opacus.run.training import TrainingRun

_UNFINISHED = "a step was not finished"


class PrivateOptimizer(DPOptimizer):
    """Opacus' DPOptimizer with a mechanism and the record of its run.

    `step` looks at what the loop did (the parameters have to be where the last step left them),
    clips and adds up by the mechanism, adds noise, records what is about to happen and moves the
    parameters. What is raised in between ends the run: whether it is raised may depend on the
    records, as much as a stop that looks at them. The optimizer cannot be copied or pickled: the
    copy's steps would be missing from epsilon. `HiddenStatePrivacyEngine.make_private` makes it.

    Attributes:
        mechanism_type: The mechanism; a subclass that names one is an `optimizer_class` of
            `make_private`.
        run: What is true between the steps.
        mechanism: What it does in a step.
        group: The processes that train the run together; None for one.

    Args:
        optimizer: The optimizer that moves the parameters.
        run: Run of the engine.
        noise_multiplier: Noise multiplier; this and the rest are arguments of DPOptimizer.
        max_grad_norm: Clip norm.
        expected_batch_size: The divisor.
        loss_reduction: "mean" or "sum".
        generator: Source of the noise; None is one of our own, which no seed reaches.
        secure_mode: Needs torchcsprng.
    """

    mechanism_type: ClassVar[type[Mechanism]]

    # GradScaler then hands its scale to `step`, which refuses, instead of skipping steps unseen.
    _step_supports_amp_scaling = True
    _piece: Piece | None = None
    _is_last_step_skipped: bool = False

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        run: TrainingRun | None = None,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ):
        if run is None:
            raise TypeError(
                f"{type(self).__name__} is made by HiddenStatePrivacyEngine.make_private, which "
                "deals its batches. Pass mechanism= there."
            )
        params = run.source.iterate.params
        check_noise_source(params, generator, is_secure=secure_mode)
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=OwnGenerator(params[0].device) if generator is None else generator,
            secure_mode=secure_mode,
        )
        self.run, self.group = run, run.declared.group
        run.optimizer = self
        self._batch, self._source = run.batch, run.source
        self._totals = Totals(0, 0.0)  # of the current step
        self.mechanism = self.mechanism_type(self)
        self._settings = Settings(self.mechanism)
        self._largest_norm = 0.0  # of the current step
        self._is_moving = False

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
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = param.grad_sample = None
                if not self._is_last_step_skipped:
                    param.summed_grad = None
        self._source.cleared()

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Raises UnsupportedRunError: its noisy gradient could go anywhere without a record."""
        raise UnsupportedRunError("Expected optimizer.step(), got a call of pre_step.")

    def _admit(self, why_not: str) -> None:
        self.run.check_alive()
        if self.run.failure:
            raise UnsupportedRunError(
                "An earlier step of this run was refused, so the run cannot go on: "
                f"{self.run.failure}"
            )
        try:
            refuse_in_budget("run of HiddenStatePrivacyEngine")
            self.run.declared.schedule.admit(self.num_steps + 1)
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
            self.run.failure = str(error)
            raise

    @contextlib.contextmanager
    def _ending_the_run_on_error(self) -> Iterator[None]:
        self._is_moving, self.run.failure = False, _UNFINISHED  # until it is
        try:
            with self._telling_others():
                yield
            self.run.failure = ""
        except BaseException as error:
            self.run.failure = str(error) or type(error).__name__
            if self._is_moving:
                self.run.failure = (
                    f"step {self.num_steps + 1} was interrupted while it changed the "
                    f"parameters: {self.run.failure}"
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
        piece = Piece(step=self.num_steps + 1, params=params, block=block)
        self._check(piece)
        self._piece = piece
        if block or not self._is_last_step_skipped:  # the first piece of a batch
            for param in params:
                param.summed_grad = None  # type: ignore[attr-defined]
        # What DPOptimizer.pre_step does; a step hook is refused.
        self.clip_and_accumulate()
        self._is_last_step_skipped = self._check_skip_next_step()
        if not self._is_last_step_skipped:
            self.add_noise()
            self.scale_grad()
        self._source.used(piece)
        return not self._is_last_step_skipped

    def _check(self, piece: Piece) -> None:
        """Raises UnsupportedRunError unless the gradients at hand are those of the run."""
        run, source = self.run, self._source
        self._settings.check(piece.step)
        run.declared.schedule.check_rate(piece.step, self.original_optimizer)
        piece.rows = source.begin(piece)
        self._check_groups(piece.step)
        self._batch.take(piece)
        figures = {**self._batch.figures(piece), **source.figures(piece)}
        values = read({**figures, **self.mechanism.figures()})
        self._batch.judge(piece, values)
        source.judge(piece, values)
        self.mechanism.judge(piece, values)
        if run.curvature is not None:
            run.curvature.take(source.features)
        self._largest_norm = max(self._largest_norm, values["gradient"])

    def _check_groups(self, step: int) -> None:
        managed = super().params
        own = [param for param in self.mechanism.params if param.requires_grad]
        if len(managed) != len(own) or {*map(id, managed)} != {*map(id, own)}:
            raise UnsupportedRunError(
                f"step {step} optimizes {len(managed)} parameters, expected the {len(own)} of the "
                "start: parameter groups are fixed for a run."
            )

    def _move(self, *, is_last: bool) -> None:
        piece = self._piece
        assert piece is not None
        if is_last:
            totals = self._totals
            step = self.mechanism.step(self._batch.index, totals.rows, totals.largest_norm)
            self.run.record.add(step)
        self._note_move()
        self.mechanism.move(piece)
        self.mechanism.after_move(piece)
        self._source.iterate.keep()
        self._source.moved(piece)
        self._piece = None

    def _note_move(self) -> None:
        self._is_moving = self.run.accounted.has_moved = True

    def _complete(self) -> None:
        steps = self.num_steps + 1
        self._largest_norm = 0.0
        self._batch.after(steps)
        self._source.after(steps)

    # Opacus' seams

    @property
    def params(self) -> list[nn.Parameter]:
        """The trainable parameters; within a step those of its block."""
        return list(super().params if self._piece is None else self._piece.params)

    def clip_and_accumulate(self) -> None:
        """Adds the clipped gradients of the piece to summed_grad."""
        assert self._piece is not None
        self.mechanism.accumulate(self._piece)

    def add_noise(self) -> None:
        """Adds noise as Opacus does, to sums that are complete; of several processes once."""
        assert self._piece is not None
        piece, group = self._piece, self.group
        if self.run.curvature is not None:
            self.run.curvature.check(piece)
        self.mechanism.check_pieces(piece)
        self._totals = Totals(self._batch.rows, self._largest_norm)
        if any(map(is_half, self.params)):
            self._add_noise_and_round()
        elif group is None or group.draws_noise:
            super().add_noise()
        else:
            for p in self.params:
                p.grad = p.summed_grad.view_as(p)  # type: ignore[attr-defined]
        if group is not None:
            self._totals = group.agree(self._settings_of(piece), *attrs.astuple(self._totals))
            group.add_up([p.grad for p in self.params] + list(self.mechanism.further_sums()))
        self.mechanism.after_noise(piece)

    def _add_noise_and_round(self) -> None:
        """Adds noise as Opacus does, to sums in float32, and rounds to half precision then."""
        for param in self.params:
            total: torch.Tensor = param.summed_grad  # type: ignore[attr-defined]
            noise = _generate_noise(
                std=self.noise_multiplier * self.max_grad_norm,
                reference=total,
                generator=self.generator,
                secure_mode=self.secure_mode,
            )
            param.grad = (total + noise).to(param.dtype).view_as(param)

    def _settings_of(self, piece: Piece) -> str:
        """All that has to be the same in all processes that take this step, in words."""
        groups = [
            {k: v for k, v in sorted(group.items()) if k != "params" and not _is_on_device(v)}
            for group in self.param_groups
        ]
        block = f", block {piece.block}" if len(self.mechanism.blocks) > 1 else ""
        return (
            f"step {piece.step} on batch {self._batch.index}{block}, noise_multiplier = "
            f"{self.noise_multiplier!r}, max_grad_norm = {self.max_grad_norm!r}, options {groups}, "
            f"{len(self.params)} trained parameters"
        )

    def scale_grad(self) -> None:
        """Divides as Opacus does; a step on several batches is refused."""
        if self.loss_reduction == "mean":
            for param in self.params:
                param.grad /= self.expected_batch_size  # type: ignore[operator]

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Raises UnsupportedRunError: a hook sees the gradients and can change them."""
        raise UnsupportedRunError(
            "Expected no step hook, got one: the run is recorded without. Do your own work after "
            "optimizer.step()."
        )

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
        self.run.cursor.signal(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        return self._batch.skips_step if pop_next else self.run.cursor.next_is_skipped

    # Between the steps

    @property
    def num_steps(self) -> int:
        """The number of steps taken."""
        return self.run.num_steps

    def forget_pieces(self) -> None:
        """Pieces from before a checkpoint was loaded belong to no batch of the run."""
        self._is_last_step_skipped, self._largest_norm = False, 0.0
        self.mechanism.forget_pieces()

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores the wrapped optimizer: its options, momentum and moments.

        Raises:
            UnsupportedRunError: They may hold gradients without noise.
        """
        self.mechanism.before_loading(state_dict, is_checkpoint=self.run.is_loading)
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedRunError(
            f"{type(self).__name__} cannot be copied or pickled: the steps of a copy would be "
            f"missing from epsilon{self.mechanism.secret}. Use engine.save_checkpoint, or make "
            "another optimizer for another run."
        )


def _is_on_device(value: Any) -> bool:
    """Whether somebody would have to wait for a value."""
    return isinstance(value, torch.Tensor) and not is_on_host(value)
