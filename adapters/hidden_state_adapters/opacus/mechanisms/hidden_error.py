"""What DiceSGD keeps from step to step: the error, without noise, and moments, with noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.gradients.norms import joint_norms
from hidden_state_adapters.opacus.gradients.piece import Piece


class HiddenError:
    """The error e and the rest that the current batch adds to it.

    Everything in it depends on the records without noise. It cannot be copied, pickled or printed.

    Attributes:
        norm: Of the error, when a step looked at it last (0-dim).

    Args:
        params: The trainable parameters; two tensors of the shape of each are kept at most.
    """

    def __init__(self, params: Sequence[nn.Parameter]):
        self._params = list(params)
        self._errors: list[torch.Tensor | None] = [None] * len(self._params)  # None: 0
        self._rests: list[torch.Tensor | None] = [None] * len(self._params)
        self.norm: torch.Tensor = torch.zeros(())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedRunError(
            "The error of DiceSGD cannot be copied or pickled: it holds data of the records "
            "without noise. Use engine.save_checkpoint(include_private_state=True, "
            "stays_private=True)."
        )

    def error(self, index: int) -> torch.Tensor:
        """The error of one parameter, on its device."""
        param, error = self._params[index], self._errors[index]
        error = torch.zeros_like(param.detach()) if error is None else error.to(param)
        self._errors[index] = error
        return error

    def figures(self) -> Mapping[str, Figure]:
        """The norm of the whole error."""
        if all(error is None for error in self._errors):
            self.norm = torch.zeros_like(self._params[0].detach().flatten()[0])
        else:
            self.norm = joint_norms([self.error(i)[None] for i in range(len(self._params))])[0]
        return {"error": self.norm}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if the error is not finite."""
        if not math.isfinite(values["error"]):
            raise UnsupportedRunError(
                f"step {piece.step}: the error overflowed; no clip bounds it."
            )

    @property
    def rests(self) -> list[torch.Tensor]:
        """What the batch has added so far, of every parameter."""
        return [rest for rest in self._rests if rest is not None]

    def add_rest(self, index: int, rest: torch.Tensor) -> None:
        """Adds sums of g - clip(g) over the records of (a piece of) the batch."""
        before = self._rests[index]
        self._rests[index] = rest if before is None else before.add_(rest)

    def advance(self, factor: torch.Tensor, divisor: int) -> None:
        r"""The next error; `factor` is that of clip(e, C2).

        .. math:: e \gets [e - \mathrm{clip}(e, C_2)] + \frac1B \sum_i [g_i - \mathrm{clip}(g_i)]
        """
        left = 1 - factor
        for index, rest in enumerate(self._rests):
            error = self.error(index)
            # ZBWH24, Algorithm 2, line 7, arXiv 2311.14632
            error.mul_(left.to(error))
            if rest is not None:
                error.add_(rest, alpha=1 / divisor)
            self._rests[index] = None

    def forget_pieces(self) -> None:
        """Pieces from before the checkpoint was loaded belong to no batch of the run."""
        self._rests = [None] * len(self._params)

    def copies(self) -> list[torch.Tensor]:
        """The errors of all parameters, on the CPU. Secret."""
        return [self.error(i).cpu().clone() for i in range(len(self._params))]

    def load(self, errors: Sequence[torch.Tensor]) -> None:
        """Restores what `copies` returned.

        Raises:
            ValueError: It is of other parameters, or damaged; nothing is changed.
        """
        shapes = [tuple(error.shape) for error in errors]
        expected = [tuple(param.shape) for param in self._params]
        if shapes != expected:
            raise ValueError(f"Expected an error of shapes {expected}, got {shapes}.")
        if not all(bool(torch.isfinite(error).all()) for error in errors):
            raise ValueError("The private state is damaged: the error is not finite.")
        self._errors = [e.to(p, copy=True) for e, p in zip(errors, self._params, strict=True)]
