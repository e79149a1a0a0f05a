"""What one record moves, and at which steps."""

from __future__ import annotations

from mutation import Mutation

EVENTS = "events/last_iterate.py"
ORDERS = "events/batch_order.py"
PROCESS = "process/noisy_process.py"
SHIFTS = "bounds/shifted_interpolation.py"
_SENSITIVITY = (
    "if relation is NeighboringRelation.REPLACE_ONE or order is BatchOrder.WITHOUT_REPLACEMENT:"
)
_LAWS = "laws/test_accountants.py"
_PROCESS_TESTS = "core/test_process.py"
_DETAILS = "core/test_engine_details.py"
_RECORDER_TESTS = "core/test_recorder.py"
_EVENT_TESTS = "core/test_events.py"
BLOCKS = "events/block_coordinate.py"
_BLOCK_TESTS = "theorems/test_block_coordinate.py"

MUTATIONS = (
    # What one record moves.
    Mutation(
        "replace_one_moves_one_clip_norm",
        "events/batch_order.py",
        _SENSITIVITY,
        "if order is BatchOrder.WITHOUT_REPLACEMENT:",
        "oracles/test_gaussian_oracle.py",
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
        "drift=per_step(eta * bound * terms / b)",
        "drift=per_step(eta * bound * terms / b / 2)",
        _PROCESS_TESTS,
    ),
    Mutation(
        "drift_forgets_the_added_record",
        PROCESS,
        "drift=per_step(eta * bound * terms / b)",
        "drift=per_step(eta * bound * (terms - terms % 2) / b)",
        _PROCESS_TESTS,
    ),
    Mutation(
        "drift_forgets_the_decay",
        PROCESS,
        "drift_contraction=per_step(np.abs(1 - eta * decay) * before)",
        "drift_contraction=per_step(np.abs(1 - 0 * eta * decay) * before)",
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
        "noise_std=per_step(eta * event.noise_std_on_sum() / b)",
        "noise_std=per_step(eta * event.noise_std_on_sum())",
        _PROCESS_TESTS,
    ),
    Mutation(
        "radius_for_diameter",
        PROCESS,
        "domain_diameter=event.domain_diameter / float(np.min(before)),",
        "domain_diameter=event.domain_diameter / 2 / float(np.min(before)),",
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
        "result[first :: self.period] = whole[first :: self.period]",
        "result[first + 1 :: self.period] = whole[first + 1 :: self.period]",
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
        "runs/base.py",
        "if self.values and self.values[-1] == value:",
        "if self.values and self.values[0] == value:",
        _RECORDER_TESTS,
    ),
)
