"""Accountants that know the theorems of one source alone."""

from __future__ import annotations

from collections.abc import Callable

from dp_accounting import NeighboringRelation

from hidden_state_accountants.accountants import BoundAccountant
from hidden_state_accountants.bounds import (
    BlockCoordinate,
    Bound,
    ChienLi,
    DiceSgd,
    KongRibero,
    Langevin,
    ShiftedInterpolation,
)


class ShiftedInterpolationAccountant(BoundAccountant):
    """Theorem A alone (`bounds.ShiftedInterpolation`).

    Args:
        neighboring_relation: See `LastIterateAccountant`.
    """

    def __init__(
        self, neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL
    ):
        super().__init__(neighboring_relation, ShiftedInterpolation())


class _PaperAccountant(BoundAccountant):
    """One paper's theorems, each soundly or as published."""

    _bound_type: Callable[[str], Bound]

    def __init__(
        self,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        *,
        analysis: str = "sound",
    ):
        super().__init__(neighboring_relation, type(self)._bound_type(analysis))


class LangevinAccountant(_PaperAccountant):
    """Chourasia, Ye, Shokri 2021 (arXiv 2102.05855) alone (`bounds.Langevin`).

    Args:
        neighboring_relation: See `LastIterateAccountant`.
        analysis: "sound" is the paper's recursion, balanced best and from a fixed start;
            "published" is Corollary 1.
    """

    _bound_type = Langevin


class ChienLiAccountant(_PaperAccountant):
    """Chien & Li 2024 (arXiv 2410.01068) alone (`bounds.ChienLi`).

    Args:
        neighboring_relation: See `LastIterateAccountant`. The paper's is REPLACE_ONE.
        analysis: "sound" or "published"; the latter reads WITHOUT_REPLACEMENT batches by Theorem
            3.12, which is false and warns.
    """

    _bound_type = ChienLi


class KongRiberoAccountant(_PaperAccountant):
    """Kong & Ribero 2025 (arXiv 2407.05237) alone (`bounds.KongRibero`).

    Args:
        neighboring_relation: See `LastIterateAccountant`. The paper's is REPLACE_ONE.
        analysis: "sound", or "published" for the formulas as stated; Theorem 2.2 under clipping is
            not proved as stated and warns.
    """

    _bound_type = KongRibero


class BlockCoordinateAccountant(_PaperAccountant):
    """Runs of `BlockCoordinateDpEvent` alone (`bounds.BlockCoordinate`).

    Args:
        neighboring_relation: See `LastIterateAccountant`. It decides how far one clipped record
            moves a sum; a declared gradient_sensitivity is read as that of this relation.
        analysis: "sound", or "published" for Chen & Liu 2025 (arXiv 2407.08233), Theorem 4.6, which
            is false in general and warns.
    """

    _bound_type = BlockCoordinate


class DiceSgdAccountant(_PaperAccountant):
    """Runs of `DiceSgdDpEvent` alone (`bounds.DiceSgd`).

    Args:
        neighboring_relation: See `LastIterateAccountant`.
        analysis: "sound", or "published" for Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632),
            Theorem 3.7, which is false and warns.
    """

    _bound_type = DiceSgd
