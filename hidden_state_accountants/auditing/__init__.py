"""Attacks that any claim about a run can be held against.

A claim is refuted by a single run of its class whose exact divergence is larger. `audit` lets every
attack of `ATTACKS` that knows the kind of run look for such a run.
"""

from hidden_state_accountants.auditing.audit import ATTACKS, AttackRow, AuditReport, audit
from hidden_state_accountants.auditing.evidence import Attack, Evidence
from hidden_state_accountants.auditing.linear_losses import LinearLosses
from hidden_state_accountants.auditing.quadratic_losses import QuadraticLosses

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackRow",
    "AuditReport",
    "Evidence",
    "LinearLosses",
    "QuadraticLosses",
    "audit",
]
