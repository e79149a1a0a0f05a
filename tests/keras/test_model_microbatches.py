"""Microbatches of a model: the mean gradient of several examples is clipped as one."""

import attrs
import numpy as np
import pytest
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow")
import tensorflow as tf
from cases import first

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import HiddenStateSequential, keras_api
from hidden_state_adapters.tf_privacy.gradients import MeansOfSeveral, ThroughLinearLayers
from hidden_state_adapters.tf_privacy.head_losses import RowLosses

SGD, DELTA, ONE = tf.keras.optimizers.SGD, 1e-5, NeighboringRelation.REPLACE_ONE
RECORDS, FEATURES, CLASSES, BATCH, EACH = 24, 4, 3, 6, 2
ORDERS = ("poisson", "cyclic", "reshuffled", "shuffled_once", "without_replacement", "full")
AUTO = {"loss_geometry": "auto", "feature_norm": 1.0}
SOFTMAX = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)
X = np.random.default_rng(0).normal(size=(RECORDS, FEATURES)).astype("float32")
X /= np.linalg.norm(X, axis=1, keepdims=True)
Y = np.random.default_rng(1).integers(0, CLASSES, RECORDS)
WEIGHTS = {"class_weight": {0: 0.5, 1: 1.0, 2: 2.0}, "sample_weight": np.linspace(0, 2, RECORDS)}


def make(*, optimizer=None, eager=True, jit_compile=False, **kwargs):
    settings = {"l2_norm_clip": 0.4, "noise_multiplier": 2.0, "num_microbatches": 3, **kwargs}
    head = tf.keras.layers.Dense(CLASSES, kernel_initializer="ones")
    model = HiddenStateSequential([head], **settings)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or SGD(0.5, weight_decay=0.1)
    model.compile(optimizer, loss, run_eagerly=eager, jit_compile=jit_compile)
    model.build((None, FEATURES))
    return model


def fit(model, **kwargs):
    model.fit(**{"x": X, "y": Y, "batch_size": BATCH, "epochs": 2, "verbose": 0, **kwargs})
    return model


def clipped_means(batches, weights=None, *, each=EACH, clip=0.4, rate=0.5, decay=0.1):
    """The same run without noise, in float64: some examples after each other are one."""
    factors = np.ones(RECORDS) if weights is None else weights
    state = np.r_[np.ones((FEATURES, CLASSES)), np.zeros((1, CLASSES))]
    rows = np.c_[X.astype(float), np.ones(RECORDS)]
    for batch in batches:
        total = np.zeros_like(state)
        for record in batch:
            part = slice(each * record, each * (record + 1))
            slopes = np.exp(rows[part] @ state)
            slopes /= slopes.sum(1, keepdims=True)
            slopes[np.arange(each), Y[part]] -= 1
            mean = rows[part].T @ (factors[part, None] * slopes) / each
            total += mean * min(1, clip / np.linalg.norm(mean))
        state = (1 - rate * decay) * state - rate / 3 * total
    return state


@pytest.mark.parametrize("order", first(2, ORDERS))
def test_a_step_clips_the_means(order, dealt, without_graphs, row_by_row):
    model = fit(make(noise_multiplier=0.0, batch_order=order))
    steps, each = (2, 8) if order == "full" else (8, EACH)
    means = clipped_means([dealt[step] for step in range(steps)], each=each)
    np.testing.assert_allclose(np.vstack(model.get_weights()), means, atol=1e-5)


def test_weights_are_within_the_mean(dealt):
    """Compiled by XLA, which fills batches up."""
    fit(model := make(noise_multiplier=0.0, eager=False, jit_compile=True), **WEIGHTS)
    weights = np.array([0.5, 1.0, 2.0])[Y] * WEIGHTS["sample_weight"]
    expected = clipped_means([dealt[step] for step in range(8)], weights)
    np.testing.assert_allclose(np.vstack(model.get_weights()), expected, atol=1e-5)


WIDE = np.random.default_rng(2).normal(size=(RECORDS, 60)).astype("float32")


def wide(*, stack=None, loss=None, each=EACH):
    """A model of `Dense` layers, what gives its gradients, and what gives them row by row."""
    model = tf.keras.Sequential(stack or [tf.keras.layers.Dense(12)])
    model.build((None, 60))
    row_losses = RowLosses(loss or tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    arguments = model, row_losses, keras_api.trained(model)
    return ThroughLinearLayers.of(*arguments, WIDE, each), MeansOfSeveral(*arguments)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("weights", [(), (WEIGHTS["sample_weight"],)])
def test_products_of_examples_give_the_lengths_of_means(layers, weights, restored_precision):
    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")
    hidden = [tf.keras.layers.Dense(60, "tanh", use_bias=False)] * (layers - 1)
    fast, slow = wide(stack=[*hidden, tf.keras.layers.Dense(12)])
    rows = [np.reshape(part, [-1, EACH, *np.shape(part)[1:]]) for part in (WIDE, Y, *weights)]
    rows = [tf.constant(part, tf.int64 if part.dtype == int else tf.float64) for part in rows]
    found, expected = fast.gradients(*rows), slow.gradients(*rows)
    for name in ("norms", "losses", "outputs"):
        own, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-12)
    factors = tf.constant(np.linspace(0, 1, RECORDS // EACH))
    sums = zip(found.weighted_sum(factors), expected.weighted_sum(factors), strict=True)
    for own, other in sums:
        np.testing.assert_allclose(own, other, atol=1e-9)


def test_lengths_of_gradients_that_cancel_each_other():
    """Half of the digits of a product are lost, which float32 has not; none is too small."""
    x = 1000 * np.repeat(WIDE[::2], 2, axis=0)
    slopes = np.random.default_rng(3).normal(size=(RECORDS, 12)).astype("float32")
    fast, _ = wide(loss=lambda y, outputs: tf.reduce_sum(y * outputs, 1))
    slopes[1::2] = -slopes[::2] * np.float32(1 - 2**-20)
    x, slopes = (tf.reshape(tf.constant(part), [-1, 2, part.shape[1]]) for part in (x, slopes))
    norms = fast.gradients(x, slopes).norms
    means = np.einsum("rmf,rmc->rfc", *(np.float64(part) for part in (x, slopes))) / 2
    biases = np.float64(slopes).mean(1)
    exact = np.sqrt((means**2).sum((1, 2)) + (biases**2).sum(1))
    assert (norms.numpy() >= exact * (1 - 1e-9)).all()
    assert (norms.numpy() <= 1.6 * exact).all()


def test_what_a_record_adds_to_the_sum_is_no_longer_than_its_length():
    """The sum of gradients that cancel each other is rounded as each of them is."""
    rng, records = np.random.default_rng(0), 60
    model = tf.keras.Sequential([tf.keras.layers.Dense(20, use_bias=False)])
    model.build((None, 12))
    x = 1e4 * np.repeat(rng.normal(size=(records, 12)), 2, axis=0).astype("float32")
    slopes = np.repeat(rng.normal(size=(records, 20)), 2, axis=0).astype("float32")
    x[1::2] *= 1 - np.float32(2**-16) * rng.random((records, 12), dtype="float32")
    slopes[1::2] *= -1
    losses = RowLosses(lambda y, outputs: tf.reduce_sum(y * outputs, 1))
    fast = ThroughLinearLayers(model, losses, model.layers, keras_api.trained(model), 2)
    found = fast.gradients(*(tf.constant(part.reshape(records, 2, -1)) for part in (x, slopes)))
    added = []
    for record, norm in enumerate(found.norms.numpy()):
        (total,) = found.weighted_sum(tf.constant(np.eye(records)[record] / norm))
        added.append(float(np.linalg.norm(np.float64(total))))
    assert 0.9 < max(added) <= 1


@pytest.mark.parametrize("order", first(2, ORDERS))
def test_the_event_is_the_run(order, without_graphs, row_by_row):
    model = fit(make(batch_order=order, **AUTO))
    event, steps = model.privacy_event, 2 if order == "full" else 8
    assert event == hsa.LastIterateDpEvent(
        noise_multiplier=2.0,
        learning_rate=0.5,
        clip_norm=0.4,
        batch_size=3,
        dataset_size=3 if order == "full" else 12,
        num_steps=steps,
        batch_order=order,
        loss=SOFTMAX,
        weight_decay=0.1,
        is_microbatched=True,
    )
    exact = hsa.LastIterateAccountant(ONE).compose(event).get_epsilon(DELTA)
    assert model.get_epsilon(DELTA) == pytest.approx(exact, rel=1e-9)
    check_report(" ".join(model.report(DELTA).split()), 8 if order == "full" else EACH)
    alone = attrs.evolve(event, is_microbatched=False)
    assert exact > hsa.LastIterateAccountant().compose(alone).get_epsilon(DELTA)
    with pytest.raises(Exception, match=r"Use NeighboringRelation\.REPLACE_ONE"):
        hsa.LastIterateAccountant().compose(event)


def check_report(text, each):
    assert "over 24 examples with" in text
    assert f"with microbatches of {each}." in text
    assert "REPLACE_ONE adjacency" in text
    assert f"fixed microbatches of {each} examples" in text
    assert "half of the optimizer's" not in text
    assert "ANOTHER algorithm" not in text
    assert "Poisson sampling" not in text


def test_the_sum_moves_by_two_clip_norms(without_graphs, row_by_row):
    """An example that is replaced turns the mean of its microbatch around."""
    ends = []
    for sign in (1, -1):
        x = np.zeros((RECORDS, FEATURES), "float32")
        x[:2] = [[10, 0, 0, 0], [sign * 100 - 10, 0, 0, 0]]
        y = np.zeros(RECORDS, int)
        model = make(noise_multiplier=0.0, batch_order="cyclic", optimizer=SGD(1.0))
        fit(model, x=x, y=y, epochs=1)
        ends.append(np.vstack(model.get_weights()))
    moved = np.linalg.norm(ends[0] - ends[1])
    assert moved == pytest.approx(2 * 0.4 / 3, rel=0.05)  # twice the clip over the divisor


def test_the_mean_of_linear_models_is_none(without_graphs, row_by_row):
    """Their gradients have different directions, so that clipping may expand distances."""
    linear = hsa.LossGeometry.logistic(2.0, bias=True)
    model = fit(make(loss_geometry=linear), epochs=1)
    convex = hsa.LossGeometry.convex(linear.smoothness, linear.lipschitz)
    assert model.privacy_event.loss == convex != linear


def test_as_many_as_examples_are_one_each(without_graphs, row_by_row):
    model = fit(make(num_microbatches=BATCH, **AUTO))
    assert model.privacy_event == fit(make(num_microbatches=None, **AUTO)).privacy_event
    assert "without microbatching" in model.report(DELTA)


def test_noise_is_found_for_two_clip_norms(without_graphs, row_by_row):
    model = make(noise_multiplier=None, batch_order="cyclic", **AUTO)
    fit(model, target_epsilon=3.0, target_delta=DELTA)
    assert 2.99 < model.get_epsilon(DELTA) <= 3.0
    assert "REPLACE_ONE" in str(model.compare(DELTA))


def test_it_goes_on_and_is_saved(tmp_path, without_graphs, row_by_row):
    model = fit(make(batch_order="cyclic", **AUTO))
    state, path = model.state(stays_private=True), str(tmp_path / "model.keras")
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    loaded.resume(state)
    assert fit(loaded).privacy_event == attrs.evolve(model.privacy_event, num_steps=16)
    alone = make(num_microbatches=None, batch_order="cyclic", **AUTO)
    alone.set_weights(loaded.get_weights())
    alone.resume(loaded.state(stays_private=True))
    with pytest.raises(hsa.UnsupportedRunError, match="neighboring_relation = REPLACE_ONE"):
        fit(alone)


def test_it_does_not_go_on_with_others(without_graphs, row_by_row):
    """As many of another size: an example would be in another record, and in another batch."""
    same = {"num_microbatches": 1, "batch_order": "cyclic", "drop_remainder": True}
    examples = {"x": X[:11], "y": Y[:11]}
    model = fit(make(**same), batch_size=4, **examples)
    other = make(**same)
    other.set_weights(model.get_weights())
    other.resume(model.state(stays_private=True))
    with pytest.raises(hsa.UnsupportedRunError, match=r"microbatches of 4 .*microbatches of 5 "):
        fit(other, batch_size=5, **examples)


def test_a_run_after_it_needs_its_relation(without_graphs, row_by_row):
    """Its event says nothing about an example that is left out."""
    model = fit(make(batch_order="cyclic"))
    after = make(num_microbatches=None)
    after.set_weights(model.get_weights())
    with pytest.raises(hsa.UnsupportedRunError, match=r"Use NeighboringRelation\.REPLACE_ONE"):
        fit(after)
    after = make(num_microbatches=None, neighboring_relation="replace_one")
    after.set_weights(model.get_weights())
    assert len(fit(after).privacy_events) == 2


def test_what_does_not_fill_a_microbatch(without_graphs, row_by_row):
    short = {"x": X[:-1], "y": Y[:-1]}
    for order in ("poisson", "without_replacement"):
        with pytest.raises(hsa.UnsupportedRunError, match="the last 1 would make a smaller one"):
            fit(make(batch_order=order), **short)
        model = fit(make(batch_order=order, drop_remainder=True), **short)
        assert model.privacy_event.dataset_size == 11


def test_a_cap_is_in_examples(without_graphs, row_by_row):
    event = fit(make(max_batch_size=11)).privacy_event
    assert (event.max_batch_size, event.batch_size) == (5, 3)


def test_there_is_at_least_one():
    with pytest.raises(ValueError, match="num_microbatches"):
        make(num_microbatches=0)
