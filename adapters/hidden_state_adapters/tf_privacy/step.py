"""The one private step: clip, sum, noise, rule, and the log of it.

    step.take([gradients_of], rows, dealt)

with a source of per-example gradients (gradients.py), of which nothing is clipped yet. It moves the
variables, and what the rule keeps, or nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import tensorflow as tf

from hidden_state_accountants.runs.base import SLACK
from hidden_state_adapters.tf_privacy.gradients import ExampleGradients
from hidden_state_adapters.tf_privacy.noisy_mean import NoisyMean
from hidden_state_adapters.tf_privacy.replicas import copies, together
from hidden_state_adapters.tf_privacy.rules import PlainSGD
from hidden_state_adapters.tf_privacy.step_log import Problem, RingLog, as_bits


@attrs.frozen(eq=False)
class Prepared:
    """The update of a block that is ready to be made, once, in the trace that prepared it.

    Attributes:
        block: Its place in `PrivateStep.blocks`.
        gradients: What the rule moves along.
        kept: What the rule keeps.
        rows: Of the batch.
        problem: An int64 `Problem` of the step so far; nothing moves unless it is 0.
        largest: The longest gradient of the step so far.
        before: The variables before the step, where it has several blocks.
    """

    block: int
    gradients: list[Any]
    kept: Any
    rows: tf.Tensor
    problem: tf.Tensor
    largest: tf.Tensor
    before: Sequence[Any]


class PrivateStep:
    """Clips to C, adds N(0, (zC)^2), divides, moves by a rule, and writes down what was done.

    Attributes:
        mean: Clips and adds the noise.
        norm_bound: What no gradient is longer than, but for rounding; may be assigned before the
            first step.
        log: Of the steps.

    Args:
        rule: What is made of the noisy mean.
        variables: All that are trained.
        clip: C.
        noise_multiplier: z.
        divisor: Of the sums.
        kept: Other variables that nobody else may write: moments.
        blocks: The variables in lists that move in turn; one by default.

    Raises:
        UnsupportedRunError: Squares of gradients as short as C underflow.
    """

    def __init__(
        self,
        rule: PlainSGD,
        variables: Sequence[Any],
        *,
        clip: float,
        noise_multiplier: float,
        divisor: int,
        kept: Sequence[Any] = (),
        blocks: Sequence[Sequence[Any]] = (),
    ):
        self.mean = NoisyMean(rule, clip, noise_multiplier)
        self._dtype = variables[0].dtype.base_dtype
        self.mean.check_precision(self._dtype)
        self.variables, self.blocks = list(variables), tuple(blocks) or (tuple(variables),)
        self.norm_bound = math.inf
        self._rule, self._divisor, self._kept = rule, divisor, list(kept)
        self.mean.make_generator()  # outside of the scope of a strategy
        self.log = RingLog(self._tracked)
        self._begun: Prepared | None = None  # of a step that has more blocks

    def take(
        self, passes: Sequence[Callable[[], ExampleGradients]], rows: tf.Tensor, dealt: tf.Tensor
    ) -> ExampleGradients:
        """A step of all blocks in turn, on what all replicas find together.

        Args:
            passes: Each gives the gradients of the batch for one block, at the current values.
            rows: The first ones, which are examples; all others are padding.
            dealt: The step, from 0 on, that the batch was dealt for.

        Returns:
            What the first pass gave.
        """
        self._begun = None
        found = []
        for gradients_of in passes:
            found.append(gradients_of())
            sums, largest = self.mean.sums(found[-1], self._dtype, rows)
            together(self._commit_sums, sums, largest, dealt, rows)
        return found[0]

    def _commit_sums(self, sums: Any, largest: Any, dealt: Any, rows: Any) -> None:
        self.commit(self._of_sums(sums, largest, dealt, rows))

    def _of_sums(self, sums: Any, largest: Any, dealt: Any, rows: Any) -> Prepared:
        divisor = tf.constant(self._divisor, tf.float64)
        gradients, kept = self.mean.of_sums(sums, divisor)
        is_finite = tf.math.is_finite(largest)
        bound = self.norm_bound * (1 + SLACK)
        holds = {
            Problem.GRADIENT: (largest <= bound) | ~is_finite,
            Problem.NOT_FINITE: is_finite,
            Problem.NOISE: self.mean.noise_is_fresh,
        }
        begun, self._begun = self._begun, None
        if begun is not None:
            problem = tf.bitwise.bitwise_or(begun.problem, as_bits(holds))
            largest, before = tf.maximum(begun.largest, largest), begun.before
            return Prepared(begun.block + 1, gradients, kept, rows, problem, largest, before)
        steps = self.log.steps
        holds[Problem.WEIGHTS] = self.log.is_iterate(self._tracked)
        holds[Problem.BATCH] = tf.equal(dealt, steps)
        problem = self.log.with_standing(as_bits(holds) + self._rule.problem(steps))
        before = [v.read_value() for v in self.variables] if len(self.blocks) > 1 else []
        return Prepared(0, gradients, kept, rows, problem, largest, before)

    def commit(self, prepared: Prepared) -> None:
        """Moves a block; after the last one the step is written down, or all is put back."""
        fine, rate = tf.equal(prepared.problem, 0), self._rule.rate()
        self._rule.move(self.blocks[prepared.block], prepared.gradients, rate, fine)
        if prepared.block + 1 < len(self.blocks):
            self._begun = prepared
            return
        for variable, old in zip(self.variables, prepared.before, strict=False):
            variable.assign(tf.where(fine, variable.read_value(), old))
        self._rule.finish(
            self.variables, prepared.kept, fine, rows=prepared.rows, largest=prepared.largest
        )
        self.log.write(
            rows=prepared.rows,
            problem=prepared.problem,
            variables=self._tracked,
            values=[
                rate,
                self.mean.l2_norm_clip,
                self.mean.noise_multiplier,
                self._rule.decay,
                prepared.largest,
            ],
        )

    # On the host

    @property
    def _tracked(self) -> list[Any]:
        return copies([*self.variables, *self._kept])

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Whether variables, and what the rule keeps, are as the last step left them."""
        return self.log.has_written(copies([*variables, *self._kept]))

    def stands_at(self, steps: int, rows: int) -> None:
        """Takes the variables of the moment for what so many steps left."""
        self.log.resume(steps, rows, self._tracked)
