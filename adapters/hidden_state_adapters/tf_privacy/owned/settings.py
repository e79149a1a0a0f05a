"""What a model that owns its run is told at construction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    BatchOrder,
    LossGeometry,
    Regulariser,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.events.batch_order import parse_batch_order
from hidden_state_adapters.tf_privacy.declared import Declared, plain_geometry
from hidden_state_adapters.tf_privacy.guards.settings import clip_and_noise, microbatches
from hidden_state_adapters.tf_privacy.proximal import plain_prox, prox_of


def _optional(value: Any, check: Any) -> Any:
    return None if value is None else check(value)


def _order(value: Any) -> BatchOrder | None:
    return _optional(value, parse_batch_order)  # type: ignore[no-any-return]


@attrs.frozen(kw_only=True)
class Settings:
    """The arguments of `HiddenStateModel`, checked; see there.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: Two do not go together.
    """

    l2_norm_clip: float | None = None
    noise_multiplier: float | None = None
    num_microbatches: int | None = None
    num_steps: int | None = None
    batch_order: BatchOrder | None = attrs.field(default=None, converter=_order)
    max_batch_size: int | None = None
    drop_remainder: bool = False
    prox: Regulariser | None = attrs.field(default=None, converter=prox_of)
    projection_radius: float | None = None
    loss_geometry: LossGeometry | str | None = None
    feature_norm: float | None = None
    weight_bound: float | None = None
    neighboring_relation: NeighboringRelation = attrs.field(
        default=NeighboringRelation.REPLACE_SPECIAL, converter=validate.neighboring_relation
    )
    target_delta: float | None = None
    checkpoints_stay_private: bool = False
    metrics_stay_private: bool = False
    validation_data_is_public: bool = False

    def __attrs_post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        # The compiled optimizer may say what is missing; fit finds noise.
        given = self.l2_norm_clip, self.noise_multiplier
        clip, noise = clip_and_noise(*(1.0 if value is None else value for value in given))
        put("l2_norm_clip", _optional(self.l2_norm_clip, lambda _: clip))
        put("noise_multiplier", _optional(self.noise_multiplier, lambda _: noise))
        put("num_microbatches", microbatches(self.num_microbatches))
        put(
            "num_steps",
            _optional(
                self.num_steps, lambda steps: validate.integer("num_steps", steps, minimum=1)
            ),
        )
        put(
            "max_batch_size",
            _optional(
                self.max_batch_size,
                lambda size: validate.integer("max_batch_size", size, minimum=1),
            ),
        )
        put(
            "projection_radius",
            _optional(
                self.projection_radius,
                lambda radius: validate.real("projection_radius", radius, above=0),
            ),
        )
        put(
            "weight_bound",
            _optional(
                self.weight_bound, lambda bound: validate.real("weight_bound", bound, above=0)
            ),
        )
        put("target_delta", _optional(self.target_delta, validate.target_delta))
        if isinstance(self.loss_geometry, Mapping):  # of a configuration
            put("loss_geometry", LossGeometry(**self.loss_geometry))
        if self.max_batch_size is not None and self.order is not BatchOrder.POISSON:
            raise UnsupportedRunError(
                'Expected max_batch_size = None unless batch_order = "poisson", got '
                f'{self.max_batch_size} with "{self.order.value}": its batches have one '
                'size. Leave it out, or say batch_order="poisson".'
            )
        if (
            self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE
            and self.order is not BatchOrder.POISSON
        ):
            raise UnsupportedRunError(
                "Expected neighboring_relation = REPLACE_SPECIAL or REPLACE_ONE, got "
                f'ADD_OR_REMOVE_ONE: with batch_order="{self.order.value}" one example more '
                "or less changes other batches as well. Poisson batches have that relation."
            )
        _ = self.declared  # raises

    @property
    def order(self) -> BatchOrder:
        """Of the batches: what was said, or Poisson."""
        return self.batch_order or BatchOrder.POISSON

    def joined_by(self, optimizer: str, told: Mapping[str, Any]) -> Settings:
        """These, and what an optimizer with noise says in their place.

        Where these say no order, batches are cyclic: so they are for such an optimizer elsewhere.

        Args:
            optimizer: Its name.
            told: Arguments by name; None says nothing.

        Raises:
            UnsupportedRunError: These say something else.
        """
        theirs = Settings(**{name: value for name, value in told.items() if value is not None})
        said = {name: getattr(theirs, name) for name in told if told[name] is not None}
        for name, value in said.items():
            own = getattr(self, name)
            if own is not None and own != value:
                raise UnsupportedRunError(
                    f"Expected {name} = {own!r}, as the model was made with, got {value!r} of "
                    f"{optimizer}. Leave it out of the model; or compile with an optimizer without "
                    "noise."
                )
        return attrs.evolve(self, **said, batch_order=self.batch_order or BatchOrder.CYCLIC)

    @property
    def declared(self) -> Declared:
        """What is said of the loss."""
        return Declared(loss_geometry=self.loss_geometry, feature_norm=self.feature_norm)

    @property
    def needs_plain_sgd(self) -> str:
        """The arguments that say something about the update of plain SGD, or ""."""
        given = {
            "loss_geometry": self.loss_geometry,
            "prox": self.prox,
            "projection_radius": self.projection_radius,
        }
        return " and ".join(name for name, value in given.items() if value is not None)

    def to_plain(self) -> dict[str, Any]:
        """The arguments as plain types."""
        plain = {field.name: getattr(self, field.name) for field in attrs.fields(Settings)}
        geometry = self.loss_geometry
        return {
            **plain,
            "prox": plain_prox(self.prox),
            "batch_order": self.batch_order and self.batch_order.value,
            "neighboring_relation": self.neighboring_relation.name,
            "loss_geometry": plain_geometry(geometry)
            if isinstance(geometry, LossGeometry)
            else geometry,
        }
