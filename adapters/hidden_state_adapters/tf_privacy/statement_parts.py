"""What the privacy statement says of each kind of run."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    BatchOrder,
    BlockCoordinateDpEvent,
    DiceSgdDpEvent,
    LastIterateDpEvent,
    Schedule,
)

Others = list[tuple[str, LastIterateDpEvent | None, NeighboringRelation]]
_RELEASED_MODEL = "Epsilon of the released model (last iterate):"
_UNPROTECTED = (
    "averages of iterates, optimizer state, or losses and metrics of the training data or of "
    "intermediate models."
)


@attrs.frozen
class Parts:
    """The texts of one run.

    Attributes:
        run: What ran.
        protects: What is protected and what is not.
        released: The label of the guarantee's epsilon.
        others: Maps the relation of the guarantee to further figures: the label, the run whose
            iterates are all released (None if there is none), and its relation.
        footnote: About the others.
    """

    run: str
    protects: str
    released: str
    others: Callable[[NeighboringRelation], Others]
    footnote: str = ""


def last_iterate_parts(event: LastIterateDpEvent, microbatch: int) -> Parts:
    """Of plain noisy SGD; a record of the event holds `microbatch` examples."""

    def others(relation: NeighboringRelation) -> Others:
        figures: Others = [("Epsilon if all checkpoints are released:", event, relation)]
        if has_other:
            label = "Epsilon of ANOTHER algorithm, Poisson batches (*):"
            figures.append((label, _poisson(event), NeighboringRelation.ADD_OR_REMOVE_ONE))
        return figures

    has_other = event.batch_order not in (BatchOrder.POISSON, BatchOrder.FULL)
    footnote = (
        "(*) Not this run. It draws every batch anew with Poisson sampling, at the same noise, and "
        "releases all checkpoints; its figure is for ADD_OR_REMOVE_ONE adjacency. A run over fixed "
        "batches must not be reported with it."
    )
    return Parts(
        run=_run_text(event, microbatch),
        protects=_released_text(event),
        released=_RELEASED_MODEL,
        others=others,
        footnote=footnote if has_other else "",
    )


def _poisson(event: LastIterateDpEvent) -> LastIterateDpEvent | None:
    if isinstance(event.noise_multiplier, Schedule) or isinstance(event.clip_norm, Schedule):
        return None  # one subsampled mechanism for every value: slow
    return attrs.evolve(event, batch_order=BatchOrder.POISSON, record_position=None)


def _run_text(event: LastIterateDpEvent, microbatch: int) -> str:
    clip = "no clipping" if event.clip_norm is None else f"clip norm {_range(event, 'clip_norm')}"
    halved, grouped = "", "without microbatching"
    if microbatch > 1:
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
        f"order, noise multiplier {_range(event, 'noise_multiplier')}{halved}, {clip}, learning "
        f"rate "
        f"{_range(event, 'learning_rate')}, weight decay {_range(event, 'weight_decay')} and "
        f"{projection}, for {event.num_steps} iterations "
        f"({event.num_steps / event.batches_per_epoch:g} epochs) {grouped}."
    )


def _released_text(event: LastIterateDpEvent) -> str:
    steps = event.release_steps
    if not steps:
        also = ""
    elif len(steps) <= 6:
        also = f", and of the models after iterations {', '.join(map(str, steps))}"
    else:
        also = f", and of {len(steps)} earlier models (iterations {steps[0]} to {steps[-1]})"
    return (
        f"This privacy guarantee protects the release of the final model{also}. It does not "
        "protect other checkpoints, " + _UNPROTECTED
    )


def _range(event: LastIterateDpEvent, name: str) -> str:
    values = event.per_step(name)
    low, high = float(values.min()), float(values.max())
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


def dice_parts(event: DiceSgdDpEvent) -> Parts:
    """Of DiceSGD, of which every iterate is released."""
    clip = "normalised to" if event.automatic else "clip norm"
    plain = LastIterateDpEvent(
        noise_multiplier=event.noise_std * event.batch_size / event.clip_norm,
        learning_rate=1.0,
        clip_norm=event.clip_norm,
        batch_size=event.batch_size,
        dataset_size=event.dataset_size,
        num_steps=event.num_steps,
        batch_order=event.batch_order,
    )
    return Parts(
        run=(
            f"DiceSGD performed over {event.dataset_size} examples with {event.batch_size} "
            f"examples per iteration in {event.batch_order.value} order, noise multiplier "
            f"{plain.noise_multiplier:.6g}, gradients {clip} {event.clip_norm:g}, error {clip} "
            f"{event.error_clip_norm:g}, for {event.num_steps} iterations "
            f"({event.num_steps / event.batches_per_epoch:g} epochs) without microbatching."
        ),
        protects=(
            "This privacy guarantee protects the release of all model checkpoints in addition to "
            "the final model, and of all that is computed from them. It does not protect the "
            "error of the feedback, or losses and metrics of the training data."
        ),
        released="Epsilon of all released models:",
        others=lambda relation: [("Epsilon of ANOTHER algorithm, DP-SGD (*):", plain, relation)],
        footnote=(
            "(*) Not this run: DP-SGD with the same batches, clip norm and noise, without error "
            "feedback. DiceSGD must not be reported with it."
        ),
    )


def block_coordinate_parts(event: BlockCoordinateDpEvent) -> Parts:
    """Of noisy mini-batch block coordinate descent."""
    variances = event.noise_variances()
    low, high = float(variances.min()), float(variances.max())
    variance = f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
    return Parts(
        run=(
            f"Noisy block coordinate descent performed over {event.dataset_size} examples with "
            f"{event.batch_size} examples per iteration in cyclic order on {event.num_blocks} "
            f"block(s), noise variance {variance}, gradient sensitivity "
            f"{event.gradient_sensitivity:g}, step size {event.step_size:g}, for "
            f"{event.num_steps} iterations ({event.num_epochs} epochs) without microbatching."
        ),
        protects=(
            "This privacy guarantee protects the release of the blocks after the last iteration. "
            "It does not protect hidden variables, earlier blocks, " + _UNPROTECTED
        ),
        released=_RELEASED_MODEL,
        others=lambda relation: [],
    )
