"""Runs as composition."""

from __future__ import annotations

from mutation import Mutation

COMPOSED = "events/as_composition.py"
CURVES = "curves/base.py"
CURVES_TOGETHER = "curves/composed.py"
_DETAILS = "core/test_engine_details.py"
_EVENT_TESTS = "core/test_events.py"

MUTATIONS = (
    # Runs as composition.
    Mutation(
        "cap_costs_no_delta",
        "bounds/composition.py",
        "extra = cap_delta(event, relation)",
        "extra = 0 * cap_delta(event, relation)",
        _DETAILS,
    ),
    Mutation(
        "cap_delta_of_one_step",
        COMPOSED,
        "min(1.0, event.num_steps * float(tail))",
        "min(1.0, float(tail))",
        _DETAILS,
    ),
    Mutation(
        "cap_delta_off_by_one",
        COMPOSED,
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
        "participations = -(-(event.num_steps - event.record_position) // period)",
        "participations = max(1, (event.num_steps - event.record_position) // period)",
        _EVENT_TESTS,
    ),
    Mutation(
        "steps_without_learning_rate_cost_in_composition",
        COMPOSED,
        'cost = np.where(event.per_step("learning_rate") > 0, noise**-2.0, 0.0)',
        "cost = noise**-2.0",
        _EVENT_TESTS,
    ),
    Mutation(
        "sampled_steps_without_learning_rate_cost_in_composition",
        COMPOSED,
        'noise = _effective_noise(event, relation)[event.per_step("learning_rate") > 0]',
        "noise = _effective_noise(event, relation)",
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
        "dp_accounting.SelfComposedDpEvent(sampled(float(value)), int(count))",
        "dp_accounting.SelfComposedDpEvent(sampled(float(value)), int(count > 0))",
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
        "participations = max(1, event.num_steps // period)",
        _EVENT_TESTS,
    ),
    Mutation(
        "composition_forgets_a_declared_position",
        COMPOSED,
        "if event.record_position is not None:",
        "if event.record_position is None and event.record_position:",
        _EVENT_TESTS,
    ),
)
