"""The oracles: a judge that is too mild hides mistakes."""

from __future__ import annotations

from mutation import Mutation

PROCESS = "process/noisy_process.py"
SUBSAMPLING = "bounds/subsampling.py"
WINDOWS = "bounds/solvers/sampled_windows.py"
_SAMPLED_TESTS = "bounds/test_subsampling.py"
_ORACLE_TESTS = "soundness/test_gaussian_oracle.py"
_GRID_TESTS = "soundness/test_grid_oracle.py"

MUTATIONS = (
    # The oracles: a judge that is too mild hides mistakes.
    Mutation(
        "gaussian_oracle_has_one_direction",
        "auditing/gaussian.py",
        "self._hockey_stick(self._second, self._first, epsilon)",
        "self._hockey_stick(self._first, self._second, epsilon)",
        _ORACLE_TESTS,
    ),
    Mutation(
        "grid_oracle_has_one_direction",
        "auditing/grid.py",
        "for a, b in ((fine, coarse), (fine.reversed(), coarse.reversed()))",
        "for a, b in ((fine, coarse), (fine, coarse))",
        _GRID_TESTS,
    ),
    Mutation(
        "grid_oracle_certifies_its_estimate_of_q",
        "auditing/_cells.py",
        "return np.minimum(self._inflated(q + self.missing_q), 1.0)",
        "return np.minimum(0.5 * (q + self.missing_q), 1.0)",
        _GRID_TESTS,
    ),
    Mutation(
        "grid_oracle_does_not_clip",
        "auditing/grid.py",
        "value if self.clip is None else np.clip(value, -self.clip[t], self.clip[t])",
        "value",
        _GRID_TESTS,
    ),
    Mutation(
        "poisson_batches_without_the_absent_records",
        "auditing/_batch_laws.py",
        "math.comb(k, n) * rate**n * (1 - rate) ** (k - n)",
        "math.comb(k, n) * rate**n * (1 - rate) ** n",
        _GRID_TESTS,
    ),
    Mutation(
        "sampled_record_replaces_nobody",
        SUBSAMPLING,
        "factor = 2 if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT else 1",
        "factor = 1",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "overfull_batches_cost_nothing",
        SUBSAMPLING,
        "return terms, event.overfull_delta(relation, terms)",
        "return terms, 0.0",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "poisson_batches_have_the_expected_size",
        SUBSAMPLING,
        "process = sampled_process(event, relation, terms)",
        "process = sampled_process(event, relation, event.batch_size)",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "empty_batches_contract_too",
        PROCESS,
        "contraction = np.maximum(contraction, np.abs(1 - eta * decay))",
        "contraction = contraction * 1.0",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "the_past_left_no_distance",
        SUBSAMPLING,
        "distance=tracked_distances(process, steps, process.sensitivity[steps])[0],",
        "distance=0 * tracked_distances(process, steps, process.sensitivity[steps])[0],",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "both_parts_of_the_noise_are_whole",
        WINDOWS,
        "shift_mu = (_shift_mu_squared(self._steps, length, shifted) / (1 - beta)) ** 0.5",
        "shift_mu = _shift_mu_squared(self._steps, length, shifted) ** 0.5",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "sampling_amplifies_twice",
        "curves/profiles.py",
        "return rate * whole(np.where(epsilon < _LARGE_EPSILON, near, far))",
        "return rate * rate * whole(np.where(epsilon < _LARGE_EPSILON, near, far))",
        _SAMPLED_TESTS,
    ),
)
