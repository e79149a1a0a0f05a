"""Composition: Opacus' clips and any update rule along the noisy gradients; every step counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opacus.optimizers import DPOptimizerFastGradientClipping, DPPerLayerOptimizer
from torch import nn
from torch.optim import SGD, Optimizer

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_accountants.runs.run import Step
from hidden_state_adapters.opacus.declared import RunArguments
from hidden_state_adapters.opacus.gradients import Piece
from hidden_state_adapters.opacus.precision import is_half
from hidden_state_adapters.opacus.private_step import PrivateOptimizer
from hidden_state_adapters.opacus.update_rules import (
    UnsupportedUpdateError,
    move_by_any_rule,
    refuse_moments,
    refuse_step_hooks,
    rule_of,
    update_of,
)

_NOT_NEEDED = "every step counts, whatever the update does"
_HALF = (
    "criterion= without feature_norm=: every step counts (for one linear head pass both, and its "
    "last iterate alone counts)"
)


class ComposedOptimizer(PrivateOptimizer):
    """Any optimizer of torch along noisy gradients, on the batches of a plan.

    What `HiddenStatePrivacyEngine.make_private` makes where nothing asks for a hidden state. The
    noisy gradients are Gaussian mechanisms, each with its batch; what an optimizer computes from
    them and from public schedules is post-processing.

    Formal guarantees:
      - Relation: that of the recorded `LastIterateDpEvent`, which has no loss geometry.
      - Released: every iterate, and momentum and moments; not what they were computed from.
      - As Opacus computes it: the gradient of every record, and with clipping in two passes or of
        every layer its clip.
      - Checked at every step: batch and number of records, noise, clip and divisor as recorded,
        gradients that are finite, the model as the last step left it.
    """

    refused = {  # noqa: RUF012
        "loss_geometry": f"{_NOT_NEEDED}. Leave out optimizer_class for plain SGD",
        "feature_norm": _NOT_NEEDED,
        "after": f"{_NOT_NEEDED}. Leave out optimizer_class for plain SGD",
        "schedule": f"{_NOT_NEEDED}, so that it need not be declared",
    }
    checked = "clip norm, noise and divisor as recorded; any update along the noisy gradients"
    takes_per_layer = True
    is_composed = True

    def _start(self) -> None:
        arguments = self.declared.arguments
        self._accumulate: Any = None  # Opacus' own, where nothing of the sums is ours
        self._other_rule = ""  # of the last step that was not one of plain SGD
        own = PrivateOptimizer.constants
        if arguments.clips_per_layer:
            self.max_grad_norms: list[Any] = list(arguments.max_grad_norm)  # type: ignore[arg-type]
            self._accumulate = DPPerLayerOptimizer.clip_and_accumulate
            self.constants = (*own, "max_grad_norm", "norms_of_layers")  # type: ignore[misc]
        elif self._passes.ghost is not None:
            self._accumulate = DPOptimizerFastGradientClipping.accumulate
            self.constants = (*own, "max_grad_norm", "norm_of_the_model")  # type: ignore[misc]

    @property
    def norms_of_layers(self) -> tuple[float, ...]:
        """The clip norms of the parameters, of clipping per layer."""
        return tuple(map(float, self.max_grad_norms))

    @property
    def norm_of_the_model(self) -> float:
        """The clip norm of ghost clipping, which the model has."""
        return float(self._passes.ghost.max_grad_norm)

    @classmethod
    def check_arguments(
        cls, arguments: RunArguments, module: nn.Module, optimizer: Optimizer
    ) -> None:
        """Raises UnsupportedRunError for a state that no accounted step left."""
        refuse_step_hooks(optimizer)
        sums_here = not (arguments.is_ghost or arguments.clips_per_layer)
        if not sums_here and any(is_half(p) for p in module.parameters() if p.requires_grad):
            raise UnsupportedRunError(
                'Expected grad_sample_mode = "hooks", "functorch" or "ew" and clipping = "flat" '
                "with parameters in half precision, got a sum of gradients that Opacus makes in "
                "it: one record counts for more than the clip norm. Train in float32."
            )
        if getattr(arguments.optimizer, "run", None) is None:
            refuse_moments(optimizer)  # those of an engine's optimizer were left by its runs

    @property
    def blocks(self) -> Sequence[Sequence[nn.Parameter]]:
        """All that is trained now: layers may be frozen in the middle of a run."""
        return [[param for param in self.trained if param.requires_grad]]

    @property
    def update_rule(self) -> str:
        """The optimizer that moves the parameters, and another clip than the flat one."""
        clipped = ", clipped per layer" if self.declared.arguments.clips_per_layer else ""
        return (self._other_rule or rule_of(self.original_optimizer)) + clipped

    @property
    def why_composition(self) -> str:
        """The reason why no bound on hidden iterates knows update or loss, or ""."""
        if self.update_rule == SGD.__name__:
            return "" if self.declared.arguments.criterion is None else _HALF
        return (
            f"no hidden-state bound for {self.update_rule}: every step counts; epsilon is that of "
            "composition"
        )

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError if something else looks at the gradients than the rule."""
        refuse_step_hooks(optimizer)
        if self._accumulate and not all(param.requires_grad for param in self.trained):
            raise UnsupportedRunError(
                "Expected the trainable parameters of the start, got fewer: with "
                'clipping="per_layer" or grad_sample_mode="ghost" Opacus looks at all of them. '
                "Start another run for another set, or leave both out."
            )

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """The assumptions, that on a rule that is not one of torch's among them."""
        yield from super().assumptions
        rule = type(self.original_optimizer)
        if rule.__module__.startswith("torch.optim"):
            yield Assumption.checked("momentum and moments made from noisy gradients only")
        else:
            yield Assumption.declared(
                f"of the records {rule.__name__} sees only the noisy gradients in .grad"
            )

    def clip_and_accumulate(self) -> None:
        """Adds the clipped gradients of a piece to the sums."""
        if self._accumulate:
            self._same_clip_norm()
            self._accumulate(self)
        else:
            super().clip_and_accumulate()

    def move(self, piece: Piece) -> None:
        """Lets the wrapped optimizer move what is trained."""
        move_by_any_rule(self.original_optimizer)
        self._passes.keep()

    def recorded(self, batch: int | None, rows: int, largest_norm: float, **values: Any) -> Step:
        """Returns the record of a step, of plain SGD with its rate and decay."""
        try:
            values |= update_of(self, self.declared.plan.batch_size)
        except UnsupportedUpdateError:  # a learning rate of 1 stands for it
            self._other_rule = rule_of(self.original_optimizer)
        return super().recorded(batch, rows, largest_norm, **values)
