"""A run of a model that goes on from a state, in another process or this one, is one run."""

import json

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import DELTA, FEATURES, X, Y, fit

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy import BlockCoordinateUpdate, DiceUpdate, lineage

optimizers, callbacks = tf.keras.optimizers, tf.keras.callbacks
GEOMETRY = {"loss_geometry": hsa.LossGeometry.softmax_cross_entropy(2.0, bias=True)}
SECRET = {"stays_private": True, "include_private_state": True}


@pytest.fixture(autouse=True)
def new_process(row_by_row, without_graphs):
    """Forgets what the process knows, as a new one would."""

    def forget():
        lineage._newest.clear()

    forget()
    return forget


def rate():
    return optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.5, 0.25, 0.125])


def make(*, optimizer=None, **kwargs):
    if optimizer == "dice":
        optimizer = DiceUpdate(optimizers.SGD(0.5), error_l2_norm_clip=0.1)
    if optimizer == "blocks":
        optimizer = BlockCoordinateUpdate(
            optimizers.SGD(0.5), lambda: [[v] for v in model.trainable_variables]
        )
    optimizer = optimizer or optimizers.SGD(rate(), weight_decay=0.1)
    model = keras_models.make(optimizer, compile={"run_eagerly": True}, **kwargs)
    model.build((None, FEATURES))
    return model


def saved(model, **kwargs):
    state = model.state(**{"stays_private": True, **kwargs})
    return json.loads(json.dumps(state)), model.get_weights()


def gone_on(state, weights, *, discard_later_steps=False, epochs=1, **kwargs):
    model = make(**kwargs)
    model.set_weights(weights)
    model.resume(state, discard_later_steps=discard_later_steps)
    return fit(model, epochs=epochs)


RUNS = {
    "poisson": ({"batch_order": "poisson", **GEOMETRY}, {}),
    "adam": ({"optimizer": "adam"}, {}),
    "dice": ({"optimizer": "dice", "batch_order": "reshuffled", **GEOMETRY}, SECRET),
    "blocks": ({"optimizer": "blocks"}, {}),
    "cyclic": ({**GEOMETRY}, {}),
    "reshuffled": ({"batch_order": "reshuffled", "projection_radius": 4.0, **GEOMETRY}, {}),
    "shuffled_once": ({"batch_order": "shuffled_once", **GEOMETRY}, SECRET),
}


@pytest.mark.parametrize("name", first(3, RUNS))
def test_it_is_one_run(name, new_process):
    kwargs, secret = RUNS[name]
    whole = fit(make(**kwargs), epochs=3)
    parts = fit(make(**kwargs))
    for _ in range(2):
        left = saved(parts, **secret)
        new_process()
        parts = gone_on(*left, **kwargs)
    assert parts.privacy_events == (whole.privacy_event,)
    assert parts.get_epsilon(DELTA) == whole.get_epsilon(DELTA)
    assert int(parts.optimizer.iterations) == 9
    texts = [a.text for a in parts.assumptions if a.status is Status.DECLARED]
    for part in ("the run went on with the examples of before", "are seen by nobody else"):
        assert sum(part in text for text in texts) == 1


def test_noise_and_random_batches_are_new(monkeypatch, new_process):
    dealt, deal = [], BatchPlan.batch

    def noted(plan, step):
        dealt.append((step, tuple(batch := deal(plan, step))))
        return batch

    x, y = np.linspace(-1, 1, 96 * FEATURES).reshape(96, FEATURES), np.tile(Y, 8)
    left = saved(fit(make(batch_order="poisson"), x=x, y=y, batch_size=48))
    monkeypatch.setattr(BatchPlan, "batch", noted)
    ends = []
    for _ in range(2):
        new_process()
        tf.random.set_seed(0)
        model = make(batch_order="poisson")
        model.set_weights(left[1])
        model.resume(left[0])
        ends.append(fit(model, x=x, y=y, batch_size=48).get_weights()[0])
    assert not np.isclose(*ends).any()
    assert {step for step, _ in dealt} == {2, 3}
    assert len({batch for step, batch in dealt if step == 2}) == 2


def test_a_loaded_model_goes_on(tmp_path, new_process):
    """Moments come with the file, and what the model was compiled with."""
    kwargs = {"optimizer": "adam"}
    model = fit(make(**kwargs), epochs=2)
    state = model.state()
    model.save(tmp_path / "model.keras")
    moments = [v.numpy() for v in model.optimizer.variables]
    new_process()
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    for own, other in zip(again.optimizer.variables, moments, strict=True):
        np.testing.assert_array_equal(own, other)
    again.resume(state)
    fit(fit(again))
    assert again.get_config()["hidden_state"] == model.get_config()["hidden_state"]
    (event,) = again.privacy_events
    assert (event.num_steps, event.release_steps) == (12, (6,))


def test_an_epoch_survives_a_crash(new_process):
    """An interrupted fit has no figure; the run goes on from the epoch before."""
    model, kept = make(), []

    def keep(epoch, logs):
        if epoch == 1:
            raise OSError("disk full")
        kept.append(saved(model))

    with pytest.raises(OSError, match="disk full"):
        fit(model, callbacks=[callbacks.LambdaCallback(on_epoch_end=keep)], epochs=3)
    with pytest.raises(hsa.UnsupportedRunError, match="discard_later_steps"):
        gone_on(*kept[0])
    again = gone_on(*kept[0], discard_later_steps=True)
    assert again.privacy_event.num_steps == 6
    assert any("was ever seen" in a.text for a in again.assumptions)


def test_a_fork():
    """The run goes on in one place: no bound is about what two continuations show together."""
    model = fit(make())
    left = saved(model)
    first = gone_on(*left)
    with pytest.raises(hsa.UnsupportedRunError, match="newest state of the run, got that of step"):
        gone_on(*left)
    with pytest.raises(hsa.UnsupportedRunError, match="Another record of this process"):
        fit(model)
    with pytest.raises(hsa.UnsupportedRunError):
        model.get_epsilon(DELTA)
    assert first.privacy_event.num_steps == 6


def test_a_released_state_is_not_forgotten():
    model = fit(make())
    left = saved(model)
    fit(model)
    model.state()  # counts as released
    with pytest.raises(hsa.UnsupportedRunError, match="step 6 was released"):
        gone_on(*left, discard_later_steps=True)


def write_weights(model):
    model.layers[0].kernel.assign_add(tf.ones_like(model.layers[0].kernel))


OTHERS = {
    "weights": ({"change": write_weights}, {}, "weights that the last recorded step left"),
    "batch size": ({}, {"batch_size": 12}, "Expected batch_size = 4"),
    "sampled order": ({"batch_order": "without_replacement"}, {}, "batch_order"),
    "secret order": ({"batch_order": "shuffled_once"}, {}, "got one without it"),
    "update": ({"optimizer": "adam"}, {}, "HiddenStateModel with SGD"),
    "geometry": (GEOMETRY, {}, "expected loss"),
    "data": ({}, {"x": X[:4], "y": Y[:4]}, "Expected examples = 12"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run(name):
    settings, arguments, text = OTHERS[name]
    change = settings.get("change", lambda model: None)
    settings = {key: value for key, value in settings.items() if key != "change"}
    model = fit(make())
    state, weights = saved(model)
    other = make(**settings)
    other.set_weights(weights)
    change(other)
    other.resume(state)
    with pytest.raises((hsa.UnsupportedRunError, ValueError), match=text):
        fit(other, **arguments)
    assert fit(model).privacy_event.num_steps == 6  # nothing has happened to it


def test_what_a_state_needs():
    with pytest.raises(ValueError, match="Call fit"):
        make().state()
    with pytest.raises(TypeError, match="dictionary that state"):
        make().resume("state")
    with pytest.raises(hsa.UnsupportedRunError, match="neighboring_relation = REPLACE_SPECIAL"):
        gone_on(*saved(fit(make())), neighboring_relation="REPLACE_ONE")
    model = fit(make(batch_order="shuffled_once"))
    with pytest.raises(hsa.UnsupportedRunError, match="cannot go on without the batches"):
        model.state(stays_private=True)
    with pytest.raises(ValueError, match="stays_private = True"):
        model.state(include_private_state=True)


@pytest.mark.parametrize("order", ["cyclic", "reshuffled", "poisson"])
def test_within_an_epoch(order):
    """The run goes on with the next batch, which may be drawn already."""
    model, kept, secret = make(batch_order=order), [], SECRET if order == "reshuffled" else {}

    def keep(batch, logs):
        if batch == 1:
            if secret:
                with pytest.raises(hsa.UnsupportedRunError, match="the epoch that it is in the"):
                    saved(model)
            kept.append(saved(model, **secret))

    fit(model, callbacks=[callbacks.LambdaCallback(on_train_batch_end=keep)])
    again = gone_on(*kept[0], discard_later_steps=True, batch_order=order)
    assert again.privacy_event.num_steps == 5


def test_steps_that_another_model_declares_later_were_not_declared_in_advance(new_process):
    left = saved(fit(make(num_steps=3)))
    new_process()
    model = gone_on(*left, num_steps=6)
    (found,) = [a for a in model.assumptions if a.text == "number of steps fixed in advance"]
    assert found.status is Status.DECLARED
