"""EarlyStopping by public data: what it looks at is released, and what it did not train counts."""

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import AUTO, DELTA, SGD, STEPS, X, Y

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import BlockCoordinateUpdate

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
callbacks, EPOCHS = tf.keras.callbacks, 5


def make(optimizer=None, *, public=True, **settings):
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.9)
    optimizer = optimizer or SGD(schedule, weight_decay=0.2)
    given = {"l2_norm_clip": 2.0, "validation_data_is_public": public, **settings}
    model = keras_models.make(optimizer, **given)
    model.build(X.shape)
    return model


def fit(model, *more, **kwargs):
    given = {"epochs": EPOCHS, "callbacks": list(more), "validation_data": (X, Y), **kwargs}
    return keras_models.fit(model, **given).history


def stops(**kwargs):
    """After the second epoch, whatever is seen."""
    settings = {"monitor": "val_loss", "patience": 1, "min_delta": 100.0, **kwargs}
    return callbacks.EarlyStopping(**settings)


RUNS = {
    "cyclic": (None, AUTO),
    "poisson": (None, {"batch_order": "poisson", **AUTO}),
    "adam": ("adam", {"batch_order": "reshuffled"}),
}


def test_callbacks_that_end_the_data():
    """Keras takes a StopIteration for the end of the data, and fit returns."""

    def stop(*_, **__):
        raise StopIteration

    model = make(**AUTO)
    with pytest.raises((hsa.UnsupportedRunError, StopIteration)):
        fit(model, callbacks.LambdaCallback(on_train_batch_end=stop))
    with pytest.raises(hsa.UnsupportedRunError):
        model.get_epsilon(DELTA)


@pytest.mark.parametrize("name", first(2, RUNS))
def test_all_epochs_count(name, tmp_path):
    """As if all had been trained, and every one of them had been shown."""
    optimizer, settings = RUNS[name]
    model = make(optimizer, target_delta=DELTA, **settings)
    shown = fit(model, stops()).history["epsilon_if_released_now"]
    assert len(shown) == 2
    whole = make(optimizer, **settings)
    saved = callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True)
    fit(whole, saved)
    assert model.privacy_event == whole.privacy_event
    assert model.privacy_event.release_steps == tuple(range(STEPS, EPOCHS * STEPS, STEPS))
    epsilon = whole.get_epsilon(DELTA)
    assert shown == [pytest.approx(epsilon, rel=1e-9)] * 2
    assert model.get_epsilon(DELTA) == pytest.approx(epsilon, rel=1e-9)
    assert any("EarlyStopping chose" in a.text for a in model.assumptions)


def test_weights_that_come_back():
    """restore_best_weights puts a released iterate in, which is the model then."""
    model, seen = make(**AUTO), []
    note = callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(model.get_weights()))
    fit(model, note, stops(restore_best_weights=True))
    for own, other in zip(model.get_weights(), seen[0], strict=True):
        np.testing.assert_array_equal(own, other)
    assert len(seen) == 2
    assert 0 < model.get_epsilon(DELTA) < np.inf
    model.layers[0].kernel.assign_add(tf.ones_like(model.layers[0].kernel))
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        model.get_epsilon(DELTA)


def test_other_weights_that_are_put_in_when_it_stops():
    """Only an iterate that was shown may come back."""
    model = make(**AUTO)

    def put(epoch, logs):
        model.layers[0].kernel.assign_add(tf.ones_like(model.layers[0].kernel))

    fit(model, stops(), Late(put))
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        model.get_epsilon(DELTA)


class Late(callbacks.Callback):
    """Acts after EarlyStopping, once it has stopped."""

    def __init__(self, act):
        super().__init__()
        self.on_epoch_end = lambda epoch, logs: act(epoch, logs) if self.model.stop_training else 0


def test_a_run_that_was_stopped_is_over():
    model = make(**AUTO)
    fit(model, stops())
    first = model.privacy_event
    with pytest.raises(hsa.UnsupportedRunError, match="that EarlyStopping has not stopped"):
        fit(model)
    with pytest.raises(hsa.UnsupportedRunError, match="do not go on elsewhere"):
        model.state()
    assert model.privacy_event == first
    model.compile(SGD(0.5), model.loss)
    fit(model, epochs=1)
    assert model.privacy_events[0] == first


def test_a_run_that_was_not_stopped_goes_on():
    model = make(**AUTO)
    fit(model, stops(patience=9), epochs=2)
    fit(model, epochs=1)
    assert model.privacy_event.num_steps == 3 * STEPS
    assert model.privacy_event.release_steps == (STEPS, 2 * STEPS)
    model.state()


def test_figures_within_an_epoch():
    """Before the epoch ends its release is counted already."""
    model, found = make(**AUTO), []

    def ask(batch, logs):
        found.append(model.get_epsilon(DELTA))
        with pytest.raises(hsa.UnsupportedRunError, match="do not go on elsewhere"):
            model.state()

    fit(model, callbacks.LambdaCallback(on_train_batch_end=ask), stops(), epochs=3)
    assert len(found) == 2 * STEPS
    assert found == [pytest.approx(model.get_epsilon(DELTA), rel=1e-9)] * len(found)


def test_a_target_is_met_with_all_epochs():
    model = make(noise_multiplier=None, **AUTO)
    fit(model, stops(), target_epsilon=5.0, target_delta=DELTA)
    assert 5.0 * (1 - 1e-3) <= model.get_epsilon(DELTA) <= 5.0


def test_a_target_whose_event_knows_no_releases():
    """They are accounted by composition, which the noise is found for."""
    loss = {"loss_geometry": hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)}
    model = make(BlockCoordinateUpdate(SGD(0.1)), noise_multiplier=None, **loss)
    fit(model, stops(), target_epsilon=5.0, target_delta=DELTA)
    assert 5.0 * (1 - 1e-3) <= model.get_epsilon(DELTA) <= 5.0


def test_the_best_file_is_kept(tmp_path):
    model = make(target_delta=DELTA, **AUTO)
    path = str(tmp_path / "best.weights.h5")
    best = callbacks.ModelCheckpoint(path, save_best_only=True, save_weights_only=True)
    shown = fit(model, best).history["epsilon_if_released_now"]
    assert shown == [pytest.approx(model.get_epsilon(DELTA), rel=1e-9)] * EPOCHS
    assert model.privacy_event.release_steps == tuple(range(STEPS, EPOCHS * STEPS, STEPS))


@pytest.mark.parametrize(
    ("callback", "arguments", "text"),
    [
        (stops, {"public": False}, "validation_data_is_public=True"),
        (lambda: stops(monitor="loss"), {}, "chooses the model by a metric"),
        (stops, {"validation_data": None}, "chooses the model by a metric"),
        (lambda: type("Mine", (callbacks.EarlyStopping,), {})("val_loss"), {}, "got Mine"),
        (
            lambda: callbacks.ModelCheckpoint("a.keras", save_best_only=True, monitor="loss"),
            {},
            "metric",
        ),
        (callbacks.ReduceLROnPlateau, {}, "fixed in advance, got ReduceLROnPlateau"),
    ],
    ids=[
        "private",
        "training loss",
        "no data",
        "own",
        "best by loss",
        "rates",
    ],
)
def test_refusals(callback, arguments, text):
    model = make(public=arguments.get("public", True))
    given = {k: v for k, v in arguments.items() if k != "public"}
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        fit(model, callback(), **given)


def test_a_run_that_something_else_stops():
    model = make(**AUTO)

    def stop(epoch, logs):
        model.stop_training = True

    with pytest.raises(hsa.UnsupportedRunError, match="stopped early"):
        fit(model, stops(patience=9), callbacks.LambdaCallback(on_epoch_end=stop))
    with pytest.raises(hsa.UnsupportedRunError):
        model.get_epsilon(DELTA)
