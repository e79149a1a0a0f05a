"""Replicas of a MirroredStrategy: each takes gradients of its part of a batch, one step is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError


def refuse_surroundings(strategy: Any = None) -> None:
    """Raises UnsupportedRunError in TensorFlow 1 graphs and strategies but the one of the model."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise UnsupportedRunError(
            "Expected TensorFlow 2, got a TensorFlow 1 graph or session: the steps cannot be "
            "checked there. Use Model.fit or an own loop."
        )
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not strategy:
        found = tf.distribute.get_strategy()
        raise UnsupportedRunError(
            f"Expected no distribution strategy, got {type(found).__name__} with "
            f"{found.num_replicas_in_sync} replicas: every replica would divide by its own rows "
            "and add noise of its own. Train outside of strategy.scope()."
        )


def strategy_of(model: Any) -> Any:
    """Returns the strategy that the model was made in, or None."""
    if tf.distribute.has_strategy():
        raise UnsupportedRunError(
            f"Expected fit outside of strategy.scope(), got a call within that of a "
            f"{type(tf.distribute.get_strategy()).__name__}: what counts the steps and makes the "
            "noise is there once. Make and compile the model in the scope, and fit outside of it."
        )
    strategy = model.distribute_strategy
    with strategy.scope():
        if not tf.distribute.has_strategy():
            return None
    if type(strategy) is not tf.distribute.MirroredStrategy:
        raise UnsupportedRunError(
            f"Expected no distribution strategy or a MirroredStrategy, got "
            f"{type(strategy).__name__}: its replicas do not make one step together in this "
            "process, so that noise may be added by each or by none. Use "
            "tf.distribute.MirroredStrategy, or no strategy."
        )
    return strategy


def check_made_in(strategy: Any, variables: Sequence[Any]) -> None:
    """Raises UnsupportedRunError if a variable has no copy in every replica."""
    for variable in variables:
        if strategy is not None and not isinstance(variable, tf.distribute.DistributedValues):
            raise UnsupportedRunError(
                f"Expected variables that were made in the scope of the MirroredStrategy, got "
                f"{variable.name}, which was not. Make, build and compile the model in the scope."
            )


def copies(variables: Sequence[Any]) -> list[Any]:
    """Returns the variables of all replicas, in place of each that is mirrored."""
    return [
        copy
        for variable in variables
        for copy in (
            variable.values if isinstance(variable, tf.distribute.DistributedValues) else [variable]
        )
    ]


def together(act: Callable[..., Any], sums: Any, largest: tf.Tensor, rows: tf.Tensor) -> Any:
    """Calls a function with what all replicas have found; without a strategy with what is given.

    Sums over the examples and rows are added up, of the longest gradient the largest is taken.
    Variables that the function assigns are assigned in all replicas.
    """
    if not tf.distribute.has_strategy():
        return act(sums, largest, rows)

    def merged(strategy: Any, sums: Any, largest: Any, rows: Any) -> Any:
        def total(part: Any) -> tf.Tensor:
            return tf.add_n(strategy.experimental_local_results(part))

        longest = tf.stack(strategy.experimental_local_results(largest))
        return act(tf.nest.map_structure(total, sums), tf.reduce_max(longest), total(rows))

    return tf.distribute.get_replica_context().merge_call(merged, args=(sums, largest, rows))
