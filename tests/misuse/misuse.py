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


def nothing():
    """What an honest step does between, before and after its pass."""


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

    def average_with(self, others):
        self.set_weights([(a + b) / 2 for a, b in zip(others, self.weights(), strict=True)])

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

    def outcome(self, framework, trial):
        kinds = [k for k in ("computed", "composed", "trusted") if getattr(trial, f"is_{k}")]
        found = [getattr(self, kind) for kind in (framework, *kinds)]
        return [outcome for outcome in found if outcome is not None][-1]


def each_row(names, rows):
    """Parametrises a test over (its number, what commits the misuse, *rest)."""
    return pytest.mark.parametrize(
        names, [row[1:] for row in rows], ids=[f"row{row[0]}-{row[1].__name__}" for row in rows]
    )


def cases(framework):
    """The table as parameters of a test."""
    return [
        pytest.param(case, id="-".join([case.commit.__name__, *case.layer.split()]))
        for case in MISUSES
        if getattr(case, framework) is not None
    ]


def on_one(framework, misuse, makers):
    """Commits a misuse on the first trial that can commit it, beginning with another for each."""
    first = MISUSES.index(misuse) % len(makers)
    for make_trial in [*makers[first:], *makers[:first]]:
        with contextlib.suppress(NotImplementedError):
            check(framework, misuse, make_trial)
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
    trial = make_trial("")
    outcome = misuse.outcome(framework, trial)
    if outcome == CONSTRUCTED:
        _check_constructed(make_trial, misuse, honest_epochs)
        return
    if outcome == DECLARED or (misuse.needs_bound and not trial.has_bound):
        raise NotImplementedError("declared, or no bound is")
    for _ in range(0 if misuse.layer else honest_epochs):
        trial.epoch()
    if outcome == ACCOUNTED or misuse.setting in trial.records:
        _check_accounted(trial, misuse.commit(trial), honest_epochs * STEPS)
        return

    def commit_and_ask():
        run = make_trial(misuse.layer) if misuse.layer else trial
        misuse.commit(run)
        run.get_epsilon()

    with pytest.raises(UnsupportedRunError, match=outcome):
        commit_and_ask()
    if not misuse.layer and framework not in misuse.goes_on:
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
    assert trial.event().num_steps == before + changes.pop("num_steps", STEPS)
    assert 0 < trial.get_epsilon() < math.inf
    for setting, values in changes.items():
        recorded = trial.recorded(setting)
        if recorded is not None:
            own = trial.start[setting]
            expected = [own] * before + [own if v is None else v for v in values]
            assert recorded == pytest.approx(expected), setting


# --- of one call each -----------------------------------------------------------------------------


def named(name):
    def decorate(commit):
        commit.__name__ = name
        return commit

    return decorate


def during(*, scale=1.0, **acts):
    """An epoch, and in its second step what is called between, before or after; see `Trial`."""
    loss = [] if scale == 1 else [f"loss_times_{scale:g}"]

    @named("-".join([*loss, *(f"{when}_{act}" for when, act in acts.items())]) or "one_epoch")
    def commit(trial):
        trial.epoch(scale=scale, **{when: getattr(trial, act) for when, act in acts.items()})

    return commit


def calls(*methods, **recorded):
    """Methods of the trial, one after the other."""

    @named("-".join(methods))
    def commit(trial):
        for method in methods:
            getattr(trial, method)()
        return recorded

    return commit


def afterwards(method):
    return calls("epoch", method)


def changes(name, factor):
    """Changes a setting before the second step of an epoch."""

    @named(f"{name}_changed")
    def commit(trial):
        value = trial.get(name) * factor
        trial.epoch(between=lambda: trial.set(name, value))
        return {name: [None, value, value]}

    return commit


def becomes(name, value):
    @named(f"{name}_set")
    def commit(trial):
        trial.get(name)  # where there is no such setting the case is left out
        trial.epoch(between=lambda: trial.set(name, value))

    return commit


def in_groups(number):
    """Microbatches: the examples of a batch are so many records."""

    @named(f"in_{number}_microbatches")
    def commit(trial):
        trial.group(number)
        trial.epoch()
        assert not getattr(trial.event(), "is_microbatched", False)

    return commit


# --- the batches ----------------------------------------------------------------------------------


def uses(*passes, ahead=0):
    """Steps on the batches with these numbers of each pass, some fetched before they are needed."""

    @named(f"uses_{'_then_'.join(passes)}" + f"_{ahead}_ahead" * bool(ahead))
    def commit(trial):
        for numbers in passes:
            batches, fetched = trial.batches(), []
            for number in map(int, numbers):
                fetched += itertools.islice(batches, max(0, number + 1 + ahead - len(fetched)))
                trial.step(fetched[number])

    return commit


def rows(*index):
    """The second batch has these of its rows."""

    @named(f"rows_{len(index)}")
    def commit(trial):
        for number, batch in enumerate(trial.batches()):
            trial.step(trial.rows(batch, index) if number == 1 else batch)

    return commit


def each_batch(method):
    """Is changed, in place or by a function that returns another one."""

    @named(f"each_batch_{method}")
    def commit(trial):
        for batch in trial.batches():
            changed = getattr(trial, method)(batch)
            trial.step(batch if changed is None else changed)

    return commit


def other_loader(trial):
    for batch in trial.other_batches():
        trial.step(batch)
    trial.epoch()


def older_pass_goes_on(trial):
    older, newer = trial.batches(), trial.batches()
    trial.step(next(older))
    trial.step(next(newer))
    trial.step(next(older))


# --- the optimizer --------------------------------------------------------------------------------


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
    kept = trial.weights()

    def perturb():
        kept[:] = trial.weights()
        trial.move(0.1)

    trial.epoch(at=0, before=perturb, after=lambda: trial.set_weights(kept))


def pass_with_other_weights(trial):
    """And the model itself is left alone."""
    with trial.pass_with_other_weights():
        trial.epoch()


def older_weights_loaded(trial):
    older = trial.weights()
    trial.epoch()
    trial.set_weights(older)
    trial.epoch()


def averaged_weights_released(trial):
    older = trial.weights()
    trial.epoch()
    trial.average_with(older)
    trial.release()


def averaged_weights_accounted(trial):
    """While the event is asked for, which names no weights."""
    older = trial.weights()
    trial.epoch()
    trained = trial.weights()
    trial.average_with(older)
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


def coarse_products(trial):
    with trial.coarse_arithmetic():
        trial.epoch()


# --- noise, several runs --------------------------------------------------------------------------


def program_seeded_for_every_step(trial):
    for index in range(STEPS):
        trial.epoch(at=index, between=trial.seed_the_program)
    return {"num_steps": STEPS * STEPS}


def trained_inside_a_budget(trial):
    """Its epsilon would not be counted there."""
    with hsa.budget(epsilon=1e-3, delta=1e-5):
        trial.epoch()


def _composed_epsilon(*events):
    accountant = hsa.LastIterateAccountant()
    for event in events:
        accountant.compose(event)
    return pytest.approx(accountant.get_epsilon(1e-5))


def second_run(name, *change):
    @named(name)
    def commit(trial):
        trial.epoch()
        first = trial.event()
        calls(*change, "begin_anew", "epoch")(trial)
        assert trial.get_epsilon() == _composed_epsilon(first, trial.event())

    return commit


def copied_and_trained_again(trial):
    """A deep copy on another engine: the runs behind it come along."""
    before = trial.get_epsilon()
    trial.copy_to_another_engine()
    trial.epoch()
    first, second = trial.event().events
    assert before < trial.get_epsilon() == _composed_epsilon(first, second)
    trial.event = lambda: second
    return {"num_steps": 0}


def gone_on(*weights_and_runs):
    """Goes on from a saved state once for each entry: with weights that were moved by it."""

    @named(f"gone_on_{'_and_'.join(map(str, weights_and_runs))}")
    def commit(trial):
        trial.epoch()
        state, weights = trial.save()
        for moved in weights_and_runs:
            trial.go_on_from((state, [w + moved for w in weights]))
            trial.epoch()
        return {"num_steps": 2 * STEPS}

    return commit


def gone_on_here_and_elsewhere(trial):
    trial.epoch()
    here = trial.stay_here()
    trial.go_on_from(trial.save())
    trial.epoch()
    here.epoch()


def weights_written_after_an_epoch(trial):
    """The file holds an iterate."""
    trial.epoch()
    trial.write_weights()
    trial.epoch()
    event = trial.event()
    assert getattr(event, "release_steps", (STEPS,)) == (STEPS,)
    return {"num_steps": 2 * STEPS}


# --- the data -------------------------------------------------------------------------------------


def data(name, change):
    @named(f"data_{name}")
    def commit(trial):
        trial.take_data(change)

    return commit


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
    Misuse(during(), ACCOUNTED, ACCOUNTED),
    Misuse(uses("012", ahead=1), ACCOUNTED, None),
    Misuse(during(between="evaluate"), ACCOUNTED, ACCOUNTED),
    Misuse(during(between="release"), ACCOUNTED, ACCOUNTED),
    Misuse(weights_averaged_on_the_side, ACCOUNTED, ACCOUNTED),
    # Other batches.
    Misuse(uses("02"), "used batch 2, expected batch 1", None),
    Misuse(uses("01", "0", ahead=1), ACCOUNTED, None),
    Misuse(uses("0", "01"), ACCOUNTED, None),
    Misuse(uses("00"), "used no new batch, expected batch 1", None),
    Misuse(uses("0122"), "no new batch, expected batch 0", None),
    Misuse(other_loader, "used no new batch, expected batch 0", None),
    Misuse(uses("012", ahead=2), "no new batch, expected batch 2", None),
    Misuse(uses("00", ahead=1), "no new batch, expected batch 1", None),
    Misuse(older_pass_goes_on, "loader anew|expected batch", None, goes_on=OPACUS),
    Misuse(rows(0), "used 1 rows, expected batch_size = 2", None),
    Misuse(rows(0, 1, 0), "used 3 rows, expected batch_size = 2", None),
    Misuse(rows(), "used 0 rows, expected batch_size = 2", None),
    Misuse(during(before="unused_gradients"),
           "gradients of 2 batches|follows 2 training passes", ACCOUNTED),
    # Other update rules.
    Misuse(becomes("momentum", 0.9), "momentum = 0", "momentum", setting="momentum",
           goes_on=KERAS),
    Misuse(becomes("maximize", True), "maximize = False", None, setting="maximize"),
    Misuse(becomes("clipnorm", 1.0), None, "clipnorm = None", goes_on=KERAS),
    Misuse(during(between="replace_inner_optimizer"), "another original_optimizer", None),
    Misuse(during(between="hook_on_the_update"), "without step hooks", "gradient_transformers",
           goes_on=KERAS),
    Misuse(during(after="change_update"), CONSTRUCTED, "not the noisy mean"),
    # Other losses.
    Misuse(during(scale=1000.0), "per-example gradient of norm|gradient_bound >=",
           "longer than|gradient_bound >=", needs_bound=True,
           computed="1e.03 times as long|scaled or doubled|1000 times"),
    Misuse(during(scale=math.nan), "norm nan|norm is not finite", "not finite",
           computed="gradients are not finite"),
    # Constants that are not those of the loss, and losses that depend on several records.
    Misuse(during(), None, "Keras' loss has no factor 1/2", layer="half_squared_error"),
    Misuse(during(), None, "without activation", layer="tanh"),
    Misuse(during(), None, "output of the model to be that of", layer="sigmoid_after"),
    Misuse(during(), None, "of Keras, got BinaryFocalCrossentropy", layer="focal"),
    Misuse(during(before="broadcast_targets"), None, r"shape \(examples,\)", goes_on=KERAS),
    # Precision.
    Misuse(calls("epoch", "halve_the_precision", "epoch"), MOVED, None),
    Misuse(coarse_products, ACCOUNTED, None, computed="used features of norm"),
    # Other weights.
    Misuse(during(between="move"), MOVED, MOVED, trusted=DECLARED),
    Misuse(during(after="move"), MOVED, None, computed=CONSTRUCTED),
    Misuse(weights_moved_for_the_pass, MOVED, None),
    Misuse(afterwards("move"), MOVED, MOVED, goes_on=BOTH),
    Misuse(older_weights_loaded, MOVED, MOVED, goes_on=KERAS),
    Misuse(averaged_weights_released, MOVED, MOVED, goes_on=BOTH),
    Misuse(averaged_weights_accounted, None, MOVED, goes_on=KERAS),
    Misuse(afterwards("apply_again"), MOVED, "not the noisy mean", computed=CONSTRUCTED,
           goes_on=BOTH),
    Misuse(during(between="freeze"), r"trains \[|of the construction", OTHER_VARIABLES,
           goes_on=KERAS, composed=ACCOUNTED),
    Misuse(during(between="unfreeze"), r"trains \[|of the construction", OTHER_VARIABLES,
           goes_on=KERAS),
    Misuse(during(between="add_a_parameter"), "optimizes 3 parameters", OTHER_VARIABLES,
           goes_on=KERAS),
    Misuse(during(between="halve_frozen"), "buffer or frozen parameter", FIXED, goes_on=OPACUS),
    Misuse(during(between="halve_frozen_unseen"), "buffer or frozen parameter", None, goes_on=BOTH),
    Misuse(during(between="write_buffer"), "buffer or frozen parameter|gradient_bound", FIXED,
           goes_on=OPACUS, computed="used features of norm"),
    Misuse(during(before="write_buffer"),
           "buffer or frozen parameter|passes on different inputs|gradient_bound", FIXED,
           goes_on=OPACUS, computed="used features of norm"),
    Misuse(afterwards("write_buffer"), "buffer or frozen parameter", FIXED, goes_on=BOTH),
    Misuse(during(), r"buffer or frozen parameter|in eval\(\) mode", "not trained was changed",
           layer="counts", computed="buffer or frozen parameter"),
    Misuse(during(), "BatchNorm1d|batch statistics", "no trainable batch normalisation",
           layer="batch_norm"),
    # Records that act on each other, or change.
    Misuse(during(), "the model mixes the records", None, layer="statistics"),
    Misuse(during(), "the model mixes the records", "features of every example by itself",
           layer="largest"),
    Misuse(during(), "the model mixes the records", None, layer="guard"),
    # After the first steps, in which it used to be looked for.
    Misuse(each_batch("mapped"), "not what the loader drew", None, composed=DECLARED),
    Misuse(each_batch("write_inputs"), "not what the loader drew", None, composed=DECLARED),
    Misuse(each_batch("write_targets"), DECLARED, None, computed="changed in place"),
    Misuse(pass_with_other_weights, "changed outside|make_private got, got others", None,
           goes_on=OPACUS),
    Misuse(calls("hook_the_head", "epoch"), "hooks of the first training pass", None,
           composed=DECLARED, goes_on=OPACUS),
    Misuse(second_run("trained_again"), None, ACCOUNTED),
    Misuse(second_run("trained_again_elsewhere", "copy_model"), None, ACCOUNTED),
    Misuse(second_run("moved_and_trained_again", "move"), None, "something else has changed",
           goes_on=KERAS),
    Misuse(gone_on(0.0), None, ACCOUNTED),
    Misuse(gone_on(0.0, 0.0), None, "newest state of the run", goes_on=KERAS),
    Misuse(gone_on_here_and_elsewhere, None, "Another record of this process", goes_on=KERAS),
    Misuse(gone_on(1e-6), None, "weights that the last recorded step left", goes_on=KERAS),
    Misuse(during(), None, "with constants, got normalization", layer="adapted"),
    # Settings and noise.
    Misuse(changes("learning_rate", 0.5), "uses lr = ", CONSTANT, setting="learning_rate"),
    Misuse(changes("noise_multiplier", 0.5), "uses noise_multiplier", None,
           setting="noise_multiplier"),
    Misuse(changes("clip_norm", 1.01), "uses max_grad_norm", None, setting="clip_norm"),
    Misuse(changes("weight_decay", 0.5), "weight_decay", None, setting="weight_decay"),
    Misuse(changes("error_clip_norm", 2.0), "uses error_max_grad_norm", None),
    Misuse(becomes("automatic", True), "uses automatic = True", None),
    Misuse(changes("divisor", 2), "expected_batch_size", None),
    Misuse(becomes("loss_reduction", "sum"), "uses loss_reduction", None),
    Misuse(becomes("secure_mode", True), "uses secure_mode", None),
    Misuse(becomes("step_hook", print), "step_hook", None),
    Misuse(becomes("grad_scale", 1.0), "GradScaler", None, goes_on=OPACUS),
    Misuse(becomes("generator", "another"), "another generator", None),
    Misuse(program_seeded_for_every_step, ACCOUNTED, ACCOUNTED),
    # Several runs, and runs that ended.
    Misuse(weights_written_after_an_epoch, None, ACCOUNTED),
    Misuse(calls("begin_under_add_or_remove", "epoch"), *["constant rate and divisor"] * 2,
           goes_on=BOTH),
    Misuse(calls("begin_with_a_convex_loss_of_two_layers", "epoch"),
           *["no loss is convex in the weights"] * 2, goes_on=BOTH),
    Misuse(copied_and_trained_again, ACCOUNTED, None),
    Misuse(afterwards("account_again"), "another engine took over|took no step",
           "without steps, got", goes_on=BOTH),
    Misuse(calls("start_another_run", "epoch"),
           "This run ended when make_private was called again", None, goes_on=OPACUS),
    Misuse(interrupted_and_reported, "interrupted", "fit was interrupted"),
    Misuse(refusal_ignored, "An earlier step of this run was", "cannot go on|ends the run"),
    Misuse(calls("epoch", "unused_gradients", "epoch", num_steps=2 * STEPS),
           CONSTRUCTED, ACCOUNTED),
    # The data.
    Misuse(data("batched", lambda d: d.batch(3, drop_remainder=True)), None,
           "the shape of batches", goes_on=KERAS),
    Misuse(data("repeated", lambda d: d.shuffle(RECORDS).repeat(2)), None,
           "got equal ones from what was read", goes_on=KERAS),
    # Records that are several examples.
    Misuse(in_groups(1), None, SEVERAL, goes_on=KERAS),
    Misuse(in_groups(BATCH), None, ACCOUNTED),
    Misuse(in_groups(BATCH + 1), None, "batch_size = 2, got 3", goes_on=KERAS),
    Misuse(weights_of_examples, None, "Expected weight_bound=", goes_on=KERAS, needs_bound=True),
    Misuse(afterwards("copy"), "cannot be copied", MOVED + "|got another one", goes_on=BOTH),
    Misuse(afterwards("pickle"), "cannot be copied", MOVED + "|got another one", goes_on=BOTH),
    # A budget.
    Misuse(trained_inside_a_budget, *["inside of hidden_state_accountants.budget"] * 2,
           goes_on=BOTH),
)  # fmt: skip
