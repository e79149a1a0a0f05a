"""What a model is compiled with: whose rule makes a step of the clipped and noisy gradients."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy.mechanism import Mechanism
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.rules import Update, refuse_noise
from hidden_state_adapters.tf_privacy.settings import Declared, Settings


class UpdateRule:
    """DP-SGD along an optimizer of Keras. Other mechanisms override what makes the steps.

    Files of Keras hold the optimizer by themselves, and `plain_rule` in the model's configuration.

    Attributes:
        knows_microbatches: Whether a bound covers records that are several examples.

    Args:
        optimizer: Of Keras, or its name.
    """

    knows_microbatches = True

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def declared(self, settings: Settings) -> Declared:
        """What is said of the loss.

        Raises:
            UnsupportedRunError: Two things say it.
        """
        return settings.declared

    def steps(
        self, settings: Settings, optimizer: Any, plan: BatchPlan | None, variables: Sequence[Any]
    ) -> Mechanism:
        """What makes the steps of a run.

        Args:
            settings: Of the model.
            optimizer: The one that Keras has compiled.
            plan: The batches.
            variables: Those that are trained.

        Raises:
            UnsupportedRunError: No such run can be accounted.
        """
        return Mechanism(settings, Update(optimizer, variables), plan, variables)

    def with_places(self, model: Any) -> UpdateRule:
        """A rule for files: variables are named by their places among those that a model trains.

        Raises:
            UnsupportedRunError: It is about other variables.
        """
        return self

    def get_config(self) -> dict[str, Any]:
        """The arguments but the optimizer, as plain types."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> UpdateRule:
        """Inverse of `get_config`, for an optimizer that is still to be given."""
        return cls(None, **config)


def plain_rule(rule: UpdateRule, model: Any) -> dict[str, Any]:
    """What a file tells of a rule, beside its optimizer; empty for that of the optimizer alone."""
    if type(rule) is UpdateRule:
        return {}
    kind, config = type(rule), rule.with_places(model).get_config()
    return {
        "module": kind.__module__,
        "name": tf.keras.utils.get_registered_name(kind),
        "config": config,
    }


def rule_of(plain: Mapping[str, Any], optimizer: Any) -> Any:
    """What a model was compiled with: the rule that `plain_rule` wrote down, or the optimizer.

    Raises:
        UnsupportedRunError: The rule is a class of somebody else that Keras does not know.
    """
    if not plain:
        return optimizer
    if plain["module"].startswith("hidden_state_adapters."):  # whose modules are loaded lazily
        importlib.import_module(plain["module"])
    kind = tf.keras.utils.get_registered_object(plain["name"])
    if kind is None:
        raise refusal(
            f"Expected the class {plain['name']}, which the model was compiled with, got none of "
            "this name. Decorate it with tf.keras.utils.register_keras_serializable, and import it "
            "before the model is loaded."
        )
    # Not Keras' way back: it has another one for each format of files.
    rule = kind.from_config(plain["config"])
    rule.optimizer = optimizer
    return rule


def rule_and_settings(optimizer: Any, given: Settings) -> tuple[UpdateRule, Settings]:
    """What a model that is compiled with an optimizer trains by.

    Args:
        optimizer: An `UpdateRule`, an optimizer of Keras or its name, or one with noise of
            this package.
        given: What the model was made with.

    Raises:
        UnsupportedRunError: The optimizer says something else than the model, or would add noise a
            second time.
        ValueError: None of the two says how long a gradient may be.
    """
    if hasattr(optimizer, "for_model"):  # one with noise of this package
        rule, told = optimizer.for_model()
        return rule, given.joined_by(type(optimizer).__name__, told)
    rule = optimizer if isinstance(optimizer, UpdateRule) else UpdateRule(optimizer)
    refuse_noise(rule.optimizer)
    if given.l2_norm_clip is None:
        raise ValueError(
            "Expected l2_norm_clip of the model, got none. Give it to the model, or compile with "
            "an optimizer that has it, such as CyclicDPKerasSGDOptimizer."
        )
    return rule, given
