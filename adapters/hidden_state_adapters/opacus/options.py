"""The arguments of `make_private`: what a run is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hidden_state_accountants import LossGeometry, UnsupportedRunError, validate
from hidden_state_adapters.opacus.order import Batches, default_order
from hidden_state_adapters.opacus.step_maps import StepMap, maps_after

_OF_HIDDEN_ITERATES = ("loss_geometry", "feature_norm", "after", "schedule")


def _batches(order: Any) -> Batches:
    return order if isinstance(order, Batches) else Batches(order)


@attrs.frozen(kw_only=True, eq=False)
class RunArguments:
    """The arguments of one `make_private`; its docstring explains every one.

    Attributes:
        max_grad_norm: "auto" until the loss is known.
        after: Maps that follow every step, by name: "prox", then "projection"; None for none.
        optimizer_class: Private optimizer of the run, as soon as the engine chose it.
    """

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader
    max_grad_norm: float | Sequence[float] | str
    batch_order: Batches = attrs.field(converter=_batches)
    criterion: Any = None
    loss_geometry: LossGeometry | str | None = None
    feature_norm: float | None = None
    targets: Any = None
    loop_maps_records: bool = False
    after: Mapping[str, StepMap] | None = None
    schedule: Any = None
    num_steps: int | None = None
    mechanism: Any = None
    optimizer_class: Any = None
    distributed: bool | None = None
    poisson_sampling: bool | None = None
    batch_first: bool = True
    clipping: str = "flat"
    grad_sample_mode: str | None = None
    loss_reduction: str = "mean"
    noise_generator: torch.Generator | None = None
    rand_on_empty: bool = False
    wrap_model: bool = True

    @classmethod
    def of(cls, **given: Any) -> RunArguments:
        """Reads the keyword arguments of a call; None is as good as none."""
        own = {name: value for name, value in given.items() if value is not None}
        if "batch_order" not in own:
            sampling = own.get("poisson_sampling")
            own["batch_order"] = default_order(own.get("data_loader"), sampling)
        own["after"] = maps_after(own.get("after"))
        if "criterion" in own and "feature_norm" in own:
            own.setdefault("loss_geometry", "auto")
        if own.get("grad_sample_mode") == "ghost" and "loss_geometry" not in own:
            own.setdefault("criterion", nn.CrossEntropyLoss())  # Opacus' default, which is returned
        return cls(**own)

    def with_clip_norm(self, loss: LossGeometry | None) -> RunArguments:
        """Returns the arguments with the clip norm that max_grad_norm="auto" stands for."""
        if not isinstance(self.max_grad_norm, str):
            return self
        if self.max_grad_norm != "auto" or loss is None or loss.lipschitz is None:
            raise ValueError(
                f'Expected max_grad_norm to be a number, got {self.max_grad_norm!r}: "auto" is '
                "just above the longest gradient of a known loss. Pass criterion= and "
                "feature_norm=, or a number."
            )
        # A clip at the bound itself would act on what is rounded up.
        return attrs.evolve(self, max_grad_norm=math.ceil(loss.lipschitz * 1.00001 * 1e4) / 1e4)

    @property
    def asks_for_hidden_iterates(self) -> list[str]:
        """The arguments that were passed and make sense for a hidden state only, by name."""
        own = [name for name in _OF_HIDDEN_ITERATES if getattr(self, name) is not None]
        is_known = self.loss_geometry == "auto" and self.criterion is not None
        return ["criterion", *own[1:]] if is_known else own

    @property
    def is_ghost(self) -> bool:
        """True if Opacus clips in a second backward pass, of a criterion that it calls."""
        return self.grad_sample_mode == "ghost"

    @property
    def clips_per_layer(self) -> bool:
        """True if every parameter has a clip norm of its own."""
        return self.clipping == "per_layer"

    @property
    def clip_norm(self) -> float:
        """The clip norm for all parameters together: what the noise multiplier multiplies."""
        norms = self.max_grad_norm
        return math.hypot(*norms) if isinstance(norms, list | tuple) else float(norms)  # type: ignore[arg-type]

    def check(self) -> None:
        """Checks what the arguments say by themselves, and whether the mechanism takes them.

        Raises:
            TypeError, ValueError: One has an impossible value.
            UnsupportedRunError: The run could not be checked or accounted.
        """
        mechanism = self.optimizer_class
        for argument, reason in mechanism.refused.items():
            value = getattr(self, argument)
            if value is not None:
                raise UnsupportedRunError(
                    f"Expected {argument} = None with {mechanism.__name__}, got {value!r}: "
                    f"{reason}. Leave it out."
                )
        self._check_clip(mechanism.takes_per_layer)
        if self.rand_on_empty:
            raise UnsupportedRunError(
                "Expected rand_on_empty = False, got True: a made-up record in an empty batch "
                "moves the sum by two clip norms, and the noise is for one. Leave it out: empty "
                "batches work."
            )
        if self.criterion is not None and not callable(self.criterion):
            raise TypeError(
                "Expected criterion to be a loss such as torch.nn.MSELoss(), got "
                f"{self.criterion!r}."
            )
        mode = self.grad_sample_mode
        if mode not in (None, "hooks", "functorch", "ew", "ghost"):
            raise UnsupportedRunError(
                'Expected grad_sample_mode = "hooks", "functorch", "ew" or "ghost", got '
                f"{mode!r}: nothing computes the per-example gradients of the model there. Use "
                '"functorch", which takes any layer.'
            )
        if self.is_ghost and (self.clips_per_layer or not self.wrap_model):
            raise UnsupportedRunError(
                'Expected clipping = "flat" and wrap_model = True with grad_sample_mode="ghost", '
                f"got {self.clipping!r} and {self.wrap_model}, as in Opacus. Use "
                'grad_sample_mode="hooks".'
            )

    def _check_clip(self, takes_per_layer: bool) -> None:
        if self.clipping == "adaptive":
            raise UnsupportedRunError(
                'Expected clipping = "flat" or "per_layer", got "adaptive": it also publishes how '
                "many gradients were not clipped, which noise_multiplier does not pay for. Use one "
                "fixed clip norm, or Opacus' schedulers of it."
            )
        norms, is_list = self.max_grad_norm, isinstance(self.max_grad_norm, list | tuple)
        if not (self.clips_per_layer and takes_per_layer):
            if self.clipping != "flat" or is_list:
                raise UnsupportedRunError(
                    'Expected clipping = "flat" and one max_grad_norm, got '
                    f"{self.clipping!r} and {norms!r}: the bound needs one fixed clip of the whole "
                    'gradient of a record. ("per_layer" is accounted by composition.)'
                )
            return
        groups = self.optimizer.param_groups
        count = sum(p.requires_grad for group in groups for p in group["params"])
        if not is_list or len(norms) != count:  # type: ignore[arg-type]
            raise ValueError(
                f"Expected max_grad_norm to be a list of {count} clip norms, one for each "
                f'trainable parameter, with clipping="per_layer", got {norms!r}.'
            )
        for norm in norms:  # type: ignore[union-attr]
            validate.magnitude("max_grad_norm", norm, positive=True)
