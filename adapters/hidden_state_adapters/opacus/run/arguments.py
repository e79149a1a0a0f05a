"""The arguments of `make_private`: what a run is, and the names that they had before."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import attrs
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hidden_state_accountants import (
    BatchOrder,
    LossGeometry,
    Regulariser,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.events.batch_order import parse_batch_order
from hidden_state_adapters.opacus.data.order import default_order
from hidden_state_adapters.opacus.projections import (
    BallProjection,
    BoxProjection,
    DeclaredProjection,
    ParameterBallsProjection,
)
from hidden_state_adapters.opacus.run.settings import WHY_NOT_ADAPTIVE, refuse_per_layer

_OPACUS_ARGUMENTS = {
    "batch_first", "clipping", "grad_sample_mode", "loss_reduction", "noise_generator",
    "rand_on_empty", "wrap_model",
}  # fmt: skip
_OF_HIDDEN_ITERATES = (
    "loss_geometry", "feature_norm", "prox", "projection", "learning_rate_schedule",
)  # fmt: skip
_PROJECTIONS = (BallProjection, BoxProjection, ParameterBallsProjection)
_RARE = 1e-12


@attrs.frozen
class Batches:
    """How the records are dealt, with what a name alone does not say: for `batch_order`.

    Args:
        order: A BatchOrder, or its name.
        seed: Fixes a random order, which is then known to whoever knows the seed: "shuffled_once"
            is accounted as cyclic, the others are refused.
        seed_is_secret: The seed is random and nobody else will ever know it.
        max_batch_size: Cap on "poisson" batches: a uniform subset of this size stays. The chance
            that the cap acts is added to delta.
    """

    order: BatchOrder | str
    seed: int | None = attrs.field(default=None, repr=False, kw_only=True)
    seed_is_secret: bool = attrs.field(default=False, kw_only=True)
    max_batch_size: int | None = attrs.field(default=None, kw_only=True)


@attrs.frozen
class DiceSGD:
    """DiceSGD as `mechanism` of make_private, with SGD, Adam or AdamW; see `DiceSGDOptimizer`.

    Args:
        error_max_grad_norm: C2 in units of the MEAN update; None is C1.
        automatic: Normalises instead of clipping.
        gradient_bound: A bound on the norm of every per-example gradient before clipping, for all
            records that could have been in the data; checked at every step.
    """

    error_max_grad_norm: float | None = None
    automatic: bool = False
    gradient_bound: float = math.inf


@attrs.frozen
class BlockCoordinate:
    """DP-MBCD as `mechanism` of make_private; see `BlockCoordinateOptimizer`.

    Args:
        l1: Weight of the lasso.
        l2: Weight of the squared norm, which makes the prox contract.
        nonnegative: Whether the parameters are kept >= 0.
    """

    l1: float = 0.0
    l2: float = 0.0
    nonnegative: bool = False


class RunOptions(TypedDict, total=False):
    """What may be passed to `make_private` beside its required arguments (for type checkers)."""

    batch_order: BatchOrder | Batches | str | None
    criterion: Any
    feature_norm: float | None
    loss_geometry: LossGeometry | str | None
    targets: Any
    loop_maps_records: bool
    schedule: Any
    num_steps: int | None
    after: Any
    mechanism: Any
    distributed: bool | None
    poisson_sampling: bool | None
    batch_first: bool
    clipping: str
    grad_sample_mode: str
    loss_reduction: str
    noise_generator: torch.Generator | None
    rand_on_empty: bool
    wrap_model: bool
    # Names from before; see `RunArguments.of`.
    optimizer_class: type | None
    error_max_grad_norm: float | None
    automatic: bool
    gradient_bound: float
    l1: float
    l2: float
    nonnegative: bool


def _of_mechanism(default: Any) -> Any:
    """An argument that only the mechanism takes which lists it in `Mechanism.options`."""
    return attrs.field(default=default, metadata={"of_mechanism": True})


@attrs.frozen(kw_only=True, eq=False)
class RunArguments:
    """What `make_private` was told, in parts; its docstring explains every argument.

    Attributes:
        max_grad_norm: "auto" until the loss is known.
        mechanism: The options of DiceSGD or DP-MBCD, whose optimizer the engine knows.
        prox: A regulariser or a function of the user's; from `after`.
        projection: From `after`.
        opacus: The arguments that go to Opacus as they are.
    """

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader
    max_grad_norm: float | Sequence[float] | str
    batch_order: BatchOrder = attrs.field(default=BatchOrder.POISSON, converter=parse_batch_order)
    criterion: Any = None
    loss_geometry: LossGeometry | str | None = None
    feature_norm: float | None = None
    targets: Any = None
    loop_maps_records: bool = False
    prox: Any = None
    projection: Any = None
    poisson_sampling: bool | None = None
    max_batch_size: int | None = None
    order_seed: int | None = attrs.field(default=None, repr=False)
    order_is_secret: bool = False
    mechanism: Any = None
    optimizer_class: type | None = None
    error_max_grad_norm: float | None = _of_mechanism(None)
    automatic: bool = _of_mechanism(False)
    gradient_bound: float = _of_mechanism(math.inf)
    l1: float = _of_mechanism(0.0)
    l2: float = _of_mechanism(0.0)
    nonnegative: bool = _of_mechanism(False)
    learning_rate_schedule: Any = None
    num_steps: int | None = None
    distributed: bool | None = None
    opacus: dict[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> RunArguments:
        """Takes the keyword arguments of a call apart.

        The parts are also accepted by the names that they had before: order_seed, order_is_secret
        and max_batch_size (`Batches`), learning_rate_schedule (`schedule`), prox, projection,
        projection_radius and projection_diameter (`after`), optimizer_class and the options of the
        mechanisms (`mechanism`).

        Raises:
            TypeError: One is missing, unknown or given twice.
            UnsupportedRunError: The clip follows the records.
        """
        own: dict[str, Any] = {}
        for name, value in arguments.items():
            for part, given in _parts(name, value).items():
                if part in own:
                    raise TypeError(f"Expected {part} once in make_private, got it twice.")
                own[part] = given
        diameter = own.pop("projection_diameter", None)
        if (projection := own.get("projection")) is not None:
            own["projection"] = _projection(projection, diameter)
        elif diameter is not None:
            raise ValueError("Expected projection_diameter only with a function as projection.")
        if own.get("batch_order") is None:
            sampling = own.get("poisson_sampling")
            own["batch_order"] = default_order(own.get("data_loader"), sampling)
        if own.get("criterion") is not None and own.get("feature_norm") is not None:
            own["loss_geometry"] = own.get("loss_geometry") or "auto"
        known = {field.name for field in attrs.fields(cls)} - {"opacus"}
        opacus = {name: value for name, value in own.items() if name not in known}
        if opacus.get("clipping") == "adaptive":
            raise UnsupportedRunError(
                f'Expected clipping = "flat" or "per_layer", got "adaptive": {WHY_NOT_ADAPTIVE}. '
                "Use one fixed clip norm, or Opacus' schedulers of it, which look at no record."
            )
        if opacus.get("grad_sample_mode") == "ghost" and "loss_geometry" not in own:
            own.setdefault("criterion", nn.CrossEntropyLoss())  # Opacus' default, which is returned
        unknown = sorted(set(opacus) - _OPACUS_ARGUMENTS)
        if unknown:
            raise TypeError(f"Unknown argument of make_private: {', '.join(unknown)}.")
        return cls(**{k: v for k, v in own.items() if k in known}, opacus=opacus)

    def with_clip_norm(self, loss: LossGeometry | None) -> RunArguments:
        """The arguments, with the clip norm that max_grad_norm="auto" stands for.

        Args:
            loss: The geometry of the run's loss.

        Raises:
            ValueError: Nothing is known of the gradients; or it is another word.
        """
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
    def loss_reduction(self) -> str:
        """Opacus' loss_reduction."""
        return str(self.opacus.get("loss_reduction", "mean"))

    def given(self, name: str) -> bool:
        """Whether an argument is not what it is by default."""
        value, default = getattr(self, name), getattr(attrs.fields(type(self)), name).default
        return value is not default and value != default

    def given_options(self) -> dict[str, Any]:
        """The arguments that only some mechanism takes, where they are not the default."""
        fields = attrs.fields(type(self))
        names = [f.name for f in fields if f.metadata.get("of_mechanism") and self.given(f.name)]
        return {name: getattr(self, name) for name in names}

    @property
    def asks_for_hidden_iterates(self) -> list[str]:
        """The arguments that were passed and make sense for a hidden state only, by name."""
        return [name for name in _OF_HIDDEN_ITERATES if getattr(self, name) is not None]

    @property
    def clips_per_layer(self) -> bool:
        """Whether every parameter has a clip norm of its own."""
        return self.opacus.get("clipping") == "per_layer"

    @property
    def asks_for_samples(self) -> bool:
        """Whether the gradients have to be where Opacus keeps them."""
        mode, is_wrapped = self.opacus.get("grad_sample_mode"), self.opacus.get("wrap_model", True)
        return mode not in (None, "ghost") or self.clips_per_layer or not is_wrapped

    @property
    def clip_norm(self) -> float:
        """The clip norm for all parameters together: what the noise multiplier multiplies."""
        norms = self.max_grad_norm
        return math.hypot(*norms) if isinstance(norms, list | tuple) else float(norms)  # type: ignore[arg-type]

    def check(self, *, takes_per_layer: bool = False) -> None:
        """Checks what the arguments say by themselves.

        Args:
            takes_per_layer: Whether the mechanism may clip every parameter by itself.

        Raises:
            TypeError, ValueError: One has an impossible value.
            UnsupportedRunError: The run could not be checked or accounted.
        """
        order, sampling = self.batch_order, self.poisson_sampling
        if sampling is not None and sampling != (order is BatchOrder.POISSON):
            raise UnsupportedRunError(
                f"Expected poisson_sampling = {order is BatchOrder.POISSON} with "
                f'batch_order="{order.value}", got {sampling!r}. Leave it out: batch_order '
                "says how the records are dealt."
            )
        self._check_order_seed()
        self._check_clipping(takes_per_layer)
        self._check_opacus_arguments()
        self._check_ghost_arguments()

    def check_mechanism(
        self, name: str, options: frozenset[str], refused: Mapping[str, str]
    ) -> None:
        """Raises UnsupportedRunError for arguments that do not go with the mechanism.

        Args:
            name: What runs.
            options: The arguments of mechanisms that this one takes.
            refused: Other arguments that it does not take, and why.
        """
        for field in attrs.fields(type(self)):
            is_foreign = field.metadata.get("of_mechanism") and field.name not in options
            if not (is_foreign or field.name in refused) or not self.given(field.name):
                continue
            reason = refused.get(field.name, "it belongs to another mechanism")
            raise UnsupportedRunError(
                f"Expected {field.name} = {field.default!r} with {name}, got "
                f"{getattr(self, field.name)!r}: {reason}. Leave it out."
            )

    def _check_order_seed(self) -> None:
        """Refuses a seed where it would give away an order that has to stay secret.

        Whoever knows the seed knows the order. SHUFFLED_ONCE is then a fixed order and accounted
        as CYCLIC. The others then have a known place of every record in every epoch or step; no
        bound here is about such runs, and composition over all of them is no better than CYCLIC.
        """
        order, seed, is_secret = self.batch_order, self.order_seed, self.order_is_secret
        if not isinstance(is_secret, bool):
            raise TypeError(f"Expected order_is_secret to be True or False, got {is_secret!r}.")
        if seed is None:
            if is_secret:
                raise ValueError(
                    "Expected order_is_secret = False without an order_seed, got True: an order "
                    "that is drawn without a seed is secret anyway. Leave it out."
                )
            return
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
            raise TypeError(
                f"Expected order_seed to be an integer or None, got {type(seed).__name__}."
            )
        if seed < 0:
            raise ValueError("Expected order_seed >= 0, got a negative number.")
        if order in (BatchOrder.CYCLIC, BatchOrder.FULL):
            raise ValueError(
                f'Expected order_seed = None with batch_order="{order.value}", which draws '
                'nothing. Use batch_order="shuffled_once".'
            )
        if order is not BatchOrder.SHUFFLED_ONCE and not is_secret:
            raise UnsupportedRunError(
                f'Expected order_seed = None with batch_order="{order.value}", got a seed: '
                "whoever knows it knows which steps used a record, and the guarantee rests on "
                "nobody knowing. Leave it out (the order then comes from the operating system's "
                'random source), use batch_order="shuffled_once" (a seed makes it public, '
                "accounted as cyclic), or say that it is secret if it is random and never written "
                "down: Batches(order, seed=seed, seed_is_secret=True)."
            )

    def _check_clipping(self, takes_per_layer: bool) -> None:
        clipping = self.opacus.get("clipping", "flat")
        if clipping == "per_layer" and takes_per_layer:
            self._check_clip_norms()
            return
        if clipping != "flat":
            raise UnsupportedRunError(
                f'Expected clipping = "flat", got {clipping!r}: the theorems need one fixed clip '
                'of the whole gradient of a record. Leave it out. ("per_layer" is accounted by '
                "composition, without what asks for a hidden state: "
                f"{', '.join(_OF_HIDDEN_ITERATES)}, mechanism.)"
            )
        refuse_per_layer(max_grad_norm=self.max_grad_norm)

    def _check_clip_norms(self) -> None:
        norms = self.max_grad_norm
        if not isinstance(norms, list | tuple):
            raise TypeError(
                'Expected a list of clip norms as max_grad_norm with clipping="per_layer", got '
                f"{norms!r}. Give one number for each trainable parameter, in their order."
            )
        for norm in norms:
            validate.magnitude("max_grad_norm", norm, positive=True)
        groups = self.optimizer.param_groups
        count = sum(p.requires_grad for group in groups for p in group["params"])
        if len(norms) != count:
            raise ValueError(
                f"Expected {count} clip norms in max_grad_norm, one for each trainable parameter "
                f"of the optimizer, got {len(norms)}."
            )
        if self.opacus.get("grad_sample_mode") == "ghost":
            raise UnsupportedRunError(
                'Expected clipping = "flat" with grad_sample_mode="ghost", got "per_layer", as in '
                'Opacus. Use grad_sample_mode="hooks".'
            )

    def _check_opacus_arguments(self) -> None:
        arguments = self.opacus
        if arguments.get("rand_on_empty"):
            raise UnsupportedRunError(
                "Expected rand_on_empty = False, got True: it puts a made-up record into an empty "
                "batch. With one record less a batch is empty, and the sum has the gradient that "
                "is made up instead of the record's: it moves by two clip norms, and the noise is "
                "for one. Leave it out: empty batches work."
            )
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f"Expected loss_reduction = 'mean' or 'sum', got {self.loss_reduction!r}."
            )
        mode = arguments.get("grad_sample_mode", "hooks")
        if mode not in ("hooks", "functorch", "ew", "ghost"):
            raise UnsupportedRunError(
                'Expected grad_sample_mode = "hooks", "functorch", "ew" or "ghost", got '
                f"{mode!r}: the per-example gradients could not be checked."
            )
        if mode == "ew" and self._may_be_empty():
            raise UnsupportedRunError(
                'Expected grad_sample_mode = "hooks" or "functorch" for small Poisson batches, got '
                '"ew": torch\'s expanded weights stop at an empty batch, which Poisson sampling '
                "can draw."
            )

    def _may_be_empty(self) -> bool:
        """Whether one of 1e6 Poisson batches is empty with a probability above 1e-6."""
        if self.batch_order is not BatchOrder.POISSON:
            return False
        size = getattr(self.data_loader, "batch_size", None)
        # Rounded, the rate is b/(2n) at least, or 1; and (1 - q)^n < exp(-qn).
        return size is None or math.exp(-size / 2) > _RARE

    def _check_ghost_arguments(self) -> None:
        arguments, criterion = self.opacus, self.criterion
        if arguments.get("grad_sample_mode") != "ghost":
            return
        if not callable(criterion):
            raise UnsupportedRunError(
                f'Expected a criterion with grad_sample_mode="ghost", got {criterion!r}: '
                "make_private returns it as third of four, as Opacus does. Pass criterion=."
            )
        if not arguments.get("wrap_model", True):
            raise UnsupportedRunError(
                'Expected wrap_model = True with grad_sample_mode="ghost", got False: only the '
                "wrapper keeps what the sums follow from. Leave it out."
            )


def _parts(name: str, value: Any) -> dict[str, Any]:
    """What an argument of `make_private` consists of."""
    if name == "batch_order" and isinstance(value, Batches):
        parts = {"order_seed": value.seed, "order_is_secret": value.seed_is_secret}
        return {name: value.order, "max_batch_size": value.max_batch_size, **parts}
    if name == "schedule":
        return {"learning_rate_schedule": value}
    if name == "projection_radius":
        return {} if value is None else {"projection": BallProjection(value)}
    if name == "after":
        return _after(value)
    if name == "mechanism" and isinstance(value, DiceSGD | BlockCoordinate):
        return {name: value, **attrs.asdict(value)}
    if name == "mechanism" and value is not None:
        raise TypeError(
            f"Expected mechanism to be DiceSGD(...), BlockCoordinate(...) or None, got {value!r}."
        )
    return {name: value}


def _after(value: Any) -> dict[str, Any]:
    """The prox and the projection that follow a step."""
    found: dict[str, Any] = {}
    items = value if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        is_map = isinstance(item, tuple)
        if is_map and (len(item) != 2 or not callable(item[0])):
            raise TypeError(f"Expected (function, diameter) in after, got {item!r}.")
        name = "projection" if is_map or isinstance(item, _PROJECTIONS) else "prox"
        if name in found:
            raise TypeError(f"Expected one {name} in after, got {found[name]!r} and {item!r}.")
        if name == "prox" and not (isinstance(item, Regulariser) or callable(item)):
            raise TypeError(
                "Expected after to be a Regulariser, a projection, a function(list of tensors, "
                "step size), a pair (function(list of tensors), diameter of the set that it maps "
                f"to), or a list of two of them, got {item!r}."
            )
        found[name] = DeclaredProjection(*item) if is_map else item
    return found


def _projection(projection: Any, diameter: Any) -> Any:
    """A projection; a function of the user's needs the diameter of the set that it maps to."""
    is_known = type(projection) in (*_PROJECTIONS, DeclaredProjection)  # a subclass may do anything
    if not is_known and (not callable(projection) or isinstance(projection, type)):
        raise TypeError(
            f"Expected projection to be {', '.join(kind.__name__ for kind in _PROJECTIONS)}, a "
            f"function that changes a list of tensors in place, or None, got {projection!r}."
        )
    if is_known != (diameter is None):
        raise ValueError(
            f"Expected projection_diameter {'only with' if is_known else 'with'} a function as "
            f"projection, got {diameter!r}: it is the diameter of the set that the function maps "
            "to (math.inf if it is not bounded); of other projections it is known."
        )
    return projection if is_known else DeclaredProjection(projection, diameter)
