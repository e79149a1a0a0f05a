"""How long a step of `HiddenStateSequential` takes beside TensorFlow Privacy's `DPSequential`.

    python benchmarks/keras_step.py [CASE ...]

Both train by `Model.fit` in one process, in turn, on the same arrays: DPSequential with the batches
of fit, ours with Poisson batches of that size on average. A figure is the CPU time of an epoch over
its steps, the median over the rounds, of all threads (so that the drawing of batches counts, and
other programs on the machine do not), and the ratio of both. Epochs that trace are left out.

"PrivateRun" is `PrivateRun.train` beside the fit of DPSequential. The frozen CNN is that of the
tutorial with a new head, which ours trains as a head run: `loss_geometry="auto"`.

"one step" has steps_per_execution=1 for both, "32 steps" 32; else both have what is given without.
"eager" has run_eagerly=True for both, beside a plain model with `VectorizedDPKerasSGDOptimizer`.
After the models come the optimizers: a loop of one's own with `CyclicDPKerasSGDOptimizer` beside
that one, without a record of the run.

    TF_USE_LEGACY_KERAS=0 python benchmarks/keras_step.py --only plain

compares ours with a plain model of Keras in place of DPSequential, which needs no TF Privacy: it
runs with Keras 3, too, of which there is none.
"""

import argparse
import statistics
import time

import numpy as np
import tensorflow as tf

from hidden_state_adapters.tf_privacy import HiddenStateSequential, PrivateRun, keras_api

layers = tf.keras.layers
EAGER_STEPS = 4  # of an epoch
ROUNDS = 7
MEASURED = (2, 4, 5, 6)  # the first ones trace
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


def frozen_cnn():
    shape, classes, stack = cnn()
    for layer in stack[:-1]:
        layer.trainable = False
    return shape, classes, [*stack[:-1], layers.UnitNormalization(), stack[-1]]


MODES = {
    "graph": {},
    "graph, one step": {"steps_per_execution": 1},
    "graph, 32 steps": {"steps_per_execution": 32},
    "XLA": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "PrivateRun": {},
}
HEAD = {"frozen CNN and a head": {"loss_geometry": "auto", "feature_norm": 1.001}}
MOST_MODES = ("graph", "XLA", "eager")
PLAIN_MODES = ("graph, one step", "graph, 32 steps")  # Keras 3 makes one unless told otherwise
CASES = {  # name: what is trained, batch size, steps of an epoch, modes
    "probe 512 x 10": (probe(512, 10), 256, 64, tuple(MODES)),
    "probe 2048 x 100": (probe(2048, 100), 256, 16, ("graph", "XLA")),
    "network 784-256-256-10": (network, 256, 16, ("graph", "XLA")),
    "CNN of the MNIST tutorial": (cnn, 64, 16, MOST_MODES),
    "frozen CNN and a head": (frozen_cnn, 128, 8, ("graph", "PrivateRun")),
}


class Clock(tf.keras.callbacks.Callback):
    """CPU time of the last epoch of a fit; it waits for no batch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.process_time() - self.start


def crossentropy(**kwargs):
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def vectorized():
    from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized import (
        VectorizedDPKerasSGDOptimizer,
    )

    return VectorizedDPKerasSGDOptimizer(1.0, 1.0, learning_rate=0.1)


def contestants(make, mode, head=()):
    """Compiled models: TensorFlow Privacy's, and ours, with what is said of a head."""
    from tensorflow_privacy.privacy.keras_models.dp_keras_model import DPSequential

    compile, sgd = MODES[mode], tf.keras.optimizers.legacy.SGD
    ours = HiddenStateSequential(make()[2], **CLIP_AND_NOISE, **dict(head))
    ours.compile(sgd(0.1), crossentropy(), **compile)
    if mode == "eager":
        theirs = tf.keras.Sequential(make()[2])
        theirs.compile(vectorized(), crossentropy(reduction="none"), **compile)
    else:
        theirs = DPSequential(use_xla=mode == "XLA", layers=make()[2], **CLIP_AND_NOISE)
        pace = compile.get("steps_per_execution")
        theirs.compile(sgd(0.1), crossentropy(), steps_per_execution=pace)
    return theirs, ours


def beside_plain(make, mode):
    """Compiled models: a plain one of Keras, and ours."""
    compile = MODES[mode] if mode == "XLA" else {**MODES[mode], "jit_compile": False}
    optimizers = tf.keras.optimizers
    sgd = optimizers.SGD if keras_api.IS_KERAS_3 else optimizers.legacy.SGD
    both = tf.keras.Sequential(make()[2]), HiddenStateSequential(make()[2], **CLIP_AND_NOISE)
    for model in both:
        model.compile(sgd(0.1), crossentropy(), **compile)
    return both


def arrays(make, rows):
    shape, classes, _ = make()
    random = np.random.default_rng(0)
    return random.normal(size=(rows, *shape)).astype("float32"), random.integers(0, classes, rows)


class Loop:
    """A loop of one's own in the place of fit."""

    def __init__(self, make, x, y, batch_size, settings):
        sgd = tf.keras.optimizers.legacy.SGD(0.1)
        model = tf.keras.Sequential(make()[2])
        given = {"loss": crossentropy(), "optimizer": sgd, "batch_size": batch_size, **settings}
        self.run = PrivateRun(model, x, y, **given)

    def fit(self, x, y, *, callbacks, **_):
        (clock,) = callbacks
        clock.on_epoch_begin(0)
        self.run.train(1, verbose=False)
        clock.on_epoch_end(0)


def measure(make, batch_size, steps, mode, models=contestants, head=()):
    """CPU seconds of a step of a model: TensorFlow Privacy's, and ours."""
    steps = EAGER_STEPS if mode == "eager" else steps
    x, y = arrays(make, batch_size * steps)

    def epoch_of(model):
        clock = Clock()
        model.fit(x, y, batch_size=batch_size, callbacks=[clock], verbose=0)
        return clock.seconds / steps

    if models is beside_plain:
        return in_turn(epoch_of, models(make, mode), MEASURED)
    theirs, ours = models(make, mode, head)
    if mode == "PrivateRun":
        ours = Loop(make, x, y, batch_size, {**CLIP_AND_NOISE, **dict(head)})
    return in_turn(epoch_of, (theirs, ours), MEASURED)


def measure_optimizers(make, batch_size, steps, mode):
    """CPU seconds of a step of one's own loop with an optimizer, without a record of the run."""
    from hidden_state_adapters.tf_privacy import CyclicDPKerasSGDOptimizer

    x, y = map(tf.constant, arrays(make, batch_size))
    steps = EAGER_STEPS if mode == "eager" else steps // 4

    def loop(optimizer):
        model, loss = tf.keras.Sequential(make()[2]), crossentropy(reduction="none")
        model(x)

        def step():
            with tf.GradientTape(persistent=True) as tape:
                losses = loss(y, model(x, training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(optimizer._compute_gradients(losses, variables, tape=tape))

        return step if mode == "eager" else tf.function(step, jit_compile=mode == "XLA")

    def round_of(step):
        start = time.process_time()
        for _ in range(steps):
            step()
        return (time.process_time() - start) / steps

    both = loop(vectorized()), loop(CyclicDPKerasSGDOptimizer(1.0, 1.0, learning_rate=0.1))
    return in_turn(round_of, both, range(1, ROUNDS))


def in_turn(act, both, measured):
    """The medians of what is found of the one and of the other, in these rounds."""
    found = [[act(one) for one in both] for _ in range(ROUNDS)]
    return [statistics.median(found[place][i] for place in measured) for i in range(2)]


def print_row(case, batch_size, mode, theirs, ours):
    milliseconds = f"{1e3 * theirs:.2f} ms | {1e3 * ours:.2f} ms"
    print(f"| {case}, {batch_size} | {mode} | {milliseconds} | {ours / theirs:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["models", "optimizers", "plain"])
    parser.add_argument("cases", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    cases = {name: CASES[name] for name in arguments.cases}
    if arguments.only == "plain":
        print("| model, batch | mode | plain Keras | ours | ratio |\n|---|---|---|---|---|")
        for name, (make, batch_size, steps, _) in cases.items():
            for mode in PLAIN_MODES:
                found = measure(make, batch_size, steps, mode, beside_plain)
                print_row(name, batch_size, mode, *found)
        return
    if arguments.only != "optimizers":
        print("| model, batch | mode | TF Privacy | ours | ratio |\n|---|---|---|---|---|")
        for name, (make, batch_size, steps, modes) in cases.items():
            for mode in modes:
                found = measure(make, batch_size, steps, mode, head=HEAD.get(name, ()))
                print_row(name, batch_size, mode, *found)
    if arguments.only != "models":
        print("\n| model, batch | mode | Vectorized | ours | ratio |\n|---|---|---|---|---|")
        for name, (make, batch_size, steps, modes) in cases.items():
            for mode in MOST_MODES if "eager" in modes else ():
                print_row(
                    name, batch_size, mode, *measure_optimizers(make, batch_size, steps, mode)
                )


if __name__ == "__main__":
    main()
