"""A run of noisy SGD of which the last iterate is released, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.composition import Composition
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder, rate_text
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    sampled_process,
    unmet_conditions,
)
from hidden_state_accountants.runs.base import Run, Step, check_covered, check_in_bound
from hidden_state_accountants.runs.description import (
    UNPROTECTED,
    Description,
    Other,
    range_of,
)

_WITHOUT_OTHER = (BatchOrder.POISSON, BatchOrder.FULL)
_MOST_RELEASES = 6  # that are listed one by one
_STEPS_LOOKED_AHEAD, _DELTA = 50_000, 1e-5
_EQUALS_COMPOSITION = "no contraction: epsilon equals composition (each epoch counts)"


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
    declares = (
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
    series = ("noise_multiplier", "learning_rate", "clip_norm", "weight_decay")
    of_one_step: ClassVar = {
        "noise_multiplier": 1.0,
        "learning_rate": 0.0,
        "clip_norm": 1.0,
        "weight_decay": 0.0,
        "num_steps": 1,
    }

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
        super().__init__(
            batch_order=batch_order,
            batch_size=batch_size,
            dataset_size=dataset_size,
            loss=loss,
            prox_strong_convexity=prox_strong_convexity,
            domain_diameter=domain_diameter,
            sampling_rate=sampling_rate,
            max_batch_size=max_batch_size,
            is_microbatched=is_microbatched,
        )

    @property
    def _period(self) -> int:
        own = self._template
        return own.batches_per_epoch if own.batch_order is BatchOrder.CYCLIC else 1

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

    def _check(self, step: Step) -> None:
        self._check_batch(step.batch, step.rows)
        loss = self._template.loss
        bound = math.inf if loss is None or loss.lipschitz is None else loss.lipschitz
        where = f"of step {self._num_steps + 1}"
        check_in_bound("loss.lipschitz", bound, step.largest_norm, where)
        values = tuple(getattr(step, name) for name in self.series)
        if values != tuple(r.values[-1] if r.values else None for r in self._series.values()):
            self._check_values(*values)

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
        did_clip = bool(self._series["clip_norm"].values)
        if self._num_steps and did_clip is not (clip_norm is not None):
            raise UnsupportedRunError(
                f"step {self._num_steps + 1} "
                f"{'clips' if clip_norm is not None else 'does not clip'} gradients, earlier steps "
                f"{'do' if did_clip else 'do not'}: clip in every step or in none."
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

    def event(self) -> LastIterateDpEvent:
        """As `Run.event`."""
        self._check_has_steps()
        return attrs.evolve(
            self._template,
            num_steps=self._num_steps,
            release_steps=self.release_steps,
            # No values: not clipped.
            **{name: r.compressed() if r.values else None for name, r in self._series.items()},
        )

    def check_relation(self, relation: NeighboringRelation | str) -> None:
        """Raises UnsupportedRunError if no theorem covers the declared order under `relation`."""
        check_covered(self._template, relation)

    def sampled_rows(self) -> list[tuple[float, float, int]]:
        """The run as rows of Opacus' histories: noise multiplier, sample rate, steps."""
        rate = self._template.sampling_probability
        noise = self._series["noise_multiplier"]
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
        # With Poisson batches there is no other algorithm; a full batch is not a sample. Nobody
        # adds or removes microbatches.
        has_other = not (event.is_microbatched or event.batch_order in _WITHOUT_OTHER)
        other = Other(
            "Epsilon of ANOTHER algorithm, Poisson batches (*):",
            _with_poisson_batches(event),
            NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
        footnote = (
            "(*) Not this run. It draws every batch anew with Poisson sampling, at the same noise, "
            "and releases all checkpoints; its figure is for ADD_OR_REMOVE_ONE adjacency. A run "
            "over fixed batches must not be reported with it."
        )
        return Description(
            title="Privacy of the released model",
            facts=_facts(event, relation, notes.get("update", "")),
            run=_run_text(event, notes.get("microbatch", 1)),
            protects=_released_text(event),
            others=(other,) if has_other else (),
            footnote=footnote if has_other else "",
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

    def _steps_state(self) -> dict[str, Any]:
        return {"runs": super()._steps_state()}

    def _load_steps(self, state: Mapping[str, Any]) -> None:
        stored = state.get("runs")
        if not isinstance(stored, Mapping):
            raise ValueError(f"The state is damaged: expected runs of values, got {stored!r}.")
        super()._load_steps(stored)
        if self._num_steps:
            self.event()  # an impossible value raises


def process_of(event: LastIterateDpEvent, relation: NeighboringRelation) -> NoisyProcess | None:
    """The contractive process of a run; of random batches that with batches of b records."""
    if unmet_conditions(event, relation, tuple(BatchOrder)):
        return None
    if event.batch_order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        return sampled_process(event, relation, event.batch_size)
    return noisy_process(event, relation)


def _with_poisson_batches(event: LastIterateDpEvent) -> LastIterateDpEvent | None:
    if isinstance(event.noise_multiplier, Schedule) or isinstance(event.clip_norm, Schedule):
        return None  # one subsampled mechanism for every value: slow
    return attrs.evolve(event, batch_order=BatchOrder.POISSON, record_position=None)


def _facts(
    event: LastIterateDpEvent, relation: NeighboringRelation, update: str
) -> tuple[tuple[str, str], ...]:
    contraction, ratio = "unknown (no loss geometry declared)", "-"
    process = process_of(event, relation)
    if process is not None:
        contraction = f"c = {range_of(process.contraction)}"
        acts = process.sensitivity > 0
        if acts.any():
            ratio = range_of(process.noise_std[acts] / process.sensitivity[acts])
    released = ", ".join(map(str, event.release_steps[:_MOST_RELEASES]))
    if len(event.release_steps) > _MOST_RELEASES:
        released += f", ... ({len(event.release_steps)} in all)"
    radius = event.domain_diameter / 2
    projection = f"radius {radius:g}" if radius < math.inf else "no projection"
    clip = "none" if event.clip_norm is None else range_of(event.per_step("clip_norm"))
    rate, decay = (range_of(event.per_step(name)) for name in ("learning_rate", "weight_decay"))
    return (
        ("released", f"the last iterate{f', and after steps {released}' if released else ''}"),
        (
            "run",
            f"{event.num_steps} steps x {event.batch_size} of {event.dataset_size} records"
            f"{rate_text(event.sampling_rate)}, "
            f"{event.batch_order.value} ({event.num_steps / event.batches_per_epoch:g} epochs)",
        ),
        (
            "update",
            update
            or f"{contraction}; learning rate {rate}, weight decay {decay}{_prox(event)}, "
            f"{projection}",
        ),
        (
            "noise",
            f"multiplier {range_of(event.per_step('noise_multiplier'))}, clip norm {clip}, "
            f"noise/sensitivity {ratio}",
        ),
    )


def _prox(event: LastIterateDpEvent) -> str:
    if not event.prox_strong_convexity:
        return ""
    return f", prox of a {event.prox_strong_convexity:g}-strongly convex regulariser"


def _run_text(event: LastIterateDpEvent, microbatch: int) -> str:
    clip = "no clipping"
    if event.clip_norm is not None:
        clip = f"clip norm {range_of(event.per_step('clip_norm'))}"
    halved, grouped = "", "without microbatching"
    if microbatch > 1:
        if not event.is_microbatched:
            halved = " (half of the optimizer's, because microbatches double the sensitivity)"
        grouped = f"with microbatches of {microbatch}"
    diameter = event.domain_diameter
    projection = (
        f"projection on a convex set of diameter {diameter:g}"
        if diameter < math.inf
        else "no projection"
    )
    return (
        f"Noisy gradient descent performed over {event.dataset_size * microbatch} examples with "
        f"{event.batch_size * microbatch} examples per iteration in {event.batch_order.value} "
        f"order{rate_text(event.sampling_rate)}, "
        f"noise multiplier {range_of(event.per_step('noise_multiplier'))}{halved}, {clip}, "
        f"learning rate {range_of(event.per_step('learning_rate'))}, weight decay "
        f"{range_of(event.per_step('weight_decay'))}{_prox(event)} and {projection}, for "
        f"{event.num_steps} "
        f"iterations ({event.num_steps / event.batches_per_epoch:g} epochs) {grouped}."
    )


def _released_text(event: LastIterateDpEvent) -> str:
    steps = event.release_steps
    if not steps:
        also = ""
    elif len(steps) <= _MOST_RELEASES:
        also = f", and of the models after iterations {', '.join(map(str, steps))}"
    else:
        also = f", and of {len(steps)} earlier models (iterations {steps[0]} to {steps[-1]})"
    return (
        f"This privacy guarantee protects the release of the final model{also}. It does not "
        "protect other checkpoints, " + UNPROTECTED
    )


def no_contraction_line(event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
    """One line on a run whose update does not contract; empty if it does or is projected.

    The run is looked at for ten epochs, or fewer if that is more than 50,000 steps.

    Args:
        event: One step of the run with its first hyper-parameters.
        relation: The neighbouring relation.
    """
    process = process_of(event, relation)
    if process is None:
        return f"{_EQUALS_COMPOSITION}; no loss geometry is declared"
    c = float(process.contraction[0])
    if c < 1 or event.domain_diameter < math.inf:
        return ""
    reason = (
        f"one step stretches distances by up to c = {c:.6g}"
        if c > 1
        else "the update does not shrink distances (c = 1)"
    )
    if event.batch_order not in (BatchOrder.CYCLIC, BatchOrder.FULL):
        return (
            f"no contraction: {reason}; what the secret order gains is in get_epsilon (assuming "
            "the first step's hyper-parameters)"
        )
    epochs = min(10, _STEPS_LOOKED_AHEAD // event.batches_per_epoch)
    if epochs < 2:  # within one epoch the last batch always costs as much as under composition
        return f"no contraction: {reason} (assuming the first step's hyper-parameters)"
    ahead = attrs.evolve(event, num_steps=epochs * event.batches_per_epoch)
    last = best_guarantee(ahead, relation).epsilon(_DELTA)
    composition = Composition()
    gain = 1.0
    if not composition.check(ahead, relation):
        every = composition.guarantee(ahead, relation).epsilon(_DELTA)
        gain = last / every if 0 < every < math.inf else 1.0
    assuming = f"assuming delta = {_DELTA:g} and the first step's hyper-parameters"
    if gain > 0.999:
        return f"{_EQUALS_COMPOSITION}; {reason} ({assuming})"
    return (
        f"no contraction: {reason}; after {epochs} epochs epsilon is {text_up(gain, 3)} times that "
        f"of composition, thanks to the noise of the other batches only ({assuming})"
    )


RunRecorder = LastIterateRun
"""The public name."""
