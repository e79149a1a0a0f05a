"""What is known of the loss goes on with a run: it is read off again, and has to be the same."""

import json

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    CyclicDPKerasSGDOptimizer,
    DiceKerasSGDOptimizer,
    HiddenStateCallback,
    HiddenStateRecorder,
    cyclic_dataset,
    lineage,
)
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.guards.trained_loss import AT_THE_WEIGHTS

DELTA, BATCH, STEPS = 1e-5, 4, 6
AUTO = {"loss_geometry": "auto", "feature_norm": 1.0}
LOGISTIC = hsa.LossGeometry.logistic(1.0, bias=True)
COMPARED = "the losses of every step are those of the given loss"
OPTIMIZERS = {
    "cyclic": lambda: CyclicDPKerasSGDOptimizer(1.5, 2.0, learning_rate=0.5, weight_decay=0.1),
    "dice": lambda: DiceKerasSGDOptimizer(0.25, 40.0, error_l2_norm_clip=0.125, learning_rate=0.5),
    "block": lambda: BlockCoordinateKerasOptimizer(1.5, 2.0, learning_rate=0.5),
}


def bce(**options):
    return tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none", **options)


@pytest.fixture(autouse=True)
def new_process(row_by_row):
    """Forgets what the process knows, as a new one would."""

    def forget():
        lineage._live.clear()
        lineage._origins.clear()

    forget()
    return forget


def steps(record, model, optimizer, loss, count):
    for x, y in record.batches():
        with tf.GradientTape() as tape:
            losses = loss(y, model(x, training=True))
        optimizer.minimize(losses, model.trainable_variables, tape=tape)
        count -= 1
        if not count:
            break


def begin(run, name="cyclic", count=2, **told):
    optimizer = OPTIMIZERS[name]()
    record = HiddenStateRecorder(run.model, optimizer, run.data, **told)
    steps(record, run.model, optimizer, bce(), count)
    return record


def state_of(record, name="cyclic"):
    state = record.state(stays_private=True, include_private_state=name == "dice")
    return json.loads(json.dumps(state))


def go_on(run, state, name="cyclic", *, data=None, trained_with=None, **told):
    model = tf.keras.models.clone_model(run.model)
    model.set_weights(run.model.get_weights())
    optimizer = OPTIMIZERS[name]()
    data = run.data if data is None else data
    record = HiddenStateRecorder.from_state(state, model, optimizer, data, **told)
    steps(record, model, optimizer, trained_with or bce(), STEPS - 2)
    return record


def texts(record, status):
    return [a.text for a in record.assumptions if a.status is status]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_read_off_the_loss_is_read_off_again(make_run, new_process, name):
    whole = begin(make_run(), name, count=STEPS, loss=bce(), **AUTO)
    run = make_run()
    state = state_of(begin(run, name, loss=bce(), **AUTO), name)
    new_process()
    parts = go_on(run, state, name, loss=bce())
    assert parts.privacy_event == whole.privacy_event
    assert parts.get_epsilon(DELTA) == whole.get_epsilon(DELTA)
    assert texts(parts, Status.CHECKED) == texts(whole, Status.CHECKED)
    assert any("that of BinaryCrossentropy" in text for text in texts(parts, Status.CHECKED))
    assert not any("per-example loss" in text for text in texts(parts, Status.DECLARED))


def longer(run):
    return cyclic_dataset(1.1 * run.x, run.y, batch_size=BATCH)


OTHERS = {
    "no loss": (lambda run: {}, "or loss= of its from_state"),
    "another loss": (
        lambda run: {"loss": tf.keras.losses.MeanSquaredError(reduction="none")},
        "Expected the loss of the run so far",
    ),
    "longer features": (lambda run: {"loss": bce(), "data": longer(run)}, "got 1.1"),
    "another loss in the loop": (
        lambda run: {"loss": bce(), "trained_with": lambda y, z: 2 * bce()(y, z)},
        "not those of the known loss",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_refused(make_run, new_process, name):
    options, text = OTHERS[name]
    run = make_run()
    state = state_of(begin(run, loss=bce(), **AUTO))
    new_process()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        go_on(run, state, **options(run))


def test_fit_reads_the_compiled_loss_again(make_run, new_process):
    told = {"compile": {"run_eagerly": True}, "optimizer": {"loss_geometry": None}}
    run = make_run(callback=AUTO, **told)
    run.fit()
    state = json.loads(json.dumps(run.callback.state()))
    for loss, text in [
        (bce(), ""),
        (tf.keras.losses.Huber(reduction="none"), "Expected the loss of the run so far"),
        ([bce()], ""),
    ]:
        new_process()
        other = make_run(**told)
        other.model.set_weights(run.model.get_weights())
        other.model.compile(other.optimizer, loss, run_eagerly=True)
        other.callback = HiddenStateCallback.from_state(state)
        if text:
            with pytest.raises(hsa.UnsupportedRunError, match=text):
                other.fit()
            continue
        other.fit()
        assert other.callback.privacy_event.num_steps == 12
        assert other.callback.privacy_event.loss == LOGISTIC
        assert other.optimizer.loss_geometry == LOGISTIC


def test_steps_that_were_not_compared_stay_the_users_word(make_run, new_process):
    run = make_run()
    unknown = begin(run, loss_geometry=LOGISTIC)
    assert AT_THE_WEIGHTS in texts(unknown, Status.DECLARED)
    state = state_of(unknown)
    new_process()
    record = go_on(run, state, loss=bce())
    declared, checked = texts(record, Status.DECLARED), texts(record, Status.CHECKED)
    assert AT_THE_WEIGHTS in declared
    assert any("from the batch that batches() gave last" in text for text in declared)
    assert not any(text.startswith(COMPARED) for text in checked)


def test_what_is_read_off_says_nothing_of_runs_before_it(make_run):
    run = make_run()
    first = begin(run, loss_geometry=LOGISTIC).privacy_event
    record = begin(run, loss=bce(), **AUTO)
    assert record.privacy_events == (first, record.privacy_event)
    assert any("that of BinaryCrossentropy" in text for text in texts(record, Status.CHECKED))


@pytest.mark.parametrize(
    "declared",
    [
        Declared(),
        Declared(gradient_bound=1.5),
        Declared(block_loss=LOGISTIC),
        Declared(loss_geometry=LOGISTIC),
        Declared(loss_geometry=LOGISTIC, feature_norm=np.float32(0.5), source="some loss"),
    ],
)
def test_declarations_as_plain_types(declared):
    plain = json.loads(json.dumps(declared.to_plain()))
    assert Declared.of_plain(plain) == declared
