"""Which gradient reaches the model's output: that of the criterion alone, or of something else."""

from __future__ import annotations

import torch

from hidden_state_adapters.opacus.device_figures import Figure, any_of, differ


class LossGradient:
    """Compares the gradient at the model's output with the one that the criterion sends back.

    They differ if the value of the criterion is scaled, weighted or wrapped before backward(), if
    another loss uses the output as well, or if the criterion is called for the log only. The
    constants of the criterion then say nothing about the loss that is trained.

    In an honest loop both are the same memory, so that nothing is computed but one comparison with
    1.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the last backward pass."""
        self._own: torch.Tensor | None = None
        self._seen = {"value": 0, "own": 0, "total": 0}
        self.is_other: Figure = False

    def follow_input(self, output: torch.Tensor, passed: torch.Tensor) -> torch.Tensor:
        """What the criterion is to be called with instead of `passed`, the model's `output`."""
        own = passed.view_as(passed)
        own.register_hook(self._note_own)
        output.register_hook(self._note_total)
        return own

    def follow_value(self, value: torch.Tensor) -> None:
        """`value` is what the criterion returned."""
        value.register_hook(self._note_value)

    @property
    def is_complete(self) -> bool:
        """Whether one backward pass went from the value to the output."""
        return set(self._seen.values()) == {1}

    def _note_value(self, gradient: torch.Tensor) -> None:
        self._seen["value"] += 1
        self._add(differ(gradient, torch.ones_like(gradient)))

    def _note_own(self, gradient: torch.Tensor) -> None:
        self._seen["own"] += 1
        self._own = gradient  # keeps autograd from adding other gradients in place

    def _note_total(self, gradient: torch.Tensor) -> None:
        self._seen["total"] += 1
        own = self._own
        if own is None or own.numel() != gradient.numel():
            self.is_other = True
        elif own.data_ptr() != gradient.data_ptr():
            self._add(differ(own.reshape(gradient.shape), gradient))

    def _add(self, flag: Figure) -> None:
        self.is_other = any_of([self.is_other, flag])


def is_same_numbers(passed: torch.Tensor, output: torch.Tensor, version: int) -> bool:
    """Whether `passed` is `output`, as it was at `version`, up to dimensions of size one."""
    return (
        passed.data_ptr() == output.data_ptr()
        and passed.dtype == output.dtype
        and [n for n in passed.shape if n != 1] == [n for n in output.shape if n != 1]
        and passed.numel() == output.numel()
        and output._version == version
    )
