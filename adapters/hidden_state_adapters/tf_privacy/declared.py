"""What only the user can know of the examples of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from hidden_state_accountants import Assumption, LossGeometry, validate
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_adapters.tf_privacy.refusals import refusal

# By name: whose runs it is about.
_OF = {
    "gradient_bound": "a Dice optimizer",
    "block_loss": "a BlockCoordinateKerasOptimizer",
}
AUTO = "auto"
EVERY_FEATURE = Assumption.declared(
    "the features of every example that the data could hold are as short as those that it holds: "
    "they are scaled example by example, by a rule that does not depend on the data"
)


def _bound(value: Any) -> float:
    return validate.real("gradient_bound", value, above=0, allow_inf=True)


def _check_geometry(instance: object, attribute: Any, value: object) -> None:
    may_be_auto = attribute.name == "loss_geometry"
    if value is None or isinstance(value, LossGeometry) or (may_be_auto and value == AUTO):
        return
    auto = ', "auto"' if may_be_auto else ""
    raise TypeError(f"Expected {attribute.name} to be a LossGeometry{auto} or None, got {value!r}.")


@attrs.frozen(kw_only=True)
class Declared:
    """What holds for ALL examples that could have been in the data; the run is checked against it.

    Attributes:
        gradient_bound: Of the norm of every per-example gradient before clipping; inf if unknown.
        block_loss: The per-example loss as a function of the one block; None if unknown.
        loss_geometry: The per-example loss, whatever the optimizer; None if unknown, "auto" if it
            is to be read off model and loss.
        feature_norm: Bound on the L2 norm of every example at the one linear layer that is
            trained; needed for "auto", checked otherwise if it is given.
        source: What `loss_geometry` was read off; "" if it is the user's word.
        largest_weight: Bound on the weight that the loss of an example may have; what is said of
            the loss is said of it without its weight.
    """

    gradient_bound: float = attrs.field(default=math.inf, converter=_bound)
    block_loss: LossGeometry | None = attrs.field(default=None, validator=_check_geometry)
    loss_geometry: LossGeometry | str | None = attrs.field(default=None, validator=_check_geometry)
    feature_norm: float | None = None
    source: str = ""
    largest_weight: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.feature_norm is not None:
            validate.real("feature_norm", self.feature_norm, above=0)
        elif self.is_automatic:
            raise ValueError(
                'Expected feature_norm with loss_geometry="auto", got None: the constants grow '
                "with the norm of the features. Normalise every example by itself, and pass the "
                "norm."
            )
        if self.loss_geometry is None:
            return
        for name in _OF:
            if self._says(name):
                raise refusal(
                    f"Expected loss_geometry or {name}, got both. Keep loss_geometry: it says "
                    "everything about the loss."
                )

    def _says(self, name: str) -> bool:
        return bool(getattr(self, name) != getattr(_NOTHING, name))

    @property
    def is_automatic(self) -> bool:
        """Whether the geometry is still to be read off model and loss."""
        return self.loss_geometry == AUTO

    @property
    def geometry(self) -> LossGeometry | None:
        """Of the loss with its weight, once it is known."""
        if not isinstance(self.loss_geometry, LossGeometry) or self.largest_weight == 1:
            return self.of_loss
        return _weighted(self.loss_geometry, self.largest_weight)

    @property
    def of_loss(self) -> LossGeometry | None:
        """Of the loss without its weight."""
        return self.loss_geometry if isinstance(self.loss_geometry, LossGeometry) else None

    @property
    def measured(self) -> list[Assumption]:
        """What was measured for a geometry that is the user's word."""
        if self.feature_norm is None or self.source:
            return []
        text = f"features of norm at most {self.feature_norm:g} at the linear layer, every example"
        return [Assumption.checked(text)]

    @property
    def longest_gradient(self) -> float:
        """Bound on the norm of every per-example gradient; inf if unknown."""
        loss = self.geometry
        if loss is None or loss.lipschitz is None:
            return self.gradient_bound * self.largest_weight
        return loss.lipschitz

    def to_plain(self) -> dict[str, Any]:
        """Plain types; None for what is not known. "auto" has to be read off by then."""
        bound = self.gradient_bound * self.largest_weight
        return {
            "gradient_bound": None if bound == math.inf else bound,
            "block_loss": None if self.block_loss is None else plain_geometry(self.block_loss),
            "loss_geometry": None if self.geometry is None else plain_geometry(self.geometry),
            "feature_norm": None if self.feature_norm is None else float(self.feature_norm),
            "source": self.source,
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Declared:
        """Inverse of `to_plain`."""
        bound = plain["gradient_bound"]
        return cls(
            gradient_bound=math.inf if bound is None else bound,
            block_loss=_of_plain_geometry(plain["block_loss"]),
            loss_geometry=_of_plain_geometry(plain["loss_geometry"]),
            feature_norm=plain["feature_norm"],
            source=str(plain["source"]),
        )

    def refuse_all_but(self, known: str, optimizer: str) -> None:
        """Refuses what says nothing about the runs of an optimizer.

        Args:
            known: The name that does say something; "" if none does.
            optimizer: Name of the optimizer.

        Raises:
            UnsupportedRunError: Something else is declared.
        """
        for name, kind in _OF.items():
            if name != known and self._says(name):
                raise refusal(
                    f"Expected {name} for {kind}, got {optimizer}. Say loss_geometry, or nothing."
                )


_NOTHING = Declared()


def _weighted(loss: LossGeometry, largest: float) -> LossGeometry:
    """That of a loss times any number from 0 to `largest`.

    Values, gradients and second derivatives are those times the number. A weight may be 0, so that
    no strong convexity is left.

    Raises:
        UnsupportedRunError: It knows how curved batches are, which have other weights.
    """
    if loss.curvature is not None:
        raise refusal(
            f"Expected a loss_geometry without curvature beside weights, got {loss!r}: how curved "
            "a batch is depends on the weights of its examples. Leave the curvature out."
        )
    is_strong = loss.kind is LossKind.STRONGLY_CONVEX
    return attrs.evolve(
        loss,
        kind=LossKind.CONVEX if is_strong else loss.kind,
        smoothness=largest * loss.smoothness,
        strong_convexity=0.0,
        weak_convexity=largest * loss.weak_convexity,
        lipschitz=None if loss.lipschitz is None else largest * loss.lipschitz,
    )


def plain_geometry(geometry: LossGeometry) -> dict[str, Any]:
    """The arguments of `LossGeometry` as plain types."""
    return attrs.asdict(geometry) | {"kind": geometry.kind.value}


def _of_plain_geometry(plain: Mapping[str, Any] | None) -> LossGeometry | None:
    return None if plain is None else LossGeometry(**plain)
