"""The privacy statement of a run."""

from __future__ import annotations

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    BlockCoordinateDpEvent,
    DiceSgdDpEvent,
    LastIterateAccountant,
    LastIterateDpEvent,
    validate,
)
from hidden_state_accountants.bounds.assumptions import OF_EVERY_RUN
from hidden_state_accountants.runs.statement import description_of, privacy_statement


def compute_last_iterate_privacy_statement(
    event: LastIterateDpEvent | DiceSgdDpEvent | BlockCoordinateDpEvent,
    delta: float,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
) -> str:
    """Returns what is protected, under which relation and assumptions, and the epsilons, as text.

    Formal guarantees: those of `LastIterateAccountant` for the event. Beside the epsilon of what
    is released the text gives that of the release of every iterate (ordinary composition).

    Args:
        event: The run, declared or recorded by an optimizer, a callback or a model.
        delta: Probability where epsilon is read, in [0, 1].
        neighboring_relation: The relation of the guarantee.

    Raises:
        UnsupportedRunError: No theorem covers the event under the relation.
        TypeError, ValueError: An argument has an impossible value.
    """
    try:
        description_of(event)
    except TypeError as error:
        text = f"{error} For a standard event use TensorFlow Privacy's statement."
        raise TypeError(text) from error
    accountant = LastIterateAccountant(validate.neighboring_relation(neighboring_relation))
    guarantee = accountant.compose(event).guarantee
    guarantee = attrs.evolve(guarantee, assumptions=(*OF_EVERY_RUN, *guarantee.assumptions))
    return privacy_statement([event], guarantee, delta)
