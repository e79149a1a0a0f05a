"""Own loops: HiddenStateRecorder accounts what ran, or raises."""

import pickle

import attrs
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import HiddenStateRecorder, cyclic_dataset

DELTA = 1e-5
EXPECTED = hsa.LastIterateDpEvent(
    noise_multiplier=2.0,
    learning_rate=0.5,
    clip_norm=1.5,
    batch_size=4,
    dataset_size=24,
    num_steps=12,
    batch_order="cyclic",
    loss=hsa.LossGeometry.logistic(1.0, bias=True),
    weight_decay=0.1,
)


def bce():
    return tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


class Loop:
    """What an own loop needs; `run` is the run of Model.fit in conftest.py, never fitted."""

    def __init__(self, run, **kwargs):
        self.model, self.optimizer, self.data = run.model, run.optimizer, run.data
        self.step = tf.function(self.eager_step)
        self.record = HiddenStateRecorder(self.model, self.optimizer, self.data, **kwargs)

    def losses(self, x, y):
        return bce()(y, self.model(x, training=True))

    def eager_step(self, x, y, scale=1.0, variables=None):
        with tf.GradientTape() as tape:
            losses = scale * self.losses(x, y)
        self.optimizer.minimize(losses, variables or self.model.trainable_variables, tape=tape)

    def epoch(self, step=None):
        for x, y in self.record.batches():
            (step or self.step)(x, y)


@pytest.fixture
def make_loop(make_run):
    return lambda optimizer=None, **kwargs: Loop(make_run(optimizer=optimizer), **kwargs)


@pytest.mark.parametrize("jit", [None, True])
def test_accounted_in_every_mode(make_loop, jit):
    loop = make_loop(loss=bce())
    loop.epoch(tf.function(loop.eager_step, jit_compile=True) if jit else loop.eager_step)
    assert loop.record.privacy_event == attrs.evolve(EXPECTED, num_steps=6)


def test_accounted(make_loop):
    loop = make_loop()
    loop.epoch()
    loop.epoch()
    record = loop.record
    assert record.privacy_event == EXPECTED
    exact = hsa.LastIterateAccountant().compose(EXPECTED).get_epsilon(DELTA)
    assert record.get_epsilon(DELTA) == pytest.approx(exact)
    text = " ".join(record.report(DELTA).split())
    for part in (
        "Epsilon of the released model",
        "the loss of every step was computed from the batch that batches() gave last",
    ):
        assert part in text
    assert record.assumptions


def test_the_batches_are_those_of_the_data(make_loop):
    loop = make_loop()
    seen = []

    def step(x, y):
        seen.append(x.numpy())
        loop.step(x, y)

    loop.epoch(step)
    loop.epoch(step)
    expected = [x.numpy() for x, _ in loop.data]
    np.testing.assert_array_equal(seen, expected + expected)


def test_a_pass_that_is_left_goes_on_where_it_was_left(make_loop):
    loop, seen = make_loop(), []
    for stop in (2, 3, 100):
        for x, y in loop.record.batches():
            seen.append(x.numpy())
            loop.step(x, y)
            if len(seen) == stop:
                break
        assert loop.record.privacy_event.num_steps == len(seen)
        texts = [a.text for a in loop.record.assumptions]
        assert any("within a pass over the data" in t for t in texts) is (stop < 6)
    np.testing.assert_array_equal(seen, [x.numpy() for x, _ in loop.data])
    for _ in loop.record.batches():  # left without a step: the batch is given again
        break
    loop.epoch()
    assert loop.record.privacy_event == EXPECTED


def test_another_record_after_a_pass_that_was_left(make_run):
    """The last step of the first record was not recorded yet when the second one asks."""
    run = make_run()
    first = Loop(run)
    for x, y in first.record.batches():
        first.step(x, y)
        break
    run.optimizer = make_run().optimizer
    second = Loop(run)
    second.epoch()
    assert [event.num_steps for event in second.record.privacy_events] == [1, 6]


def test_figures_within_a_pass(make_loop):
    loop = make_loop()
    for count, (x, y) in enumerate(loop.record.batches()):
        if count:
            assert loop.record.privacy_event.num_steps == count
        loop.step(x, y)
        assert loop.record.privacy_event.num_steps == count + 1
        loop.record.get_epsilon(DELTA)
        if count == 2:
            loop.record.release()
    assert loop.record.privacy_event.release_steps == (3,)


def test_evaluation_between_the_steps_is_free(make_loop):
    loop = make_loop()

    def step(x, y):
        loop.step(x, y)
        loop.model(x)

    loop.epoch(step)
    loop.model.evaluate(loop.data, verbose=0)
    loop.epoch(step)
    assert loop.record.privacy_event == EXPECTED


def test_learning_rates_and_projection_are_those_that_were_used(make_loop):
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay([5], [0.2, 0.1])
    loop = make_loop({"learning_rate": rate, "projection_radius": 0.9})
    loop.epoch()
    loop.epoch()
    assert loop.record.privacy_event == attrs.evolve(
        EXPECTED, learning_rate=[0.2] * 6 + [0.1] * 6, domain_diameter=1.8
    )


def test_a_frozen_backbone_is_no_part_of_the_trained_variables(make_run):
    run = make_run(optimizer={"loss_geometry": None})
    backbone = tf.keras.layers.Dense(3, trainable=False)
    run.model = tf.keras.Sequential([backbone, tf.keras.layers.Dense(1)])  # not built yet
    loop = Loop(run)
    loop.epoch()
    assert loop.record.privacy_event.num_steps == 6
    backbone.kernel.assign_add(tf.ones([4, 3]))
    with pytest.raises(hsa.UnsupportedRunError, match="not trained was changed"):
        loop.record.report(DELTA)


# Row 74: what the gradients are taken of, and where


def declared(loop):
    return " ".join(a.text for a in loop.record.assumptions if a.status.value == "declared")


@pytest.mark.parametrize("is_told", [False, True])
def test_without_the_loss_it_is_the_users_word(make_loop, is_told):
    loop = make_loop(loss=bce() if is_told else None)
    for x, y in loop.record.batches():
        loop.eager_step(x, y)
        break
    for text in (
        "every entry of the loss depends on one example of the delivered batch",
        "computed at the weights that the step moves",
        "computed from the batch that batches() gave last",
    ):
        assert (text in declared(loop)) is not is_told
    checked = [a.text for a in loop.record.assumptions if a.status.value == "checked"]
    assert any("the losses of every step are those of" in text for text in checked) is is_told
    assert any(text.startswith("changing an example") for text in checked)


def looking_ahead(loop):
    """Nesterov's momentum by hand; the weights are put back bit by bit."""

    @tf.function
    def step(x, y):
        variables = loop.model.trainable_variables
        before = [tf.identity(v) for v in variables]
        for variable in variables:
            variable.assign_add(0.1 * tf.ones_like(variable))
        with tf.GradientTape() as tape:
            losses = loop.losses(x, y)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        loop.optimizer.minimize(losses, variables, tape=tape)

    loop.epoch(step)


def other_rows(loop):
    loop.epoch(lambda x, y: loop.step(tf.reverse(x, [0]), tf.reverse(y, [0])))


def mean_of_a_broadcast_loss(loop):
    def step(x, y):
        loss = lambda: tf.reduce_mean(tf.square(y[:, 0] - loop.model(x)), axis=1)  # noqa: E731
        loop.optimizer.minimize(loss, loop.model.trainable_variables)

    loop.epoch(step)


@pytest.mark.parametrize("act", [looking_ahead, other_rows, mean_of_a_broadcast_loss])
def test_other_losses_than_those_of_the_known_loss(make_loop, act):
    loop = make_loop({"loss_geometry": None}, loss=bce())
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 1 was not taken\. The losses are not"):
        act(loop)
    assert loop.optimizer.last_step.steps == 0


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-3])
def test_row104_small_losses_are_compared_by_their_size(make_run, size):
    """Squared errors of small targets, summed over the outputs in place of their mean."""
    run = make_run(optimizer={"loss_geometry": None})
    targets = size * np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    head = tf.keras.layers.Dense(4, kernel_initializer="zeros")
    record = HiddenStateRecorder(
        head,
        run.optimizer,
        cyclic_dataset(run.x, targets, batch_size=4),
        loss=tf.keras.losses.MeanSquaredError(reduction="none"),
    )

    def epoch():
        for x, y in record.batches():
            losses = lambda: tf.reduce_sum(tf.square(y - head(x)), axis=1)  # noqa: B023, E731
            run.optimizer.minimize(losses, head.trainable_variables)

    with pytest.raises(hsa.UnsupportedRunError, match="The losses are not"):
        epoch()
    assert run.optimizer.last_step.steps == 0


def test_a_step_that_was_traced_before_its_record_began(make_run):
    run = make_run()
    loop = Loop(run)
    specs = [tf.TensorSpec([4, 4]), tf.TensorSpec([4, 1])]
    traced = loop.step.get_concrete_function(*specs)
    late = Loop(run, loss=bce())
    with pytest.raises(hsa.UnsupportedRunError, match="traced before its record began"):
        late.epoch(traced)


# What is not the run that is accounted; what every optimizer refuses is in reference/misuse.py


def batches_in_a_list(loop):
    for x, y in list(loop.record.batches()):
        loop.step(x, y)


def part_of_a_batch(loop):
    loop.epoch(lambda x, y: loop.step(x[:2], y[:2]))


def scaled_loss_with_xla(loop):
    loop.epoch(tf.function(lambda x, y: loop.eager_step(x, y, scale=10.0), jit_compile=True))


def scaled_loss_in_the_last_step(loop):
    def step(x, y):
        loop.step(x, y, scale=tf.where(loop.optimizer.last_step.steps == 5, 10.0, 1.0))

    for x, y in loop.record.batches():
        step(x, y)
        if loop.optimizer.last_step.problem:
            break
    loop.record.report(DELTA)


def summed_loss(loop):
    def step(x, y):
        loss = lambda: tf.reduce_sum(loop.losses(x, y))  # noqa: E731
        loop.optimizer.minimize(loss, loop.model.trainable_variables)

    loop.epoch(step)


def whole_pass_in_a_graph(loop):
    @tf.function
    def epoch():
        for x, y in loop.data:
            loop.eager_step(x, y)

    for _ in loop.record.batches():
        epoch()


def the_smallest_of_several_noises(loop):
    @tf.function
    def step(x, y):
        variables = loop.model.trainable_variables
        for _ in range(2):
            with tf.GradientTape(persistent=True) as tape:
                losses = loop.losses(x, y)
            pairs = loop.optimizer._compute_gradients(losses, variables, tape=tape)
        loop.optimizer.apply_gradients(pairs)

    loop.epoch(step)


def broadcast_loss(loop):
    """Row 73"""

    def step(x, y):
        loss = lambda: tf.square(y[:, 0] - loop.model(x))  # noqa: E731
        loop.optimizer.minimize(loss, loop.model.trainable_variables)

    loop.epoch(step)


def fit_with_the_same_optimizer(loop):
    loop.epoch()
    loop.model.fit(loop.data, verbose=0)
    loop.record.report(DELTA)


CASES = {
    part_of_a_batch: "used 2 rows of batch 0, expected batch_size = 4",
    scaled_loss_with_xla: "step 1 was not taken. A per-example gradient is longer",
    scaled_loss_in_the_last_step: "step 6 was not taken. A per-example gradient is longer",
    summed_loss: "got a scalar",
    broadcast_loss: r"shape \(examples,\), one entry for each, got shape \(4, 4\)",
    whole_pass_in_a_graph: "has taken 6 steps, expected 1",
    the_smallest_of_several_noises: "computed 2 times for 1 steps",
    fit_with_the_same_optimizer: "took 12 steps, but 6 are recorded",
}


@pytest.mark.parametrize("act", CASES, ids=lambda act: act.__name__)
def test_refused(make_loop, act):
    loop = make_loop()
    with pytest.raises(hsa.UnsupportedRunError, match=CASES[act]):
        act(loop)


def test_a_record_that_became_invalid_stays_so(make_loop):
    loop = make_loop()
    loop.epoch()
    with pytest.raises(hsa.UnsupportedRunError):
        batches_in_a_list(loop)
    for act in (
        lambda: loop.record.report(DELTA),
        lambda: loop.record.privacy_event,
        loop.epoch,
    ):
        with pytest.raises(hsa.UnsupportedRunError, match="has taken 6 steps, expected 7"):
            act()


# What is refused at construction


def dense(**kwargs):
    return tf.keras.Sequential([tf.keras.layers.Dense(1, **kwargs)])


def construct(run, **kwargs):
    arguments = {"model": run.model, "optimizer": run.optimizer, "data": run.data, **kwargs}
    return HiddenStateRecorder(**arguments)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda run: {"data": run.data.shuffle(6)}, "order of its batches"),
        (lambda run: {"data": (run.x, run.y)}, "got tuple"),
        (lambda run: {"data": iter(run.data)}, "Use cyclic_dataset"),
        (lambda run: {"optimizer": tf.keras.optimizers.SGD()}, "got SGD"),
        (lambda run: {"model": dense(kernel_regularizer="l2")}, "no regularisation losses"),
        (lambda run: {"model": dense(kernel_constraint="non_neg")}, "without a constraint"),
        (lambda run: {"model": dense(dtype="mixed_float16")}, "precision"),
        (
            lambda run: {"model": tf.keras.Sequential([tf.keras.layers.BatchNormalization()])},
            "no trainable batch normalisation",
        ),
        (lambda run: {"model": tf.keras.Sequential([tf.keras.layers.ReLU()])}, "got none"),
        (lambda run: run.fit() and {}, "without steps, got one with 6"),
    ],
)
def test_refused_at_construction(make_run, make, text):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        construct(run, **make(run))


def test_wrong_arguments(make_run):
    run = make_run()
    with pytest.raises(TypeError, match="Keras model or layer"):
        construct(run, model=lambda x: x)
    with pytest.raises(ValueError, match="neighboring_relation"):
        construct(run, neighboring_relation="REPLACE")
    with pytest.raises(hsa.UnsupportedRunError, match="cannot add or remove"):
        construct(run, neighboring_relation="add-or-remove-one")
    record = construct(run)
    with pytest.raises(ValueError, match="at least one step"):
        record.report(DELTA)
    with pytest.raises(hsa.UnsupportedRunError, match="pickled"):
        pickle.dumps(record)


def test_a_single_layer_is_a_model(make_run):
    run = make_run()
    run.model = tf.keras.layers.Dense(1)
    loop = Loop(run)
    loop.epoch()
    assert loop.record.privacy_event == attrs.evolve(EXPECTED, num_steps=6)


def test_dropped_examples_do_not_count(make_run):
    run = make_run()
    x, y = np.r_[run.x, run.x[:2]], np.r_[run.y, run.y[:2]]
    run.data = cyclic_dataset(x, y, batch_size=4, drop_remainder=True)
    loop = Loop(run)
    loop.epoch()
    assert loop.record.privacy_event == attrs.evolve(EXPECTED, num_steps=6)
