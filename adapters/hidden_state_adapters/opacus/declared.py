"""The arguments of a run and what follows from them, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from dp_accounting import NeighboringRelation
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hidden_state_accountants import LossGeometry, UnsupportedRunError, validate
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus import criteria
from hidden_state_adapters.opacus.criteria import KnownCriterion
from hidden_state_adapters.opacus.frozen import FrozenPart
from hidden_state_adapters.opacus.order import Batches, default_order, plan_batches
from hidden_state_adapters.opacus.precision import check_precision, is_half
from hidden_state_adapters.opacus.processes import WRAPPERS, ProcessGroup, trains_together
from hidden_state_adapters.opacus.registry import DeclaredSchedule
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
        """Checks what the arguments say by themselves, and whether the mechanism takes them."""
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


@attrs.frozen(eq=False)
class DeclaredRun:
    """The arguments of one `make_private`, checked, and what was derived from them.

    Attributes:
        arguments: Arguments that were passed.
        inner: Module without Opacus' wrapper.
        optimizer: Optimizer without Opacus' wrapper.
        plan: Plan of the batches.
        loss: Geometry of the loss, or None.
        head: Linear layer of a known loss, whose gradients follow from what goes in and comes out;
            or None.
        frozen: Part of the model that is kept in eval() mode.
        schedule: Declared learning rates and number of steps.
        relation: Neighbouring relation of the guarantee.
        group: Processes that train it together; None for one.
    """

    arguments: RunArguments
    inner: nn.Module
    optimizer: Optimizer
    plan: BatchPlan
    loss: LossGeometry | None
    head: nn.Linear | None
    frozen: FrozenPart
    schedule: DeclaredSchedule
    relation: NeighboringRelation
    group: ProcessGroup | None = None

    @property
    def mechanism(self) -> Any:
        """Class of the `PrivateOptimizer` that runs."""
        return self.arguments.optimizer_class

    @property
    def maps(self) -> Mapping[str, StepMap]:
        """Maps that follow every step, by name: "prox", then "projection"."""
        return self.arguments.after or {}

    @property
    def lipschitz(self) -> float | None:
        """Declared bound on per-example gradient norms."""
        return None if self.loss is None else self.loss.lipschitz

    @property
    def known_criterion(self) -> KnownCriterion | None:
        """Criterion that the constants of the loss were taken from."""
        if self.head is None:
            return None
        return KnownCriterion.of(self.arguments.criterion, self.head.out_features)

    @property
    def trained(self) -> list[nn.Parameter]:
        """Parameters that are trained."""
        return [p for p in self.inner.parameters() if p.requires_grad]

    @property
    def scale(self) -> int:
        """Factor of a learning rate: events divide by b, a "sum" optimizer does not."""
        return 1 if self.arguments.loss_reduction == "mean" else self.plan.batch_size

    def fields(self, noise_multiplier: float) -> dict[str, Any]:
        """Returns what is the same where a run goes on, beside what its recorder compares.

        In plain types, for a checkpoint.
        """
        arguments, known = self.arguments, self.known_criterion
        norms, radius = arguments.max_grad_norm, arguments.feature_norm
        per_layer = [float(norm) for norm in norms] if isinstance(norms, list | tuple) else None
        return {
            "neighboring_relation": self.relation.name,
            "noise_multiplier": float(noise_multiplier),
            "max_grad_norm": per_layer or arguments.clip_norm,
            "loss_reduction": arguments.loss_reduction,
            "optimizer_class": arguments.optimizer_class.__name__,
            "mechanism": arguments.mechanism and attrs.asdict(arguments.mechanism),
            "update_rule": type(self.optimizer).__name__,
            "feature_norm": None if radius is None else float(radius),
            "prox": None,
            "projection": None,
            **{name: repr(part) for name, part in self.maps.items()},
            "criterion": None if known is None else known.fields,
            **self.schedule.fields(),
            "has_seed": self.plan.is_seeded,
            "order_of_the_records": self.plan.fingerprint(),
            "trainable_parameters": {
                name: [list(p.shape), str(p.dtype)]
                for name, p in self.inner.named_parameters()
                if p.requires_grad
            },
        }

    @classmethod
    def of(
        cls,
        arguments: RunArguments,
        relation: NeighboringRelation,
        group: ProcessGroup | None = None,
    ) -> DeclaredRun:
        """Checks arguments and derives what follows; nothing is changed."""
        arguments.check()
        _check_relation(arguments, relation)
        inner, optimizer = unwrapped(arguments)
        loss, head = resolve_loss(inner, arguments)
        arguments = arguments.with_clip_norm(loss)
        mechanism = arguments.optimizer_class
        mechanism.check_arguments(arguments, inner, optimizer)
        _check_parameters(inner, optimizer, allows_half=mechanism.is_composed and group is None)
        frozen = FrozenPart(inner, head, is_composed=mechanism.is_composed)
        frozen.check_batch_norm(tuple(inner.named_modules()))
        plan = plan_batches(
            arguments.data_loader,
            arguments.batch_order,
            secret=None if group is None else group.secret,
        )
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            plan.hide_size()
        if group is not None:
            if plan.batch_size < group.size and plan.order not in OF_RANDOM_SIZE:
                raise UnsupportedRunError(
                    f"Expected a batch_size >= {group.size}, the number of processes, got "
                    f"{plan.batch_size}: it is that of a step, all processes together. Raise it."
                )
            plan.share = group.share
        schedule = DeclaredSchedule.of(arguments.schedule, arguments.num_steps)
        given = arguments, inner, optimizer, plan, loss, head, frozen, schedule
        run = cls(*given, relation=relation, group=group)
        for part in run.maps.values():
            part.start(run.trained, float(optimizer.param_groups[0]["lr"]) * run.scale)
        return run


def _check_parameters(module: nn.Module, optimizer: Optimizer, *, allows_half: bool) -> None:
    """Raises UnsupportedRunError unless `optimizer` trains exactly the trainable parameters."""
    own: Mapping[str, nn.Parameter] = dict(module.named_parameters())
    known = {id(p) for p in own.values()}
    managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if managed - known:
        raise UnsupportedRunError(
            "Expected the optimizer to hold parameters of the module only, got "
            f"{len(managed - known)} others (Module parameters are different than optimizer "
            "Parameters). Construct it with module.parameters()."
        )
    trained = {name: param for name, param in own.items() if param.requires_grad}
    if not trained:
        raise UnsupportedRunError("Expected a module with trainable parameters, got none.")
    for name, param in trained.items():
        if not (allows_half and is_half(param)):
            check_precision(f"parameter {name}", param)
        if id(param) not in managed:
            raise UnsupportedRunError(
                f"Expected every trainable parameter in the optimizer, {name} is missing: other "
                "code could train it unaccounted. Add it, or freeze it with requires_grad_(False)."
            )


def _check_relation(arguments: RunArguments, relation: NeighboringRelation) -> None:
    """Raises UnsupportedRunError where adding or removing a record changes more than its gradient.

    Divisor, rate and number of steps must not be computed from the number of records then, nor may
    epsilon, or noise that is found for it.
    """
    batches = arguments.batch_order
    if relation is not NeighboringRelation.ADD_OR_REMOVE_ONE:
        return
    if batches.order not in OF_RANDOM_SIZE:
        expected = "neighboring_relation = REPLACE_SPECIAL or REPLACE_ONE for batches of equal size"
    elif batches.sampling_rate is None:
        expected = f'a constant rate and divisor (Batches("{batches.order.value}", '
        expected += "sampling_rate=q, batch_size=b))"
    elif batches.max_batch_size is not None:
        expected = "max_batch_size = None"
    elif arguments.loss_geometry is not None and arguments.mechanism is None:
        expected = "loss_geometry (or criterion and feature_norm) = None"
    else:
        return
    raise UnsupportedRunError(
        f"Expected {expected}, got ADD_OR_REMOVE_ONE: what follows from the number of records is "
        "what adding or removing one changes. Use REPLACE_SPECIAL where that number is public."
    )


def unwrapped(arguments: RunArguments) -> tuple[nn.Module, Optimizer]:
    """Returns module and optimizer without the wrappers of Opacus and of torch.distributed."""
    module, optimizer = _without_gradients(arguments.module), arguments.optimizer
    if isinstance(optimizer, DPOptimizer):
        optimizer = optimizer.original_optimizer
    return (module.module if isinstance(module, WRAPPERS) else module), optimizer


def is_shared(arguments: RunArguments) -> bool:
    """Tells whether several processes train the run together; see `trains_together`."""
    module = _without_gradients(arguments.module)
    is_ghost = arguments.is_ghost and arguments.loss_geometry != "auto"
    if isinstance(module, DistributedDataParallel) and is_ghost:
        raise UnsupportedRunError(
            'Expected grad_sample_mode = "hooks" with DistributedDataParallel, got "ghost": it '
            "would add up the gradients of both backward passes. Use Opacus' DPDDP."
        )
    return trains_together(module, arguments.distributed)


def _without_gradients(module: nn.Module) -> Any:
    return module._module if isinstance(module, AbstractGradSampleModule) else module


def resolve_loss(
    module: nn.Module, arguments: RunArguments
) -> tuple[LossGeometry | None, nn.Linear | None]:
    """Returns the loss geometry, and the linear layer if the loss is known."""
    loss_geometry, criterion = arguments.loss_geometry, arguments.criterion
    feature_norm, reduction = arguments.feature_norm, arguments.loss_reduction
    if loss_geometry == "auto":
        known = criteria.auto_loss_geometry(module, criterion, feature_norm, reduction)
        return known, criteria.find_linear_head(module)
    if not isinstance(loss_geometry, LossGeometry | None):
        raise TypeError(
            f'Expected loss_geometry to be a LossGeometry, "auto" or None, got {loss_geometry!r}.'
        )
    if getattr(criterion, "reduction", None) != "none" or arguments.is_ghost:
        criteria.check_reduction(criterion, reduction)
    criteria.refuse_weights_of_the_batch(criterion)
    if feature_norm is not None:
        if loss_geometry is None:
            raise UnsupportedRunError(
                f"Expected feature_norm = None here, got {feature_norm!r}: it goes with the known "
                "loss of one linear head. Pass criterion=, too, or leave it out."
            )
        validate.real("feature_norm", feature_norm, above=0)  # of the loss that was declared
    return loss_geometry, None
