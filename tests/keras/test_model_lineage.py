"""What the file of a model that owns its run tells of the runs behind its weights."""

import pytest

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import SGD, STEPS, X, Y

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import HiddenStateSequential, lineage

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
callbacks, layers, EPOCHS = tf.keras.callbacks, tf.keras.layers, 4


@pytest.fixture(autouse=True)
def _in_a_new_process():
    new_process()


def new_process():
    """Nothing is known but what a file tells."""
    lineage._newest.clear()


def compiled(model):
    model.compile(SGD(0.1), keras_models.crossentropy())
    return model


def make(**settings):
    model = keras_models.make(SGD(0.1), [layers.Dense(2), layers.Dense(2)], **settings)
    model.build(X.shape)
    return model


def fit(model, *more, **kwargs):
    return keras_models.fit(model, callbacks=list(more), **kwargs)


def loaded(path):
    new_process()
    return compiled(tf.keras.models.load_model(path))


def steps_of(model):
    return [event.num_steps for event in model.privacy_events]


def interrupt(hook):
    def stop(*_, **__):
        raise KeyboardInterrupt

    return callbacks.LambdaCallback(**{hook: stop})


def test_a_model_that_was_compiled_again_before_it_was_saved(tmp_path):
    path = str(tmp_path / "model.keras")
    compiled(fit(make(), epochs=2)).save(path)
    assert steps_of(fit(loaded(path))) == [2 * STEPS, STEPS]


def test_a_fit_without_a_step_forgets_nothing(tmp_path):
    path = str(tmp_path / "model.keras")
    fit(make()).save(path)
    model = loaded(path)
    with pytest.raises(KeyboardInterrupt):
        fit(model, interrupt("on_train_begin"))
    model.save(path)
    assert steps_of(fit(loaded(path))) == [STEPS, STEPS]


def test_layers_that_a_later_run_left_alone(tmp_path):
    path, model = str(tmp_path / "model.keras"), fit(make(), epochs=2)
    model.layers[0].trainable = False
    fit(compiled(model)).save(path)
    base = loaded(path).layers[0]
    other = HiddenStateSequential([base, layers.Dense(2)], l2_norm_clip=1.0, noise_multiplier=2.0)
    assert steps_of(fit(compiled(other))) == [2 * STEPS, STEPS, STEPS]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_layers_of_a_fit_that_was_interrupted(hook):
    model = make()
    with pytest.raises(KeyboardInterrupt):
        fit(model, interrupt(hook))
    with pytest.raises(hsa.UnsupportedRunError, match="interrupted"):
        model.get_epsilon(1e-5)
    other = HiddenStateSequential([*model.layers], l2_norm_clip=1.0, noise_multiplier=2.0)
    with pytest.raises(hsa.UnsupportedRunError, match="interrupted"):
        fit(compiled(other))


def chosen():
    return callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)


@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "best"])
def test_a_file_that_was_chosen_holds_every_epoch_that_could_be(stops, tmp_path):
    """The file of the first epoch would otherwise tell of that epoch only."""
    path = str(tmp_path / "{epoch}.keras")
    best = callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True)
    seen = [callbacks.ModelCheckpoint(path), chosen()] if stops else [best]
    model = make(validation_data_is_public=True)
    fit(model, *seen, epochs=EPOCHS, validation_data=(X, Y))
    assert steps_of(model) == [EPOCHS * STEPS]
    model = fit(loaded(path.format(epoch=1)))
    assert steps_of(model) == [EPOCHS * STEPS, STEPS]
