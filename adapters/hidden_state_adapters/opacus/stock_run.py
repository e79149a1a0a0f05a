"""A run declared to the accountant of a stock Opacus PrivacyEngine."""

from __future__ import annotations

import logging
import math

from opacus.optimizers import DPOptimizer

from hidden_state_accountants import BatchOrder, LossGeometry, RunRecorder, UnsupportedRunError
from hidden_state_adapters.opacus import optimizer_checks as checks

_logger = logging.getLogger("hidden_state_accountants")

_USE_ENGINE = "Use hidden_state_adapters.opacus.HiddenStatePrivacyEngine, which sees the loader."


class StockRun:
    """Records from Opacus' step hook, which sees the optimizer but not the loader.

    If the optimizer is one that no last-iterate theorem covers (momentum, Adam, another clipping),
    or its gradients cannot be seen (ghost clipping), the run is recorded without a loss geometry,
    so that only composition applies; a log line says so.

    Args:
        batch_order: "cyclic", "full" or "poisson".
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

    def observe(self, optimizer: DPOptimizer, sample_rate: float) -> None:
        """Records the step that `optimizer` is about to take.

        Raises:
            UnsupportedRunError: What can be seen differs from what was declared.
        """
        self._check_sampling(optimizer, sample_rate)
        reason = self._why_composition(optimizer)
        if self._is_composition is None:
            self._is_composition = bool(reason)
            if reason:
                self.recorder = self._new_recorder(None, None)
                _logger.warning(
                    "%s: no last-iterate theorem covers it; epsilon is that of composition", reason
                )
        if self._is_composition:
            # The update rule is post-processing; any positive learning rate stands for it.
            self._record(optimizer, clip_norm=1.0, learning_rate=1.0, rows=self._batch_size)
            return
        if reason:
            raise UnsupportedRunError(
                f"step {self.recorder.num_steps + 1} changed the optimizer: {reason}. Keep one "
                "update rule during a run."
            )
        self._record_last_iterate(optimizer)

    def _why_composition(self, optimizer: DPOptimizer) -> str:
        if type(optimizer) is not DPOptimizer:
            return type(optimizer).__name__
        try:
            checks.sgd_options(optimizer.original_optimizer)
        except UnsupportedRunError as error:
            return str(error)
        return ""

    def _check_sampling(self, optimizer: DPOptimizer, sample_rate: float) -> None:
        step, b = self.recorder.num_steps + 1, self._batch_size
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

    def _record_last_iterate(self, optimizer: DPOptimizer) -> None:
        step, params = self.recorder.num_steps + 1, optimizer.params
        options = checks.sgd_options(optimizer.original_optimizer)
        for param in params:
            checks.check_precision("parameters", param)
        if self._order is not BatchOrder.POISSON and optimizer._is_last_step_skipped:
            raise UnsupportedRunError(
                f"step {step} used a batch in several pieces, whose rows the accountant cannot "
                f"count. {_USE_ENGINE}"
            )
        try:
            rows = checks.gradient_rows(params)
        except UnsupportedRunError as error:
            raise UnsupportedRunError(f"step {step}: {error}") from None
        lipschitz = None if self._loss is None else self._loss.lipschitz
        checks.check_clip_margin(float(optimizer.max_grad_norm), lipschitz)
        if lipschitz is not None and rows:
            largest = float(checks.largest_gradient_norm(params))
            checks.check_gradient_norm(largest, lipschitz, step)
        if self._radius is not None:
            norm = float(checks.joint_norm(params))
            if not norm <= self._radius * (1 + 1e-6):
                raise UnsupportedRunError(
                    f"step {step} starts at norm {norm:.8g}, outside the ball of radius "
                    f"{self._radius:.8g}. Project all parameters together after every step. "
                    f"{_USE_ENGINE}"
                )
        scale = 1 if optimizer.loss_reduction == "mean" else self._batch_size
        self._record(
            optimizer,
            clip_norm=float(optimizer.max_grad_norm),
            learning_rate=options["lr"] * scale,
            weight_decay=options["weight_decay"] / scale,
            rows=None if self._order is BatchOrder.POISSON else rows,  # maybe one piece of many
        )

    def _record(
        self,
        optimizer: DPOptimizer,
        *,
        clip_norm: float,
        learning_rate: float,
        weight_decay: float = 0.0,
        rows: int | None,
    ) -> None:
        self.recorder.step(
            noise_multiplier=float(optimizer.noise_multiplier),
            learning_rate=learning_rate,
            clip_norm=clip_norm,
            weight_decay=weight_decay,
            batch_index=self.recorder.expected_batch_index,
            batch_rows=rows,
        )
