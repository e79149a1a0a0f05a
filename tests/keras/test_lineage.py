"""Runs whose initial weights another private run left: composed with it, or refused."""

import copy
import pickle

import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_models import callbacks, compile_with
from misuse import each_row

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import (
    HiddenStateSequential,
    PrivateRun,
    lineage,
)

DELTA = 1e-5


@pytest.fixture(autouse=True)
def new_process(row_by_row):
    """Forgets what the process knows, as a new one would."""

    def forget():
        lineage._newest.clear()
        lineage._read.clear()

    forget()
    return forget


def composed(*events):
    accountant = hsa.LastIterateAccountant()
    for event in events:
        accountant.compose(event)
    return accountant.get_epsilon(DELTA)


def trained(make_run, **kwargs):
    run = make_run(**kwargs)
    run.fit()
    return run


def second_run(make_run, model, **kwargs):
    """A new optimizer and callback on a model."""
    again = make_run(**kwargs)
    again.model = model
    compile_with(again, run_eagerly=True)
    again.fit()
    return again


def check_composed(again, *earlier):
    own = again.callback.privacy_event
    assert again.callback.privacy_events == (*earlier, own)
    assert again.callback.get_epsilon(DELTA) == pytest.approx(composed(*earlier, own), rel=1e-9)
    assert again.callback.get_epsilon(DELTA) > composed(own)
    texts = [a.text for a in again.callback.assumptions if a.status is Status.CHECKED]
    assert any(f"({len(earlier)}) are composed with this one" in text for text in texts)


def test_row82_compiled_again(make_run):
    """With a fresh optimizer and a fresh callback, reported 2.26 where 5.68 is true."""
    run = trained(make_run)
    first = run.callback.privacy_event
    again = second_run(make_run, run.model)
    check_composed(again, first)
    second = again.callback.privacy_event
    third = second_run(make_run, run.model)
    check_composed(third, first, second)
    assert "all together" in third.callback.report(DELTA)
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        run.callback.get_epsilon(DELTA)


def h5(model, path):
    model.save(f"{path}.h5")
    return tf.keras.models.load_model(f"{path}.h5")


def keras(model, path):
    model.save(f"{path}.keras")
    return tf.keras.models.load_model(f"{path}.keras")


def twice(model, path):
    """Loaded and saved again, without any training."""
    model = keras(model, path)
    model.save(path, save_format="tf")
    return tf.keras.models.load_model(path)


@pytest.mark.parametrize(("through", "is_fresh"), [(twice, False), (h5, True), (keras, True)])
def test_a_file_tells_of_the_run_whatever_the_model_is_compiled_with(
    make_run, tmp_path, through, is_fresh, new_process
):
    run = trained(make_run)
    first = run.callback.privacy_event
    new_process()
    again = make_run()
    again.model = through(run.model, str(tmp_path / "model"))
    if is_fresh:
        compile_with(again, run_eagerly=True)
    else:  # nothing but the optimizer tells
        new_process()
    again.fit()
    check_composed(again, first)


def weights(model):
    again = tf.keras.models.clone_model(model)
    again.set_weights(model.get_weights())
    return again


def new_head(model):
    """The layers of the model, frozen."""
    for layer in model.layers:
        layer.trainable = False
    return tf.keras.Sequential([model, tf.keras.layers.Dense(1)])


def test_row82_layers_in_another_model(make_run):
    run = trained(make_run)
    first = run.callback.privacy_event
    model = new_head(run.model)
    again = second_run(make_run, model, optimizer={"loss_geometry": None})
    check_composed(again, first)


def private_run(model, run, optimizer=None, **kwargs):
    return PrivateRun(
        model, run.x, run.y, loss=run.model.loss,
        optimizer=optimizer or tf.keras.optimizers.SGD(0.5),
        batch_size=4, batch_order="cyclic", l2_norm_clip=1.0, noise_multiplier=2.0, **kwargs,
    )  # fmt: skip


def owns_its_run(run):
    model = HiddenStateSequential(
        [tf.keras.layers.Dense(1)], l2_norm_clip=1.0, noise_multiplier=2.0, batch_order="cyclic"
    )
    model.compile(tf.keras.optimizers.SGD(0.5), run.model.loss)
    return model


COPIES = {"deep copy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.usefixtures("without_graphs")
@pytest.mark.parametrize("is_private", [False, True], ids=["plain model", "private model"])
@pytest.mark.parametrize("name", COPIES)
def test_copies_and_pickles(make_run, name, is_private, new_process):
    run = make_run()

    def trained_on(model, record=None):
        if is_private:
            model.fit(run.x, run.y, batch_size=4, verbose=0)
            return model
        record = private_run(model, run) if record is None else record
        record.train(1, verbose=False)
        return record

    model = owns_its_run(run) if is_private else run.model
    before = trained_on(model)
    first, copied = before.privacy_event, COPIES[name](model)
    assert trained_on(model, before).privacy_event.release_steps == (6,)
    new_process()
    after = trained_on(copied)
    assert after.privacy_events == (first, after.privacy_event)
    assert after.get_epsilon(DELTA) == pytest.approx(composed(*after.privacy_events), rel=1e-9)


@pytest.mark.usefixtures("without_graphs")
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_is_trained_on_without_privacy(make_run, name):
    """On public data, say; neither its weights nor an optimizer with noise tell of the run."""
    run = make_run()
    run.model.compile(tf.keras.optimizers.SGD(0.5), run.model.loss)
    first = private_run(run.model, run)
    first.train(1, verbose=False)
    copied = COPIES[name](run.model)
    copied.set_weights([0.5 * w for w in copied.get_weights()])
    after = private_run(copied, run)
    after.train(1, verbose=False)
    assert after.privacy_events == (first.privacy_event, after.privacy_event)


@pytest.mark.usefixtures("without_graphs")
def test_a_copy_of_another_model_with_the_layers(make_run):
    run = trained(make_run)
    first = run.callback.privacy_event
    around = tf.keras.Sequential([run.model, tf.keras.layers.Dense(1)])
    around.build(run.model.input_shape)
    after = private_run(copy.deepcopy(around), run)
    after.train(1, verbose=False)
    assert after.privacy_events == (first, after.privacy_event)


FUNCTIONS = {
    "keras": lambda model: tf.keras.models.save_model(model, "model.keras"),
    "h5": lambda model: tf.keras.models.save_model(model, "model.h5"),
    "SavedModel": lambda model: tf.saved_model.save(model, "folder"),
}


@pytest.mark.usefixtures("without_graphs")
@pytest.mark.parametrize("of", ["the model", "a model around", "another model of its layers"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_files_between_steps_are_released_whoever_writes_them(make_run, name, of):
    run = make_run()
    record, model = private_run(run.model, run), run.model
    if of != "the model":
        own = [model] if of == "a model around" else model.layers
        model = tf.keras.Sequential([*own, tf.keras.layers.Dense(1)])
        model.build(run.model.input_shape)
    record.train(1, verbose=False)
    FUNCTIONS[name](model)
    record.train(1, verbose=False)
    assert record.privacy_event.release_steps == (6,)


@pytest.mark.usefixtures("without_graphs")
def test_a_run_that_was_only_constructed_hides_no_other(make_run):
    run = make_run()
    first = private_run(run.model, run)
    for _ in range(2):
        private_run(run.model, run)  # with other settings, say
    first.train(1, verbose=False)
    run.model.save("model.keras")
    first.train(1, verbose=False)
    event = first.privacy_event
    assert event.release_steps == (6,)
    for model in (copy.deepcopy(run.model), run.model):
        after = private_run(model, run)
        after.train(1, verbose=False)
        assert after.privacy_events == (event, after.privacy_event)


def test_a_file_tells_of_the_run_with_a_fresh_optimizer(make_run, tmp_path, new_process):
    run = trained(make_run)
    first = run.callback.privacy_event
    again = make_run()
    again.model = run.model
    compile_with(again, run_eagerly=True)  # and no fit
    again.model = keras(run.model, str(tmp_path / "model"))
    new_process()
    again.optimizer = again.model.optimizer
    again.fit()
    check_composed(again, first)


@pytest.mark.usefixtures("without_graphs")
def test_a_deep_copy_of_a_layer(make_run, new_process):
    run = make_run()
    layer = run.model.layers[0]
    before = private_run(layer, run)
    private_run(copy.deepcopy(layer), run)  # of which nothing is known yet
    before.train(1, verbose=False)
    first = before.privacy_event
    copied = copy.deepcopy(layer)
    new_process()
    after = private_run(copied, run)
    after.train(1, verbose=False)
    assert after.privacy_events[0] == first
    assert len(after.privacy_events) == 2


def test_weights_that_were_copied_as_numbers_are_an_assumption(make_run):
    run = trained(make_run)
    again = second_run(make_run, weights(run.model))
    assert len(again.callback.privacy_events) == 1
    declared = [a.text for a in again.callback.assumptions if a.status is Status.DECLARED]
    assert any("no weights were trained on them before" in text for text in declared)


def test_a_start_from_the_weights_before_is_free(make_run):
    """As a search over hyper-parameters does, of which each run is released or not."""
    run = make_run()
    before = run.model.get_weights()
    for _ in range(2):
        run.model.set_weights(before)
        again = second_run(make_run, run.model)
        assert len(again.callback.privacy_events) == 1


def test_parts_that_different_runs_trained_last(make_run):
    """A model, then its head, then the whole again."""
    run = make_run(optimizer={"loss_geometry": None})
    run.model = tf.keras.Sequential(
        [tf.keras.Input([4]), tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)]
    )
    compile_with(run, run_eagerly=True)
    run.fit()
    events = [run.callback.privacy_event]
    for is_frozen in (True, False):
        run.model.layers[0].trainable = not is_frozen
        again = second_run(make_run, run.model, optimizer={"loss_geometry": None})
        check_composed(again, *events)
        events.append(again.callback.privacy_event)


# --- what is refused ------------------------------------------------------------------------------


def changed_since(make_run):
    run = trained(make_run)
    run.model.set_weights([0.5 * w for w in run.model.get_weights()])
    second_run(make_run, run.model)


def steps_that_nobody_recorded(make_run):
    run = make_run()
    run.model.fit(run.data, verbose=0)
    second_run(make_run, run.model)


def steps_beside_the_record(make_run):
    run = trained(make_run)
    run.model.fit(run.data, verbose=0)
    second_run(make_run, run.model)


def a_run_that_ended(make_run):
    run = make_run()
    stop = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(run.model, "stop_training", True)
    )
    with pytest.raises(hsa.UnsupportedRunError):
        run.fit(callbacks=[stop], epochs=3)
    second_run(make_run, run.model)


def a_copy_that_its_run_has_left_behind(make_run):
    run = make_run()
    first = private_run(run.model, run, checkpoints_stay_private=True)
    first.train(1, verbose=False)
    copied = copy.deepcopy(run.model)
    first.train(1, verbose=False)
    private_run(copied, run)


def copies_of_different_steps(make_run):
    """As an ensemble of files that were to stay private."""
    run = make_run()
    first = private_run(run.model, run, checkpoints_stay_private=True)
    first.train(1, verbose=False)
    copied = copy.deepcopy(run.model.layers[0])
    first.train(1, verbose=False)
    model = tf.keras.Sequential([copied, tf.keras.layers.Dense(4), run.model])
    model.build(run.model.input_shape)
    private_run(model, run)


def an_optimizer_that_counts_steps_of_other_weights(make_run):
    """Whose file is that of a plain model."""
    run = make_run()
    run.model.compile(tf.keras.optimizers.SGD(0.5), run.model.loss)
    run.model.fit(run.data, verbose=0)
    private_run(run.model, run, optimizer=run.model.optimizer)


CASES = [
    (82, changed_since, "something else has changed the weights since"),
    (82, steps_that_nobody_recorded, "nobody recorded its steps"),
    (82, steps_beside_the_record, "took steps that are not recorded"),
    (82, a_run_that_ended, "stopped early"),
    (82, a_copy_that_its_run_has_left_behind, "step 6 left: the run went on to step 12"),
    (82, copies_of_different_steps, "those of different steps of it"),
    (82, an_optimizer_that_counts_steps_of_other_weights, "iterations = 6 and other weights"),
]


@pytest.mark.usefixtures("without_graphs")
@each_row(("act", "text"), CASES)
def test_refused(make_run, act, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(make_run)


@pytest.mark.usefixtures("without_graphs")
def test_two_models_from_one(make_run):
    """Each shows the iterate that both began with, and neither what the other did since."""
    run = make_run()
    first = private_run(run.model, run)
    first.train(1, verbose=False)
    branches = [private_run(copy.deepcopy(run.model), run) for _ in range(2)]
    for branch in branches:
        branch.train(1, verbose=False)
    first.train(1, verbose=False)
    assert first.privacy_event.release_steps == (6,)
    for branch in branches:
        assert [event.num_steps for event in branch.privacy_events] == [6, 6]
    late = private_run(copy.deepcopy(run.model), run)
    assert [event.num_steps for event in late.record.earlier_events] == [12]


def test_a_run_that_goes_on_after_its_weights_began_another_has_released_them(make_run):
    run = trained(make_run)
    left = run.model.get_weights()
    second_run(make_run, run.model)
    run.model.set_weights(left)
    compile_with(run, run_eagerly=True)
    run.fit()
    assert run.callback.privacy_event.release_steps == (6,)
