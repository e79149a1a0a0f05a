"""What the laws of two runs have in common before a window of a bounded domain."""

from __future__ import annotations

from mutation import Mutation

STATES = "bounds/solvers/state_windows.py"
_TESTS = "oracles/test_overlapping_laws.py"

MUTATIONS = (
    Mutation(
        "states_in_common_are_equally_likely",
        STATES,
        "own = np.cumsum(same(at[:, None] - losses) * first, axis=1)",
        "own = np.cumsum(same(at[:, None] - 0 * losses) * first, axis=1)",
        _TESTS,
    ),
    Mutation(
        "what_is_left_of_the_other_law_is_all_of_it",
        STATES,
        "more = np.log(left_over[allowed]) - math.log(unmatched)",
        "more = 0 * left_over[allowed] - math.log(unmatched)",
        _TESTS,
    ),
    Mutation(
        "states_beyond_the_last_ratio_are_forgotten",
        STATES,
        "total = own[:, zero + offset] + cut + (",
        "total = own[:, zero + offset] + 0 * cut + (",
        _TESTS,
    ),
    Mutation(
        "losses_below_the_first_ratio_keep_theirs",
        STATES,
        "raised = below[lows] * same(at[:, None] - levels) - own[:, lows]",
        "raised = 0 * below[lows] * same(at[:, None] - levels)",
        _TESTS,
    ),
    Mutation(
        "runs_enter_every_window_from_one_state",
        "bounds/overlapping_laws.py",
        "initial_shift=self.distance)",
        "initial_shift=0 * self.distance)",
        _TESTS,
    ),
    Mutation(
        "steps_that_differ_have_the_mean_noise",
        "bounds/overlapping_laws.py",
        "sigma = float(process.noise_std[steps].min())",
        "sigma = float(process.noise_std[steps].mean())",
        _TESTS,
    ),
    Mutation(
        "states_that_are_left_over_are_as_near_as_coupled_runs",
        "bounds/overlapping_laws.py",
        "return cls(c, s / sigma, process.domain_diameter / sigma, process.period)",
        "near = min(process.domain_diameter, s / max(1 - c**process.period, 1e-9))\n"
        "        return cls(c, s / sigma, near / sigma, process.period)",
        _TESTS,
    ),
    Mutation(
        "last_participation_is_not_counted",
        "bounds/overlapping_laws.py",
        "return profile.after(*_window(*self._steps.mus([(1, True)])))",
        "return profile",
        _TESTS,
    ),
    Mutation(
        "steps_without_noise_are_pauses",
        "bounds/overlapping_laws.py",
        "is_idle = (process.sensitivity == 0) & (process.noise_std == 0)",
        "is_idle = (process.noise_std == 0)",
        _TESTS,
    ),
    Mutation(
        "pauses_of_a_cyclic_run_are_passed_over_anywhere",
        "bounds/overlapping_laws.py",
        "if process.period == 1:",
        "if True:",
        _TESTS,
    ),
)
