"""The geometry of the loss, read off the model, the loss of Keras and the data."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import LossGeometry, UnsupportedRunError
from hidden_state_accountants.runs.base import SLACK
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.declared import AUTO, Declared
from hidden_state_adapters.tf_privacy.geometry import (
    DECLARE,
    LinearPrediction,
    loss_geometry,
    rule_of,
)
from hidden_state_adapters.tf_privacy.guards.head import LinearHead, gives_logits
from hidden_state_adapters.tf_privacy.guards.trained_loss import TrainedLoss
from hidden_state_adapters.tf_privacy.refusals import refusal

_NO_LOSS = (
    'loss_geometry="auto" needs one loss of Keras for the one output of the model, got none or '
    "several: pass it to compile(loss=...). {DECLARE}"
)


def resolved(declared: Declared, trained: TrainedLoss) -> Declared:
    """The same with the geometry of the loss, after a look at every example.

    Args:
        declared: Its loss_geometry may be "auto", or was, in an earlier part of the run.
        trained: It was looked at.

    Raises:
        UnsupportedRunError: The constants are not known, do not hold for an example, or are not
            those of before.
    """
    if declared.source:
        again = attrs.evolve(declared, loss_geometry=AUTO, source="")
        found = resolved(again, trained)
        if found != declared:
            raise refusal(
                f"Expected the loss of the run so far, {declared.geometry!r} ({declared.source}), "
                f"got {found.geometry!r} ({found.source}). Go on with the loss of before."
            )
        return found
    if declared.feature_norm is None:
        return declared
    norm, head = float(declared.feature_norm), LinearHead(trained.model)
    if not declared.is_automatic:
        head.check_examples(trained.batches(), norm, None)
        return declared
    geometry, loss = _read_off(trained, head.prediction(norm)), trained.keras_loss
    head.check_examples(trained.batches(), norm, rule_of(loss)[0])
    name = getattr(loss, "__name__", type(loss).__name__)
    source = (
        f"that of {name} and one linear layer on features of norm at most {norm:g}, which every "
        "example of the data set has"
    )
    return attrs.evolve(declared, loss_geometry=geometry, source=source)


def features_of_first_batch(declared: Declared, trained: TrainedLoss) -> list[np.ndarray]:
    """What the linear layer gets of the first batch at this moment; empty if it does not matter.

    The examples are measured once, before the first step, because what comes before the layer is a
    fixed map. A layer that is added, a number that a callback raises, make it another one.

    Args:
        declared: As `resolved` returned it.
        trained: What is trained at this moment.

    Raises:
        UnsupportedRunError: The loss is not the one that was read off.
    """
    if declared.feature_norm is None:
        return []
    head = LinearHead(trained.model)
    if declared.source:
        _read_off(trained, head.prediction(float(declared.feature_norm)))
    examples, _ = next(iter(trained.batches()))
    return [head.features(examples)]


def _read_off(trained: TrainedLoss, prediction: LinearPrediction) -> LossGeometry:
    if trained.keras_loss is None:
        raise refusal(_NO_LOSS)
    geometry = loss_geometry(trained.keras_loss, prediction)
    _check_certain(trained, prediction)
    return geometry


def check_curvature(declared: LossGeometry, trained: TrainedLoss) -> None:
    """Refuses a declared smoothness that the squared error of the data exceeds.

    No gradient shows it: the squared error has no Lipschitz constant that steps are compared with.
    Where the model is no linear layer, nothing is known and nothing is refused.

    Args:
        declared: The user's word.
        trained: What is trained.

    Raises:
        UnsupportedRunError: The curvature at an example is larger than declared.
    """
    if not trained.is_certain or declared.exponent != 1:
        return
    try:
        rule, _ = rule_of(trained.keras_loss)
        if rule.activation or rule.slope is not None:
            return
        head = LinearHead(trained.model)
        prediction = head.prediction(head.largest_norm(trained.batches()))
    except UnsupportedRunError:
        return
    if prediction.activation != "linear":
        return
    smoothness = rule.geometry(prediction).smoothness
    if not smoothness <= declared.smoothness * (1 + 2 * SLACK):
        raise refusal(
            f"Expected loss_geometry with smoothness >= {smoothness:.6g}, the curvature of Keras' "
            f"MeanSquaredError at the longest features of the data, got {declared.smoothness:.6g}. "
            "Keras' loss has no factor 1/2: LossGeometry.squared_error(feature_norm, scale=2), or "
            'better loss_geometry="auto" with feature_norm=.'
        )


def _check_certain(trained: TrainedLoss, prediction: LinearPrediction) -> None:
    """Refuses a loop that may train something else than the loss whose constants are taken."""
    if not trained.is_certain:
        raise refusal(
            'loss_geometry="auto" needs steps whose losses are known, got a train_step or loop of '
            "your own whose losses cannot be compared with those of the given loss: it has not "
            "one entry for each example, or the model draws random numbers in training mode "
            f"(Dropout?). Leave that out, or train with Keras' own train_step. {DECLARE}"
        )
    if prediction.activation == "linear":
        return
    if not trained.is_the_step:
        raise refusal(
            f'loss_geometry="auto" needs a last layer without activation in a loop of your own, '
            f"got {prediction.activation}: Keras may clip its probabilities there, and the loss "
            "has no gradient beyond. Use from_logits=True and Dense(...) without activation."
        )
    examples, _ = next(iter(trained.batches()))
    if not _fit_gives_logits(trained, examples):
        raise refusal(
            f"Expected a model in which Keras finds what goes into {prediction.activation}, got "
            "one in which it clips the probabilities (a call within a tf.function? a loss of "
            "another dtype than the model's?): the loss has no gradient beyond. Use "
            "from_logits=True and Dense(...) without activation."
        )


def _fit_gives_logits(trained: TrainedLoss, examples: Any) -> bool:
    model, loss = trained.model, trained.keras_loss
    found: list[bool] = []

    def step(batch: Any) -> None:
        outputs = model(batch, training=True)
        found.append(gives_logits(outputs) and keras_api.takes_as_they_are(loss, outputs))

    (step if model.run_eagerly else tf.function(step))(examples)
    return all(found)
