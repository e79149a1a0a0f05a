"""Steps under XLA: what a step takes along besides the model does not grow, and noise is fresh."""

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    CyclicDPKerasSGDOptimizer,
    DiceKerasAdamOptimizer,
    DiceKerasSGDOptimizer,
)

KINDS = [
    CyclicDPKerasSGDOptimizer,
    DiceKerasSGDOptimizer,
    DiceKerasAdamOptimizer,
    BlockCoordinateKerasOptimizer,
]


def make_step(kind, size):
    variable, optimizer = tf.Variable(tf.zeros([size])), kind(1.0, 1.0, learning_rate=0.5)

    @tf.function(jit_compile=True)
    def step(x):
        optimizer.minimize(lambda: tf.linalg.matvec(x, variable), [variable])

    return step, variable, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_many_parameters_carries_no_memory_along(kind):
    """A list of used noises made XLA compute what it depends on for each of its places again."""
    size = 200_000
    step, variable, optimizer = make_step(kind, size)
    x = tf.ones([2, size])
    for _ in range(3):
        step(x)
    assert optimizer.last_step.steps == 3
    assert np.unique(variable.numpy()).size > size / 2
    carried = {v.ref() for v in step.get_concrete_function(x).graph.variables}
    own = [v.deref() for v in carried if v.deref().shape != variable.shape]
    assert len(own) > 3  # that the steps' own counts were looked at
    assert sum(v.shape.num_elements() for v in own) < 50


@pytest.mark.parametrize("kind", first(1, KINDS))
def test_a_generator_that_was_set_is_noticed(kind):
    step, variable, optimizer = make_step(kind, 3)
    optimizer.watch()  # whoever reads the log is told
    x = tf.ones([2, 3])
    step(x)
    before, query = variable.numpy(), optimizer._mean
    query._noise._generator.reset_from_seed(0)
    for _ in range(2):  # for good
        step(x)
        assert "generator of the noise was set" in str(optimizer.last_step.problem)
        np.testing.assert_array_equal(variable.numpy(), before)


@pytest.mark.parametrize(
    "disturb",
    [
        lambda noise: noise._generator.normal([1]),
        lambda noise: noise._generator.state.assign(noise._left - 1),
        lambda noise: setattr(noise, "_generator", tf.random.Generator.from_seed(0, alg="philox")),
    ],
    ids=["numbers taken", "set back", "replaced"],
)
def test_noise_comes_from_a_generator_that_was_left_alone(disturb):
    variable, optimizer = tf.Variable(tf.zeros([3])), CyclicDPKerasSGDOptimizer(1.0, 1.0)
    optimizer.minimize(lambda: variable, [variable])
    disturb(optimizer._mean._noise)
    with pytest.raises(hsa.UnsupportedRunError, match="generator of the noise was set"):
        optimizer.minimize(lambda: variable, [variable])


def test_a_second_optimizer_in_a_graph_knows_of_the_first_one():
    variable = tf.Variable(tf.ones([4]))
    for _ in range(2):
        optimizer = CyclicDPKerasSGDOptimizer(1.0, 1.0)

        @tf.function
        def step(x, optimizer=optimizer):
            optimizer.minimize(lambda: tf.linalg.matvec(x, variable), [variable])

        step(tf.eye(4))
    assert optimizer.training.follows_runs
