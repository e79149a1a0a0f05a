"""What a step of Opacus' own optimizers shows when its hook is called."""

from __future__ import annotations

import math

from opacus.optimizers import (
    AdaClipDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import read
from hidden_state_adapters.opacus.guards.base import at_step
from hidden_state_adapters.opacus.guards.gradients import gradient_rows
from hidden_state_adapters.opacus.guards.precision import check_arithmetic
from hidden_state_adapters.opacus.guards.settings import (
    WHY_NOT_ADAPTIVE,
    UnsupportedUpdateError,
    sgd_options,
)

USE_ENGINE = "Use hidden_state_adapters.opacus.HiddenStatePrivacyEngine, which deals the batches."


def why_composition(optimizer: DPOptimizer) -> str:
    """Why no last-iterate theorem covers the update of an optimizer, or ""."""
    if type(optimizer) is not DPOptimizer:
        return f"Expected DPOptimizer, got {type(optimizer).__name__}"
    try:
        sgd_options(optimizer.original_optimizer)
    except UnsupportedUpdateError as error:
        return error.what
    return ""


def refuse_adaptive_clipping(optimizer: DPOptimizer, step: int) -> None:
    """Raises UnsupportedRunError for a clip that depends on the gradients."""
    if isinstance(optimizer, AdaClipDPOptimizer):
        raise UnsupportedRunError(
            f"step {step} uses adaptive clipping: {WHY_NOT_ADAPTIVE}. "
            'Use clipping="flat" or "per_layer".'
        )


def check_finite(optimizer: DPOptimizer, step: int) -> None:
    """Raises UnsupportedRunError if the noisy gradients are not finite."""
    gradients = [p.grad for p in optimizer.params if p.grad is not None]
    sums = read({str(i): g.sum() for i, g in enumerate(gradients)})
    if all(map(math.isfinite, sums.values())):
        return
    # A sum may overflow where no number does.
    if not all(read({str(i): g.isfinite().all() for i, g in enumerate(gradients)}).values()):
        raise UnsupportedRunError(
            f"step {step} has a gradient that is not finite, which no clip bounds and no noise "
            "hides. Look for a division by 0, or scale the loss down."
        )


def hides_rows(optimizer: DPOptimizer) -> bool:
    """Whether Opacus' ghost clipping leaves no per-example gradients."""
    return isinstance(optimizer, DPOptimizerFastGradientClipping)


def is_in_pieces(optimizer: DPOptimizer) -> bool:
    """Whether BatchMemoryManager cut the batch, so that its last piece is all that is left."""
    return bool(optimizer._is_last_step_skipped)


def count_rows(optimizer: DPOptimizer, step: int, *, is_poisson: bool) -> int | None:
    """The rows of the batch; None for a Poisson batch that does not show them.

    Raises:
        UnsupportedRunError: They cannot be counted and have to be, or several batches were
            accumulated.
    """
    if hides_rows(optimizer):
        if not is_poisson:
            raise UnsupportedRunError(
                f"step {step} uses ghost clipping, which hides how many rows a batch had, expected "
                'per-example gradients. Use grad_sample_mode="hooks", or Poisson batches '
                "(poisson_sampling=True)."
            )
        check_arithmetic(optimizer.params)
        return None
    rows = at_step(step, lambda: gradient_rows(optimizer.params))
    if not is_in_pieces(optimizer):
        return rows
    if not is_poisson:
        raise UnsupportedRunError(
            f"step {step} used a batch in several pieces, whose rows the accountant cannot count. "
            f"{USE_ENGINE}"
        )
    return None
