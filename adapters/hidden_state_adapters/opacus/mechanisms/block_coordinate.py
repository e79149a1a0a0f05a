"""DP-MBCD: every block in turn, clipped, with noise, and through its prox."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer
from opacus.utils.module_utils import trainable_modules
from torch import nn
from torch.optim import SGD, Optimizer

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    BlockCoordinateDpEvent,
    LossGeometry,
    Regulariser,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.runs.base import Step
from hidden_state_accountants.runs.block_coordinate import (
    BlockCoordinateAccount,
    BlockCoordinateRun,
)
from hidden_state_adapters.opacus.gradients.norms import check_clip_norms, clip_factors
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.batch import EqualRowsGuard, RowsGuard
from hidden_state_adapters.opacus.guards.forward import ForwardGuard, SameInputsGuard
from hidden_state_adapters.opacus.guards.independence import IndependenceGuard
from hidden_state_adapters.opacus.guards.parameters import ParameterGuard, check_parameters
from hidden_state_adapters.opacus.guards.precision import check_convolutions
from hidden_state_adapters.opacus.guards.settings import check_options, sgd_options
from hidden_state_adapters.opacus.head.guard import HeadRun
from hidden_state_adapters.opacus.mechanism import Mechanism, move_by_sgd
from hidden_state_adapters.opacus.optimizer import PrivateOptimizer
from hidden_state_adapters.opacus.proximal import RegulariserProx
from hidden_state_adapters.opacus.run.arguments import RunArguments
from hidden_state_adapters.opacus.run.context import RunContext
from hidden_state_adapters.opacus.run.declared import DeclaredRun

_ORDERS = (BatchOrder.CYCLIC, BatchOrder.FULL)


class BlockCoordinate(Mechanism):
    """The steps of `BlockCoordinateOptimizer`; see there.

    Args:
        optimizer: The private optimizer, with its module, `l1`, `l2` and `nonnegative`.
    """

    optimizer: BlockCoordinateOptimizer
    base_types = (SGD,)
    options = frozenset({"l1", "l2", "nonnegative"})
    refused = {  # noqa: RUF012
        "prox": "DP-MBCD has l1, l2 and nonnegative for it",
        "projection": "the event of DP-MBCD has no projection; use nonnegative or l2",
        "projection_radius": "the event of DP-MBCD has no projection; use nonnegative or l2",
        "learning_rate_schedule": "the bound on DP-MBCD is about a constant step size",
        "max_batch_size": "all batches of DP-MBCD are equal",
    }
    constant = "the bound on DP-MBCD is about constant values. (noise_multiplier may change.)"
    checked = (
        "plain SGD with constant step size, clip norm and prox; the clip exactly min(1, C/|v|) v "
        "of each block; finite gradients, the same number of rows each time, of one training pass "
        "at the current parameters, on the same inputs for all blocks of a step; nothing else is "
        "trained or changed; noise that was not used before"
    )
    takes_pieces = False

    def __init__(self, optimizer: BlockCoordinateOptimizer):
        super().__init__(optimizer)
        self._blocks = _blocks_of(self.base)
        self._check_values()
        self._forward: ForwardGuard
        self._inputs: SameInputsGuard
        self._is_linear = all(
            isinstance(part, nn.Linear) for _, part in trainable_modules(optimizer.module)
        )
        self.why_coarse = ""  # why gradients are not those of a declared loss
        self._noise_multiplier = 0.0  # of the current step

    def _check_values(self) -> None:
        optimizer = self.optimizer
        rate = _learning_rate(self.base)
        validate.magnitude("learning_rate", rate)
        validate.magnitude("noise_multiplier", optimizer.noise_multiplier)
        clip_norm = validate.magnitude("max_grad_norm", optimizer.max_grad_norm, positive=True)
        validate.magnitude("l1", optimizer.l1)
        validate.magnitude("l2", optimizer.l2)
        if not isinstance(optimizer.nonnegative, bool):
            raise TypeError(
                f"Expected nonnegative to be True or False, got {optimizer.nonnegative!r}."
            )
        check_clip_norms(self.params, max_grad_norm=clip_norm)

    # Before there is an optimizer

    @classmethod
    def check_arguments(
        cls, arguments: RunArguments, module: nn.Module, optimizer: Optimizer
    ) -> None:
        """Checks everything that the optimizer checks, before anything is changed."""
        _learning_rate(optimizer)
        _blocks_of(optimizer)
        check_options(arguments.loss_reduction, False)
        clip_norm = validate.magnitude("max_grad_norm", arguments.max_grad_norm, positive=True)
        check_clip_norms(
            [p for p in module.parameters() if p.requires_grad], max_grad_norm=clip_norm
        )
        validate.magnitude("l1", arguments.l1)
        validate.magnitude("l2", arguments.l2)
        if not isinstance(arguments.nonnegative, bool):
            raise TypeError(
                f"Expected nonnegative to be True or False, got {arguments.nonnegative!r}."
            )

    @classmethod
    def new_run(cls, declared: DeclaredRun, noise_multiplier: float) -> BlockCoordinateRun:
        """What records the declared run.

        Raises:
            UnsupportedRunError: The batches are not fixed, or no whole epochs are declared.
        """
        _check_batches(declared)
        return BlockCoordinateRun(**_settings(declared))

    @classmethod
    def event(
        cls, declared: DeclaredRun, noise_multiplier: float, num_steps: int
    ) -> BlockCoordinateDpEvent:
        """The declared run, with the number of steps rounded up to whole epochs."""
        _check_batches(declared)
        batches = declared.plan.num_batches
        run = BlockCoordinateRun.of_totals(
            num_steps=-(-num_steps // batches) * batches,
            noise_multiplier=noise_multiplier,
            largest_norm=0.0,
            **_settings(declared),
        )
        return run.event()

    @classmethod
    def arguments_of_optimizer(cls, declared: DeclaredRun) -> dict[str, Any]:
        """The regulariser and the module."""
        names = ("l1", "l2", "nonnegative")
        regulariser = {name: getattr(declared.arguments, name) for name in names}
        return {"module": declared.inner, **regulariser}

    # Its part of the guards

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the noise."""
        names = ("max_grad_norm", "l1", "l2", "nonnegative")
        own = {name: getattr(self.optimizer, name) for name in names}
        return {**own, **super().settings, "lr": _learning_rate(self.base)}

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError unless it is plain SGD without decay."""
        _learning_rate(optimizer)

    def rows_guard(self) -> RowsGuard:
        """All batches are equal."""
        return EqualRowsGuard(int(self.optimizer.expected_batch_size))  # type: ignore[arg-type]

    def guards(self) -> Sequence[Guard]:
        """The same inputs for all blocks."""
        context = self.optimizer.context
        if context is None:
            return (SameInputsGuard(self.optimizer.module, self._forward),)
        if isinstance(context.watch, HeadRun):
            return ()  # which compares them itself
        return (SameInputsGuard(self.optimizer.module, context.watch.forward),)

    def guards_by_hand(self) -> Sequence[Guard]:
        """The parameters and the training passes of the module."""
        module = self.optimizer.module
        parameters = ParameterGuard(module, self.base)
        self._forward = ForwardGuard(module, parameters=parameters)
        return (parameters, self._forward, IndependenceGuard(module, self._forward))

    # Its part of a step

    @property
    def blocks(self) -> Sequence[Sequence[nn.Parameter]]:
        """The trainable parameters of every parameter group."""
        return self._blocks

    def accumulate(self, piece: Piece) -> None:
        """Takes the sum of the block's clipped gradients; all other gradients are forgotten."""
        if not self._is_linear and not self.why_coarse:
            self.why_coarse = _why_coarse(self.params)
        for p in self.params:
            p.summed_grad = None  # type: ignore[attr-defined]
        factors = clip_factors(piece.norms, float(self.optimizer.max_grad_norm))
        piece.add_sums(factors)
        for p in self.params:
            p.grad = None  # the wrapped optimizer moves what has a gradient

    def check_pieces(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if the blocks of a step get different noise."""
        noise = float(self.optimizer.noise_multiplier)
        if piece.block and noise != self._noise_multiplier:
            raise UnsupportedRunError(
                f"step {piece.step} uses noise_multiplier = {noise:g}, expected "
                f"{self._noise_multiplier:g} as in its first block: one is recorded for the whole "
                "step. Change noise_multiplier between steps, not in the closure."
            )
        self._noise_multiplier = noise

    def step(self, batch: int | None, rows: int, largest_norm: float) -> Step:
        """What is recorded of a step, with its step size."""
        step = super().step(batch, rows, largest_norm)
        return attrs.evolve(step, learning_rate=self.step_size)

    def move(self, piece: Piece) -> None:
        """The step of plain SGD, of the parameters of the block."""
        move_by_sgd(self.base, piece.params)

    def after_move(self, piece: Piece) -> None:
        """Applies the prox; the next block needs gradients at the new values."""
        optimizer = self.optimizer
        low = 0.0 if optimizer.nonnegative else -math.inf
        prox = RegulariserProx(Regulariser(l1=optimizer.l1, l2=optimizer.l2, low=low))
        prox.apply(piece.params, self.step_size)
        for p in self.params:
            p.grad = p.grad_sample = p.summed_grad = None  # type: ignore[attr-defined]

    @property
    def step_size(self) -> float:
        """The step size eta of the mean gradient."""
        is_mean = self.optimizer.loss_reduction == "mean"
        scale = 1 if is_mean else int(self.optimizer.expected_batch_size)  # type: ignore[arg-type]
        return _learning_rate(self.base) * scale

    def run_by_hand(self) -> BlockCoordinateRun:
        """A run whose data set is declared when its event is asked for."""
        optimizer = self.optimizer
        return BlockCoordinateRun(
            step_size=self.step_size,
            clip_norm=float(optimizer.max_grad_norm),
            batch_size=int(optimizer.expected_batch_size),  # type: ignore[arg-type]
            num_blocks=len(self._blocks),
            prox_strong_convexity=float(optimizer.l2),
        )


def _settings(declared: DeclaredRun) -> dict[str, Any]:
    """The arguments of `BlockCoordinateRun`."""
    arguments = declared.arguments
    return {
        "step_size": _learning_rate(declared.optimizer) * declared.scale,
        "clip_norm": validate.magnitude("max_grad_norm", arguments.max_grad_norm, positive=True),
        "batch_size": declared.plan.batch_size,
        "num_blocks": len(_blocks_of(declared.optimizer)),
        "prox_strong_convexity": float(arguments.l2),
        "dataset_size": len(declared.plan.records),
        "block_loss": declared.loss,
    }


def _check_batches(declared: DeclaredRun) -> None:
    order, batches = declared.plan.order, declared.plan.num_batches
    if order not in _ORDERS:
        raise UnsupportedRunError(
            f'Expected batch_order = "cyclic" or "full" with BlockCoordinateOptimizer, got '
            f'"{order.value}": the bound on DP-MBCD is about the same batches in the same order in '
            "every epoch."
        )
    total = declared.schedule.num_steps
    if total is not None and total % batches:
        raise UnsupportedRunError(
            f"Expected num_steps in whole epochs of {batches} steps, got {total}: the bound on "
            "DP-MBCD is about whole epochs, and the run would end without an epsilon. Declare "
            f"{-(-total // batches) * batches}."
        )


def _blocks_of(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """The trainable parameters of every parameter group.

    Raises:
        UnsupportedRunError: A group has none.
    """
    blocks = [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
    for index, block in enumerate(blocks):
        if not block:
            raise UnsupportedRunError(
                f"Expected trainable parameters in every group, got none in group {index}: a group "
                "is a block. Leave the group out."
            )
    return blocks


def _learning_rate(optimizer: Optimizer) -> float:
    """The learning rate of a plain SGD optimizer without decay."""
    options = sgd_options(optimizer)
    if options["weight_decay"]:
        raise UnsupportedRunError(
            f"Expected weight_decay = 0, got {options['weight_decay']!r}: the event of DP-MBCD has "
            "no decay before the noise. Use l2, whose prox divides by 1 + step size * l2."
        )
    return float(options["lr"])


def _why_coarse(params: Sequence[nn.Parameter]) -> str:
    try:
        check_convolutions(params)
    except UnsupportedRunError as error:
        return str(error)
    return ""


def _plain_module(module: Any) -> nn.Module:
    """The module that Opacus wrapped.

    Raises:
        UnsupportedRunError: It is not wrapped, or clips by a second backward pass.
    """
    if not isinstance(module, AbstractGradSampleModule):
        raise UnsupportedRunError(
            f"Expected module = GradSampleModule(model), got {type(module).__name__}: the gradient "
            "of every record is needed."
        )
    if isinstance(module, GradSampleModuleFastGradientClipping):
        raise UnsupportedRunError(
            "Expected GradSampleModule or GhostGradSampleModule, got Opacus' ghost clipping: it "
            "clips all parameters as one vector, and every block needs a clip of its own."
        )
    return module._module


class BlockCoordinateOptimizer(BlockCoordinateAccount, PrivateOptimizer):
    r"""DP-MBCD: the parameter groups are blocks, updated in turn on the same batch.

    Every step makes for each block, with the gradients taken anew at the current parameters,

    .. math::
        \theta \leftarrow \mathrm{Prox}_{\eta, r}\Big(\theta - \frac{\eta}{b}\Big(
            \sum_{i \in B} \mathrm{clip}_C(\nabla_\theta f_i)
            + \mathcal{N}(0, (\text{noise_multiplier} \cdot C)^2 I)\Big)\Big), \qquad
        r = l_1 |\theta|_1 + \tfrac{l_2}{2} |\theta|^2

    with the gradient of one record for one block clipped as one vector, by exactly min(1, C/|v|),
    and r restricted to :math:`\theta \ge 0` if `nonnegative`. As with L-BFGS the gradients come
    from a closure; it is called once per block::

        engine = HiddenStatePrivacyEngine()
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(groups, lr=0.1),
            data_loader=DataLoader(data, batch_size=100), noise_multiplier=2.0,
            max_grad_norm=1.0, optimizer_class=BlockCoordinateOptimizer, l1=0.001)
        for features, targets in loader:
            def closure():
                optimizer.zero_grad()
                criterion(model(features), targets).backward()
            optimizer.step(closure)
        print(engine.report(1e-5))

    One block needs no closure: backward() and step() as always.

    By hand, over a loader with shuffle=False and drop_last=True::

        model = GradSampleModule(model)
        optimizer = BlockCoordinateOptimizer(
            torch.optim.SGD(groups, lr=0.1), module=model, noise_multiplier=2.0,
            max_grad_norm=1.0, expected_batch_size=100, l1=0.001)
        ...
        print(optimizer.report(1e-5, dataset_size=5000))

    Formal guarantees:
      - Those of the `BlockCoordinateDpEvent` of the run (`engine.privacy_event`, by hand
        `privacy_event(...)`) under `hidden_state_accountants.BlockCoordinateAccountant`: the
        blocks after the last step are released, nothing else (the engine takes a release before
        that into account). One block with a known loss or a contracting prox may profit from
        hidden states; several blocks cost the composition of all their updates
        (docs/papers/block_coordinate.md).
      - Checked at every update: constant step size, clip norm and regulariser; a public wrapped
        module whose trainable parameters are exactly the blocks, in float32 or float64, that
        nobody else changes; frozen parameters and buffers that stay as they are; finite
        gradients of b rows, from one training pass, on the same inputs for all blocks of a step;
        noise that was not used before. A step that is refused ends the run without an epsilon.
      - Your word: one row is one record, targets and closure belong to the batch, and the numbers
        of steps and the noise do not depend on the records; by hand also that the batches are the
        same ones in every epoch. Not covered: rounding of floating-point numbers.

    Args:
        optimizer: A plain torch.optim.SGD with equal options in all groups: no momentum, no decay.
            Its learning rate is eta, constant (with loss_reduction="sum" eta = lr * b).
        module: Opacus' GradSampleModule around the model; of the engine the model. All its
            trainable parameters have to be in the groups.
        noise_multiplier: Standard deviation of the noise on the sum of a block's clipped gradients
            over max_grad_norm. It may be set to another value between steps.
        max_grad_norm: C > 0, for each block.
        expected_batch_size: b, the divisor and the number of rows of every batch.
        l1: Weight of the lasso, >= 0.
        l2: Weight of the squared norm, >= 0: r is l2-strongly convex.
        nonnegative: Whether the parameters are kept >= 0.
        loss_reduction: "mean" or "sum", that of the loss.
        generator: Source of the noise; None is one of our own, which no seed reaches.
        secure_mode: As in Opacus.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: The optimizer, the module or the surroundings are not covered. From
            `step`: the run is not; the text says why.

    Source: Chen & Liu 2025 (arXiv 2407.08233), Algorithm 1, with a constant step size and the
        gradients clipped (not the step size, which would depend on the records).
    """

    mechanism_type = BlockCoordinate
    _checked = BlockCoordinate.checked
    mechanism: BlockCoordinate
    run: BlockCoordinateRun

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        module: nn.Module,
        expected_batch_size: int,
        l1: float = 0.0,
        l2: float = 0.0,
        nonnegative: bool = False,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        context: RunContext | None = None,
        **kwargs: Any,
    ):
        if isinstance(optimizer, DPOptimizer):
            raise UnsupportedRunError(
                f"Expected torch.optim.SGD, got {type(optimizer).__name__}. Pass its "
                "original_optimizer."
            )
        check_options(loss_reduction, secure_mode, expected_batch_size)
        self.module = module
        if context is None:
            self.module = _plain_module(module)
            sgd_options(optimizer)
            check_parameters(self.module, optimizer)
            if module.loss_reduction != loss_reduction:
                raise UnsupportedRunError(
                    f"Expected loss_reduction = {module.loss_reduction!r} as in the module, got "
                    f"{loss_reduction!r}: gradients of records would be off by the batch size."
                )
        self.l1, self.l2, self.nonnegative = l1, l2, nonnegative
        super().__init__(
            optimizer,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            context=context,
            **kwargs,
        )

    @property
    def num_blocks(self) -> int:
        """The number of blocks, p."""
        return len(self.mechanism.blocks)

    @property
    def step_size(self) -> float:
        """The step size eta of the mean gradient."""
        return self.mechanism.step_size

    def _assumptions(self) -> tuple[Assumption, ...]:
        return (*super()._assumptions(), *self.guards.assumptions)

    def _run(self, block_loss: LossGeometry | None) -> BlockCoordinateRun:
        self.check_not_refused()
        if self.run.num_steps:
            self.check_iterate()
        if block_loss is not None and self.mechanism.why_coarse:
            raise UnsupportedRunError(self.mechanism.why_coarse)
        if self.context is not None and block_loss not in (None, self.context.declared.loss):
            raise UnsupportedRunError(
                f"Expected block_loss = {self.context.declared.loss}, which was recorded, got "
                f"{block_loss}."
            )
        return self.run
