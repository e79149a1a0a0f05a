"""The privacy statement of a run, in the shape of TensorFlow Privacy's."""

from __future__ import annotations

import textwrap

from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    BlockCoordinateDpEvent,
    DiceSgdDpEvent,
    Guarantee,
    LastIterateAccountant,
    LastIterateDpEvent,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy.statement_parts import (
    block_coordinate_parts,
    dice_parts,
    last_iterate_parts,
)

_MEANING = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "one example is added or removed",
    NeighboringRelation.REPLACE_ONE: "one example is replaced by another",
    NeighboringRelation.REPLACE_SPECIAL: (
        "one example is replaced by one with zero gradient, which is add-or-remove-one with the "
        "number of examples fixed and public"
    ),
}
_HEADINGS = {
    Status.CHECKED: "Checked",
    Status.DECLARED: "Declared (your word)",
    Status.PUBLIC: "Public",
}


Run = LastIterateDpEvent | DiceSgdDpEvent | BlockCoordinateDpEvent


def compute_last_iterate_privacy_statement(
    event: Run,
    delta: float,
    neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
) -> str:
    """What is protected, under which relation and assumptions, and the epsilons, as text.

    The text has the shape of TensorFlow Privacy's compute_dp_sgd_privacy_statement.

    Formal guarantees: those of `LastIterateAccountant` for the event. Besides the epsilon of what
    is released the text gives that of the release of every iterate (ordinary composition), and
    that of another algorithm at the same noise (Poisson sampling), labelled as such. For DiceSGD,
    which releases every iterate, the other algorithm is DP-SGD.

    Args:
        event: The run, declared or recorded by an optimizer, a callback or a recorder.
        delta: Where epsilon is read, in [0, 1].
        neighboring_relation: The relation of the guarantee.

    Raises:
        UnsupportedRunError: No theorem covers the event under the relation.
        TypeError, ValueError: An argument has an impossible value.
    """
    if not isinstance(event, Run):
        raise TypeError(
            "Expected event to be a LastIterateDpEvent, DiceSgdDpEvent or BlockCoordinateDpEvent, "
            f"got {type(event).__name__}. For a standard event use TensorFlow Privacy's statement."
        )
    accountant = LastIterateAccountant(validate.neighboring_relation(neighboring_relation))
    guarantee = accountant.compose(event).guarantee
    return statement(event, guarantee, guarantee.assumptions, validate.target_delta(delta))


def statement(
    event: Run,
    guarantee: Guarantee,
    assumptions: tuple[Assumption, ...],
    delta: float,
    microbatch: int = 1,
) -> str:
    """As `compute_last_iterate_privacy_statement`, for a guarantee that is known already.

    Args:
        event: The run.
        guarantee: Of it.
        assumptions: What has to be true.
        delta: Where epsilon is read.
        microbatch: Examples in a microbatch, which is a record of the event.
    """
    relation = guarantee.neighboring_relation
    if isinstance(event, DiceSgdDpEvent):
        parts = dice_parts(event)
    elif isinstance(event, BlockCoordinateDpEvent):
        parts = block_coordinate_parts(event)
    else:
        parts = last_iterate_parts(event, microbatch)
    figures: list[tuple[str, float | None]] = [(parts.released, guarantee.epsilon(delta))]
    figures += [(label, _composed(run, of, delta)) for label, run, of in parts.others(relation)]
    lines = [
        _wrapped(
            f"Example-level DP with {relation.name} adjacency ({_MEANING[relation]}) at delta = "
            f"{delta}, computed by {guarantee.theorem}:"
        ),
        *(_line(label, epsilon) for label, epsilon in figures),
    ]
    paragraphs = [_wrapped(parts.run), _wrapped(parts.protects), "\n".join(lines)]
    if guarantee.caveat:
        paragraphs.append(_wrapped(f"NOT PROVEN: {guarantee.caveat}"))
    for status, heading in _HEADINGS.items():
        texts = [a.text for a in assumptions if a.status is status]
        if texts:
            paragraphs.append("\n".join([f"{heading}:", *map(_item, texts)]))
    paragraphs.append(
        _wrapped(
            "No user-level privacy guarantee is possible without a bound on the number of examples "
            "per user."
        )
    )
    if parts.footnote:
        paragraphs.append(_wrapped(parts.footnote))
    return "\n\n".join(paragraphs) + "\n"


def _composed(
    event: LastIterateDpEvent | None, relation: NeighboringRelation, delta: float
) -> float | None:
    """The epsilon with every iterate released, if there is one."""
    if event is None:
        return None
    # The relation is folded into the noise of the standard event.
    accountant = LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    try:
        return accountant.compose(event.as_composition(relation)).get_epsilon(delta)
    except UnsupportedRunError:
        return None


def _line(text: str, epsilon: float | None) -> str:
    return f"    {text:<50} " + ("  not computed" if epsilon is None else f"{epsilon:14.3f}")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, width=80)


def _item(text: str) -> str:
    return textwrap.fill(text, width=80, initial_indent="  - ", subsequent_indent="    ")
