"""How long a step of `HiddenStateSequential` takes beside TensorFlow Privacy's `DPSequential`.

    python benchmarks/keras_step.py [CASE ...]

Both train by `Model.fit` in one process, in turn, on the same arrays: DPSequential with the batches
of fit, ours with Poisson batches of that size on average. A figure is the CPU time of an epoch over
its steps, the median over the rounds, of all threads (so that the drawing of batches counts, and
other programs on the machine do not), and the ratio of both. Epochs that trace, and those after
which ours looks at model and loss again (1, 2, 4, 8, ...), are left out.

"one step" has steps_per_execution=1 for both, "32 steps" 32; else both have what is given without.
"""

import argparse
import statistics
import time

import numpy as np
import tensorflow as tf
from tensorflow_privacy.privacy.keras_models.dp_keras_model import DPSequential
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized import (
    VectorizedDPKerasSGDOptimizer,
)

from hidden_state_adapters.tf_privacy import CyclicDPKerasSGDOptimizer, HiddenStateSequential

layers = tf.keras.layers
STEPS = 64  # of an epoch
ROUNDS = 7
MEASURED = (2, 4, 5, 6)  # the first ones trace, and after 1, 2, 4, 8, ... epochs ours looks again
OPTIMIZER_STEPS = 12
CLIP_AND_NOISE = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0}


def probe(features, classes):
    def make():
        return (features,), classes, [layers.Dense(classes)]

    return make


def network():
    stack = [layers.Dense(256, activation="relu"), layers.Dense(256, activation="relu")]
    return (784,), 10, [*stack, layers.Dense(10)]


def cnn():
    """The network of TensorFlow Privacy's MNIST tutorial."""
    stack = [
        layers.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
        layers.MaxPool2D(2, 1),
        layers.Conv2D(32, 4, strides=2, activation="relu"),
        layers.MaxPool2D(2, 1),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
        layers.Dense(10),
    ]
    return (28, 28, 1), 10, stack


CASES = {  # name: what is trained, batch size
    "probe 512 x 10": (probe(512, 10), 256),
    "probe 2048 x 100": (probe(2048, 100), 256),
    "network 784-256-256-10": (network, 256),
    "CNN of the MNIST tutorial": (cnn, 64),
}
MODES = {
    "graph": {},
    "graph, one step": {"steps_per_execution": 1},
    "graph, 32 steps": {"steps_per_execution": 32},
    "XLA": {"jit_compile": True},
}


class Clock(tf.keras.callbacks.Callback):
    """CPU time of the last epoch of a fit; it waits for no batch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        self.per_step = (time.process_time() - self.start) / STEPS


def contestants(make, compile):
    """By name, compiled models."""
    use_xla, pace = "jit_compile" in compile, compile.get("steps_per_execution")
    models = {
        "DPSequential": DPSequential(use_xla=use_xla, layers=make()[2], **CLIP_AND_NOISE),
        "ours": HiddenStateSequential(make()[2], **CLIP_AND_NOISE),
    }
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for name, model in models.items():
        own = compile if name == "ours" else {"steps_per_execution": pace}
        model.compile(tf.keras.optimizers.legacy.SGD(0.1), loss, **own)
    return models


def measure(make, batch_size, compile):
    """CPU seconds of a step, by contestant."""
    shape, classes, _ = make()
    random = np.random.default_rng(0)
    rows = batch_size * STEPS
    x = random.normal(size=(rows, *shape)).astype("float32")
    y = random.integers(0, classes, rows)
    models = contestants(make, compile)
    times = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            clock = Clock()
            model.fit(x, y, batch_size=batch_size, callbacks=[clock], verbose=0)
            times[name].append(clock.per_step)
    return {
        name: statistics.median(values[place] for place in MEASURED)
        for name, values in times.items()
    }


def measure_optimizers(make, batch_size, mode):
    """CPU seconds of a step of one's own loop with an optimizer, without a record of the run."""
    shape, classes, _ = make()
    random = np.random.default_rng(0)
    x = tf.constant(random.normal(size=(batch_size, *shape)), tf.float32)
    y = tf.constant(random.integers(0, classes, batch_size))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step_of(optimizer):
        model = tf.keras.Sequential(make()[2])
        model(x)

        def step():
            with tf.GradientTape(persistent=True) as tape:
                losses = loss(y, model(x, training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(optimizer._compute_gradients(losses, variables, tape=tape))

        return step if mode == "eager" else tf.function(step, jit_compile=mode == "XLA")

    steps = {
        "Vectorized": step_of(VectorizedDPKerasSGDOptimizer(1.0, 1.0, learning_rate=0.1)),
        "ours": step_of(CyclicDPKerasSGDOptimizer(1.0, 1.0, learning_rate=0.1)),
    }
    times = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.process_time()
            for _ in range(OPTIMIZER_STEPS):
                step()
            times[name].append((time.process_time() - start) / OPTIMIZER_STEPS)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main_of_optimizers():
    print("| model, batch | mode | Vectorized | ours | ratio |\n|---|---|---|---|---|")
    for case in ("probe 512 x 10", "CNN of the MNIST tutorial"):
        make, batch_size = CASES[case]
        for mode in ("graph", "XLA", "eager"):
            found = measure_optimizers(make, batch_size, mode)
            theirs, ours = found["Vectorized"], found["ours"]
            print(
                f"| {case}, {batch_size} | {mode} | {1e3 * theirs:.2f} ms | {1e3 * ours:.2f} ms | "
                f"{ours / theirs:.2f} |",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", action="store_true", help="loops, beside Vectorized")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    if arguments.optimizers:
        main_of_optimizers()
        return
    print("| model, batch | mode | DPSequential | ours | ratio |\n|---|---|---|---|---|")
    for case in arguments.cases:
        make, batch_size = CASES[case]
        for mode, compile in MODES.items():
            found = measure(make, batch_size, compile)
            theirs, ours = found["DPSequential"], found["ours"]
            print(
                f"| {case}, {batch_size} | {mode} | {1e3 * theirs:.2f} ms | {1e3 * ours:.2f} ms | "
                f"{ours / theirs:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
