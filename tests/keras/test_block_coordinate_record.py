"""DP-MBCD with HiddenStateCallback: the event of what ran, or an error."""

import pytest
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
)

pytestmark = pytest.mark.usefixtures("row_by_row")
SPECIAL = NeighboringRelation.REPLACE_SPECIAL
DELTA, RATE, CLIP, NOISE, L2 = 1e-5, 0.5, 1.5, 40.0, 0.25
LOGISTIC = hsa.LossGeometry.logistic(1.0, bias=True)
layers, callbacks = tf.keras.layers, tf.keras.callbacks


def event(num_epochs=2, **changes):
    variance = RATE * (NOISE * CLIP / 4) ** 2 / 2
    arguments = {
        "step_size": RATE, "noise_variance": variance, "clip_norm": CLIP, "batch_size": 4,
        "dataset_size": 24, "num_epochs": num_epochs, "prox_strong_convexity": L2,
    }  # fmt: skip
    return hsa.BlockCoordinateDpEvent(**(arguments | changes))


def exact(event, relation=SPECIAL):
    return hsa.BlockCoordinateAccountant(relation).compose(event).get_epsilon(DELTA)


def bce():
    return tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


class BlockModel(tf.keras.Sequential):
    """The recipe of docs/papers/block_coordinate.md: a layer is a block."""

    def train_step(self, data):
        x, y = data
        self.optimizer.minimize(
            lambda: self.compute_loss(x, y, self(x, training=True)),
            [layer.trainable_variables for layer in self.layers if layer.trainable],
        )
        return {}


@pytest.fixture
def make_blocks(make_run, compile_options):
    """A run of Model.fit; with several layers each is a block."""

    def make(*own_layers, compile=None, options=None, **callback):
        run = make_run(callback=callback)
        run.optimizer = BlockCoordinateKerasOptimizer(
            **{"l2_norm_clip": CLIP, "noise_multiplier": NOISE, "learning_rate": RATE, "l2": L2}
            | (options or {})
        )
        if own_layers:
            run.model = BlockModel(own_layers)
            run.model.build((None, 4))
        run.model.compile(run.optimizer, bce(), **(compile_options if compile is None else compile))
        return run

    return make


def two():
    return layers.Dense(2), layers.Dense(1)


@pytest.mark.parametrize("mode", [{"jit_compile": True}])
def test_fit_of_one_block(make_blocks, mode):
    run = make_blocks(compile=mode, target_delta=DELTA, loss_geometry=LOGISTIC)
    history = run.fit(epochs=2).history["epsilon_if_released_now"]
    expected = event(block_loss=LOGISTIC)
    assert run.callback.privacy_event == expected
    assert history == pytest.approx([exact(event(1, block_loss=LOGISTIC)), exact(expected)])
    assert run.callback.get_epsilon(DELTA) == history[1]
    assert "Theorem A" in run.callback.guarantee.theorem
    assert history[1] < exact(event())  # composition


def test_fit_of_several_blocks(make_blocks):
    run = make_blocks(*two())
    run.fit()
    run.fit()
    assert run.callback.privacy_event == event(num_blocks=2)
    assert run.callback.get_epsilon(DELTA) == pytest.approx(exact(event(num_blocks=2)))


def test_a_frozen_layer_is_in_no_block(make_blocks):
    run = make_blocks(layers.Dense(2, trainable=False), layers.BatchNormalization(trainable=False),
                      layers.Dense(1))  # fmt: skip
    run.fit()
    assert run.callback.privacy_event == event(1)


# Releases within the run


def released(run):
    run.fit()
    run.callback.release()


def files_of_epochs(run):
    run.fit(callbacks=[callbacks.ModelCheckpoint("a.keras")])


def files_of_steps(run):
    run.fit(callbacks=[callbacks.ModelCheckpoint("b", save_freq=1, save_weights_only=True)])


@pytest.mark.parametrize(
    ("act", "number"), [(released, 1), (files_of_epochs, 2), (files_of_steps, 1)]
)
def test_releases_within_the_run_are_accounted_by_composition(make_blocks, act, number):
    run = make_blocks(*two()) if number == 2 else make_blocks(loss_geometry=LOGISTIC)
    act(run)
    run.fit()
    guarantee = run.callback.guarantee
    assert guarantee.theorem.startswith("composition")
    assert guarantee.epsilon(DELTA) == pytest.approx(exact(event(num_blocks=number)))
    assert run.callback.get_epsilon(DELTA) == guarantee.epsilon(DELTA)


def test_the_last_release_costs_nothing_more(make_blocks):
    run = make_blocks(loss_geometry=LOGISTIC)
    run.fit(epochs=2)
    before = run.callback.get_epsilon(DELTA)
    run.callback.release()
    assert (
        run.callback.get_epsilon(DELTA)
        == before
        == pytest.approx(exact(event(block_loss=LOGISTIC)))
    )
    private = make_blocks(loss_geometry=LOGISTIC, checkpoints_stay_private=True)
    private.fit(epochs=2, callbacks=[callbacks.ModelCheckpoint("a.keras")])
    assert private.callback.get_epsilon(DELTA) == before


def of_layers(model):
    return [layer.trainable_variables for layer in model.layers]


# What is refused


def rate_of_epochs(make_blocks):
    scheduler = callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch))
    make_blocks().fit(callbacks=[scheduler], epochs=2)


def interrupted_between_the_blocks(make_blocks):
    run = make_blocks(*two())
    run.fit()
    calls = []

    def loss():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return bce()(run.y[:4], run.model(run.x[:4]))

    with pytest.raises(KeyboardInterrupt):
        run.optimizer.minimize(loss, of_layers(run.model))
    run.callback.report(DELTA)


CASES = {
    rate_of_epochs: "step 7 used learning_rate = 0.25, expected 0.5",
    interrupted_between_the_blocks: "changed outside the private optimizer",
}


@pytest.mark.parametrize("act", CASES, ids=lambda act: act.__name__)
def test_refused(make_blocks, act):
    with pytest.raises(hsa.UnsupportedRunError, match=CASES[act]):
        act(make_blocks)
