"""A run that goes on from a state, in another process or this one, is one run."""

import base64
import json

import attrs
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_fit import callbacks, compile_with

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    CyclicDPKerasSGDOptimizer,
    DiceKerasAdamOptimizer,
    DiceKerasSGDOptimizer,
    HiddenStateCallback,
    HiddenStateRecorder,
    cyclic_dataset,
    lineage,
)

DELTA = 1e-5
LOGISTIC = hsa.LossGeometry.logistic(1.0, bias=True)


@pytest.fixture(autouse=True)
def new_process(row_by_row):
    """Forgets what the process knows, as a new one would."""

    def forget():
        lineage._live.clear()
        lineage._origins.clear()

    forget()
    return forget


def cyclic(**kwargs):
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay([4, 8], [0.5, 0.25, 0.125])
    return CyclicDPKerasSGDOptimizer(
        1.5, 2.0, **{"learning_rate": rate, "loss_geometry": LOGISTIC, **kwargs}
    )


def dice(kind=DiceKerasSGDOptimizer, noise=40.0, **kwargs):
    return kind(0.25, noise, error_l2_norm_clip=0.125, learning_rate=0.5, **kwargs)


OPTIMIZERS = {
    "cyclic": cyclic,
    "accumulated": lambda: cyclic(gradient_accumulation_steps=2),
    "microbatches": lambda: cyclic(num_microbatches=2),
    "projected": lambda: cyclic(projection_radius=3.0),
    "dice": dice,
    "dice with momentum": lambda: dice(momentum=0.9),
    "dice adam": lambda: dice(DiceKerasAdamOptimizer),
    "one block": lambda: BlockCoordinateKerasOptimizer(1.5, 2.0, learning_rate=0.5),
}


class Loop:
    """An own loop with a recorder, which goes on with another model and optimizer."""

    def __init__(self, run, make, blocks=None):
        self.run, self.make, self.blocks = run, make, blocks
        self.model, self.optimizer = run.model, make()
        self.record = HiddenStateRecorder(self.model, self.optimizer, run.data)

    def steps(self, count):
        while count:
            for x, y in self.record.batches():
                self.step(x, y)
                count -= 1
                if not count:
                    break
        return self

    def step(self, x, y):
        def losses():
            return tf.nn.sigmoid_cross_entropy_with_logits(y, self.model(x))[:, 0]

        variables = self.model.trainable_variables
        if self.blocks:
            self.optimizer.minimize(losses, [[variables[i] for i in b] for b in self.blocks])
        else:
            self.optimizer.minimize(losses, variables)

    def save(self):
        is_secret = bool(self.optimizer.hidden_state)
        state = self.record.state(stays_private=True, include_private_state=is_secret)
        return json.loads(json.dumps(state)), self.model.get_weights()

    def go_on(self, state, weights, **kwargs):
        self.model = tf.keras.models.clone_model(self.model)
        self.model.set_weights(weights)
        self.optimizer = self.make()
        arguments = state, self.model, self.optimizer, self.run.data
        self.record = HiddenStateRecorder.from_state(*arguments, **kwargs)
        return self


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_one_run(make_run, new_process, name):
    """Left in the middle of a pass, where the recorder goes on with the next batch."""
    whole = Loop(make_run(), OPTIMIZERS[name]).steps(12)
    parts = Loop(make_run(), OPTIMIZERS[name]).steps(4)
    saved = parts.save()
    new_process()
    parts.go_on(*saved).steps(4)
    again = parts.save()
    new_process()
    parts.go_on(*again).steps(4)
    assert parts.record.privacy_event == whole.record.privacy_event
    assert parts.record.privacy_events == (parts.record.privacy_event,)
    assert parts.record.get_epsilon(DELTA) == whole.record.get_epsilon(DELTA)
    assert int(parts.optimizer.iterations) == 12
    texts = [a.text for a in parts.record.assumptions if a.status is Status.DECLARED]
    for part in ("the run went on with the examples of before", "are seen by nobody else"):
        assert sum(part in text for text in texts) == 1


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (lambda: cyclic(), None),
        (lambda: dice(noise=0.0), None),
        (lambda: BlockCoordinateKerasOptimizer(0.1, 0.0, learning_rate=0.5), [[1], [0]]),
    ],
    ids=["cyclic", "dice", "blocks"],
)
def test_it_takes_the_same_steps(make_run, new_process, make, blocks, monkeypatch):
    """Without noise: batches, learning rates, the error and the order of the blocks go on."""
    if make().noise_multiplier:
        monkeypatch.setattr(tf.random.Generator, "normal", lambda self, shape, **_: tf.zeros(shape))
    whole = Loop(make_run(), make, blocks).steps(12)
    parts = Loop(make_run(), make, blocks).steps(4)
    saved = parts.save()
    new_process()
    parts.go_on(*saved).steps(8)
    for own, other in zip(parts.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)
    assert parts.record.privacy_event == whole.record.privacy_event


def test_the_noise_is_new(make_run, new_process):
    loop, ends = Loop(make_run(), cyclic).steps(6), []
    saved = loop.save()
    for _ in range(2):
        new_process()
        tf.random.set_seed(0)
        ends.append(loop.go_on(*saved).steps(1).model.get_weights()[0])
    assert not np.isclose(ends[0], ends[1]).any()


def fitted(run, **kwargs):
    run.fit(**kwargs)
    return run.callback.state(stays_private=True)


@pytest.mark.parametrize("suffix", [".keras", ".h5", ""])
def test_fit_goes_on_with_a_loaded_model(make_run, new_process, suffix):
    run = make_run()
    state = fitted(run)
    run.model.save(f"model{suffix}")
    new_process()
    again = make_run()
    again.model = tf.keras.models.load_model(f"model{suffix}")
    again.model.run_eagerly = True
    again.callback = HiddenStateCallback.from_state(state, target_delta=DELTA)
    history = again.fit(epochs=2).history["epsilon_if_released_now"]
    whole = make_run()
    whole.fit(epochs=3)
    assert again.callback.privacy_events == (whole.callback.privacy_event,)
    assert history[-1] == pytest.approx(whole.callback.get_epsilon(DELTA), rel=1e-9)
    again.fit()  # goes on as any other
    assert again.callback.privacy_event.num_steps == 24


def test_a_state_of_every_epoch_survives_a_crash(make_run, new_process):
    """An interrupted fit has no epsilon; the run goes on from the epoch before."""
    run, kept = make_run(), []

    def keep(epoch, logs):
        if epoch == 2:
            raise OSError("disk full")
        kept.append((run.callback.state(stays_private=True), run.model.get_weights()))

    with pytest.raises(OSError, match="disk full"):
        run.fit(callbacks=[callbacks.LambdaCallback(on_epoch_end=keep)], epochs=4)
    state, weights = kept[-1]
    assert state["num_batches"] == 12

    def go_on(**kwargs):
        again = make_run()
        again.model.set_weights(weights)
        again.callback = HiddenStateCallback.from_state(state, **kwargs)
        again.fit(epochs=2)
        return again.callback

    with pytest.raises(hsa.UnsupportedRunError, match="18 steps were taken"):
        go_on()
    declared = go_on(discard_later_steps=True)
    assert declared.privacy_event.num_steps == 24
    texts = [a.text for a in declared.assumptions if a.status is Status.DECLARED]
    assert sum("after step 12, where the run went on again" in text for text in texts) == 1
    new_process()
    assert go_on().privacy_event == declared.privacy_event


def test_a_record_that_is_left_behind_ends_nothing(make_run):
    """But itself: weights of the run that goes on may begin another one."""
    run = make_run()
    state = fitted(run)
    again = make_run()
    again.model.set_weights(run.model.get_weights())
    again.callback = HiddenStateCallback.from_state(state)
    again.fit()
    with pytest.raises(hsa.UnsupportedRunError, match="Another record of this process"):
        run.fit()
    second = make_run()
    second.model = again.model
    compile_with(second, run_eagerly=True)
    second.fit()
    assert [event.num_steps for event in second.callback.privacy_events] == [12, 6]


def test_a_public_state_counts_as_a_release(make_run, new_process):
    run = make_run()
    run.fit()
    state = run.callback.state()
    new_process()
    again = make_run()
    again.model.set_weights(run.model.get_weights())
    again.callback = HiddenStateCallback.from_state(state)
    again.fit()
    assert again.callback.privacy_event.release_steps == (6,)
    assert not any("are seen by nobody" in a.text for a in again.callback.assumptions)


def test_runs_before_it_stay_composed(make_run, new_process):
    run = make_run()
    run.fit()
    second = make_run()
    second.model = run.model
    compile_with(second, run_eagerly=True)
    state = fitted(second)
    new_process()
    again = make_run()
    again.model.set_weights(run.model.get_weights())
    again.callback = HiddenStateCallback.from_state(json.loads(json.dumps(state)))
    again.fit()
    first, own = again.callback.privacy_events
    assert first == attrs.evolve(run.callback.privacy_event, release_steps=first.release_steps)
    assert own.num_steps == 12


def test_a_state_holds_nothing_that_was_measured(make_run):
    run = make_run()
    state = fitted(run)
    assert sorted(state) == [
        "blocks", "declared", "earlier", "fixed", "iterations", "num_batches", "optimizer",
        "private", "relation", "run", "run_id", "schema", "texts", "units", "weights",
    ]  # fmt: skip
    assert state["private"] is None
    assert state["weights"] == [lineage.digest(v) for v in run.variables]
    loop = Loop(make_run(), dice).steps(6)
    public = loop.record._record.optimizer
    assert public.private_state().keys() == {"error"}
    state, _ = loop.save()
    assert "largest" not in json.dumps(state)


# --- what is refused ------------------------------------------------------------------------------


def test_the_error_of_dice_is_given_away_on_request_only(make_run):
    loop = Loop(make_run(), dice).steps(6)
    with pytest.raises(hsa.UnsupportedRunError, match="cannot go on without the error of DiceSGD"):
        loop.record.state(stays_private=True)
    with pytest.raises(ValueError, match="stays_private = True with include_private_state"):
        loop.record.state(include_private_state=True)
    state, weights = loop.save()
    with pytest.raises(hsa.UnsupportedRunError, match="got one without it"):
        loop.go_on({**state, "private": None}, weights)


def damaged_error(state):
    state["private"]["error"][0]["values"] = "AAAA"


def shorter_error(state):
    state["private"]["error"].pop()


def infinite_error(state):
    part = state["private"]["error"][0]
    size = int(np.prod(part["shape"]))
    values = np.full(size, np.inf, part["dtype"]).tobytes()
    part["values"] = base64.b64encode(values).decode()


@pytest.mark.parametrize("damage", [damaged_error, shorter_error, infinite_error])
def test_another_error_is_refused(make_run, damage):
    loop = Loop(make_run(), dice).steps(6)
    state, weights = loop.save()
    damage(state)
    with pytest.raises(ValueError, match=r"damaged|error like the variables"):
        loop.go_on(state, weights)


OTHERS = {
    "optimizer": (dice, "expected optimizer = CyclicDPKerasSGDOptimizer"),
    "accumulation": (lambda: cyclic(gradient_accumulation_steps=2), "expected batches"),
    "microbatches": (lambda: cyclic(num_microbatches=1), "expected batches"),
    "geometry": (lambda: cyclic(loss_geometry=None), "of another run: expected loss"),
    "projection": (lambda: cyclic(projection_radius=9.0), "another run: expected domain_diameter"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_optimizer_is_refused(make_run, name):
    loop = Loop(make_run(), cyclic).steps(6)
    saved = loop.save()
    loop.make, text = OTHERS[name]
    with pytest.raises(ValueError, match=text):
        loop.go_on(*saved)


def test_other_noise_of_blocks_is_refused(make_run):
    loop = Loop(make_run(), OPTIMIZERS["one block"]).steps(6)
    saved = loop.save()
    loop.make = lambda: BlockCoordinateKerasOptimizer(1.5, 4.0, learning_rate=0.5)
    with pytest.raises(ValueError, match=r"noise_multiplier = \[2.0\]"):
        loop.go_on(*saved)


def other_weights(loop, state, weights):
    loop.go_on(state, [w + 1e-6 for w in weights])


def other_batches(loop, state, weights):
    loop.run.data = cyclic_dataset(loop.run.x, loop.run.y, batch_size=6)
    loop.go_on(state, weights)


def fewer_examples(loop, state, weights):
    loop.run.data = cyclic_dataset(loop.run.x[:12], loop.run.y[:12], batch_size=4)
    loop.go_on(state, weights)


def an_optimizer_with_steps(loop, state, weights):
    HiddenStateRecorder.from_state(state, loop.model, loop.optimizer, loop.run.data)


def weights_moved_before_the_first_step(loop, state, weights):
    loop.go_on(state, weights)
    loop.model.set_weights([w + 1e-6 for w in weights])
    loop.steps(1)
    loop.record.get_epsilon(DELTA)


def no_state(loop, state, weights):
    loop.go_on({"schema": 1}, weights)


def another_schema(loop, state, weights):
    loop.go_on({**state, "schema": 0}, weights)


def lost_steps(loop, state, weights):
    loop.go_on({**state, "num_batches": 3}, weights)


def before_a_release(loop, state, weights):
    loop.steps(1)
    loop.record.release()
    loop.go_on(state, weights, discard_later_steps=True)


def before_a_release_of_another_process(loop, state, weights):
    loop.steps(1)
    later = loop.record.state(), loop.model.get_weights()
    lineage._live.clear()
    loop.go_on(*later)
    loop.go_on(state, weights, discard_later_steps=True)


REFUSED = {
    other_weights: "weights that the last recorded step left",
    other_batches: "expected batches",
    fewer_examples: "expected batches",
    an_optimizer_with_steps: "without steps, got one with 6",
    weights_moved_before_the_first_step: "changed outside",
    no_state: "Expected the state of a run with schema 1",
    another_schema: "Expected the state of a run with schema 1, got schema 0",
    lost_steps: "3 batches, but 6 steps of 1 batches are recorded",
    before_a_release: "weights after step 7 were released",
    before_a_release_of_another_process: "weights after step 7 were released",
}


@pytest.mark.parametrize("act", REFUSED, ids=lambda act: act.__name__)
def test_refused(make_run, act):
    loop = Loop(make_run(), cyclic).steps(6)
    with pytest.raises(ValueError, match=REFUSED[act]):
        act(loop, *loop.save())


def test_fit_goes_on_at_the_beginning_of_an_epoch_with_known_batches(make_run):
    loop = Loop(make_run(), cyclic).steps(4)
    state, weights = loop.save()
    run = make_run()
    run.model.set_weights(weights)
    run.callback = HiddenStateCallback.from_state(state)
    with pytest.raises(hsa.UnsupportedRunError, match="go on with batch 4, where the run stopped"):
        run.fit()
    state, weights = loop.steps(2).save()
    run.callback = HiddenStateCallback.from_state(state)
    with pytest.raises(hsa.UnsupportedRunError, match="got arrays"):
        run.fit(run.x, y=run.y, batch_size=4, shuffle=False)


def test_a_frozen_backbone_has_to_be_that_of_before(make_run):
    run = make_run()
    backbone = tf.keras.layers.Dense(3, trainable=False)
    run.model = tf.keras.Sequential([tf.keras.Input([4]), backbone, tf.keras.layers.Dense(1)])
    loop = Loop(run, lambda: cyclic(loss_geometry=None)).steps(6)
    state, weights = loop.save()
    loop.go_on(state, weights).steps(6)
    assert loop.record.privacy_event.num_steps == 12
    state, weights = loop.save()
    index = next(i for i, w in enumerate(weights) if w.shape == (4, 3))
    weights[index] = weights[index] + 1
    with pytest.raises(hsa.UnsupportedRunError, match="not trained as they were"):
        loop.go_on(state, weights)
