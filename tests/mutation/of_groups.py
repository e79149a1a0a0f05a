"""Data sets that differ in several records, the ones between them, and the best of several runs."""

from __future__ import annotations

from mutation import Mutation

GROUPS = "process/groups.py"
TRANSFORMED = "curves/transformed.py"
_TESTS = "core/test_groups.py"
_FORMS = "core/test_guarantee_forms.py"

MUTATIONS = (
    Mutation(
        "records_without_gradient_are_strongly_convex",
        GROUPS,
        "left = (1 - changed) * loss.strong_convexity",
        "left = (1 - 0 * changed) * loss.strong_convexity",
        _TESTS,
    ),
    Mutation(
        "random_batches_have_a_fixed_number_of_curved_terms",
        GROUPS,
        "relation is _REPLACE_SPECIAL and event.batch_order is not BatchOrder.POISSON",
        "relation is _REPLACE_SPECIAL",
        _TESTS,
    ),
    Mutation(
        "curvature_holds_for_all_data_sets_between_two",
        GROUPS,
        "curvature = loss.curvature + changed * loss.smoothness",
        "curvature = loss.curvature + 0 * changed",
        _TESTS,
    ),
    Mutation(
        "records_that_are_added_do_not_lengthen_the_step",
        GROUPS,
        "learning_rate=_times(event.learning_rate, longer)",
        "learning_rate=event.learning_rate",
        _TESTS,
    ),
    Mutation(
        "chain_of_one_test_less",
        TRANSFORMED,
        "for _ in range(self.size):",
        "for _ in range(self.size - 1):",
        _TESTS,
    ),
    Mutation(
        "group_guarantee_of_a_curvature_that_one_data_set_has",
        "bounds/base.py",
        "if loss is None or loss.curvature is None:",
        "if loss is None or loss.curvature is not None:",
        _TESTS,
    ),
    Mutation(
        "everybody_is_in_the_cohort",
        GROUPS,
        "loss = attrs.evolve(event.loss, curvature=None, curvature_failure=None)\n"
        "    if loss.kind is LossKind.STRONGLY_CONVEX:",
        "loss = attrs.evolve(event.loss, curvature=None, curvature_failure=None)\n"
        "    if not loss.kind:",
        "core/test_cohorts.py",
    ),
    Mutation(
        "cohort_by_the_smaller_direction",
        "curves/by_profile.py",
        "found = np.maximum(found, self.profile.backward(epsilon))",
        "found = np.minimum(found, self.profile.backward(epsilon))",
        "core/test_cohorts.py",
    ),
    Mutation(
        "best_of_a_poisson_number_of_runs_costs_one_delta",
        TRANSFORMED,
        "extra = mean * np.reshape(deltas, orders.shape)",
        "extra = np.reshape(deltas, orders.shape)",
        _FORMS,
    ),
    Mutation(
        "best_of_a_poisson_number_of_runs_forgets_how_many",
        TRANSFORMED,
        "extra + math.log(mean) / (orders - 1))",
        "extra)",
        _FORMS,
    ),
    Mutation(
        "best_of_many_runs_forgets_the_shape",
        TRANSFORMED,
        "fixed = (1 + shape) * float(np.min(others))",
        "fixed = float(np.min(others))",
        _FORMS,
    ),
    Mutation(
        "best_of_many_runs_forgets_how_many",
        TRANSFORMED,
        "+ fixed + math.log(mean) / (at - 1), orders)",
        "+ fixed, orders)",
        _FORMS,
    ),
    Mutation(
        "best_of_runs_whose_guarantee_is_about_one_batch",
        "guarantee.py",
        "self._check_is_about_all(False)\n        if not np.isfinite(",
        "if not np.isfinite(",
        _FORMS,
    ),
)
