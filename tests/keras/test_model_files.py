"""Files and states: each file is a release and tells of the runs behind it, a state goes on."""

import json

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import DELTA, FEATURES, SETTINGS, SGD, STEPS, X, Y, crossentropy, fit, refused

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateUpdate,
    DiceUpdate,
    HiddenStateSequential,
    keras_api,
    lineage,
    make_private,
)

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
callbacks, layers = tf.keras.callbacks, tf.keras.layers
GEOMETRY = {"loss_geometry": hsa.LossGeometry.softmax_cross_entropy(2.0, bias=True)}
SECRET = {"stays_private": True, "include_private_state": True}
KERAS_2_ONLY = pytest.mark.skipif(keras_api.IS_KERAS_3, reason="is refused, or has no such format")


@pytest.fixture(autouse=True)
def _in_a_new_process():
    new_process()


def new_process():
    """Nothing is known but what a file tells."""
    lineage._newest.clear()


def at(hook, act):
    return callbacks.LambdaCallback(**{hook: act})


def interrupt(*_, **__):
    raise KeyboardInterrupt


# --- a run that goes on from a state is one run ---------------------------------------------------


def make(optimizer=None, **settings):
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.5, 0.25, 0.125])
    if optimizer == "dice":
        optimizer = DiceUpdate(SGD(0.5), error_l2_norm_clip=0.1)
    if isinstance(optimizer, list):  # the order of the blocks
        optimizer = BlockCoordinateUpdate(SGD(0.5), [[place] for place in optimizer])
    model = keras_models.make(optimizer or SGD(rate, weight_decay=0.1), **settings)
    model.build((None, FEATURES))
    return model


def saved(model, **kwargs):
    state = model.state(**{"stays_private": True, **kwargs})
    return json.loads(json.dumps(state)), model.get_weights()


def gone_on(state, weights, *, discard_later_steps=False, given=None, **settings):
    model = make(**settings)
    model.set_weights(weights)
    model.resume(state, discard_later_steps=discard_later_steps)
    return fit(model, **(given or {}))


RUNS = {
    "poisson": ({"batch_order": "poisson", **GEOMETRY}, {}),
    "adam": ({"optimizer": "adam"}, {}),
    "dice": ({"optimizer": "dice", "batch_order": "reshuffled", **GEOMETRY}, SECRET),
    "blocks": ({"optimizer": [1, 0]}, {}),
    "cyclic": ({**GEOMETRY}, {}),
    "reshuffled": ({"batch_order": "reshuffled", "projection_radius": 4.0, **GEOMETRY}, {}),
    "shuffled_once": ({"batch_order": "shuffled_once", **GEOMETRY}, SECRET),
}


@pytest.mark.parametrize("name", first(3, RUNS))
def test_it_is_one_run(name):
    settings, secret = RUNS[name]
    whole, parts = fit(make(**settings), epochs=3), fit(make(**settings))
    for _ in range(2):
        left = saved(parts, **secret)
        new_process()
        parts = gone_on(*left, **settings)
    assert parts.privacy_events == (whole.privacy_event,)
    assert parts.get_epsilon(DELTA) == whole.get_epsilon(DELTA)
    assert int(parts.optimizer.iterations) == 9
    texts = [a.text for a in parts.assumptions if a.status is Status.DECLARED]
    for part in ("the run went on with the examples of before", "are seen by nobody else"):
        assert sum(part in text for text in texts) == 1


def test_the_secret_order_goes_on():
    settings, secret = RUNS["shuffled_once"]
    model = fit(make(**settings))
    left = saved(model, **secret)
    new_process()
    again = gone_on(*left, **settings)
    for own, other in zip(*(batches_of_an_epoch(m) for m in (again, model)), strict=True):
        np.testing.assert_array_equal(own, other)


def batches_of_an_epoch(model):
    return [model._run.steps.plan.batch(step) for step in range(STEPS)]


def test_runs_before_it_count_where_it_goes_on():
    model = fit(make())
    model.compile(SGD(0.5), model.loss)
    before, left = fit(model).privacy_events, saved(model)
    new_process()
    events = gone_on(*left, optimizer=SGD(0.5)).privacy_events
    assert (events[0], events[1].num_steps) == (before[0], 6)


def test_noise_is_new():
    left, ends = saved(fit(make())), []
    for _ in range(2):
        new_process()
        tf.random.set_seed(0)
        ends.append(gone_on(*left).get_weights()[0])
    assert not np.isclose(*ends).any()


def test_a_loaded_model_goes_on():
    """Moments come with the file, and what the model was compiled with."""
    model = fit(make("adam"), epochs=2)
    state, moments = model.state(), [v.numpy() for v in model.optimizer.variables]
    again = through("model.keras", model)
    for own, other in zip(again.optimizer.variables, moments, strict=True):
        np.testing.assert_array_equal(own, other)
    again.resume(state)
    fit(fit(again))
    assert again.get_config()["hidden_state"] == model.get_config()["hidden_state"]
    (event,) = again.privacy_events
    assert (event.num_steps, event.release_steps) == (12, (6,))


def test_an_epoch_survives_a_crash():
    """An interrupted fit has no figure; the run goes on from the epoch before."""
    model, kept = make(), []

    def keep(epoch, logs):
        if epoch == 1:
            raise OSError("disk full")
        kept.append(saved(model))

    with pytest.raises(OSError, match="disk full"):
        fit(model, callbacks=[at("on_epoch_end", keep)], epochs=3)
    with refused("discard_later_steps"):
        gone_on(*kept[0])
    again = gone_on(*kept[0], discard_later_steps=True)
    assert again.privacy_event.num_steps == 6
    assert any("was ever seen" in a.text for a in again.assumptions)


@pytest.mark.parametrize("order", ["cyclic", "reshuffled", "poisson"])
def test_within_an_epoch(order):
    """The run goes on with the next batch, which may be drawn already."""
    model, kept, secret = make(batch_order=order), [], SECRET if order == "reshuffled" else {}

    def keep(batch, logs):
        if batch == 1:
            if secret:
                with refused("the epoch that it is in the"):
                    saved(model)
            kept.append(saved(model, **secret))

    fit(model, callbacks=[at("on_train_batch_end", keep)])
    again = gone_on(*kept[0], discard_later_steps=True, batch_order=order)
    assert again.privacy_event.num_steps == 5


def test_a_fork():
    """The run goes on in one place: no bound is about what two continuations show together."""
    model = fit(make())
    left = saved(model)
    other = gone_on(*left)
    with refused("newest state of the run, got that of step"):
        gone_on(*left)
    with refused("Another record of this process"):
        fit(model)
    with refused("Another record of this process"):
        model.get_epsilon(DELTA)
    assert other.privacy_event.num_steps == 6


def test_a_released_state_is_not_forgotten():
    model = fit(make())
    left = saved(model)
    later = saved(fit(model), stays_private=False)
    for goes_on in (False, True):  # here, and where the run went on from there
        if goes_on:
            new_process()
            gone_on(*later)
        with refused("step 6 was released"):
            gone_on(*left, discard_later_steps=True)


def test_steps_that_another_model_declares_later_were_not_declared_in_advance():
    model = gone_on(*saved(fit(make(num_steps=3))), num_steps=6)
    (found,) = [a for a in model.assumptions if a.text == "number of steps fixed in advance"]
    assert found.status is Status.DECLARED


@pytest.mark.parametrize(
    ("settings", "given", "text"),
    [
        ({}, {"batch_size": 12}, "Expected batch_size = 4"),
        ({}, {"x": X[:4], "y": Y[:4]}, "Expected examples = 12"),
        ({"batch_order": "without_replacement"}, {}, "batch_order"),
        ({"batch_order": "shuffled_once"}, {}, "got one without it"),
        ({"optimizer": "adam"}, {}, "HiddenStateModel with SGD"),
        (GEOMETRY, {}, "expected loss"),
        ({"neighboring_relation": "REPLACE_ONE"}, {}, "relation = REPLACE_SPECIAL"),
    ],
)
def test_another_run(settings, given, text):
    model = fit(make())
    with pytest.raises((hsa.UnsupportedRunError, ValueError), match=text):
        gone_on(*saved(model), given=given, **settings)
    assert fit(model).privacy_event.num_steps == 6  # nothing has happened to it


def test_other_weights_or_blocks():
    state, weights = saved(fit(make()))
    with refused("weights that the last recorded step left"):
        gone_on(state, [w + 1e-6 for w in weights])
    with pytest.raises(ValueError, match="blocks of the run so far"):
        gone_on(*saved(fit(make([0, 1]))), optimizer=[1, 0])


def test_what_a_state_needs():
    with pytest.raises(ValueError, match="Call fit"):
        make().state()
    with pytest.raises(TypeError, match="dictionary that state"):
        make().resume("state")
    model = fit(make(batch_order="shuffled_once"))
    with refused("cannot go on without the batches"):
        model.state(stays_private=True)
    with pytest.raises(ValueError, match="stays_private = True"):
        model.state(include_private_state=True)


# --- what is in a file ----------------------------------------------------------------------------


def compiled(model, optimizer=None):
    model.compile(optimizer or SGD(0.1), crossentropy())
    return model


def two_layers(optimizer=None, **settings):
    model = keras_models.make(None, [layers.Dense(2), layers.Dense(2)], **settings)
    model.build(X.shape)
    return compiled(model, optimizer(model) if callable(optimizer) else optimizer)


def through(path, model):
    model.save(path)
    new_process()
    return tf.keras.models.load_model(path)


def by_layers(model):
    return BlockCoordinateUpdate(
        SGD(0.5), lambda: [layer.trainable_variables for layer in reversed(model.layers)]
    )


MECHANISMS = {
    "sgd": lambda model: SGD(0.5, weight_decay=0.1),
    "dice": lambda model: DiceUpdate(
        SGD(0.5), error_l2_norm_clip=0.05, automatic=True, gradient_bound=100.0
    ),
    "blocks": by_layers,
    "dice, settings left out": lambda model: DiceUpdate(SGD(0.5)),
    "blocks by places": lambda model: BlockCoordinateUpdate(SGD(0.5), [[2, 3], [0, 1]]),
    "one block": lambda model: BlockCoordinateUpdate(SGD(0.5)),
}


def files():
    """Every mechanism in one format, every format with several of them; else exhaustive."""
    for number, mechanism in enumerate(MECHANISMS):
        for place, name in enumerate(("model.keras", "model.h5", "folder")):
            marks = [KERAS_2_ONLY] if place else []
            if place != number % 3:
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(name, mechanism, marks=marks)


@pytest.mark.parametrize(("name", "mechanism"), [*files()])
def test_training_goes_on_as_if_there_had_been_no_file(name, mechanism):
    """With a state; without one another run of the mechanism follows."""
    model = fit(two_layers(MECHANISMS[mechanism], l2_norm_clip=0.3, noise_multiplier=0.0))
    event, state = model.privacy_event, json.loads(json.dumps(model.state(**SECRET)))
    again = through(name, model)
    with pytest.raises(ValueError, match="Call fit"):
        again.get_epsilon(DELTA)
    own, other = again.get_config(), model.get_config()
    for config in (own, other):  # layers are Keras' business, which adds shapes when it loads them
        del config["layers"]
    assert own == other
    following = fit(tf.keras.models.load_model(name))
    assert following.privacy_events == (event, event)
    whole = fit(model)
    new_process()
    again.resume(state)
    fit(again)
    for own, other in zip(again.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)
    assert again.privacy_events == (whole.privacy_event,)


def test_a_model_that_is_compiled_by_hand_has_what_it_was_compiled_with():
    model = fit(two_layers(MECHANISMS["dice"]))
    state = model.state(**SECRET)
    model.save("model.keras")
    new_process()
    again = compiled(tf.keras.models.load_model("model.keras", compile=False), SGD(0.5))
    assert "update_rule" not in again.get_config()
    again.resume(state)
    with refused("Expected optimizer = HiddenStateModel"):
        fit(again)


def test_blocks_of_another_model_are_not_written():
    model = compiled(two_layers(), by_layers(two_layers()))
    with refused("together the trainable variables"):
        model.get_config()


@pytest.mark.skipif(not keras_api.IS_KERAS_3, reason="Keras 2 says that it reads a file")
def test_keras_3_writes_no_file_that_it_would_read_as_another_algorithm():
    with refused(r"Save as \.keras"):
        two_layers(MECHANISMS["dice"]).save("model.h5")


# --- the runs behind the weights in it ------------------------------------------------------------


def steps_of(model):
    return [event.num_steps for event in model.privacy_events]


def test_compiled_again_before_it_was_saved_and_a_fit_without_a_step():
    model = through("model.keras", compiled(fit(two_layers(), epochs=2)))
    with pytest.raises(KeyboardInterrupt):
        fit(compiled(model), callbacks=[at("on_train_begin", interrupt)])
    assert steps_of(fit(compiled(through("model.keras", model)))) == [2 * STEPS, STEPS]


def test_layers_that_a_later_run_left_alone():
    model = fit(two_layers(), epochs=2)
    model.layers[0].trainable = False
    base = through("model.keras", fit(compiled(model))).layers[0]
    other = HiddenStateSequential([base, layers.Dense(2)], **SETTINGS)
    assert steps_of(fit(compiled(other))) == [2 * STEPS, STEPS, STEPS]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_layers_of_a_fit_that_was_interrupted(hook):
    model = two_layers()
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[at(hook, interrupt)])
    with refused("interrupted"):
        fit(compiled(HiddenStateSequential([*model.layers], **SETTINGS)))


@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "best"])
def test_a_file_that_was_chosen_holds_every_epoch_that_could_be(stops):
    """The file of the first epoch would otherwise tell of that epoch only."""
    file = callbacks.ModelCheckpoint("{epoch}.keras", "val_loss", save_best_only=not stops)
    stop = [callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)] if stops else []
    model = two_layers(validation_data_is_public=True)
    fit(model, callbacks=[file, *stop], epochs=4, validation_data=(X, Y))
    assert steps_of(model) == [4 * STEPS]
    new_process()
    assert steps_of(fit(compiled(tf.keras.models.load_model("1.keras")))) == [4 * STEPS, STEPS]


# --- each is a release ----------------------------------------------------------------------------

WRITES = {
    "save": lambda model: model.save("model.keras"),
    "save_h5": lambda model: model.save("model.h5"),
    "save_weights": lambda model: model.save_weights("model.weights.h5"),
    "export": lambda model: model.export("folder"),
}


def functional():
    inputs = tf.keras.Input((FEATURES,))
    return tf.keras.Model(inputs, layers.Dense(2)(inputs))


def sequential():
    return tf.keras.Sequential([layers.Dense(2)])


def private(plain=sequential, **settings):
    given = {"batch_order": "cyclic", **GEOMETRY, **settings}
    return compiled(make_private(plain(), l2_norm_clip=1.0, noise_multiplier=2.0, **given))


def released(model):
    return list(model.privacy_event.release_steps)


@pytest.mark.parametrize(
    ("plain", "name"), [*((sequential, name) for name in WRITES), (functional, "save")]
)
def test_a_file_of_every_epoch_is_a_release(plain, name):
    model, write = private(plain), WRITES[name]
    for _ in range(2):
        write(fit(model))
    assert released(fit(model)) == [3, 6]
    epsilon = model.get_epsilon(DELTA)
    assert epsilon == hsa.LastIterateAccountant().compose(model.privacy_event).get_epsilon(DELTA)
    write(model)  # of the last iterate
    assert model.get_epsilon(DELTA) == epsilon
    assert released(fit(model)) == [3, 6, 9]


def test_files_that_stay_private():
    model = fit(private(checkpoints_stay_private=True))
    model.save_weights("model.weights.h5")
    assert released(fit(model)) == []
    listed = " ".join(a.text for a in model.assumptions)
    assert "save_weights and export wrote before the last step stay private" in listed


def test_a_state_that_stays_private_covers_the_weights_saved_with_it():
    model = fit(private())
    model.state(stays_private=True)
    for expected in ([], [6]):
        model.save_weights("model.weights.h5")
        assert released(fit(model)) == expected


def inside_of_another(given):
    given.build((None, FEATURES))
    return HiddenStateSequential([given], **SETTINGS)


def wrapped(given):
    return make_private(given, **SETTINGS)


@pytest.mark.parametrize(
    ("plain", "around"),
    [(sequential, wrapped), (functional, wrapped), (sequential, inside_of_another)],
)
def test_the_model_that_was_made_private_or_a_part_of_it_is_saved(plain, around):
    """1.113 was reported of a run whose epochs were all saved, which is 2.258."""
    given = plain()
    model = compiled(around(given))
    for _ in range(2):
        fit(model)
        given(X)
        given.save("model.keras")
    assert released(fit(model)) == [3, 6]


def test_a_part_that_is_not_trained_is_saved():
    part = tf.keras.Sequential([tf.keras.Input((FEATURES,)), layers.Dense(4)])
    part.trainable = False
    model = fit(compiled(HiddenStateSequential([part, layers.Dense(2)], **SETTINGS)))
    part.save("model.keras")
    assert released(fit(model)) == []
