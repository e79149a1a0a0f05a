"""Mistakes in the Keras model that owns its run."""

from __future__ import annotations

from mutation import Mutation

_TF = "../adapters/hidden_state_adapters/tf_privacy"

MUTATIONS = (
    Mutation(
        "random_layers_may_mix_the_examples_of_a_training_pass",
        f"{_TF}/guards/trained_loss.py",
        "if self._is_random and not moved:",
        "if False:",
        "keras/test_rows.py::test_random_mixtures_of_the_examples_of_a_training_pass",
    ),
    Mutation(
        "several_rows_of_an_example_are_clipped_one_by_one",
        f"{_TF}/owned/clipping.py",
        "if found.norms.shape != found.losses.shape or any(",
        "if any(",
        "keras/test_model.py::test_rows_of_a_layer_that_are_not_those_of_the_examples",
    ),
    Mutation(
        "a_row_may_be_that_of_another_example",
        f"{_TF}/owned/clipping.py",
        "tf.constant(np.random.default_rng(0).normal(size=rows))",
        "tf.ones(rows, tf.float64)",
        "keras/test_model.py::test_rows_of_a_layer_that_are_not_those_of_the_examples",
    ),
    Mutation(
        "the_bias_of_a_microbatch_is_not_measured",
        f"{_TF}/owned/clipping.py",
        "of_features = products(features) + (1.0 if layer.use_bias else 0.0)",
        "of_features = products(features)",
        "keras/test_model_microbatches.py::test_products_of_examples_give_the_lengths_of_means",
    ),
    Mutation(
        "a_sum_of_gradients_that_cancel_is_exact",
        f"{_TF}/owned/clipping.py",
        "return tf.square(length + of_sums * longest)",
        "return tf.square(length)",
        "keras/test_model_microbatches.py::"
        "test_what_a_record_adds_to_the_sum_is_no_longer_than_its_length",
    ),
    Mutation(
        "products_of_a_microbatch_have_too_few_digits",
        f"{_TF}/owned/clipping.py",
        "return tf.matmul(rows, rows, transpose_b=True)",
        "rows = tf.cast(rows, tf.float32)\n"
        "            return tf.cast(tf.matmul(rows, rows, transpose_b=True), tf.float64)",
        "keras/test_model_microbatches.py::test_lengths_of_gradients_that_cancel_each_other",
    ),
    Mutation(
        "the_optimizer_adds_noise_as_well",
        f"{_TF}/mechanisms/last_iterate.py",
        "return UpdateRule(sgd), {",
        "return UpdateRule(self), {",
        "keras/test_model_with_optimizers.py::test_it_is_the_same_run",
    ),
    Mutation(
        "an_optimizer_may_contradict_the_model",
        f"{_TF}/owned/settings.py",
        "if own is not None and own != value:",
        "if False:",
        "keras/test_model_with_optimizers.py::test_they_contradict_each_other",
    ),
    Mutation(
        "batches_of_a_noisy_optimizer_are_accounted_as_poisson",
        f"{_TF}/owned/settings.py",
        "batch_order=self.batch_order or BatchOrder.CYCLIC)",
        "batch_order=self.order)",
        "keras/test_model_with_optimizers.py::test_it_is_the_same_run",
    ),
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
        "            self.relation = settings.neighboring_relation\n",
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
    Mutation(
        "what_early_stopping_would_have_seen_is_hidden",
        f"{_TF}/owned_run.py",
        "StepsAhead(total, self._period, *releases)",
        "StepsAhead(total, self._period, False, False)",
        "keras/test_model_stopping.py::test_all_epochs_count",
    ),
    Mutation(
        "epochs_that_early_stopping_left_out_do_not_count",
        f"{_TF}/owned/ahead.py",
        "for number in range(run.num_steps, self.steps):",
        "for number in range(0):",
        "keras/test_model_stopping.py::test_all_epochs_count",
    ),
    Mutation(
        "a_file_that_is_kept_for_its_metric_is_no_choice",
        f"{_TF}/owned_run.py",
        "self.chooses = bool(self.stopping) or keeps_the_best(others)",
        "self.chooses = bool(self.stopping)",
        "keras/test_model_stopping.py::test_the_best_file_is_kept",
    ),
    Mutation(
        "any_weights_may_come_back_when_it_stops",
        f"{_TF}/owned_run.py",
        "if stopped and self._digests() in self._released:",
        "if stopped:",
        "keras/test_model_stopping.py::test_other_weights_that_are_put_in_when_it_stops",
    ),
    Mutation(
        "secret_batches_have_a_seed",
        f"{_TF}/owned/data.py",
        "keys = RandomKeys()",
        "keys = RandomKeys(seed=0)",
        "keras/test_model_attacks.py::test_secret_batches_are_drawn_by_the_operating_system",
    ),
    Mutation(
        "every_epoch_has_the_order_of_the_first_one",
        "../adapters/hidden_state_adapters/batch_plans.py",
        "        if epoch != self._epoch:\n            assert",
        "        if self._epoch < 0:\n            assert",
        "keras/test_model_attacks.py::test_secret_batches_are_drawn_by_the_operating_system",
    ),
    Mutation(
        "noise_is_divided_by_the_batch_twice",
        f"{_TF}/owned/steps.py",
        "added_to(sums, self.l2_norm_clip * self.noise_multiplier)",
        "added_to(sums, self.l2_norm_clip * self.noise_multiplier / self._plan.batch_size)",
        "keras/test_model.py::test_the_noise_is_that_of_the_event",
    ),
    Mutation(
        "dice_feeds_the_whole_error_back",
        f"{_TF}/mechanisms/dice_sgd/model_steps.py",
        "            self._error_clip,\n            divisor",
        "            math.inf,\n            divisor",
        "keras/test_model_dice.py::test_the_steps_are_those_of_the_paper_and_of_opacus",
    ),
    Mutation(
        "what_dice_feeds_back_is_not_accounted",
        f"{_TF}/mechanisms/dice_sgd/model_steps.py",
        "error_clip_norm=self._error_clip,",
        "error_clip_norm=1e-6,",
        "keras/test_model_attacks.py::test_what_dice_sgd_feeds_back",
    ),
    Mutation(
        "blocks_are_accounted_as_one",
        f"{_TF}/mechanisms/block_coordinate/model_steps.py",
        '"num_blocks": len(self._blocks),',
        '"num_blocks": 1,',
        "keras/test_model_blocks.py::test_the_account_is_that_of_the_event",
    ),
    Mutation(
        "padding_that_is_not_finite_counts",
        f"{_TF}/owned/clipping.py",
        "tf.reduce_all(tf.math.is_finite(lengths))",
        "tf.constant(True)",
        "keras/test_model.py::test_a_row_of_factor_zero_is_left_out_though_it_is_not_finite",
    ),
    Mutation(
        "an_example_is_as_long_as_its_last_block",
        f"{_TF}/gradient_rows.py",
        "tf.reduce_sum(tf.cast(tf.reduce_sum(tf.square(blocks), 2), tf.float64), 1)",
        "tf.reduce_max(tf.cast(tf.reduce_sum(tf.square(blocks), 2), tf.float64), 1)",
        "keras/test_model.py::test_squared_lengths_are_those_of_double_precision",
    ),
    Mutation(
        "the_optimizer_does_not_clip",
        f"{_TF}/query.py",
        "factors = clip / tf.maximum(norms, clip)",
        "factors = tf.ones_like(norms)",
        "keras/test_dice_optimizers.py::test_the_bias_of_clipping_vanishes",
    ),
)
