"""What a mechanism is: one private update rule, in the middle of the step that all share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import dp_accounting
import torch
from dp_accounting import NeighboringRelation
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import Assumption, RunRecorder, UnsupportedRunError
from hidden_state_accountants.runs.run import Run, Step
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.gradients.norms import opacus_clip_factors
from hidden_state_adapters.opacus.gradients.piece import Piece
from hidden_state_adapters.opacus.run.arguments import RunArguments
from hidden_state_adapters.opacus.run.declared import DeclaredRun


class MechanismOptions:
    """What `make_private(mechanism=)` takes: the options of one mechanism, an attrs class."""

    def optimizer_class(self, optimizer: Optimizer) -> Any:
        """The private optimizer of a run.

        Args:
            optimizer: What it wraps.
        """
        raise NotImplementedError


class Mechanism:
    """How one algorithm clips, adds up and moves; `optimizer.PrivateOptimizer` does the rest.

    A mechanism is one file: this class, a PrivateOptimizer that names it in `mechanism_type`, and
    its options. Nothing else asks which mechanism a run has.

    Attributes:
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
        optimizer: The PrivateOptimizer that it belongs to.
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

    def __init__(self, optimizer: Any):
        self.optimizer: DPOptimizer = optimizer
        self.base: Optimizer = optimizer.original_optimizer
        self.params: list[nn.Parameter] = optimizer.params
        self.declared: DeclaredRun = optimizer.run.declared

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
        return type(self.base).__name__

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
        return {name: getattr(self.optimizer, name) for name in names}

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError unless the wrapped optimizer moves as the bound says."""
        raise NotImplementedError

    # Its part of a step

    @property
    def blocks(self) -> Sequence[Sequence[nn.Parameter]]:
        """The parameters that are moved together; the gradients of each are taken anew."""
        return [self.params]

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

    def step(self, batch: int | None, rows: int, largest_norm: float) -> Step:
        """What is recorded of a logical step, right before the parameters move."""
        return self._step(batch, rows, largest_norm)

    def _step(self, batch: int | None, rows: int, largest_norm: float, **values: Any) -> Step:
        """A step with further `values` that only some mechanisms know."""
        # Where the event does not say how many records there are, a batch may be any of them.
        adds = self.declared.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        return Step(
            noise_multiplier=float(self.optimizer.noise_multiplier),
            clip_norm=float(self.optimizer.max_grad_norm),
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

    def forget_pieces(self) -> None:
        """Pieces from before a checkpoint was loaded belong to no batch of the run."""

    def before_loading(self, state_dict: Mapping[str, Any], *, is_checkpoint: bool) -> None:
        """The wrapped optimizer is about to load `state_dict`.

        Args:
            state_dict: What is loaded.
            is_checkpoint: Whether the engine loads it, with everything else of a run.
        """


class ClippedSum(Mechanism):
    """Clips and adds up as Opacus does. A subclass says what moves along the noisy mean.

    Args:
        optimizer: The private optimizer.
    """

    constant = "make_private accounts one run of one kind. Call it again for another one."

    def __init__(self, optimizer: DPOptimizer):
        super().__init__(optimizer)
        self._clip_norm: float | None = None  # of the pieces of the current batch

    @classmethod
    def new_run(cls, declared: DeclaredRun, noise_multiplier: float) -> RunRecorder:
        """What records the declared run."""
        return RunRecorder(**cls.constants(declared))

    @classmethod
    def constants(cls, declared: DeclaredRun) -> dict[str, Any]:
        """The fields of a `LastIterateDpEvent` that stay the same in a run."""
        maps = declared.maps.values()
        params = declared.trained
        return {
            **declared.batches,
            "loss": declared.loss,
            "prox_strong_convexity": sum(part.strong_convexity for part in maps),
            "domain_diameter": min((part.diameter(params) for part in maps), default=math.inf),
            "max_batch_size": declared.arguments.batch_order.max_batch_size,
        }

    def accumulate(self, piece: Piece) -> None:
        r"""Adds what Opacus would.

        .. math:: \sum_i \min(1, C / (|g_i| + 10^{-6}))\, g_i
        """
        clip_norm = float(self.optimizer.max_grad_norm)
        self._check_same_clip_norm(piece, clip_norm)
        self._clip_norm = clip_norm
        self.clip(piece, clip_norm)

    def clip(self, piece: Piece, clip_norm: float) -> None:
        """Adds the clipped gradients of a piece to the sums."""
        piece.add_sums(opacus_clip_factors(piece.norms, clip_norm))

    def forget_pieces(self) -> None:
        """See `Mechanism.forget_pieces`."""
        self._clip_norm = None

    def check_pieces(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if the noise is for another clip norm."""
        self._check_same_clip_norm(piece, float(self.optimizer.max_grad_norm))
        self._clip_norm = None

    def _check_same_clip_norm(self, piece: Piece, clip_norm: float) -> None:
        if self._clip_norm is not None and clip_norm != self._clip_norm:
            raise UnsupportedRunError(
                f"step {piece.step} clips to {self._clip_norm:g} and then uses {clip_norm:g}. "
                "Change max_grad_norm between logical steps only."
            )


def move_by_any_rule(base: Optimizer) -> None:
    """Lets the wrapped optimizer move what is trained; old gradients of the rest go."""
    for group in base.param_groups:
        for param in group["params"]:
            if not param.requires_grad:
                param.grad = None
    base.step()


@torch.no_grad()
def move_by_sgd(base: Any, params: Sequence[nn.Parameter]) -> None:
    """A step of plain SGD, of `params` alone: others may hold gradients without noise.

    Args:
        base: The wrapped torch.optim.SGD, whose groups have equal options.
        params: With their noisy gradients.
    """
    options = base.param_groups[0]
    decay, rate = float(options["weight_decay"]), float(options["lr"])
    for p in params:
        assert p.grad is not None
        p.add_(torch.add(p.grad, p, alpha=decay), alpha=-rate)
    base._opt_called = True  # what torch's schedulers look for before they warn
