"""Gaussian noise from a generator of its own, which tells whether somebody has set it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class FreshNoise:
    """Adds independent Gaussian noise in the precision of what it is added to.

    With tf.random.set_seed TensorFlow's operations would repeat the numbers of one variable in
    another, after another trace of the step, so the noise has a generator of its own.

    It is Philox, which makes its numbers of a key and a counter that only moves ahead, and both
    begin where the operating system says. So noise can repeat, or be known, only if somebody sets
    the generator; that its state is the one that the last noise left is what has to be checked,
    and no noise needs to be remembered.

    Attributes:
        is_fresh: After `added_to`, whether the generator was left alone since the noise before; a
            tensor of the trace that called it.
    """

    def __init__(self) -> None:
        self.is_fresh: Any = None
        self._generator: tf.random.Generator | None = None
        self._left: Any = None  # the state of the generator after the noise before

    def added_to(self, sums: Sequence[Any], stddev: float) -> list[Any]:
        """The sums plus noise of standard deviation `stddev` in every entry; 0 adds none."""
        if not stddev:
            self.is_fresh = tf.constant(True)
            return list(sums)
        generator = self._own_generator()
        before, left = generator.state.read_value(), self._left.read_value()
        self.is_fresh = tf.reduce_all(tf.equal(before, left))
        noise = [generator.normal(tf.shape(s), stddev=stddev, dtype=s.dtype) for s in sums]
        # Of a generator that was set nothing is fresh any more.
        self._left.assign(tf.where(self.is_fresh, generator.state.read_value(), left))
        return [s + n for s, n in zip(sums, noise, strict=True)]

    def make_generator(self) -> None:
        """Makes the generator, if there is none yet."""
        self._own_generator()

    def _own_generator(self) -> tf.random.Generator:
        if self._generator is None:
            with tf.init_scope():  # outside of checkpoints, which would repeat its numbers
                # A counter of 128 bits and a key of 64; works with enable_op_determinism, too.
                state = np.frombuffer(os.urandom(24), np.int64)
                self._generator = tf.random.Generator.from_state(state, alg="philox")
                self._left = tf.Variable(state, trainable=False)
        return self._generator
