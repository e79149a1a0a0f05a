"""Mistakes that somebody could plausibly make in the engine: the test suite must notice each.

A mutation replaces one passage, which must occur exactly once in its file. It changes what some
run is told: an equivalent change has no place here.
"""

from __future__ import annotations

import attrs

ACCOUNTANTS = "accountants.py"
COMPOSED = "events/as_composition.py"
ORDERS = "events/batch_order.py"
BLOCKS = "events/block_coordinate.py"
CURVES = "curves/base.py"
CURVES_TOGETHER = "curves/composed.py"
EVENTS = "events/last_iterate.py"
GEOMETRY = "process/geometry.py"
PROCESS = "process/noisy_process.py"
SHIFTS = "bounds/shifted_interpolation.py"
SUBSAMPLING = "bounds/subsampling.py"
WINDOWS = "bounds/solvers/sampled_windows.py"
TAUT_STRING = "bounds/solvers/taut_string.py"


@attrs.frozen
class Mutation:
    """One mistake.

    Attributes:
        name: Says what is wrong in the mutant.
        path: The file, below hidden_state_accountants/.
        old: The passage that is replaced.
        new: What replaces it.
        hint: The test file, or a test in it, that is run first, below tests/.
    """

    name: str
    path: str
    old: str
    new: str
    hint: str


_SENSITIVITY = (
    "if relation is NeighboringRelation.REPLACE_ONE or order is BatchOrder.WITHOUT_REPLACEMENT:"
)
_LAWS = "laws/test_accountants.py"
_STANDARD_LAWS = "laws/test_standard_events.py"
_GEOMETRY_TESTS = "core/test_geometry.py"
_PROCESS_TESTS = "core/test_process.py"
_DETAILS = "core/test_engine_details.py"
_COMPOSITION_LAWS = "laws/test_accountants.py::TestComposition"
_RECORDER_TESTS = "core/test_recorder.py"
_RUN_TESTS = "core/test_runs.py"
_EVENT_TESTS = "core/test_events.py"
_RELEASE_LAWS = "laws/test_accountants.py::TestReleases"
_RESHUFFLED_TESTS = "bounds/test_data_order.py::TestReshuffled"
_CURVE_TESTS = "laws/test_curves.py"
_BLOCK_TESTS = "bounds/test_block_coordinate.py"
_SAMPLED_TESTS = "bounds/test_subsampling.py"
_TAUT_STRING_TESTS = "bounds/test_taut_string.py"
_ORACLE_TESTS = "soundness/test_gaussian_oracle.py"
_GRID_TESTS = "soundness/test_grid_oracle.py"

MUTATIONS = (
    # What one record moves.
    Mutation(
        "replace_one_moves_one_clip_norm",
        "events/batch_order.py",
        _SENSITIVITY,
        "if order is BatchOrder.WITHOUT_REPLACEMENT:",
        _LAWS,
    ),
    Mutation(
        "without_replacement_forgets_the_stand_in",
        "events/batch_order.py",
        _SENSITIVITY,
        "if relation is NeighboringRelation.REPLACE_ONE:",
        _EVENT_TESTS,
    ),
    Mutation(
        "fixed_batches_accept_add_or_remove",
        "events/batch_order.py",
        "NeighboringRelation.ADD_OR_REMOVE_ONE and order in _FIXED_SIZE",
        "NeighboringRelation.ADD_OR_REMOVE_ONE and order not in (*_FIXED_SIZE, *BatchOrder)",
        _PROCESS_TESTS,
    ),
    Mutation(
        "drift_loses_the_factor_2",
        PROCESS,
        "drift=eta * bound * terms / b",
        "drift=eta * bound * terms / b / 2",
        _PROCESS_TESTS,
    ),
    Mutation(
        "drift_forgets_the_added_record",
        PROCESS,
        "drift=eta * bound * terms / b",
        "drift=eta * bound * (terms - terms % 2) / b",
        _PROCESS_TESTS,
    ),
    Mutation(
        "drift_forgets_the_decay",
        PROCESS,
        "drift_contraction=np.abs(1 - eta * decay)",
        "drift_contraction=np.abs(1 - 0 * eta * decay)",
        _PROCESS_TESTS,
    ),
    Mutation(
        "sensitivity_is_lipschitz_where_the_clip_is_smaller",
        EVENTS,
        "return clip if lipschitz is None else np.minimum(clip, lipschitz)",
        "return clip if lipschitz is None else np.full_like(clip, lipschitz)",
        _PROCESS_TESTS,
    ),
    Mutation(
        "sensitivity_ignores_lipschitz",
        EVENTS,
        "return clip if lipschitz is None else np.minimum(clip, lipschitz)",
        "return clip",
        _PROCESS_TESTS,
    ),
    Mutation(
        "noise_in_units_of_lipschitz",
        EVENTS,
        'unit = self.gradient_bound() if self.clip_norm is None else self.per_step("clip_norm")',
        "unit = self.gradient_bound()",
        _PROCESS_TESTS,
    ),
    Mutation(
        "noise_is_not_averaged",
        PROCESS,
        "noise_std=eta * event.noise_std_on_sum() / b",
        "noise_std=eta * event.noise_std_on_sum()",
        _PROCESS_TESTS,
    ),
    Mutation(
        "radius_for_diameter",
        PROCESS,
        "domain_diameter=event.domain_diameter,",
        "domain_diameter=event.domain_diameter / 2,",
        _LAWS,
    ),
    Mutation(
        "cyclic_run_of_a_loss_without_linear_modulus",
        "process/conditions.py",
        "loss.kind is not LossKind.HOELDER or loss.exponent == 1:",
        "loss.kind is not LossKind.HOELDER or loss.exponent <= 1:",
        _PROCESS_TESTS,
    ),
    Mutation(
        "replaced_block_record_moves_one_clip_norm",
        BLOCKS,
        "return sensitivity_in_clip_norms(BatchOrder.CYCLIC, relation) * bound",
        "return bound",
        _BLOCK_TESTS,
    ),
    Mutation(
        "block_clip_that_acts_is_taken_for_idle",
        BLOCKS,
        "return self.block_loss.lipschitz > self.clip_norm",
        "return self.block_loss.lipschitz > 2 * self.clip_norm",
        _BLOCK_TESTS,
    ),
    # Which steps it moves.
    Mutation(
        "position_off_by_one",
        PROCESS,
        "result[position :: self.period] = self.sensitivity[position :: self.period]",
        "result[position + 1 :: self.period] = self.sensitivity[position + 1 :: self.period]",
        _PROCESS_TESTS,
    ),
    Mutation(
        "worst_position_off_by_one",
        SHIFTS,
        "positions = [(process.num_steps - 1) % process.period]",
        "positions = [process.num_steps % process.period]",
        _LAWS,
    ),
    Mutation(
        "worst_position_is_the_last_batch_of_an_epoch",
        SHIFTS,
        "positions = [(process.num_steps - 1) % process.period]",
        "positions = [process.period - 1]",
        _LAWS,
    ),
    Mutation(
        "last_position_is_the_worst_with_schedules_too",
        SHIFTS,
        "if process.is_constant and len(positions) > 1:",
        "if len(positions) > 1:",
        _LAWS,
    ),
    Mutation(
        "last_position_is_the_worst_with_schedules_too_while_running",
        "runs/running.py",
        "if recorder.is_constant and not self._released.any():",
        "if not self._released.any():",
        _DETAILS,
    ),
    Mutation(
        "last_position_is_the_worst_after_releases_too_while_running",
        "runs/running.py",
        "if recorder.is_constant and not self._released.any():",
        "if recorder.is_constant:",
        _RECORDER_TESTS,
    ),
    Mutation(
        "unequal_batches_are_accepted",
        ORDERS,
        "rest = dataset_size % batch_size",
        "rest = 0 * dataset_size % batch_size",
        _PROCESS_TESTS,
    ),
    Mutation(
        "schedules_are_taken_for_constant",
        PROCESS,
        "is_constant=not event.has_schedules",
        "is_constant=True",
        _PROCESS_TESTS,
    ),
    Mutation(
        "gradients_beyond_their_declared_bound_are_accepted",
        "runs/base.py",
        "if not largest_norm <= bound * (1 + SLACK):",
        "if largest_norm > 2 * bound:",
        _RUN_TESTS,
    ),
    Mutation(
        "guarantee_of_the_first_steps_is_that_of_all",
        "runs/base.py",
        "if self._proved.get(relation, (0,))[0] != self._num_steps:",
        "if relation not in self._proved:",
        _RUN_TESTS,
    ),
    Mutation(
        "dice_forgets_short_batches",
        "runs/dice_sgd.py",
        "elif not self._fewest_rows == self._most_rows == event.batch_size:",
        "elif self._most_rows != event.batch_size:",
        _RUN_TESTS,
    ),
    Mutation(
        "dice_looks_like_dp_sgd_in_a_history",
        "runs/dice_sgd.py",
        "[(0.0, self",
        "[(1.0, self",
        _RUN_TESTS,
    ),
    Mutation(
        "dp_mbcd_may_change_its_step_size",
        "runs/block_coordinate.py",
        '"learning_rate": (step.learning_rate, own.step_size),',
        "",
        _RUN_TESTS,
    ),
    Mutation(
        "dp_mbcd_may_end_within_an_epoch",
        "runs/block_coordinate.py",
        "if self._num_steps % batches:",
        "if self._num_steps < batches:",
        _RUN_TESTS,
    ),
    Mutation(
        "recorder_accepts_short_batches",
        "runs/last_iterate.py",
        "elif batch_rows != size:",
        "elif batch_rows > size:",
        _RECORDER_TESTS,
    ),
    Mutation(
        "recorder_accepts_batches_in_any_order",
        "runs/base.py",
        "if batch != expected:",
        "if batch is None:",
        _RECORDER_TESTS,
    ),
    Mutation(
        "recorder_mistakes_a_return_to_the_first_value",
        "runs/run_lengths.py",
        "if self.values and self.values[-1] == value:",
        "if self.values and self.values[0] == value:",
        _DETAILS,
    ),
    # How much a step stretches distances.
    Mutation(
        "clipped_maps_do_not_expand",
        GEOMETRY,
        "np.sqrt(1 + r * r / inside)",
        "np.ones_like(r)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "clipped_weakly_convex_row_without_e",
        GEOMETRY,
        "1 + eta * small,",
        "1 + 0 * eta * small,",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "unclipped_row_where_the_clip_acts",
        GEOMETRY,
        "return np.where(clip_is_active, clipped, unclipped)",
        "return np.where(clip_is_active & False, clipped, unclipped)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "unclipped_row_where_the_clip_acts_in_some_steps",
        GEOMETRY,
        "or not clip_is_active.any()",
        "or not clip_is_active.all()",
        _PROCESS_TESTS,
    ),
    Mutation(
        "generalized_linear_row_for_all_convex_losses",
        GEOMETRY,
        "(LossKind.LINEAR, LossKind.GENERALIZED_LINEAR)",
        "(LossKind.LINEAR, LossKind.GENERALIZED_LINEAR, LossKind.CONVEX)",
        _LAWS,
    ),
    Mutation(
        "strong_convexity_contracts_inside_the_clip",
        GEOMETRY,
        "(LossKind.LINEAR, LossKind.GENERALIZED_LINEAR)",
        "(LossKind.LINEAR, LossKind.GENERALIZED_LINEAR, LossKind.STRONGLY_CONVEX)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "weak_convexity_is_forgotten",
        GEOMETRY,
        "if loss.kind is LossKind.STRONGLY_CONVEX else -loss.weak_convexity",
        "if loss.kind is LossKind.STRONGLY_CONVEX else 0 * loss.weak_convexity",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "large_steps_do_not_overshoot",
        GEOMETRY,
        "np.abs(decay - eta * smoothness))",
        "0 * np.abs(decay - eta * smoothness))",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "large_clipped_steps_do_not_overshoot",
        GEOMETRY,
        "eta * big - 1,",
        "1 - 0 * eta * big,",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "decay_is_clipped_with_the_loss",
        GEOMETRY,
        "result = decay * _clipped(eta / decay, big, small)",
        "result = _clipped(eta, big + float(np.max(w)), small)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "decay_does_not_stretch_the_clipped_step",
        GEOMETRY,
        "result = decay * _clipped(eta / decay, big, small)",
        "result = decay * _clipped(eta, big, small)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "expanding_maps_are_taken_for_nonexpansive",
        GEOMETRY,
        "unclipped = unclipped_update_lipschitz(learning_rate, loss.smoothness, lower, "
        "weight_decay)",
        "unclipped = np.minimum(1, unclipped_update_lipschitz(learning_rate, loss.smoothness, "
        "lower, weight_decay))",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "expanding_clipped_maps_are_taken_for_nonexpansive",
        GEOMETRY,
        "return np.where(clip_is_active, clipped, unclipped)",
        "return np.where(clip_is_active, np.minimum(1, clipped), unclipped)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "clip_counts_as_active_at_the_gradient_bound",
        PROCESS,
        'clip_is_active = limit > event.per_step("clip_norm")',
        'clip_is_active = limit >= event.per_step("clip_norm")',
        _PROCESS_TESTS,
    ),
    Mutation(
        "softmax_is_as_smooth_as_logistic",
        "events/loss_geometry.py",
        "return cls.convex(square / 2, math.sqrt(2 * square))",
        "return cls.convex(square / 4, math.sqrt(2 * square))",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "softmax_gradient_is_as_short_as_logistic",
        "events/loss_geometry.py",
        "return cls.convex(square / 2, math.sqrt(2 * square))",
        "return cls.convex(square / 2, math.sqrt(square))",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "bias_is_not_a_feature",
        "events/loss_geometry.py",
        "return norm * norm + (1.0 if bias else 0.0)",
        "return norm * norm + (0.0 if bias else 0.0)",
        _GEOMETRY_TESTS,
    ),
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
        _TAUT_STRING_TESTS,
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
        TAUT_STRING,
        "known = _scaled(known_shift[start + 1 : stop + 1], shift_unit).tolist()",
        "known = _scaled(known_shift[start:stop], shift_unit).tolist()",
        _LAWS,
    ),
    Mutation(
        "drift_at_the_start_of_a_window_holds_the_record_twice",
        "bounds/shifted_interpolation.py",
        "(moved - sensitivity)[is_moved]",
        "(moved - 2 * sensitivity)[is_moved]",
        _TAUT_STRING_TESTS,
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
        SHIFTS,
        "if c * distance + s > min(kappa * distance + drift, process.domain_diameter):",
        "if c * distance + s > math.inf:",
        _LAWS,
    ),
    Mutation(
        "only_starts_after_batches_are_tried",
        SHIFTS,
        "return bool((c <= 1).all() and (excess <= slack).all())",
        "return True",
        _LAWS,
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
        "offsets = [(position - first) % process.period for position in positions]",
        "offsets = [position % process.period for position in positions]",
        _RELEASE_LAWS,
    ),
    Mutation(
        "releases_while_running_forget_the_segments_before",
        "runs/running.py",
        "self._released += self._taut.mu_squared(range(process.period))",
        "self._released = self._taut.mu_squared(range(process.period)) + 0 * self._released",
        _RECORDER_TESTS,
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
        "if stack.cost >= best or best * scale <= enough:",
        "if stack.cost >= best / 2 or best * scale <= enough:",
        _TAUT_STRING_TESTS,
    ),
    Mutation(
        "jump_skips_a_block",
        TAUT_STRING,
        "if self._must_pool(jumped, self._blocks[target]):",
        "if self._must_pool(block, self._blocks[target]):",
        _TAUT_STRING_TESTS,
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
    # From mu to epsilon.
    Mutation(
        "delta_without_the_exponential_term",
        "curves/gaussian.py",
        "result[right] = np.log(special.ndtr(a[right]) - second)",
        "result[right] = np.log(special.ndtr(a[right]) - 0 * second)",
        "core/test_gaussian.py",
    ),
    Mutation(
        "epsilon_is_not_rounded_up",
        "curves/gaussian.py",
        "while delta_from_mu(mu, epsilon) > delta:",
        "while delta_from_mu(mu, epsilon) > 2 * delta:",
        "core/test_gaussian.py",
    ),
    Mutation(
        "extra_delta_is_forgotten_by_delta",
        CURVES,
        "return min(1.0, self.curve.delta(epsilon) + self.extra)",
        "return min(1.0, self.curve.delta(epsilon))",
        _DETAILS,
    ),
    Mutation(
        "extra_delta_is_forgotten_by_divergences",
        CURVES,
        """    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return np.full(orders.shape, math.inf)
""",
        """    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return self.curve.rdp(orders)
""",
        _DETAILS,
    ),
    # Composition of runs.
    Mutation(
        "mu_is_added_instead_of_its_square",
        CURVES_TOGETHER,
        "mu_squared += count * curve.mu**2",
        "mu_squared += count * curve.mu",
        _LAWS,
    ),
    Mutation(
        "count_of_a_run_is_ignored",
        ACCOUNTANTS,
        "(*state.guarantees, (guarantee, count))",
        "(*state.guarantees, (guarantee, 1))",
        _LAWS,
    ),
    Mutation(
        "count_of_a_gaussian_event_is_ignored",
        ACCOUNTANTS,
        "(count * mu**2 if count else 0.0)",
        "(mu**2 if count else 0.0)",
        _STANDARD_LAWS,
    ),
    Mutation(
        "count_of_a_repeated_event_is_ignored",
        ACCOUNTANTS,
        "yield from _leaves(event.event, event.count * count)",
        "yield from _leaves(event.event, event.count)",
        _DETAILS,
    ),
    Mutation(
        "failed_compose_is_half_applied",
        ACCOUNTANTS,
        "            state = outcome\n",
        "            state = self._state = outcome\n            self._curve = state.curve()\n",
        _LAWS,
    ),
    Mutation(
        "gaussian_event_under_replace_one_is_not_doubled",
        "curves/standard.py",
        "(2.0 if relation is _REPLACE_ONE else 1.0) / noise",
        "1.0 / noise",
        _COMPOSITION_LAWS,
    ),
    Mutation(
        "laplace_event_under_replace_one_is_not_doubled",
        "curves/standard.py",
        "part = StockEvent(_with_noise(event, 0.5), count, _ADD_OR_REMOVE)",
        "part = StockEvent(_with_noise(event, 1.0), count, _ADD_OR_REMOVE)",
        _COMPOSITION_LAWS,
    ),
    Mutation(
        "mu_beside_standard_events_is_lost",
        "curves/standard.py",
        "total = orders * self.gaussian_mu**2 / 2",
        "total = 0 * orders",
        _DETAILS,
    ),
    Mutation(
        "larger_bound_is_preferred",
        "best_bound.py",
        "return candidate.mu < best.mu * (1 - 1e-12)",
        "return candidate.mu > best.mu * (1 + 1e-12)",
        _LAWS,
    ),
    Mutation(
        "count_of_standard_events_is_ignored",
        CURVES_TOGETHER,
        "attrs.evolve(part, count=count * part.count)",
        "attrs.evolve(part, count=part.count)",
        _DETAILS,
    ),
    Mutation(
        "count_of_other_curves_is_ignored",
        CURVES_TOGETHER,
        "others.append((curve, count))",
        "others.append((curve, 1))",
        _CURVE_TESTS,
    ),
    Mutation(
        "count_of_composed_curves_is_ignored",
        CURVES_TOGETHER,
        "others += [(part, count * times) for part, times in curve.parts]",
        "others += [(part, times) for part, times in curve.parts]",
        _CURVE_TESTS,
    ),
    Mutation(
        "privacy_loss_of_repeated_curves_counts_once",
        CURVES_TOGETHER,
        "part = part.self_compose(count) if count > 1 else part",
        "part = part.self_compose(1) if count > 1 else part",
        _CURVE_TESTS,
    ),
    Mutation(
        "mu_beside_other_curves_is_lost",
        CURVES_TOGETHER,
        "*([(total, 1)] if mu or events else [])",
        "*([(total, 1)] if events else [])",
        _CURVE_TESTS,
    ),
    Mutation(
        "mixture_of_divergences_is_their_mean",
        CURVES,
        "return np.where(direct < 1, near_one, direct) / (orders - 1)",
        "return exponents @ self.weights / (orders - 1)",
        _CURVE_TESTS,
    ),
    Mutation(
        "grouped_mus_are_rounded_down",
        CURVES,
        "mus[np.append(starts[1:], len(mus)) - 1]",
        "mus[starts]",
        _CURVE_TESTS,
    ),
    Mutation(
        "privacy_loss_has_no_negative_losses",
        CURVES,
        "left = 1 - np.exp(-positive[:0:-1] * GRID) * (1 - right[:0:-1])",
        "left = right[:0:-1]",
        _CURVE_TESTS,
    ),
    Mutation(
        "zero_noise_inside_a_sampled_event_is_missed",
        "curves/standard.py",
        "or any(map(has_zero_noise, _nested(event)))",
        "or any(map(has_zero_noise, []))",
        _STANDARD_LAWS,
    ),
    Mutation(
        "without_replacement_event_under_replace_one_is_not_doubled",
        "curves/standard.py",
        "part = StockEvent(_with_noise(event, 0.5), count, relation)",
        "part = StockEvent(_with_noise(event, 1.0), count, relation)",
        _COMPOSITION_LAWS,
    ),
    # Runs as composition.
    Mutation(
        "cap_costs_no_delta",
        "bounds/composition.py",
        "extra = event.cap_delta(relation)",
        "extra = 0 * event.cap_delta(relation)",
        _DETAILS,
    ),
    Mutation(
        "cap_delta_of_one_step",
        ORDERS,
        "min(1.0, num_steps * float(tail))",
        "min(1.0, float(tail))",
        _DETAILS,
    ),
    Mutation(
        "cap_delta_off_by_one",
        ORDERS,
        "stats.binom.sf(most_terms - 1,",
        "stats.binom.sf(most_terms,",
        _DETAILS,
    ),
    Mutation(
        "extra_delta_is_forgotten_by_epsilon",
        CURVES,
        "self.curve.epsilon(delta - self.extra) if delta > self.extra else math.inf",
        "self.curve.epsilon(delta) if delta > self.extra else math.inf",
        _DETAILS,
    ),
    Mutation(
        "extra_delta_counts_once_for_many_runs",
        CURVES_TOGETHER,
        "extra += count * curve.extra",
        "extra += curve.extra",
        _DETAILS,
    ),
    Mutation(
        "partial_epoch_is_not_counted",
        COMPOSED,
        "participations = -(-(num_steps - position) // period)",
        "participations = max(1, (num_steps - position) // period)",
        _EVENT_TESTS,
    ),
    Mutation(
        "steps_without_learning_rate_cost_in_composition",
        EVENTS,
        '& (self.per_step("learning_rate") > 0)',
        '& ((self.per_step("learning_rate") > 0) | (self.batch_order is not BatchOrder.POISSON))',
        _EVENT_TESTS,
    ),
    Mutation(
        "sampled_steps_without_learning_rate_cost_in_composition",
        EVENTS,
        '& (self.per_step("learning_rate") > 0)',
        '& ((self.per_step("learning_rate") > 0) | (self.batch_order is BatchOrder.POISSON))',
        _DETAILS,
    ),
    Mutation(
        "reshuffled_record_keeps_its_position",
        COMPOSED,
        "mu_squared = float(epochs.max(axis=1).sum())",
        "mu_squared = float(epochs.sum(axis=0).max())",
        _EVENT_TESTS,
    ),
    Mutation(
        "sampled_steps_of_equal_noise_count_once",
        COMPOSED,
        "sampled(dp_accounting.GaussianDpEvent(float(value))), int(count)",
        "sampled(dp_accounting.GaussianDpEvent(float(value))), int(count > 0)",
        _DETAILS,
    ),
    Mutation(
        "last_batch_of_the_epoch_is_the_worst_in_composition",
        COMPOSED,
        "by_position.max() if position is None",
        "by_position[-1] if position is None",
        _EVENT_TESTS,
    ),
    Mutation(
        "partial_epoch_is_not_composed",
        COMPOSED,
        "participations = len(epochs)",
        "participations = max(1, num_steps // period)",
        _EVENT_TESTS,
    ),
    Mutation(
        "composition_forgets_a_declared_position",
        COMPOSED,
        "if position is not None:",
        "if position is None and position:",
        _EVENT_TESTS,
    ),
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
        "curves/sampled.py",
        "return q * deltas_from_mu(self.step_mu, np.where(epsilon < _FAR, near, far))",
        "return q * q * deltas_from_mu(self.step_mu, np.where(epsilon < _FAR, near, far))",
        _SAMPLED_TESTS,
    ),
)
