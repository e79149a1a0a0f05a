"""What only the user can know of the examples of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from hidden_state_accountants import LossGeometry, validate
from hidden_state_adapters.tf_privacy.refusals import refusal

# By name: whose runs it is about, and what takes its place elsewhere.
_OF = {
    "gradient_bound": ("a Dice optimizer", "the optimizer's loss_geometry, or a block_loss"),
    "block_loss": ("a BlockCoordinateKerasOptimizer", "the optimizer's loss_geometry"),
}


def _bound(value: Any) -> float:
    return validate.real("gradient_bound", value, above=0, allow_inf=True)


def _check_geometry(instance: object, attribute: Any, value: object) -> None:
    if value is not None and not isinstance(value, LossGeometry):
        raise TypeError(f"Expected {attribute.name} to be a LossGeometry or None, got {value!r}.")


@attrs.frozen(kw_only=True)
class Declared:
    """What holds for ALL examples that could have been in the data; the run is checked against it.

    Attributes:
        gradient_bound: Of the norm of every per-example gradient before clipping; inf if unknown.
        block_loss: The per-example loss as a function of the one block; None if unknown.
    """

    gradient_bound: float = attrs.field(default=math.inf, converter=_bound)
    block_loss: LossGeometry | None = attrs.field(default=None, validator=_check_geometry)

    def to_plain(self) -> dict[str, Any]:
        """Plain types; None for what is not known."""
        return {
            "gradient_bound": None if self.gradient_bound == math.inf else self.gradient_bound,
            "block_loss": None if self.block_loss is None else plain_geometry(self.block_loss),
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Declared:
        """Inverse of `to_plain`."""
        bound, loss = plain["gradient_bound"], plain["block_loss"]
        return cls(
            gradient_bound=math.inf if bound is None else bound,
            block_loss=None if loss is None else LossGeometry(**loss),
        )

    def refuse_all_but(self, known: str, optimizer: str) -> None:
        """Refuses what says nothing about the runs of an optimizer.

        Args:
            known: The name that does say something; "" if none does.
            optimizer: Name of the optimizer.

        Raises:
            UnsupportedRunError: Something else is declared.
        """
        for name, (kind, instead) in _OF.items():
            if name != known and getattr(self, name) != getattr(_NOTHING, name):
                raise refusal(
                    f"Expected {name} for {kind}, got {optimizer}. Declare {instead}, or nothing."
                )


_NOTHING = Declared()


def plain_geometry(geometry: LossGeometry) -> dict[str, Any]:
    """The arguments of `LossGeometry` as plain types."""
    return attrs.asdict(geometry) | {"kind": geometry.kind.value}
