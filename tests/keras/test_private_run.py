"""A loop of one's own that asks a run for its steps: the run that fit makes, and its account."""

import json

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import AUTO, crossentropy, unit_rows

import hidden_state_accountants as hsa
from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateUpdate,
    DiceUpdate,
    HiddenStateSequential,
    PrivateRun,
)

RECORDS, FEATURES, CLASSES, BATCH, DELTA = 24, 4, 3, 6, 1e-5
X, Y = unit_rows(RECORDS, FEATURES, CLASSES)


def stack():
    return [tf.keras.layers.Dense(CLASSES, kernel_initializer="ones")]


def sgd():
    return tf.keras.optimizers.SGD(0.5, weight_decay=0.1)


OPTIMIZERS = {
    "sgd": (sgd, {}),
    "head": (sgd, AUTO),
    "adam": (lambda: tf.keras.optimizers.Adam(0.1), {}),
    "dice": (lambda: DiceUpdate(sgd(), error_l2_norm_clip=0.1), {}),
    "blocks": (lambda: BlockCoordinateUpdate(tf.keras.optimizers.SGD(0.5)), {}),
}


def settings(optimizer="sgd", **kwargs):
    return {
        "l2_norm_clip": 0.5,
        "noise_multiplier": 2.0,
        "batch_order": "cyclic",
        **OPTIMIZERS[optimizer][1],
        **kwargs,
    }


def private_run(optimizer="sgd", model=None, x=X, y=Y, batch_size=BATCH, state=None, **kwargs):
    return PrivateRun(
        model or tf.keras.Sequential(stack()), x, y, loss=crossentropy(),
        optimizer=OPTIMIZERS[optimizer][0](), batch_size=batch_size, state=state,
        **settings(optimizer, **kwargs),
    )  # fmt: skip


def fitted(optimizer="sgd", epochs=2, **kwargs):
    model = HiddenStateSequential(stack(), **settings(optimizer, **kwargs))
    model.compile(OPTIMIZERS[optimizer][0](), crossentropy())
    model.fit(X, Y, batch_size=BATCH, epochs=epochs, verbose=0)
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.usefixtures("row_by_row", "without_graphs")
def test_it_is_the_run_of_fit(optimizer):
    run = private_run(optimizer, noise_multiplier=0.0)
    for _ in range(2 * RECORDS // BATCH):
        run.step()
    model = fitted(optimizer, noise_multiplier=0.0)
    for own, other in zip(run.record.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
    assert run.privacy_event == model.privacy_event


def test_several_steps_between_two_looks_are_single_steps():
    """In a graph, at the pace of a fast machine."""
    run = private_run("head", noise_multiplier=0.0)
    shown = run.train(3, verbose=False)
    assert run.pace > 1
    model = fitted("head", noise_multiplier=0.0, epochs=3)
    for own, other in zip(run.record.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
    np.testing.assert_allclose(shown, model.history.history["loss"], rtol=1e-5)


@pytest.mark.usefixtures("row_by_row", "without_graphs")
class TestEager:
    def test_released_iterates_count(self):
        run = private_run("head", batch_order="poisson")
        run.train(1, verbose=False)
        hidden = run.get_epsilon(DELTA)
        run.release()
        run.step()
        assert run.privacy_event.release_steps == (RECORDS // BATCH,)
        assert run.get_epsilon(DELTA) > hidden
        assert ", poisson (" in run.report(DELTA)

    def test_a_budget_counts_a_run_before_it_and_refuses_one_inside(self):
        run = private_run("head")
        model = fitted("head", epochs=1)
        run.step()
        with hsa.budget(100.0, DELTA) as spent:
            for train in (
                run.step,
                lambda: run.train(1, verbose=False),
                private_run("head").step,
                lambda: model.fit(X, Y, batch_size=BATCH, verbose=0),
                fitted,
            ):
                with pytest.raises(UnsupportedRunError, match="count the run inside of it"):
                    train()
            spent.spend(model.privacy_event, model.guarantee.neighboring_relation)
        assert spent.spent_epsilon == pytest.approx(model.get_epsilon(DELTA))
        assert run.privacy_event.num_steps == 1

    def test_it_goes_on_from_a_state(self):
        first = private_run("head")
        first.train(1, verbose=False)
        state = json.loads(json.dumps(first.state(stays_private=True)))
        model = tf.keras.models.clone_model(first.record.model)
        model.set_weights(first.record.model.get_weights())
        again = private_run("head", model, state=state)
        again.train(1, verbose=False)
        whole = private_run("head")
        whole.train(2, verbose=False)
        assert again.get_epsilon(DELTA) == whole.get_epsilon(DELTA)
        with pytest.raises(UnsupportedRunError, match="Another record of this process"):
            first.step()

    def test_noise_is_found_for_a_target(self):
        run = private_run("head", noise_multiplier=None, target_delta=DELTA)
        with pytest.raises(ValueError, match="noise_multiplier"):
            run.step()
        run.train(2, target_epsilon=3.0, verbose=False)
        assert 2.9 < run.get_epsilon(DELTA) <= 3.0
        assert run.noise_multiplier == run.privacy_event.noise_multiplier
        with pytest.raises(AttributeError):  # it would change nothing
            run.noise_multiplier = 1.0

    def test_a_layer_is_a_model(self):
        layer = tf.keras.layers.Dense(CLASSES, kernel_initializer="ones")
        run = private_run("head", layer)
        run.step()
        assert run.get_epsilon(DELTA) == pytest.approx(_one_step())

    def test_weights_that_something_else_changed_end_it(self):
        run = private_run()
        run.step()
        kernel = run.record.model.trainable_variables[0]
        kernel.assign_add(tf.ones_like(kernel))
        with pytest.raises(UnsupportedRunError, match="changed outside"):
            run.step()
        with pytest.raises(UnsupportedRunError, match="changed outside"):
            run.get_epsilon(DELTA)

    def test_declared_steps(self):
        run = private_run(num_steps=1)
        run.step()
        with pytest.raises(UnsupportedRunError, match="num_steps = 1"):
            run.step()

    @pytest.mark.parametrize(("where", "text"), [("record", "took 2 steps"), ("step", "interrup")])
    def test_a_step_that_was_interrupted_is_not_forgotten(self, monkeypatch, where, text):
        """Between the step and its record, or in the step once the variables have moved."""

        def interrupt(*_):
            raise KeyboardInterrupt

        run = private_run()
        run.step()
        with monkeypatch.context() as patch:
            patch.setattr(
                *((run.record, "add") if where == "record" else (run, "_show")), interrupt
            )
            with pytest.raises(KeyboardInterrupt):
                run.step()
        for act in (run.step, lambda: run.get_epsilon(DELTA)):
            with pytest.raises(UnsupportedRunError, match=text):
                act()

    def test_weights_of_an_interrupted_step_are_no_fresh_ones(self, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        run = private_run()
        with monkeypatch.context() as patch:
            patch.setattr(run, "_show", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run.step()
        with pytest.raises(UnsupportedRunError, match="privacy is known"):
            private_run(model=run.record.model)

    def test_weights_that_a_refused_first_step_moved_are_no_fresh_ones(self):
        run = private_run(loss_geometry=hsa.LossGeometry.convex(1.0, lipschitz=0.01))
        for act in (run.step, lambda: private_run(model=run.record.model)):
            with pytest.raises(UnsupportedRunError, match=r"longer than loss_geometry\.lipschitz"):
                act()

    def test_an_interruption_ends_it(self, monkeypatch):
        run = private_run()
        take = run._advance
        calls = []

        def interrupted(count, eagerly):
            calls.append(count)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return take(count)

        monkeypatch.setattr(run, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.train(2, verbose=False)
        with pytest.raises(UnsupportedRunError, match="interrupted"):
            run.get_epsilon(DELTA)


def _one_step():
    run = private_run("head")
    run.step()
    return run.get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (lambda: HiddenStateSequential(stack(), l2_norm_clip=1.0), UnsupportedRunError),
        (lambda: tf.keras.activations.relu, TypeError),
    ],
)
def test_what_it_does_not_train(model, error):
    with pytest.raises(error, match=r"Expected a (plain|Keras) model"):
        private_run(model=model())


def test_one_epoch_says_what_all_would_gain():
    run = private_run("head", l2_norm_clip=1.4143 * 2**0.5)
    with pytest.raises(ValueError, match="none yet"):
        run.would_gain(DELTA, epochs=30)
    run.train(1, verbose=False)
    gain = run.would_gain(DELTA, epochs=30)
    assert (gain.verdict, gain.event.num_steps) == ("yes", 30 * RECORDS // BATCH)
    assert gain.epsilon < gain.every_iterate
    deep = fitted(epochs=1)
    assert deep.would_gain(DELTA).verdict == "no"
    assert "Every step counts: feature_norm=" in " ".join(deep.report(DELTA).split())
    with pytest.raises(TypeError, match="hiding the iterates is about noisy SGD"):
        fitted("dice", epochs=1).would_gain(DELTA)


def test_the_guarantee_holds_the_event_of_the_run():
    run = private_run("head")
    run.train(1, verbose=False)
    assert run.guarantee.event == run.privacy_event


# Several steps before the host looks

PERIOD = RECORDS // 2  # batches of two


def several(*, optimizer=None, own_stack=None, **kwargs):
    declared = {"loss_geometry": kwargs.pop("loss_geometry", None), "noise_multiplier": 0.0}
    model = HiddenStateSequential(own_stack or stack(), **settings(**declared))
    model.compile(optimizer or tf.keras.optimizers.SGD(0.5), crossentropy(), **kwargs)
    return model


def fit(model, x=X, **kwargs):
    return model.fit(x, Y, batch_size=2, verbose=0, **kwargs)


class Seen(tf.keras.callbacks.Callback):
    """The calls after a batch, and how many steps were recorded then."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append((batch, self.model.privacy_event.num_steps))


@pytest.mark.parametrize("given", [1, 5, None])
def test_every_step_is_recorded(given):
    """Where a callback waits for batches and nobody says how many, after every step."""
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay([6], [0.5, 0.25])
    seen = Seen()
    model = several(optimizer=tf.keras.optimizers.SGD(rate), steps_per_execution=given)
    fit(model, epochs=2, callbacks=[seen])
    event, size = model.privacy_event, given or 1
    assert list(event.per_step("learning_rate")) == [0.5] * 7 + [0.25] * (2 * PERIOD - 7)
    ends = [min(end, PERIOD) for end in range(size, PERIOD + size, size)]
    assert seen.calls == [(end - 1, epoch * PERIOD + end) for epoch in range(2) for end in ends]


def test_without_them_several_steps_are_made_at_once(monkeypatch):
    """As many as take a moment, an endless one in all tests; the next fit knows how many."""
    calls = []
    record = tf.keras.callbacks.CallbackList.on_train_batch_end

    def noted(callbacks, batch, logs=None):
        calls.append(batch)
        return record(callbacks, batch, logs)

    monkeypatch.setattr(tf.keras.callbacks.CallbackList, "on_train_batch_end", noted)
    together, alone = several(), several(steps_per_execution=1)
    fit(together, epochs=2, validation_data=(X, Y))
    fit(together)
    assert calls == [0, 8, 11, 11, 11]
    fit(alone, epochs=3)
    for own, other in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


def test_after_a_refused_step_none_is_taken():
    """Batches 0, 1, 2 are fine, the others would be as well."""
    x = X.copy()
    x[6] *= 100
    declared = hsa.LossGeometry.convex(1e6, lipschitz=20.0)
    model = several(steps_per_execution=PERIOD, loss_geometry=declared)
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 4 ends the run.*is longer"):
        fit(model, x=x)
    alone = several()
    alone.fit(x[:8], Y[:8], batch_size=2, verbose=0)
    for own, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


class Moves(tf.keras.layers.Layer):
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
    (head,) = stack()
    head.build((None, FEATURES))
    with pytest.raises(hsa.UnsupportedRunError):
        fit(several(own_stack=[Moves(head), head], steps_per_execution=PERIOD))


@pytest.mark.parametrize("given", [0, "auto"])
def test_a_number_is_asked_for(given):
    with pytest.raises((TypeError, ValueError), match="steps_per_execution"):
        several(steps_per_execution=given)
