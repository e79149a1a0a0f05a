"""Runs whose initial weights another private run left: composed with it, or refused."""

import copy
import pickle

import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_models import DELTA, SGD, callbacks, compile_with

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import HiddenStateSequential, PrivateRun, lineage

layers = tf.keras.layers
PRIVATE = {"l2_norm_clip": 1.0, "noise_multiplier": 2.0, "batch_order": "cyclic"}
WITHOUT_GEOMETRY = {"optimizer": {"loss_geometry": None}}


@pytest.fixture(autouse=True)
def new_process(row_by_row, without_graphs):
    """Forgets what the process knows, as a new one would."""

    def forget():
        lineage._newest.clear()
        lineage._read.clear()

    forget()
    return forget


@pytest.fixture
def run(make_run):
    """A compiled model with data, of which nothing is trained yet."""
    return make_run()


def composed(events):
    accountant = hsa.LastIterateAccountant()
    for event in events:
        accountant.compose(event)
    return accountant.get_epsilon(DELTA)


def second_run(make_run, model, *, compiles=True, **kwargs):
    """A new callback, and optimizer, on a model."""
    again = make_run(**kwargs)
    again.model = model
    if compiles:
        compile_with(again, run_eagerly=True)
    again.fit()
    return again.callback


def begun(model, run, *, optimizer=None, **kwargs):
    return PrivateRun(
        model, run.x, run.y, loss=run.model.loss, optimizer=optimizer or SGD(0.5), batch_size=4,
        **PRIVATE, **kwargs,
    )  # fmt: skip


def epoch(record):
    record.train(1, verbose=False)
    return record


def check_composed(record, *earlier):
    own = record.privacy_event
    assert record.privacy_events == (*earlier, own)
    assert record.get_epsilon(DELTA) == pytest.approx(composed([*earlier, own]), rel=1e-9)
    assert record.get_epsilon(DELTA) > composed([own])
    texts = [a.text for a in record.assumptions if a.status is Status.CHECKED]
    assert any(f"({len(earlier)}) are composed with this one" in text for text in texts)


def test_compiled_again(make_run, run):
    """With a fresh optimizer and a fresh callback, reported 2.26 where 5.68 is true."""
    run.fit()
    first, left = run.callback.privacy_event, run.model.get_weights()
    again = second_run(make_run, run.model)
    check_composed(again, first)
    third = second_run(make_run, run.model)
    check_composed(third, first, again.privacy_event)
    assert "all together" in third.report(DELTA)
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        run.callback.get_epsilon(DELTA)
    run.model.set_weights(left)
    compile_with(run, run_eagerly=True)
    run.fit()  # goes on, and has released what the others began with
    assert run.callback.privacy_event.release_steps == (6,)


def test_a_start_from_the_weights_before_is_free(make_run, run):
    """As a search over hyper-parameters does, of which each run is released or not."""
    before = run.model.get_weights()
    for _ in range(2):
        run.model.set_weights(before)
        assert len(second_run(make_run, run.model).privacy_events) == 1


def test_layers_that_different_runs_trained_last(make_run):
    """A model, its head, the whole again, and all frozen in another model."""
    run = make_run(**WITHOUT_GEOMETRY)
    run.model = tf.keras.Sequential([tf.keras.Input([4]), layers.Dense(2), layers.Dense(1)])
    compile_with(run, run_eagerly=True)
    run.fit()
    events, first = [run.callback.privacy_event], run.model.layers[0]
    for trains in ("head", "whole", "another"):
        first.trainable = trains == "whole"
        model = run.model
        if trains == "another":
            run.model.trainable = False
            model = tf.keras.Sequential([run.model, layers.Dense(1)])
        again = second_run(make_run, model, **WITHOUT_GEOMETRY)
        check_composed(again, *events)
        events.append(again.privacy_event)


# --- files and copies -----------------------------------------------------------------------------


def keras(model, path):
    model.save(f"{path}.keras")
    return tf.keras.models.load_model(f"{path}.keras")


def h5(model, path):
    model.save(f"{path}.h5")
    return tf.keras.models.load_model(f"{path}.h5")


def twice(model, path):
    """Loaded and saved again, without any training."""
    model = keras(model, path)
    model.save(path, save_format="tf")
    return tf.keras.models.load_model(path)


@pytest.mark.parametrize(
    ("through", "compiles"), [(twice, False), (h5, True), (keras, True), (keras, False)]
)
def test_a_file_tells_of_the_run_whatever_the_model_is_compiled_with(
    make_run, run, tmp_path, through, compiles, new_process
):
    run.fit()
    first = run.callback.privacy_event
    if through is keras and not compiles:  # it is saved with an optimizer that took no step
        run.model.compile(make_run().optimizer, run.model.loss, run_eagerly=True)
    new_process()
    model = through(run.model, str(tmp_path / "model"))
    if not compiles:  # nothing but the optimizer tells
        new_process()
    check_composed(second_run(make_run, model, compiles=compiles), first)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("is_private", [False, True], ids=["plain model", "private model"])
@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_copies_and_pickles(run, copies, is_private, new_process):
    """The weights of a copy are released, if the run goes on."""

    def trained(model, record=None):
        if not is_private:
            return epoch(record or begun(model, run))
        model.fit(run.x, run.y, batch_size=4, verbose=0)
        return model

    model = run.model
    if is_private:
        model = HiddenStateSequential([layers.Dense(1)], **PRIVATE)
        model.compile(SGD(0.5), run.model.loss)
    record = trained(model)
    first, copied = record.privacy_event, copies(model)
    assert trained(model, record).privacy_event.release_steps == (6,)
    new_process()
    check_composed(trained(copied), first)


@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_a_copy_that_is_trained_on_without_privacy(run, copies):
    """On public data, say; neither its weights nor an optimizer with noise tell of the run."""
    run.model.compile(SGD(0.5), run.model.loss)
    first = epoch(begun(run.model, run)).privacy_event
    copied = copies(run.model)
    copied.set_weights([0.5 * w for w in copied.get_weights()])
    check_composed(epoch(begun(copied, run)), first)


def test_copies_of_other_owners_of_the_weights(run, new_process):
    """A layer, and a model around."""
    layer = run.model.layers[0]
    record = begun(layer, run)
    begun(copy.deepcopy(layer), run)  # of which nothing is known yet
    event = epoch(record).privacy_event
    model = around(run.model)
    new_process()
    for owner in (layer, model):
        check_composed(epoch(begun(copy.deepcopy(owner), run)), event)


FUNCTIONS = {
    "keras": lambda model: tf.keras.models.save_model(model, "model.keras"),
    "h5": lambda model: tf.keras.models.save_model(model, "model.h5"),
    "SavedModel": lambda model: tf.saved_model.save(model, "folder"),
}


class WithoutLayers(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight("kernel", (4, 1))

    def call(self, features):
        return features @ self.kernel


def around(model):
    return tf.keras.Sequential([tf.keras.Input((4,)), model, layers.Dense(1)])


def other_of_its_layers(model):
    return tf.keras.Sequential([tf.keras.Input((4,)), *model.layers, layers.Dense(1)])


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("SavedModel", WithoutLayers),
        *((name, of) for name in FUNCTIONS for of in (None, around, other_of_its_layers)),
    ],
)
def test_files_between_steps_are_released_whoever_writes_them(run, name, of):
    model = WithoutLayers() if of is WithoutLayers else run.model
    record = epoch(begun(model, run))
    FUNCTIONS[name](of(model) if of in (around, other_of_its_layers) else model)
    assert epoch(record).privacy_event.release_steps == (6,)


def test_a_run_that_was_only_constructed_hides_no_other(run):
    record = begun(run.model, run)
    for _ in range(2):
        begun(run.model, run)  # with other settings, say
    epoch(record)
    run.model.save("model.keras")
    event = epoch(record).privacy_event
    assert event.release_steps == (6,)
    for model in (copy.deepcopy(run.model), run.model):
        check_composed(epoch(begun(model, run)), event)
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        record.state()  # its weights would be those of the next run


def test_two_models_from_one(run):
    """Each shows the iterate that both began with, and neither what the other did since."""
    record = epoch(begun(run.model, run))
    branches = [epoch(begun(copy.deepcopy(run.model), run)) for _ in range(2)]
    assert epoch(record).privacy_event.release_steps == (6,)
    for branch in branches:
        assert [event.num_steps for event in branch.privacy_events] == [6, 6]


# --- what is refused ------------------------------------------------------------------------------


def changed_since(run):
    """One of two variables."""
    run.fit()
    run.variables[0].assign(0.5 * run.variables[0])


def steps_that_nobody_recorded(run):
    run.model.fit(run.data, verbose=0)


def steps_beside_the_record(run):
    run.fit()
    run.model.fit(run.data, verbose=0)


def a_run_that_ended(run):
    stop = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(run.model, "stop_training", True)
    )
    with pytest.raises(hsa.UnsupportedRunError):
        run.fit(callbacks=[stop], epochs=3)


def a_copy_that_its_run_has_left_behind(run):
    record = epoch(begun(run.model, run, checkpoints_stay_private=True))
    copied = copy.deepcopy(run.model)
    epoch(record)
    run.model = copied


def copies_of_different_steps(run):
    """As an ensemble of files that were to stay private."""
    record = epoch(begun(run.model, run, checkpoints_stay_private=True))
    copied = copy.deepcopy(run.model.layers[0])
    epoch(record)
    model = tf.keras.Sequential([copied, layers.Dense(4), run.model])
    model.build(run.model.input_shape)
    model.compile(SGD(0.5), run.model.loss)
    run.model = model


def an_optimizer_that_counts_steps_of_other_weights(run):
    """Whose file is that of a plain model."""
    run.model.compile(SGD(0.5), run.model.loss)
    run.model.fit(run.data, verbose=0)
    return run.model.optimizer


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (changed_since, "something else has changed the weights since"),
        (steps_that_nobody_recorded, "nobody recorded its steps"),
        (steps_beside_the_record, "took steps that are not recorded"),
        (a_run_that_ended, "stopped early"),
        (a_copy_that_its_run_has_left_behind, "step 6 left: the run went on to step 12"),
        (copies_of_different_steps, "those of different steps of it"),
        (an_optimizer_that_counts_steps_of_other_weights, "iterations = 6 and other weights"),
    ],
)
def test_refused(run, act, text):
    """No run begins with such weights, whoever trains them."""
    optimizer = act(run)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        begun(run.model, run, optimizer=optimizer)
