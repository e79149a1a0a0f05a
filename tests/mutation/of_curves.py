"""From mu to epsilon, and the composition of runs."""

from __future__ import annotations

from mutation import Mutation

ACCOUNTANTS = "accountants.py"
CURVES = "curves/base.py"
CURVES_TOGETHER = "curves/composed.py"
_LAWS = "laws/test_accountants.py"
_STANDARD_LAWS = "laws/test_standard_events.py"
_DETAILS = "core/test_engine_details.py"
_COMPOSITION_LAWS = "laws/test_accountants.py::TestComposition"
_CURVE_TESTS = "laws/test_curves.py"
COMPOSED_LOSS = "curves/composed_loss.py"
_LOSS_TESTS = "core/test_privacy_losses.py"

MUTATIONS = (
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
        "(*composed.guarantees, (guarantee, count))",
        "(*composed.guarantees, (guarantee, 1))",
        _LAWS,
    ),
    Mutation(
        "count_of_a_gaussian_event_is_ignored",
        "curves/standard.py",
        "GaussianCurve(mu * math.sqrt(count))",
        "GaussianCurve(mu)",
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
        "composed = self._with(composed, leaf, leaf_count)\n",
        "composed = self._with(composed, leaf, leaf_count)\n"
        "                self._state = composed, composed.curve()\n",
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
        "return EventCurve(_with_noise(event, 0.5), count, _ADD_OR_REMOVE)",
        "return EventCurve(_with_noise(event, 1.0), count, _ADD_OR_REMOVE)",
        _COMPOSITION_LAWS,
    ),
    Mutation(
        "a_standard_event_is_lost",
        CURVES_TOGETHER,
        "parts += [(event, 1) for event in events]",
        "parts += [(event, 1) for event in events[1:]]",
        _CURVE_TESTS,
    ),
    Mutation(
        "larger_bound_is_preferred",
        "best_bound.py",
        "return candidate.mu < best.mu * (1 - 1e-12)",
        "return candidate.mu > best.mu * (1 + 1e-12)",
        _LAWS,
    ),
    Mutation(
        "composition_is_joined_with_hidden_iterates",
        "best_bound.py",
        "return _needs_hidden_iterates(best) or not _needs_hidden_iterates(guarantee)",
        "return True",
        "core/test_guarantee.py",
    ),
    Mutation(
        "count_of_standard_events_is_ignored",
        CURVES_TOGETHER,
        "attrs.evolve(curve, count=count * curve.count)",
        "attrs.evolve(curve, count=curve.count)",
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
        "yield from ((part, count * times) for part, times in curve.parts)",
        "yield from ((part, times) for part, times in curve.parts)",
        _CURVE_TESTS,
    ),
    Mutation(
        "curve_that_is_given_twice_runs_as_often_as_the_last_time",
        CURVES_TOGETHER,
        "counts[id(curve)] = curve, counts.get(id(curve), (curve, 0))[1] + count",
        "counts[id(curve)] = curve, count",
        _CURVE_TESTS,
    ),
    Mutation(
        "event_that_is_given_twice_runs_as_often_as_the_last_time",
        CURVES_TOGETHER,
        "count = found[key].count if key in found else 0",
        "count = 0",
        _CURVE_TESTS,
    ),
    Mutation(
        "privacy_loss_of_repeated_curves_counts_once",
        CURVES_TOGETHER,
        "composed += [(loss, count * times) for loss, times in losses]",
        "composed += [(loss, times) for loss, times in losses]",
        _CURVE_TESTS,
    ),
    Mutation(
        "mu_beside_other_curves_is_lost",
        CURVES_TOGETHER,
        "parts += [(gaussian, 1)] if mu_squared or not parts else []",
        "parts += [(gaussian, 1)] if not parts else []",
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
        "privacy_loss_has_no_negative_losses",
        "curves/losses.py",
        "below = _masses_above_zero(opposite, grid)",
        "below = 0 * _masses_above_zero(opposite, grid)",
        _LOSS_TESTS,
    ),
    Mutation(
        "losses_below_zero_are_those_of_the_same_direction",
        "curves/losses.py",
        "_connect_the_dots(forward, backward, grid), _connect_the_dots(backward, forward, grid)",
        "_connect_the_dots(forward, forward, grid), _connect_the_dots(backward, backward, grid)",
        _LOSS_TESTS,
    ),
    Mutation(
        "losses_are_moved_to_a_wider_grid_by_their_mean",
        "curves/losses.py",
        "to_the_right = np.expm1(-places) / math.expm1(-grid)",
        "to_the_right = places / grid",
        _LOSS_TESTS,
    ),
    Mutation(
        "losses_on_a_wider_grid_are_rounded_down",
        "curves/losses.py",
        "masses[1:] += (inside * to_the_right).sum(axis=1)",
        "masses[:-1] += (inside * to_the_right).sum(axis=1)",
        _LOSS_TESTS,
    ),
    Mutation(
        "error_of_the_transform_is_dropped",
        COMPOSED_LOSS,
        "inside = inside + _norm_of_weights(tilt.theta, len(law), self._grid) * error + _LOST",
        "inside = inside + _LOST",
        _LOSS_TESTS,
    ),
    Mutation(
        "only_one_direction_of_a_loss_counts",
        COMPOSED_LOSS,
        "if not all(loss.is_symmetric for loss, _ in parts):",
        "if False:",
        _LOSS_TESTS,
    ),
    Mutation(
        "coarse_law_is_smaller_in_convex_order",
        "curves/losses.py",
        "coarse[1:] += to_the_right",
        "coarse[:-1] += to_the_right",
        _LOSS_TESTS,
    ),
    Mutation(
        "more_of_a_tilted_law_is_left_out",
        "curves/composed_loss.py",
        "np.searchsorted(np.cumsum(rough), negligible)) - 1",
        "np.searchsorted(np.cumsum(rough), negligible)) + 1",
        _LOSS_TESTS,
    ),
    Mutation(
        "mass_at_infinity_counts_once",
        "curves/composed_loss.py",
        "count * math.log1p(-law.infinite) if",
        "math.log1p(-law.infinite) if",
        _LOSS_TESTS,
    ),
    Mutation(
        "zero_noise_inside_a_sampled_event_is_missed",
        "curves/standard.py",
        "or any(map(has_zero_noise, nested_events(event)))",
        "or any(map(has_zero_noise, []))",
        _STANDARD_LAWS,
    ),
    Mutation(
        "without_replacement_event_under_replace_one_is_not_doubled",
        "curves/standard.py",
        "return EventCurve(_with_noise(event, 0.5), count, _REPLACE_ONE)",
        "return EventCurve(_with_noise(event, 1.0), count, _REPLACE_ONE)",
        _COMPOSITION_LAWS,
    ),
    Mutation(
        "replaced_record_of_a_standard_event_moves_half_as_far",
        "curves/standard.py",
        "return SampledCurve(replaced_in_poisson_batch, mu, rate)",
        "return SampledCurve(replaced_in_poisson_batch, mu / 2, rate)",
        _STANDARD_LAWS,
    ),
    Mutation(
        "zeroed_record_of_a_standard_event_moves_half_as_far",
        "curves/standard.py",
        "return SampledCurve(zeroed_without_replacement, mu, rate)",
        "return SampledCurve(zeroed_without_replacement, mu / 2, rate)",
        _STANDARD_LAWS,
    ),
    Mutation(
        "divergence_of_a_pair_beside_events_is_lost",
        "curves/standard.py",
        "return self.count * pair.rdp(orders)",
        "return 0 * pair.rdp(orders)",
        _STANDARD_LAWS,
    ),
    Mutation(
        "loss_of_a_step_is_that_of_another_relation",
        "curves/standard.py",
        "loss = _sampled_gaussian_loss(event, relation)",
        "loss = _sampled_gaussian_loss(event, NeighboringRelation.ADD_OR_REMOVE_ONE)",
        _LOSS_TESTS,
    ),
)
