"""Assumptions of the bounds, once for all of them."""

from __future__ import annotations

import math

from hidden_state_accountants.events.batch_order import EPOCH_ORDERS, BatchOrder, rate_text
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Assumption, Topic

COMMON: tuple[Assumption, ...] = (
    Assumption.declared("one record per person, clipped as one unit", Topic.UNIT),
    # A training loss is a function of the records, and no post-processing of the iterates.
    Assumption.declared(
        "nothing computed from the private records besides the released iterates is seen: no "
        "metrics on the private data",
        Topic.METRICS,
    ),
)
"""What every guarantee of every bound assumes. A bound may say more about the same topic."""

FIXED_RECORDS = Assumption.declared(
    "records and targets do not depend on the model: no pseudo-labels, no adversarial examples, no "
    "hard-example mining"
)
"""What a bound for hidden iterates needs beside: else a record shows an iterate to the next step.

Composition covers records that follow from released iterates, each from itself and them alone.
"""


def fixed_in_advance(what: str) -> Assumption:
    """Nothing about the length of a run and its schedules depends on the records."""
    return Assumption.declared(f"{what} fixed in advance", Topic.FIXED_IN_ADVANCE)


def divisor(batch_size: int) -> Assumption:
    """The divisor is public; under add-or-remove it must not be the number of records itself."""
    return Assumption.declared(
        f"sums of gradients are divided by the constant {batch_size}, which stays the same when "
        "the data set changes",
        Topic.DIVISOR,
    )


def gradient_norm(bound: float) -> Assumption:
    """No gradient is longer than what was declared."""
    return Assumption.declared(f"per-example gradient norms at most {bound:g}", Topic.GRADIENT_NORM)


def batches(event: LastIterateDpEvent | DiceSgdDpEvent, *, are_secret: bool) -> Assumption:
    """Assumption about the batch order; a bound that averages over it needs it to stay secret."""
    chosen = "drawn independently of the data, and never published"
    return Assumption.declared(
        f"{event.batch_order.name} batches of {event.batch_size} of {event.dataset_size} records"
        f"{rate_text(event.sampling_rate)}, "
        + (chosen if are_secret else "chosen independently of the data"),
        Topic.ORDER,
    )


def order_of_hidden_iterates(event: LastIterateDpEvent) -> Assumption:
    """Public where it is fixed; whatever is random has to stay secret."""
    order = event.batch_order
    if order in (BatchOrder.FULL, BatchOrder.CYCLIC):
        return Assumption.public("order of the batches", Topic.ORDER)
    if order in EPOCH_ORDERS:
        text = (
            "the order is uniform, does not depend on the data, and neither the order nor its seed "
            "is ever published"
        )
        return Assumption.declared(f"{order.name}: {text}", Topic.ORDER)
    return batches(event, are_secret=True)


def of_hidden_iterates(event: LastIterateDpEvent) -> tuple[Assumption, ...]:
    """Assumptions of a bound for hidden iterates that are declared by whoever wrote the event."""
    assumptions = [
        Assumption.declared(
            f"per-example loss, of every record that the data could have: {event.loss!r}",
            Topic.LOSS,
        ),
        FIXED_RECORDS,
        Assumption.declared(
            "only the released iterates are seen: no averages of iterates, no optimizer state",
            Topic.RELEASES,
        ),
        fixed_in_advance("number of steps, schedules and released steps"),
        divisor(event.batch_size),
    ]
    if event.domain_diameter < math.inf:
        assumptions.append(
            Assumption.declared(
                "every iterate is projected on a convex set of diameter "
                f"{event.domain_diameter:g} that contains the initial model",
                Topic.DOMAIN,
            )
        )
    if event.prox_strong_convexity:
        assumptions.append(
            Assumption.declared(
                "after the noise of every step acts the proximal map, with that step's learning "
                f"rate, of a public, {event.prox_strong_convexity:g}-strongly convex regulariser",
                Topic.REGULARISER,
            )
        )
    return (
        *assumptions,
        order_of_hidden_iterates(event),
        Assumption.public("batch size, hyper-parameters", Topic.HYPER_PARAMETERS),
    )


# What the user of every adapter declares

ONE_EXAMPLE = Assumption.declared(
    "one record = one example, no view, window or augmentation of it a second time, no mixing of "
    "two records"
)
PUBLIC_CALLS = Assumption.declared(
    "only the public calls touch the run: nothing writes model, records, generators or private "
    "attributes behind it"
)
OWN_FUNCTIONS = Assumption.declared(
    "functions, layers and generators that you pass do what they say, in every step"
)
CHOICES = Assumption.declared(
    "hyper-parameters, initial weights, frozen layers, order of the records and number of steps do "
    "not depend on the records: nothing was tuned on them, and no weights were trained on them "
    "before, unless by the runs that are composed here"
)
OF_EVERY_RUN = (ONE_EXAMPLE, PUBLIC_CALLS, OWN_FUNCTIONS, CHOICES)
"""The lines that the guarantee of every training run lists, beside those of its bound."""
