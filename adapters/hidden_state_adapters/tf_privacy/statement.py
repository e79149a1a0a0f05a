"""The privacy statement of a run, in the shape of TensorFlow Privacy's."""

from __future__ import annotations

from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    BlockCoordinateDpEvent,
    DiceSgdDpEvent,
    LastIterateAccountant,
    LastIterateDpEvent,
    validate,
)
from hidden_state_accountants.runs.assumptions import OF_EVERY_RUN
from hidden_state_accountants.runs.description import describer_of
from hidden_state_accountants.runs.statement import Statement


def compute_last_iterate_privacy_statement(
    event: LastIterateDpEvent | DiceSgdDpEvent | BlockCoordinateDpEvent,
    delta: float,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
) -> str:
    """Returns what is protected, under which relation and assumptions, and the epsilons, as text.

    The text has the shape of TensorFlow Privacy's compute_dp_sgd_privacy_statement.

    Formal guarantees: those of `LastIterateAccountant` for the event. Besides the epsilon of what
    is released the text gives that of the release of every iterate (ordinary composition), and
    that of another algorithm at the same noise (Poisson sampling), labelled as such. For DiceSGD,
    which releases every iterate, the other algorithm is DP-SGD.

    Args:
        event: The run, declared or recorded by an optimizer, a callback or a model.
        delta: Where epsilon is read, in [0, 1].
        neighboring_relation: The relation of the guarantee.

    Raises:
        UnsupportedRunError: No theorem covers the event under the relation.
        TypeError, ValueError: An argument has an impossible value.
    """
    try:
        describer_of(event)
    except TypeError as error:
        text = f"{error} For a standard event use TensorFlow Privacy's statement."
        raise TypeError(text) from error
    accountant = LastIterateAccountant(validate.neighboring_relation(neighboring_relation))
    guarantee = accountant.compose(event).guarantee
    assumptions = (*OF_EVERY_RUN, *guarantee.assumptions)
    return Statement([event], guarantee, assumptions, delta).paragraphs()
