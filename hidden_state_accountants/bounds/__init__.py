"""One file per result. A new bound is one file and one line in `BOUNDS`."""

from hidden_state_accountants.bounds.altschuler_talwar import AltschulerTalwar
from hidden_state_accountants.bounds.amplification_by_iteration import AmplificationByIteration
from hidden_state_accountants.bounds.base import Bound, Citation
from hidden_state_accountants.bounds.block_coordinate.bound import BlockCoordinate
from hidden_state_accountants.bounds.chien_li.bound import ChienLi
from hidden_state_accountants.bounds.chourasia_2021 import Langevin
from hidden_state_accountants.bounds.composition import Composition
from hidden_state_accountants.bounds.data_order import Reshuffled, ShuffledOnce
from hidden_state_accountants.bounds.dice_sgd.bound import DiceSgd
from hidden_state_accountants.bounds.hoelder import Hoelder
from hidden_state_accountants.bounds.kong_ribero import KongRibero
from hidden_state_accountants.bounds.overlapping_laws import OverlappingLaws
from hidden_state_accountants.bounds.shifted_interpolation import (
    ShiftedInterpolation,
    shifted_gdp_mu,
)
from hidden_state_accountants.bounds.subsampling import Subsampling
from hidden_state_accountants.bounds.ye_shokri import YeShokri

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
    Subsampling(),
    DiceSgd(),
    DiceSgd("published"),
    ChienLi(),
    ChienLi("published"),
    KongRibero(),
    KongRibero("published"),
    AmplificationByIteration(),
    AltschulerTalwar(),
    YeShokri(),
)

__all__ = [
    "BOUNDS",
    "AltschulerTalwar",
    "AmplificationByIteration",
    "BlockCoordinate",
    "Bound",
    "ChienLi",
    "Citation",
    "Composition",
    "DiceSgd",
    "Hoelder",
    "KongRibero",
    "Langevin",
    "OverlappingLaws",
    "Reshuffled",
    "ShiftedInterpolation",
    "ShuffledOnce",
    "Subsampling",
    "YeShokri",
    "shifted_gdp_mu",
]
