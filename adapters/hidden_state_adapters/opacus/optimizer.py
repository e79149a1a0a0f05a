"""The one step of all private optimizers: checked before it is taken, recorded when it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import dp_accounting
import torch
from dp_accounting import NeighboringRelation
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_accountants.ledger import refuse_in_budget
from hidden_state_accountants.runs.run import Run, Step
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.gradients import Figure, Piece, is_on_host, read
from hidden_state_adapters.opacus.noise import OwnGenerator, check_noise_source
from hidden_state_adapters.opacus.options import RunArguments
from hidden_state_adapters.opacus.processes import AgreedError, Totals
from hidden_state_adapters.opacus.run import TrainingRun
from hidden_state_adapters.opacus.settings import Settings

_UNFINISHED = "a step was not finished"


class MechanismOptions:
    """What `make_private(mechanism=)` takes: the options of one mechanism, an attrs class."""

    def optimizer_class(self, optimizer: Optimizer) -> Any:
        """Returns the class of the private optimizer of a run.

        Args:
            optimizer: What it wraps.
        """
        raise NotImplementedError


class PrivateOptimizer(DPOptimizer):
    """Opacus' DPOptimizer with the record of its run: the one step of all mechanisms.

    A mechanism is one file: a subclass that says how it clips, adds up and moves, and its options.
    Nothing else asks which mechanism a run has.

    `step` looks at what the loop did (the parameters have to be where the last step left them),
    clips and adds up by the mechanism, adds noise, records what is about to happen and moves the
    parameters. What is raised in between ends the run: whether it is raised may depend on the
    records, as much as a stop that looks at them. The optimizer cannot be copied or pickled: the
    copy's steps would be missing from epsilon. `HiddenStatePrivacyEngine.make_private` makes it.

    Attributes:
        run: What is true between the steps.
        group: Processes that train the run together; None for one.
        declared: What `make_private` was told.
        trained: Parameters that are trained, as at the start of the run.
        base_types: What the wrapped optimizer may be, exactly.
        options: The type of its options, or None; its fields may be passed beside optimizer_class.
        refused: Arguments of `make_private` that make no sense with it, and why.
        constant: What its bound says about settings that stay the same, for an error.
        checked: What is verified at every step, in words.
        takes_per_layer: Whether every parameter may have a clip norm of its own.
        hides_iterates: Whether its bound may count on iterates that nobody sees.
        is_composed: Whether it is Opacus' algorithm, accounted step by step at Opacus' trust.
        takes_pieces: Whether a batch may come in pieces (BatchMemoryManager).
        secret: What a copy of the optimizer would give away, beside missing steps; or "".

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

    base_types: ClassVar[tuple[type[Optimizer], ...]] = ()
    options: ClassVar[type | None] = None
    refused: ClassVar[Mapping[str, str]] = {}
    constant: ClassVar[str]
    checked: ClassVar[str]
    takes_per_layer: ClassVar[bool] = False
    hides_iterates: ClassVar[bool] = True
    is_composed: ClassVar[bool] = False
    takes_pieces: ClassVar[bool] = True
    secret: ClassVar[str] = ""

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
        self.declared, self.trained = run.declared, list(self.params)
        self._start()
        self._settings = Settings(self)
        self._largest_norm = 0.0  # of the current step
        self._is_moving = False

    def _start(self) -> None:
        """Prepares what a mechanism keeps from step to step."""

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
        if closure is None and len(self.blocks) > 1:
            why_not = (
                "Expected optimizer.step(closure), got no closure: the gradients of each of the "
                f"{len(self.blocks)} blocks are taken after the update of the block "
                "before. Put zero_grad(), forward and backward pass into a function."
            )
        self._admit(why_not)
        with self._ending_the_run_on_error(), torch.no_grad():
            for block in range(len(self.blocks)):
                if closure is not None:
                    with torch.enable_grad():
                        closure()
                if not self._use_gradients(block):
                    return
                self._move(is_last=block == len(self.blocks) - 1)
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
        piece = self._piece = self._checked(block)
        if block or not self._is_last_step_skipped:  # the first piece of a batch
            for param in piece.params:
                param.summed_grad = None  # type: ignore[attr-defined]
        # What DPOptimizer.pre_step does; a step hook is refused.
        self.clip_and_accumulate()
        self._is_last_step_skipped = self._check_skip_next_step()
        if not self._is_last_step_skipped:
            self.add_noise()
            self.scale_grad()
        self._source.used(piece)
        return not self._is_last_step_skipped

    def _checked(self, block: int) -> Piece:
        """Returns the gradients at hand.

        Raises:
            UnsupportedRunError: They are not those of the run.
        """
        run, source, batch, step = self.run, self._source, self._batch, self.num_steps + 1
        self._settings.check(step)
        run.declared.schedule.check_rate(step, self.original_optimizer)
        piece = source.begin(step, self.blocks[block], block)
        self._check_groups(step)
        batch.take(piece)
        figures = {**batch.figures(piece), **source.figures(piece, batch)}
        values = read({**figures, **self.figures()})
        batch.judge(piece, values)
        source.judge(piece, values)
        self.judge(piece, values)
        piece.longest = values["gradient"]
        self._largest_norm = max(self._largest_norm, piece.longest)
        return piece

    def _check_groups(self, step: int) -> None:
        managed = {id(p) for g in self.param_groups for p in g["params"] if p.requires_grad}
        own = {id(p) for p in self.trained if p.requires_grad}
        if managed != own:
            raise UnsupportedRunError(
                f"step {step} optimizes {len(managed)} parameters, expected the {len(own)} of the "
                "start: parameter groups are fixed for a run."
            )

    def _move(self, *, is_last: bool) -> None:
        piece = self._piece
        assert piece is not None
        if is_last:
            totals = self._totals
            step = self.recorded(self._batch.index, totals.rows, totals.largest_norm)
            self.run.record.add(step)
        self._note_move()
        self.move(piece)
        self.after_move(piece)
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
        self.accumulate(self._piece)

    def add_noise(self) -> None:
        """Adds noise as Opacus does, to sums that are complete; of several processes once."""
        assert self._piece is not None
        piece, group = self._piece, self.group
        self.check_pieces(piece)
        self._totals = Totals(self._batch.rows, self._largest_norm)
        for param in piece.params:
            total: torch.Tensor = param.summed_grad  # type: ignore[attr-defined]
            if group is None or group.draws_noise:
                total = self._noise(total).add_(total)
            param.grad = total.to(param.dtype).view_as(param)  # sums of half precision are float32
        if group is not None:
            self._totals = group.agree(self._settings_of(piece), *attrs.astuple(self._totals))
            group.add_up([p.grad for p in piece.params] + list(self.further_sums()))
        self.after_noise(piece)

    def _noise(self, total: torch.Tensor) -> torch.Tensor:
        """Draws the noise of one parameter as Opacus does."""
        std = self.noise_multiplier * self.max_grad_norm
        if self.secure_mode or not std:
            return _generate_noise(std, total, self.generator, self.secure_mode)
        return torch.empty_like(total).normal_(0, std, generator=self.generator)

    def _settings_of(self, piece: Piece) -> str:
        """All that has to be the same in all processes that take this step, in words."""
        groups = [
            {k: v for k, v in sorted(group.items()) if k != "params" and not _is_on_device(v)}
            for group in self.param_groups
        ]
        block = f", block {piece.block}" if len(self.blocks) > 1 else ""
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
        if do_skip and not self.takes_pieces:
            raise UnsupportedRunError(
                "Expected whole batches, got a piece of one (BatchMemoryManager, "
                "signal_skip_step): every block needs the gradients of the whole batch anew."
            )
        self.run.cursor.signal(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        return self._batch.skips_step if pop_next else self.run.cursor.next_is_skipped

    # Before there is an optimizer: what make_private asks.

    @classmethod
    def check_arguments(
        cls, arguments: RunArguments, module: nn.Module, optimizer: Optimizer
    ) -> None:
        """Checks what only this mechanism knows, before anything is changed.

        Args:
            arguments: Of `make_private`.
            module: Without Opacus' wrapper.
            optimizer: Without Opacus' wrapper.

        Raises:
            TypeError, ValueError: An argument has an impossible value.
            UnsupportedRunError: The run is not covered.
        """
        raise NotImplementedError

    @classmethod
    def event(
        cls, declared: DeclaredRun, noise_multiplier: float, num_steps: int
    ) -> dp_accounting.DpEvent:
        """The declared run with this noise and number of steps.

        Raises:
            TypeError, ValueError: A hyper-parameter has an impossible value.
        """
        raise NotImplementedError

    @classmethod
    def new_run(cls, declared: DeclaredRun, noise_multiplier: float) -> Run:
        """What records the declared run."""
        raise NotImplementedError

    # What is said about it

    @property
    def update_rule(self) -> str:
        """What moves the parameters along the noisy gradients, in a word."""
        return type(self.original_optimizer).__name__

    @property
    def why_composition(self) -> str:
        """Why no bound on hidden iterates is about the update, or ""."""
        return ""

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step, and what is taken on trust."""
        yield Assumption.checked(self.checked)

    # What stays the same

    @property
    def settings(self) -> dict[str, Any]:
        """What has to stay the same in a run, by name; plain types."""
        names = ("loss_reduction", "expected_batch_size", "secure_mode")
        return {name: getattr(self, name) for name in names}

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError unless the wrapped optimizer moves as the bound says."""
        raise NotImplementedError

    # Its part of a step

    @property
    def blocks(self) -> Sequence[Sequence[nn.Parameter]]:
        """The parameters that are moved together; the gradients of each are taken anew."""
        return [self.trained]

    def figures(self) -> Mapping[str, Figure]:
        """Figures to be read from the device together with those of the gradients."""
        return {}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if the values of the figures are wrong."""

    def accumulate(self, piece: Piece) -> None:
        """Adds the clipped gradients of a piece to `summed_grad`."""
        raise NotImplementedError

    def check_pieces(self, piece: Piece) -> None:
        """Raises UnsupportedRunError unless all pieces of the batch were used alike."""

    def further_sums(self) -> Sequence[torch.Tensor]:
        """What several processes add up beside `summed_grad`."""
        return ()

    def after_noise(self, piece: Piece) -> None:
        """The noisy sums are in `.grad`; the division by b follows."""

    def move(self, piece: Piece) -> None:
        """Moves the parameters along their noisy gradients, and no others."""
        raise NotImplementedError

    def after_move(self, piece: Piece) -> None:
        """The wrapped optimizer has moved the parameters of the piece."""

    def recorded(self, batch: int | None, rows: int, largest_norm: float, **values: Any) -> Step:
        """Returns what is recorded of a logical step, right before the parameters move.

        Args:
            batch: Index of the batch.
            rows: Number of records.
            largest_norm: Largest norm of their gradients.
            **values: Further fields of the step, which only some mechanisms know.
        """
        # Where the event does not say how many records there are, a batch may be any of them.
        adds = self.declared.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        return Step(
            noise_multiplier=float(self.noise_multiplier),
            clip_norm=float(self.max_grad_norm),
            batch=batch,
            rows=None if adds else rows,
            largest_norm=largest_norm,
            **values,
        )

    # Where the run goes on

    def why_not_resumable(self) -> str:
        """What a run that took steps needs of the private state to go on, or ""."""
        return ""

    def private_state(self) -> dict[str, Any]:
        """Plain types and tensors that `why_not_resumable` names. Secret."""
        return {}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `private_state` returned.

        Raises:
            ValueError: The state is of another run, or damaged.
        """

    def before_loading(self, state_dict: Mapping[str, Any], *, is_checkpoint: bool) -> None:
        """The wrapped optimizer is about to load `state_dict`.

        Args:
            state_dict: What is loaded.
            is_checkpoint: Whether the engine loads it, with everything else of a run.
        """

    # Between the steps

    @property
    def num_steps(self) -> int:
        """The number of steps taken."""
        return self.run.num_steps

    def forget_pieces(self) -> None:
        """Pieces from before a checkpoint was loaded belong to no batch of the run."""
        self._is_last_step_skipped, self._largest_norm = False, 0.0

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores the wrapped optimizer: its options, momentum and moments.

        Raises:
            UnsupportedRunError: They may hold gradients without noise.
        """
        self.before_loading(state_dict, is_checkpoint=self.run.is_loading)
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedRunError(
            f"{type(self).__name__} cannot be copied or pickled: the steps of a copy would be "
            f"missing from epsilon{self.secret}. Use engine.save_checkpoint, or make "
            "another optimizer for another run."
        )


def _is_on_device(value: Any) -> bool:
    """Whether somebody would have to wait for a value."""
    return isinstance(value, torch.Tensor) and not is_on_host(value)
