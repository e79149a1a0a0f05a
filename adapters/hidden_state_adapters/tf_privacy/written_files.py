"""Files and copies of a model that is being trained, which show an iterate to whoever has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.lineage import reduced_with_runs, told_by_optimizer

_WRITES = ("save", "save_weights", "export")


def watch_files(model: Any, note: Callable[[], Callable[[], None] | None]) -> None:
    """Lets what writes files of a model, or copies it, say so first, whoever calls it.

    So do models inside of it that are trained, and the one that `make_private` was given.

    Args:
        model: Keras model or layer.
        note: Weak reference to what is called before.
    """

    def noted(write: Callable[..., Any], part: Any, *args: Any, **kwargs: Any) -> Any:
        if (say := note()) is not None:
            say()
        with told_by_optimizer(part):
            return write(part, *args, **kwargs)

    def reduced(write: Callable[..., Any], part: Any, protocol: Any) -> Any:
        return reduced_with_runs(part, noted(write, part, protocol))

    def copied(part: Any, memo: Any) -> Any:
        make, arguments = part.__reduce_ex__(4)
        return make(*arguments)

    for part in keras_api.models_of(model):
        own = vars(part)
        for name in _WRITES:
            if (write := getattr(type(part), name, None)) is not None:
                own[name] = functools.partial(noted, write, part)
        own["__reduce_ex__"] = functools.partial(reduced, type(part).__reduce_ex__, part)
        own["__deepcopy__"] = functools.partial(copied, part)
