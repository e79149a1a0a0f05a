"""Whether a stock optimizer adds the noise that belongs to the clip of its gradients."""

from __future__ import annotations

import math
from typing import Any

from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.stock.checks import hides_rows, is_in_pieces
from hidden_state_adapters.opacus.stock.pieces import summing_method

_REMEDY = (
    "The noise is noise_multiplier times the clip norm of the optimizer, so it would be that of "
    "another clip, and epsilon too small. "
)


class StockClip:
    """Notices clip norms that change in one of the places that have to agree.

    Opacus keeps the clip norm of ghost clipping in the module, and those of per-layer clipping in a
    list, while its schedulers and a second make_private change the optimizer's `max_grad_norm`,
    which only the noise follows. Pieces of one batch have to be clipped alike.
    """

    def __init__(self) -> None:
        self._before: float | None = None  # the clip norm of the last step

    def check(self, module: Any, optimizer: DPOptimizer) -> None:
        """Compares the clip of a step with its noise.

        Args:
            module: The private model; None if it is not known.
            optimizer: In its step hook.

        Raises:
            UnsupportedRunError: They do not agree.
        """
        _refuse_other_clip(optimizer)
        clip = float(optimizer.max_grad_norm)
        if isinstance(optimizer, DPPerLayerOptimizer):
            whole = math.hypot(*(float(norm) for norm in optimizer.max_grad_norms))
            if not math.isclose(whole, clip, rel_tol=1e-6):
                raise UnsupportedRunError(
                    f"Expected per-layer clip norms that make max_grad_norm = {clip:g} together, "
                    f"got {whole:g}: one of the two was changed after make_private. {_REMEDY}"
                    'Change max_grad_norms as well, or use clipping="flat" with a schedule.'
                )
        held = getattr(module, "max_grad_norm", None) if hides_rows(optimizer) else None
        if held is not None and not math.isclose(float(held), clip, rel_tol=1e-6):
            raise UnsupportedRunError(
                f"Expected a model that clips at max_grad_norm = {clip:g} of the optimizer, got "
                f"{float(held):g}: a schedule changed the one and not the other, or the model was "
                f"made private before with another clip norm. {_REMEDY}Set module.max_grad_norm as "
                "well, or pass the plain module to make_private."
            )
        before, self._before = self._before, clip
        if before is not None and clip != before and is_in_pieces(optimizer):
            raise UnsupportedRunError(
                f"Expected one clip norm for all pieces of a batch, got {before:g} before and "
                f"{clip:g} at its end: BatchMemoryManager clips every piece when it comes. "
                f"{_REMEDY}Change the clip norm without BatchMemoryManager only."
            )


def _refuse_other_clip(optimizer: DPOptimizer) -> None:
    """Raises UnsupportedRunError if a method that is not Opacus' adds up the gradients."""
    method = summing_method(optimizer)
    if not str(getattr(method, "__module__", "")).startswith("opacus."):
        raise UnsupportedRunError(
            f"Expected an optimizer of Opacus that clips the gradients itself, got "
            f"{type(optimizer).__name__} with {getattr(method, '__qualname__', method)!r}: nobody "
            "knows whether the sum that it makes is of clipped gradients, and epsilon is about "
            "clipped ones. Leave clip_and_accumulate alone."
        )
