"""Ways to run Model.fit that several tests try."""

import tensorflow as tf

import hidden_state_accountants as hsa

callbacks = tf.keras.callbacks
# Two epochs of the run that `make_run` makes.
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


def at_batch(index, act):
    """A callback that acts after the batch with this index of the first epoch."""
    state = {"done": False}

    def end(batch, logs):
        if batch == index and not state["done"]:
            state["done"] = True
            act()

    return callbacks.LambdaCallback(on_train_batch_end=end)


def compile_with(run, loss=None, **kwargs):
    loss = loss or tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    run.model.compile(run.optimizer, loss, **kwargs)
