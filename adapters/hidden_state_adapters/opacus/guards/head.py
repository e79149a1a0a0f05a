"""What goes into the linear head of a model, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.gradients.ghost_module import (
    captured_input_norms,
    pass_that_keeps,
)
from hidden_state_adapters.opacus.gradients.norms import ROUNDING, row_norms
from hidden_state_adapters.opacus.guards.base import Guard, Piece


class HeadWatch:
    """Measures the features that reach a linear head.

    Args:
        head: The linear layer of a module.

    Attributes:
        features: Since the last reset.
    """

    def __init__(self, head: nn.Linear):
        self._largest: torch.Tensor | None = None
        self._is_deferred = False
        self._head = head
        self.features: list[torch.Tensor] = []
        self._is_idle = False
        self._handle = head.register_forward_hook(self._note, with_kwargs=True)

    def _note(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> None:
        # After the pass: these are the features that pre-hooks, if there are any, left.
        if not self._is_idle and torch.is_grad_enabled() and module.training:
            self._measure(module, args[0] if args else kwargs["input"])

    def _measure(self, module: nn.Module, features: torch.Tensor) -> None:
        if features.dim() != 2:
            raise UnsupportedRunError(
                f"Expected features of shape (records, {module.in_features}) at the linear layer, "
                f"got {tuple(features.shape)}: several rows per record are not one linear "
                "prediction. Flatten them, or declare loss_geometry without feature_norm."
            )
        self.features.append(features.detach())
        if pass_that_keeps(module) is not None:
            self._is_deferred = True
            return
        largest = row_norms(features.detach()).max() if len(features) else None
        if largest is not None and self._largest is not None:
            largest = torch.maximum(largest, self._largest)
        self._largest = largest

    @property
    def largest_feature_norm(self) -> torch.Tensor | None:
        """Of the records since the last reset; None for no records.

        Ghost clipping computes the norms of what goes into the head, and would refuse a batch that
        was written since: they are not computed a second time.
        """
        norms = captured_input_norms(self._head) if self._is_deferred else None
        largest = None if norms is None or not len(norms) else norms.max()
        if largest is None or self._largest is None:
            return self._largest if largest is None else largest
        return torch.maximum(largest, self._largest.to(largest))

    def reset(self) -> None:
        """Starts measuring the next batch."""
        self._largest, self._is_deferred, self.features = None, False, []

    def remove(self) -> None:
        """Removes the hook."""
        self._handle.remove()

    def __reduce__(self) -> Any:
        return _idle_watch, ()  # a copy of the module trains nothing here


class FeatureGuard(Guard):
    """Notices features that are longer than declared.

    Args:
        bound: Of the norm of every record at the linear layer.
        largest: The largest norm since the last piece, or None if nothing was measured.
    """

    def __init__(self, bound: float, largest: Callable[[], torch.Tensor | None]):
        self._bound, self._largest = bound, largest

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step."""
        yield Assumption.checked(f"feature norms at most {self._bound:g}")

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """The largest norm; not a number if rows were not measured."""
        largest = self._largest()
        if not piece.rows:
            return {"feature": 0.0}
        return {"feature": math.nan if largest is None else largest}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if it is not what was declared."""
        largest = values["feature"]
        if not largest <= self._bound * (1 + ROUNDING):
            raise UnsupportedRunError(
                f"step {piece.step} used features of norm {largest:.8g}, expected at most "
                f"feature_norm = {self._bound:.8g}. The step was not taken. Scale every record "
                "down to the declared norm, after all augmentation."
            )


def _idle_watch() -> HeadWatch:
    head = nn.Linear(1, 1)
    watch = HeadWatch(head)
    watch.remove()
    watch._is_idle = True  # Opacus calls copies of the head, with their hooks, inside vmap
    return watch
