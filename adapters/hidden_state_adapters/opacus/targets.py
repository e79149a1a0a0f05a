"""The targets of the batch that was drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.batch import Taken
from hidden_state_adapters.opacus.criteria import KnownCriterion

REMEDY = (
    "A loop that maps labels (to -1 and 1, to probabilities, by a scale) passes make_private "
    "targets=, the function of the loader's last tensor that it applies; every record by itself."
)


class Targets:
    """Finds the targets among the tensors of a batch: once, and then in the same place.

    Args:
        known: The loss that they are for.
        function: Function of the last tensor of a batch, or None to find what fits the loss.
    """

    def __init__(
        self,
        known: KnownCriterion,
        function: Callable[[torch.Tensor], torch.Tensor] | None,
    ):
        self._known, self._function = known, function
        self._place: int | None = None

    def of(
        self, output: torch.Tensor, batch: Taken, fit: Callable[[torch.Tensor], float]
    ) -> torch.Tensor:
        """The targets of the batch or piece at hand.

        Args:
            output: Output of the head, shape (rows, outputs).
            batch: Tensors that were drawn.
            fit: How badly targets explain the gradient at the outputs.

        Raises:
            UnsupportedRunError: The batch has none, or the loop wrote to them.
        """
        tensors = batch.tensors
        if self._function is not None:
            return self._mapped(batch, output)
        if self._place is None:
            self._place = self._find(tensors, output, fit)
        target = tensors[self._place] if self._place < len(tensors) else None
        if target is None or not self._known.takes(target, output):
            raise self._not_found(tensors, output)
        self._check_unwritten(target, batch)
        return target

    def _check_unwritten(self, target: torch.Tensor, batch: Taken) -> None:
        if all(target is not one for one in batch.unwritten):
            raise UnsupportedRunError(
                "Expected the targets that the loader drew, got a tensor that the loop changed in "
                f"place: no step can be computed from it. Compute out of place. {REMEDY}"
            )

    def _find(
        self,
        tensors: Sequence[torch.Tensor],
        output: torch.Tensor,
        fit: Callable[[torch.Tensor], float],
    ) -> int:
        places = [i for i, t in enumerate(tensors) if self._known.takes(t, output)]
        if not places:
            raise self._not_found(tensors, output)
        if len(places) == 1:
            return places[0]
        return min(reversed(places), key=lambda i: fit(tensors[i]))

    def _mapped(self, batch: Taken, output: torch.Tensor) -> torch.Tensor:
        assert self._function is not None
        tensors = batch.tensors
        if not tensors:
            raise self._not_found(tensors, output)
        self._check_unwritten(tensors[-1], batch)
        target = self._function(tensors[-1])
        if self._place is None:
            self._place = len(tensors) - 1
            halves = [self._function(half) for half in tensors[-1].tensor_split(2)]
            if len(target) > 1 and not torch.equal(torch.cat(halves), target):
                raise UnsupportedRunError(
                    "Expected targets= to map every target by itself, got a function whose result "
                    "for half of a batch is not half of its result: one record would change the "
                    "targets of others."
                )
        if not self._known.takes(target, output):
            raise self._not_found([target], output)
        return target

    def _not_found(
        self, tensors: Sequence[torch.Tensor], output: torch.Tensor
    ) -> UnsupportedRunError:
        shapes = ", ".join(f"{tuple(t.shape[1:])} of {t.dtype}" for t in tensors) or "no tensors"
        name = type(self._known.criterion).__name__
        return UnsupportedRunError(
            f"Expected targets for {name} at outputs of shape {tuple(output.shape[1:])} for each "
            f"record in the batch that the loader dealt, got {shapes}. {REMEDY}"
        )
