"""A run of noisy SGD of which the last iterate is released, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.bounds.composition import Composition
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.runs.base import Run, Step, check_covered, check_in_bound
from hidden_state_accountants.runs.contraction import no_contraction_line
from hidden_state_accountants.runs.descriptions.base import Description
from hidden_state_accountants.runs.descriptions.last_iterate import description
from hidden_state_accountants.runs.run_lengths import RunLengths

_DECLARED = (
    "batch_order",
    "batch_size",
    "dataset_size",
    "loss",
    "prox_strong_convexity",
    "domain_diameter",
    "sampling_rate",
    "max_batch_size",
    "is_microbatched",
)
_FIELDS = ("noise_multiplier", "learning_rate", "clip_norm", "weight_decay")


class LastIterateRun(Run):
    """Records a run step by step and checks the batches against the declared order.

    A step costs O(1) time; constant hyper-parameters cost O(1) memory however long the run is.
    It is public as `hidden_state_accountants.RunRecorder`.

    Args:
        batch_order: A `BatchOrder` or its value.
        batch_size: b, the divisor and, unless POISSON, the number of rows of every batch.
        dataset_size: n.
        loss: See `LastIterateDpEvent`, as are the others.
        prox_strong_convexity: Of the regulariser whose proximal map acts after every step.
        domain_diameter: inf if the iterates are not projected.
        sampling_rate: POISSON only.
        max_batch_size: POISSON only.
        is_microbatched: Whether a record is a microbatch of several examples.

    Raises:
        TypeError, ValueError: As `LastIterateDpEvent`.
    """

    event_type = LastIterateDpEvent

    def __init__(
        self,
        *,
        batch_order: BatchOrder | str,
        batch_size: int,
        dataset_size: int,
        loss: LossGeometry | None = None,
        prox_strong_convexity: float = 0.0,
        domain_diameter: float = math.inf,
        sampling_rate: float | None = None,
        max_batch_size: int | None = None,
        is_microbatched: bool = False,
    ):
        # The constructor of the event is the one place that knows what is valid.
        template = LastIterateDpEvent(
            noise_multiplier=1.0,
            learning_rate=0.0,
            clip_norm=1.0,
            batch_size=batch_size,
            dataset_size=dataset_size,
            num_steps=1,
            batch_order=batch_order,  # type: ignore[arg-type]
            loss=loss,
            prox_strong_convexity=prox_strong_convexity,
            domain_diameter=domain_diameter,
            sampling_rate=sampling_rate,
            max_batch_size=max_batch_size,
            is_microbatched=is_microbatched,
        )
        super().__init__(template)
        self._period = (
            template.batches_per_epoch if template.batch_order is BatchOrder.CYCLIC else 1
        )
        self._runs = {name: RunLengths() for name in _FIELDS}
        self._clips: bool | None = None
        self._last: tuple[float, float, float | None, float] | None = None

    @property
    def expected_batch_index(self) -> int:
        """The index within the epoch that the next batch must have."""
        return self._num_steps % self._period

    def step(
        self,
        *,
        noise_multiplier: float,
        learning_rate: float,
        clip_norm: float | None,
        weight_decay: float = 0.0,
        batch_index: int | None = None,
        batch_rows: int | None = None,
    ) -> None:
        """Records one logical step, with the values that the step really used; see `add`.

        Args:
            noise_multiplier: Noise std on the sum over clip_norm.
            learning_rate: The step size that is about to be applied.
            clip_norm: None if gradients are not clipped.
            weight_decay: Decoupled.
            batch_index: Index of the batch within the epoch; required for CYCLIC.
            batch_rows: Rows of the logical batch; required for FULL and CYCLIC.

        Raises:
            UnsupportedRunError: The batch is not the declared one; nothing is recorded.
            TypeError, ValueError: A hyper-parameter has an impossible value.
        """
        self.add(
            Step(
                noise_multiplier=noise_multiplier,
                learning_rate=learning_rate,
                clip_norm=clip_norm,
                weight_decay=weight_decay,
                batch=batch_index,
                rows=batch_rows,
            )
        )

    def _take(self, step: Step) -> None:
        self._check_batch(step.batch, step.rows)
        loss = self._template.loss
        bound = math.inf if loss is None or loss.lipschitz is None else loss.lipschitz
        where = f"of step {self._num_steps + 1}"
        check_in_bound("loss.lipschitz", bound, step.largest_norm, where)
        arguments = (step.noise_multiplier, step.learning_rate, step.clip_norm, step.weight_decay)
        if arguments != self._last:
            self._check_values(*arguments)
            self._last = arguments
        for runs, value in zip(self._runs.values(), arguments, strict=True):
            if value is not None:
                runs.append(float(value))

    def _check_values(
        self,
        noise_multiplier: float,
        learning_rate: float,
        clip_norm: float | None,
        weight_decay: float,
    ) -> None:
        validate.magnitude("noise_multiplier", noise_multiplier)
        rate = validate.magnitude("learning_rate", learning_rate)
        decay = validate.real("weight_decay", weight_decay, minimum=0)
        loss = self._template.loss
        if clip_norm is not None:
            validate.magnitude("clip_norm", clip_norm, positive=True)
        elif loss is None or loss.lipschitz is None:
            raise ValueError(
                "Expected loss.lipschitz when clip_norm is None, got none. Declare the bound on "
                "the per-example gradient norm, or clip."
            )
        if self._clips is not None and self._clips is not (clip_norm is not None):
            raise UnsupportedRunError(
                f"step {self._num_steps + 1} "
                f"{'clips' if clip_norm is not None else 'does not clip'} gradients, earlier steps "
                f"{'do' if self._clips else 'do not'}: clip in every step or in none."
            )
        if rate * decay >= 1:
            raise ValueError(
                f"Expected learning_rate * weight_decay < 1, got {rate * decay:g} "
                f"at step {self._num_steps + 1}. Lower one of them."
            )
        self._clips = clip_norm is not None

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

    def event(self) -> LastIterateDpEvent:
        """As `Run.event`."""
        self._check_has_steps()
        return attrs.evolve(
            self._template,
            num_steps=self._num_steps,
            release_steps=self.release_steps,
            # No values: not clipped.
            **{name: r.compressed() if r.values else None for name, r in self._runs.items()},
        )

    def check_relation(self, relation: NeighboringRelation | str) -> None:
        """Raises UnsupportedRunError if no theorem covers the declared order under `relation`."""
        check_covered(self._template, relation)

    def sampled_rows(self) -> list[tuple[float, float, int]]:
        """The run as rows of Opacus' histories: noise multiplier, sample rate, steps."""
        rate = self._template.sampling_probability
        noise = self._runs["noise_multiplier"]
        return [
            (value, rate, steps) for value, steps in zip(noise.values, noise.lengths, strict=True)
        ]

    @classmethod
    def describe(
        cls,
        event: LastIterateDpEvent,
        relation: NeighboringRelation,
        delta: float,
        notes: Mapping[str, Any],
    ) -> Description:
        """As `Run.describe`.

        Of the notes it reads `microbatch`, the examples of a record, and `update`, what is said of
        an update that is not the event's.
        """
        return description(
            event, relation, notes.get("microbatch", 1), update=notes.get("update", "")
        )

    @classmethod
    def every_iterate(
        cls, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> Guarantee | None:
        """Ordinary composition of the steps, if it covers the order of the batches."""
        bound = Composition()
        return None if bound.check(event, relation) else bound.guarantee(event, relation)

    @classmethod
    def line_before(cls, event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
        """Whether the update contracts."""
        return no_contraction_line(event, relation)

    def _declared(self) -> dict[str, Any]:
        declared = self._template.to_dict()
        return {name: value for name, value in declared.items() if name not in _FIELDS}

    @classmethod
    def _of_declared(cls, declared: Mapping[str, Any]) -> LastIterateRun:
        event = LastIterateDpEvent.from_dict(
            {**declared, "noise_multiplier": 1.0, "learning_rate": 0.0, "clip_norm": 1.0}
        )
        return cls(**{name: getattr(event, name) for name in _DECLARED})

    def _steps_state(self) -> dict[str, Any]:
        return {"runs": {name: runs.state_dict() for name, runs in self._runs.items()}}

    def _load_steps(self, state: Mapping[str, Any]) -> None:
        stored = state.get("runs")
        if not isinstance(stored, Mapping):
            raise ValueError(f"The state is damaged: expected runs of values, got {stored!r}.")
        runs = {name: RunLengths.of_state(name, stored.get(name)) for name in _FIELDS}
        for name, values in runs.items():
            covered = sum(values.lengths)
            if covered != self._num_steps and not (name == "clip_norm" and covered == 0):
                raise ValueError(
                    f"The state is damaged: {name} covers {covered} of {self._num_steps} steps."
                )
        self._runs = runs
        self._clips = bool(runs["clip_norm"].lengths) if self._num_steps else None
        if self._num_steps:
            self.event()  # an impossible value raises


RunRecorder = LastIterateRun
"""The public name."""
