"""What tests of Keras run with: without graphs, at a set pace, in a folder of their own."""

import pytest
import tensorflow as tf

from hidden_state_adapters.tf_privacy import run as private_run


@pytest.fixture(autouse=True)
def pace_of_a_fast_machine(monkeypatch):
    """Where nobody says how many steps are made at once, the clock does."""
    monkeypatch.setattr(private_run, "_MOMENT", 1e9)


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path, monkeypatch):
    """Callbacks write files relative to the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_graphs(row_by_row):
    """For many short runs of models: tracing a step takes several times as long as the run."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture
def row_by_row(monkeypatch):
    """Per-example gradients without pfor, which traces a graph in every eager step."""
    init = tf.GradientTape.__init__

    def jacobian(tape, target, sources, unconnected_gradients=tf.UnconnectedGradients.NONE, **_):
        rows = [
            tape.gradient(target, sources, tf.one_hot(i, target.shape[0], dtype=target.dtype),
                          unconnected_gradients)
            for i in range(target.shape[0])
        ]  # fmt: skip
        return [tf.stack(parts) for parts in zip(*rows, strict=True)]

    def persistent_init(tape, persistent=False, **kwargs):
        init(tape, persistent=True, **kwargs)

    def loop(function, structure):
        rows = tf.nest.flatten(structure)[0].shape[0]
        results = [
            function(tf.nest.map_structure(lambda part, i=i: part[i], structure))
            for i in range(rows)
        ]
        return tf.nest.map_structure(lambda *parts: tf.stack(parts), *results)

    monkeypatch.setattr(tf, "vectorized_map", loop)
    monkeypatch.setattr(tf.GradientTape, "__init__", persistent_init)
    monkeypatch.setattr(tf.GradientTape, "jacobian", jacobian)
