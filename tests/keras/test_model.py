"""The model that owns its run: what its steps do, and that the event says so."""

import math

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import (
    AUTO,
    BATCH,
    DELTA,
    FEATURES,
    RECORDS,
    SGD,
    STEPS,
    X,
    Y,
    clipped_steps,
    crossentropy,
    fit,
    head,
    make,
    private_run,
    unit_rows,
)

import hidden_state_accountants as hsa
from hidden_state_adapters import batch_plans
from hidden_state_adapters.tf_privacy import (
    DiceUpdate,
    HiddenStateModel,
    keras_api,
    make_private,
)
from hidden_state_adapters.tf_privacy.gradients import ThroughLinearLayers

layers, callbacks = tf.keras.layers, tf.keras.callbacks
schedules = tf.keras.optimizers.schedules
EAGER = pytest.mark.usefixtures("row_by_row", "without_graphs")
WITHOUT_NOISE = {"l2_norm_clip": 0.5, "noise_multiplier": 0.0}


def built(*args, **kwargs):
    model = make(*args, **kwargs)
    model.build((None, FEATURES))
    return model


def decaying():
    return SGD(0.5, weight_decay=0.1)


def assert_same(found, expected, atol=1e-5):
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=atol)


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "compile"),
    [
        ({"batch_order": "poisson"}, {}),
        ({"batch_order": "full"}, {}),
        ({"batch_order": "poisson", "max_batch_size": 5}, {"jit_compile": True}),
        ({"batch_order": "poisson"}, {"run_eagerly": True}),
    ],
    ids=["poisson", "full", "compiled", "eager"],
)
def test_a_step_is_the_one_of_the_event(settings, compile, dealt):
    model = built(decaying(), compile=compile, **WITHOUT_NOISE, **settings)
    start = model.get_weights()
    fit(model, epochs=2)
    divisor = RECORDS if settings["batch_order"] == "full" else BATCH
    batches = [dealt[step] for step in range(2 * RECORDS // divisor)]
    assert_same(model.get_weights(), clipped_steps(*start, batches, decay=0.1, divisor=divisor))


def test_what_fills_a_batch_up_has_no_influence(monkeypatch):
    """The first example stands in every row of padding, and its gradient is not finite."""
    x = X.copy()
    x[0] = np.nan
    fixed = [[1, 2, 3], [], [4, 5, 6, 7, 8]]
    monkeypatch.setattr(
        batch_plans.SampledPlan, "_draw", lambda plan, step: np.array(fixed[step], int)
    )
    model = built(compile={"jit_compile": True}, batch_order="poisson", **WITHOUT_NOISE)
    start = model.get_weights()
    fit(model, x=x)
    assert_same(model.get_weights(), clipped_steps(*start, fixed))


@pytest.mark.parametrize("rows", [4, 1])
@EAGER
def test_batches_of_one_example(rows):
    """Keras 2 makes the graph of a Sequential model anew when it first sees another number."""
    model = make()
    fit(model, x=X[:rows], y=Y[:rows], batch_size=1, epochs=2)
    assert model.privacy_event.num_steps == 2 * rows
    assert type(model._run.clipping[0]) is ThroughLinearLayers


def test_the_noise_is_that_of_the_event():
    """Gradients of zero: what moves the weights is the noise, on the mean over b."""
    nothing = {"loss": lambda targets, outputs: 0.0 * outputs[:, 0]}
    model = built(
        SGD(1.0), [layers.Dense(4000)], compile=nothing, l2_norm_clip=0.5, noise_multiplier=3.0
    )
    start = model.get_weights()
    fit(model)
    moved = [np.ravel(a - b) for a, b in zip(model.get_weights(), start, strict=True)]
    expected = math.sqrt(STEPS) * 3.0 * 0.5 / BATCH
    assert np.std(np.concatenate(moved)) == pytest.approx(expected, rel=0.05)


@EAGER
def test_a_projection_is_of_all_variables():
    model = built(l2_norm_clip=0.5, projection_radius=0.3, **AUTO)
    model.set_weights([0.0 * w for w in model.get_weights()])
    fit(model)
    assert math.sqrt(sum((w**2).sum() for w in model.get_weights())) <= 0.3
    assert model.privacy_event.domain_diameter == 0.6


@EAGER
def test_an_average_of_the_iterates_takes_their_place():
    """As in Keras, at the end of fit: of iterates that all count it shows nothing more."""
    model = built(SGD(0.5, use_ema=True, ema_momentum=0.5))
    averages = model.get_weights()

    def average(index, logs):
        begins = keras_api.IS_KERAS_3 and index == 0  # at the first iterate
        averages[:] = [
            a + (1.0 if begins else 0.5) * (b - a)
            for a, b in zip(averages, model.get_weights(), strict=True)
        ]

    fit(model, callbacks=[callbacks.LambdaCallback(on_train_batch_end=average)])
    assert_same(model.get_weights(), averages, atol=1e-6)
    assert model.privacy_event.loss is None
    assert fit(model).privacy_event.num_steps == 2 * STEPS


@pytest.mark.parametrize(
    ("order", "draws"),
    [
        ("poisson", list(range(6))),
        ("without_replacement", list(range(6))),
        ("reshuffled", [0, 1]),
        ("shuffled_once", [0]),
    ],
)
@EAGER
def test_secret_batches_are_drawn_by_the_operating_system(order, draws, monkeypatch):
    """For every step, for every epoch, or once: nobody who knows a seed knows the batches."""
    drawn = []

    def noted(name):
        original = getattr(batch_plans.RandomKeys, name)

        def method(keys, number, *arguments):
            assert keys == batch_plans.RandomKeys()  # no seed, no secret
            drawn.append(number)
            return original(keys, number, *arguments)

        monkeypatch.setattr(batch_plans.RandomKeys, name, method)

    for name in ("subset", "permutation"):
        noted(name)
    fit(make(batch_order=order), epochs=2)
    assert list(dict.fromkeys(drawn)) == draws  # a subset may be what another one leaves out


# --- the account ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["poisson", "full", "balls_in_bins"])
@EAGER
def test_the_event_is_the_run(order):
    model = fit(make(decaying(), batch_order=order, **AUTO), epochs=2)
    event, size = model.privacy_event, RECORDS if order == "full" else BATCH
    assert event == hsa.LastIterateDpEvent(
        noise_multiplier=2.0,
        learning_rate=0.5,
        clip_norm=1.0,
        batch_size=size,
        dataset_size=RECORDS,
        num_steps=2 * RECORDS // size,
        batch_order=order,
        loss=hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True),
        weight_decay=0.1,
    )
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert model.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-9)


@EAGER
def test_a_model_that_is_compiled_again_goes_on_with_its_weights():
    model = fit(make(**AUTO))
    first = model.privacy_event
    assert model.compare().best().epsilon == pytest.approx(model.get_epsilon(DELTA), rel=1e-6)
    model.compile(SGD(0.5), crossentropy())
    with pytest.raises(ValueError, match="Call fit"):
        model.get_epsilon(DELTA)
    fit(model)
    assert model.privacy_events == (first, model.privacy_event)


def functional():
    inputs = tf.keras.Input((FEATURES,))
    return tf.keras.Model(inputs, head()(inputs))


def sequential():
    return tf.keras.Sequential([tf.keras.Input((FEATURES,)), head()])


@pytest.mark.parametrize("kind", [functional, sequential])
@EAGER
def test_a_model_becomes_private_and_is_saved(kind):
    plain = kind()
    model = make_private(plain, l2_norm_clip=0.5, noise_multiplier=2.0, **AUTO)
    np.testing.assert_array_equal(model.predict(X, verbose=0), plain.predict(X, verbose=0))
    model.compile(SGD(0.5), crossentropy())
    fit(model).save("model.keras")
    loaded = tf.keras.models.load_model("model.keras")
    assert type(loaded) is type(model)
    assert loaded.get_config()["hidden_state"] == model.get_config()["hidden_state"]
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


class Net(HiddenStateModel):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = head()

    def call(self, features):
        return self.head(features)


def test_a_class_of_ones_own():
    model = Net(l2_norm_clip=0.5, noise_multiplier=2.0, **AUTO)
    model.compile(SGD(0.5), crossentropy(), metrics=["accuracy"])
    fit(model, validation_data=(X, Y))
    assert set(model.history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert 0 < model.get_epsilon(DELTA) < math.inf
    with pytest.raises(TypeError, match="inherit from HiddenStateModel"):
        make_private(model, l2_norm_clip=0.5, noise_multiplier=2.0)


@EAGER
def test_an_epoch_shows_the_loss_of_its_steps_beside_that_of_validation_data():
    """Keras 2 showed its own mean loss, 0."""
    alone, shown = (
        fit(make(**WITHOUT_NOISE), **more).history.history
        for more in ({}, {"validation_data": (X[:5], Y[:5])})
    )
    assert shown["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert shown["loss"][0] > 0.1
    assert abs(shown["val_loss"][0] - shown["loss"][0]) > 1e-3


def statuses(model, text):
    return [a.status.value for a in model.assumptions if text in a.text]


@EAGER
def test_what_was_fixed_in_advance():
    """The only call of fit says the number of steps, and Keras' schedule the learning rates."""
    model = fit(make(SGD(schedules.ExponentialDecay(0.5, 3, 0.9)), **AUTO), epochs=2)
    for text in (
        "only call of fit was asked for",
        "the compiled ExponentialDecay",
        "constant noise, clip norm, decay",
    ):
        assert statuses(model, text) == ["checked"]
    fit(model)
    assert statuses(model, "number of steps fixed in advance") == ["declared"]
    assert statuses(model, "the number of calls of fit was fixed in advance") == ["declared"]
    model = fit(make(num_steps=2 * STEPS, **AUTO))
    assert statuses(model, "training ends after step 3 of the 6") == ["declared"]
    fit(model)
    assert statuses(model, "all of the 6 steps declared in advance") == ["checked"]
    before = model.get_epsilon(DELTA)
    with pytest.raises(hsa.UnsupportedRunError, match="6 so far and 3 more"):
        fit(model)
    assert model.get_epsilon(DELTA) == before


@pytest.mark.parametrize("is_dice", [False, True])
@EAGER
def test_noise_is_found(is_dice):
    """Learning rates are read off the schedule, the number of steps off fit."""
    optimizer = SGD(schedules.ExponentialDecay(0.5, 3, 0.9), weight_decay=0.2)
    if is_dice:
        optimizer = DiceUpdate("adam", error_l2_norm_clip=0.1)
    model = make(optimizer, noise_multiplier=None, target_delta=DELTA, **AUTO)
    assert model.noise_multiplier is None
    fit(model, epochs=2, target_epsilon=3.0)
    assert 3.0 * (1 - 1e-3) <= model.get_epsilon(DELTA) <= 3.0
    assert is_dice or model.privacy_event.noise_multiplier == model.noise_multiplier
    assert model.get_config()["hidden_state"]["noise_multiplier"] == model.noise_multiplier
    fit(model)  # goes on with it
    assert model.get_epsilon(DELTA) > 3.0
    with pytest.raises(hsa.UnsupportedRunError, match="in the first call of fit"):
        fit(model, target_epsilon=9.0)


@EAGER
def test_noise_is_found_for_releases_and_runs_before():
    """Files of every epoch count, and so does what the weights show already."""
    model = make(noise_multiplier=None, target_delta=DELTA, **AUTO)
    files = callbacks.ModelCheckpoint("{epoch}.weights.h5", save_weights_only=True)
    found = []
    for epsilon, more in ((5.0, []), (9.0, [files])):
        model.compile(decaying(), crossentropy())
        fit(model, epochs=2, target_epsilon=epsilon, callbacks=more)
        assert epsilon * (1 - 1e-3) <= model.get_epsilon(DELTA) <= epsilon
        found.append(model.noise_multiplier)
    assert model.privacy_event.release_steps == (STEPS,)  # and the last one
    assert not math.isclose(*found)
    model.compile(decaying(), crossentropy())
    with pytest.raises(ValueError, match="what the runs before spent"):
        fit(model, target_epsilon=8.0)


# --- the data -------------------------------------------------------------------------------------


def single(*parts):
    return tf.data.Dataset.from_tensor_slices(parts).shuffle(RECORDS)


def batched(*parts):
    return single(*parts).batch(BATCH).prefetch(1)


class Batches(tf.keras.utils.Sequence):
    """Batches that are other ones in every epoch."""

    def __init__(self, *parts):
        self.parts, self.order = parts, np.arange(RECORDS)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return tuple(part[rows] for part in self.parts)

    def on_epoch_end(self):
        self.order = np.zeros(RECORDS, int)


def generated(*parts):
    source = Batches(*parts)
    yield from (source[index] for index in range(STEPS))


@pytest.mark.parametrize("parts", [(X, Y), (X, Y, np.linspace(1, 2, RECORDS))])
@pytest.mark.parametrize("source", [single, batched, Batches, generated])
@EAGER
def test_examples_are_read_once(source, parts):
    """Batches are taken apart, and shuffles do not matter; weights may come with them."""
    model, given = make(), source(*parts)
    for again in (given, source(*parts) if source is generated else given):
        size = BATCH if source is single else None
        fit(model, x=again, y=None, batch_size=size, steps_per_epoch=STEPS)
    event, held = model.privacy_event, model._run._examples
    assert (event.dataset_size, event.batch_size, event.num_steps) == (RECORDS, BATCH, 2 * STEPS)
    found = [held.x.numpy(), held.y.numpy(), *([held.weights] if len(parts) == 3 else [])]
    rows, expected = (
        {tuple(x): rest for x, *rest in zip(*of, strict=True)} for of in (found, parts)
    )
    assert rows == expected


# --- several steps before the host looks ----------------------------------------------------------

PERIOD = 12  # batches of two
MANY = dict(zip("xy", unit_rows(2 * PERIOD, FEATURES, 2), strict=True))
TWO = {**MANY, "batch_size": 2}


class Seen(callbacks.Callback):
    """The calls after a batch, and how many steps were recorded then."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append((batch, self.model.privacy_event.num_steps))


@pytest.mark.parametrize("given", [1, 5, None])
def test_every_step_is_recorded(given):
    """Where a callback waits for batches and nobody says how many, after every step."""
    rate, seen = schedules.PiecewiseConstantDecay([6], [0.5, 0.25]), Seen()
    model = make(SGD(rate), compile={"steps_per_execution": given})
    fit(model, epochs=2, callbacks=[seen], **TWO)
    event, size = model.privacy_event, given or 1
    assert list(event.per_step("learning_rate")) == [0.5] * 7 + [0.25] * (2 * PERIOD - 7)
    ends = [min(end, PERIOD) for end in range(size, PERIOD + size, size)]
    assert seen.calls == [(end - 1, epoch * PERIOD + end) for epoch in range(2) for end in ends]


def test_without_them_several_steps_are_made_at_once(monkeypatch):
    """As many as take a moment, an endless one in all tests; the next fit knows how many."""
    calls = []
    record = callbacks.CallbackList.on_train_batch_end

    def noted(callbacks, batch, logs=None):
        calls.append(batch)
        return record(callbacks, batch, logs)

    monkeypatch.setattr(callbacks.CallbackList, "on_train_batch_end", noted)
    together = make(**WITHOUT_NOISE)
    fit(together, epochs=2, validation_data=(X, Y), **TWO)
    fit(together, **TWO)
    assert calls == [0, 8, 11, 11, 11]
    alone = make(compile={"steps_per_execution": 1}, **WITHOUT_NOISE)
    fit(alone, epochs=3, **TWO)
    assert_same(together.get_weights(), alone.get_weights(), atol=1e-6)
    run = private_run(**WITHOUT_NOISE, **TWO)
    shown = run.train(3, verbose=False)
    assert run.pace > 1
    assert_same(run.record.model.get_weights(), alone.get_weights(), atol=1e-6)
    np.testing.assert_allclose(shown, alone.history.history["loss"], rtol=1e-5)


def test_after_a_refused_step_none_is_taken():
    """Batches 0, 1, 2 are fine, the others would be as well."""
    x = MANY["x"].copy()
    x[6] *= 100
    declared = hsa.LossGeometry.convex(1e6, lipschitz=20.0)
    model = make(compile={"steps_per_execution": PERIOD}, loss_geometry=declared, **WITHOUT_NOISE)
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 4 ends the run.*is longer"):
        fit(model, **{**TWO, "x": x})
    alone = fit(make(**WITHOUT_NOISE), x=x[:8], y=MANY["y"][:8], batch_size=2)
    assert_same(model.get_weights(), alone.get_weights(), atol=1e-6)


class Moves(layers.Layer):
    """Changes the weights of another layer in a forward pass of training."""

    def __init__(self, own):
        super().__init__()
        self._own = [own]

    def call(self, features, training=None):
        if training:
            kernel = self._own[0].kernel
            kernel.assign(kernel + 1e-7)
        return features


def test_weights_that_change_between_two_steps_of_one_execution_are_found():
    own = head()
    own.build((None, FEATURES))
    model = make(stack=[Moves(own), own], compile={"steps_per_execution": PERIOD})
    with pytest.raises(hsa.UnsupportedRunError):
        fit(model, **TWO)
