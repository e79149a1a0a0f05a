"""Private linear models in scikit-learn's form, and the runs that are recommended to them."""

from __future__ import annotations

from mutation import Mutation

_SKLEARN = "../adapters/hidden_state_adapters/sklearn"

MUTATIONS = (
    Mutation(
        "two_statistics_of_a_record_are_as_long_as_one",
        f"{_SKLEARN}/preprocessing.py",
        "return math.sqrt(sum(STEPS[step]))",
        "return 1.0",
        "sklearn/test_preprocessing.py",
    ),
    Mutation(
        "statistics_of_records_that_were_not_cut",
        f"{_SKLEARN}/preprocessing.py",
        "        rows = rows / feature_norm\n",
        "        rows = matrix[part] / feature_norm\n",
        "sklearn/test_preprocessing.py",
    ),
    Mutation(
        "weights_of_classes_above_one",
        f"{_SKLEARN}/record_weights.py",
        "return np.array(weights) / max(weights)",
        "return np.array(weights)",
        "sklearn/test_record_weights.py",
    ),
    Mutation(
        "gradients_of_estimators_that_are_not_cut",
        f"{_SKLEARN}/steps.py",
        "factors = np.minimum(clip_norm / np.maximum(norms, _TINY), 1.0)",
        "factors = np.ones(len(norms))",
        "sklearn/test_steps.py",
    ),
    Mutation(
        "noise_in_a_step_of_estimators_is_drawn_for_a_mean",
        "../adapters/hidden_state_adapters/recipe.py",
        "total = total + generator.normal(std, shape)",
        "total = total + generator.normal(std / event.batch_size, shape)",
        "sklearn/test_steps.py",
    ),
    Mutation(
        "what_was_spent_is_not_in_the_closed_form",
        "recommendation.py",
        "(clips * self.mu) ** 2 - spent**2",
        "(clips * self.mu) ** 2",
        "core/test_recommendation.py",
    ),
    Mutation(
        "what_was_spent_is_not_in_the_target",
        "recommendation.py",
        "lambda z: _beside(task.spent, attrs.evolve(event, noise_multiplier=z))",
        "lambda z: attrs.evolve(event, noise_multiplier=z)",
        "core/test_recommendation.py",
    ),
    Mutation(
        "slopes_of_a_head_that_are_not_cut",
        "../adapters/hidden_state_adapters/opacus/fit_head.py",
        "slopes *= (clip_norm / norms).clamp(max=1.0)",
        "slopes *= 1.0",
        "opacus/test_fit_head.py",
    ),
    Mutation(
        "losses_for_a_temperature_that_are_not_cut",
        "../adapters/hidden_state_adapters/temperature.py",
        "np.maximum(np.linalg.norm(losses, axis=1), 1e-300), 1.0)",
        "np.maximum(np.abs(losses).max(axis=1), 1e-300), 1.0)",
        "sklearn/test_temperature.py",
    ),
    Mutation(
        "a_budget_that_counts_the_costliest_release_alone",
        "ledger.py",
        "mu = math.sqrt(math.fsum(mu**2 for _, mu, _ in rows if mu is not None))",
        "mu = max([mu for _, mu, _ in rows if mu is not None], default=0.0)",
        "core/test_ledger.py",
    ),
    Mutation(
        "a_fit_in_a_worker_that_no_budget_counts",
        "../adapters/hidden_state_adapters/recipe.py",
        "        if found is None and sent_from is not None:\n",
        "        if False:\n",
        "sklearn/test_budget.py",
    ),
)
