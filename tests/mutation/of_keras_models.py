"""Mistakes in the Keras model that owns its run."""

from __future__ import annotations

from mutation import Mutation

_TF = "../adapters/hidden_state_adapters/tf_privacy"

MUTATIONS = (
    Mutation(
        "microbatches_have_the_sensitivity_of_one_example",
        f"{_TF}/owned/steps.py",
        "is_microbatched = self.examples_of_record > 1",
        "is_microbatched = False",
        "keras/test_model_microbatches.py::test_the_event_is_the_run",
    ),
    Mutation(
        "microbatches_are_accounted_under_the_relation_that_was_asked_for",
        f"{_TF}/owned_run.py",
        "            self.relation = NeighboringRelation.REPLACE_ONE\n",
        "",
        "keras/test_model_microbatches.py::test_the_event_is_the_run",
    ),
    Mutation(
        "a_microbatch_may_be_left_out",
        "events/last_iterate.py",
        "if self.is_microbatched and relation is not NeighboringRelation.REPLACE_ONE:",
        "if False:",
        "core/test_microbatches.py",
    ),
    Mutation(
        "means_of_linear_models_are_linear_models",
        f"{_TF}/owned/steps.py",
        "loss=of_means(self._loss) if is_microbatched else self._loss,",
        "loss=self._loss,",
        "keras/test_model_microbatches.py::test_the_mean_of_linear_models_is_none",
    ),
)
