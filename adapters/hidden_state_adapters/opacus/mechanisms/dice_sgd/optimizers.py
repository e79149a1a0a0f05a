"""The optimizers of DiceSGD (Algorithms 2 to 4)."""

from __future__ import annotations

from hidden_state_adapters.opacus.mechanisms.dice_sgd.mechanism import DiceAdam, DiceSgd
from hidden_state_adapters.opacus.optimizer import PrivateOptimizer


class DiceSGDOptimizer(PrivateOptimizer):
    r"""DP-SGD that feeds back, clipped again, what the clip cut off.

    .. math::
        v_t = \frac1B \sum_{i \in B_t} \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e_t, C_2), \quad
        e_{t+1} = e_t + \frac1B \sum_{i \in B_t} g_i - v_t, \quad e_0 = 0

    and the wrapped optimizer takes a step along :math:`v_t + \mathcal{N}(0, \sigma_1^2 I)`,
    :math:`\sigma_1 = \text{noise_multiplier} \cdot C_1 / B`. All parameters are clipped as one
    vector with exactly min(1, C/|v|) (Opacus adds 1e-6 to the norm)::

        model, optimizer, loader = HiddenStatePrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader,
            noise_multiplier=20.0, max_grad_norm=0.1, mechanism=DiceSGD(gradient_bound=2.0))

    The gradients are those of Opacus. Of a linear head with a known loss (`criterion`,
    `feature_norm`) they are computed from its formula, and its Lipschitz constant is the gradient
    bound.

    Formal guarantees:
      - Those of the `DiceSgdDpEvent` of the run under `hidden_state_accountants.DiceSgdAccountant`:
        all iterates, all noisy updates and all that is computed from them are released. So
        momentum, Nesterov, weight decay and learning rates that depend on released values are
        covered: they never see :math:`v_t` without noise. The error's recursion does not know them.
      - The error is never in `state_dict()`, `state`, repr, a copy or a pickle. As with every
        DPOptimizer, p.grad (between backward() and the end of step()), p.grad_sample and
        p.summed_grad hold data of the records; do not log them.
      - Checked at every step: batches, constant settings, the same parameters, finite gradients,
        the gradient bound.
      - Not covered: rounding of floating-point numbers. Skipping the step of an empty Poisson batch
        shows that it was empty.

    Args:
        optimizer: torch.optim.SGD, with any options.
        noise_multiplier: Standard deviation of the noise on the SUM of clipped gradients over
            max_grad_norm, as everywhere in Opacus; constant. At equal noise the epsilon is larger
            than that of DP-SGD.
        max_grad_norm: C_1 > 0.
        expected_batch_size: B, a public integer constant: the divisor of the sums, whatever the
            number of rows (or the number of pieces under BatchMemoryManager). Poisson batches are
            accounted with the probability B/N: let B divide N, then it is that of Opacus.
        error_max_grad_norm: C_2 > 0, in units of the MEAN update; None is C_1, as the paper
            recommends. One record moves the clipped mean by C_1 / B, but can move the clipped error
            by up to 2 C_2 in every step: without a gradient bound choose it far smaller.
        automatic: Normalise instead of clip: C v/|v|, and 0 at 0. A gradient bound is then of no
            use.
        loss_reduction: "mean", or "sum": p.grad is then B times larger.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: Another optimizer. From `step`: the run is not covered; the text says
            why.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 and 4.
    """

    mechanism_type = DiceSgd
    mechanism: DiceSgd


class DiceAdamOptimizer(PrivateOptimizer):
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

    mechanism_type = DiceAdam
    mechanism: DiceSgd
