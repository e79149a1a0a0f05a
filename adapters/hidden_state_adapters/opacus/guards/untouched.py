"""What is done to per-example gradients between the backward pass and the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.sums import sample_of
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.forward import ForwardGuard


class UntouchedGuard(Guard):
    """Notices per-example gradients that were written or replaced after the backward pass.

    What is clipped is a row. A row that was centred, or divided by a statistic of the batch, has
    all records in it, and one record with a long gradient moves the clipped rows of all others.
    Nobody sees in a row whether it is still a function of one record alone, so that gradients have
    to be those of the backward pass. It cannot see values that were changed through `.data`.

    Args:
        module: The module itself, not Opacus' wrapper.
        params: The trainable parameters.
        forward: The guard of its training passes, already attached.
    """

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter], forward: ForwardGuard):
        self._params, self._forward = params, forward
        self._seen: list[tuple[Any, int]] | None = None
        self._has_seen_all = True
        self._handle = module.register_forward_hook(self._follow)

    def _follow(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._forward.is_in_training_pass:
            return
        self._seen = None  # of a pass without a step, whose gradients are to be freed
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(self._wait)

    def _wait(self, gradient: torch.Tensor) -> None:
        """Called when the backward pass begins: its gradients are there when it has ended."""
        Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self._seen = self._now()

    def _now(self) -> list[tuple[Any, int]]:
        """The gradients of every parameter, and how often they were written."""
        samples = map(sample_of, self._params)  # of several batches: refused elsewhere
        return [(sample, getattr(sample, "_version", 0)) for sample in samples]

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What was verified at every step so far."""
        if self._has_seen_all:
            yield Assumption.checked("per-example gradients as the backward pass left them")

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if they are others than after the backward pass."""
        if self._seen is None:  # a loss of something else than the tensors that the module returns
            self._has_seen_all = False
            return
        for (now, writes), (then, before) in zip(self._now(), self._seen, strict=True):
            if now is not then or writes != before:
                raise UnsupportedRunError(
                    f"step {piece.step} has per-example gradients (p.grad_sample) that were "
                    "written or replaced after the backward pass: centred or divided by a "
                    "statistic of the batch, a row has other records in it, and no clip bounds "
                    "what one record does. Leave them alone; weights of records belong into the "
                    "criterion, and what is done to the noisy gradients into the optimizer."
                )

    def used(self, piece: Piece) -> None:
        """The next pass has others."""
        self._seen = None

    def resume(self, steps: int) -> None:
        """The next pass has others."""
        self._seen = None

    def close(self) -> None:
        """Removes the hook."""
        self._handle.remove()

    def __reduce__(self) -> Any:
        return _idle_watch, ()  # a copy of the module trains nothing here


def _idle_watch() -> UntouchedGuard:
    module = nn.Identity()
    watch = UntouchedGuard(module, (), ForwardGuard(module))
    watch.close()
    return watch
