"""The steps of DiceSGD: both sums of a batch, and the feedback of the error between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hidden_state_accountants import DiceSgdDpEvent, UnsupportedRunError, validate
from hidden_state_accountants.runs.base import run_of
from hidden_state_accountants.runs.dice_sgd import DiceSgdRun
from hidden_state_adapters.opacus.gradients.norms import (
    check_clip_norms,
    clip_factors,
    smallest_norm,
)
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.gradients import SumsGuard, refuse_second_pass
from hidden_state_adapters.opacus.guards.moments import (
    MomentsGuard,
    refuse_loaded_moments,
    refuse_moments,
)
from hidden_state_adapters.opacus.guards.parameters import ParameterSetGuard
from hidden_state_adapters.opacus.guards.precision import check_precision
from hidden_state_adapters.opacus.guards.settings import (
    check_options,
    check_type,
    refuse_per_layer,
    refuse_step_hooks,
)
from hidden_state_adapters.opacus.mechanism import Mechanism
from hidden_state_adapters.opacus.mechanisms.dice_sgd.error import HiddenError
from hidden_state_adapters.opacus.run.arguments import RunArguments
from hidden_state_adapters.opacus.run.declared import DeclaredRun

_SCHEMA = 1


class DiceSgd(Mechanism):
    """The steps of `DiceSGDOptimizer` and `DiceAdamOptimizer`; see the former.

    Args:
        optimizer: The private optimizer, with its `error_max_grad_norm` (C_2) and `automatic`.
    """

    base_types: ClassVar[tuple[type[Optimizer], ...]] = (SGD,)
    options = frozenset({"error_max_grad_norm", "automatic", "gradient_bound"})
    refused = {  # noqa: RUF012
        "loss_geometry": "the bound on DiceSGD knows nothing of the loss but gradient_bound",
        "feature_norm": "the bound on DiceSGD knows no features; pass gradient_bound",
        "prox": "a proximal map is not in the algorithm",
        "projection": "a projection is not in the algorithm, and would not lower epsilon",
        "projection_radius": "the projection is not in the algorithm, and would not lower epsilon",
        "max_batch_size": "a capped batch is not a Poisson batch, and the bound on DiceSGD has no "
        "term for the cap. Use BatchMemoryManager where batches do not fit into memory",
        "learning_rate_schedule": "the learning rate costs nothing here, so that it need not be "
        "declared: the steps see noisy updates only",
    }
    constant = "the bound on DiceSGD is about constant values. (The learning rate may change.)"
    checked = (
        "constant noise, clip norms and divisor; both clips exactly min(1, C/|v|) v or normalised; "
        "finite gradients, one row each, in float32 or float64, in at most one backward pass per "
        "piece of a batch; the same parameters; noise that was not used before"
    )
    secret = ", and it holds data of the records without noise"

    def __init__(self, optimizer: DPOptimizer):
        super().__init__(optimizer)
        self._check_values()
        self.hidden = HiddenError(self.params)
        self._moments = MomentsGuard(self.base)
        self._sums = SumsGuard(self.params)

    def _check_values(self) -> None:
        optimizer = self.optimizer
        clip_norms = {
            name: getattr(optimizer, name) for name in ("max_grad_norm", "error_max_grad_norm")
        }
        validate.magnitude("noise_multiplier", optimizer.noise_multiplier)
        for name, value in clip_norms.items():
            validate.magnitude(name, value, positive=True)
        if not isinstance(optimizer.automatic, bool):
            raise TypeError(f"Expected automatic to be True or False, got {optimizer.automatic!r}.")
        if not self.params:
            raise UnsupportedRunError("Expected trainable parameters, got none.")
        for param in self.params:
            check_precision("parameters", param)
            refuse_second_pass(param)
        check_clip_norms(self.params, **{name: float(v) for name, v in clip_norms.items()})
        self.run_by_hand()  # checks the noise on the mean, and the values with each other

    # Before there is an optimizer

    @classmethod
    def check_arguments(
        cls, arguments: RunArguments, module: nn.Module, optimizer: Optimizer
    ) -> None:
        """Checks everything that the optimizer checks, before anything is changed."""
        assert arguments.optimizer_class is not None
        check_type(arguments.optimizer_class.__name__, optimizer, cls.base_types)
        refuse_step_hooks(optimizer)
        refuse_per_layer(error_max_grad_norm=arguments.error_max_grad_norm)
        check_options(arguments.loss_reduction, False)
        clip_norm = validate.magnitude("max_grad_norm", arguments.max_grad_norm, positive=True)
        params = [p for p in module.parameters() if p.requires_grad]
        error_clip = _error_clip(arguments, clip_norm)
        check_clip_norms(params, max_grad_norm=clip_norm, error_max_grad_norm=error_clip)
        refuse_moments(optimizer)

    @classmethod
    def new_run(cls, declared: DeclaredRun, noise_multiplier: float) -> DiceSgdRun:
        """What records the declared run."""
        return DiceSgdRun(**_settings(declared, noise_multiplier))

    @classmethod
    def event(
        cls, declared: DeclaredRun, noise_multiplier: float, num_steps: int
    ) -> DiceSgdDpEvent:
        """The declared run with this noise and number of steps."""
        rows = declared.plan.batch_size
        run = DiceSgdRun.of_totals(
            num_steps=num_steps,
            fewest_rows=rows,
            most_rows=rows,
            largest_norm=0.0,
            **_settings(declared, noise_multiplier),
        )
        return run.event()

    @classmethod
    def arguments_of_optimizer(cls, declared: DeclaredRun) -> dict[str, Any]:
        """The second clip, and whether both normalise."""
        names = ("error_max_grad_norm", "automatic")
        return {name: getattr(declared.arguments, name) for name in names}

    # Its part of the guards

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the wrapped optimizer's."""
        names = ("noise_multiplier", "max_grad_norm", "error_max_grad_norm", "automatic")
        return {**{n: getattr(self.optimizer, n) for n in names}, **super().settings}

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Any rule is post-processing, as long as nothing else looks at the gradients."""
        refuse_step_hooks(optimizer)

    def guards(self) -> Sequence[Guard]:
        """The sums, the moments and the error."""
        return (self._sums, self._moments, self.hidden)

    def guards_by_hand(self) -> Sequence[Guard]:
        """The set of parameters, because the module was not seen."""
        return (ParameterSetGuard(self.base),)

    # Its part of a step

    def _clip(self, norms: torch.Tensor, bound: float) -> torch.Tensor:
        if not self.optimizer.automatic:
            return clip_factors(norms, bound)
        return clip_factors(norms, bound, automatic=True, smallest=smallest_norm(self.params))

    def accumulate(self, piece: Piece) -> None:
        """Adds the clipped gradients to summed_grad and the rest of each to the hidden error."""
        factors = self._clip(piece.norms, float(self.optimizer.max_grad_norm))
        # Not the difference of two sums: what is not clipped leaves exactly nothing.
        rests = piece.add_sums(factors, 1 - factors)
        for index, (rest,) in enumerate(rests):
            self.hidden.add_rest(index, rest)

    def further_sums(self) -> Sequence[torch.Tensor]:
        """What the batch adds to the error, which is that of all processes together."""
        return self.hidden.rests

    def before_noise(self, piece: Piece) -> None:
        r"""Adds B times the clipped error to the sums, and moves the error on.

        .. math::
            \sum_i \mathrm{clip}(g_i, C_1) + B\, \mathrm{clip}(e_t, C_2) +
            \mathcal{N}(0, (B \sigma_1)^2 I), \qquad
            B \sigma_1 = \text{noise_multiplier} \cdot C_1

        The noise follows, and the division by B.
        """
        divisor = int(self.optimizer.expected_batch_size)  # type: ignore[arg-type]
        factor = self._clip(self.hidden.norm, float(self.optimizer.error_max_grad_norm))
        fed = factor * divisor
        for index, p in enumerate(self.params):
            # ZBWH24, Algorithm 2, lines 5 and 6, arXiv 2311.14632
            p.summed_grad = torch.addcmul(p.summed_grad, self.hidden.error(index), fed.to(p))  # type: ignore[attr-defined]
        self.hidden.advance(factor, divisor)

    def run_by_hand(self) -> DiceSgdRun:
        """A run whose data set and order are declared when its event is asked for."""
        optimizer = self.optimizer
        return DiceSgdRun(
            noise_multiplier=float(optimizer.noise_multiplier),
            clip_norm=float(optimizer.max_grad_norm),
            error_clip_norm=float(optimizer.error_max_grad_norm),
            batch_size=int(optimizer.expected_batch_size),  # type: ignore[arg-type]
            automatic=optimizer.automatic,
        )

    # Where the run goes on

    def why_not_resumable(self) -> str:
        """The error."""
        return "the error of the feedback, which is data of the records"

    def private_state(self) -> dict[str, Any]:
        """The error, with what it belongs to."""
        return {"dice": self.optimizer.run_state_dict(include_private_state=True)}

    def load_private_state(self, state: Mapping[str, Any], num_steps: int) -> None:
        """Restores the error."""
        found = state.get("dice", {}).get("num_steps")
        if found != num_steps:
            raise ValueError(
                f"The checkpoint is damaged: {num_steps} steps are recorded, but the error is that "
                f"of step {found}."
            )
        self.load_run_state(state["dice"])

    def run_state(self) -> dict[str, Any]:
        """See `DiceOptimizer.run_state_dict`."""
        steps = self.optimizer.num_steps
        if not steps or not self._sums.is_between_batches:
            raise ValueError("Expected the end of a step, got no step yet, or a piece of one.")
        return {
            "schema": _SCHEMA,
            "num_steps": steps,
            "settings": self.settings,
            "private": self.hidden.private_state(),
            "run": {**self.optimizer.run.state_dict(), **self.optimizer.run.private_state()},
        }

    def load_run_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Restores the error of a state that fits, but not the record of the steps.

        Returns:
            The state of the record.

        Raises:
            ValueError: The state is damaged or of another run (the text names the field). Nothing
                is changed then.
        """
        missing = {"schema", "num_steps", "settings", "private"} - set(state)
        if missing or state["schema"] != _SCHEMA:
            raise ValueError(
                f"Expected a state of run_state_dict with schema {_SCHEMA}, got schema "
                f"{state.get('schema')!r}, missing keys {sorted(missing)}."
            )
        for name, expected in self.settings.items():
            if state["settings"].get(name) != expected:
                raise ValueError(
                    f"The state is of another run: expected {name} = {expected!r}, got "
                    f"{state['settings'].get(name)!r}."
                )
        steps = validate.integer("num_steps", state["num_steps"], minimum=1)
        run = state["run"] if "run" in state else self._run_of_totals(state)
        recorded = run_of(run).num_steps
        if recorded != steps:
            raise ValueError(
                f"The state is damaged: num_steps = {steps}, but {recorded} steps are recorded."
            )
        self.hidden.load_private_state(state["private"])
        return run

    def _run_of_totals(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The record of a state of version 0.1, which held only its totals, beside the error."""
        private = state["private"]
        totals = {name: private.get(name) for name in ("fewest_rows", "most_rows")}
        totals["largest_norm"] = private.get("largest_gradient_norm")
        run = self.run_by_hand().state_dict()
        return {**run, "num_steps": state["num_steps"], "totals": totals}

    def before_loading(self, state_dict: Mapping[str, Any], *, is_checkpoint: bool) -> None:
        """Raises UnsupportedRunError for moments that are not part of an engine's checkpoint."""
        by_engine = self.optimizer.context is not None
        if by_engine and not is_checkpoint:
            refuse_loaded_moments(state_dict)

    def after_loading(self) -> None:
        """The loaded moments are those of the run."""
        self._moments.remember()


class DiceAdam(DiceSgd):
    """The same noisy updates; Adam moves the parameters along them."""

    base_types = (Adam, AdamW)


def _settings(declared: DeclaredRun, noise_multiplier: float) -> dict[str, Any]:
    """The arguments of `DiceSgdRun`."""
    arguments = declared.arguments
    clip_norm = validate.magnitude("max_grad_norm", arguments.max_grad_norm, positive=True)
    return {
        "noise_multiplier": validate.magnitude("noise_multiplier", noise_multiplier),
        "clip_norm": clip_norm,
        "error_clip_norm": _error_clip(arguments, clip_norm),
        "automatic": arguments.automatic,
        **declared.batches,
        "gradient_bound": arguments.gradient_bound,
    }


def _error_clip(arguments: RunArguments, clip_norm: float) -> float:
    if arguments.error_max_grad_norm is None:
        return clip_norm
    return validate.magnitude("error_max_grad_norm", arguments.error_max_grad_norm, positive=True)
