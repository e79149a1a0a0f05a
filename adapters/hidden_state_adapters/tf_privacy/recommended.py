"""A recommended run, as the arguments of a Keras model that owns its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import tensorflow as tf

from hidden_state_accountants import BatchOrder, Candidate
from hidden_state_adapters.tf_privacy.losses import (
    EnvelopeBinaryCrossentropy,
    EnvelopeSparseCategoricalCrossentropy,
    EnvelopeSquaredError,
)

_losses = tf.keras.losses
_PLAIN: Mapping[str, Callable[[], Any]] = {
    "softmax_cross_entropy": lambda: _losses.SparseCategoricalCrossentropy(from_logits=True),
    "logistic": lambda: _losses.BinaryCrossentropy(from_logits=True),
    "squared_error": lambda: _losses.Huber(delta=1e6),  # half the square
}
_ENVELOPES: Mapping[str, Callable[..., Any]] = {
    "softmax_cross_entropy": EnvelopeSparseCategoricalCrossentropy,
    "logistic": EnvelopeBinaryCrossentropy,
    "squared_error": EnvelopeSquaredError,
}


@attrs.frozen
class RecommendedRun:
    """What a Keras model is told so that it trains one run of `hidden_state_accountants.recommend`.

    Attributes:
        model: Of `HiddenStateSequential` and `HiddenStateModel`, beside the layers.
        compile: Of `compile`.
        fit: Of `fit`, beside the examples.
    """

    model: Mapping[str, Any]
    compile: Mapping[str, Any]
    fit: Mapping[str, Any]


def recommended_run(candidate: Candidate) -> RecommendedRun:
    """The arguments that train a run of `hidden_state_accountants.recommend`.

    The model is one `Dense` layer without activation, on features of norm at most `feature_norm`,
    with weights that start at zero; labels are class indices, 0 and 1 for one logit, or targets
    in [-1, 1]. What the model trains is accounted by the model itself.

    Args:
        candidate: Of the recommendation.
    """
    event, order = candidate.event, candidate.event.batch_order
    model: dict[str, Any] = {
        "l2_norm_clip": event.clip_norm,
        "noise_multiplier": event.noise_multiplier,
        "batch_order": order.value,
        "neighboring_relation": candidate.neighboring_relation,
    }
    fit: dict[str, Any] = {"batch_size": event.batch_size, "epochs": candidate.epochs}
    if candidate.smoothing is None:
        loss = _PLAIN[candidate.loss]()
    else:
        loss = _ENVELOPES[candidate.loss](candidate.clip_norm, candidate.smoothing)
        model |= {"loss_geometry": "auto", "feature_norm": candidate.feature_norm}
    if order is BatchOrder.POISSON:
        fit["steps_per_epoch"] = event.num_steps // candidate.epochs
    elif order is not BatchOrder.FULL:
        model["drop_remainder"] = True  # as the event does
    decay = float(event.per_step("weight_decay")[0])
    optimizer = tf.keras.optimizers.SGD(
        float(event.per_step("learning_rate")[0]), weight_decay=decay or None
    )
    return RecommendedRun(model, {"optimizer": optimizer, "loss": loss}, fit)
