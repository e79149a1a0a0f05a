"""Runs as composition."""

from __future__ import annotations

from mutation import Mutation

COMPOSED = "events/as_composition.py"
EVENTS = "events/last_iterate.py"
ORDERS = "events/batch_order.py"
BLOCKS = "events/block_coordinate.py"
CURVES = "curves/base.py"
CURVES_TOGETHER = "curves/composed.py"
EVENTS = "events/last_iterate.py"
ORDERS = "events/batch_order.py"
_DETAILS = "core/test_engine_details.py"
_BLOCK_TESTS = "theorems/test_block_coordinate.py"
_EVENT_TESTS = "core/test_events.py"

MUTATIONS = (
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
        "failures_of_composed_runs_are_dropped",
        CURVES_TOGETHER,
        "composed.append(with_delta(_composed(chosen), failure))",
        "composed.append(_composed(chosen))",
        "laws/test_composition.py",
    ),
    Mutation(
        "best_of_curves_is_unfolded_once",
        "curves/base.py",
        "            yield from _unfolded(part, for_small_deltas)",
        "            yield cast(ComposableCurve, part), 0.0",
        "laws/test_composition.py",
    ),
    Mutation(
        "failure_of_a_nested_curve_is_dropped",
        "curves/base.py",
        "yield single, failure + curve.extra",
        "yield single, failure",
        "theorems/test_curvature.py",
    ),
    Mutation(
        "extra_delta_counts_once_for_many_runs",
        CURVES_TOGETHER,
        "failure = sum(count * p for (_, p), count in zip(choice, counts, strict=True))",
        "failure = sum(p for (_, p), count in zip(choice, counts, strict=True))",
        _DETAILS,
    ),
    Mutation(
        "partial_epoch_is_not_counted",
        COMPOSED,
        "participations = max(0, -(-(num_steps - (position or 0)) // period))",
        "participations = max(1, (num_steps - (position or 0)) // period)",
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
        "composition_forgets_a_declared_position",
        COMPOSED,
        "participations = max(0, -(-(num_steps - (position or 0)) // period))",
        "participations = max(0, -(-num_steps // period))",
        _EVENT_TESTS,
    ),
)
