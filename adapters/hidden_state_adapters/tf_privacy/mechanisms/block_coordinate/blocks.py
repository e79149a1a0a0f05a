"""Blocks of variables, whatever makes the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.guards.step import check_variables
from hidden_state_adapters.tf_privacy.refusals import refusal

Blocks = tuple[tuple[Any, ...], ...]


def blocks_of(given: Any, trained: Sequence[Any] = ()) -> Blocks:
    """The blocks of a list of lists, of one list of variables, or of a function that returns one.

    Args:
        given: The blocks; None for one of all that is trained.
        trained: The variables whose places may stand for them.

    Raises:
        UnsupportedRunError: It is neither.
    """
    items = given() if callable(given) else given
    if items is None:
        items = list(trained)
    items = list(items) if isinstance(items, list | tuple) else [items]
    nested = [isinstance(item, list | tuple) for item in items]
    if any(nested) and not all(nested):
        raise refusal("Expected a list of variables or a list of such lists, got both in one list.")
    blocks = items if any(nested) else [items]

    def variable(item: Any) -> Any:
        if isinstance(item, int) and 0 <= item < len(trained):
            return trained[item]
        return keras_api.tensor_of(item)

    return tuple(tuple(map(variable, block)) for block in blocks)


def places_of(blocks: Blocks, trained: Sequence[Any]) -> list[list[int]]:
    """The places of the variables of blocks among those that are trained, which they all are.

    Raises:
        UnsupportedRunError: They are others, or not each of them once.
    """
    check_blocks(blocks)
    check_together(blocks, trained)
    places = {variable.ref(): place for place, variable in enumerate(trained)}
    return [[places[variable.ref()] for variable in block] for block in blocks]


def check_blocks(blocks: Blocks) -> None:
    """Raises UnsupportedRunError unless every block has variables, and every variable one block."""
    others = [item for block in blocks for item in block if not isinstance(item, tf.Variable)]
    if others:
        raise refusal(
            f"Expected blocks of variables, got {others[0]!r}. Pass layer.trainable_variables of "
            "one layer, or of several, for each block."
        )
    seen = [variable.ref() for block in blocks for variable in block]
    if not blocks or not all(blocks) or len(set(seen)) < len(seen):
        raise refusal(
            "Expected blocks that have variables, each variable in one block, got "
            f"{[[variable.name for variable in block] for block in blocks]}."
        )
    check_variables([variable for block in blocks for variable in block])


def check_together(blocks: Blocks, trained: Any) -> None:
    """Raises UnsupportedRunError unless the blocks are together the variables that are trained."""
    own = [variable for block in blocks for variable in block]
    given, own_refs = ({variable.ref() for variable in part} for part in (trained, own))
    if given != own_refs:
        outside = [variable.deref().name for variable in given ^ own_refs]
        raise refusal(
            "Expected blocks that are together the trainable variables of the model, got "
            f"{sorted(outside)} in one and not in the other. Set layer.trainable = False for "
            "what is not trained."
        )
