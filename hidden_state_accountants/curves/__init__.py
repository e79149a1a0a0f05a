"""Privacy curves: epsilon as a function of delta, and how curves compose."""

from hidden_state_accountants.curves.base import (
    BestOfCurves,
    Curve,
    GaussianCurve,
    GaussianMixtureCurve,
    RdpCurve,
)

__all__ = [
    "BestOfCurves",
    "Curve",
    "GaussianCurve",
    "GaussianMixtureCurve",
    "RdpCurve",
]
