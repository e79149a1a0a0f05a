"""Exact oracles that any claim about a run can be held against.

A claim is refuted by a single run of its class whose exact divergence is larger. The two oracles
compute that divergence: `GaussianOracle` for quadratic and linear losses in any dimension,
`GridOracle` for any losses in one dimension.
"""

from hidden_state_accountants.auditing.gaussian import GaussianOracle
from hidden_state_accountants.auditing.grid import GridEstimate, GridOracle

__all__ = ["GaussianOracle", "GridEstimate", "GridOracle"]
