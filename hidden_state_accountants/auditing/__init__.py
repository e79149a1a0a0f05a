"""Attacks that any claim about a run can be held against.

A claim is refuted by a single run of its class whose exact divergence is larger. `audit` lets every
attack of `ATTACKS` that knows the kind of run look for such a run. `GridOracle` computes the
divergences of a given run in one dimension, `monte_carlo_audit` tests a trainer as a black box.
"""

from hidden_state_accountants.auditing.audit import audit
from hidden_state_accountants.auditing.evidence import Attack, Evidence
from hidden_state_accountants.auditing.grid import GridEstimate, GridOracle
from hidden_state_accountants.auditing.linear_losses import LinearLosses
from hidden_state_accountants.auditing.monte_carlo import MonteCarloAudit, monte_carlo_audit
from hidden_state_accountants.auditing.one_dimensional import OneDimensional
from hidden_state_accountants.auditing.quadratic_losses import QuadraticLosses
from hidden_state_accountants.auditing.report import AttackRow, AuditReport

ATTACKS: tuple[Attack, ...] = (LinearLosses(), QuadraticLosses(), OneDimensional())
"""Every attack. `audit` runs those whose `event_type` fits and whose `check` finds no obstacle."""

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackRow",
    "AuditReport",
    "Evidence",
    "GridEstimate",
    "GridOracle",
    "LinearLosses",
    "MonteCarloAudit",
    "OneDimensional",
    "QuadraticLosses",
    "audit",
    "monte_carlo_audit",
]
