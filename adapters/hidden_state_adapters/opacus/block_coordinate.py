"""DP-MBCD: every block in turn, clipped, with noise, and through its prox."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import (
    BlockCoordinateDpEvent,
    Regulariser,
    Schedule,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.runs import algorithms
from hidden_state_accountants.runs.algorithms import Algorithm
from hidden_state_accountants.runs.run import Step
from hidden_state_adapters.opacus.criteria import check_convexity
from hidden_state_adapters.opacus.declared import DeclaredRun, RunArguments
from hidden_state_adapters.opacus.gradients import Piece, check_clip_norms, clip_factors
from hidden_state_adapters.opacus.private_step import PrivateOptimizer
from hidden_state_adapters.opacus.step_maps import RegulariserProx
from hidden_state_adapters.opacus.update_rules import move_by_sgd, sgd_options


@attrs.frozen
class BlockCoordinate:
    """DP-MBCD as `mechanism` of make_private; see `BlockCoordinateOptimizer`.

    Args:
        l1: Weight of the lasso, >= 0.
        l2: Weight of the squared norm, >= 0, which makes the prox contract.
        nonnegative: True to keep the parameters >= 0.
    """

    l1: float = attrs.field(default=0.0, validator=validate.MAGNITUDE)
    l2: float = attrs.field(default=0.0, validator=validate.MAGNITUDE)
    nonnegative: bool = attrs.field(default=False, validator=validate.FLAG)

    def optimizer_class(self, optimizer: Optimizer) -> type[PrivateOptimizer]:
        """Returns the class of the private optimizer that wraps `optimizer`."""
        return BlockCoordinateOptimizer


class BlockCoordinateOptimizer(PrivateOptimizer):
    r"""DP-MBCD: the parameter groups are blocks, updated in turn on the same batch.

    Every step makes for each block, with the gradients taken anew at the current parameters,

    .. math::
        \theta \leftarrow \mathrm{Prox}_{\eta, r}\Big(\theta - \frac{\eta}{b}\Big(
            \sum_{i \in B} \mathrm{clip}_C(\nabla_\theta f_i)
            + \mathcal{N}(0, (\text{noise_multiplier} \cdot C)^2 I)\Big)\Big), \qquad
        r = l_1 |\theta|_1 + \tfrac{l_2}{2} |\theta|^2

    with the gradient of one record for one block clipped as one vector, by exactly min(1, C/|v|),
    and r restricted to :math:`\theta \ge 0` if `nonnegative`. As with L-BFGS the gradients come
    from a closure, which is called once per block (examples/block_coordinate_opacus.py). One block
    needs no closure. The gradients are those of Opacus; of a linear head with a known loss they are
    computed from its formula.

    Formal guarantees:
      - Those of the `BlockCoordinateDpEvent` of the run (`engine.privacy_event`) under
        `hidden_state_accountants.BlockCoordinateAccountant`: the blocks after the last step are
        released, nothing else (the engine takes a release before that into account). One block with
        a known loss or a contracting prox may profit from hidden states; several blocks cost the
        composition of all their updates (docs/papers/block_coordinate.md).
      - A step that is refused ends the run without an epsilon.
      - Declared: the loss is that of the batch's targets, and the numbers of steps and the noise do
        not depend on the records. Not covered: rounding of floating-point numbers.

    Args:
        optimizer: Plain torch.optim.SGD with equal options in all groups: no momentum, no decay.
            Its learning rate is eta, constant (with loss_reduction="sum" eta = lr * b).
        **kwargs: Run of the engine and arguments of DPOptimizer. The noise multiplier, relative to
            max_grad_norm = C, may change between steps; b is the number of rows of every batch.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: The optimizer, the module or the surroundings are not covered. From
            `step`: the run is not; the text says why.

    Source: Chen & Liu 2025 (arXiv 2407.08233), Algorithm 1, with a constant step size and the
        gradients clipped (not the step size, which would depend on the records).
    """

    options = BlockCoordinate
    refused = {  # noqa: RUF012
        "after": "DP-MBCD has l1, l2 and nonnegative for it",
        "schedule": "the bound on DP-MBCD is about a constant step size",
    }
    constants = ("max_grad_norm", "lr", *PrivateOptimizer.constants)
    constant = "the bound on DP-MBCD is about constant values. (noise_multiplier may change.)"
    checked = (
        "plain SGD with constant step size, clip norm and prox; the clip exactly min(1, C/|v|) v "
        "of each block; finite gradients of b records, at the current parameters, on the same "
        "inputs for all blocks of a step; nothing else is trained"
    )
    takes_pieces = False

    def _start(self) -> None:
        self._blocks = _blocks_of(self.original_optimizer)
        options: BlockCoordinate = self.declared.arguments.mechanism
        low = 0.0 if options.nonnegative else -math.inf
        self._prox = RegulariserProx(Regulariser(l1=options.l1, l2=options.l2, low=low))
        self._noise_of_the_step = 0.0

    @property
    def lr(self) -> float:
        """The learning rate of the wrapped optimizer."""
        return _learning_rate(self.original_optimizer)

    # Before there is an optimizer

    @classmethod
    def check_arguments(
        cls, arguments: RunArguments, module: nn.Module, optimizer: Optimizer
    ) -> None:
        """Checks everything that the optimizer checks, before anything is changed."""
        _learning_rate(optimizer)
        check_convexity(arguments.loss_geometry, module, _blocks_of(optimizer))
        clip_norm = validate.magnitude("max_grad_norm", arguments.max_grad_norm, positive=True)
        params = [p for p in module.parameters() if p.requires_grad]
        check_clip_norms(params, max_grad_norm=clip_norm)

    @classmethod
    def algorithm(cls, declared: DeclaredRun, noise_multiplier: float) -> Algorithm:
        """See `PrivateOptimizer.algorithm`.

        Raises:
            UnsupportedRunError: No whole epochs are declared.
        """
        arguments, batches = declared.arguments, declared.plan.num_batches
        total = declared.schedule.num_steps
        if total is not None and total % batches:
            raise UnsupportedRunError(
                f"Expected num_steps in whole epochs of {batches} steps, got {total}: the bound on "
                "DP-MBCD is about whole epochs, and the run would end without an epsilon. Declare "
                f"{-(-total // batches) * batches}."
            )
        return algorithms.BlockCoordinate(
            noise_multiplier=noise_multiplier,
            clip_norm=arguments.clip_norm,
            step_size=_learning_rate(declared.optimizer) * declared.scale,
            num_blocks=len(_blocks_of(declared.optimizer)),
            prox_strong_convexity=float(arguments.mechanism.l2),
            loss=declared.loss,
        )

    @classmethod
    def event(
        cls, declared: DeclaredRun, noise_multiplier: float, num_steps: int
    ) -> BlockCoordinateDpEvent:
        """Returns the declared run, with the number of steps rounded up to whole epochs."""
        batches = declared.plan.num_batches
        whole = -(-num_steps // batches) * batches
        event: BlockCoordinateDpEvent = super().event(declared, noise_multiplier, whole)
        return event

    @classmethod
    def rates(cls, declared: DeclaredRun, num_steps: int) -> tuple[float | Schedule, float]:
        """Returns the constant step size."""
        return _learning_rate(declared.optimizer) * declared.scale, 0.0

    # Its part of a step

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError unless it is plain SGD without decay."""
        _learning_rate(optimizer)

    @property
    def blocks(self) -> Sequence[Sequence[nn.Parameter]]:
        """The trainable parameters of every parameter group."""
        return self._blocks

    def clip_and_accumulate(self) -> None:
        """Takes the sum of the block's gradients, clipped exactly."""
        piece = self._same_clip_norm()
        piece.add_sums(clip_factors(piece.norms, float(self.max_grad_norm)))

    def add_noise(self) -> None:
        """Adds noise as Opacus does.

        Raises:
            UnsupportedRunError: The blocks of a step get different noise.
        """
        block, noise = self._piece.block, float(self.noise_multiplier)
        if block and noise != self._noise_of_the_step:
            raise UnsupportedRunError(
                f"step {self._piece.step} uses noise_multiplier = {noise:g}, expected "
                f"{self._noise_of_the_step:g} as in its first block: one is recorded for the whole "
                "step. Change noise_multiplier between steps, not in the closure."
            )
        self._noise_of_the_step = noise
        super().add_noise()

    def recorded(self, batch: int | None, rows: int, largest_norm: float, **values: Any) -> Step:
        """Returns the record of a step, with its step size."""
        rate = self.step_size
        return super().recorded(batch, rows, largest_norm, **values, learning_rate=rate)

    def scale_grad(self) -> None:
        """Leaves the noisy sum as it is, which `move` divides."""

    def move(self, piece: Piece) -> None:
        """Makes the step of plain SGD, of the parameters of the block, and applies the prox."""
        own, rate = self._passes.own_of(piece.params), self.step_size
        scaled = rate / self.declared.plan.batch_size
        move_by_sgd(self.original_optimizer, own, piece.params, scaled)
        self._prox.apply(own, rate)
        self._passes.show()
        for p in self.trained:  # the next block needs gradients at the new values
            p.grad = p.grad_sample = p.summed_grad = None  # type: ignore[attr-defined]

    @property
    def step_size(self) -> float:
        """The step size eta of the mean gradient."""
        return self.lr * self.declared.scale


def _blocks_of(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """Returns the trainable parameters of every parameter group.

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
    """Returns the learning rate of a plain SGD optimizer without decay."""
    options = sgd_options(optimizer)
    if options["weight_decay"]:
        raise UnsupportedRunError(
            f"Expected weight_decay = 0, got {options['weight_decay']!r}: the event of DP-MBCD has "
            "no decay before the noise. Use l2, whose prox divides by 1 + step size * l2."
        )
    return float(options["lr"])
