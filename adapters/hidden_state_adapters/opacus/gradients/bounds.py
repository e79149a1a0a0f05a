"""What the norms of features and gradients must be."""

from __future__ import annotations

import math

import torch

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.norms import OPACUS_CLIP_OFFSET, ROUNDING

_SLACK = ROUNDING + torch.finfo(torch.float32).eps  # of a norm that is exactly at its bound


def check_features(step: int, largest: float, bound: float) -> None:
    """Raises UnsupportedRunError if features are longer than declared."""
    if not largest <= bound * (1 + ROUNDING):
        raise UnsupportedRunError(
            f"step {step} used features of norm {largest:.8g}, expected at most "
            f"feature_norm = {bound:.8g}. The step was not taken. Scale every record "
            "down to the declared norm, after all augmentation."
        )


def check_gradients(step: int, largest: float, lipschitz: float | None) -> None:
    """Raises UnsupportedRunError if gradients are longer than declared, or not finite."""
    if lipschitz is not None and not largest <= lipschitz * (1 + _SLACK):
        raise UnsupportedRunError(
            f"step {step} has a per-example gradient of norm {largest:.8g}, expected at most "
            f"the declared lipschitz = {lipschitz:.8g}. The loss is not the declared one (sum "
            "instead of mean? class weights? a scaled loss?) or the features are longer than "
            "declared. The step was not taken. Declare the loss that the loop computes, and "
            "scale every record down to the declared norm."
        )
    if not math.isfinite(largest):
        raise UnsupportedRunError(
            f"step {step} has a per-example gradient whose norm is not finite (or a square "
            "overflows): no clip bounds it. The step was not taken. Look for a division by 0, "
            "or scale the loss down."
        )


def check_clip_margin(clip_norm: float, lipschitz: float | None) -> None:
    """Refuses a clip norm so close above `lipschitz` that Opacus' clip still acts.

    Opacus multiplies with min(1, C / (norm + 1e-6)), so gradients that are as long as the bound are
    left alone only if C exceeds it by that much.
    """
    if lipschitz is None or clip_norm < lipschitz:
        return
    needed = lipschitz * (1 + 2 * ROUNDING) + OPACUS_CLIP_OFFSET
    if clip_norm < needed:
        raise UnsupportedRunError(
            f"Expected max_grad_norm >= {needed:.9g} or below lipschitz = {lipschitz:.9g}, got "
            f"{clip_norm:.9g}: Opacus clips with min(1, C / (norm + 1e-6)), which still shortens "
            "gradients that are as long as the bound. Raise max_grad_norm a little: "
            f"{needed * (1 + 1e-5):.6g} will do."
        )
