"""Mistakes in the records of runs."""

from __future__ import annotations

from mutation import Mutation

_RUN_TESTS = "core/test_runs.py"
_REGULARISER_TESTS = "core/test_regulariser.py"
_ITERATE = "../adapters/hidden_state_adapters/opacus/sources/iterate.py"
_ITERATE_TESTS = "opacus/test_event_matches_reality_accounted.py"

MUTATIONS = (
    Mutation(
        "gradients_beyond_their_declared_bound_are_accepted",
        "runs/base.py",
        "if not largest_norm <= limit * (1 + SLACK):",
        "if largest_norm > 2 * limit:",
        _RUN_TESTS,
    ),
    Mutation(
        "guarantee_of_the_first_steps_is_that_of_all",
        "runs/base.py",
        "if relation not in self._proved or self._proved[relation][0] != now:",
        "if relation not in self._proved:",
        _RUN_TESTS,
    ),
    Mutation(
        "dice_forgets_short_batches",
        "runs/dice_sgd.py",
        "elif not fewest == most == own.batch_size:",
        "elif most != own.batch_size:",
        _RUN_TESTS,
    ),
    Mutation(
        "dice_looks_like_dp_sgd_in_a_history",
        "runs/base.py",
        "[(0.0, rate",
        "[(1.0, rate",
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
        "core/test_block_coordinate_run.py",
    ),
    # A proximal map in the record.
    Mutation(
        "group_lasso_turns_short_groups_around",
        "regulariser.py",
        "values = values * (1 - threshold / longest)",
        "values = values * (1 - threshold / norms)",
        _REGULARISER_TESTS,
    ),
    Mutation(
        "regulariser_says_twice_its_convexity",
        "regulariser.py",
        "return self.l2",
        "return 2 * self.l2",
        _REGULARISER_TESTS,
    ),
    # Rows that are not in the order of the batch.
    Mutation(
        "packed_sequences_that_are_frozen_only_are_refused",
        "../adapters/hidden_state_adapters/opacus/sources/packed.py",
        "is_trained and not _is_checked(layer)",
        "not is_trained and not _is_checked(layer)",
        "opacus/test_packed_sequences.py",
    ),
    Mutation(
        "packed_sequences_of_a_stock_engine_pass",
        "../adapters/hidden_state_adapters/opacus/stock/made.py",
        "    refuse_packed_sequences(module)",
        "",
        "opacus/test_packed_sequences.py",
    ),
    # Models that other runs trained.
    Mutation(
        "a_model_of_another_engine_passes",
        "../adapters/hidden_state_adapters/opacus/run/registry.py",
        "if other is not engine and run.num_steps:",
        "if other is None and run.num_steps:",
        "opacus/test_earlier_runs.py",
    ),
    # What a step leaves to the next training pass, or to the next epsilon.
    Mutation(
        "weights_that_are_replaced_after_the_last_step_are_the_iterate",
        _ITERATE,
        "moved = self._differ([now[name] for name in self._names]) if is_there else True",
        "moved = self.moved()",
        _ITERATE_TESTS,
    ),
    Mutation(
        "passes_at_other_weights_count",
        "../adapters/hidden_state_adapters/opacus/sources/samples.py",
        "any_of([self.iterate.moved(), self._strayed])",
        "self.iterate.moved()",
        "misuse/test_opacus.py",
    ),
)
