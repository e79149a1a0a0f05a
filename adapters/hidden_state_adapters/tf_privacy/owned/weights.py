"""Weights of classes and examples: factors of the losses, and so of the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import validate
from hidden_state_adapters.tf_privacy.gradients import ExampleGradients


@attrs.frozen
class GivenWeights:
    """What fit was told.

    Attributes:
        of_classes: A number for every class, or None.
        of_examples: One for every example, or None.
        bound: On every weight that an example could have; None if it is not known.
    """

    of_classes: Any = None
    of_examples: Any = None
    bound: float | None = None

    @property
    def largest(self) -> float | None:
        """Bound on the weight of every example that could be in the data; None if unknown.

        Raises:
            TypeError, ValueError: The weights of the classes are none.
        """
        if self.of_examples is not None and self.bound is None:
            return None
        classes = 1.0 if self.of_classes is None else max(self._classes().values())
        return classes if self.of_examples is None else classes * float(self.bound or 0)

    def of(self, targets: Any, number: int) -> tf.Tensor | None:
        """The weight of every example, float64, shape (examples,); None if there are none.

        Args:
            targets: Of all examples.
            number: Of the examples.

        Raises:
            TypeError, ValueError: They are no weights, or not one for each example.
        """
        if self.of_classes is None and self.of_examples is None:
            return None
        weights = np.ones(number)
        if self.of_classes is not None:
            weights = weights * self._by_class(targets)
        if self.of_examples is not None:
            weights = weights * self._by_example(number)
        return tf.constant(weights, tf.float64)

    def _classes(self) -> dict[int, float]:
        given = self.of_classes
        if not isinstance(given, Mapping) or not given:
            raise TypeError(
                f"Expected class_weight to be a dictionary from classes to numbers, got {given!r}. "
                "Take the numbers from public knowledge: how often a class occurs is private."
            )
        return {
            int(label): validate.real(f"class_weight[{label!r}]", weight, minimum=0)
            for label, weight in given.items()
        }

    def _by_class(self, targets: Any) -> np.ndarray:
        known = self._classes()
        if not any(known.values()):
            raise ValueError("Expected a class_weight above 0, got none.")
        array = np.asarray(targets) if not tf.nest.is_nested(targets) else np.empty(0)
        if array.ndim == 2 and array.shape[1] > 1:
            array = array.argmax(axis=1)
        labels = array.reshape(-1)
        if array.size != len(array) or not np.array_equal(labels, np.round(labels)):
            raise ValueError(
                "Expected targets that are classes, or one-hot rows, with class_weight, got an "
                f"array of shape {array.shape}. Use sample_weight."
            )
        missing = sorted(set(labels.astype(int).tolist()) - set(known))
        if missing:
            raise ValueError(
                f"Expected class_weight for every class, got none for class {missing[0]}: its "
                "weight has to be known before the data is."
            )
        return np.array([known[label] for label in labels.astype(int).tolist()])

    def _by_example(self, number: int) -> np.ndarray:
        weights = np.asarray(self.of_examples, dtype=np.float64)
        if weights.shape != (number,):
            raise ValueError(
                f"Expected sample_weight of shape ({number},), one for each example, got shape "
                f"{weights.shape}."
            )
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("Expected every sample_weight to be finite and >= 0, got another one.")
        if self.bound is not None and not (weights <= self.bound).all():
            raise ValueError(
                f"Expected every sample_weight <= weight_bound = {self.bound:g}, got a larger one. "
                "The bound is on the weights that an example could have; it is public."
            )
        return weights


def times(found: ExampleGradients, weights: tf.Tensor) -> ExampleGradients:
    """The same of losses times weights, which are those of the gradients as well."""
    return attrs.evolve(
        found,
        losses=found.losses * tf.cast(weights, found.losses.dtype),
        norms=found.norms * weights,
        weighted_sum=lambda factors: found.weighted_sum(factors * weights),
    )
