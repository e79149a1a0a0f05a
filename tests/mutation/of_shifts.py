"""Optimal shifts, windows and segments; secret orders."""

from __future__ import annotations

from mutation import Mutation

SHIFTS = "bounds/shifted_interpolation.py"
EQUAL_STEPS = "bounds/solvers/equal_steps.py"
TAUT_STRING = "bounds/solvers/taut_string.py"
ALL_POSITIONS = "bounds/solvers/all_positions.py"
CARRIES = "bounds/solvers/carries.py"
_EQUAL_STEPS_TESTS = "theorems/test_equal_steps.py"
_LAWS = "laws/test_accountants.py"
_RECORDER_TESTS = "core/test_recorder.py"
_RELEASE_LAWS = "laws/test_accountants.py::TestReleases"
_RESHUFFLED_TESTS = "theorems/test_data_order.py::TestReshuffled"
_CARRIES_TESTS = "theorems/test_carries.py"
_TAUT_STRING_TESTS = "theorems/test_taut_string.py"
_ALL_POSITIONS_TESTS = "theorems/test_all_positions.py"
_BASELINES_TESTS = "theorems/test_baselines.py"
_PROX_TESTS = "theorems/test_prox.py"

MUTATIONS = (
    # Optimal shifts, windows and segments.
    Mutation(
        "pooling_in_the_wrong_direction",
        TAUT_STRING,
        "_slopes_fall(new, top) if self._grows_left else _slopes_fall(top, new)",
        "_slopes_fall(top, new) if self._grows_left else _slopes_fall(new, top)",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "pooling_is_the_same_on_both_sides",
        TAUT_STRING,
        "_slopes_fall(new, top) if self._grows_left else _slopes_fall(top, new)",
        "_slopes_fall(new, top)",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "shift_is_spent_within_the_epoch",
        TAUT_STRING,
        "while len(blocks) > 1 and self._must_pool(block, blocks[-1]):",
        "while len(blocks) < 1 and self._must_pool(block, blocks[-1]):",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "query_pools_everything",
        TAUT_STRING,
        "while index and self._must_pool(block, self._blocks[index]):",
        "while index:",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "noise_of_the_step_is_contracted_by_itself",
        TAUT_STRING,
        "stack.push((s[t] * product, noise * noise, exponent))\n            product *= c[t]",
        "product *= c[t]\n            noise = sigma[t] * product\n"
        "            stack.push((s[t] * product, noise * noise, exponent))",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "window_starts_a_step_late",
        TAUT_STRING,
        "_scaled(known_shift[chunk], shift_unit)",
        "_scaled(known_shift[start + 1 : stop + 1], shift_unit)",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "window_after_a_batch_starts_a_step_early",
        ALL_POSITIONS,
        "sums.columns(begins, sums.after)",
        "sums.columns(begins, sums.blocks)",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "only_starts_after_batches_are_tried",
        SHIFTS,
        "return bool((c <= 1).all() and (excess <= slack).all())",
        "return True",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "blocks_of_all_positions_have_one_exponent",
        ALL_POSITIONS,
        "exponents = np.frexp(self.products)[1]",
        "exponents = 0 * np.frexp(self.products)[1]",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "blocks_of_all_positions_end_with_the_epoch",
        ALL_POSITIONS,
        "after[:-1, 1:] += np.cumsum(weights[1:, :-1], axis=1)",
        "pass",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "windows_of_all_positions_start_a_step_early",
        ALL_POSITIONS,
        "shift, may_start = distances.before(step)",
        "shift, may_start = distances.before(max(step - 1, 0))",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "drift_of_all_positions_holds_the_record_twice",
        ALL_POSITIONS,
        "max(moved[position] - s, 0.0)",
        "max(moved[position] - 2 * s, 0.0)",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "windows_of_all_positions_stop_too_early",
        ALL_POSITIONS,
        "is_open[asked] = blocks.cost[asked] < best[asked]",
        "is_open[asked] = 2 * blocks.cost[asked] < best[asked]",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "distances_are_tracked_again_from_another_step",
        ALL_POSITIONS,
        "distance, is_cut = self._kept[step // self._chunk]",
        "distance, is_cut = self._kept[max(step // self._chunk - 1, 0)]",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "drift_at_the_start_of_a_window_holds_the_record_twice",
        "bounds/shifted_interpolation.py",
        "(moved - sensitivity)[is_moved]",
        "(moved - 2 * sensitivity)[is_moved]",
        "theorems/test_all_positions.py",
    ),
    Mutation(
        "tracking_is_off_by_one",
        SHIFTS,
        "known = np.where(is_cut, distances, np.nan)",
        "known = np.roll(np.where(is_cut, distances, np.nan), -1)",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "tracking_ignores_the_bounded_drift",
        SHIFTS,
        "capped = min(kappa * distance + offset, process.domain_diameter)",
        "capped = max(kappa * distance + offset, process.domain_diameter)",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "windows_are_not_looked_for",
        ALL_POSITIONS,
        "return bool((stretched > np.minimum(limit, process.domain_diameter)).any())",
        "return False",
        _ALL_POSITIONS_TESTS,
    ),
    Mutation(
        "releases_are_ignored",
        SHIFTS,
        "if not process.release_steps:",
        "if True:",
        _LAWS,
    ),
    Mutation(
        "segment_starts_at_the_beginning_of_the_epoch",
        SHIFTS,
        "totals += of_shape(start % process.period, end - start)",
        "totals += of_shape(0, end - start)",
        _RELEASE_LAWS,
    ),
    Mutation(
        "segment_of_a_schedule_starts_with_the_run",
        SHIFTS,
        "(process, start, end, positions)",
        "(process, start % process.period, end, positions)",
        _RELEASE_LAWS,
    ),
    Mutation(
        "short_segment_starts_at_position_0",
        SHIFTS,
        "offsets = (np.asarray(positions) - start) % process.period",
        "offsets = np.asarray(positions) % process.period",
        "theorems/test_equal_steps.py",
    ),
    Mutation(
        "shift_without_noise_is_free",
        TAUT_STRING,
        "return s * (s / w) if w > 0 else math.inf",
        "return s * (s / w) if w > 0 else 0.0",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "scan_stops_too_early",
        TAUT_STRING,
        "if stack.cost >= best:",
        "if stack.cost >= best / 2:",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "jump_skips_a_block",
        TAUT_STRING,
        "if self._must_pool(jumped, self._blocks[target]):",
        "if self._must_pool(block, self._blocks[target]):",
        _TAUT_STRING_TESTS,
    ),
    # Equal steps.
    Mutation(
        "equal_participations_never_pool",
        EQUAL_STEPS,
        "np.where(pools, together, alone + others)",
        "alone + others",
        _EQUAL_STEPS_TESTS,
    ),
    Mutation(
        "nothing_was_before_the_tail",
        SHIFTS,
        "initial_shift=initial,",
        "initial_shift=0.0,",
        _EQUAL_STEPS_TESTS,
    ),
    # Secret orders.
    Mutation(
        "late_participations_of_expanding_runs",
        "bounds/data_order.py",
        "process.contraction[0] <= 1:",
        "process.contraction[0] >= 0:",
        _RESHUFFLED_TESTS,
    ),
    Mutation(
        "late_participations_of_schedules",
        "bounds/data_order.py",
        "if process.is_constant and not process.release_steps and",
        "if not process.release_steps and",
        _RESHUFFLED_TESTS,
    ),
    Mutation(
        "late_participations_of_runs_with_releases",
        "bounds/data_order.py",
        "if process.is_constant and not process.release_steps and",
        "if process.is_constant and",
        _RESHUFFLED_TESTS,
    ),
    Mutation(
        "epochs_of_a_schedule_are_taken_for_alike",
        "bounds/data_order.py",
        "if process.is_constant and shape in known:",
        "if shape in known:",
        _RESHUFFLED_TESTS,
    ),
    Mutation(
        "record_beyond_the_last_batch_never_took_part",
        "bounds/data_order.py",
        "mu_squared[:] = by_position[-1]",
        "mu_squared[:] = 0 * by_position[-1]",
        _RESHUFFLED_TESTS,
    ),
    Mutation(
        "what_is_carried_over_the_end_of_an_epoch_is_forgotten",
        CARRIES,
        "carried = (carries[:-1] * self.whole)[:, None]",
        "carried = (0 * carries[:-1] * self.whole)[:, None]",
        _CARRIES_TESTS,
    ),
    Mutation(
        "record_is_hidden_before_it_comes",
        CARRIES,
        "shifted * self.before <= carried * self.total",
        "shifted * 0 <= carried * self.total",
        _CARRIES_TESTS,
    ),
    Mutation(
        "released_iterates_are_carried_over",
        CARRIES,
        "released[[step // period - 1 for step in process.release_steps]] = True",
        "released[[step // period for step in process.release_steps]] = True",
        _CARRIES_TESTS,
    ),
    Mutation(
        "costs_of_epochs_are_rounded_down",
        CARRIES,
        "cells = np.ceil((row - low) / width * (1 - _ROUNDING)).astype(int)",
        "cells = np.zeros(len(row), dtype=int)",
        _CARRIES_TESTS,
    ),
    Mutation(
        "costs_are_merged_downwards",
        CARRIES,
        "index = np.searchsorted(edges, np.arange(len(law)))",
        "index = np.maximum(np.searchsorted(edges, np.arange(len(law))) - 1, 0)",
        _CARRIES_TESTS,
    ),
    Mutation(
        "what_every_position_costs_at_least_is_dropped",
        CARRIES,
        "start = float(lowest[varies].sum() + highest[~varies].sum())",
        "start = float(highest[~varies].sum())",
        _CARRIES_TESTS,
    ),
    # Baselines.
    Mutation(
        "baseline_forgets_a_participation_in_the_window",
        "bounds/baselines.py",
        "first = np.maximum(0, -((position - (run.num_steps - windows)) // run.period))",
        "first = np.maximum(0, -((position - (run.num_steps - windows + 1)) // run.period))",
        _BASELINES_TESTS,
    ),
    Mutation(
        "baseline_forgets_a_whole_epoch_at_once",
        "bounds/baselines.py",
        "rest = 2 * (run.period - half)",
        "rest = 2 * (run.period + half)",
        _BASELINES_TESTS,
    ),
    # A prox after the noise.
    Mutation(
        "prox_of_the_step_itself",
        "process/noisy_process.py",
        "np.concatenate([[1.0], shrunk[:-1]])",
        "shrunk",
        _PROX_TESTS,
    ),
    Mutation(
        "domain_before_the_prox",
        "process/noisy_process.py",
        "domain_diameter=event.domain_diameter / float(np.min(before))",
        "domain_diameter=event.domain_diameter",
        _PROX_TESTS,
    ),
    Mutation(
        "prox_of_a_group_shrinks_more",
        "process/groups.py",
        "event.prox_strong_convexity / longer",
        "event.prox_strong_convexity",
        _PROX_TESTS,
    ),
)
