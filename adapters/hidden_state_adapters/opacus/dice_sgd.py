"""DiceSGD for Opacus (Algorithm 2; Algorithm 4 with automatic=True)."""

from __future__ import annotations

from torch.optim import SGD

from hidden_state_adapters.opacus.dice_optimizer import DiceOptimizer


class DiceSGDOptimizer(DiceOptimizer):
    r"""DP-SGD that feeds back, clipped again, what the clip cut off.

    .. math::
        v_t = \frac1B \sum_{i \in B_t} \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e_t, C_2), \quad
        e_{t+1} = e_t + \frac1B \sum_{i \in B_t} g_i - v_t, \quad e_0 = 0

    and the wrapped optimizer takes a step along :math:`v_t + \mathcal{N}(0, \sigma_1^2 I)`,
    :math:`\sigma_1 = \text{noise_multiplier} \cdot C_1 / B`. All parameters are clipped as one
    vector with exactly min(1, C/|v|) (Opacus adds 1e-6 to the norm). With batches that are dealt
    and checked: ``HiddenStatePrivacyEngine().make_private(..., optimizer_class=DiceSGDOptimizer)``.
    By hand::

        model = GradSampleModule(model)
        loader = DPDataLoader.from_data_loader(loader)        # Poisson batches
        optimizer = DiceSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.5),
            noise_multiplier=20.0, max_grad_norm=0.1, expected_batch_size=150)
        ...
        print(optimizer.report(1e-5, dataset_size=1500, batch_order="poisson"))

    Formal guarantees:
      - Those of `privacy_event(...)` under `hidden_state_accountants.DiceSgdAccountant`: all
        iterates, all noisy updates and all that is computed from them are released. So momentum,
        Nesterov, weight decay and learning rates that depend on released values are covered: they
        never see :math:`v_t` without noise. The error's recursion does not know them.
      - The error is never in `state_dict()`, `state`, repr, a copy or a pickle. As with every
        DPOptimizer, p.grad (between backward() and the end of step()), p.grad_sample and
        p.summed_grad hold data of the records; do not log them.
      - Checked at every step: constant settings, the same parameters, finite per-example gradients
        of one backward pass in float32 or float64, sums that nobody changed, noise that was not
        used before. Number of rows and gradient bound: by `privacy_event`.
      - Not covered: rounding of floating-point numbers; how the loader dealt the records, and that
        one row is one record, are the user's word. Skipping the step of an empty Poisson batch
        shows that it was empty.

    Args:
        optimizer: torch.optim.SGD, with any options.
        noise_multiplier: Standard deviation of the noise on the SUM of clipped gradients over
            max_grad_norm, as everywhere in Opacus; constant. At equal noise the epsilon is larger
            than that of DP-SGD.
        max_grad_norm: C_1 > 0.
        expected_batch_size: B, a public integer constant: the divisor of the sums, whatever the
            number of rows (or the number of pieces under BatchMemoryManager). Poisson batches are
            accounted with the probability B/N: let B divide N, then it is that of DPDataLoader.
        error_max_grad_norm: C_2 > 0, in units of the MEAN update; None is C_1, as the paper
            recommends. One record moves the clipped mean by C_1 / B, but can move the clipped error
            by up to 2 C_2 in every step: without a gradient bound choose it far smaller.
        automatic: Normalise instead of clip: C v/|v|, and 0 at 0. A gradient bound is then of no
            use.
        loss_reduction: "mean", or "sum": p.grad is then B times larger.
        generator: Source of the noise; None is torch's.
        secure_mode: As in Opacus.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: Opacus' ghost clipping, several processes, parameters in low
            precision, another optimizer. From `step`: the run is not covered; the text says why.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 and 4.
    """

    _base_types = (SGD,)
