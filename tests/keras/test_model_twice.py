"""A head that is compiled and fitted again: the runs compose."""

import dp_accounting
import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from dp_accounting import pld

from hidden_state_adapters.tf_privacy import HiddenStateSequential

RECORDS, FEATURES, CLASSES, BATCH, EPOCHS = 24, 4, 3, 6, 2


@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_compiled_and_fitted_twice(order):
    random = np.random.default_rng(0)
    x = random.normal(size=(RECORDS, FEATURES)).astype("float32")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = random.integers(0, CLASSES, RECORDS)
    model = HiddenStateSequential(
        [tf.keras.layers.Dense(CLASSES)], l2_norm_clip=2.1, noise_multiplier=2.0,
        batch_order=order, loss_geometry="auto", feature_norm=1.0,
    )  # fmt: skip
    epsilons = []
    for _ in range(2):
        model.compile(
            tf.keras.optimizers.SGD(0.5, weight_decay=0.1),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            run_eagerly=True,
        )
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        epsilons.append(model.get_epsilon(1e-5))
    once, twice = epsilons
    assert once < twice < 2 * once
    if order == "poisson":  # of a record that is zeroed, which is removed there
        noise = dp_accounting.GaussianDpEvent(2.0)
        step = dp_accounting.PoissonSampledDpEvent(BATCH / RECORDS, noise)
        stock = pld.PLDAccountant().compose(step, 2 * EPOCHS * RECORDS // BATCH)
        assert twice <= 1.0001 * stock.get_epsilon(1e-5)
