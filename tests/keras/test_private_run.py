"""A loop of one's own that asks a run for its steps: the run that fit makes, and its account."""

import json

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import AUTO, DELTA, SGD, STEPS, fit, make, private_run, refused

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateUpdate,
    DiceUpdate,
    HiddenStateSequential,
)

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
OPTIMIZERS = {
    "sgd": lambda: SGD(0.5, weight_decay=0.1),
    "adam": lambda: tf.keras.optimizers.Adam(0.1),
    "dice": lambda: DiceUpdate(SGD(0.5), error_l2_norm_clip=0.1),
    "blocks": lambda: BlockCoordinateUpdate(SGD(0.5)),
}


def trained(epochs=1, **kwargs):
    run = private_run(**kwargs)
    run.train(epochs, verbose=False)
    return run


@pytest.mark.parametrize(
    ("optimizer", "known"), [*((name, {}) for name in OPTIMIZERS), ("sgd", AUTO)]
)
def test_it_is_the_run_of_fit(optimizer, known):
    run = private_run(OPTIMIZERS[optimizer](), noise_multiplier=0.0, **known)
    for _ in range(2 * STEPS):
        run.step()
    model = fit(make(OPTIMIZERS[optimizer](), noise_multiplier=0.0, **known), epochs=2)
    for own, other in zip(run.record.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
    assert run.privacy_event == run.guarantee.event == model.privacy_event


def test_released_iterates_count():
    run = trained(batch_order="poisson", **AUTO)
    hidden = run.get_epsilon(DELTA)
    run.release()
    run.step()
    assert run.privacy_event.release_steps == (STEPS,)
    assert run.get_epsilon(DELTA) > hidden
    assert ", poisson (" in run.report(DELTA)
    end = 1 + 3 * STEPS  # of two more epochs, which begin where the run stands
    ahead = run.steps.with_steps_ahead(run.record.whole_run(), end, STEPS, (True, False))
    assert ahead.release_steps == (STEPS, 1 + STEPS, 1 + 2 * STEPS, end)


def test_a_budget_counts_a_run_before_it_and_refuses_one_inside():
    run, model = private_run(), fit(make())
    run.step()
    with hsa.budget(100.0, DELTA) as spent:
        for train in (run.step, trained, lambda: fit(model), lambda: fit(make())):
            with refused("count the run inside of it"):
                train()
        spent.spend(model.privacy_event, model.guarantee.neighboring_relation)
    assert spent.spent_epsilon == pytest.approx(model.get_epsilon(DELTA))
    assert run.privacy_event.num_steps == 1


def test_it_goes_on_from_a_state():
    first = trained(**AUTO)
    state = json.loads(json.dumps(first.state(stays_private=True)))
    model = tf.keras.models.clone_model(first.record.model)
    model.set_weights(first.record.model.get_weights())
    again = trained(model=model, state=state, **AUTO)
    assert again.get_epsilon(DELTA) == trained(2, **AUTO).get_epsilon(DELTA)
    with refused("Another record of this process"):
        first.step()


def test_noise_is_found_for_a_target():
    run = private_run(noise_multiplier=None, target_delta=DELTA, **AUTO)
    with pytest.raises(ValueError, match="noise_multiplier"):
        run.step()
    run.train(2, target_epsilon=3.0, verbose=False)
    assert 2.9 < run.get_epsilon(DELTA) <= 3.0
    assert run.noise_multiplier == run.privacy_event.noise_multiplier
    with pytest.raises(AttributeError):  # it would change nothing
        run.noise_multiplier = 1.0


def test_one_epoch_says_what_all_would_gain():
    run = private_run(l2_norm_clip=2.0, **AUTO)
    with pytest.raises(ValueError, match="none yet"):
        run.would_gain(DELTA, epochs=30)
    run.train(1, verbose=False)
    gain = run.would_gain(DELTA, epochs=30)
    assert (gain.verdict, gain.event.num_steps) == ("yes", 30 * STEPS)
    assert gain.epsilon < gain.every_iterate
    plain = trained()
    assert plain.would_gain(DELTA).verdict == "no"
    assert "Every step counts: feature_norm=" in " ".join(plain.report(DELTA).split())
    with pytest.raises(TypeError, match="hiding the iterates is about noisy SGD"):
        trained(optimizer=OPTIMIZERS["dice"]()).would_gain(DELTA)


# --- what ends it ---------------------------------------------------------------------------------


def test_declared_steps_and_weights_that_something_else_changed():
    run = private_run(num_steps=1)
    run.step()
    with refused("num_steps = 1"):
        run.step()
    assert run.get_epsilon(DELTA) > 0
    kernel = run.record.model.trainable_variables[0]
    kernel.assign_add(tf.ones_like(kernel))
    for act in (run.step, lambda: run.get_epsilon(DELTA)):
        with refused("changed outside|num_steps = 1"):
            act()


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("where", "text"), [("record", "took 2 steps|at least one"), ("step", "interrupted")]
)
def test_a_step_that_was_interrupted_is_not_forgotten(monkeypatch, where, text, first):
    """Between the step and its record, or in the step once the variables have moved."""
    run = private_run()
    if not first:
        run.step()
    with monkeypatch.context() as patch:
        patch.setattr(*((run.record, "add") if where == "record" else (run, "_show")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    for act in (run.step, lambda: run.get_epsilon(DELTA)):
        with pytest.raises((hsa.UnsupportedRunError, ValueError), match=text):
            act()
    with refused("privacy is known"):
        private_run(model=run.record.model)


def test_weights_that_a_refused_first_step_moved_are_no_fresh_ones():
    run = private_run(loss_geometry=hsa.LossGeometry.convex(1.0, lipschitz=0.01))
    for act in (run.step, lambda: private_run(model=run.record.model)):
        with refused(r"longer than loss_geometry\.lipschitz"):
            act()


def test_epochs_that_were_interrupted_end_it(monkeypatch):
    run = private_run()
    calls = [run._advance, interrupt]
    monkeypatch.setattr(run, "_advance", lambda *args, **kwargs: calls.pop(0)(*args, **kwargs))
    with pytest.raises(KeyboardInterrupt):
        run.train(2, verbose=False)
    with refused("interrupted"):
        run.get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (HiddenStateSequential([], l2_norm_clip=1.0), hsa.UnsupportedRunError, "a plain model"),
        (tf.keras.activations.relu, TypeError, "a Keras model"),
    ],
)
def test_what_it_does_not_train(model, error, text):
    with pytest.raises(error, match=text):
        private_run(model=model)
