"""Misuses of a training run, one table for every optimizer of every framework.

A case commits its misuse on a `Trial`, which test_opacus.py and test_keras.py beside this file
make for their optimizers. Either the package refuses, with a text, and answers no question about
the run any more; or the run is accounted as it happened; or, where a trainer computes its steps
from what it holds itself, the weights are those of the honest run with the same noise. What nobody
looks at is declared (docs/threat_model.md).

A new optimizer gets all cases by one line in the table of its framework's test; a new case reaches
all optimizers by one line in `MISUSES`.
"""

import contextlib
import itertools
import math
from collections.abc import Callable

import attrs
import pytest

import hidden_state_accountants as hsa
from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.events.schedule import per_step

ACCOUNTED = "accounted"
CONSTRUCTED = "by construction"
DECLARED = "declared"
RECORDS, BATCH, STEPS = 6, 2, 3  # three steps are an epoch


class Trial:
    """One accounted run: a frozen identity, a buffer and a trained linear head, tiny.

    The misuses call its methods by names that say what is done: `epoch` makes honest steps on all
    batches but for the step with the index `at`, `between` is called before that step, `before`
    before its forward pass, `after` after its forward (and backward) pass, `scale` is a factor of
    its loss. What cannot be done in a framework or with an optimizer has no method there, or one
    that raises NotImplementedError: the case is left out.

    Attributes:
        start: Settings by name, as they are at the start.
        records: The settings that may change during the run, and are recorded as they were used.
        has_bound: Whether a bound on the gradients is declared, which scaled losses exceed.
        is_computed: Whether the trainer computes its steps from what it holds itself.
        is_composed: Whether every step counts, at the trust of the upstream.
        is_trusted: Whether an optimizer is in a loop of somebody else, who is trusted.
    """

    start: dict
    records: frozenset[str] = frozenset()
    has_bound = True
    is_computed = False
    is_composed = False
    is_trusted = False

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(f"{type(self).__name__} has no {name}")

    def move(self, amount=1e-6):
        self.set_weights([w + amount for w in self.weights()])

    def halve_frozen(self):
        self.write_frozen(0.5 * self.frozen())

    def halve_frozen_unseen(self):
        self.write_frozen_unseen(0.5 * self.frozen())

    def tell_the_loss(self):
        """To whoever accounts the run; for those that can do without it."""

    def recorded(self, setting):
        """The values of a setting in the event, one for each step; None if it is not in there."""
        event = self.event()
        value = getattr(event, setting, None)
        return None if value is None else list(per_step(value, event.num_steps))

    def questions(self):
        """What must not be answered after a run has ended."""
        return [self.get_epsilon, self.event, self.release, self.epoch]


@attrs.frozen
class Misuse:
    """One misuse.

    Attributes:
        row: A number that the name of its test begins with; 0 for what is right.
        commit: Commits it; returns what is expected to be recorded where that is not a refusal: the
            number of steps if it is not an epoch's, and settings.
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


def on_one(framework, misuse, makers, honest_epochs=0):
    """Commits a misuse on the first trial that can commit it, beginning with another for each.

    Args:
        framework: As in `check`.
        misuse: A row of the table.
        makers: What makes a trial, with the name of a layer: all that the framework has.
        honest_epochs: As in `check`.
    """
    table = [case for case in MISUSES if getattr(case, framework) is not None]
    first = table.index(misuse) % len(makers)
    for make_trial in [*makers[first:], *makers[:first]]:
        with contextlib.suppress(NotImplementedError):
            check(framework, misuse, make_trial, honest_epochs)
            return
    pytest.fail("no trial can commit it")


def check(framework, misuse, make_trial, honest_epochs=0):
    """Commits the misuse and holds the package to what the table says.

    Args:
        framework: Which outcome of the table.
        misuse: A row of the table.
        make_trial: Makes the trial, with the name of a layer.
        honest_epochs: Before it.

    Raises:
        NotImplementedError: It cannot be committed on this trial.
    """
    outcome = getattr(misuse, framework)
    for kind in ("computed", "composed", "trusted"):
        if getattr(misuse, kind) is not None and getattr(make_trial(""), f"is_{kind}"):
            outcome = getattr(misuse, kind)
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
    changes = dict(changes or {})
    steps = before + changes.pop("num_steps", STEPS)
    assert trial.event().num_steps == steps
    assert 0 < trial.get_epsilon() < math.inf
    for setting, values in changes.items():
        recorded = trial.recorded(setting)
        if recorded is not None:
            own = trial.start[setting]
            expected = [own] * before + [own if v is None else v for v in values]
            assert recorded == pytest.approx(expected), setting


# --- one call -------------------------------------------------------------------------------------


def during(*, scale=1.0, **acts):
    """An epoch, and in its second step what is called between, before or after; see `Trial`."""

    def commit(trial):
        calls = {when: getattr(trial, method) for when, method in acts.items()}
        trial.epoch(scale=scale, **calls)

    loss = [] if scale == 1 else [f"loss_times_{scale:g}"]
    names = [f"{when}_{method}" for when, method in acts.items()]
    commit.__name__ = "-".join([*loss, *names]) or "one_epoch"
    return commit


def afterwards(method):
    """After an epoch."""

    def commit(trial):
        trial.epoch()
        getattr(trial, method)()

    commit.__name__ = f"afterwards_{method}"
    return commit


def changes(name, factor):
    """Changes a setting before the second step of an epoch."""

    def commit(trial):
        value = trial.get(name) * factor
        trial.epoch(between=lambda: trial.set(name, value))
        return {name: [None, value, value]}

    commit.__name__ = f"{name}_changed"
    return commit


def becomes(name, value):
    def commit(trial):
        trial.get(name)  # where there is no such setting the case is left out
        trial.epoch(between=lambda: trial.set(name, value))

    commit.__name__ = f"{name}_set"
    return commit


# --- the optimizer --------------------------------------------------------------------------------


def gradients_not_used(trial):
    trial.epoch()
    trial.unused_gradients()
    trial.epoch()
    return {"num_steps": 2 * STEPS}


def interrupted_and_reported(trial):
    trial.epoch()
    with trial.interrupted_update(), contextlib.suppress(KeyboardInterrupt):
        trial.epoch()


def refusal_ignored(trial):
    with contextlib.suppress(UnsupportedRunError):
        trial.epoch(scale=math.nan)
    trial.epoch()


# --- the weights ----------------------------------------------------------------------------------


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


def precision_halved(trial):
    trial.epoch()
    trial.halve_the_precision()
    trial.epoch()


def coarse_products(trial):
    with trial.coarse_arithmetic():
        trial.epoch()


# --- noise, several runs --------------------------------------------------------------------------


def program_seeded_for_every_step(trial):
    for index in range(STEPS):
        trial.epoch(at=index, between=trial.seed_the_program)
    return {"num_steps": STEPS * STEPS}


def older_run_goes_on(trial):
    trial.start_another_run()
    trial.epoch()


def trained_inside_a_budget(trial):
    """Its epsilon would not be counted there."""
    with hsa.budget(epsilon=1e-3, delta=1e-5):
        trial.epoch()


# --- the batches ----------------------------------------------------------------------------------


def batch_skipped(trial):
    for index, batch in enumerate(trial.batches()):
        if index != 1:
            trial.step(batch)


def last_batch_skipped(trial):
    """The second pass then has that batch alone."""
    for _ in range(2):
        for index, batch in enumerate(trial.batches()):
            if index != STEPS - 1:
                trial.step(batch)


def pass_left_and_begun_again(trial):
    """A new pass goes on with the next batch."""
    for batch in itertools.islice(trial.batches(), 1):
        trial.step(batch)
    trial.epoch()


def batch_used_twice(trial):
    for batch in trial.batches():
        trial.step(batch)
        trial.step(batch)


def batch_used_after_the_pass(trial):
    for batch in trial.batches():
        last = batch
        trial.step(batch)
    trial.step(last)


def other_loader(trial):
    for batch in trial.other_batches():
        trial.step(batch)
    trial.epoch()


def batches_fetched_in_advance(trial):
    for batch in list(trial.batches()):
        trial.step(batch)


def one_batch_ahead(trial):
    """As Lightning, accelerate and prefetchers do: the loop knows which batch is the last."""
    batches = trial.batches()
    batch = next(batches)
    for ahead in batches:
        trial.step(batch)
        batch = ahead
    trial.step(batch)


def one_batch_ahead_and_an_older_one_again(trial):
    batches = trial.batches()
    first, ahead = next(batches), next(batches)
    trial.step(first)
    trial.step(first)
    trial.step(ahead)


def one_batch_ahead_and_the_newer_one_used(trial):
    batches = trial.batches()
    next(batches)
    trial.step(next(batches))


def older_pass_goes_on(trial):
    older, newer = trial.batches(), trial.batches()
    trial.step(next(older))
    trial.step(next(newer))
    trial.step(next(older))


def fewer_rows(trial):
    for index, batch in enumerate(trial.batches()):
        trial.step(trial.rows(batch, range(BATCH - 1)) if index == 1 else batch)


def more_rows(trial):
    for index, batch in enumerate(trial.batches()):
        trial.step(trial.rows(batch, [*range(BATCH), 0]) if index == 1 else batch)


def no_rows(trial):
    for batch in trial.batches():
        trial.step(trial.rows(batch, []))


def records_mapped(trial):
    """After the first steps, by a number of the batch."""
    for batch in trial.batches():
        trial.step(trial.mapped(batch))


def batch_written(trial):
    for batch in trial.batches():
        trial.write_inputs(batch)
        trial.step(batch)


def targets_written(trial):
    for batch in trial.batches():
        trial.write_targets(batch)
        trial.step(batch)


# --- data whose examples are not single ones ------------------------------------------------------


def data_batched(trial):
    trial.take_data(lambda dataset: dataset.batch(RECORDS // BATCH))


def data_batched_to_known_shapes(trial):
    groups = RECORDS // BATCH
    trial.take_data(lambda dataset: dataset.batch(groups, drop_remainder=True).prefetch(1))


def data_repeated(trial):
    trial.take_data(lambda dataset: dataset.shuffle(RECORDS).repeat(2))


def data_going_round(trial):
    def endless(dataset):
        def again():
            while True:
                yield from dataset.as_numpy_iterator()

        spec = dataset.element_spec
        return dataset.from_generator(again, output_signature=spec).take(2 * RECORDS)

    trial.take_data(endless)


# --- weights that a private run left --------------------------------------------------------------


def _second_run(trial, change):
    trial.epoch()
    first = trial.event()
    change()
    trial.begin_anew()
    trial.epoch()
    both = hsa.LastIterateAccountant().compose(first).compose(trial.event())
    assert trial.get_epsilon() == pytest.approx(both.get_epsilon(1e-5))


def copied_and_trained_again(trial):
    """A deep copy on another engine: the runs behind it come along."""
    before = trial.get_epsilon()
    trial.copy_to_another_engine()
    trial.epoch()
    first, second = trial.event().events
    both = hsa.LastIterateAccountant().compose(first).compose(second)
    assert trial.get_epsilon() == pytest.approx(both.get_epsilon(1e-5))
    assert trial.get_epsilon() > before
    trial.event = lambda: second
    return {"num_steps": 0}


def trained_again(trial):
    _second_run(trial, lambda: None)


def trained_again_elsewhere(trial):
    _second_run(trial, trial.copy_model)


def moved_and_trained_again(trial):
    _second_run(trial, trial.move)


def gone_on_elsewhere(trial):
    trial.epoch()
    trial.go_on_from(trial.save())
    trial.epoch()
    return {"num_steps": 2 * STEPS}


def gone_on_twice(trial):
    trial.epoch()
    saved = trial.save()
    trial.go_on_from(saved)
    trial.epoch()
    trial.go_on_from(saved)
    trial.epoch()


def gone_on_here_and_elsewhere(trial):
    trial.epoch()
    here = trial.stay_here()
    trial.go_on_from(trial.save())
    trial.epoch()
    here.epoch()


def gone_on_with_other_weights(trial):
    trial.epoch()
    state, weights = trial.save()
    trial.go_on_from((state, [w + 1e-6 for w in weights]))
    trial.epoch()


# --- microbatches ---------------------------------------------------------------------------------


def microbatches(trial):
    """Both examples of a batch are one record."""
    trial.group(1)
    trial.epoch()


def microbatches_of_one_example(trial):
    """Which are no microbatches."""
    trial.group(BATCH)
    trial.epoch()
    assert not getattr(trial.event(), "is_microbatched", False)


def more_microbatches_than_examples(trial):
    trial.group(BATCH + 1)
    trial.epoch()


def weights_written_after_an_epoch(trial):
    """The file holds an iterate."""
    trial.epoch()
    trial.write_weights()
    trial.epoch()
    event = trial.event()
    assert getattr(event, "release_steps", (STEPS,)) == (STEPS,)
    return {"num_steps": 2 * STEPS}


def convex_loss_of_two_layers(trial):
    trial.begin_with_a_convex_loss_of_two_layers()
    trial.epoch()


def number_of_records_in_the_divisor(trial):
    trial.begin_under_add_or_remove()
    trial.epoch()


def weights_of_examples(trial):
    """A gradient is as long as its weight says."""
    trial.group(BATCH)
    trial.weigh([1.0, 2.0])
    trial.epoch()


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
    Misuse(0, during(), ACCOUNTED, ACCOUNTED),
    Misuse(0, one_batch_ahead, ACCOUNTED, None),
    Misuse(0, during(between="evaluate"), ACCOUNTED, ACCOUNTED),
    Misuse(0, during(between="release"), ACCOUNTED, ACCOUNTED),
    Misuse(0, weights_averaged_on_the_side, ACCOUNTED, ACCOUNTED),
    # Other batches.
    Misuse(1, batch_skipped, "used batch 2, expected batch 1", None),
    Misuse(1, last_batch_skipped, ACCOUNTED, None),
    Misuse(1, pass_left_and_begun_again, ACCOUNTED, None),
    Misuse(1, batch_used_twice, "used no new batch, expected batch 1", None),
    Misuse(1, batch_used_after_the_pass, "no new batch, expected batch 0", None),
    Misuse(1, other_loader, "used no new batch, expected batch 0", None),
    Misuse(1, batches_fetched_in_advance, "no new batch, expected batch 2", None),
    Misuse(1, one_batch_ahead_and_an_older_one_again, "no new batch, expected batch 1", None),
    Misuse(1, one_batch_ahead_and_the_newer_one_used, "used batch 1, expected batch 0", None),
    Misuse(1, older_pass_goes_on, "loader anew|expected batch", None, goes_on=OPACUS),
    Misuse(1, fewer_rows, "used 1 rows, expected batch_size = 2", None),
    Misuse(1, more_rows, "used 3 rows, expected batch_size = 2", None),
    Misuse(1, no_rows, "used 0 rows, expected batch_size = 2", None),
    Misuse(1, during(before="unused_gradients"),
           "gradients of 2 batches|follows 2 training passes", ACCOUNTED),
    # Other update rules.
    Misuse(3, becomes("momentum", 0.9), "momentum = 0", "momentum", setting="momentum",
           goes_on=KERAS),
    Misuse(3, becomes("maximize", True), "maximize = False", None, setting="maximize"),
    Misuse(3, becomes("clipnorm", 1.0), None, "clipnorm = None", goes_on=KERAS),
    Misuse(3, during(between="replace_inner_optimizer"), "another original_optimizer", None),
    Misuse(3, during(between="hook_on_the_update"), "without step hooks", "gradient_transformers",
           goes_on=KERAS),
    Misuse(3, during(after="change_update"), CONSTRUCTED, "not the noisy mean"),
    # Other losses.
    Misuse(4, during(scale=1000.0), "per-example gradient of norm|gradient_bound >=",
           "longer than|gradient_bound >=", needs_bound=True,
           computed="1e.03 times as long|scaled or doubled|1000 times"),
    Misuse(20, during(scale=math.nan), "norm nan|norm is not finite", "not finite",
           computed="gradients are not finite"),
    # Constants that are not those of the loss, and losses that depend on several records.
    Misuse(70, during(), None, "Keras' loss has no factor 1/2", layer="half_squared_error"),
    Misuse(71, during(), None, "without activation", layer="tanh"),
    Misuse(71, during(), None, "output of the model to be that of", layer="sigmoid_after"),
    Misuse(71, during(), None, "of Keras, got BinaryFocalCrossentropy", layer="focal"),
    Misuse(73, during(before="broadcast_targets"), None, r"shape \(examples,\)", goes_on=KERAS),
    # Precision.
    Misuse(10, precision_halved, MOVED, None),
    Misuse(21, coarse_products, ACCOUNTED, None, computed="used features of norm"),
    # Other weights.
    Misuse(11, during(between="move"), MOVED, MOVED, trusted=DECLARED),
    Misuse(11, during(after="move"), MOVED, None, computed=CONSTRUCTED),
    Misuse(11, weights_moved_for_the_pass, MOVED, None),
    Misuse(11, afterwards("move"), MOVED, MOVED, goes_on=BOTH),
    Misuse(11, older_weights_loaded, MOVED, MOVED, goes_on=KERAS),
    Misuse(11, averaged_weights_released, MOVED, MOVED, goes_on=BOTH),
    Misuse(101, averaged_weights_accounted, None, MOVED, goes_on=KERAS),
    Misuse(11, during(between="train_without_noise"), MOVED, MOVED, trusted=DECLARED),
    Misuse(11, afterwards("apply_again"), MOVED, "not the noisy mean", computed=CONSTRUCTED,
           goes_on=BOTH),
    Misuse(11, during(between="freeze"), r"trains \[|of the construction", OTHER_VARIABLES,
           goes_on=KERAS,
           composed=ACCOUNTED),
    Misuse(11, during(between="unfreeze"), r"trains \[|of the construction", OTHER_VARIABLES,
           goes_on=KERAS),
    Misuse(11, during(between="add_a_parameter"), "optimizes 3 parameters", OTHER_VARIABLES,
           goes_on=KERAS),
    Misuse(11, during(between="halve_frozen"), "buffer or frozen parameter", FIXED,
           goes_on=OPACUS),
    Misuse(11, afterwards("halve_frozen"), "buffer or frozen parameter", FIXED, goes_on=BOTH),
    Misuse(11, during(between="halve_frozen_unseen"), "buffer or frozen parameter", None,
           goes_on=BOTH),
    Misuse(33, during(between="write_buffer"),
           "buffer or frozen parameter|gradient_bound", FIXED,
           goes_on=OPACUS, computed="used features of norm"),
    Misuse(33, during(before="write_buffer"),
           "buffer or frozen parameter|passes on different inputs|gradient_bound", FIXED,
           goes_on=OPACUS, computed="used features of norm"),
    Misuse(33, afterwards("write_buffer"), "buffer or frozen parameter", FIXED,
           goes_on=BOTH),
    Misuse(33, during(), r"buffer or frozen parameter|in eval\(\) mode",
           "not trained was changed", layer="counts",
           computed="buffer or frozen parameter"),
    Misuse(33, during(), "BatchNorm1d|batch statistics", "no trainable batch normalisation",
           layer="batch_norm"),
    # Records that act on each other, or change.
    Misuse(63, during(), "the model mixes the records", None, layer="statistics"),
    Misuse(63, during(), "the model mixes the records", None, layer="mean"),
    Misuse(63, during(), "the model mixes the records", "features of every example by itself",
           layer="largest"),
    Misuse(63, during(), "the model mixes the records", None, layer="guard"),
    # After the first steps, in which it used to be looked for.
    Misuse(102, records_mapped, "not what the loader drew", None, composed=DECLARED),
    Misuse(102, batch_written, "not what the loader drew", None, composed=DECLARED),
    Misuse(102, targets_written, DECLARED, None, computed="changed in place"),
    Misuse(103, pass_with_other_weights, "changed outside|make_private got, got others", None,
           goes_on=OPACUS),
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
    Misuse(83, during(), None, "with constants, got normalization", layer="adapted"),
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
    Misuse(23, becomes("generator", "another"), "another generator", None),
    Misuse(60, program_seeded_for_every_step, ACCOUNTED, ACCOUNTED),
    # Several runs, and runs that ended.
    Misuse(6, weights_written_after_an_epoch, None, ACCOUNTED),
    Misuse(9, number_of_records_in_the_divisor, "constant rate and divisor",
           "constant rate and divisor", goes_on=BOTH),
    Misuse(13, convex_loss_of_two_layers, "no loss is convex in the weights",
           "no loss is convex in the weights", goes_on=BOTH),
    Misuse(12, copied_and_trained_again, ACCOUNTED, None),
    Misuse(26, afterwards("account_again"), "another engine took over|took no step",
           "without steps, got", goes_on=BOTH),
    Misuse(26, older_run_goes_on, "This run ended when make_private was called again", None,
           goes_on=OPACUS),
    Misuse(30, interrupted_and_reported, "interrupted", "fit was interrupted"),
    Misuse(30, refusal_ignored, "An earlier step of this run was", "cannot go on|ends the run"),
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
    Misuse(164, weights_of_examples, None, "Expected weight_bound=", goes_on=KERAS),
    Misuse(36, afterwards("copy"), "cannot be copied", MOVED + "|got another one", goes_on=BOTH),
    Misuse(36, afterwards("pickle"), "cannot be copied", MOVED + "|got another one", goes_on=BOTH),
    # A budget.
    Misuse(114, trained_inside_a_budget, "inside of hidden_state_accountants.budget",
           "inside of hidden_state_accountants.budget", goes_on=BOTH),
)  # fmt: skip
