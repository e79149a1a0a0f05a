"""A run declared to the accountant of a stock Opacus PrivacyEngine."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from opacus.optimizers import (
    AdaClipDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    LossGeometry,
    RunRecorder,
    UnsupportedRunError,
)
from hidden_state_accountants.events.batch_order import EPOCH_ORDERS
from hidden_state_adapters.opacus.gradients.figures import read
from hidden_state_adapters.opacus.gradients.norms import joint_norm
from hidden_state_adapters.opacus.gradients.sums import gradient_norms
from hidden_state_adapters.opacus.guards.gradients import (
    GradientGuard,
    check_clip_margin,
    gradient_rows,
)
from hidden_state_adapters.opacus.guards.precision import check_arithmetic, check_precision
from hidden_state_adapters.opacus.guards.projection import check_inside
from hidden_state_adapters.opacus.guards.settings import UnsupportedUpdateError, sgd_options

_logger = logging.getLogger("hidden_state_accountants")

_USE_ENGINE = "Use hidden_state_adapters.opacus.HiddenStatePrivacyEngine, which sees the loader."


class StockRun:
    """Records from Opacus' step hook, which sees the optimizer but not the loader.

    If the optimizer is one that no last-iterate theorem covers (momentum, Adam, clipping per
    layer), the run is recorded without a loss geometry, so that only composition applies; a log
    line says so. Opacus' ghost clipping hides the rows of a batch: it needs batch_order="poisson".
    What reaches a gradient past the hooks of the layers is not clipped there.

    Args:
        batch_order: A BatchOrder or its value.
        dataset_size: n.
        batch_size: b.
        loss_geometry: A LossGeometry or None.
        projection_radius: Radius of the ball around 0 on which the user projects, or None.
    """

    def __init__(
        self,
        *,
        batch_order: BatchOrder | str,
        dataset_size: int,
        batch_size: int,
        loss_geometry: LossGeometry | None,
        projection_radius: float | None,
    ):
        self._order = BatchOrder(batch_order)
        self._size, self._batch_size = dataset_size, batch_size
        self._loss, self._radius = loss_geometry, projection_radius
        self._is_composition: bool | None = None
        self.recorder = self._new_recorder(loss_geometry, projection_radius)

    def _new_recorder(self, loss: LossGeometry | None, radius: float | None) -> RunRecorder:
        return RunRecorder(
            batch_order=self._order,
            dataset_size=self._size,
            batch_size=self._batch_size,
            loss=loss,
            domain_diameter=math.inf if radius is None else 2 * radius,
        )

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What the accountant of a stock engine cannot see and takes on the user's word."""
        n, b = self._size, self._batch_size
        batches = {
            BatchOrder.CYCLIC: f"the loader delivers batches of {b} of {n} records in the same "
            "order in every epoch, each once per epoch",
            BatchOrder.FULL: f"the loader delivers all {n} records in every batch",
            BatchOrder.SHUFFLED_ONCE: f"the loader delivers batches of {b} of {n} records in one "
            "uniform order, the same in every epoch; nobody ever learns it or its seed",
            BatchOrder.RESHUFFLED: f"the loader delivers batches of {b} of {n} records in a fresh "
            "uniform order in every epoch; nobody ever learns the orders or their seed",
            BatchOrder.WITHOUT_REPLACEMENT: f"the loader draws {b} of {n} records uniformly, "
            "afresh for every batch; nobody ever learns which, or the seed",
            BatchOrder.POISSON: "the loader draws every record for every batch independently with "
            f"probability {b / n:g}",
        }
        texts = [
            batches[self._order],
            "one optimizer step per batch, from one backward pass",
            "every per-example gradient is that of the loss at one record of the delivered batch",
            "the initial model and the order of the records do not depend on the records",
            "parameters changed by the private optimizer only",
        ]
        if self._radius is not None:
            texts[-1] += (
                ", except that the user puts all of them together back into the ball of radius "
                f"{self._radius:g} around 0 after every step"
            )
        if self._order is BatchOrder.POISSON:
            texts.append(
                "with Opacus' ghost clipping: the loss has one entry per record, and gradients "
                "come from it through the layers alone (no penalty, no hook on a layer)"
            )
        return tuple(Assumption.declared(text) for text in texts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a recorder into a run without steps.

        Raises:
            ValueError: As `RunRecorder.load_state_dict`, or the state is not of the end of an
                epoch. Nothing is changed then.
        """
        recorder = self._new_recorder(self._loss, self._radius)
        fallback = self._new_recorder(None, None)
        stored = state.get("declared")
        is_fallback = _declared(recorder) != stored == _declared(fallback)
        if is_fallback:
            recorder = fallback
        recorder.load_state_dict(state)
        if self._order is BatchOrder.SHUFFLED_ONCE and recorder.num_steps:
            raise ValueError(
                f"Expected no steps to restore for shuffled_once, got {recorder.num_steps}: the "
                "stock loader would draw another order. Use HiddenStatePrivacyEngine, whose "
                "checkpoints can hold the order."
            )
        per_epoch = -(-self._size // self._batch_size)
        position = recorder.num_steps % per_epoch if self._order in EPOCH_ORDERS else 0
        if position:
            raise ValueError(
                f"Expected a state at the end of an epoch, got one before batch "
                f"{position}: the stock loader would start again at batch 0. "
                "Use HiddenStatePrivacyEngine, whose loader goes on where it was."
            )
        self.recorder, self._is_composition = recorder, is_fallback or None

    def observe(self, optimizer: DPOptimizer, sample_rate: float) -> None:
        """Records the step that `optimizer` is about to take.

        Raises:
            UnsupportedRunError: What can be seen differs from what was declared.
        """
        self._check_sampling(optimizer, sample_rate)
        self._check_finite(optimizer)
        reason = self._why_composition(optimizer)
        if self._is_composition is None:
            self._is_composition = self._becomes_composition(reason)
        if self._is_composition:
            # The update rule is post-processing; any positive learning rate stands for it.
            rows = self._composition_rows(optimizer)
            self._record(optimizer, clip_norm=1.0, learning_rate=1.0, rows=rows)
            return
        if reason:
            raise UnsupportedRunError(
                f"step {self.recorder.num_steps + 1} changed the optimizer: {reason}. Keep one "
                "update rule during a run."
            )
        self._record_last_iterate(optimizer)

    def _becomes_composition(self, reason: str) -> bool:
        """Decides at the first step seen here, which may follow loaded ones."""
        has_steps = self.recorder.num_steps > 0
        if not reason or (has_steps and self._loss is not None):
            return False
        if not has_steps:
            self.recorder = self._new_recorder(None, None)
        _logger.warning(
            "No last-iterate theorem here covers this optimizer (%s), so epsilon is that of "
            "composition.",
            reason,
        )
        return True

    def _why_composition(self, optimizer: DPOptimizer) -> str:
        if type(optimizer) is not DPOptimizer:
            return f"Expected DPOptimizer, got {type(optimizer).__name__}"
        try:
            sgd_options(optimizer.original_optimizer)
        except UnsupportedUpdateError as error:
            return error.what
        divisor = optimizer.expected_batch_size
        if (
            self._order is BatchOrder.POISSON
            and self._loss is not None
            and optimizer.loss_reduction == "mean"
            and divisor < self._batch_size
        ):  # a larger divisor only shortens the step; a smaller one stretches it
            return f"it divides by {divisor}, less than batch_size = {self._batch_size}"
        return ""

    def _check_sampling(self, optimizer: DPOptimizer, sample_rate: float) -> None:
        step, b = self.recorder.num_steps + 1, self._batch_size
        if isinstance(optimizer, AdaClipDPOptimizer):
            raise UnsupportedRunError(
                f"step {step} uses adaptive clipping, which also publishes how many gradients were "
                "clipped: noise_multiplier does not cover that under every neighboring relation. "
                'Use clipping="flat" or "per_layer".'
            )
        if self._order is BatchOrder.POISSON:
            if sample_rate > b / self._size * (1 + 1e-9):
                raise UnsupportedRunError(
                    f"step {step} has sample rate {sample_rate:g}, expected at most "
                    f"batch_size/dataset_size = {b / self._size:g}. Correct declare_run."
                )
            return
        if optimizer.loss_reduction == "mean" and optimizer.expected_batch_size != b:
            raise UnsupportedRunError(
                f"step {step} divides by {optimizer.expected_batch_size}, expected batch_size = "
                f"{b}: the batch size must divide the data set. {_USE_ENGINE}"
            )

    def _check_finite(self, optimizer: DPOptimizer) -> None:
        gradients = [p.grad for p in optimizer.params if p.grad is not None]
        figures = {str(i): g.isfinite().all() for i, g in enumerate(gradients)}
        if not all(read(figures).values()):
            raise UnsupportedRunError(
                f"step {self.recorder.num_steps + 1} has a gradient that is not finite, which no "
                "clip bounds and no noise hides. Look for a division by 0, or scale the loss down."
            )

    def _composition_rows(self, optimizer: DPOptimizer) -> int:
        if not isinstance(optimizer, DPOptimizerFastGradientClipping):
            return self._rows(optimizer)
        if self._order is not BatchOrder.POISSON:
            raise UnsupportedRunError(
                f"step {self.recorder.num_steps + 1} uses ghost clipping, which hides how many "
                f"rows a {self._order.value} batch had, expected per-example gradients. Use "
                'grad_sample_mode="hooks", or Poisson batches with batch_order="poisson".'
            )
        check_arithmetic(optimizer.params)
        return 0  # of any number: Poisson batches are not counted

    def _rows(self, optimizer: DPOptimizer) -> int:
        """The rows of the batch; for Poisson batches maybe those of its last piece."""
        step = self.recorder.num_steps + 1
        if self._order is not BatchOrder.POISSON and optimizer._is_last_step_skipped:
            raise UnsupportedRunError(
                f"step {step} used a batch in several pieces, whose rows the accountant cannot "
                f"count. {_USE_ENGINE}"
            )
        try:
            return gradient_rows(optimizer.params)
        except UnsupportedRunError as error:
            raise UnsupportedRunError(f"step {step}: {error}") from None

    def _record_last_iterate(self, optimizer: DPOptimizer) -> None:
        step, params = self.recorder.num_steps + 1, optimizer.params
        options = sgd_options(optimizer.original_optimizer)
        for param in params:
            check_precision("parameters", param)
        rows = self._rows(optimizer)
        lipschitz = None if self._loss is None else self._loss.lipschitz
        check_clip_margin(float(optimizer.max_grad_norm), lipschitz)
        if lipschitz is not None and rows:
            largest = float(gradient_norms(params).max())
            GradientGuard.of_lipschitz(lipschitz).check(step, largest)
        if self._radius is not None:
            remedy = f" Project all parameters together after every step. {_USE_ENGINE}"
            check_inside(step, float(joint_norm(params)), self._radius, remedy)
        scale = 1 if optimizer.loss_reduction == "mean" else self._batch_size
        self._record(
            optimizer,
            clip_norm=float(optimizer.max_grad_norm),
            learning_rate=options["lr"] * scale,
            weight_decay=options["weight_decay"] / scale,
            rows=rows,
        )

    def _record(
        self,
        optimizer: DPOptimizer,
        *,
        clip_norm: float,
        learning_rate: float,
        weight_decay: float = 0.0,
        rows: int,
    ) -> None:
        self.recorder.step(
            noise_multiplier=float(optimizer.noise_multiplier),
            learning_rate=learning_rate,
            clip_norm=clip_norm,
            weight_decay=weight_decay,
            batch_index=self.recorder.expected_batch_index,
            batch_rows=None if self._order is BatchOrder.POISSON else rows,
        )


def _declared(recorder: RunRecorder) -> Any:
    return recorder.state_dict()["declared"]
