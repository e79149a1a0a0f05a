"""What the event counts as one record and as one step, with microbatches and accumulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from hidden_state_accountants import LossGeometry
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.runs.base import Step
from hidden_state_adapters.tf_privacy.refusals import refusal


@attrs.frozen
class Units:
    r"""Examples and steps of the optimizer, and what the event says of them.

    A microbatch of m > 1 examples is a record of the event: the mean of its m gradients is clipped
    as one, and it holds the same examples in every epoch, because batches are dealt in a fixed
    order. Replacing an example, or leaving its gradient out, replaces this mean by any other: that
    is REPLACE_ONE of a record, and no other relation is left.

    The optimizer adds noise in every one of a accumulated steps, at the same parameters, so they
    are one step on a batches with noise multiplier :math:`\sqrt{a}\,z`.

    Attributes:
        batch_size: b, examples of a batch.
        examples: n, a multiple of b.
        microbatch: m.
        accumulated: a.
    """

    batch_size: int
    examples: int
    microbatch: int
    accumulated: int

    @classmethod
    def of(cls, optimizer: Any, batch_size: int, examples: int) -> Units:
        """The units of an optimizer of TensorFlow Privacy's kind.

        Raises:
            UnsupportedRunError: Batches do not make microbatches or steps of equal size.
        """
        microbatches = optimizer._num_microbatches or batch_size
        accumulated = optimizer.gradient_accumulation_steps
        if batch_size % microbatches:
            raise refusal(
                f"Expected num_microbatches to divide batch_size = {batch_size}, got "
                f"{microbatches}. Leave it out, for one example each."
            )
        if examples // batch_size % accumulated:
            raise refusal(
                "Expected gradient_accumulation_steps to divide the "
                f"{examples // batch_size} batches of an epoch, got {accumulated}: a step would "
                "combine other batches in every epoch."
            )
        return cls(batch_size, examples, batch_size // microbatches, accumulated)

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return self.examples // self.batch_size

    @property
    def records(self) -> int:
        """The event's dataset_size."""
        return self.examples // self.microbatch

    @property
    def records_per_step(self) -> int:
        """The event's batch_size."""
        return self.accumulated * self.batch_size // self.microbatch

    def step_of(self, parts: Sequence[Step], batch: int) -> Step:
        """The step of the event that the accumulated parts are together.

        Args:
            parts: What each accumulated batch did, in their order.
            batch: Index of the step within the epoch.

        Raises:
            UnsupportedRunError: The parts do not belong together.
        """
        first, last = parts[0], parts[-1]
        constant = {(part.noise_multiplier, part.clip_norm, part.weight_decay) for part in parts}
        if len(constant) > 1:
            raise refusal("noise, clip norm or decay changed while gradients were accumulated.")
        return attrs.evolve(
            last,  # applies them all, with its learning rate
            noise_multiplier=first.noise_multiplier * math.sqrt(self.accumulated),
            batch=batch,
            rows=self.records_per_step,
            largest_norm=max(part.largest_norm for part in parts),
        )

    def geometry(self, loss: LossGeometry | None) -> LossGeometry | None:
        """That of the mean loss of a microbatch.

        Such a mean has the smoothness and curvature of its parts, but it is no generalised linear
        model: their gradients have different directions.
        """
        return loss if self.microbatch == 1 else of_means(loss)


def of_means(loss: LossGeometry | None) -> LossGeometry | None:
    """The geometry of the mean of several losses; see `Units.geometry`."""
    if loss is None or loss.kind is not LossKind.GENERALIZED_LINEAR:
        return loss
    return LossGeometry.convex(loss.smoothness, loss.lipschitz)


def checked_microbatches(examples: int) -> list[str]:
    """What is said of records of so many examples; nothing of single ones."""
    if examples == 1:
        return []
    return [
        f"fixed microbatches of {examples} examples, in the order of the data set: each is a "
        "record of the event, and its mean gradient is clipped as one. An example that is replaced "
        "moves it by up to twice the clip norm, which is what REPLACE_ONE says of a record"
    ]


def checked_norms(loss: LossGeometry | None, examples: int) -> list[str]:
    """What is said of the gradients of a run in which none was longer than the bound.

    Args:
        loss: Of the run.
        examples: Of a microbatch.

    Returns:
        One sentence, or none where no bound is known.
    """
    if loss is None or loss.lipschitz is None:
        return []
    of = "per-example" if examples == 1 else "microbatches'"
    return [f"{of} gradient norms at most {loss.lipschitz:g}"]
