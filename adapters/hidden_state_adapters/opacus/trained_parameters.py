"""Which engines of this process have trained a parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.recorders import Recorder

_runs: Any = WeakIdKeyDictionary()
"""Parameter -> the runs that train it: the engine, by a token that refers to nothing, and the
recorder."""


def note_run(params: Iterable[nn.Parameter], engine: object, recorder: Recorder) -> None:
    """Remembers that a run of `engine` trains `params`."""
    for param in params:
        _runs.setdefault(param, []).append((engine, recorder))


def check_not_trained_elsewhere(params: Iterable[nn.Parameter], engine: object) -> None:
    """Raises UnsupportedRunError if another engine took steps with one of `params`.

    The initial model, or its frozen part, would carry what those steps learned from the records,
    and this engine's epsilon would not count them. It happens when a notebook's cell is run again.
    """
    for param in params:
        for other, recorder in _runs.get(param, ()):
            if other is not engine and recorder.num_steps:
                raise UnsupportedRunError(
                    f"Expected a model that no other engine has trained, got one with "
                    f"{recorder.num_steps} steps of another engine, whose epsilon this engine does "
                    "not know. Call make_private on that engine (its runs compose), or start from "
                    "a new model object. If the records are others, load the weights into a new "
                    "model object: that its initial model does not depend on the records of this "
                    "engine is then your word."
                )
