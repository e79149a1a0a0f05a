"""EarlyStopping by public data: what it looks at is released, and what it did not train counts."""

import attrs
import keras_models
import numpy as np
import pytest
from cases import first
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import AUTO, DELTA, SGD, STEPS, X, Y

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing.linear_losses import LinearLosses
from hidden_state_adapters.tf_privacy import BlockCoordinateUpdate

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
callbacks, EPOCHS = tf.keras.callbacks, 5
RELEASES = tuple(range(STEPS, EPOCHS * STEPS, STEPS))


def make(optimizer=None, *, public=True, **settings):
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.9)
    optimizer = optimizer or SGD(schedule, weight_decay=0.2)
    given = {"l2_norm_clip": 2.0, "validation_data_is_public": public, **settings}
    model = keras_models.make(optimizer, **given)
    model.build(X.shape)
    return model


def fit(model, *more, **kwargs):
    given = {"epochs": EPOCHS, "callbacks": list(more), "validation_data": (X, Y), **kwargs}
    return keras_models.fit(model, **given).history.history


def stops(**kwargs):
    """After the second epoch, whatever is seen."""
    settings = {"monitor": "val_loss", "patience": 1, "min_delta": 100.0, **kwargs}
    return callbacks.EarlyStopping(**settings)


def files(name="{epoch}", **kwargs):
    return callbacks.ModelCheckpoint(f"{name}.weights.h5", save_weights_only=True, **kwargs)


def move(model):
    model.layers[0].kernel.assign_add(tf.ones_like(model.layers[0].kernel))


def same(epsilon):
    return pytest.approx(epsilon, rel=1e-9)


RUNS = {
    "cyclic": (None, AUTO),
    "poisson": (None, {"batch_order": "poisson", **AUTO}),
    "adam": ("adam", {"batch_order": "reshuffled"}),
}


@pytest.mark.parametrize("name", first(2, RUNS))
def test_all_epochs_count(name):
    """As if all had been trained, and every one of them had been shown."""
    optimizer, settings = RUNS[name]
    model, whole = make(optimizer, target_delta=DELTA, **settings), make(optimizer, **settings)
    shown = fit(model, stops())["epsilon_if_released_now"]
    fit(whole, files())
    assert model.privacy_event == whole.privacy_event
    assert model.privacy_event.release_steps == RELEASES
    epsilon = whole.get_epsilon(DELTA)
    assert shown == [same(epsilon)] * 2
    assert model.get_epsilon(DELTA) == same(epsilon)
    assert any("EarlyStopping chose" in a.text for a in model.assumptions)


def test_an_attack_on_what_it_saw():
    """The iterates of all epochs, of which decay would hide the first ones, show more."""
    model = make(SGD(0.5, weight_decay=0.9), **AUTO)
    fit(model, stops())
    event, relation = model.privacy_event, NeighboringRelation.REPLACE_SPECIAL

    def epsilon(**changes):
        accountant = hsa.LastIterateAccountant(relation)
        return accountant.compose(attrs.evolve(event, **changes)).get_epsilon(DELTA)

    found = LinearLosses().evidence(event, relation, lambda text: None).epsilon(DELTA)
    assert epsilon(release_steps=()) < 0.6 * found
    assert epsilon(num_steps=6, release_steps=(3,)) < 0.8 * found
    assert found <= model.get_epsilon(DELTA)


def test_the_best_file_is_kept():
    model = make(target_delta=DELTA, **AUTO)
    shown = fit(model, files("best", save_best_only=True))["epsilon_if_released_now"]
    assert shown == [same(model.get_epsilon(DELTA))] * EPOCHS
    assert model.privacy_event.release_steps == RELEASES


def test_weights_that_come_back():
    """restore_best_weights puts a released iterate in, which is the model then."""
    model, seen = make(**AUTO), []
    note = callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(model.get_weights()))
    fit(model, note, stops(restore_best_weights=True))
    for own, other in zip(model.get_weights(), seen[0], strict=True):
        np.testing.assert_array_equal(own, other)
    assert len(seen) == 2
    assert 0 < model.get_epsilon(DELTA) < np.inf
    move(model)
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        model.get_epsilon(DELTA)


def test_other_weights_that_are_put_in_when_it_stops():
    """Only an iterate that was shown may come back."""
    model = make(**AUTO)
    act = callbacks.LambdaCallback(on_epoch_end=lambda *_: model.stop_training and move(model))
    fit(model, stops(), act)
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        model.get_epsilon(DELTA)


def test_a_run_is_over_once_it_was_stopped():
    """Before an epoch ends its release is counted already."""
    model, found = make(**AUTO), []

    def ask(batch, logs):
        found.append(model.get_epsilon(DELTA))
        with pytest.raises(hsa.UnsupportedRunError, match="do not go on elsewhere"):
            model.state()

    fit(model, callbacks.LambdaCallback(on_train_batch_end=ask), stops(patience=9), epochs=2)
    assert found == [same(model.get_epsilon(DELTA))] * 2 * STEPS
    model.state()
    fit(model, stops())
    event = model.privacy_event
    assert event.num_steps == 7 * STEPS
    assert event.release_steps == tuple(range(STEPS, 7 * STEPS, STEPS))
    with pytest.raises(hsa.UnsupportedRunError, match="that EarlyStopping has not stopped"):
        fit(model)
    with pytest.raises(hsa.UnsupportedRunError, match="do not go on elsewhere"):
        model.state()
    model.compile(SGD(0.5), model.loss)
    fit(model, epochs=1)
    assert model.privacy_events[0] == event


@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_target_is_met_with_all_epochs(has_blocks):
    """An event of blocks knows no releases, and is accounted by composition."""
    model = make(BlockCoordinateUpdate(SGD(0.1)) if has_blocks else None, noise_multiplier=None,
                 **AUTO)  # fmt: skip
    fit(model, stops(), target_epsilon=5.0, target_delta=DELTA)
    assert 5.0 * (1 - 1e-3) <= model.get_epsilon(DELTA) <= 5.0


class Mine(callbacks.EarlyStopping):
    pass


class Stops(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@pytest.mark.parametrize(
    ("more", "arguments", "text"),
    [
        ([stops()], {"public": False}, "validation_data_is_public=True"),
        ([stops(monitor="loss")], {}, "chooses the model by a metric"),
        ([stops()], {"validation_data": None}, "chooses the model by a metric"),
        ([Mine("val_loss")], {}, "got Mine"),
        ([files(save_best_only=True, monitor="loss")], {}, "metric"),
        ([callbacks.ReduceLROnPlateau()], {}, "fixed in advance, got ReduceLROnPlateau"),
        ([stops(patience=9), Stops()], {}, "stopped early"),
    ],
    ids=["private", "training loss", "no data", "own", "best by loss", "rates", "other"],
)
def test_refusals(more, arguments, text):
    model = make(public=arguments.pop("public", True))
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        fit(model, *more, **arguments)
    with pytest.raises((hsa.UnsupportedRunError, ValueError)):
        model.get_epsilon(DELTA)
