"""Sums of clipped gradients, as Opacus makes them, and what moves parameters along them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import RunRecorder, UnsupportedRunError
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.gradients import Piece
from hidden_state_adapters.opacus.norms import OPACUS_CLIP_OFFSET, opacus_clip_factors
from hidden_state_adapters.opacus.optimizer import PrivateOptimizer


class ClippedSum(PrivateOptimizer):
    """Clips and adds up as Opacus does. A subclass says what moves along the noisy mean."""

    constant = "make_private accounts one run of one kind. Call it again for another one."

    _clip_norm: float | None = None  # of the pieces of the current batch

    @classmethod
    def new_run(cls, declared: DeclaredRun, noise_multiplier: float) -> RunRecorder:
        """What records the declared run."""
        return RunRecorder(**cls.constants(declared))

    @classmethod
    def constants(cls, declared: DeclaredRun) -> dict[str, Any]:
        """The fields of a `LastIterateDpEvent` that stay the same in a run."""
        maps = declared.maps.values()
        params = declared.trained
        return {
            **declared.batches,
            "loss": declared.loss,
            "prox_strong_convexity": sum(part.strong_convexity for part in maps),
            "domain_diameter": min((part.diameter(params) for part in maps), default=math.inf),
            "max_batch_size": declared.arguments.batch_order.max_batch_size,
        }

    def accumulate(self, piece: Piece) -> None:
        r"""Adds what Opacus would.

        .. math:: \sum_i \min(1, C / (|g_i| + 10^{-6}))\, g_i
        """
        clip_norm = float(self.max_grad_norm)
        self._check_same_clip_norm(piece, clip_norm)
        self._clip_norm = clip_norm
        self.clip(piece, clip_norm)

    def clip(self, piece: Piece, clip_norm: float) -> None:
        """Adds the clipped gradients of a piece to the sums; no clip acts on short ones."""
        is_short = piece.longest + OPACUS_CLIP_OFFSET <= clip_norm
        piece.add_sums(None if is_short else opacus_clip_factors(piece.norms, clip_norm))

    def forget_pieces(self) -> None:
        """See `PrivateOptimizer.forget_pieces`."""
        super().forget_pieces()
        self._clip_norm = None

    def check_pieces(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if the noise is for another clip norm."""
        self._check_same_clip_norm(piece, float(self.max_grad_norm))
        self._clip_norm = None

    def _check_same_clip_norm(self, piece: Piece, clip_norm: float) -> None:
        if self._clip_norm is not None and clip_norm != self._clip_norm:
            raise UnsupportedRunError(
                f"step {piece.step} clips to {self._clip_norm:g} and then uses {clip_norm:g}. "
                "Change max_grad_norm between logical steps only."
            )


def move_by_any_rule(base: Optimizer) -> None:
    """Lets the wrapped optimizer move what is trained; old gradients of the rest go."""
    for group in base.param_groups:
        for param in group["params"]:
            if not param.requires_grad:
                param.grad = None
    base.step()


@torch.no_grad()
def move_by_sgd(base: Any, params: Sequence[nn.Parameter]) -> None:
    """A step of plain SGD, of `params` alone: others may hold gradients without noise.

    Args:
        base: The wrapped torch.optim.SGD, whose groups have equal options.
        params: With their noisy gradients.
    """
    options = base.param_groups[0]
    decay, rate = float(options["weight_decay"]), float(options["lr"])
    for p in params:
        assert p.grad is not None
        p.add_(torch.add(p.grad, p, alpha=decay) if decay else p.grad, alpha=-rate)
    base._opt_called = True  # what torch's schedulers look for before they warn
