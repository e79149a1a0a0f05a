"""Whether noise was used before."""

from __future__ import annotations

import tensorflow as tf

_SIZE = 1 << 14


class NoiseMemory:
    """Fingerprints of the noise of earlier steps: in each place the last one that belongs there.

    So the last thousands of steps are remembered, and all of them on the device.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self._places = tf.Variable(tf.zeros([_SIZE], tf.int64), trainable=False)

    def is_new(self, noise: tf.Tensor) -> tf.Tensor:
        """Whether a fingerprint is not among those remembered (0: no noise)."""
        return tf.equal(noise, 0) | tf.not_equal(self._places.read_value()[_place(noise)], noise)

    def note(self, noise: tf.Tensor) -> None:
        """Remembers a fingerprint."""
        place = _place(noise)[None, None]
        places = tf.tensor_scatter_nd_update(self._places.read_value(), place, noise[None])
        self._places.assign(places)


def _place(noise: tf.Tensor) -> tf.Tensor:
    return tf.math.floormod(noise, tf.constant(_SIZE, tf.int64))
