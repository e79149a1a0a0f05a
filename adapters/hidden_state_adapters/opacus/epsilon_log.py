"""Epsilon where people look for it: in the logs of a trainer of Lightning or of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

ENTRY = "epsilon_if_released_now"
"""The name of the entry, which Keras models and callbacks of this package log, too."""


def log_epsilon(trainer: Any, engine: Any, delta: float) -> None:
    """Has a trainer log epsilon after every epoch, to whatever loggers it has.

    The entry `epsilon_if_released_now` is that of the *last* iterate: of a model that is published
    when training ends there, while no other one ever is. It follows from settings and the number
    of steps, not from the records, so that anybody may see it. Whoever publishes the models of
    several epochs calls `engine.release()` at each, and asks for epsilon at the end.

    Args:
        trainer: Trainer of Lightning (`lightning` or `pytorch_lightning`) or of transformers.
        engine: A `HiddenStatePrivacyEngine` whose `make_private` was called.
        delta: Where epsilon is read, in (0, 1).

    Raises:
        TypeError: It is a trainer of neither.
    """
    for kind in type(trainer).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _ADD:
            _ADD[package](importlib.import_module(package), trainer, engine, delta)
            return
    raise TypeError(
        f"Expected a Trainer of Lightning or transformers, got {type(trainer).__name__}. In a loop "
        "of your own log engine.get_epsilon(delta) after every epoch."
    )


def _to_lightning(package: Any, trainer: Any, engine: Any, delta: float) -> None:
    class EpsilonLog(package.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.log(ENTRY, engine.get_epsilon(delta))

    trainer.callbacks.append(EpsilonLog())


def _to_transformers(package: Any, trainer: Any, engine: Any, delta: float) -> None:
    class EpsilonLog(package.TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            trainer.log({ENTRY: engine.get_epsilon(delta)})

    trainer.add_callback(EpsilonLog())


_ADD: dict[str, Callable[[Any, Any, Any, float], None]] = {
    "lightning": _to_lightning,
    "pytorch_lightning": _to_lightning,
    "transformers": _to_transformers,
}
