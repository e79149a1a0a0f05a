"""The one private step: clip, sum, noise, rule, and the log of it.

    step.commit(step.prepare(found))

with per-example gradients (gradients.py) of which nothing is clipped yet. `prepare` adds the noise
and moves nothing; `commit` moves the variables, and what the rule keeps, or nothing at all. An
optimizer calls the first in `_compute_gradients` and the second in `apply_gradients`; `take` makes
a step of a model that may have replicas.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants.runs.run import SLACK
from hidden_state_adapters.tf_privacy.gradients import ExampleGradients
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.replicas import copies, together
from hidden_state_adapters.tf_privacy.rules import PlainSGD
from hidden_state_adapters.tf_privacy.step_log import Problem, StepLog, as_bits

# 1e8 times the number whose square is the smallest in float32: what is lost then cannot matter.
_SMALLEST_CLIP = 1.1e-11
_PRECISIONS = (tf.float32, tf.float64)


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
        clip: C.
        noise_multiplier: z; may be assigned before the first step, as what follows.
        norm_bound: What no gradient is longer than, but for rounding.
        divisor: Of the sums; None for the rows of the batch.
        has_equal_rows: Whether all batches must have as many rows; False by default.
        blocks: The variables in lists that move in turn.
        log: Of the steps.

    Args:
        rule: What is made of the noisy mean.
        variables: All that are trained.
        clip: C.
        noise_multiplier: z.
        divisor: Of the sums.
        kept: Other variables that nobody else may write: moments.
        blocks: One by default.

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
        divisor: int | None,
        kept: Sequence[Any] = (),
        blocks: Sequence[Sequence[Any]] = (),
    ):
        self._dtype = variables[0].dtype.base_dtype
        if self._dtype == tf.float32 and clip < _SMALLEST_CLIP:
            raise refusal(
                f"Expected l2_norm_clip >= {_SMALLEST_CLIP:g} in float32, got {clip:g}: squares of "
                "shorter gradients underflow, and they are not clipped. Scale the loss up, or "
                "train in float64."
            )
        self.clip, self.noise_multiplier, self.divisor = clip, noise_multiplier, divisor
        self.variables, self.blocks = list(variables), tuple(blocks) or (tuple(variables),)
        self.norm_bound = math.inf
        self._rule, self._kept, self.has_equal_rows = rule, list(kept), False
        # Philox makes its numbers of a key and a counter that only moves ahead, and both begin
        # where the operating system says: tf.random.set_seed does not touch it.
        with tf.init_scope():  # outside of checkpoints, which would repeat its numbers
            state = np.frombuffer(os.urandom(24), np.int64)  # a counter of 128 bits, a key of 64
            self._generator = tf.random.Generator.from_state(state, alg="philox")
        self.log = StepLog(self._tracked)
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
        self.begin()
        found = []
        for gradients_of in passes:
            found.append(gradients_of())
            sums, largest = self._sums(found[-1], rows)
            together(self._commit_sums, sums, largest, dealt, rows)
        return found[0]

    def begin(self) -> None:
        """What comes next is the first block of a step."""
        self._begun = None

    def prepare(self, found: ExampleGradients, rows: tf.Tensor | None = None) -> Prepared:
        """The noisy update of the next block.

        Args:
            found: Of the batch.
            rows: The first ones, which are examples; None for all.
        """
        sums, largest = self._sums(found, rows)
        if rows is None:
            rows = tf.size(found.norms, tf.int64)
        return self._of_sums(sums, largest, None, rows)

    def _sums(
        self, found: ExampleGradients, rows: tf.Tensor | None
    ) -> tuple[list[list[Any]], tf.Tensor]:
        """The sums that the rule wants, and the longest gradient, infinite if one is not finite."""
        norms, nothing = found.norms, tf.zeros_like(found.norms)
        is_example = None if rows is None else tf.range(tf.size(norms, tf.int64)) < rows

        def of_examples(values: tf.Tensor) -> tf.Tensor:
            return values if is_example is None else tf.where(is_example, values, nothing)

        norms = of_examples(norms)
        infinite = tf.constant(math.inf, tf.float64)
        lengths = tf.where(tf.math.is_finite(norms), norms, infinite)
        largest = tf.maximum(tf.reduce_max(lengths), tf.zeros([], tf.float64))  # of no rows, too
        factors = self._rule.factors(norms, self.clip, self._dtype)
        return [found.weighted_sum(of_examples(part)) for part in factors], largest

    def _with_noise(self, sums: Sequence[Any]) -> list[Any]:
        scale = self.noise_multiplier * self.clip
        if not scale:
            return list(sums)
        noise = [self._generator.normal(tf.shape(s), stddev=scale, dtype=s.dtype) for s in sums]
        return [s + n for s, n in zip(sums, noise, strict=True)]

    def _commit_sums(self, sums: Any, largest: Any, dealt: Any, rows: Any) -> None:
        self.commit(self._of_sums(sums, largest, dealt, rows))

    def _of_sums(self, sums: Any, largest: Any, dealt: Any, rows: Any) -> Prepared:
        divisor = tf.cast(rows if self.divisor is None else self.divisor, tf.float64)
        means = [part / tf.cast(divisor, part.dtype) for part in self._with_noise(sums[0])]
        gradients, kept = self._rule.direction(means, sums[1:], divisor)
        is_finite = tf.math.is_finite(largest)
        holds = {
            Problem.GRADIENT: (largest <= self.norm_bound * (1 + SLACK)) | ~is_finite,
            Problem.NOT_FINITE: is_finite,
        }
        begun, self._begun = self._begun, None
        if begun is not None:
            problem = tf.bitwise.bitwise_or(begun.problem, as_bits(holds))
            largest, before = tf.maximum(begun.largest, largest), begun.before
            return Prepared(begun.block + 1, gradients, kept, rows, problem, largest, before)
        steps = self.log.steps
        holds[Problem.WEIGHTS] = self.log.is_iterate(self._tracked)
        if dealt is not None:
            holds[Problem.BATCH] = tf.equal(dealt, steps)
        if self.has_equal_rows:
            expected = self.log.last_rows if self.divisor is None else self.divisor
            is_first = tf.equal(steps, 0) & (self.divisor is None)
            holds[Problem.ROWS] = (rows > 0) & (is_first | tf.equal(rows, expected))
        holds[Problem.ENDED] = self.log.begin()
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
        self._rule.finish(self.variables, prepared.kept, fine)
        self.log.write(
            rows=prepared.rows,
            problem=prepared.problem,
            variables=self._tracked,
            values=[rate, self.clip, self.noise_multiplier, self._rule.decay, prepared.largest],
        )

    # On the host

    @property
    def next_block(self) -> int:
        """The place of the block that the next update moves."""
        return 0 if self._begun is None else self._begun.block + 1

    @property
    def _tracked(self) -> list[Any]:
        return copies([*self.variables, *self._kept])

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Whether variables, and what the rule keeps, are as the last step left them."""
        return bool(self.log.is_iterate(copies([*variables, *self._kept])))

    def stands_at(self, steps: int, rows: int, largest: float = 0.0) -> None:
        """Takes the variables of the moment for what so many steps left."""
        self.log.resume(steps, rows, largest, self._tracked)


def check_variables(variables: Sequence[Any]) -> None:
    """Refuses variables of low or mixed precision, with constraints, or none at all."""
    if not variables:
        raise refusal("Expected trainable variables, got none.")
    for variable in variables:
        if hasattr(variable, "true_dtype"):  # Keras' AutoCastVariable
            raise refusal(
                f"Expected {variable.name} to be used in its own precision, got a mixed-precision "
                "policy: coarse rounding makes the update expand small distances. Train with the "
                'policy "float32" or "float64".'
            )
        if variable.dtype.base_dtype not in _PRECISIONS:
            raise refusal(
                f"Expected {variable.name} in float32 or float64, got {variable.dtype.name}: "
                "coarse rounding makes the update expand small distances."
            )
    check_constraints(variables)
    if len({variable.dtype.base_dtype for variable in variables}) > 1:
        raise refusal("Expected trainable variables of one precision, got float32 and float64.")


def check_constraints(variables: Sequence[Any]) -> None:
    """Refuses variables that an optimizer of Keras maps to something else after every update."""
    for variable in variables:
        if getattr(variable, "constraint", None) is not None:
            raise refusal(
                f"Expected {variable.name} without a constraint, got {variable.constraint!r}: it "
                "is no part of the event. Use projection_radius."
            )
