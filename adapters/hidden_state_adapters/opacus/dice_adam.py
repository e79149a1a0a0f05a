"""The Adam variant of DiceSGD for Opacus (Algorithm 3)."""

from __future__ import annotations

from torch.optim import Adam, AdamW

from hidden_state_adapters.opacus.dice_optimizer import DiceOptimizer


class DiceAdamOptimizer(DiceOptimizer):
    r"""Adam on the noisy updates of DiceSGD.

    .. math::
        \tilde v_t = v_t + \mathcal{N}(0, \sigma_1^2 I), \quad
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \tilde v_t, \quad
        s_t = \beta_2 s_{t-1} + (1 - \beta_2) \tilde v_t^2

    The noise is inside the moments, so they and all options of Adam are post-processing: the run
    costs what DiceSGD costs, and the moments may be in a checkpoint. Update :math:`v_t`, error,
    arguments, formal guarantees and errors: see `DiceSGDOptimizer`.

    Two misprints of the algorithm are put right: the second moment decays with 1 - beta_2 (not
    beta^2), and the bias corrections count steps from 1 (not 0: division by zero).

    Args:
        optimizer: torch.optim.Adam or AdamW, with any options.
        **kwargs: As `DiceSGDOptimizer`.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithm 3.
    """

    _base_types = (Adam, AdamW)
