"""What a model is compiled with: whose rule makes a step of the clipped and noisy gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.owned.settings import Settings
from hidden_state_adapters.tf_privacy.owned.steps import OwnedSteps, Update


class UpdateRule:
    """DP-SGD along an optimizer of Keras. Other mechanisms override what makes the steps.

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
        self, settings: Settings, optimizer: Any, plan: BatchPlan, variables: Sequence[Any]
    ) -> OwnedSteps:
        """What makes the steps of a run.

        Args:
            settings: Of the model.
            optimizer: The one that Keras has compiled.
            plan: The batches.
            variables: Those that are trained.

        Raises:
            UnsupportedRunError: No such run can be accounted.
        """
        return OwnedSteps(settings, Update(optimizer, variables), plan, variables)
