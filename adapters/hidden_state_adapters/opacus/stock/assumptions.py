"""What is known about a run of a stock engine, and what is taken on trust."""

from __future__ import annotations

from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, BatchOrder
from hidden_state_adapters.opacus.data.reading import LoaderReading
from hidden_state_adapters.opacus.stock.coins import has_own_coins

_SECRETS = {
    BatchOrder.SHUFFLED_ONCE: "the order of the records was drawn uniformly; nobody ever learns it "
    "or its seed",
    BatchOrder.RESHUFFLED: "nobody ever learns the orders of the batches, or the seed of torch's "
    "generator that drew them",
    BatchOrder.POISSON: "nobody ever learns which records were drawn, or the sizes of the batches",
}
_SEED = (
    "nobody ever learns the seed of the generator that drew the Poisson batches, which gives no "
    "other numbers"
)
OWN_COINS = Assumption.checked(
    "Poisson batches drawn by a generator of the run's own, whose state the operating system drew "
    "and no seed of the program reaches"
)


def batch_assumptions(
    reading: LoaderReading, order: BatchOrder, relation: NeighboringRelation
) -> tuple[Assumption, ...]:
    """What was read about the batches and is followed in every step, and who knows them."""
    texts = [_SECRETS[order]] if order in _SECRETS else []
    are_own = has_own_coins(reading.sampler)
    if order is BatchOrder.POISSON and not are_own:
        texts.append(_SEED)
    if order is BatchOrder.POISSON and relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        texts.append("the sampling rate and the divisor of the batches are public constants")
    return (
        Assumption.checked(f"the loader deals {reading.description}; one step for each batch"),
        *([OWN_COINS] if are_own else []),
        *(Assumption.declared(text) for text in texts),
    )


def unseen(*, radius: float | None, is_ghost: bool) -> tuple[Assumption, ...]:
    """What the accountant of a stock engine cannot see.

    Args:
        radius: Of the ball around 0 on which the user projects, or None.
        is_ghost: Whether Opacus' ghost clipping hides the rows.
    """
    outside = "parameters changed by the private optimizer only"
    if radius is not None:
        outside += (
            ", except that the user puts all of them together back into the ball of radius "
            f"{radius:g} around 0 after every step"
        )
    texts = [
        "every per-example gradient is that of the loss at one record of the delivered batch",
        "the initial model and the order of the records do not depend on the records",
        outside,
    ]
    if is_ghost:
        texts.append(
            "with Opacus' ghost clipping: the loss has one entry per record, and gradients come "
            "from it through the layers alone (no penalty, no hook on a layer), once per batch; "
            "p.grad is left alone between backward() and step()"
        )
    return tuple(Assumption.declared(text) for text in texts)
