"""The optimizers of DiceSGD (Algorithms 2 to 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from dp_accounting import NeighboringRelation
from torch.optim import Optimizer

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    DiceSgdAccountant,
    DiceSgdDpEvent,
    UnsupportedRunError,
)
from hidden_state_accountants.runs.dice_sgd import DiceSgdRun
from hidden_state_accountants.runs.statement import statement_of
from hidden_state_adapters.opacus.guards.settings import (
    check_options,
    check_type,
    refuse_per_layer,
)
from hidden_state_adapters.opacus.mechanisms.dice_sgd.mechanism import DiceAdam, DiceSgd
from hidden_state_adapters.opacus.optimizer import PrivateOptimizer


class DiceOptimizer(PrivateOptimizer):
    """Base of `DiceSGDOptimizer` and `DiceAdamOptimizer`; see the former."""

    mechanism: DiceSgd
    run: DiceSgdRun

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_grad_norm: float,
        expected_batch_size: int,
        error_max_grad_norm: float | None = None,
        automatic: bool = False,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ):
        check_type(type(self).__name__, optimizer, self.mechanism_type.base_types)
        check_options(loss_reduction, secure_mode, expected_batch_size)
        refuse_per_layer(max_grad_norm=max_grad_norm, error_max_grad_norm=error_max_grad_norm)
        self.error_max_grad_norm = (
            max_grad_norm if error_max_grad_norm is None else error_max_grad_norm
        )
        self.automatic = automatic
        super().__init__(
            optimizer,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            **kwargs,
        )

    def privacy_event(
        self,
        *,
        dataset_size: int,
        batch_order: BatchOrder | str,
        num_steps: int | None = None,
        gradient_bound: float = math.inf,
    ) -> DiceSgdDpEvent:
        """The run that really happened, for `hidden_state_accountants.DiceSgdAccountant`.

        Args:
            dataset_size: N.
            batch_order: How the records were dealt into the batches. The optimizer does not see the
                loader: it only checks the number of rows.
            num_steps: The number that was fixed in advance; None takes the number of steps taken.
            gradient_bound: G, a bound on the norm of every per-example gradient before clipping
                that holds for ALL records that could have been in the data. The gradients of this
                run are checked against it. inf if none is known.

        Raises:
            ValueError: No step was taken, or no run can have these values.
            UnsupportedRunError: The run was another one.
        """
        self.check_not_refused()
        self._settings.check_unchanged()
        event = self.run.event(
            dataset_size=dataset_size,
            batch_order=batch_order,
            num_steps=num_steps,
            gradient_bound=gradient_bound,
        )
        if self.context is not None and event != self.run.event():
            raise UnsupportedRunError(
                f"Expected {self.run.event()}, which was recorded, got {event}."
            )
        return event

    def report(
        self,
        delta: float,
        *,
        dataset_size: int,
        batch_order: BatchOrder | str,
        num_steps: int | None = None,
        gradient_bound: float = math.inf,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    ) -> str:
        """A few lines to paste: the proven epsilon, and what the paper would have claimed.

        Args:
            delta: In [0, 1].
            dataset_size: N; see `privacy_event` for this and the next three.
            batch_order: Of the records that the loader delivered.
            num_steps: T.
            gradient_bound: G.
            neighboring_relation: REPLACE_SPECIAL, REPLACE_ONE, or for full and Poisson batches
                ADD_OR_REMOVE_ONE.

        Raises:
            ValueError, UnsupportedRunError: As `privacy_event`, or no bound covers the run.
        """
        event = self.privacy_event(
            dataset_size=dataset_size,
            batch_order=batch_order,
            num_steps=num_steps,
            gradient_bound=gradient_bound,
        )
        guarantee = DiceSgdAccountant(neighboring_relation).compose(event).guarantee
        return statement_of(
            [event],
            guarantee,
            (
                Assumption.checked(self.mechanism.checked),
                *self.guards.assumptions,
                *guarantee.assumptions,
            ),
            delta,
            update_rule=type(self.original_optimizer).__name__,
        ).lines()

    # The error stays here.

    def run_state_dict(self, *, include_private_state: bool = False) -> dict[str, Any]:
        """What the run needs to go on elsewhere, beside `state_dict()` and the model.

        It holds the error: data of the records without noise. Whoever sees it, beside the noisy
        updates, gets no guarantee at all. Keep it where the records are, and delete it when the
        run is over. (`state_dict()` holds learning rate, moments and the like, computed from noisy
        updates only. What stays of the account is `privacy_event(...).to_dict()`.)

        Args:
            include_private_state: True says that you know this.

        Raises:
            ValueError: include_private_state is False, or the batch is not finished.
            UnsupportedRunError: A step was refused.
        """
        if include_private_state is not True:
            raise ValueError(
                "Expected include_private_state=True: the run can only go on with the error, which "
                "holds data of the records without noise. Keep what you get as secret as the "
                "records. For the account alone, keep privacy_event(...).to_dict()."
            )
        self.check_not_refused()
        return self.mechanism.run_state()

    def load_run_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `run_state_dict` returned, into an optimizer that took no step.

        Load model and `state_dict()` of the same moment, too, and each state only once: no bound
        here covers what two continuations of a run show together.

        Raises:
            UnsupportedRunError: An engine made the optimizer: use its load_checkpoint; or a step
                was refused here.
            ValueError: The state is damaged or of another run (the text names the field), or steps
                were taken here. Nothing is changed then.
        """
        if self.context is not None:
            raise UnsupportedRunError(
                "Expected engine.load_checkpoint, got load_run_state_dict: model, error, recorded "
                "steps and position are restored together. Save with engine.save_checkpoint("
                "include_private_state=True, stays_private=True)."
            )
        self.check_not_refused()
        if self.num_steps or self._batch.rows:
            raise ValueError(
                f"Expected an optimizer without steps, got one with {self.num_steps}: they stay "
                "accounted. Construct another one."
            )
        run = self.mechanism.load_run_state(state)
        self.run.load_state_dict(run)  # which `load_run_state` has tried
        self.resume()

    def __repr__(self) -> str:
        settings = ", ".join(f"{n}={v!r}" for n, v in self.mechanism.settings.items())
        return f"{type(self).__name__}({settings}, of {self.original_optimizer!r})"


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
        generator: Source of the noise; None is one of our own, which no seed reaches.
        secure_mode: As in Opacus.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: Opacus' ghost clipping, several processes, parameters in low
            precision, another optimizer. From `step`: the run is not covered; the text says why.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 and 4.
    """

    mechanism_type = DiceSgd


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

    mechanism_type = DiceAdam
