"""How curved the mean loss of a batch is."""

from __future__ import annotations

from mutation import Mutation

PROCESS = "process/noisy_process.py"
RELEASE = "process/batch_curvature.py"
_TESTS = "theorems/test_curvature.py"

MUTATIONS = (
    Mutation(
        "curvature_of_batches_that_vary_in_size",
        PROCESS,
        "if event.batch_order is BatchOrder.POISSON:  # the sizes of batches enter it",
        "if event.batch_order is None:",
        _TESTS,
    ),
    Mutation(
        "curvature_inside_an_active_clip",
        PROCESS,
        "return np.where(clips_act(event), np.inf, modulus)",
        "return modulus",
        _TESTS,
    ),
    Mutation(
        "a_batch_without_the_record_is_as_strongly_convex",
        PROCESS,
        "strong_convexity *= 1 - 1 / event.batch_size",
        "strong_convexity *= 1.0",
        _TESTS,
    ),
    Mutation(
        "failure_of_the_curvature_is_forgotten",
        "bounds/base.py",
        "proof = attrs.evolve(proof, curve=with_delta(proof.curve, failure))",
        "pass",
        _TESTS,
    ),
    Mutation(
        "released_curvature_has_no_margin",
        RELEASE,
        "bound = noisy + scale * math.log(1 / (2 * failure)) + _ROUNDING",
        "bound = noisy + _ROUNDING",
        _TESTS,
    ),
    Mutation(
        "batches_are_as_curved_as_all_records",
        RELEASE,
        "return high\n",
        "return whole\n",
        _TESTS,
    ),
    Mutation(
        "one_batch_stands_for_all",
        RELEASE,
        "needed = math.log(number * dimension / failure) / size",
        "needed = math.log(1 / failure) / size",
        _TESTS,
    ),
    Mutation(
        "record_of_a_cyclic_batch_is_one_of_all",
        RELEASE,
        "batches), size",
        "batches), records",
        _TESTS,
    ),
    Mutation(
        "record_joins_no_batch_without_replacement",
        RELEASE,
        "share += 1 / size",
        "share += 0 / size",
        _TESTS,
    ),
    Mutation(
        "batches_of_pieces_are_looked_at_one_piece_at_a_time",
        "../adapters/hidden_state_adapters/opacus/head/curvature.py",
        "self._batch.extend(features)",
        "self._batch = list(features)",
        "opacus/test_curvature_guard.py",
    ),
    Mutation(
        "the_constant_of_a_bias_has_no_curvature",
        "../adapters/hidden_state_adapters/opacus/head/curvature.py",
        "        if self._bias:\n",
        "        if False:\n",
        "opacus/test_curvature_guard.py",
    ),
    Mutation(
        "keras_batches_are_taken_in_the_order_of_the_data",
        "../adapters/hidden_state_adapters/tf_privacy/run.py",
        "taken(tf.constant(self.plan.batch(step), tf.int64))",
        "taken(tf.range(step * self.plan.batch_size, (step + 1) * self.plan.batch_size))",
        "keras/test_batch_curvature.py",
    ),
)
