"""The published analysis of DiceSGD, as printed: it is not sound.

Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Theorem 3.7 (A.3 in the appendix).
"""

from __future__ import annotations

import math

from hidden_state_accountants import validate
from hidden_state_accountants.curves.square_root import SquareRootCurve
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent

CAVEAT = (
    "the theorem is false: it treats the error as if every step sampled it anew. One outlier "
    "saturates the error, and clip(e, C2) then shifts every later step, without amplification "
    "(docs/theory/dice_sgd.md). Use "
    'analysis="sound"'
)


def squared_sensitivity(event: DiceSgdDpEvent) -> float:
    """C1^2 + 2 min(C^2, G'^2) with C = B C2 and G' = max(0, G - C1); automatic: 3 C^2."""
    c1 = event.clip_norm
    if event.automatic:
        return 3 * c1**2  # ZBWH24, Appendix C.4, arXiv 2311.14632: C = C1 = C2
    excess = max(0.0, event.gradient_bound - c1)
    return c1**2 + 2 * min(event.batch_size * event.error_clip_norm, excess) ** 2


def published_noise_std(event: DiceSgdDpEvent, epsilon: float, delta: float) -> float:
    r"""The sigma_1 of Theorem 3.7 for (epsilon, delta); the event's own noise is not used.

    .. math::
        \sigma_1^2 = \frac{32\, T \tilde G \log(1/\delta)}{N^2 \varepsilon^2}, \qquad
        \tilde G = C_1^2 + 2\min(C^2, G'^2)

    Formal guarantees: none. The theorem is false.

    Args:
        event: The run.
        epsilon: > 0.
        delta: In (0, 1).

    Raises:
        ValueError: A value is out of range.
    """
    epsilon = validate.real("epsilon", epsilon, above=0)
    delta = validate.real("delta", delta, above=0, maximum=1)
    # ZBWH24, Theorem 3.7, arXiv 2311.14632
    scale = 32 * event.num_steps * squared_sensitivity(event) * math.log(1 / delta)
    return math.sqrt(scale) / (event.dataset_size * epsilon)


def published_step_rdp(event: DiceSgdDpEvent, step: int, order: float) -> float:
    r"""The Renyi divergence of one step as printed at the end of Appendix A.2.

    .. math::
        \epsilon^t = \frac{16\alpha}{\sigma_1^2 N^2} \Big(C_1^2 +
        \frac{a (t+1) + 2}{\max(a (t-1), 0) + 1} \min(C_2^2 B^2, G'^2)\Big), \qquad
        a = \max(G' - C_2, 0) / C_2

    Where the single step is displayed the B is missing; the sum over the steps in the next line has
    it. That sum is then bounded as if its second part were at most 2t, which is false for large a.

    Args:
        event: The run, with a finite gradient bound.
        step: t >= 0.
        order: alpha > 1.
    """
    c1, c2, batch = event.clip_norm, event.error_clip_norm, event.batch_size
    excess = max(0.0, event.gradient_bound - c1)
    a = max(excess - c2, 0.0) / c2
    # ZBWH24, Appendix A.2, arXiv 2311.14632
    growth = (a * (step + 1) + 2) / (max(a * (step - 1), 0.0) + 1)
    total = c1**2 + growth * min(c2 * batch, excess) ** 2
    return 16 * order * total / (event.noise_std * event.dataset_size) ** 2


def published_curve(event: DiceSgdDpEvent) -> SquareRootCurve:
    """The curve of a run, Theorem 3.7 solved for epsilon.

    Its Renyi divergence is the sum that the paper's proof ends with. (Even if that sum were right,
    its conversion would give epsilon >= sqrt(2 * scale * log(1/delta)).)
    """
    noise = event.noise_std * event.dataset_size
    total = 32 * event.num_steps * squared_sensitivity(event)
    return SquareRootCurve(total / noise**2 if noise else math.inf)
