"""The two clips of DiceSGD, and the error between them: data of the records without noise."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_adapters.opacus.norms import row_norms


def smallest_norm(params: Sequence[nn.Parameter]) -> float:
    """The smallest norm that is computed reliably in the coarsest precision of `params`.

    Squares of coordinates underflow: below sqrt(tiny) a computed norm can be far too small, and a
    factor made from it far too large. At 1e8 times that the squares that are lost cannot matter.
    """
    tiny = max(torch.finfo(p.dtype).tiny for p in params)
    return 1e8 * math.sqrt(tiny)


def clip_factors(
    norms: torch.Tensor, bound: float, *, automatic: bool, smallest: float
) -> torch.Tensor:
    r"""What vectors of length `norms` are multiplied with.

    .. math:: \min(1, C/|v|), \qquad \text{automatic: } C/|v|, \text{ and 0 at 0}

    Without Opacus' 1e-6 beside the norm: with it e - clip(e) would not vanish at short e.

    Args:
        norms: Any shape.
        bound: C.
        automatic: Whether to normalise.
        smallest: Where automatic clipping takes a vector for 0. The result is no longer than C.
    """
    # ZBWH24, Section 2.1 and Appendix C.4, arXiv 2311.14632
    factors = bound / norms
    if automatic:
        return torch.where(norms >= smallest, factors, torch.zeros_like(norms))
    return factors.clamp(max=1.0)


def joint_norms(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Norms of vectors whose parts, one tensor per parameter, have shape (vectors, ...)."""
    # The shape in full: an empty batch has nothing that -1 could be computed from.
    rows = [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts]
    norms = [row_norms(part) for part in rows]
    dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
    together = [norm.to(device=norms[0].device, dtype=dtype) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(together, dim=1), dim=1)


class HiddenError:
    """The error e, the rest that the current batch adds to it, and what the steps looked like.

    Everything in it depends on the records without noise. It cannot be copied, pickled or printed.

    Args:
        params: The trainable parameters; two tensors of the shape of each are kept at most.
    """

    def __init__(self, params: Sequence[nn.Parameter]):
        self._params = list(params)
        self._errors: list[torch.Tensor | None] = [None] * len(self._params)  # None: 0
        self._rests: list[torch.Tensor | None] = [None] * len(self._params)
        # Of the piece at hand: the norms of its gradients, and of the error.
        self.measured: tuple[torch.Tensor, torch.Tensor] | None = None
        self.largest_gradient_norm = 0.0
        self.fewest_rows, self.most_rows = math.inf, 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedRunError(
            "The error of DiceSGD cannot be copied or pickled: it holds data of the records "
            "without noise. Use optimizer.run_state_dict(include_private_state=True)."
        )

    def error(self, index: int) -> torch.Tensor:
        """The error of one parameter, on its device."""
        param, error = self._params[index], self._errors[index]
        error = torch.zeros_like(param.detach()) if error is None else error.to(param)
        self._errors[index] = error
        return error

    def norm(self) -> torch.Tensor:
        """The norm of the whole error (0-dim)."""
        if all(error is None for error in self._errors):
            return torch.zeros_like(self._params[0].detach().flatten()[0])
        parts = [self.error(index)[None] for index in range(len(self._params))]
        return joint_norms(parts)[0]

    def add_rest(self, index: int, rest: torch.Tensor) -> None:
        """Adds sums of g - clip(g) over the records of (a piece of) the batch."""
        before = self._rests[index]
        self._rests[index] = rest if before is None else before.add_(rest)

    def note_gradient_norm(self, largest: float) -> None:
        """Notes the largest norm of a gradient of a piece."""
        self.largest_gradient_norm = max(self.largest_gradient_norm, largest)

    def note_rows(self, rows: int) -> None:
        """Notes the number of rows of a batch."""
        self.fewest_rows, self.most_rows = min(self.fewest_rows, rows), max(self.most_rows, rows)

    def advance(self, factor: torch.Tensor, divisor: int) -> None:
        r"""The next error; `factor` is that of clip(e, C2).

        .. math:: e \gets [e - \mathrm{clip}(e, C_2)] + \frac1B \sum_i [g_i - \mathrm{clip}(g_i)]
        """
        for index, rest in enumerate(self._rests):
            error = self.error(index)
            # ZBWH24, Algorithm 2, line 7, arXiv 2311.14632
            error.mul_(1 - factor.to(error))
            if rest is not None:
                error.add_(rest, alpha=1 / divisor)
            self._rests[index] = None

    def private_state(self) -> dict[str, Any]:
        """Plain types and tensors that restore it. Secret."""
        return {
            "error": [self.error(i).cpu().clone() for i in range(len(self._params))],
            "largest_gradient_norm": self.largest_gradient_norm,
            "fewest_rows": int(self.fewest_rows),
            "most_rows": self.most_rows,
        }

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `private_state` returned.

        Raises:
            ValueError: It is of other parameters, or damaged; nothing is changed.
        """
        errors = [torch.as_tensor(error) for error in state["error"]]
        shapes = [tuple(error.shape) for error in errors]
        expected = [tuple(param.shape) for param in self._params]
        if shapes != expected:
            raise ValueError(f"Expected an error of shapes {expected}, got {shapes}.")
        if not all(bool(torch.isfinite(error).all()) for error in errors):
            raise ValueError("The private state is damaged: the error is not finite.")
        largest = validate.real("largest_gradient_norm", state["largest_gradient_norm"], minimum=0)
        fewest = validate.integer("fewest_rows", state["fewest_rows"], minimum=0)
        most = validate.integer("most_rows", state["most_rows"], minimum=fewest)
        self._errors = [e.to(p, copy=True) for e, p in zip(errors, self._params, strict=True)]
        self.largest_gradient_norm, self.fewest_rows, self.most_rows = largest, fewest, most
