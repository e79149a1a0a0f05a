"""Ways to run Model.fit that several tests try."""

import tensorflow as tf

callbacks = tf.keras.callbacks


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
