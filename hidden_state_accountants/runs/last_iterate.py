"""A run of noisy SGD of which the last iterate is released, step by step."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.advice import no_contraction_line
from hidden_state_accountants.bounds.composition import composition_of
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.runs.base import Run, Step


class LastIterateRun(Run):
    """Records a run step by step and checks the batches against the declared order.

    A step costs O(1) time; constant hyper-parameters cost O(1) memory however long the run is.
    It is public as `hidden_state_accountants.RunRecorder`.

    Args:
        **declared: `batch_order`, `batch_size` and `dataset_size`; as far as they are not those of
            an ordinary run `loss`, `prox_strong_convexity`, `domain_diameter`, `sampling_rate`,
            `max_batch_size` and `is_microbatched`. All as for `LastIterateDpEvent`.

    Raises:
        TypeError, ValueError: As `LastIterateDpEvent`.
    """

    event_type = LastIterateDpEvent
    series = ("noise_multiplier", "learning_rate", "clip_norm", "weight_decay")
    of_one_step: ClassVar = {
        "noise_multiplier": 1.0,
        "learning_rate": 0.0,
        "clip_norm": 1.0,
        "weight_decay": 0.0,
        "num_steps": 1,
    }

    @property
    def _period(self) -> int:
        own = self._template
        return own.batches_per_epoch if own.batch_order is BatchOrder.CYCLIC else 1

    @property
    def expected_batch_index(self) -> int:
        """The index within the epoch that the next batch must have."""
        return self._num_steps % self._period

    def step(
        self, *, batch_index: int | None = None, batch_rows: int | None = None, **values: Any
    ) -> None:
        """Records one logical step, with the values that the step really used; see `add`.

        Args:
            batch_index: Index of the batch within the epoch; required for CYCLIC.
            batch_rows: Rows of the logical batch; required for FULL and CYCLIC.
            **values: `noise_multiplier`, `learning_rate` (that is about to be applied), `clip_norm`
                (None if gradients are not clipped) and `weight_decay` (decoupled; by default 0).

        Raises:
            UnsupportedRunError: The batch is not the declared one; nothing is recorded.
            TypeError, ValueError: A hyper-parameter has an impossible value.
        """
        self.add(Step(**values, batch=batch_index, rows=batch_rows))

    @classmethod
    def _norm_bound(cls, event: LastIterateDpEvent) -> tuple[str, float | None]:
        return "loss.lipschitz", None if event.loss is None else event.loss.lipschitz

    def _check(self, step: Step) -> None:
        self._check_batch(step.batch, step.rows)
        values = tuple(getattr(step, name) for name in self.series)
        if values != tuple(r.values[-1] if r.values else None for r in self._series.values()):
            self._check_values(step)

    def _check_values(self, step: Step) -> None:
        validate.magnitude("noise_multiplier", step.noise_multiplier)
        rate = validate.magnitude("learning_rate", step.learning_rate)
        decay = validate.real("weight_decay", step.weight_decay, minimum=0)
        clips = step.clip_norm is not None
        if clips:
            validate.magnitude("clip_norm", step.clip_norm, positive=True)
        elif self._norm_bound(self._template)[1] is None:
            raise ValueError(
                "Expected loss.lipschitz when clip_norm is None, got none. Declare the bound on "
                "the per-example gradient norm, or clip."
            )
        did_clip = bool(self._series["clip_norm"].values)
        if self._num_steps and did_clip is not clips:
            raise UnsupportedRunError(
                f"step {self._num_steps + 1} {'clips' if clips else 'does not clip'} gradients, "
                f"earlier steps {'do' if did_clip else 'do not'}: clip in every step or in none."
            )
        if rate * decay >= 1:
            raise ValueError(
                f"Expected learning_rate * weight_decay < 1, got {rate * decay:g} "
                f"at step {self._num_steps + 1}. Lower one of them."
            )

    def _check_batch(self, batch_index: int | None, batch_rows: int | None) -> None:
        order, step = self._template.batch_order, self._num_steps + 1
        if order is BatchOrder.CYCLIC:
            self._check_turn(batch_index, self._period)
        size, largest = self._template.batch_size, self._template.max_batch_size
        if order is BatchOrder.POISSON:
            if largest is None:
                return
            if batch_rows is None:
                raise TypeError("Expected batch_rows for batches with a cap, got None.")
            if batch_rows > largest:
                raise UnsupportedRunError(
                    f"step {step} used {batch_rows} rows, more than max_batch_size = {largest}."
                )
        elif batch_rows is None:
            if order in (BatchOrder.FULL, BatchOrder.CYCLIC):
                raise TypeError(f"Expected batch_rows for {order.name} batches, got None.")
        elif batch_rows != size:
            raise UnsupportedRunError(
                f"step {step} used {batch_rows} rows, expected batch_size = {size}."
            )

    def _check_steps(self) -> None:
        super()._check_steps()
        if self._num_steps:
            self.event()  # an impossible value raises

    def event(self) -> LastIterateDpEvent:
        """As `Run.event`."""
        self._check_has_steps()
        return attrs.evolve(
            self._template,
            num_steps=self._num_steps,
            release_steps=self.release_steps,
            # No values: not clipped.
            **{name: values.compressed() for name, values in self._series.items()},
        )

    def sampled_rows(self) -> list[tuple[float, float, int]]:
        """The run as rows of Opacus' histories: noise multiplier, sample rate, steps."""
        rate = self._template.sampling_probability
        noise = self._series["noise_multiplier"]
        return [
            (value, rate, steps) for value, steps in zip(noise.values, noise.lengths, strict=True)
        ]

    @classmethod
    def every_iterate(
        cls, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> Guarantee | None:
        """Ordinary composition of the steps, if it covers the order of the batches."""
        return composition_of(event, relation)

    @classmethod
    def line_before(cls, event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
        """Whether the update contracts."""
        return no_contraction_line(event, relation)


RunRecorder = LastIterateRun
"""The public name."""
