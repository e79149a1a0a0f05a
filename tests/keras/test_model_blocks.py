"""DP-MBCD of a model that owns its run: its steps, its blocks, and what is said of it."""

import block_coordinate as reference
import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import BlockCoordinateUpdate, HiddenStateSequential
from hidden_state_adapters.tf_privacy.gradients import RowByRow, ThroughLinearLayers

WITHOUT_GRAPHS = pytest.mark.usefixtures("without_graphs")
SHARED, BATCH, RECORDS, FEATURES = reference.SHARED, 4, 12, 3
layers, optimizers = tf.keras.layers, tf.keras.optimizers
PROX = hsa.Regulariser(l1=SHARED["l1"], l2=SHARED["l2"])


def squares(targets, outputs):
    return tf.reduce_sum((outputs - targets) ** 2, axis=1) / 2


def data():
    _, batches, _ = reference.shared_run()
    return [np.concatenate([batch[part] for batch in batches[:3]]) for part in (0, 1)]


X, Y = data()


def of_layers(model):
    return [layer.trainable_variables for layer in model.layers]


def make(stack=None, *, blocks=of_layers, optimizer=None, compile=None, prox=PROX, **kwargs):
    settings = {
        "l2_norm_clip": SHARED["clip_norm"],
        "noise_multiplier": 0.0,
        "prox": prox,
        **kwargs,
    }
    stack = stack or [layers.Dense(n, use_bias=False) for n in (2, 3)]
    model = HiddenStateSequential(stack, **{"batch_order": "cyclic", **settings})
    model.build((None, FEATURES))
    optimizer = optimizer or optimizers.SGD(SHARED["step_size"])
    rule = BlockCoordinateUpdate(optimizer, lambda: blocks(model))
    model.compile(rule, squares, **(compile or {}))
    return model


def fit(model, **kwargs):
    return model.fit(X, Y, **{"batch_size": BATCH, "verbose": 0, **kwargs})


@pytest.fixture
def in_float64(restored_precision):
    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")


@pytest.mark.parametrize(
    ("compile", "clipping"),
    [
        ({}, RowByRow),
        ({"jit_compile": True}, ThroughLinearLayers),
    ],
)
def test_the_steps_are_those_of_the_paper_and_of_opacus(compile, clipping, in_float64, monkeypatch):
    """Of the second block at what the first one has become."""
    if clipping is RowByRow:
        monkeypatch.setattr(ThroughLinearLayers, "of", lambda *args: None)
    start, _, expected = reference.shared_run()
    model = make(compile=compile)
    model.set_weights([block.T for block in start])  # Keras' kernels are transposed
    fit(model, epochs=2)
    assert {type(one) for one in model._run.clipping} == {clipping}
    for own, block in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(own.T, block, rtol=1e-9)


@pytest.mark.parametrize("order", ["cyclic", "full"])
@WITHOUT_GRAPHS
def test_the_account_is_that_of_the_event(order):
    model = make(
        noise_multiplier=2.0, batch_order=order, compile={"run_eagerly": True}, target_delta=1e-5
    )
    history = fit(model, epochs=2).history["epsilon_if_released_now"]
    size = RECORDS if order == "full" else BATCH
    event = hsa.BlockCoordinateDpEvent(
        step_size=0.25,
        noise_variance=0.25 * (2.0 * 0.75 / size) ** 2 / 2,
        clip_norm=0.75,
        batch_size=size,
        dataset_size=RECORDS,
        num_epochs=2,
        prox_strong_convexity=0.25,
        num_blocks=2,
    )
    assert model.privacy_event == event
    expected = hsa.BlockCoordinateAccountant().compose(event).get_epsilon(1e-5)
    assert history[1] == model.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-9)
    assert "the clip of each block as one vector" in " ".join(model.report(1e-5).split())


@WITHOUT_GRAPHS
def test_one_block_hides_its_iterates():
    """The loss of a linear head is read off, and a release in between costs composition."""
    model = HiddenStateSequential(
        [layers.Dense(2)],
        l2_norm_clip=2.0,
        noise_multiplier=4.0,
        batch_order="cyclic",
        loss_geometry="auto",
        feature_norm=1.0,
        prox=hsa.Regulariser(l2=0.1),
    )
    rule = BlockCoordinateUpdate(optimizers.SGD(0.5))
    model.compile(rule, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = (X / np.linalg.norm(X, axis=1, keepdims=True)).astype("float32")
    labels = np.arange(RECORDS) % 2
    model.fit(x, labels, batch_size=BATCH, epochs=20, verbose=0)
    event = model.privacy_event
    loss = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)
    assert (event.num_blocks, event.block_loss) == (1, loss)
    hidden = model.get_epsilon(1e-5)
    model.release()
    model.fit(x, labels, batch_size=BATCH, epochs=1, verbose=0)
    assert model.privacy_event.block_loss is None
    assert model.get_epsilon(1e-5) > 1.2 * hidden


@WITHOUT_GRAPHS
def test_other_blocks_do_not_go_on():
    model = make(compile={"run_eagerly": True})
    fit(model)
    state, again = model.state(), make(blocks=lambda model: of_layers(model)[::-1])
    again.set_weights(model.get_weights())
    again.resume(state)
    with pytest.raises(ValueError, match="blocks of the run so far"):
        fit(again)


@WITHOUT_GRAPHS
def test_noise_is_drawn_for_every_block():
    model = make([layers.Dense(200), layers.Dense(10)], noise_multiplier=3.0, prox=None)
    model.compile(
        BlockCoordinateUpdate(optimizers.SGD(1.0), lambda: of_layers(model)),
        lambda targets, outputs: 0.0 * outputs[:, 0],
    )
    start = model.get_weights()
    fit(model)
    expected = np.sqrt(RECORDS / BATCH) * 3.0 * 0.75 / BATCH
    for own, before in zip(model.get_weights()[::2], start[::2], strict=True):
        assert np.std(own - before) == pytest.approx(expected, rel=0.2)


@WITHOUT_GRAPHS
def test_a_refused_block_ends_the_run():
    """The gradient of the second block is not finite once the first one has moved."""

    def loss(targets, outputs):
        weights = model.layers[0].kernel
        moved = tf.reduce_any(tf.not_equal(weights, start[0]))
        return tf.where(moved, np.inf, 1.0) * outputs[:, 0]

    model = make(compile={"run_eagerly": True}, prox=None)
    start = model.get_weights()
    model.compile(model._rule, loss)
    with pytest.raises(hsa.UnsupportedRunError, match="not finite"):
        fit(model)
    np.testing.assert_array_equal(model.get_weights()[-1], start[-1])
    with pytest.raises(hsa.UnsupportedRunError, match="not finite"):
        model.get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_order": "poisson"}, 'batch_order="cyclic" or "full"'),
        ({"projection_radius": 9.0}, "projection_radius = None"),
        (
            {"optimizer": optimizers.Adam()},
            "constant learning rate in BlockCoordinateUpdate, got A",
        ),
        ({"optimizer": optimizers.SGD(0.1, weight_decay=0.1)}, "a weight_decay or a schedule"),
        (
            {"optimizer": optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 9))},
            "a weight_decay or a schedule",
        ),
        ({"blocks": lambda model: of_layers(model)[:1]}, "together the trainable variables"),
        ({"blocks": lambda model: [["a"], ["b"]]}, "blocks of variables, got 'a'"),
        ({"blocks": lambda model: of_layers(model) * 2}, "each variable in one block"),
        ({"blocks": lambda model: [*of_layers(model)[0], []]}, "got both in one list"),
    ],
)
@WITHOUT_GRAPHS
def test_refusals(arguments, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        fit(make(**arguments))
