"""The one step of all private optimizers: checked before it is taken, recorded when it is."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import dp_accounting
import torch
from dp_accounting import NeighboringRelation
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import Assumption, Schedule, UnsupportedRunError, validate
from hidden_state_accountants.ledger import refuse_in_budget
from hidden_state_accountants.runs.algorithms import Algorithm, NoisySGD
from hidden_state_accountants.runs.run import Step
from hidden_state_adapters.opacus.declared import DeclaredRun, RunArguments
from hidden_state_adapters.opacus.gradients import (
    OPACUS_CLIP_OFFSET,
    Figure,
    Piece,
    opacus_clip_factors,
)
from hidden_state_adapters.opacus.noise import OwnGenerator
from hidden_state_adapters.opacus.processes import AgreedError, Totals
from hidden_state_adapters.opacus.run import TrainingRun
from hidden_state_adapters.opacus.update_rules import refuse_loaded_moments


class PrivateOptimizer(DPOptimizer):
    r"""Opacus' DPOptimizer with the record of its run: the one step of all mechanisms.

    A mechanism is a subclass that says how it moves, and as far as they are not Opacus' how it
    clips (`clip_and_accumulate`) and what follows the noise (`add_noise`). Nothing else asks which
    mechanism a run has. Any exception inside a step ends the run: whether it is raised may depend
    on the records. `HiddenStatePrivacyEngine.make_private` makes it; it cannot be copied.

    Attributes:
        run: State of the run between the steps.
        group: Processes that train the run together; None for one.
        declared: Arguments of `make_private`, and what follows from them.
        trained: Parameters that are trained, as at the start of the run.
        options: Type of its options, or None; its fields may be passed beside optimizer_class.
        refused: Arguments of `make_private` that make no sense with it, and why.
        constants: Names of the attributes that stay the same in a run.
        constant: Sentence on them, for an error.
        checked: Description of what is verified at every step.
        takes_per_layer: True if every parameter may have a clip norm of its own.
        is_composed: True if it is Opacus' algorithm, accounted step by step at Opacus' trust.
        takes_pieces: True if a batch may come in pieces (BatchMemoryManager).

    Args:
        optimizer: Optimizer that moves the parameters.
        run: Run of the engine.
        generator: Source of the noise; None is one of our own, which no seed reaches.
        **kwargs: Further arguments of DPOptimizer.
    """

    options: ClassVar[type | None] = None
    refused: ClassVar[Mapping[str, str]] = {}
    constants: ClassVar[tuple[str, ...]] = (
        "loss_reduction", "expected_batch_size", "secure_mode", "generator", "step_hook",
        "original_optimizer",
    )  # fmt: skip
    constant: ClassVar[str] = (
        "make_private accounts one run of one kind. Call it again for another one."
    )
    checked: ClassVar[str]
    takes_per_layer: ClassVar[bool] = False
    is_composed: ClassVar[bool] = False
    takes_pieces: ClassVar[bool] = True

    # GradScaler then hands its scale to `step`, which refuses, instead of skipping steps unseen.
    _step_supports_amp_scaling = True
    _piece: Any = None  # gradients at hand within a step
    _is_last_step_skipped: bool = False
    _clip_norm: Any = None  # of the pieces of the current batch
    _valid_noise: Any = None  # that was looked at last
    _longest = 0.0  # of the gradients of the current step
    _is_moving = False

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        run: TrainingRun | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ):
        if run is None:
            raise TypeError(
                f"{type(self).__name__} is made by HiddenStatePrivacyEngine.make_private, which "
                "deals its batches. Pass mechanism= there."
            )
        params = run.passes.params
        generator = OwnGenerator(params[0].device) if generator is None else generator
        super().__init__(optimizer, generator=generator, **kwargs)
        self.run, self.declared, self.group = run, run.declared, run.declared.group
        run.optimizer = self
        self._passes, self._schedule = run.passes, run.declared.schedule
        self.trained = list(self.params)
        self._totals = Totals(0, 0.0)
        self._start()
        self._read_constants = operator.attrgetter(*self.constants)
        self._fixed = self._read_constants(self)

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
        count, accounted, self._is_moving = len(self.blocks), self.run.accounted, False
        self._admit(closure, count)
        accounted.failure = "a step was not finished"  # until it is
        try:
            with torch.no_grad():
                for block in range(count):
                    if closure is not None:
                        with torch.enable_grad():
                            closure()
                    # What is trained may have changed in the closure.
                    if not self._use_gradients(block, self.blocks[block]):
                        break
                    self._move(is_last=block == count - 1)
            accounted.failure = ""
        except BaseException as error:
            self._end(error)
            self._tell(error, is_admitted=True)
            raise
        finally:
            self._piece = None

    def _admit(self, closure: Any, count: int) -> None:
        """Raises UnsupportedRunError, without effect on the run, if there is no step to take."""
        run = self.run
        run.check_alive()
        if run.accounted.failure:
            raise UnsupportedRunError(
                "An earlier step of this run was refused, so the run cannot go on: "
                f"{run.accounted.failure}"
            )
        try:
            if not run.num_steps % self.declared.plan.num_batches:  # it asks the disk
                refuse_in_budget("run of HiddenStatePrivacyEngine")
            self._schedule.admit(run.num_steps + 1)
            if closure is None and count > 1:
                raise UnsupportedRunError(
                    f"Expected optimizer.step(closure), got no closure: each of the {count} blocks "
                    "needs gradients that are taken after the update of the one before. Put "
                    "zero_grad(), forward and backward pass into a function."
                )
        except UnsupportedRunError as error:
            self._tell(error, is_admitted=False)
            raise

    def _tell(self, error: BaseException, *, is_admitted: bool) -> None:
        """Tells other processes; raises AgreedError, and ends the run, if they would step."""
        if self.group is None or isinstance(error, AgreedError) or not isinstance(error, Exception):
            return
        try:
            self.group.agree(refusal=str(error) or type(error).__name__, is_admitted=is_admitted)
        except AgreedError as agreed:
            self._end(agreed)
            raise

    def _end(self, error: BaseException) -> None:
        when = f"step {self.num_steps + 1} was interrupted while it changed the parameters: "
        text = str(error) or type(error).__name__
        self.run.accounted.failure = f"{when if self._is_moving else ''}{text}"

    def _use_gradients(self, block: int, params: Sequence[nn.Parameter]) -> bool:
        """Adds up the gradients at hand, and noise if they are the last ones of their batch.

        Returns:
            True if they are.
        """
        passes, step = self._passes, self.num_steps + 1
        self._check_settings(step)
        piece = self._piece = passes.take(step, params, block, self.hidden_norm())
        self._longest = max(self._longest, piece.longest)
        if not self._is_last_step_skipped:  # the first piece of a batch
            for param in params:
                param.summed_grad = None  # type: ignore[attr-defined]
        # What DPOptimizer.pre_step does; a step hook is refused.
        self.clip_and_accumulate()
        self._is_last_step_skipped = passes.skips_step
        if not self._is_last_step_skipped:
            self.add_noise()
            self.scale_grad()
        passes.used()
        return not self._is_last_step_skipped

    def _check_settings(self, step: int) -> None:
        """Raises UnsupportedRunError if something of the optimizer is not as it was."""
        if not vars(self).keys().isdisjoint(("grad_scale", "found_inf")):
            raise UnsupportedRunError(
                "Expected optimizer.step(), got a call through torch.amp.GradScaler: it scales the "
                "loss (which changes its smoothness and what is clipped) and skips steps. Train in "
                "float32 without it."
            )
        noise = self.noise_multiplier
        if type(noise) is not float or noise != self._valid_noise:
            validate.magnitude("noise_multiplier", noise)
            self._valid_noise = noise
        self.check_update_rule(self.original_optimizer)
        now, fixed = self._read_constants(self), self._fixed
        if now != fixed:
            values = zip(self.constants, now, fixed, strict=True)
            name, got, expected = next(v for v in values if v[1] != v[2])
            how = f"{name} = {got!r}, expected {expected!r} as"
            if isinstance(expected, Optimizer | torch.Generator):
                how = f"another {name} than"
            raise UnsupportedRunError(
                f"step {step} uses {how} at the start of the run: {self.constant}"
            )
        self._schedule.check_rate(step, self.original_optimizer)
        self._passes.check_trained(step)
        held = [p for g in self.original_optimizer.param_groups for p in g["params"]]
        managed = [id(p) for p in held if p.requires_grad]
        own = [id(p) for p in self.trained if p.requires_grad]
        if managed != own:
            raise UnsupportedRunError(
                f"step {step} optimizes {len(managed)} parameters, expected the {len(own)} of the "
                "start: parameter groups are fixed for a run."
            )

    def _move(self, *, is_last: bool) -> None:
        """Moves the parameters along their noisy gradients; a step is recorded before."""
        piece, passes = self._piece, self._passes
        if is_last:
            totals = self._totals
            self.run.record.add(self.recorded(passes.index, totals.rows, totals.largest_norm))
        self._is_moving = self.run.accounted.has_moved = True
        self.move(piece)
        if is_last:
            self._longest = 0.0
            passes.after(piece.step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as DPOptimizer does; they become None, and take no memory."""
        is_first = not self._is_last_step_skipped
        for group in self.original_optimizer.param_groups:
            for param in group["params"]:
                param.grad = param.grad_sample = None
                if is_first:
                    param.summed_grad = None
        self._passes.cleared()

    # Opacus' seams

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Raises UnsupportedRunError: its noisy gradient could go anywhere without a record."""
        raise UnsupportedRunError("Expected optimizer.step(), got a call of pre_step.")

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters that are trained; within a step those of its block."""
        return list(super().params if self._piece is None else self._piece.params)

    def clip_and_accumulate(self) -> None:
        r"""Adds the clipped gradients of the piece to summed_grad, as Opacus does.

        .. math:: \sum_i \min(1, C / (|g_i| + 10^{-6}))\, g_i
        """
        piece = self._same_clip_norm()
        clip_norm = float(self._clip_norm)
        is_short = piece.longest + OPACUS_CLIP_OFFSET <= clip_norm  # no clip acts
        piece.add_sums(None if is_short else opacus_clip_factors(piece.norms, clip_norm))

    def _same_clip_norm(self) -> Piece:
        """Returns the gradients at hand.

        Raises:
            UnsupportedRunError: Another piece of the batch was clipped by another norm.
        """
        piece, now = self._piece, self.max_grad_norm
        if self._clip_norm is not None and now != self._clip_norm:
            raise UnsupportedRunError(
                f"step {piece.step} clips to {self._clip_norm:g} and then uses {now:g}. "
                "Change max_grad_norm between logical steps only."
            )
        self._clip_norm = now
        return piece  # type: ignore[no-any-return]

    def add_noise(self) -> None:
        """Adds noise as Opacus does, to sums that are complete; of several processes once."""
        piece, group = self._same_clip_norm(), self.group
        self._clip_norm = None
        std = self.noise_multiplier * self.max_grad_norm
        for param in piece.params:
            total: torch.Tensor = param.summed_grad  # type: ignore[attr-defined]
            if group is None or group.draws_noise:
                if self.secure_mode or not std:
                    noise = _generate_noise(std, total, self.generator, self.secure_mode)
                else:
                    noise = torch.empty_like(total).normal_(0, std, generator=self.generator)
                total = noise.add_(total)
            param.grad = total.to(param.dtype)  # sums of half precision are float32
        if group is None:
            self._totals = Totals(self._passes.rows, self._longest)
        else:
            self._totals = group.agree(self._described(piece), self._passes.rows, self._longest)
            group.add_up([p.grad for p in piece.params])  # type: ignore[misc]

    def _described(self, piece: Piece) -> str:
        """Returns all that has to be the same in all processes that take this step, in words."""
        groups = [
            {name: value for name, value in sorted(group.items()) if name != "params"}
            for group in self.param_groups
        ]
        return (
            f"step {piece.step} on batch {self._passes.index}, block {piece.block}, "
            f"noise_multiplier = {self.noise_multiplier!r}, max_grad_norm = "
            f"{self.max_grad_norm!r}, options {groups}, {len(piece.params)} trained parameters"
        )

    def scale_grad(self) -> None:
        """Divides as Opacus does; a step on several batches is refused."""
        if self.loss_reduction == "mean":
            for param in self._piece.params:
                param.grad.div_(self.expected_batch_size)

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

    # Before there is an optimizer: what make_private asks.

    @classmethod
    def check_arguments(
        cls, arguments: RunArguments, module: nn.Module, optimizer: Optimizer
    ) -> None:
        """Raises an error unless the mechanism covers a run; nothing is changed."""
        raise NotImplementedError

    @classmethod
    def algorithm(cls, declared: DeclaredRun, noise_multiplier: float) -> Algorithm:
        """Returns the algorithm of the declared run, with the numbers that it is run with."""
        maps = declared.maps.values()
        diameters = (part.diameter(declared.trained) for part in maps)
        return NoisySGD(
            noise_multiplier=validate.magnitude("noise_multiplier", noise_multiplier),
            clip_norm=validate.magnitude("clip_norm", declared.arguments.clip_norm, positive=True),
            loss=declared.loss,
            prox_strong_convexity=sum(part.strong_convexity for part in maps),
            radius=min(diameters, default=math.inf) / 2,
        )

    @classmethod
    def event(
        cls, declared: DeclaredRun, noise_multiplier: float, num_steps: int
    ) -> dp_accounting.DpEvent:
        """Returns the declared run with this noise and number of steps.

        Raises:
            UnsupportedRunError: No bound knows the algorithm with such batches.
            TypeError, ValueError: A hyper-parameter has an impossible value.
        """
        algorithm, plan = cls.algorithm(declared, noise_multiplier), declared.plan
        run = algorithm.new_run(plan.fields)
        rows = min(plan.batch_size, plan.max_batch_size or plan.batch_size)
        rate, decay = cls.rates(declared, num_steps)
        first = rate.values[0] if isinstance(rate, Schedule) else rate
        step = algorithm.step(learning_rate=first, weight_decay=decay, rows=rows)
        run.add_counted(step, num_steps)
        event = run.event()
        return attrs.evolve(event, learning_rate=rate) if isinstance(rate, Schedule) else event

    @classmethod
    def rates(cls, declared: DeclaredRun, num_steps: int) -> tuple[float | Schedule, float]:
        """Returns the learning rates and the decay of so many steps, where they count."""
        return 1.0, 0.0

    # What a mechanism says about itself

    @property
    def update_rule(self) -> str:
        """Name of what moves the parameters along the noisy gradients."""
        return type(self.original_optimizer).__name__

    @property
    def why_composition(self) -> str:
        """Reason why no bound on hidden iterates is about the update, or ""."""
        return ""

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """Assumptions that the step checks."""
        yield Assumption.checked(self.checked)

    # Its part of a step

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError unless the wrapped optimizer moves as the bound says."""
        raise NotImplementedError

    @property
    def blocks(self) -> Sequence[Sequence[nn.Parameter]]:
        """Parameters that are moved together; the gradients of each group are taken anew."""
        return [self.trained]

    def hidden_norm(self) -> Figure:
        """Returns the length of a hidden state, read together with that of the gradients."""
        return 0.0

    def move(self, piece: Piece) -> None:
        """Moves the parameters, and no others, along their noisy gradients; and `Passes.own`."""
        raise NotImplementedError

    def recorded(self, batch: int | None, rows: int, largest_norm: float, **values: Any) -> Step:
        """Returns the record of a logical step, right before the parameters move.

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
        """Returns what of the private state a run that took steps needs to go on, or ""."""
        return ""

    def private_state(self) -> dict[str, Any]:
        """Returns the plain types and tensors that `why_not_resumable` names. Secret."""
        return {}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `private_state` returned.

        Raises:
            ValueError: The state is of another run, or damaged.
        """

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        return self.run.num_steps

    def forget_pieces(self) -> None:
        """Forgets pieces from before a checkpoint was loaded: they are of no batch of the run."""
        self._is_last_step_skipped, self._longest, self._clip_norm = False, 0.0, None

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores the wrapped optimizer: its options, momentum and moments.

        Raises:
            UnsupportedRunError: They may hold gradients without noise.
        """
        if not self.run.is_loading:
            refuse_loaded_moments(state_dict)
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedRunError(
            f"{type(self).__name__} cannot be copied or pickled: the steps of a copy would be "
            "missing from epsilon. Use engine.save_checkpoint, or make another optimizer."
        )
