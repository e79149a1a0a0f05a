"""Runs whose initial weights another private run left: composed with it, or refused."""

import json

import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_fit import at_batch, callbacks, compile_with
from misuse import each_row

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import (
    DiceKerasSGDOptimizer,
    origins,
)

DELTA = 1e-5


def new_process():
    """Forgets what the process knows, as a new one would."""
    origins._live.clear()
    origins._origins.clear()


@pytest.fixture(autouse=True)
def _in_a_new_process(row_by_row):
    new_process()


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


def same(model, path):
    return model


def keras(model, path):
    model.save(f"{path}.keras")
    return tf.keras.models.load_model(f"{path}.keras")


def h5(model, path):
    model.save(f"{path}.h5")
    return tf.keras.models.load_model(f"{path}.h5")


def saved_model(model, path):
    model.save(path, save_format="tf")
    return tf.keras.models.load_model(path)


def twice(model, path):
    """Loaded and saved again, without any training."""
    return saved_model(keras(model, path), path)


def compiled(model):
    again = tf.keras.models.clone_model(model)
    again.build((None, 4))
    again.compile(type(model.optimizer)(1.5, 2.0), model.loss)
    return again


@pytest.mark.parametrize("through", [h5, twice])
def test_row82_files_that_hold_the_optimizer_tell_another_process(make_run, tmp_path, through):
    run = trained(make_run)
    first = run.callback.privacy_event
    model = through(run.model, str(tmp_path / "model"))
    digests = dict(origins._origins)
    new_process()
    origins.read_plain(model.optimizer.get_config()["runs_behind_the_weights"])  # as load_model
    assert set(origins._origins) == set(digests)
    check_composed(second_run(make_run, model), first)


def weights(model, path):
    again = tf.keras.models.clone_model(model)
    again.set_weights(model.get_weights())
    return again


def weights_h5(model, path):
    again = tf.keras.models.clone_model(model)
    model.save_weights(f"{path}.weights.h5")
    again.load_weights(f"{path}.weights.h5")
    return again


def not_compiled(model, path):
    model.save(f"{path}.keras")
    return tf.keras.models.load_model(f"{path}.keras", compile=False)


def new_head(model, path):
    """A part of the model, frozen."""
    backbone = tf.keras.models.clone_model(model)
    backbone.set_weights(model.get_weights())
    backbone.trainable = False
    return tf.keras.Sequential([backbone, tf.keras.layers.Dense(1)])


@pytest.mark.parametrize("through", [weights_h5, not_compiled, new_head])
def test_row82_weights_are_known_in_the_process_wherever_they_are_copied_to(
    make_run, tmp_path, through
):
    run = trained(make_run)
    model = through(run.model, str(tmp_path / "model"))
    again = second_run(make_run, model, optimizer={"loss_geometry": None})
    check_composed(again, run.callback.privacy_event)


def test_weights_that_no_file_of_an_optimizer_came_with_are_an_assumption(make_run, tmp_path):
    run = trained(make_run)
    model = weights_h5(run.model, str(tmp_path / "model"))
    new_process()
    again = second_run(make_run, model)
    assert len(again.callback.privacy_events) == 1
    declared = [a.text for a in again.callback.assumptions if a.status is Status.DECLARED]
    assert any("no weights were trained on them before" in text for text in declared)


def test_a_start_from_a_model_that_was_trained_without_privacy_is_free(make_run):
    """On public data, as the assumption says."""
    run = make_run()
    run.model.compile("sgd", "mse")
    run.model.fit(run.x, run.y, verbose=0)
    compile_with(run, run_eagerly=True)
    run.fit()
    assert len(run.callback.privacy_events) == 1


def test_a_start_from_the_weights_before_is_free(make_run):
    """As a search over hyper-parameters does, of which each run is released or not."""
    run = make_run()
    before = run.model.get_weights()
    for _ in range(2):
        run.model.set_weights(before)
        again = second_run(make_run, run.model)
        assert len(again.callback.privacy_events) == 1


def test_zeros_belong_to_nobody(make_run):
    """The bias of a new model is not that of a run that keeps it at zero."""
    first = make_run()
    first.fit()
    first.model.layers[0].bias.assign([0.0])
    assert not origins._is_telling(first.model.layers[0].bias)
    again = make_run()
    again.model.layers[0].bias.assign([0.0])
    again.fit()
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


def zeroed_since(make_run):
    """Zeros are known by the variable only."""
    run = trained(make_run)
    run.model.set_weights([0 * w for w in run.model.get_weights()])
    second_run(make_run, run.model)


def steps_that_nobody_recorded(make_run):
    run = make_run()
    run.model.fit(run.data, verbose=0)
    second_run(make_run, run.model)


def steps_that_nobody_recorded_in_a_file(make_run):
    run = make_run()
    run.model.fit(run.data, verbose=0)
    run.model.save("model.keras")
    new_process()
    second_run(make_run, tf.keras.models.load_model("model.keras"))


def a_run_that_ended(make_run):
    run = make_run()
    stop = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(run.model, "stop_training", True)
    )
    with pytest.raises(hsa.UnsupportedRunError):
        run.fit(callbacks=[stop], epochs=3)
    second_run(make_run, run.model)


def copied_weights_of_a_run_that_ended(make_run):
    run = trained(make_run)
    model = weights(run.model, None)
    with pytest.raises(KeyboardInterrupt):
        run.fit(callbacks=[at_batch(2, _interrupt)])
    with pytest.raises(hsa.UnsupportedRunError, match="was interrupted"):
        run.fit()
    second_run(make_run, model)


def _interrupt():
    raise KeyboardInterrupt


def older_weights_of_a_run(make_run):
    run = trained(make_run)
    older = run.model.get_weights()
    run.fit()
    other = make_run()
    other.model.set_weights(older)
    other.fit()


def an_optimizer_that_counts_steps_of_other_weights(make_run):
    run = trained(make_run)
    run.model.save("model.h5")
    loaded = tf.keras.models.load_model("model.h5")
    loaded.set_weights([w + 1 for w in loaded.get_weights()])
    again = make_run()
    again.model = loaded
    again.fit()


CASES = [
    (82, changed_since, "something else has changed the weights since the last step"),
    (82, zeroed_since, "trained and something else changed since"),
    (82, steps_that_nobody_recorded, "nobody recorded its steps"),
    (82, steps_that_nobody_recorded_in_a_file, "nobody recorded its steps"),
    (82, a_run_that_ended, "stopped early"),
    (82, copied_weights_of_a_run_that_ended, "fit was interrupted"),
    (82, older_weights_of_a_run, "as step 6 left it: the run went on to step 12"),
    (82, an_optimizer_that_counts_steps_of_other_weights, "iterations = 6 and other weights"),
]


@each_row(("act", "text"), CASES)
def test_refused(make_run, act, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(make_run)


def test_older_weights_that_were_released_are_composed_with_the_whole_run(make_run):
    run = trained(make_run)
    run.callback.release()
    older = weights(run.model, None)
    run.fit()
    again = second_run(make_run, older)
    check_composed(again, run.callback.privacy_event)
    assert run.callback.privacy_event.release_steps == (6,)


def test_a_run_that_goes_on_after_its_weights_began_another_has_released_them(make_run):
    run = trained(make_run)
    left = run.model.get_weights()
    second_run(make_run, run.model)
    run.model.set_weights(left)
    compile_with(run, run_eagerly=True)
    run.fit()
    assert run.callback.privacy_event.release_steps == (6,)


# --- optimizers without a record ------------------------------------------------------------------


def dice():
    return DiceKerasSGDOptimizer(0.25, 40.0, error_l2_norm_clip=0.125, learning_rate=0.5)


@pytest.mark.parametrize("in_graphs", [False, True])
def test_reports_of_an_optimizer_alone_are_refused_after_another_one(make_run, in_graphs):
    run, arguments = make_run(), {"dataset_size": 24, "batch_order": "cyclic"}
    first, second = dice(), dice()
    for optimizer in (first, second):

        def step(x, y, optimizer=optimizer):
            with tf.GradientTape() as tape:
                losses = tf.nn.sigmoid_cross_entropy_with_logits(y, run.model(x))[:, 0]
            optimizer.minimize(losses, run.variables, tape=tape)

        act = tf.function(step) if in_graphs else step
        for x, y in run.data:
            act(x, y)
        if optimizer is first:
            assert "epsilon" in first.report(DELTA, **arguments)
    with pytest.raises(hsa.UnsupportedRunError, match="no other private optimizer has trained"):
        second.report(DELTA, **arguments)
    assert second.privacy_event(**arguments).num_steps == 6  # to compose by hand


def test_so_are_those_of_an_optimizer_whose_record_composes(make_run):
    run = trained(make_run)
    again = make_run(callback={"gradient_bound": 1.4143})
    again.model, again.optimizer = run.model, dice()
    compile_with(again, run_eagerly=True)
    again.fit()
    assert len(again.callback.privacy_events) == 2
    with pytest.raises(hsa.UnsupportedRunError, match="no other private optimizer has trained"):
        again.optimizer.report(DELTA, dataset_size=24, batch_order="cyclic")


def test_the_note_is_plain_and_public(make_run):
    """Settings and digests of the weights that are saved with it."""
    run = trained(make_run)
    note = json.loads(json.dumps(run.optimizer.get_config()["runs_behind_the_weights"]))
    assert sorted(note) == ["run_id", "runs", "schema", "step", "weights", "why"]
    assert note["weights"] == [origins.digest(v) for v in run.variables]
    past = origins.PastRun.of_plain(note["runs"][0])
    assert past.run().event() == run.callback.privacy_event
    for damage in ({"schema": 2}, {"runs": [{}]}, {"runs": [{"run_id": "a", "state": {}}]}):
        with pytest.raises(ValueError, match=r"schema|damaged"):
            type(run.optimizer).from_config(
                {**run.optimizer.get_config(), "runs_behind_the_weights": {**note, **damage}}
            )
