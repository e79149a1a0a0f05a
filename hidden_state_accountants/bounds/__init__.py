"""One file per result. A new bound is one file and one line in `BOUNDS`."""

from hidden_state_accountants.bounds._bound import Bound, Citation
from hidden_state_accountants.bounds.composition import Composition
from hidden_state_accountants.bounds.shifted_interpolation import (
    ShiftedInterpolation,
    shifted_gdp_mu,
)

BOUNDS: tuple[Bound, ...] = (Composition(), ShiftedInterpolation())

__all__ = [
    "BOUNDS",
    "Bound",
    "Citation",
    "Composition",
    "ShiftedInterpolation",
    "shifted_gdp_mu",
]
