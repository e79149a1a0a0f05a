"""Moves of the parameters of a stock run that no accountant recorded."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from opacus.optimizers import DPOptimizer
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hidden_state_accountants import UnsupportedRunError

_recorded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers whose next step was recorded."""
_watches: Any = WeakIdKeyDictionary()
"""Parameter -> the watches of the runs that train it."""


class MoveWatch:
    """Notices steps of an optimizer of torch's that no accountant here recorded.

    The step hook of Opacus' optimizers has a single slot, and any other optimizer can hold the same
    parameters: then the model trains, and no step is counted. So what torch calls before every step
    of every optimizer looks whether the parameters are those of a run.

    Updates that are written by hand are not seen, unless no step at all is recorded.

    Args:
        optimizer: That Opacus made.
    """

    def __init__(self, optimizer: DPOptimizer):
        self._original = weakref.ref(optimizer.original_optimizer)
        self._problem = ""
        self._writes = [(weakref.ref(p), p._version) for p in optimizer.params]
        _look_at_every_step()
        for param in optimizer.params:
            _watches.setdefault(param, weakref.WeakSet()).add(self)

    def note(self, optimizer: Optimizer) -> None:
        """Notes that `optimizer` takes a step that was not recorded."""
        name = type(optimizer).__name__
        if optimizer is self._original():
            self._problem = (
                f"Expected the hook of this accountant in every step of the private optimizer, got "
                f"a step of its {name} without it: attach_step_hook has a single slot, and another "
                "hook was put there, or the optimizer that went into make_private was used. Train "
                "with the optimizer that make_private returned, and call both hooks from one "
                "function if you need two."
            )
        else:
            self._problem = (
                f"Expected the optimizer that make_private returned, got a step of another one "
                f"({name}) on the same parameters, which nobody clips, noises or counts. Train "
                "with the one that make_private returned; train on public data before make_private."
            )

    def check(self) -> None:
        """Raises UnsupportedRunError if there was such a step."""
        if self._problem:
            raise UnsupportedRunError(self._problem)

    def check_nothing_moved(self) -> None:
        """Raises UnsupportedRunError if the parameters were written since the beginning."""
        params = ((param(), writes) for param, writes in self._writes)
        if any(param is not None and param._version != writes for param, writes in params):
            raise UnsupportedRunError(
                "Expected a step of the optimizer that make_private returned, got none, but "
                "batches of its loader, and parameters that were written since: an update by hand? "
                "Train with that optimizer; load weights before make_private."
            )


def note_recorded(optimizer: DPOptimizer) -> None:
    """The step that `optimizer` is about to take was recorded."""
    _recorded.add(optimizer.original_optimizer)


def _look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _recorded:
        _recorded.discard(optimizer)
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            watches = _watches.get(param)
            if watches is not None:
                for watch in tuple(watches):
                    watch.note(optimizer)
                return


@functools.cache
def _look_at_every_step() -> None:
    """From now on, once."""
    register_optimizer_step_pre_hook(_look)
