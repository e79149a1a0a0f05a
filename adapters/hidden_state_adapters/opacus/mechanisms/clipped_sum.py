"""The part of noisy SGD that comes before the update: the noisy sum of clipped gradients."""

from __future__ import annotations

import math
from typing import Any

from opacus.optimizers import DPOptimizer

from hidden_state_accountants import RunRecorder, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.norms import opacus_clip_factors
from hidden_state_adapters.opacus.gradients.piece import Piece
from hidden_state_adapters.opacus.mechanism import Mechanism
from hidden_state_adapters.opacus.run.declared import DeclaredRun


class ClippedSum(Mechanism):
    """Clips and adds up as Opacus does. A subclass says what moves along the noisy mean.

    Args:
        optimizer: The private optimizer.
    """

    constant = "make_private accounts one run of one kind. Call it again for another one."

    def __init__(self, optimizer: DPOptimizer):
        super().__init__(optimizer)
        self._clip_norm: float | None = None  # of the pieces of the current batch

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
        clip_norm = float(self.optimizer.max_grad_norm)
        self._check_same_clip_norm(piece, clip_norm)
        self._clip_norm = clip_norm
        self.clip(piece, clip_norm)

    def clip(self, piece: Piece, clip_norm: float) -> None:
        """Adds the clipped gradients of a piece to the sums."""
        piece.add_sums(opacus_clip_factors(piece.norms, clip_norm))

    def forget_pieces(self) -> None:
        """See `Mechanism.forget_pieces`."""
        self._clip_norm = None

    def check_pieces(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if the noise is for another clip norm."""
        self._check_same_clip_norm(piece, float(self.optimizer.max_grad_norm))
        self._clip_norm = None

    def _check_same_clip_norm(self, piece: Piece, clip_norm: float) -> None:
        if self._clip_norm is not None and clip_norm != self._clip_norm:
            raise UnsupportedRunError(
                f"step {piece.step} clips to {self._clip_norm:g} and then uses {clip_norm:g}. "
                "Change max_grad_norm between logical steps only."
            )
