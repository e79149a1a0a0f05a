"""One file per result. A new bound is one file and one line in `BOUNDS`."""

from hidden_state_accountants.bounds.balls_in_bins import BallsInBins
from hidden_state_accountants.bounds.base import Bound, Citation
from hidden_state_accountants.bounds.chen_liu_2025 import BlockCoordinate
from hidden_state_accountants.bounds.chien_li_2024 import ChienLi
from hidden_state_accountants.bounds.chourasia_2021 import Langevin
from hidden_state_accountants.bounds.composition import Composition
from hidden_state_accountants.bounds.data_order import Reshuffled, ShuffledOnce
from hidden_state_accountants.bounds.dice_sgd_2024 import DiceSgd
from hidden_state_accountants.bounds.hidden_coins import HiddenCoins
from hidden_state_accountants.bounds.hoelder import Hoelder
from hidden_state_accountants.bounds.kong_ribero_2025 import KongRibero
from hidden_state_accountants.bounds.overlapping_laws import OverlappingLaws
from hidden_state_accountants.bounds.shifted_interpolation import (
    ShiftedInterpolation,
    shifted_gdp_mu,
)
from hidden_state_accountants.bounds.subsampling import Subsampling

BOUNDS: tuple[Bound, ...] = (
    Composition(),
    ShiftedInterpolation(),
    OverlappingLaws(),
    Hoelder(),
    Langevin(),
    BlockCoordinate(),
    BlockCoordinate("published"),
    ShuffledOnce(),
    Reshuffled(),
    BallsInBins(),
    Subsampling(),
    HiddenCoins(),
    DiceSgd(),
    DiceSgd("published"),
    ChienLi(),
    ChienLi("published"),
    KongRibero(),
    KongRibero("published"),
)

__all__ = [
    "BOUNDS",
    "BallsInBins",
    "BlockCoordinate",
    "Bound",
    "ChienLi",
    "Citation",
    "Composition",
    "DiceSgd",
    "HiddenCoins",
    "Hoelder",
    "KongRibero",
    "Langevin",
    "OverlappingLaws",
    "Reshuffled",
    "ShiftedInterpolation",
    "ShuffledOnce",
    "Subsampling",
    "shifted_gdp_mu",
]
