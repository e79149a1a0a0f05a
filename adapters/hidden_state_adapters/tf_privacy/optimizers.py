"""The private optimizers of Keras: drop-ins for TensorFlow Privacy's, at its trust.

An optimizer is shown a vector of losses and a tape. `_compute_gradients` clips the gradient of
every example and adds the noise, `apply_gradients` moves the variables. As with TensorFlow
Privacy's optimizers, whoever calls them sees to the rest: each entry of the loss is about one
example, every update is applied, and nothing else moves the variables. `HiddenStateCallback`
records Keras' own fit, and `make_private(model)` takes over what an optimizer was made with.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from hidden_state_accountants import BatchOrder, Regulariser, UnsupportedRunError, validate
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy.algorithm import Algorithm, Blocks, UpdateRule
from hidden_state_adapters.tf_privacy.blocks import BlockCoordinateUpdate, blocks_of, check_blocks
from hidden_state_adapters.tf_privacy.dice import DiceUpdate
from hidden_state_adapters.tf_privacy.gradients import check_loss, of_rows
from hidden_state_adapters.tf_privacy.lineage import notes_of, read_notes
from hidden_state_adapters.tf_privacy.settings import Settings, check_scale
from hidden_state_adapters.tf_privacy.step import NOT_FINITE, TOO_LONG, StepEntry
from hidden_state_adapters.tf_privacy.trained_part import refuse_surroundings

legacy: Any = tf.keras.optimizers.legacy
_Schedule = tf.keras.optimizers.schedules.LearningRateSchedule
# Options of Keras that must have these values. Where every noisy update is accounted as released,
# what follows it is free.
_UNCLIPPED: Mapping[str, Any] = {
    "clipnorm": None, "clipvalue": None, "global_clipnorm": None, "gradient_accumulation_steps": 1,
}  # fmt: skip
_PLAIN_SGD: Mapping[str, Any] = {"momentum": 0.0, "nesterov": False, "decay": 0.0, **_UNCLIPPED}
_ARGUMENTS = ("l2_norm_clip", "noise_multiplier", "num_microbatches")
_TOLD = ("prox", "projection_radius", "loss_geometry")
_logger = logging.getLogger("hidden_state_accountants")


class NotedSteps(Algorithm):
    """Steps in a foreign loop, of which four numbers are noted on the device."""

    def stands_at(self, entry: StepEntry) -> None:
        """Begins the notes."""
        with tf.init_scope():
            self._numbers = {
                name: tf.Variable(0.0, trainable=False, dtype=tf.float64)
                for name in ("steps", "rows", "learning_rate", "longest")
            }
        self.look()

    def note(self, **numbers: Any) -> None:
        """Notes numbers of the step on the device; of the longest gradient the maximum so far."""
        for name, value in numbers.items():
            number, value = self._numbers[name], tf.cast(value, tf.float64)
            number.assign(tf.maximum(number, value) if name == "longest" else value)

    def note_update(self, rate: tf.Tensor, steps: int) -> None:
        """Notes an update, and the number of steps that it adds: 1 if it ends one, else 0."""
        self.note(steps=self._numbers["steps"] + steps, learning_rate=rate)
        self.update.count(steps)

    @property
    def last_step(self) -> StepEntry:  # type: ignore[override]
        """Last step; with a problem if a gradient was too long or not finite."""
        steps, rows, rate, longest = (float(value.numpy()) for value in self._numbers.values())
        problem = "" if self.is_fine(longest) else TOO_LONG
        if math.isinf(longest):
            problem = NOT_FINITE
        return StepEntry(int(steps), int(rows), rate, longest, problem)

    def block_of(self, variables: Sequence[Any]) -> int:
        """Returns the number of the block of variables; UnsupportedRunError if there is none."""
        blocks = [list(map(id, block)) for block in self.blocks]
        if (own := list(map(id, variables))) not in blocks:
            raise UnsupportedRunError(
                "Expected the variables of the steps before, in the same order, got "
                f"{len(own)}, not the same. Construct another optimizer for another set."
            )
        return blocks.index(own)

    def train_by(self, blocks: Blocks) -> None:
        """Notes the blocks of the first step; UnsupportedRunError if a later one has others."""
        given, own = ([list(map(id, one)) for one in each] for each in (blocks, self.blocks))
        with tf.init_scope():  # the step may be traced
            if given != own and self.has_stepped:
                raise UnsupportedRunError(
                    "Expected the blocks of the first step, got other variables or another order: "
                    "one run trains the same blocks throughout. Use another optimizer."
                )
        self.blocks = blocks

    def look(self) -> None:
        """Keeps the values of the moment as those that the last step left."""
        self._seen, self.left = self.last_step.steps, self.values()

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Returns whether these are the variables, with their values if they were looked at."""
        return self.trains(variables) and (
            self.last_step.steps != self._seen or super().is_iterate(variables)
        )


class PrivateOptimizer(legacy.Optimizer):
    """Base of the private optimizers, to stand before a legacy class of Keras.

    Attributes:
        is_private_sgd: True if Keras' part of the update is that of plain SGD, if no option says
            otherwise.
        update_rule: Rule that the noisy mean goes through, in words.
        settings: Arguments of a model that is compiled with it.
        loaded_runs: Notes of the runs behind the weights of a file, as `lineage.notes_of`.
    """

    is_private_sgd = True
    update_rule = "SGD"
    _keras: ClassVar[Any] = legacy.SGD  # class of Keras
    _neutral: ClassVar[Mapping[str, Any]] = _PLAIN_SGD
    _steps: NotedSteps | None = None  # from the first step on
    _noisy: Sequence[Any] = ()  # gradients that are to be applied next
    _was_dp_gradients_called = False

    def __init__(
        self, told: Sequence[Any], own: Mapping[str, Any], keras: dict[str, Any], **settings: Any
    ):
        for option, expected in self._neutral.items():
            if (value := keras.pop(option, expected)) is not expected and value != expected:
                raise UnsupportedRunError(
                    f"Expected {option} = {expected}, got {value!r}: no theorem here covers it. "
                    "Drop it."
                )
        if isinstance(keras["learning_rate"], int | float):
            validate.magnitude("learning_rate", keras["learning_rate"])
        super().__init__(**keras)
        given = dict(zip(_ARGUMENTS, told, strict=True))
        self.settings = Settings(batch_order=BatchOrder.CYCLIC, **given, **settings)
        self._own = {**self.settings.to_plain(*_ARGUMENTS), **own}
        self.loaded_runs: dict[str, Any] = {}

    def _rule(self, optimizer: Any) -> UpdateRule:
        """Returns the rule of the updates, around an optimizer of Keras."""
        raise NotImplementedError

    def _of_records(self, loss: Any) -> tf.Tensor:
        """Returns the loss of each record; called under the tape."""
        return _means(check_loss(loss, self.settings.num_microbatches))

    # The steps

    @property
    def last_step(self) -> StepEntry:
        """Last step, and number of steps so far; without noise."""
        return StepEntry() if self._steps is None else self._steps.last_step

    def begin_run(
        self, variables: Sequence[Any], plan: BatchPlan | None = None, examples_of_record: int = 1
    ) -> NotedSteps:
        """Returns what makes the steps of a run that begins."""
        if taken := self.last_step.steps:
            raise UnsupportedRunError(
                f"Expected an optimizer without steps, got one with {taken} that were not "
                "recorded. Pass the callback to every call of fit."
            )
        self._steps = NotedSteps(self._rule(None), self.settings, self, plan, variables)
        self._steps.examples_of_record = examples_of_record
        return self._steps

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _steps_of(self, variables: Sequence[Any]) -> NotedSteps:
        """Returns what makes the steps; in a loop that nobody records it begins here."""
        refuse_surroundings()
        if self._steps is None:
            with tf.init_scope():  # the step may be traced
                self.begin_run(variables).begin(self.settings.declared)
            _logger.warning(
                "nobody records the steps of %s. HiddenStateCallback in fit, or "
                "make_private(model), says what the run costs; of a loop of your own declare the "
                "event.", type(self).__name__,
            )  # fmt: skip
        assert self._steps is not None
        self._steps.lineage.hang_on(self._steps.variables)
        return self._steps

    # Keras' and TensorFlow Privacy's seams

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Returns the noisy mean of clipped gradients, of a loss with one entry per example."""
        if not callable(loss) and tape is None:
            raise ValueError("Expected a `tape` with a loss that is a tensor, got none.")
        self._was_dp_gradients_called = True
        with tape or tf.GradientTape() as tape:
            if callable(loss):
                if not callable(var_list):
                    tape.watch(var_list)
                loss = loss()
            losses = self._of_records(loss)
            variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        jacobians = tape.jacobian(losses, variables, unconnected_gradients="zero")
        steps = self._steps_of(variables)
        steps.block_of(variables)  # raises
        rows = tf.shape(losses, out_type=tf.int64)[0]
        found = of_rows(jacobians, losses, has_padding=False)
        sums, longest = steps.sums(found, rows)
        along, is_finite = steps.direction(sums, rows)
        steps.note(
            rows=rows, longest=tf.where(is_finite, longest, tf.constant(math.inf, tf.float64))
        )
        self._noisy = along
        return list(zip(along, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, experimental_aggregate_gradients: bool = True
    ) -> None:
        """Moves the variables along what `_compute_gradients` has just returned, once.

        Raises:
            AssertionError: `_compute_gradients` was never called (as TensorFlow Privacy).
            UnsupportedRunError: These are not the gradients that it returned last.
        """
        if not self._was_dp_gradients_called:
            raise AssertionError(
                "Neither _compute_gradients() or get_gradients() on the differentially private "
                "optimizer was called. This means the training is not differentially private."
            )
        along, variables = zip(*grads_and_vars, strict=True)
        expected, self._noisy = self._noisy, ()
        if list(map(id, along)) != list(map(id, expected)):
            raise UnsupportedRunError(
                "Expected the gradients that _compute_gradients returned last, as they are and "
                "once, in the same tf.function, got others: they are not the noisy mean that is "
                "accounted."
            )
        steps = self._steps_of(variables)
        block, blocks = steps.block_of(variables), steps.blocks
        rate = steps.update.rate()
        steps.rule.move(variables, along, rate)
        steps.note_update(rate, int(block + 1 == len(blocks)))

    def plain_update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Moves variables as Keras does along gradients that have their noise."""
        super().apply_gradients(zip(gradients, variables, strict=True))

    # Models, copies and files

    def for_model(self) -> tuple[UpdateRule, dict[str, Any]]:
        """Returns the rule of its updates, and arguments of a model that is compiled with it."""
        told = {name: getattr(self.settings, name) for name in (*_ARGUMENTS, *_TOLD)}
        return self._rule(self._plain()), told

    def _plain(self) -> Any:
        """Returns the optimizer of Keras without noise."""
        return tf.keras.optimizers.SGD(self._hyper["learning_rate"])

    def get_config(self) -> dict[str, Any]:
        """Returns all arguments, and what was trained, for whoever loads the file; see Keras."""
        trained = [] if self._steps is None else self._steps.variables
        return {
            **self._keras.get_config(self), **self._own, **notes_of(trained, self.loaded_runs),
        }  # fmt: skip

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> PrivateOptimizer:
        """Inverse of `get_config`; see Keras."""
        arguments = dict(config)
        notes = read_notes(arguments)
        optimizer: PrivateOptimizer = super().from_config(arguments, custom_objects)
        optimizer.loaded_runs = notes
        return optimizer

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles the arguments only: steps stay with the original."""
        return type(self).from_config, (self.get_config(),)

    def __deepcopy__(self, memo: Any) -> PrivateOptimizer:
        return type(self).from_config(self.get_config())


def _means(losses: tf.Tensor, records: int | None = None) -> tf.Tensor:
    """Returns the mean loss of each record; None for one in every row."""
    return tf.reduce_mean(tf.reshape(losses, [records or tf.shape(losses)[0], -1]), axis=1)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class CyclicDPKerasSGDOptimizer(PrivateOptimizer, legacy.SGD):
    r"""DPKerasSGDOptimizer for runs of which only the last iterate is released.

    One step with the b examples of a batch is

    .. math::
        x \leftarrow \Pi_R\,\mathrm{prox}_{\eta h}\Big( (1 - \eta w)\, x
        - \frac{\eta}{b} \Big(\sum_i
        \mathrm{clip}_C(\nabla f_i(x)) + \mathcal{N}(0, (z C)^2 I)\Big)\Big)

    with C = `l2_norm_clip`, z = `noise_multiplier`, w = `weight_decay`, h = `prox` and
    :math:`\Pi_R` the projection of all trainable variables together on the ball of
    `projection_radius` around 0.

    The loss must be a vector with one entry per example (``reduction="none"``), in `Model.fit`
    (graph, eager or XLA) and in own loops that call `minimize`, or `_compute_gradients` and
    `apply_gradients`. It can be saved and loaded with the model.

    Formal guarantees:
      - Of a step: as above; independent noise for every variable and step, from TensorFlow's
        generators (which are not cryptographic).
      - Of a run: those of the `LastIterateDpEvent` that `HiddenStateCallback` records, or that you
        declare, because an optimizer does not see the order of the data.
      - Trusted, as of TensorFlow Privacy's optimizers: each entry of the loss is about one example,
        every update is applied, and nothing else moves the variables.

    Args:
        l2_norm_clip: Clip norm C, the bound on the norm of the gradient of one example, for all
            variables together.
        noise_multiplier: Standard deviation z of the noise on the sum of gradients over C.
        num_microbatches: None for the batch size: one example each. Fewer are records of several
            examples, which are accounted under REPLACE_ONE and by composition.
        gradient_accumulation_steps: 1; use a larger batch_size.
        learning_rate: Number or LearningRateSchedule, fixed before the run.
        weight_decay: Decay w >= 0, applied outside the clip.
        prox: Regulariser h, whose proximal map with the step's learning rate follows every step, or
            None. The event reads its l2, which contracts.
        projection_radius: Radius R, or None for no projection. As the event's domain_diameter it
            is 2R.
        loss_geometry: Declaration about the per-example loss; the callback compares its
            `lipschitz`. `make_private(model, feature_norm=)` derives it.
        name: Name of the optimizer.
        **kwargs: Arguments of tf.keras.optimizers.legacy.SGD at their neutral values.

    Raises:
        UnsupportedRunError: Momentum, gradient clipping by Keras, several replicas, loss scaling
            (mixed precision), a loss that is already reduced, other gradients than
            `_compute_gradients` returned.
        TypeError, ValueError: An argument has an impossible value.

    Source: the optimizer is DP-SGD (Abadi et al. 2016, arXiv:1607.00133v2, algorithm 1) with fixed
        batches.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int = 1,
        learning_rate: Any = 0.01,
        *,
        weight_decay: float = 0.0,
        prox: Regulariser | None = None,
        projection_radius: float | None = None,
        loss_geometry: Any = None,
        name: str = "CyclicDPKerasSGDOptimizer",
        **kwargs: Any,
    ):
        self.weight_decay = validate.real("weight_decay", weight_decay, minimum=0)
        kwargs["gradient_accumulation_steps"] = gradient_accumulation_steps
        super().__init__(
            (l2_norm_clip, noise_multiplier, num_microbatches),
            {"weight_decay": self.weight_decay},
            {"learning_rate": learning_rate, "name": name, **kwargs},
            prox=prox,
            projection_radius=projection_radius,
            loss_geometry=loss_geometry,
        )
        self._own |= self.settings.to_plain(*_TOLD)

    def _rule(self, optimizer: Any) -> UpdateRule:
        return UpdateRule(optimizer)

    def _of_records(self, loss: Any) -> tf.Tensor:
        losses, number = check_loss(loss, None), self.settings.num_microbatches
        if losses.shape[0] is not None:
            self.settings.microbatch(losses.shape[0])  # raises
        return _means(losses, number)

    def _plain(self) -> Any:
        rate = self._hyper["learning_rate"]
        if callable(rate) and not isinstance(rate, _Schedule):
            raise UnsupportedRunError(
                "Expected a number or a schedule of Keras as learning_rate of an optimizer that a "
                "model is compiled with, got a function. Use tf.keras.optimizers.schedules."
            )
        return tf.keras.optimizers.SGD(rate, weight_decay=self.weight_decay or None)


class DiceOptimizer(PrivateOptimizer):
    """Base of `DiceKerasSGDOptimizer` and `DiceKerasAdamOptimizer`; see the former."""

    _neutral = _UNCLIPPED
    _usual_rate = 0.01

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        error_l2_norm_clip: float | None = None,
        automatic: bool = False,
        **keras: Any,
    ):
        self._dice: dict[str, Any] = {
            "error_l2_norm_clip": error_l2_norm_clip,
            "automatic": automatic,
        }
        self._rule(None)  # raises
        super().__init__(
            (l2_norm_clip, noise_multiplier, num_microbatches),
            self._dice,
            {"learning_rate": self._usual_rate, "name": type(self).__name__, **keras},
        )

    def _rule(self, optimizer: Any) -> DiceUpdate:
        return DiceUpdate(optimizer, **self._dice)

    def _plain(self) -> Any:
        options = self._keras.get_config(self)
        return self._keras(**options | {"learning_rate": self._hyper["learning_rate"]})


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class DiceKerasSGDOptimizer(DiceOptimizer, legacy.SGD):
    """DPKerasSGDOptimizer that feeds back, clipped again, what the clip cut off; see `DiceUpdate`.

    Keras' SGD takes a step along the noisy updates. It is used like `CyclicDPKerasSGDOptimizer`.

    Formal guarantees:
      - Those of the `DiceSgdDpEvent` of the run under `DiceSgdAccountant`: all iterates, all noisy
        updates and all that is computed from them (momentum, learning rates) are released.
      - The error is in no file, config, pickle, copy or text. So a loaded or copied optimizer
        starts ANOTHER run without error; compose the events of both.
      - Trusted: as of `CyclicDPKerasSGDOptimizer`.

    Args:
        l2_norm_clip: Clip norm C_1 > 0.
        noise_multiplier: Standard deviation of the noise on the SUM of clipped gradients over C_1.
        num_microbatches: None, or the number of rows: one example each.
        error_l2_norm_clip: Clip norm C_2, as for `DiceUpdate`.
        automatic: True if both clips normalise, as for `DiceUpdate`.
        **keras: Arguments of tf.keras.optimizers.legacy.SGD: learning_rate, momentum, nesterov,
            decay, name; the others at their neutral values.

    Raises:
        TypeError, ValueError, UnsupportedRunError: As `CyclicDPKerasSGDOptimizer`.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 and 4.
    """


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class DiceKerasAdamOptimizer(DiceOptimizer, legacy.Adam):
    r"""Keras' Adam on the noisy updates of DiceSGD.

    .. math::
        \tilde v_t = v_t + \mathcal{N}(0, \sigma_1^2 I), \quad
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \tilde v_t, \quad
        s_t = \beta_2 s_{t-1} + (1 - \beta_2) \tilde v_t^2

    The noise is inside the moments, so they and all options of Adam are post-processing. Update
    :math:`v_t`, arguments, formal guarantees and errors: see `DiceKerasSGDOptimizer`; the others
    are those of tf.keras.optimizers.legacy.Adam. Two misprints of the paper are put right: the
    second moment decays with 1 - beta_2, and the bias corrections count steps from 1.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithm 3.
    """

    is_private_sgd = False
    update_rule = "Adam"
    _keras = legacy.Adam
    _usual_rate = 0.001


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class BlockCoordinateKerasOptimizer(PrivateOptimizer, legacy.SGD):
    """DP-MBCD: lists of variables are blocks, updated in turn; see `BlockCoordinateUpdate`.

    `minimize(loss, blocks)` updates each block, with the loss evaluated anew and r = l1 |v|_1 +
    l2/2 |v|^2, restricted to v >= 0 if `nonnegative`. In the `train_step` of a model::

        blocks = [layer.trainable_variables for layer in self.layers]
        self.optimizer.minimize(lambda: self.compute_loss(x, y, self(x, training=True)), blocks)

    The loss has one entry per example (``reduction="none"``). `Model.fit` passes a tensor, which
    does for one block: all trainable variables.

    Formal guarantees:
      - Those of the `BlockCoordinateDpEvent` that `HiddenStateCallback` records, or that you
        declare. Within a run the blocks and their order are the same, or the step is refused.
      - Trusted: as of `CyclicDPKerasSGDOptimizer`.
      - Declared by you: all else that is trained or changes is public, no layer mixes the examples
        of a batch, the loss is of one batch in all calls of a step.

    Args:
        l2_norm_clip: Clip norm C of each block.
        noise_multiplier: Standard deviation z of the noise on a sum of gradients over C.
        num_microbatches: None, or the batch size: one example each.
        learning_rate: Step size eta, a constant number.
        l1: Weight of the lasso, >= 0.
        l2: Weight of the squared norm, >= 0: r is l2-strongly convex.
        nonnegative: True if the variables are kept >= 0.
        name: Name of the optimizer.
        **kwargs: Arguments of tf.keras.optimizers.legacy.SGD at their neutral values.

    Raises:
        TypeError, ValueError, UnsupportedRunError: As `CyclicDPKerasSGDOptimizer`; a tensor as the
            loss of several blocks.

    Source: Chen & Liu 2025 (arXiv 2407.08233), Algorithm 1, with a constant step size and the
        gradients clipped (not the step size, which would depend on the examples).
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        learning_rate: float = 0.01,
        l1: float = 0.0,
        l2: float = 0.0,
        nonnegative: bool = False,
        name: str = "BlockCoordinateKerasOptimizer",
        **kwargs: Any,
    ):
        if isinstance(learning_rate, _Schedule):
            raise UnsupportedRunError(
                f"Expected a constant learning_rate, got {learning_rate!r}: the bound on DP-MBCD "
                "is about one step size."
            )
        for weight, value in (("l1", l1), ("l2", l2)):
            check_scale(weight, validate.magnitude(weight, value))
        if not isinstance(nonnegative, bool):
            raise TypeError(f"Expected nonnegative to be True or False, got {nonnegative!r}.")
        prox = Regulariser(l1=l1, l2=l2, low=0.0 if nonnegative else -math.inf)
        super().__init__(
            (l2_norm_clip, noise_multiplier, num_microbatches),
            {"l1": prox.l1, "l2": prox.l2, "nonnegative": nonnegative},
            {"learning_rate": learning_rate, "name": name, **kwargs},
            prox=None if prox == Regulariser() else prox,
        )

    def _rule(self, optimizer: Any) -> BlockCoordinateUpdate:
        return BlockCoordinateUpdate(optimizer)

    def minimize(
        self, loss: Any, var_list: Any, grad_loss: Any = None, name: Any = None, tape: Any = None
    ) -> None:
        """Updates every block once.

        Args:
            loss: Function without arguments that returns a vector with the loss of each example,
                called once for each block. For one block also such a tensor, with its `tape`.
            var_list: List of blocks, which are lists of variables; or one list of variables.
            grad_loss: None.
            name: Name of the operation.
            tape: Tape of a loss that is a tensor.
        """
        blocks = blocks_of(var_list)
        if len(blocks) > 1 and (not callable(loss) or tape is not None):
            raise UnsupportedRunError(
                f"Expected a function as loss, got a tensor or a tape: the loss is evaluated anew "
                f"for each of the {len(blocks)} blocks. In Model.fit override train_step and call "
                "optimizer.minimize(lambda: ..., blocks) there (docs/papers/block_coordinate.md)."
            )
        steps = self._steps_of([v for block in blocks for v in block])
        check_blocks(blocks, steps.variables)
        steps.train_by(blocks)
        for block in blocks:
            pairs = self._compute_gradients(loss, list(block), grad_loss, tape)
            self.apply_gradients(pairs, name=name)
