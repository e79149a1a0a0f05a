"""The record of a run of which the last iterate is released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    Guarantee,
    LastIterateDpEvent,
    RunningGuarantee,
    RunRecorder,
)
from hidden_state_accountants.runs.contraction import no_contraction_line
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.run_record import RunRecord
from hidden_state_adapters.tf_privacy.statement import statement
from hidden_state_adapters.tf_privacy.step_log import StepEntry
from hidden_state_adapters.tf_privacy.units import Units


class LastIterateRecord(RunRecord):
    """Feeds a `RunRecorder` with the steps of a CyclicDPKerasSGDOptimizer."""

    def __init__(
        self, optimizer: Any, batch_size: int, examples: int, relation: NeighboringRelation
    ):
        super().__init__(optimizer, batch_size, examples, relation)
        self.units = Units.of(optimizer, batch_size, examples)
        self._recorder = self._empty_recorder()
        self._running = RunningGuarantee(self._recorder, relation)
        self._parts: list[tuple[float, float, float]] = []  # of the step that is accumulated
        self._check_accumulation()

    def _empty_recorder(self) -> RunRecorder:
        radius = self.optimizer.projection_radius
        return RunRecorder(
            batch_order=BatchOrder.CYCLIC,
            batch_size=self.units.records_per_step,
            dataset_size=self.units.records,
            loss=self.units.geometry(self.optimizer.loss_geometry),
            domain_diameter=math.inf if radius is None else 2 * radius,
        )

    def line_before(self) -> str:
        """What `no_contraction_line` says, assuming the hyper-parameters of the next step."""
        optimizer, recorder = self.optimizer, self._empty_recorder()
        rate = float(optimizer._decayed_lr(tf.float32))
        self._step(
            recorder,
            rate,
            (optimizer.noise_multiplier, optimizer.l2_norm_clip, optimizer.weight_decay),
        )
        return no_contraction_line(recorder.event(), self.relation)

    def _add(self, entry: StepEntry) -> None:
        self._check_draws()
        self._check_accumulation()
        self._parts.append((entry.noise_multiplier, entry.l2_norm_clip, entry.weight_decay))
        if self.num_batches % self.units.accumulated:
            return
        if len(set(self._parts)) > 1:
            raise refusal("noise, clip norm or decay changed while gradients were accumulated.")
        part = self._parts[0]
        self._parts.clear()
        self._step(self._recorder, entry.learning_rate, part)

    def _step(self, recorder: RunRecorder, rate: float, part: tuple[float, float, float]) -> None:
        noise, clip, decay = part
        recorder.step(
            noise_multiplier=self.units.noise_multiplier(noise),
            learning_rate=_as_meant(rate),
            clip_norm=clip,
            weight_decay=decay,
            batch_index=recorder.expected_batch_index,
            batch_rows=self.units.records_per_step,
        )

    def _check_draws(self) -> None:
        """Noise that somebody chose among several draws is not Gaussian."""
        drawn = self.optimizer.gradients_computed
        if drawn != self.num_batches:
            raise refusal(
                f"Noisy gradients were computed {drawn} times for {self.num_batches} steps: the "
                "others were refused, interrupted or not applied. Call minimize, or "
                "_compute_gradients and apply_gradients, once for every batch."
            )

    def _check_accumulation(self) -> None:
        """Gradients are applied when TensorFlow Privacy's count says so, which must be ours."""
        now = Units.of(self.optimizer, self.batch_size, self.examples)
        if now != self.units:
            raise refusal("microbatches or accumulation were changed during the run.")
        if (int(self.optimizer.iterations) - self.num_batches) % now.accumulated:
            raise refusal(
                f"optimizer.iterations is {int(self.optimizer.iterations)} after "
                f"{self.num_batches} batches, so gradients are applied in other steps than every "
                f"{now.accumulated}th. Start with a fresh optimizer."
            )

    def check(self) -> None:
        """As `RunRecord.check`, and the last step is complete."""
        super().check()
        self._check_draws()
        if self._parts:
            raise refusal(
                f"{len(self._parts)} of {self.units.accumulated} gradients of a step are "
                "accumulated; the optimizer holds their sum. Finish the epoch."
            )

    def release(self) -> None:
        """Marks the current iterate as released."""
        self._recorder.release()

    def event(self) -> LastIterateDpEvent:
        """The event that happened."""
        return self._recorder.event()

    def guarantee(self) -> Guarantee:
        """The guarantee of what is released, with the current model as the last iterate."""
        return self._running.guarantee()

    def checked(self) -> list[str]:
        """The values of the steps, and what holds for the variables."""
        checked = ["learning rate, weight decay, clip norm and noise as recorded, in every step"]
        radius, geometry = self.optimizer.projection_radius, self.optimizer.loss_geometry
        units = self.units
        if geometry is not None and geometry.lipschitz is not None:
            of = "per-example" if units.microbatch == 1 else "microbatches'"
            checked.append(f"{of} gradient norms at most {geometry.lipschitz:g}")
        if units.microbatch > 1:
            checked.append(
                f"fixed microbatches of {units.microbatch} examples: each is a record of the "
                "event, at half the noise multiplier, because one example moves it by up to twice "
                "the clip norm"
            )
        if units.accumulated > 1:
            checked.append(
                f"{units.accumulated} accumulated batches are one step of the event, with "
                "independent noise from each"
            )
        if radius is not None:
            checked.append(f"all variables together within {radius:g} of 0")
        return checked

    def report(self, assumptions: Sequence[Assumption], delta: float) -> str:
        """The privacy statement."""
        microbatch = self.units.microbatch
        return statement(self.event(), self.guarantee(), tuple(assumptions), delta, microbatch)


def _as_meant(rate: float) -> float:
    """The shortest decimal that is the same float32, if it is one: Keras keeps rates in float32."""
    single = np.float32(rate)
    return float(str(single)) if float(single) == rate else rate
