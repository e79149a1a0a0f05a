"""Noisy mini-batch block coordinate descent (DP-MBCD) for Opacus."""

from __future__ import annotations

from typing import Any

from hidden_state_accountants import (
    LossGeometry,
    Schedule,
    UnsupportedRunError,
)
from hidden_state_accountants.runs.block_coordinate import (
    BlockCoordinateAccount,
    BlockCoordinateRun,
)
from hidden_state_adapters.opacus.block_coordinate_mechanism import BlockCoordinateMechanism


class BlockCoordinateOptimizer(BlockCoordinateAccount, BlockCoordinateMechanism):
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

        model = GradSampleModule(model)
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
        optimizer = BlockCoordinateOptimizer(
            torch.optim.SGD(groups, lr=0.1), module=model, noise_multiplier=2.0,
            max_grad_norm=1.0, expected_batch_size=100, l1=0.001)
        for features, targets in loader:          # fixed batches: shuffle=False, drop_last=True
            def closure():
                optimizer.zero_grad()
                criterion(model(features), targets).backward()
            optimizer.step(closure)
        print(optimizer.report(1e-5, dataset_size=5000))

    One block needs no closure: backward() and step() as always.

    Formal guarantees:
      - Those of `privacy_event(...)` under `hidden_state_accountants.BlockCoordinateAccountant`:
        the blocks after the last step are released, nothing else. One block with a `block_loss`
        or a contracting prox may profit from hidden states; several blocks cost the composition
        of all their updates (docs/block_coordinate.md).
      - Checked at every update: constant step size, clip norm and regulariser; a public wrapped
        module whose trainable parameters are exactly the blocks, in float32 or float64, that
        nobody else changes; frozen parameters and buffers that stay as they are; finite
        gradients of b rows, from one training pass, on the same inputs for all blocks of a step;
        noise that was not used before. A step that is refused ends the run without an epsilon.
      - Your word: one row is one record, the batches are the same ones in every epoch, targets
        and closure belong to them, and the numbers of steps and the noise do not depend on the
        records. Not covered: rounding of floating-point numbers.

    Args:
        optimizer: A plain torch.optim.SGD with equal options in all groups: no momentum, no decay.
            Its learning rate is eta, constant (with loss_reduction="sum" eta = lr * b).
        module: Opacus' GradSampleModule around the model. All its trainable parameters have to be
            in the groups.
        noise_multiplier: Standard deviation of the noise on the sum of a block's clipped gradients
            over max_grad_norm. It may be set to another value between steps.
        max_grad_norm: C > 0, for each block.
        expected_batch_size: b, the divisor and the number of rows of every batch.
        l1: Weight of the lasso, >= 0.
        l2: Weight of the squared norm, >= 0: r is l2-strongly convex.
        nonnegative: Whether the parameters are kept >= 0.
        loss_reduction: "mean" or "sum", that of the loss.
        generator: Source of the noise; None is torch's.
        secure_mode: As in Opacus.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: The optimizer, the module or the surroundings are not covered. From
            `step`: the run is not; the text says why.

    Source: Chen & Liu 2025 (arXiv 2407.08233), Algorithm 1, with a constant step size and the
        gradients clipped (not the step size, which would depend on the records).
    """

    _checked = (
        "plain SGD with constant step size, clip norm and prox; the clip exactly min(1, C/|v|) v "
        "of each block; finite gradients, the same number of rows each time, of one training pass "
        "at the current parameters, on the same inputs for all blocks of a step; nothing else is "
        "trained or changed; noise that was not used before"
    )

    @property
    def num_blocks(self) -> int:
        """The number of blocks, p."""
        return len(self._blocks)

    @property
    def num_steps(self) -> int:
        """The number of steps taken; each updates every block."""
        return self._num_steps

    def _run(self, block_loss: LossGeometry | None) -> BlockCoordinateRun:
        if self._failure:
            raise UnsupportedRunError(
                "A step of this run was refused or interrupted. What ended the run may depend on "
                "the records, and the bound is about a number of steps that does not. Start again "
                f"with another optimizer. It was: {self._failure}"
            )
        if not self._num_steps:
            raise ValueError("Expected at least one step, got none yet.")
        if bool(self._parameters.changed()) or bool(self._parameters.buffers_changed()):
            raise UnsupportedRunError(
                "The module was changed after the last step, so it is not the iterate that is "
                "accounted. Leave it alone, or go back to what the last step left."
            )
        if block_loss is not None and self._coarse:
            raise UnsupportedRunError(self._coarse)
        values, lengths = zip(*self._noise, strict=True)
        return BlockCoordinateRun.of_totals(
            step_size=self.step_size,
            clip_norm=float(self._fixed["max_grad_norm"]),
            noise_multiplier=values[0] if len(values) == 1 else Schedule(values, lengths),
            batch_size=int(self._fixed["expected_batch_size"]),
            num_steps=self._num_steps,
            num_blocks=self.num_blocks,
            prox_strong_convexity=self.l2,
            largest_norm=self._largest_norm,
        )

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedRunError(
            f"{type(self).__name__} cannot be copied or pickled: the steps of a copy would be "
            "missing from epsilon. Save state_dict() and the event of what ran."
        )
