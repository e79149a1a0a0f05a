"""DP-MBCD for Keras: the steps of the paper in every mode, the event of what ran, refusals."""

import copy
import math

import block_coordinate as reference
import numpy as np
import pytest
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    CyclicDPKerasSGDOptimizer,
    cyclic_dataset,
)

ONE, SPECIAL = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
RATE, SIZE, CLIP, RECORDS = 0.25, 4, 0.75, 12
PROXES = [{}, {"l1": 0.3}, {"l2": 0.5}, {"l1": 0.1, "l2": 0.2, "nonnegative": True}]


@pytest.fixture(autouse=True)
def restored_precision():
    yield
    tf.keras.backend.set_floatx("float32")
    tf.keras.mixed_precision.set_global_policy("float32")


def records(dtype="float32"):
    random = np.random.default_rng(0)
    return random.normal(size=(2, RECORDS, 3)).astype(dtype)


def start(dtype="float64"):
    random = np.random.default_rng(1)
    return [random.normal(size=shape).astype(dtype) for shape in ((2, 3), (3, 2))]


def factors(dtype="float32", cls=tf.keras.Sequential):
    """x -> W2 W1 x: bilinear in the two blocks. (Keras' kernels are transposed.)"""
    layers = [tf.keras.layers.Dense(n, use_bias=False, dtype=dtype) for n in (2, 3)]
    model = cls(layers)
    model.build((None, 3))
    model.set_weights([w.T for w in start(dtype)])
    return model


def squares(y, outputs):
    return tf.reduce_sum((outputs - y) ** 2, axis=1) / 2


def blocks_of(model, num_blocks=2):
    if num_blocks == 2:
        return [layer.trainable_variables for layer in model.layers]
    return model.trainable_variables


def make(**options):
    arguments = {"l2_norm_clip": CLIP, "noise_multiplier": 0.0, "learning_rate": RATE}
    return BlockCoordinateKerasOptimizer(**(arguments | options))


def batches(steps, dtype="float32"):
    x, y = records(dtype)
    for t in range(steps):
        rows = slice(t * SIZE % RECORDS, t * SIZE % RECORDS + SIZE)
        yield x[rows], y[rows]


def step(model, optimizer, batch, num_blocks=2):
    x, y = batch
    optimizer.minimize(lambda: squares(y, model(x)), blocks_of(model, num_blocks))


def train(model, optimizer, steps=6, **kwargs):
    for batch in batches(steps):
        step(model, optimizer, batch, **kwargs)


def values(model):
    return [w.T for w in model.get_weights()]


def expected(steps, noise=None, **regulariser):
    blocks = start()
    for t, batch in enumerate(batches(steps, "float64")):
        blocks = reference.step(
            blocks, reference.factorisation_gradients, batch, noise[t] if noise else (0.0, 0.0),
            step_size=RATE, divisor=SIZE, clip_norm=CLIP, **regulariser,
        )  # fmt: skip
    return blocks


def assert_close(model, blocks, atol):
    for mine, theirs in zip(values(model), blocks, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol)


# --- the steps of the paper -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regulariser", "dtype"), [(PROXES[-1], "float32"), *((prox, "float64") for prox in PROXES)]
)
def test_own_loop_equals_the_reference_with_given_noise(monkeypatch, regulariser, dtype):
    random = np.random.default_rng(2)
    noise = [[random.normal(size=w.shape) for w in start()] for _ in range(4)]
    drawn = []

    def normal(_, shape, stddev, dtype):
        t, block = divmod(len(drawn), 2)
        drawn.append(stddev)
        part = noise[t][block].T
        assert tuple(shape) == part.shape
        return tf.constant(stddev * part, dtype)

    monkeypatch.setattr(tf.random.Generator, "normal", normal)
    tf.keras.backend.set_floatx(dtype)
    model, optimizer = factors(dtype), make(noise_multiplier=1.5, **regulariser)
    for batch in batches(4, dtype):
        step(model, optimizer, batch)
    scaled = [[1.5 * CLIP * part for part in parts] for parts in noise]
    blocks = expected(4, scaled, **regulariser)
    assert_close(model, blocks, 5e-6 if dtype == "float32" else 1e-13)
    assert set(drawn) == {1.5 * CLIP}
    assert optimizer.num_steps == 4
    assert optimizer.num_blocks == 2


def test_the_run_that_opacus_makes_too():
    tf.keras.backend.set_floatx("float64")
    start, data, end = reference.shared_run()
    shared = reference.SHARED
    model = factors("float64")
    model.set_weights([block.T for block in start])
    optimizer = make(
        l2_norm_clip=shared["clip_norm"], num_microbatches=shared["divisor"],
        learning_rate=shared["step_size"], l1=shared["l1"], l2=shared["l2"],
    )  # fmt: skip
    for batch in data:
        step(model, optimizer, batch)
    assert_close(model, end, 1e-13)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_graph_equals_the_reference(jit_compile):
    model, optimizer = factors(), make(l1=0.1, l2=0.2, num_microbatches=SIZE)

    @tf.function(jit_compile=jit_compile)
    def compiled(x, y):
        optimizer.minimize(lambda: squares(y, model(x)), blocks_of(model))

    for x, y in batches(6):
        compiled(tf.constant(x), tf.constant(y))
    assert_close(model, expected(6, l1=0.1, l2=0.2), 5e-6)
    assert optimizer.privacy_event(dataset_size=RECORDS, neighboring_relation=ONE).num_epochs == 2


class BlockModel(tf.keras.Sequential):
    """The recipe of docs/block_coordinate.md."""

    def train_step(self, data):
        x, y = data
        self.optimizer.minimize(
            lambda: self.compute_loss(x, y, self(x, training=True)),
            [layer.trainable_variables for layer in self.layers],
        )
        return {}


@pytest.mark.parametrize("mode", [{}, {"jit_compile": True}])
def test_fit_with_several_blocks(mode):
    model, optimizer = factors(cls=BlockModel), make()
    model.compile(optimizer, tf.keras.losses.MeanSquaredError(reduction="none"), **mode)
    x, y = records()
    scale = np.float32(1.5**0.5)  # the mean of three squares is 2/3 of half of their sum
    model.fit(cyclic_dataset(scale * x, scale * y, batch_size=SIZE), epochs=2, verbose=0)
    assert_close(model, expected(6), 5e-6)
    assert "x 2 blocks" in optimizer.report(1e-5, dataset_size=RECORDS)


def test_fit_with_one_block_is_that_of_the_cyclic_optimizer():
    """All variables clipped as one vector."""
    ends = []
    for optimizer in (
        make(),
        CyclicDPKerasSGDOptimizer(CLIP, 0.0, learning_rate=RATE),
    ):
        model = factors()
        loss = tf.keras.losses.MeanSquaredError(reduction="none")
        model.compile(optimizer, loss)
        x, y = records()
        model.fit(cyclic_dataset(x, y, batch_size=SIZE), verbose=0)
        ends.append(np.concatenate([w.ravel() for w in values(model)]))
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_noise_has_the_stated_deviation(jit_compile):
    """eta z C / b, fresh in every block and step."""
    shape = (60, 60)
    blocks = [[tf.Variable(tf.zeros(shape))], [tf.Variable(tf.zeros(shape))]]
    optimizer = make(noise_multiplier=3.0)

    @tf.function(jit_compile=jit_compile)
    def compiled():
        optimizer.minimize(
            lambda: 0.0 * (tf.ones([2]) * tf.reduce_sum(blocks[0][0] * blocks[1][0])), blocks
        )

    draws = []
    for _ in range(3):
        before = [b[0].numpy() for b in blocks]
        compiled()
        draws += [(b[0].numpy() - old).ravel() for b, old in zip(blocks, before, strict=True)]
    draws, std = np.array(draws, dtype=float), RATE * 3.0 * CLIP / 2
    assert abs(draws.std() / std - 1) < 6 / math.sqrt(2 * draws.size)
    assert abs(draws.mean()) < 6 * std / math.sqrt(draws.size)
    correlation = np.corrcoef(draws)[np.triu_indices(len(draws), 1)]
    assert abs(correlation).max() < 6 / math.sqrt(draws.shape[1])


# --- the event ------------------------------------------------------------------------------------


def test_the_event_is_the_run():
    model, optimizer = factors(), make(noise_multiplier=2.0, l2=0.5)
    train(model, optimizer)
    event = optimizer.privacy_event(dataset_size=RECORDS, neighboring_relation=ONE)
    assert event == hsa.BlockCoordinateDpEvent(
        step_size=RATE, noise_variance=RATE * (2.0 * CLIP / SIZE) ** 2 / 2,
        clip_norm=CLIP, batch_size=SIZE, dataset_size=RECORDS, num_epochs=2,
        prox_strong_convexity=0.5, num_blocks=2,
    )  # fmt: skip
    assert event.sensitivity(ONE) == 2 * CLIP
    assert event.sensitivity(SPECIAL) == CLIP
    assert optimizer.privacy_event(dataset_size=RECORDS, neighboring_relation=SPECIAL) == event
    epsilon = hsa.BlockCoordinateAccountant(SPECIAL).compose(event).get_epsilon(1e-5)
    text = optimizer.report(1e-5, dataset_size=RECORDS)
    assert f"epsilon = {fixed_up(epsilon, 4)} at delta = 1e-05" in text
    assert "composition" in text


def test_one_block_may_profit():
    model, optimizer = factors(), make(noise_multiplier=2.0, l2=2.0)
    for t, (x, y) in enumerate(batches(6)):  # long gradients in the first step only
        x, y = (x, y) if t == 0 else (1e-4 * x, 1e-4 * y)
        step(model, optimizer, (x, y), num_blocks=1)
    loss = hsa.LossGeometry.generalized_linear(1.0)
    event = optimizer.privacy_event(
        dataset_size=RECORDS, neighboring_relation=SPECIAL, block_loss=loss
    )
    guarantee = hsa.BlockCoordinateAccountant(SPECIAL).compose(event).guarantee
    assert "Theorem A" in guarantee.theorem
    assert guarantee.mu < math.sqrt(2) / 2.0
    with pytest.raises(hsa.UnsupportedRunError, match="the largest gradient of this run"):
        optimizer.report(
            1e-5, dataset_size=RECORDS, block_loss=hsa.LossGeometry.convex(1.0, lipschitz=0.01)
        )


@pytest.mark.parametrize("relation", [ONE, SPECIAL])
def test_one_scalar_block_against_its_exact_law(relation):
    """What really happens to neighbouring data sets is within the report, and near it."""
    l2, noise, ends = 1.0, 5.0, []
    targets = (0.7, -0.7 if relation is ONE else 0.0, 0.0)
    for target, multiplier in zip(targets, (0.0, 0.0, noise), strict=True):
        w, optimizer = tf.Variable(0.0), make(l2=l2, noise_multiplier=multiplier)

        @tf.function
        def compiled(y, w=w, optimizer=optimizer):
            optimizer.minimize(lambda: (w - y) ** 2 / 2, [w])

        for t in range(12):
            compiled(tf.constant([target if t % 3 == 2 else 0.0, 0.0]))
        assert multiplier or optimizer._log.read_run().largest_norm < CLIP  # it is linear
        ends.append(float(w))
    factor = 1 / (1 + RATE * l2)
    decay = (factor * (1 - RATE)) ** (2 * np.arange(12))
    exact_mu = abs(ends[0] - ends[1]) / (factor * RATE * noise * CLIP / 2 * math.sqrt(decay.sum()))
    event = optimizer.privacy_event(
        dataset_size=6, neighboring_relation=relation,
        block_loss=hsa.LossGeometry.squared_error(1.0),
    )  # fmt: skip
    mu = hsa.BlockCoordinateAccountant(relation).compose(event).guarantee.mu
    assert 0.6 * mu < exact_mu <= mu


# --- saving ---------------------------------------------------------------------------------------


def test_the_arguments_survive(tmp_path):
    optimizer = make(noise_multiplier=2.0, num_microbatches=SIZE, l1=0.1, l2=0.2, nonnegative=True)
    again = BlockCoordinateKerasOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    serialized = tf.keras.optimizers.serialize(optimizer, use_legacy_format=True)
    assert tf.keras.optimizers.deserialize(serialized, use_legacy_format=True).get_config() == (
        optimizer.get_config()
    )
    model = factors()
    model.compile(optimizer, tf.keras.losses.MeanSquaredError(reduction="none"))
    x, y = records()
    model.fit(cyclic_dataset(x, y, batch_size=SIZE), verbose=0)
    for name in ("model.keras", "model.h5", "folder"):
        model.save(tmp_path / name)
        loaded = tf.keras.models.load_model(tmp_path / name)
        assert type(loaded.optimizer) is BlockCoordinateKerasOptimizer
        own, other = optimizer.get_config(), loaded.optimizer.get_config()
        assert other.pop("runs_behind_the_weights") == own.pop("runs_behind_the_weights")
        assert other == pytest.approx(own, abs=1e-8)
        with pytest.raises(ValueError, match="at least one step"):  # the steps stay behind
            loaded.optimizer.report(1e-5, dataset_size=RECORDS)
    assert copy.deepcopy(optimizer).num_steps == 0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"l2_norm_clip": 0.0}, "l2_norm_clip > 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"num_microbatches": 0}, "num_microbatches"),
        (
            {"learning_rate": tf.keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)},
            "constant",
        ),
        ({"learning_rate": -0.1}, "learning_rate"),
        ({"l1": -1.0}, "l1"),
        ({"l2": math.inf}, "l2"),
        ({"nonnegative": 1}, "nonnegative"),
        ({"momentum": 0.9}, "momentum"),
        ({"clipnorm": 1.0}, "clipnorm"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"weight_decay": 0.1}, "unexpected argument"),
    ],
)
def test_constructions_that_are_refused(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make(**options)


def move(model, optimizer):
    model.layers[0].kernel.assign(0.9 * model.layers[0].kernel)


def set_rate(model, optimizer):
    optimizer.learning_rate = 0.1


def set_noise(model, optimizer):
    optimizer._mean.noise_multiplier = 1.0


def set_clip(model, optimizer):
    optimizer._mean.l2_norm_clip = 0.5


def accumulate(model, optimizer):
    optimizer.gradient_accumulation_steps = 2


def add_momentum(model, optimizer):
    optimizer._momentum = True


def reseed(model, optimizer):
    for _ in range(2):
        optimizer._mean._noise._generator.reset_from_seed(7)
        train(model, optimizer, 1)


def direct_gradients(model, optimizer):
    optimizer._compute_gradients(lambda: tf.zeros([SIZE]), blocks_of(model))


def drop_a_block(model, optimizer):
    optimizer.minimize(lambda: tf.zeros([SIZE]), blocks_of(model)[:1])


def swap_blocks(model, optimizer):
    optimizer.minimize(lambda: tf.zeros([SIZE]), blocks_of(model)[::-1])


def merge_blocks(model, optimizer):
    optimizer.minimize(lambda: tf.zeros([SIZE]), blocks_of(model, 1))


def a_tensor(model, optimizer):
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(model(np.ones((SIZE, 3))) ** 2, axis=1)
    optimizer.minimize(loss, blocks_of(model), tape=tape)


def interrupt(model, optimizer):
    def loss():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.minimize(loss, blocks_of(model))


def a_loss(function):
    """A mistake in the loss of the second block."""

    def tamper(model, optimizer):
        calls = []

        def loss():
            calls.append(1)
            good = tf.reduce_sum(model(np.ones((SIZE, 3))) ** 2, axis=1)
            return good if len(calls) == 1 else function(model, optimizer, good)

        optimizer.minimize(loss, blocks_of(model))

    return tamper


def moving_loss(model, optimizer, loss):
    move(model, optimizer)
    return loss


def reporting_loss(model, optimizer, loss):
    optimizer.report(1e-5, dataset_size=SIZE)
    return loss


@pytest.mark.parametrize(
    ("tamper", "text"),
    [
        (move, "changed outside the private optimizer"),
        (set_rate, "learning rate, clip norm or noise multiplier was changed"),
        (set_noise, "learning rate, clip norm or noise multiplier was changed"),
        (set_clip, "learning rate, clip norm or noise multiplier was changed"),
        (accumulate, "gradient_accumulation_steps"),
        (add_momentum, "momentum"),
        (reseed, "The generator of the noise was set"),
        (direct_gradients, r"Expected minimize\(loss, blocks\)|blocks of the first step"),
        (drop_a_block, "blocks of the first step"),
        (swap_blocks, "blocks of the first step"),
        (merge_blocks, "blocks of the first step"),
        (a_tensor, "Expected a function as loss"),
        (interrupt, "refused, interrupted or not applied"),
        (a_loss(lambda m, o, loss: loss[:3]), "another number of rows"),
        (a_loss(lambda m, o, loss: tf.reduce_mean(loss)), "got a scalar"),
        (a_loss(lambda m, o, loss: loss / 0.0), "not finite"),
        (a_loss(moving_loss), "changed outside the private optimizer"),
        (a_loss(reporting_loss), "were finished"),
    ],
)
def test_runs_that_are_not_covered(tamper, text):
    model, optimizer = factors(), make(noise_multiplier=2.0)
    train(model, optimizer, 1)
    optimizer.report(1e-5, dataset_size=SIZE)  # so far it is fine

    def go_on():
        tamper(model, optimizer)
        train(model, optimizer, 1)

    with pytest.raises(hsa.UnsupportedRunError, match=text):
        go_on()


def test_a_rate_that_is_changed_before_the_last_update_is_applied():
    w = tf.Variable([1.0, 2.0])
    optimizer = make(noise_multiplier=2.0)
    for is_last in (False, True):
        pairs = optimizer._compute_gradients(lambda: tf.ones([SIZE]) * tf.reduce_sum(w), [w])
        if is_last:
            optimizer.learning_rate = 0.9
        optimizer.apply_gradients(pairs)
    with pytest.raises(hsa.UnsupportedRunError, match="were finished"):
        optimizer.report(1e-5, dataset_size=SIZE)


@pytest.mark.parametrize("kind", [BlockCoordinateKerasOptimizer, CyclicDPKerasSGDOptimizer])
def test_gradients_whose_squares_underflow(kind):
    """Their norm comes out as 0, so that they would count for 300 clip norms."""
    w = tf.Variable(tf.zeros([10]))
    optimizer = kind(1e-25, 1.0, learning_rate=0.1)
    with pytest.raises(hsa.UnsupportedRunError, match="underflow"):
        optimizer.minimize(lambda: 1e-23 * tf.reduce_sum(w) * tf.ones([2]), [w])
    w = tf.Variable(tf.zeros([10], tf.float64))
    optimizer = kind(1e-25, 0.0, learning_rate=1.0)
    optimizer.minimize(lambda: 1e-23 * tf.reduce_sum(w) * tf.ones([2], tf.float64), [w])
    assert np.linalg.norm(w) == pytest.approx(1e-25)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_refused_update_ends_the_run(jit_compile):
    """Also where nothing can raise: the variables stay as they are, and there is no epsilon."""
    model, optimizer = factors(), make(noise_multiplier=2.0)

    @tf.function(jit_compile=jit_compile)
    def compiled(x, y):
        optimizer.minimize(lambda: squares(y, model(x)), blocks_of(model))

    good = [tf.constant(part) for part in next(batches(1))]
    compiled(*good)
    before = values(model)
    for batch in ([good[0] * math.nan, good[1]], good, good):
        if jit_compile:
            compiled(*batch)
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match="not taken"):
                compiled(*batch)
        for mine, theirs in zip(values(model), before, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    for call in (optimizer.report, optimizer.privacy_event):
        arguments = {"delta": 1e-5} if call == optimizer.report else {"neighboring_relation": ONE}
        with pytest.raises(hsa.UnsupportedRunError, match="may depend on the examples"):
            call(dataset_size=SIZE, **arguments)


def test_refusals_keep_their_type_in_a_graph():
    model, optimizer = factors(), make()

    @tf.function
    def compiled(x, y):
        with tf.GradientTape() as tape:
            loss = squares(y, model(x))
        optimizer.minimize(loss, blocks_of(model), tape=tape)

    with pytest.raises(hsa.UnsupportedRunError, match="override train_step"):
        compiled(*next(batches(1)))


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (lambda a, b: [[a], []], "blocks that have variables"),
        (lambda a, b: [[a], [a, b]], "each variable in one block"),
        (lambda a, b: [a, [b]], "both in one list"),
        (lambda a, b: [], "blocks that have variables"),
    ],
)
def test_lists_that_are_no_blocks(blocks, text):
    variables = tf.Variable([1.0]), tf.Variable([2.0])
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make().minimize(lambda: tf.zeros([2]), blocks(*variables))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dataset_size": 13}, "multiple of the 4 records"),
        ({"dataset_size": 12}, "whole epochs of 3 steps, got 2"),
        ({"neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE}, "same number of records"),
        ({"block_loss": "convex"}, "LossGeometry"),
    ],
)
def test_events_that_are_refused(arguments, text):
    model, optimizer = factors(), make()
    train(model, optimizer, 2)
    with pytest.raises((ValueError, TypeError), match=text):
        optimizer.privacy_event(
            **({"dataset_size": 2 * SIZE, "neighboring_relation": ONE} | arguments)
        )


def test_the_model_after_the_run():
    model, optimizer = factors(), make()
    with pytest.raises(ValueError, match="at least one step"):
        optimizer.report(1e-5, dataset_size=RECORDS)
    train(model, optimizer, 1)
    move(model, optimizer)
    with pytest.raises(hsa.UnsupportedRunError, match="changed after the last step"):
        optimizer.report(1e-5, dataset_size=SIZE)
