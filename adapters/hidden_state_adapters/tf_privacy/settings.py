"""Arguments of a run, checked, and what is declared of all examples that could be."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    LossGeometry,
    Regulariser,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.events.batch_order import BINS, OF_RANDOM_SIZE, parse_batch_order
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.regulariser import regulariser_or_none

AUTO = "auto"
_SMALLEST = 1.1e-11  # 1e8 times the number whose square is the smallest in float32
_LARGEST = 1e30


def _given(check: Callable[..., Any], *names: str, default: Any = None, **limits: Any) -> Any:
    """Returns a field whose value is what a function makes of it; None as a default stays."""
    convert = functools.partial(check, *names, **limits)
    optional = attrs.converters.optional(convert)
    return attrs.field(default=default, converter=optional if default is None else convert)


# Of the loss


def _geometry(value: Any) -> Any:
    if isinstance(value, Mapping):  # of a configuration
        return LossGeometry(**value)
    if isinstance(value, LossGeometry) or value == AUTO:
        return value
    raise TypeError(f'Expected loss_geometry to be a LossGeometry, "auto" or None, got {value!r}.')


@attrs.frozen(kw_only=True)
class Declared:
    """Declarations about ALL examples that could have been in the data; the run is compared.

    Attributes:
        gradient_bound: Bound on the norm of every per-example gradient before clipping, or inf.
        loss_geometry: Geometry of the per-example loss; None if unknown, "auto" if it is to be read
            off model and loss.
        feature_norm: Bound on the L2 norm of every example at the one linear layer that is
            trained; needed for "auto", checked otherwise if it is given.
        source: Origin of `loss_geometry` in words; "" if it is declared.
    """

    gradient_bound: float = _given(
        validate.real, "gradient_bound", default=math.inf, above=0, allow_inf=True
    )
    loss_geometry: LossGeometry | str | None = _given(_geometry)
    feature_norm: float | None = _given(validate.real, "feature_norm", above=0)
    source: str = ""

    def __attrs_post_init__(self) -> None:
        if self.feature_norm is None and self.is_automatic:
            raise ValueError(
                'Expected feature_norm with loss_geometry="auto", got None: the constants grow '
                "with the norm of the features. Normalise every example by itself, and pass the "
                "norm."
            )
        if self.loss_geometry is not None and self.gradient_bound < math.inf:
            raise UnsupportedRunError(
                "Expected loss_geometry or gradient_bound, got both. Keep loss_geometry: it says "
                "everything about the loss."
            )

    @property
    def is_automatic(self) -> bool:
        """True if the geometry is still to be read off model and loss."""
        return self.loss_geometry == AUTO

    @property
    def geometry(self) -> LossGeometry | None:
        """Geometry of the loss, once it is known."""
        return self.loss_geometry if isinstance(self.loss_geometry, LossGeometry) else None

    def weighted(self, largest: float) -> Declared:
        """Returns what is declared of the loss times any weight from 0 to the largest one."""
        loss = self.geometry
        if loss is None or largest == 1:
            return attrs.evolve(self, gradient_bound=largest * self.gradient_bound)
        is_strong = loss.kind is LossKind.STRONGLY_CONVEX
        times = attrs.evolve(
            loss,
            kind=LossKind.CONVEX if is_strong else loss.kind,
            smoothness=largest * loss.smoothness,
            strong_convexity=0.0,
            weak_convexity=largest * loss.weak_convexity,
            lipschitz=None if loss.lipschitz is None else largest * loss.lipschitz,
        )
        source = self.source and f"{self.source}, times a weight of at most {largest:g}"
        return attrs.evolve(self, loss_geometry=times, source=source)

    @property
    def measured(self) -> list[Assumption]:
        """Assumption that was measured for a geometry that is declared."""
        if self.feature_norm is None or self.source:
            return []
        text = f"features of norm at most {self.feature_norm:g} at the linear layer, every example"
        return [Assumption.checked(text)]

    @property
    def longest_gradient(self) -> float:
        """Bound on the norm of every per-example gradient; inf if unknown."""
        loss = self.geometry
        return self.gradient_bound if loss is None or loss.lipschitz is None else loss.lipschitz


# Of the run


def check_scale(name: str, value: float) -> None:
    """Raises ValueError unless float32 holds the value and squares of its size, or it is 0."""
    if value and not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"Expected {name} between {_SMALLEST:g} and {_LARGEST:g}, got {value!r}.")


def _clip(value: Any) -> float | str:
    return AUTO if value == AUTO else validate.real("l2_norm_clip", value, above=0)


def _regulariser(value: Any) -> Regulariser | None:
    of_config = isinstance(value, Mapping)
    return regulariser_or_none("prox", Regulariser(**value) if of_config else value)


@attrs.frozen(kw_only=True)
class Settings:
    """The arguments of `HiddenStateModel`, checked; see there.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: Two do not go together.
    """

    l2_norm_clip: float | str | None = _given(_clip)
    noise_multiplier: float | None = _given(validate.magnitude, "noise_multiplier")
    num_microbatches: int | None = _given(validate.integer, "num_microbatches", minimum=1)
    num_steps: int | None = _given(validate.integer, "num_steps", minimum=1)
    batch_order: BatchOrder | None = _given(parse_batch_order)
    max_batch_size: int | None = _given(validate.integer, "max_batch_size", minimum=1)
    sampling_rate: float | None = _given(validate.real, "sampling_rate", above=0, maximum=1)
    drop_remainder: bool = False
    prox: Regulariser | None = _given(_regulariser)
    projection_radius: float | None = _given(validate.real, "projection_radius", above=0)
    loss_geometry: LossGeometry | str | None = _given(_geometry)
    feature_norm: float | None = None
    weight_bound: float | None = _given(validate.real, "weight_bound", above=0)
    neighboring_relation: NeighboringRelation = _given(
        validate.neighboring_relation, default=NeighboringRelation.REPLACE_SPECIAL
    )
    target_delta: float | None = _given(validate.target_delta)
    checkpoints_stay_private: bool = False
    metrics_stay_private: bool = False
    validation_data_is_public: bool = False

    def __attrs_post_init__(self) -> None:
        # The compiled optimizer may say what is missing; fit finds noise.
        clip = 1.0 if self.l2_norm_clip in (None, AUTO) else float(self.l2_norm_clip)
        check_scale("l2_norm_clip", clip)
        check_scale("l2_norm_clip * noise_multiplier", clip * (self.noise_multiplier or 0.0))
        if self.max_batch_size is not None and self.order not in OF_RANDOM_SIZE:
            raise UnsupportedRunError(
                'Expected max_batch_size = None unless batch_order = "poisson", got '
                f'{self.max_batch_size} with "{self.order.value}": its batches have one size. '
                "Leave it out."
            )
        if self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            self._check_adding()
        elif self.sampling_rate is not None:
            raise UnsupportedRunError(
                f"Expected sampling_rate = None with {self.neighboring_relation.name}, got "
                f"{self.sampling_rate:g}: rate and divisor follow from the number of examples. "
                "Leave it out; it is for ADD_OR_REMOVE_ONE."
            )
        _ = self.declared  # raises

    def _check_adding(self) -> None:
        """Raises where something is computed from the number of examples, which is hidden."""
        if self.order is not BatchOrder.POISSON:
            why = "one example more or less changes other batches as well"
            if self.order in BINS:
                why = "the number of batches follows from the number of examples"
            raise UnsupportedRunError(
                "Expected neighboring_relation = REPLACE_SPECIAL or REPLACE_ONE, got "
                f'ADD_OR_REMOVE_ONE: with batch_order="{self.order.value}" {why}. Poisson batches '
                "have that relation."
            )
        if self.sampling_rate is None:
            raise UnsupportedRunError(
                "Expected a constant rate and divisor, got ADD_OR_REMOVE_ONE with those that are "
                "computed from the number of examples, which it hides. Pass sampling_rate= here "
                "and batch_size= to fit, constants that do not depend on the examples."
            )
        for name in ("max_batch_size", "loss_geometry"):
            if getattr(self, name) is not None:
                raise UnsupportedRunError(
                    f"Expected {name} = None, got ADD_OR_REMOVE_ONE: epsilon would depend on the "
                    "number of examples, which it hides. Use REPLACE_SPECIAL, whose figures are "
                    "the same, where that number is public."
                )

    @property
    def order(self) -> BatchOrder:
        """Order of the batches: the given one, or Poisson."""
        return self.batch_order or BatchOrder.POISSON

    def microbatch(self, batch_size: int) -> int:
        """Returns m, the examples of each microbatch of a batch."""
        number = self.num_microbatches or batch_size
        if batch_size % number:
            raise UnsupportedRunError(
                f"Expected num_microbatches to divide batch_size = {batch_size}, got {number}. "
                "Leave it out, for one example each."
            )
        return batch_size // number

    @property
    def prox_strong_convexity(self) -> float:
        """Strong convexity of the proximal map, as of the event."""
        return 0.0 if self.prox is None else self.prox.strong_convexity

    def with_clip_norm(self, longest: float, why_not: str) -> Settings:
        """Returns the settings with the number that l2_norm_clip="auto" stands for."""
        if self.l2_norm_clip != AUTO:
            return self
        if math.isinf(longest):
            raise UnsupportedRunError(
                'Expected l2_norm_clip to be a number, got "auto", which is just above the longest '
                f"gradient of a known loss: {why_not or 'the loss has none'}. Pass a number."
            )
        return attrs.evolve(self, l2_norm_clip=math.ceil(longest * 1.00001 * 1e4) / 1e4)

    def joined_by(self, optimizer: str, told: Mapping[str, Any]) -> Settings:
        """Returns these, and what an optimizer with noise says in their place."""
        said = {name: value for name, value in told.items() if value is not None}
        for name, value in said.items():
            own = getattr(self, name)
            if own is not None and own != value:
                raise UnsupportedRunError(
                    f"Expected {name} = {own!r}, as the model was made with, got {value!r} of "
                    f"{optimizer}. Leave it out of the model."
                )
        return attrs.evolve(self, **said)

    @property
    def declared(self) -> Declared:
        """Declarations about the loss."""
        return Declared(loss_geometry=self.loss_geometry, feature_norm=self.feature_norm)

    @property
    def needs_plain_sgd(self) -> str:
        """The arguments that say something about the update of plain SGD, or ""."""
        names = ("loss_geometry", "prox", "projection_radius")
        return " and ".join(name for name in names if getattr(self, name) is not None)

    def to_plain(self, *names: str) -> dict[str, Any]:
        """Returns the arguments of these names, or all, as plain types."""
        geometry: Any = self.loss_geometry
        if isinstance(geometry, LossGeometry):
            geometry = attrs.asdict(geometry) | {"kind": geometry.kind.value}
        plain = {
            **attrs.asdict(self, recurse=False),
            "prox": self.prox and attrs.asdict(self.prox),
            "batch_order": self.batch_order and self.batch_order.value,
            "neighboring_relation": self.neighboring_relation.name,
            "loss_geometry": geometry,
        }
        return {name: plain[name] for name in names or plain}
