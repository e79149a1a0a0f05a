"""Curves as plain JSON types, and back: the same numbers, bit by bit."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, dp_event

from hidden_state_accountants.curves.base import (
    BestOfCurves,
    Curve,
    CurveForSmallDeltas,
    CurveWithDelta,
    GaussianCurve,
    GaussianMixtureCurve,
    RdpCurve,
    SquareRootCurve,
)
from hidden_state_accountants.curves.by_profile import (
    CohortCurve,
    PolygonCurve,
    ReplacedInPoissonBatchCurve,
    SampledWithoutReplacementCurve,
    ZeroedWithoutReplacementCurve,
)
from hidden_state_accountants.curves.composed import ComposedCurve
from hidden_state_accountants.curves.standard import StandardCurve, StockEvent
from hidden_state_accountants.curves.transformed import GroupCurve

_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        BestOfCurves,
        CohortCurve,
        ComposedCurve,
        CurveWithDelta,
        GaussianCurve,
        GaussianMixtureCurve,
        GroupCurve,
        PolygonCurve,
        ReplacedInPoissonBatchCurve,
        SampledWithoutReplacementCurve,
        SquareRootCurve,
        StandardCurve,
        StockEvent,
        ZeroedWithoutReplacementCurve,
    )
}
_SMALL = CurveForSmallDeltas.__name__
_RENYI, _EVENT, _RELATION, _ARRAY = "RdpCurve", "event", "relation", "array"
_INFINITE = "inf"


@attrs.frozen
class _KnownDivergences:
    """Divergences at some orders; at the others between them the chord of (order - 1) D.

    That is convex in the order, so that a chord lies above it. D grows with the order: below the
    first one it is at most that of the first, and beyond the last one nothing is known.
    """

    orders: np.ndarray
    divergences: np.ndarray

    def __call__(self, orders: np.ndarray) -> np.ndarray:
        known = np.maximum(orders, self.orders[0])
        index = np.clip(np.searchsorted(self.orders, known), 1, len(self.orders) - 1)
        left, right = self.orders[index - 1], self.orders[index]
        below, above = self.divergences[index - 1], self.divergences[index]
        share = (known - left) / (right - left)
        with np.errstate(invalid="ignore"):
            chord = (1 - share) * (left - 1) * below + share * (right - 1) * above
            between = chord / (known - 1) * (1 + 1e-12)
        found = np.where(known == right, above, np.where(known == left, below, between))
        found = np.where(np.isnan(found), math.inf, found)
        return np.asarray(np.where(known > self.orders[-1], math.inf, found))


def to_plain(value: Any) -> Any:
    """A curve, or a part of one, as numbers, texts, lists and dictionaries.

    Raises:
        TypeError: There is a part that has no such form.
    """
    if isinstance(value, RdpCurve):
        bound = value.bound
        known = bound if isinstance(bound, _KnownDivergences) else None
        orders = value.orders if known is None else known.orders
        divergences = value.rdp(orders) if known is None else known.divergences
        return {"type": _RENYI, "orders": to_plain(orders), "divergences": to_plain(divergences)}
    if isinstance(value, CurveForSmallDeltas):
        return {"type": _SMALL, "other": to_plain(value.other), "made": to_plain(value.made)}
    if type(value) in _TYPES.values():
        return {"type": type(value).__name__, **_fields(value)}
    if isinstance(value, dp_accounting.DpEvent) and _event_type(type(value).__name__):
        return {"type": _EVENT, "name": type(value).__name__, "fields": _fields(value)}
    if isinstance(value, NeighboringRelation):
        return {"type": _RELATION, "name": value.name}
    if isinstance(value, np.ndarray):
        return {"type": _ARRAY, "values": [to_plain(part) for part in value.tolist()]}
    if isinstance(value, tuple | list):
        return [to_plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value == math.inf:
        return _INFINITE
    if isinstance(value, int | float) and math.isfinite(value) and not isinstance(value, enum.Enum):
        return value
    raise TypeError(f"Expected a guarantee whose curve is known, got one with {value!r} in it.")


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: to_plain(getattr(value, f.name)) for f in attrs.fields(type(value))}


def _event_type(name: str) -> Any:
    """The event of dp-accounting that is called so; None if there is none."""
    kind = getattr(dp_event, name, None)
    is_event = isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)
    return kind if is_event else None


def curve_from_plain(plain: Any) -> Curve:
    """The curve that `to_plain` wrote.

    Raises:
        ValueError: Nothing is written like that.
    """
    try:
        curve = _from_plain(plain)
        curve.rdp(np.array([2.0]))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"Expected a curve as to_dict writes it, got {error!r}.") from None
    found: Curve = curve
    return found


def _from_plain(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_from_plain(part) for part in plain)
    if plain == _INFINITE:
        return math.inf
    if not isinstance(plain, Mapping):
        if isinstance(plain, int | float):
            return plain
        raise TypeError(f"no number: {plain!r}")
    parts = dict(plain)
    kind = parts.pop("type")
    if kind == _ARRAY:
        return np.array(_from_plain(parts["values"]), dtype=np.float64)
    if kind == _RELATION:
        return NeighboringRelation[parts["name"]]
    if kind == _RENYI:
        known = _KnownDivergences(*map(_from_plain, parts.values()))
        return RdpCurve(known, known.orders)
    if kind == _EVENT:
        event = _event_type(parts["name"])
        fields = {name: _from_plain(part) for name, part in parts["fields"].items()}
        return event(**{n: list(f) if isinstance(f, tuple) else f for n, f in fields.items()})
    fields = {name: _from_plain(part) for name, part in parts.items()}
    if kind == _SMALL:
        return CurveForSmallDeltas(fields["other"], lambda: fields["made"])
    if kind == GaussianMixtureCurve.__name__:  # its constructor would round the weights again
        curve = object.__new__(GaussianMixtureCurve)
        for name in ("weights", "mus", "smallest_delta"):
            object.__setattr__(curve, name, fields[name])
        return curve
    return _TYPES[kind](**fields)
