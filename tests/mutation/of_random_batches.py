"""Random batches: what one record does to a step, and what is left of it before a window."""

from __future__ import annotations

from mutation import Mutation

PROCESS = "process/noisy_process.py"
SIZES = "process/batch_sizes.py"
STEPS = "bounds/composition.py"
SUBSAMPLING = "bounds/subsampling.py"
WINDOWS = "bounds/solvers/sampled_windows.py"
LAW = "bounds/solvers/distance_law.py"
STRETCHING = "bounds/solvers/stretching.py"
PAIRS = "curves/by_profile.py"
_SAMPLED_TESTS = "theorems/test_subsampling.py"
_DISTANCE_TESTS = "theorems/test_random_distance.py"
_PAIR_TESTS = "theorems/test_sampled_pairs.py"
_ATTACK = "oracles/test_random_distance.py"

MUTATIONS = (
    Mutation(
        "batches_are_as_large_as_those_of_the_larger_data_set",
        STRETCHING,
        "means = np.maximum(sizes.fewest * each, sizes.others * each)",
        "means = sizes.others * each",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "steps_of_a_schedule_are_as_those_before_them",
        SIZES,
        "way = np.divide(eta - low, high - low, out=np.zeros(len(eta)), where=high > low)",
        "way = np.zeros(len(eta))",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "what_was_planned_never_fails",
        SUBSAMPLING,
        "return with_delta(run.released_curve(event), run.failure)",
        "return CurveWithDelta(run.released_curve(event), 0.0)",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "second_plan_is_the_first_one",
        SUBSAMPLING,
        "smaller = functools.partial(_curve, event, relation, _SMALLER_FAILURE)",
        "smaller = functools.partial(_curve, event, relation, _FAILURE)",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "steps_of_a_schedule_are_nearer_to_the_other_ones",
        SIZES,
        "weights = np.log1p(-way), np.log(way)",
        "weights = np.log(way), np.log1p(-way)",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "steps_with_another_decay_are_not_looked_at",
        SIZES,
        "is_node[changes] = is_node[changes + 1] = is_node[-1] = True",
        "is_node[-1] = True",
        _DISTANCE_TESTS,
    ),
    # One step.
    Mutation(
        "sampled_record_replaces_nobody",
        PAIRS,
        "return profiles.without_replacement(profiles.gaussian(2 * mu), rate)",
        "return profiles.without_replacement(profiles.gaussian(mu), rate)",
        _PAIR_TESTS,
    ),
    Mutation(
        "zeroed_record_takes_an_empty_place",
        PAIRS,
        "return profiles.sampled_deltas(_between(mu, rate, base_is_far=True), rate, epsilon)",
        "return profiles.sampled_deltas(profiles.gaussian(mu).forward, rate, epsilon)",
        _PAIR_TESTS,
    ),
    Mutation(
        "replaced_record_counts_once",
        PAIRS,
        "return profiles.sampled_deltas(_between(mu, rate, base_is_far=False), rate, epsilon)",
        "return profiles.sampled_deltas(profiles.gaussian(mu).forward, rate, epsilon)",
        _PAIR_TESTS,
    ),
    Mutation(
        "pair_is_that_of_its_smaller_direction",
        PAIRS,
        "return Profile(forward, backward, _largest(2 * mu, rate))",
        "return Profile(backward, backward, _largest(2 * mu, rate))",
        _PAIR_TESTS,
    ),
    Mutation(
        "shares_of_a_mixture_count_more_than_once",
        PAIRS,
        "at_near = epsilon + near - np.log1p(-share)",
        "at_near = epsilon + near - 2 * np.log1p(-share)",
        _PAIR_TESTS,
    ),
    Mutation(
        "divergence_at_a_negative_epsilon_is_that_at_zero",
        PAIRS,
        "return np.asarray(share * np.where(epsilon < 0, below_zero, of_mu))",
        "return np.asarray(share * of_mu)",
        _PAIR_TESTS,
    ),
    Mutation(
        "divergence_without_small_losses",
        PAIRS,
        "total = special.logsumexp(np.concatenate([rising, falling], axis=1), axis=1)",
        "total = special.logsumexp(rising, axis=1)",
        _PAIR_TESTS,
    ),
    # The distance before the window.
    Mutation(
        "the_past_left_no_distance",
        SUBSAMPLING,
        "distance=tracked_distances(self.process, steps, sensitivity, initial)[0],",
        "distance=0 * tracked_distances(self.process, steps, sensitivity, initial)[0],",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "distance_is_rounded_down",
        LAW,
        "moves = np.ceil(size * np.arange(len(heads)) * (1 - _ROUNDING / 2)).astype(int)",
        "moves = np.floor(size * np.arange(len(heads)) * (1 - _ROUNDING / 2)).astype(int)",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "weights_are_rounded_down",
        LAW,
        "index = np.searchsorted(sizes, weights[rest:])",
        "index = np.maximum(np.searchsorted(sizes, weights[rest:]) - 1, 0)",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "small_weights_are_dropped",
        LAW,
        "offset = float(sums[rest - 1]) if rest else 0.0",
        "offset = 0.0",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "levels_are_merged_downwards",
        LAW,
        "index = np.searchsorted(edges, law.levels)  # the smallest edge that is not below",
        "index = np.maximum(np.searchsorted(edges, law.levels) - 1, 0)",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "odd_cells_of_a_coarser_grid_move_down",
        LAW,
        "padded = np.concatenate([[0.0], law, np.zeros(1 - len(law) % 2)])",
        "padded = np.concatenate([law, np.zeros(len(law) % 2)])",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "the_mean_distance_stands_for_all",
        WINDOWS,
        "mus = law.levels * math.exp(min(log_unit, 600.0))",
        "mus = (law.levels * 0 + law.levels @ law.probabilities) * math.exp(min(log_unit, 600.0))",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "hidden_coins_inside_the_window_forget",
        WINDOWS,
        "return self._window(plan, self._laws[key])",
        """law = self._laws[key]
        hidden = (1 - self._steps.rate) ** (self.total - start)
        weights = np.append(hidden, (1 - hidden) * law.probabilities)
        law = DistanceLaw(np.append(0.0, law.levels), weights, law.rare)
        return self._window(plan, law)""",
        _ATTACK,
    ),
    Mutation(
        "both_parts_of_the_noise_are_whole",
        WINDOWS,
        "log_unit = self._log_mu_of_unit(plan) - 0.5 * math.log1p(-plan.beta)",
        "log_unit = self._log_mu_of_unit(plan)",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "distance_shrinks_all_through_the_window",
        WINDOWS,
        "log_product(self.total - plan.length, first)",
        "log_product(self.total - plan.length, self.total)",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "what_a_window_does_not_cover_is_dropped",
        SUBSAMPLING,
        "return with_delta(compose_curves(curves), window.rare)",
        "return compose_curves(curves)",
        _SAMPLED_TESTS,
    ),
    # The sizes of Poisson batches.
    Mutation(
        "overfull_batches_cost_nothing",
        SIZES,
        "failed = event.overfull_delta(relation, largest)",
        "failed = 0 * event.overfull_delta(relation, largest)",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "small_batches_cost_nothing",
        SIZES,
        "failed += event.num_steps * float(below(smallest - 1))",
        "failed += 0 * event.num_steps * float(below(smallest - 1))",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "poisson_batches_have_the_expected_size",
        SUBSAMPLING,
        "process = sampled_process(event, relation, sizes.largest)",
        "process = sampled_process(event, relation, event.batch_size)",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "products_of_moduli_never_fail",
        SUBSAMPLING,
        "failure = sizes.failure + allowed / 2",
        "failure = sizes.failure",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "line_below_the_moduli",
        SIZES,
        "intercepts = [(logs - slope[:, None] * number).max(axis=1) for slope in slopes]",
        "intercepts = [(logs - slope[:, None] * number).mean(axis=1) for slope in slopes]",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "replaced_record_is_in_no_batch",
        SIZES,
        "moduli = np.maximum(moduli[:, :-1], moduli[:, 1:])",
        "moduli = moduli[:, :-1]",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "batches_are_as_large_as_on_average",
        STRETCHING,
        "offsets = np.append(0.0, needed / thetas[:, 0])",
        "offsets = np.append(0.0, 0 * needed / thetas[:, 0])",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "windows_of_a_plan_fail_together",
        STRETCHING,
        "needed = math.log(num_steps / failure)",
        "needed = math.log(1 / failure)",
        _DISTANCE_TESTS,
    ),
    Mutation(
        "empty_batches_contract_too",
        PROCESS,
        "contraction = np.maximum(contraction, np.abs(1 - eta * decay))",
        "contraction = contraction * 1.0",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "sampling_amplifies_twice",
        "curves/profiles.py",
        "return rate * whole(np.where(epsilon < _LARGE_EPSILON, near, far))",
        "return rate * rate * whole(np.where(epsilon < _LARGE_EPSILON, near, far))",
        _SAMPLED_TESTS,
    ),
    Mutation(
        "a_replaced_record_in_a_batch_of_all_records_counts_once",
        STEPS,
        "GaussianCurve(2 * mu if relation is _REPLACE_ONE else mu)",
        "GaussianCurve(mu)",
        "theorems/test_sampled_pairs.py",
    ),
)
