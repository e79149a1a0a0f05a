"""The oracles: a judge that is too mild hides mistakes."""

from __future__ import annotations

from mutation import Mutation

_ORACLE_TESTS = "oracles/test_gaussian_oracle.py"
_GRID_TESTS = "oracles/test_grid_oracle.py"

MUTATIONS = (
    # The oracles: a judge that is too mild hides mistakes.
    Mutation(
        "gaussian_oracle_has_one_direction",
        "../tests/oracles/gaussian_oracle.py",
        "self._hockey_stick(self._second, self._first, epsilon)",
        "self._hockey_stick(self._first, self._second, epsilon)",
        _ORACLE_TESTS,
    ),
    Mutation(
        "grid_oracle_has_one_direction",
        "../tests/oracles/grid_oracle.py",
        "for a, b in ((fine, coarse), (fine.reversed(), coarse.reversed()))",
        "for a, b in ((fine, coarse), (fine, coarse))",
        _GRID_TESTS,
    ),
    Mutation(
        "grid_oracle_certifies_its_estimate_of_q",
        "../tests/oracles/grid_oracle.py",
        "return np.minimum(self._inflated(q + self.missing_q), 1.0)",
        "return np.minimum(0.5 * (q + self.missing_q), 1.0)",
        _GRID_TESTS,
    ),
    Mutation(
        "grid_oracle_does_not_clip",
        "../tests/oracles/grid_oracle.py",
        "value if self.clip is None else np.clip(value, -self.clip[t], self.clip[t])",
        "value",
        _GRID_TESTS,
    ),
    Mutation(
        "poisson_batches_without_the_absent_records",
        "../tests/oracles/batch_laws.py",
        "math.comb(k, n) * rate**n * (1 - rate) ** (k - n)",
        "math.comb(k, n) * rate**n * (1 - rate) ** n",
        _GRID_TESTS,
    ),
)
