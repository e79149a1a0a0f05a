"""Attacks and exact oracles that any claim about a run can be held against.

A claim is refuted by a single run of its class whose exact divergence is larger. `audit` lets every
attack of `ATTACKS` that knows the kind of run look for such a run. Two oracles compute divergences
of a given run: `GaussianOracle` for quadratic and linear losses in any dimension, `GridOracle` for
any losses in one dimension.
"""

from hidden_state_accountants.auditing.audit import audit
from hidden_state_accountants.auditing.block_zero_curvature import BlockZeroCurvature
from hidden_state_accountants.auditing.bounded_domain import BoundedDomain
from hidden_state_accountants.auditing.dice_outlier import DiceOutlier
from hidden_state_accountants.auditing.evidence import Attack, Evidence
from hidden_state_accountants.auditing.gaussian import GaussianOracle
from hidden_state_accountants.auditing.grid import GridEstimate, GridOracle
from hidden_state_accountants.auditing.linear_losses import LinearLosses
from hidden_state_accountants.auditing.monte_carlo import MonteCarloAudit, monte_carlo_audit
from hidden_state_accountants.auditing.one_dimensional import OneDimensional
from hidden_state_accountants.auditing.quadratic_losses import QuadraticLosses
from hidden_state_accountants.auditing.report import AttackRow, AuditReport
from hidden_state_accountants.auditing.without_replacement_direction import (
    WithoutReplacementDirection,
)

ATTACKS: tuple[Attack, ...] = (
    LinearLosses(),
    QuadraticLosses(),
    OneDimensional(),
    BoundedDomain(),
    WithoutReplacementDirection(),
    BlockZeroCurvature(),
    DiceOutlier(),
)
"""Every attack. `audit` runs those whose `event_type` fits and whose `check` finds no obstacle."""

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackRow",
    "AuditReport",
    "BlockZeroCurvature",
    "BoundedDomain",
    "DiceOutlier",
    "Evidence",
    "GaussianOracle",
    "GridEstimate",
    "GridOracle",
    "LinearLosses",
    "MonteCarloAudit",
    "OneDimensional",
    "QuadraticLosses",
    "WithoutReplacementDirection",
    "audit",
    "monte_carlo_audit",
]
