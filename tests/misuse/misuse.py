"""Misuses of a training run, one table for every optimizer of every framework.

A case commits its misuse on a `Trial`, which test_opacus.py and test_keras.py beside this file
make for their optimizers. Either the package refuses, with a text, and answers no question about
the run any more; or the run is accounted as it happened; or, where a trainer computes its steps
from what it holds itself, the weights are those of the honest run with the same noise. What nobody
looks at is declared (docs/threat_model.md).

What is committed on batches, data and several runs is in misuse_of_runs.py, the rest is here. A new
optimizer gets all cases by one line in the table of its framework's test; a new case reaches
all optimizers by one line in `MISUSES`.
"""

import contextlib
import math
from collections.abc import Callable

import attrs
import pytest
from misuse_of_runs import (
    a_second_pass,
    batch_doubled,
    batch_skipped,
    batch_used_after_the_pass,
    batch_used_twice,
    batch_written,
    batches_fetched_in_advance,
    convex_loss_of_two_layers,
    copied_and_trained_again,
    data_batched,
    data_batched_to_known_shapes,
    data_going_round,
    data_repeated,
    fewer_rows,
    gone_on_elsewhere,
    gone_on_here_and_elsewhere,
    gone_on_twice,
    gone_on_with_other_weights,
    last_batch_skipped,
    microbatches,
    microbatches_of_one_example,
    more_microbatches_than_examples,
    more_rows,
    moved_and_trained_again,
    no_rows,
    number_of_records_in_the_divisor,
    older_pass_goes_on,
    one_batch_ahead,
    one_batch_ahead_and_an_older_one_again,
    one_batch_ahead_and_the_newer_one_used,
    other_loader,
    other_weights_later,
    pass_left_and_begun_again,
    records_mapped,
    records_written,
    targets_written,
    trained_again,
    trained_again_elsewhere,
    weights_without_bound,
    weights_written_after_an_epoch,
)
from trial import STEPS, Trial

import hidden_state_accountants as hsa
from hidden_state_accountants import UnsupportedRunError

ACCOUNTED = "accounted"
CONSTRUCTED = "by construction"
DECLARED = "declared"


@attrs.frozen
class Misuse:
    """One misuse.

    Attributes:
        row: A number that the name of its test begins with; 0 for what is right.
        commit: Commits it; returns what is expected to be recorded where that is not a refusal: the
            number of steps, and settings.
        opacus: The text of the refusal; ACCOUNTED; or None if it cannot be committed there.
        keras: The same.
        computed: The same for trainers that compute their steps themselves; CONSTRUCTED: weights
            and event are those of the honest run; DECLARED: nobody looks. None: as for the others.
        composed: The same for trainers whose every step counts.
        trusted: The same for optimizers in a loop of somebody else, at TensorFlow Privacy's trust.
        setting: What it changes: accounted by optimizers that record it.
        goes_on: Frameworks in which the refusal does not end the run: no step was asked for, or it
            is about the model as it is.
        needs_bound: Whether only a declared bound on the gradients notices it.
        layer: Name of the layer that is put before the head, or of another head.
    """

    row: int
    commit: Callable[[Trial], object]
    opacus: str | None
    keras: str | None
    computed: str | None = attrs.field(default=None, kw_only=True)
    composed: str | None = attrs.field(default=None, kw_only=True)
    trusted: str | None = attrs.field(default=None, kw_only=True)
    setting: str = attrs.field(default="", kw_only=True)
    goes_on: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    needs_bound: bool = attrs.field(default=False, kw_only=True)
    layer: str = attrs.field(default="", kw_only=True)

    @property
    def name(self):
        layer = f"-{self.layer}" if self.layer else ""
        return f"row{self.row}-{self.commit.__name__}{layer}"


def each_row(names, rows):
    """Parametrises a test over (its number, what commits the misuse, *rest)."""
    return pytest.mark.parametrize(
        names, [row[1:] for row in rows], ids=[f"row{row[0]}-{row[1].__name__}" for row in rows]
    )


def cases(framework):
    """The table as parameters of a test."""
    rows = [case for case in MISUSES if getattr(case, framework) is not None]
    return [pytest.param(case, id=case.name) for case in rows]


def on_one(framework, misuse, trials, commit):
    """Commits a misuse on the first trial that can commit it, beginning with another for each.

    Args:
        framework: As in `check`.
        misuse: A row of the table.
        trials: What the framework has.
        commit: Commits it on one of them, and skips the test where that cannot be done.
    """
    table = [case for case in MISUSES if getattr(case, framework) is not None]
    first = table.index(misuse) % len(trials)
    for trial in [*trials[first:], *trials[:first]]:
        try:
            commit(trial)
        except pytest.skip.Exception:
            continue
        return
    pytest.fail("no trial can commit it")


def check(framework, misuse, make_trial, honest_epochs):
    """Commits the misuse and holds the package to what the table says.

    Args:
        framework: Which outcome of the table.
        misuse: A row of the table.
        make_trial: Makes the trial, with the name of a layer.
        honest_epochs: Before it.
    """
    try:
        _check(framework, misuse, make_trial, honest_epochs)
    except NotImplementedError as error:
        pytest.skip(f"cannot be done here: {error}")


def _check(framework, misuse, make_trial, honest_epochs):
    outcome = getattr(misuse, framework)
    if misuse.computed is not None and make_trial("").is_computed:
        outcome = misuse.computed
    if misuse.composed is not None and make_trial("").is_composed:
        outcome = misuse.composed
    if misuse.trusted is not None and make_trial("").is_trusted:
        outcome = misuse.trusted
    if outcome == CONSTRUCTED:
        _check_constructed(make_trial, misuse, honest_epochs)
        return
    if outcome == DECLARED:
        raise NotImplementedError("declared")
    if misuse.layer:

        def commit_on_layer():
            trial = make_trial(misuse.layer)
            misuse.commit(trial)
            trial.get_epsilon()

        with pytest.raises(UnsupportedRunError, match=outcome):
            commit_on_layer()
        return
    trial = make_trial("")
    if misuse.needs_bound and not trial.has_bound:
        raise NotImplementedError("no bound is declared")
    for _ in range(honest_epochs):
        trial.epoch()
    if outcome == ACCOUNTED or misuse.setting in trial.records:
        _check_accounted(trial, misuse.commit(trial), honest_epochs * STEPS)
        return

    def commit_and_ask():
        misuse.commit(trial)
        trial.get_epsilon()

    with pytest.raises(UnsupportedRunError, match=outcome):
        commit_and_ask()
    if framework not in misuse.goes_on:
        for ask in trial.questions():
            with pytest.raises(UnsupportedRunError):
                ask()


def _check_constructed(make_trial, misuse, honest_epochs):
    """The final weights, and the event, are those of an honest run with the same noise."""
    trial, honest = (make_trial("", seed=5) for _ in range(2))
    for _ in range(honest_epochs):
        trial.epoch()
    misuse.commit(trial)
    steps = trial.event().num_steps
    assert steps % STEPS == 0
    for _ in range(steps // STEPS):
        honest.epoch()
    assert trial.event() == honest.event()
    assert trial.get_epsilon() == honest.get_epsilon()
    for own, expected in zip(trial.weights(), honest.weights(), strict=True):
        assert (own == expected).all()


def _check_accounted(trial, changes, before):
    changes = dict(changes)
    steps = before + changes.pop("num_steps")
    assert trial.event().num_steps == steps
    assert 0 < trial.get_epsilon() < math.inf
    for setting, values in changes.items():
        recorded = trial.recorded(setting)
        if recorded is not None:
            own = trial.start[setting]
            expected = [own] * before + [own if v is None else v for v in values]
            assert recorded == pytest.approx(expected), setting


# --- the loss -------------------------------------------------------------------------------------


def loss_scaled(trial):
    trial.epoch(scale=1000.0)


def loss_not_a_number(trial):
    trial.epoch(scale=math.nan)


def loss_infinite(trial):
    trial.epoch(scale=math.inf)


def targets_broadcast(trial):
    """Entry i of the loss depends on the targets of all records."""
    trial.epoch(before=trial.broadcast_targets)


# --- settings -------------------------------------------------------------------------------------


def changes(name, factor):
    """Changes a setting before the second step of an epoch."""

    def commit(trial):
        value = trial.get(name) * factor
        trial.epoch(between=lambda: trial.set(name, value))
        return {"num_steps": STEPS, name: [None, value, value]}

    commit.__name__ = f"{name}_changed"
    return commit


def becomes(name, value):
    def commit(trial):
        trial.get(name)  # where there is no such setting the case is left out
        trial.epoch(between=lambda: trial.set(name, value))
        return {"num_steps": STEPS}

    commit.__name__ = f"{name}_set"
    return commit


def update_changed(trial):
    trial.epoch(after=trial.change_update)


def gradients_not_used(trial):
    trial.epoch()
    trial.unused_gradients()
    trial.epoch()
    return {"num_steps": 2 * STEPS}


def interrupted_and_gone_on(trial):
    trial.epoch()
    with trial.interrupted_update(), contextlib.suppress(KeyboardInterrupt):
        trial.epoch()
    trial.epoch()


def interrupted_and_reported(trial):
    trial.epoch()
    with trial.interrupted_update(), contextlib.suppress(KeyboardInterrupt):
        trial.epoch()


def refusal_ignored(trial):
    with contextlib.suppress(UnsupportedRunError):
        trial.epoch(scale=math.nan)
    trial.epoch()


def optimizer_copied(trial):
    trial.epoch()
    trial.copy()


def optimizer_pickled(trial):
    trial.epoch()
    trial.pickle()


# --- the weights ----------------------------------------------------------------------------------


def weights_moved_between_steps(trial):
    trial.epoch(between=trial.move)


def weights_moved_a_little(trial):
    trial.epoch(between=lambda: trial.move(1e-6))


def weights_moved_at_the_end(trial):
    trial.epoch()
    trial.move()


def weights_moved_in_the_pass(trial):
    trial.epoch(after=trial.move)


def weights_moved_for_the_pass(trial):
    """The gradient at other weights, which are restored bit by bit before the update."""
    trial.tell_the_loss()
    kept = []

    def perturb():
        kept[:] = trial.weights()
        trial.move(0.1)

    trial.epoch(at=0, before=perturb, after=lambda: trial.set_weights(kept))


def pass_with_other_weights(trial):
    """And the model itself is left alone."""
    with trial.pass_with_other_weights():
        trial.epoch()


def head_hooked(trial):
    trial.hook_the_head()
    trial.epoch()


def older_weights_loaded(trial):
    older = trial.weights()
    trial.epoch()
    trial.set_weights(older)
    trial.epoch()


def averaged_weights_released(trial):
    older = trial.weights()
    trial.epoch()
    trial.set_weights([(a + b) / 2 for a, b in zip(older, trial.weights(), strict=True)])
    trial.release()


def averaged_weights_accounted(trial):
    """While the event is asked for, which names no weights."""
    older = trial.weights()
    trial.epoch()
    trained = trial.weights()
    trial.set_weights([(a + b) / 2 for a, b in zip(older, trained, strict=True)])
    trial.event()
    trial.set_weights(trained)


def weights_averaged_on_the_side(trial):
    """Looked at and put back, bit by bit."""
    trial.epoch()
    kept = trial.weights()
    trial.move()
    trial.evaluate()
    trial.set_weights(kept)
    trial.epoch()
    return {"num_steps": 2 * STEPS}


def parameter_frozen(trial):
    trial.epoch(between=trial.freeze)
    return {"num_steps": STEPS}


def frozen_parameter_trained(trial):
    trial.epoch(between=trial.unfreeze)


def frozen_parameter_written(trial):
    trial.epoch(between=lambda: trial.write_frozen(0.5 * trial.frozen()))


def frozen_parameter_written_at_the_end(trial):
    trial.epoch()
    trial.write_frozen(0.5 * trial.frozen())


def frozen_parameter_written_unseen(trial):
    trial.epoch(between=lambda: trial.write_frozen_unseen(0.5 * trial.frozen()))


def frozen_parameter_permuted(trial):
    """The same numbers in another order."""
    trial.epoch(between=lambda: trial.write_frozen(trial.frozen()[[1, 2, 0]]))


def buffer_written(trial):
    trial.epoch(between=trial.write_buffer)


def buffer_written_in_the_pass(trial):
    trial.epoch(before=trial.write_buffer)


def buffer_written_at_the_end(trial):
    trial.epoch()
    trial.write_buffer()


def trained_without_noise(trial):
    trial.epoch(between=trial.train_without_noise)


def update_applied_again(trial):
    trial.epoch()
    trial.apply_again()


def precision_halved(trial):
    trial.epoch()
    trial.halve_the_precision()
    trial.epoch()


def coarse_products(trial):
    with trial.coarse_arithmetic():
        trial.epoch()
    return {"num_steps": STEPS}


# --- noise, several runs --------------------------------------------------------------------------


def program_seeded_for_every_step(trial):
    for index in range(STEPS):
        trial.epoch(at=index, between=trial.seed_the_program)
    return {"num_steps": STEPS * STEPS}


def noise_seeded_again(trial):
    trial.pass_a_generator()
    for _ in range(2):
        trial.epoch(between=trial.reseed)


def noise_seeded_for_every_step(trial):
    trial.pass_a_generator()
    trial.epoch(at=1, between=trial.reseed)
    trial.epoch(at=2, between=trial.reseed)


def accounted_again(trial):
    trial.epoch()
    trial.account_again()


def older_run_goes_on(trial):
    trial.start_another_run()
    trial.epoch()


def inner_optimizer_replaced(trial):
    trial.epoch(between=trial.replace_inner_optimizer)


def update_hooked(trial):
    trial.epoch(between=trial.hook_on_the_update)


def parameter_added(trial):
    trial.epoch(between=trial.add_a_parameter)


def one_epoch(trial):
    trial.epoch()
    return {"num_steps": STEPS}


def evaluated_between_steps(trial):
    trial.epoch(between=trial.evaluate)
    return {"num_steps": STEPS}


def trained_inside_a_budget(trial):
    """Its epsilon would not be counted there."""
    with hsa.budget(epsilon=1e-3, delta=1e-5):
        trial.epoch()


def released_between_steps(trial):
    trial.epoch(between=trial.release)
    return {"num_steps": STEPS}


OPACUS, KERAS, BOTH = ("opacus",), ("keras",), ("opacus", "keras")
MOVED = "changed outside"
FIXED = "not trained was changed|gradient_bound|longer than loss_geometry.lipschitz"
OTHER_VARIABLES = (
    "changed outside|not trained was changed|variables of the steps before|in one and not in the"
)
CONSTANT = "constant values"
SEVERAL = "num_microbatches = None or"

MISUSES = (
    # What is right: the table can fail.
    Misuse(0, one_epoch, ACCOUNTED, ACCOUNTED),
    Misuse(0, one_batch_ahead, ACCOUNTED, None),
    Misuse(0, evaluated_between_steps, ACCOUNTED, ACCOUNTED),
    Misuse(0, released_between_steps, ACCOUNTED, ACCOUNTED),
    Misuse(0, weights_averaged_on_the_side, ACCOUNTED, ACCOUNTED),
    # Other batches.
    Misuse(1, batch_skipped, "used batch 2, expected batch 1", None),
    Misuse(1, last_batch_skipped, ACCOUNTED, None),
    Misuse(1, pass_left_and_begun_again, ACCOUNTED, None),
    Misuse(1, batch_used_twice, "used no new batch, expected batch 1", None),
    Misuse(1, batch_used_after_the_pass, "no new batch, expected batch 0", None),
    Misuse(1, other_loader, "used no new batch, expected batch 0", None),
    Misuse(1, batches_fetched_in_advance, "no new batch, expected batch 0", None),
    Misuse(1, one_batch_ahead_and_an_older_one_again, "no new batch, expected batch 1", None),
    Misuse(1, one_batch_ahead_and_the_newer_one_used, "used batch 1, expected batch 0", None),
    Misuse(1, older_pass_goes_on, "loader anew|expected batch", None, goes_on=OPACUS),
    Misuse(1, fewer_rows, "used 1 rows, expected batch_size = 2", None),
    Misuse(1, more_rows, "used 3 rows, expected batch_size = 2", None),
    Misuse(1, batch_doubled, "used 4 rows, expected batch_size = 2", None),
    Misuse(1, no_rows, "used 0 rows, expected batch_size = 2", None),
    Misuse(1, a_second_pass, "gradients of 2 batches|follows 2 training passes", ACCOUNTED),
    # Other update rules.
    Misuse(3, becomes("momentum", 0.9), "momentum = 0", "momentum", setting="momentum",
           goes_on=KERAS),
    Misuse(3, becomes("maximize", True), "maximize = False", None, setting="maximize"),
    Misuse(3, becomes("clipnorm", 1.0), None, "clipnorm = None", goes_on=KERAS),
    Misuse(3, inner_optimizer_replaced, "another original_optimizer", None),
    Misuse(3, update_hooked, "without step hooks", "gradient_transformers", goes_on=KERAS),
    Misuse(3, update_changed, CONSTRUCTED, "not the noisy mean"),
    # Other losses.
    Misuse(4, loss_scaled, "per-example gradient of norm|gradient_bound >=",
           "longer than|gradient_bound >=", needs_bound=True,
           computed="1e.03 times as long|scaled or doubled|1000 times"),
    Misuse(20, loss_not_a_number, "norm nan|norm is not finite", "not finite",
           computed="gradients are not finite"),
    Misuse(20, loss_infinite, "norm nan|norm inf|norm is not finite", "not finite",
           computed="gradients are not finite"),
    # Constants that are not those of the loss, and losses that depend on several records.
    Misuse(70, one_epoch, None, "Keras' loss has no factor 1/2", layer="half_squared_error"),
    Misuse(71, one_epoch, None, "without activation", layer="tanh"),
    Misuse(71, one_epoch, None, "output of the model to be that of", layer="sigmoid_after"),
    Misuse(71, one_epoch, None, "of Keras, got BinaryFocalCrossentropy", layer="focal"),
    Misuse(73, targets_broadcast, None, r"shape \(examples,\)", goes_on=KERAS),
    # Precision.
    Misuse(10, precision_halved, "float32 or float64", None),
    Misuse(21, coarse_products, ACCOUNTED, None, computed="used features of norm"),
    # Other weights.
    Misuse(11, weights_moved_between_steps, MOVED, MOVED, trusted=DECLARED),
    Misuse(11, weights_moved_a_little, MOVED, MOVED, trusted=DECLARED),
    Misuse(11, weights_moved_in_the_pass, MOVED, None),
    Misuse(11, weights_moved_for_the_pass, MOVED, None),
    Misuse(11, weights_moved_at_the_end, MOVED, MOVED, goes_on=BOTH),
    Misuse(11, older_weights_loaded, MOVED, MOVED, goes_on=KERAS),
    Misuse(11, averaged_weights_released, MOVED, MOVED, goes_on=BOTH),
    Misuse(101, averaged_weights_accounted, None, MOVED, goes_on=KERAS),
    Misuse(11, trained_without_noise, MOVED, MOVED, trusted=DECLARED),
    Misuse(11, update_applied_again, MOVED, "not the noisy mean", goes_on=BOTH),
    Misuse(11, parameter_frozen, r"trains \[|of the construction", OTHER_VARIABLES, goes_on=KERAS,
           composed=ACCOUNTED),
    Misuse(11, frozen_parameter_trained, r"trains \[|of the construction", OTHER_VARIABLES,
           goes_on=KERAS),
    Misuse(11, parameter_added, "optimizes 3 parameters", OTHER_VARIABLES, goes_on=KERAS),
    Misuse(11, frozen_parameter_written, "value of the frozen parameter", FIXED, goes_on=OPACUS),
    Misuse(11, frozen_parameter_written_at_the_end, "the frozen parameter", FIXED, goes_on=BOTH),
    Misuse(11, frozen_parameter_written_unseen, "value of the frozen parameter", None,
           goes_on=BOTH),
    Misuse(11, frozen_parameter_permuted, "value of the frozen parameter", FIXED, goes_on=OPACUS),
    Misuse(33, buffer_written, "A buffer of the module was changed|gradient_bound", FIXED,
           goes_on=OPACUS, computed="used features of norm"),
    Misuse(33, buffer_written_in_the_pass,
           "A buffer of the module was changed|passes on different inputs|gradient_bound", FIXED,
           goes_on=OPACUS, computed="used features of norm"),
    Misuse(33, buffer_written_at_the_end, "A buffer of the module was changed", FIXED,
           goes_on=BOTH),
    Misuse(33, one_epoch, r"A buffer of the module was changed|in eval\(\) mode",
           "not trained was changed", layer="counts",
           computed="A buffer of the module was changed"),
    Misuse(33, one_epoch, "BatchNorm1d|batch statistics", "no trainable batch normalisation",
           layer="batch_norm"),
    # Records that act on each other, or change.
    Misuse(63, one_epoch, "the model mixes the records", None, layer="statistics",
           computed="used features of norm"),
    Misuse(63, one_epoch, "the model mixes the records", None, layer="mean"),
    Misuse(63, one_epoch, "the model mixes the records", "features of every example by itself",
           layer="largest"),
    Misuse(63, one_epoch, "the model mixes the records", None, layer="guard"),
    Misuse(64, records_written, DECLARED, None),
    # After the first steps, in which it used to be looked for.
    Misuse(102, records_mapped, "not what the loader drew", None, composed=DECLARED),
    Misuse(102, batch_written, "not what the loader drew", None, composed=DECLARED),
    Misuse(102, targets_written, DECLARED, None, computed="changed in place"),
    Misuse(103, pass_with_other_weights, MOVED, None),
    Misuse(103, head_hooked, "hooks of the first training pass", None, composed=DECLARED,
           goes_on=OPACUS),
    Misuse(82, trained_again, None, ACCOUNTED),
    Misuse(82, trained_again_elsewhere, None, ACCOUNTED),
    Misuse(82, moved_and_trained_again, None, "something else has changed", goes_on=KERAS),
    Misuse(85, gone_on_elsewhere, None, ACCOUNTED),
    Misuse(85, gone_on_twice, None, "newest state of the run", goes_on=KERAS),
    Misuse(85, gone_on_here_and_elsewhere, None, "Another record of this process", goes_on=KERAS),
    Misuse(85, gone_on_with_other_weights, None, "weights that the last recorded step left",
           goes_on=KERAS),
    Misuse(83, one_epoch, None, "with constants, got normalization", layer="adapted"),
    # Settings and noise.
    Misuse(14, changes("learning_rate", 0.5), "uses lr = ", CONSTANT, setting="learning_rate"),
    Misuse(14, changes("noise_multiplier", 0.5), "uses noise_multiplier", None,
           setting="noise_multiplier"),
    Misuse(14, changes("clip_norm", 1.01), "uses max_grad_norm", None, setting="clip_norm"),
    Misuse(14, changes("weight_decay", 0.5), "weight_decay", None, setting="weight_decay"),
    Misuse(14, changes("error_clip_norm", 2.0), "uses error_max_grad_norm", None),
    Misuse(14, becomes("automatic", True), "uses automatic = True", None),
    Misuse(14, changes("divisor", 2), "expected_batch_size", None),
    Misuse(14, becomes("step_hook", print), "step_hook", None),
    Misuse(14, becomes("grad_scale", 1.0), "GradScaler", None, goes_on=OPACUS),
    Misuse(23, becomes("generator", "another"), "another noise generator", None),
    Misuse(60, program_seeded_for_every_step, ACCOUNTED, ACCOUNTED),
    Misuse(23, noise_seeded_again, DECLARED, None),
    Misuse(23, noise_seeded_for_every_step, DECLARED, None),
    # Several runs, and runs that ended.
    Misuse(6, weights_written_after_an_epoch, None, ACCOUNTED),
    Misuse(9, number_of_records_in_the_divisor, "constant rate and divisor",
           "constant rate and divisor", goes_on=BOTH),
    Misuse(13, convex_loss_of_two_layers, "no loss is convex in the weights",
           "no loss is convex in the weights", goes_on=BOTH),
    Misuse(12, copied_and_trained_again, ACCOUNTED, None),
    Misuse(26, accounted_again, "another engine took over|took no step",
           "without steps, got", goes_on=BOTH),
    Misuse(26, older_run_goes_on, "This run ended when make_private was called again", None,
           goes_on=OPACUS),
    Misuse(30, interrupted_and_gone_on, "interrupted", "fit was interrupted"),
    Misuse(30, interrupted_and_reported, "interrupted", "fit was interrupted"),
    Misuse(30, refusal_ignored, "An earlier step of this run was",
           "cannot go on|ends the run"),
    Misuse(31, gradients_not_used, CONSTRUCTED, ACCOUNTED),
    # The data.
    Misuse(80, data_batched, None, "the shape of batches", goes_on=KERAS),
    Misuse(80, data_batched_to_known_shapes, None, "the shape of batches", goes_on=KERAS),
    Misuse(81, data_repeated, None, "got equal ones from what was read", goes_on=KERAS),
    Misuse(7, data_going_round, None, "got equal ones from what was read", goes_on=KERAS),
    # Records that are several examples.
    Misuse(183, microbatches, None, SEVERAL, goes_on=KERAS),
    Misuse(0, microbatches_of_one_example, None, ACCOUNTED),
    Misuse(183, more_microbatches_than_examples, None, "batch_size = 2, got 3", goes_on=KERAS),
    Misuse(164, weights_without_bound, None, "Expected weight_bound=", goes_on=KERAS),
    Misuse(164, other_weights_later, None, "of the run so far", goes_on=KERAS),
    Misuse(36, optimizer_copied, "cannot be copied", MOVED + "|got another one", goes_on=BOTH),
    Misuse(36, optimizer_pickled, "cannot be copied", MOVED + "|got another one", goes_on=BOTH),
    # A budget.
    Misuse(114, trained_inside_a_budget, "inside of hidden_state_accountants.budget",
           "inside of hidden_state_accountants.budget", goes_on=BOTH),
)  # fmt: skip
