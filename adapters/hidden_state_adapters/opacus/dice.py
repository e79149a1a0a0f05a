"""DiceSGD (Algorithms 2 to 4): two sums of a batch, and the feedback of the error between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_accountants.runs import algorithms
from hidden_state_accountants.runs.algorithms import Algorithm
from hidden_state_adapters.opacus.declared import DeclaredRun, RunArguments
from hidden_state_adapters.opacus.gradients import (
    Figure,
    Piece,
    check_clip_norms,
    clip_factors,
    joint_norms,
    smallest_norm,
)
from hidden_state_adapters.opacus.private_step import PrivateOptimizer
from hidden_state_adapters.opacus.update_rules import (
    move_by_any_rule,
    refuse_moments,
    refuse_step_hooks,
)


@attrs.frozen
class DiceSGD:
    """DiceSGD as `mechanism` of make_private, with SGD, Adam or AdamW; see `DiceSGDOptimizer`.

    Args:
        error_max_grad_norm: C_2 > 0, in units of the MEAN update; None is C_1, as the paper
            recommends. One record moves the clipped mean by C_1 / B, but can move the clipped error
            by up to 2 C_2 in every step: without a gradient bound choose it far smaller.
        automatic: True to normalise instead of clip: C v/|v|, and 0 at 0. A gradient bound is then
            of no use.
        gradient_bound: Bound on the norm of every per-example gradient before clipping, for all
            records that could have been in the data; checked at every step.
    """

    error_max_grad_norm: float | None = attrs.field(default=None, validator=validate.POSITIVE)
    automatic: bool = attrs.field(default=False, validator=validate.FLAG)
    gradient_bound: float = math.inf

    def error_clip(self, clip_norm: float) -> float:
        """Returns C_2, which is C_1 = `clip_norm` unless it was given."""
        return self.error_max_grad_norm or clip_norm

    def optimizer_class(self, optimizer: Optimizer) -> type[PrivateOptimizer]:
        """Returns the class of the private optimizer that wraps `optimizer`."""
        return DiceAdamOptimizer if isinstance(optimizer, Adam) else DiceSGDOptimizer


class _Hidden(list[torch.Tensor]):
    """Tensors that no text shows: data of the records without noise."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class DiceSGDOptimizer(PrivateOptimizer):
    r"""DP-SGD that feeds back, clipped again, what the clip cut off.

    .. math::
        v_t = \frac1B \sum_{i \in B_t} \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e_t, C_2), \quad
        e_{t+1} = e_t + \frac1B \sum_{i \in B_t} g_i - v_t, \quad e_0 = 0

    and the wrapped optimizer takes a step along :math:`v_t + \mathcal{N}(0, \sigma_1^2 I)`,
    :math:`\sigma_1 = \text{noise_multiplier} \cdot C_1 / B`. All parameters are clipped as one
    vector with exactly min(1, C/|v|) (Opacus adds 1e-6 to the norm).

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
      - Not covered: rounding of floating-point numbers. Skipping the step of an empty Poisson batch
        shows that it was empty.

    Args:
        optimizer: Optimizer torch.optim.SGD, with any options.
        **kwargs: Run of the engine and arguments of DPOptimizer. The noise is constant, on the SUM
            of clipped gradients, as everywhere in Opacus; at equal noise epsilon is larger than
            that of DP-SGD. B is a public integer, whatever the number of rows: Poisson batches are
            accounted with the probability B/N.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: Another optimizer. From `step`: the run is not covered; the text says
            why.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 and 4.
    """

    base_types: ClassVar[tuple[type[Optimizer], ...]] = (SGD,)
    options = DiceSGD
    refused = {  # noqa: RUF012
        "after": "it is not in the algorithm, and would not lower epsilon",
        "schedule": "the learning rate costs nothing here, so that it need not be "
        "declared: the steps see noisy updates only",
    }
    constants = (
        "noise_multiplier", "max_grad_norm", "error_max_grad_norm", "automatic",
        *PrivateOptimizer.constants,
    )  # fmt: skip
    constant = "the bound on DiceSGD is about constant values. (The learning rate may change.)"
    checked = (
        "constant noise, clip norms and divisor; both clips exactly min(1, C/|v|) v or normalised; "
        "finite gradients, one of every record; the same parameters"
    )

    def _start(self) -> None:
        arguments = self.declared.arguments
        self.error_max_grad_norm = arguments.mechanism.error_clip(arguments.clip_norm)
        self.automatic: bool = arguments.mechanism.automatic
        self._smallest = smallest_norm(self.trained) if self.automatic else None
        self._errors = _Hidden(torch.zeros_like(param.detach()) for param in self.trained)
        self._rests = _Hidden()  # what the pieces of the batch add to the error

    # Before there is an optimizer

    @classmethod
    def check_arguments(
        cls, arguments: RunArguments, module: nn.Module, optimizer: Optimizer
    ) -> None:
        """Checks everything that the optimizer checks, before anything is changed."""
        name = arguments.optimizer_class.__name__
        if type(optimizer) not in cls.base_types:
            kinds = " or ".join(f"torch.optim.{kind.__name__}" for kind in cls.base_types)
            raise UnsupportedRunError(
                f"Expected {kinds} in {name}, got {type(optimizer).__name__}: only these were read."
            )
        refuse_step_hooks(optimizer)
        if arguments.loss_geometry not in (None, "auto"):
            raise UnsupportedRunError(
                f"Expected loss_geometry = None with {name}, got "
                f"{arguments.loss_geometry}: the bound on DiceSGD knows nothing of the loss but "
                "gradient_bound. Leave it out; or pass criterion= and feature_norm=."
            )
        clip_norm = validate.magnitude("max_grad_norm", arguments.max_grad_norm, positive=True)
        params = [p for p in module.parameters() if p.requires_grad]
        error_clip = arguments.mechanism.error_clip(clip_norm)
        check_clip_norms(params, max_grad_norm=clip_norm, error_max_grad_norm=error_clip)
        refuse_moments(optimizer)

    @classmethod
    def algorithm(cls, declared: DeclaredRun, noise_multiplier: float) -> Algorithm:
        """See `PrivateOptimizer.algorithm`."""
        arguments = declared.arguments
        options: DiceSGD = arguments.mechanism
        bound = options.gradient_bound
        if declared.lipschitz is not None and not options.automatic:
            bound = min(bound, declared.lipschitz)  # of a known loss, for all possible records
        return algorithms.DiceSGD(
            noise_multiplier=validate.magnitude("noise_multiplier", noise_multiplier),
            clip_norm=arguments.clip_norm,
            error_clip_norm=options.error_clip(arguments.clip_norm),
            automatic=options.automatic,
            gradient_bound=bound,
        )

    # Its part of a step

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Any rule is post-processing, as long as nothing else looks at the gradients."""
        refuse_step_hooks(optimizer)

    def hidden_norm(self) -> Figure:
        """Returns the norm of the error."""
        self._error_norm = joint_norms([error[None] for error in self._errors])[0]
        return self._error_norm

    def clip_and_accumulate(self) -> None:
        """Adds the clipped gradients to summed_grad and the rest of each to that of the batch."""
        piece = self._piece
        if not math.isfinite(piece.error):
            raise UnsupportedRunError(
                f"step {piece.step}: the error overflowed; no clip bounds it."
            )
        factors = clip_factors(piece.norms, float(self.max_grad_norm), self._smallest)
        # Not the difference of two sums: what is not clipped leaves exactly nothing.
        rests = [rest for (rest,) in piece.add_sums(factors, 1 - factors)]
        if self._rests:
            rests = [before + rest for before, rest in zip(self._rests, rests, strict=True)]
        self._rests = _Hidden(rests)

    def add_noise(self) -> None:
        r"""Adds noise and B times the clipped error to the sums, and moves the error on.

        .. math::
            \sum_i \mathrm{clip}(g_i, C_1) + B\, \mathrm{clip}(e_t, C_2) +
            \mathcal{N}(0, (B \sigma_1)^2 I), \qquad
            B \sigma_1 = \text{noise_multiplier} \cdot C_1, \\
            e \gets [e - \mathrm{clip}(e, C_2)] + \frac1B \sum_i [g_i - \mathrm{clip}(g_i)]

        The division by B follows. Of several processes the error is that of all of them together.
        """
        super().add_noise()
        if self.group is not None:
            self.group.add_up(self._rests)
        divisor = int(self.expected_batch_size)  # type: ignore[arg-type]
        factor = clip_factors(self._error_norm, float(self.error_max_grad_norm), self._smallest)
        fed, left = factor * divisor, 1 - factor
        for param, error, rest in zip(self.trained, self._errors, self._rests, strict=True):
            assert param.grad is not None
            # ZBWH24, Algorithm 2, lines 5 to 7, arXiv 2311.14632
            param.grad.addcmul_(error, fed.to(error))
            error.mul_(left.to(error)).add_(rest, alpha=1 / divisor)
        self._rests = _Hidden()

    def move(self, piece: Piece) -> None:
        """Lets the wrapped optimizer move what is trained."""
        self._passes.show()
        move_by_any_rule(self.original_optimizer)
        self._passes.keep()

    # Where the run goes on

    def why_not_resumable(self) -> str:
        """Returns the name of the error."""
        return "the error of the feedback, which is data of the records"

    def private_state(self) -> dict[str, Any]:
        """Returns the error.

        Raises:
            ValueError: A batch is not finished.
        """
        if self._rests:
            raise ValueError("Expected the end of a step, got a piece of one.")
        return {"error": [error.cpu().clone() for error in self._errors]}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores the error.

        Raises:
            ValueError: It is of other parameters, or damaged; nothing is changed.
        """
        errors = state.get("error", ())
        shapes = [tuple(error.shape) for error in errors]
        expected = [tuple(param.shape) for param in self.trained]
        if shapes != expected:
            raise ValueError(f"Expected an error of shapes {expected}, got {shapes}.")
        if not all(bool(torch.isfinite(error).all()) for error in errors):
            raise ValueError("The private state is damaged: the error is not finite.")
        pairs = zip(errors, self.trained, strict=True)
        self._errors = _Hidden(error.to(param, copy=True) for error, param in pairs)

    def forget_pieces(self) -> None:
        """See `PrivateOptimizer.forget_pieces`."""
        super().forget_pieces()
        self._rests = _Hidden()


class DiceAdamOptimizer(DiceSGDOptimizer):
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
        optimizer: Optimizer torch.optim.Adam or AdamW, with any options.
        **kwargs: Arguments of `DiceSGDOptimizer`.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithm 3.
    """

    base_types = (Adam, AdamW)
    checked = DiceSGDOptimizer.checked
