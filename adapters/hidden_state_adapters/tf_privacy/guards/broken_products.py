"""Products of matrices that a version of TensorFlow computes from memory that is not theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from hidden_state_adapters.tf_privacy.refusals import refusal

_FINE, _MENDED = (2, 15), (2, 22)
_LEAST_RANK = 4
_KINDS = (tf.float32, tf.bfloat16, tf.float16)


def refuse_broken_products(function: Callable[..., Any], *arguments: Any) -> None:
    """Refuses a function with a product that oneDNN reads beyond the end of a matrix for.

    In TensorFlow 2.21 on a CPU (not in 2.15; versions between count as 2.21) a product of rank 4 or
    more, one factor of which is the same for a part of the axes, may be made of whatever lies in
    memory behind this factor, the rows of other examples among it, and writes there as well
    (tensorflow#117700). Keras 3 makes such ones of attention in a batch of one. The function is
    traced, and not run.

    Args:
        function: Of tensors, to tensors.
        *arguments: Structures of tensors like those that it is going to be given.

    Raises:
        UnsupportedRunError: There is such a product.
    """
    release = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if not _FINE < release < _MENDED or not _pywrap_util_port.IsMklEnabled():
        return
    specs = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), arguments)
    graph = tf.function(function).get_concrete_function(*specs).graph
    for operation in graph.get_operations():
        if operation.type.startswith("BatchMatMul") and _is_broken(*operation.inputs):
            raise refusal(
                f"Expected a TensorFlow that multiplies every example with what belongs to it, got "
                f"{tf.__version__} with oneDNN, and a layer of attention, or of other products of "
                f"sequences ({operation.name}): it reads beyond the end of a matrix there "
                "(tensorflow#117700). Set the environment variable TF_ENABLE_ONEDNN_OPTS=0 before "
                "TensorFlow is imported."
            )


def _is_broken(left: tf.Tensor, right: tf.Tensor) -> bool:
    if left.dtype not in _KINDS:
        return False
    ranks = left.shape.rank, right.shape.rank
    if None in ranks:
        return True
    axes = [part.shape.as_list()[:-2] for part in (left, right)]
    return max(ranks) >= _LEAST_RANK and axes[0] != axes[1]
