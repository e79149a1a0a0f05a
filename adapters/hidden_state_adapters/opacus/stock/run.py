"""A declared run of Opacus' own engine: what its loader deals, and the record of its steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import attrs
from dp_accounting import NeighboringRelation
from opacus.grad_sample import AbstractGradSampleHooks
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from torch import nn

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    LossGeometry,
    RunRecorder,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.events.batch_order import EPOCH_ORDERS, parse_batch_order
from hidden_state_accountants.runs.run import Step
from hidden_state_adapters.opacus import geometry
from hidden_state_adapters.opacus.criteria import as_module
from hidden_state_adapters.opacus.data.reading import LoaderReading, draws_from_shares, read_loader
from hidden_state_adapters.opacus.gradients.bounds import check_clip_margin
from hidden_state_adapters.opacus.gradients.noise import OwnGenerator
from hidden_state_adapters.opacus.gradients.norms import ROUNDING, joint_norm
from hidden_state_adapters.opacus.gradients.precision import check_precision
from hidden_state_adapters.opacus.run.accounted import AccountedRun, declared_by
from hidden_state_adapters.opacus.run.group import num_processes
from hidden_state_adapters.opacus.run.settings import UnsupportedUpdateError, sgd_options

_logger = logging.getLogger("hidden_state_accountants")

_USE_ENGINE = "Use hidden_state_adapters.opacus.HiddenStatePrivacyEngine, which deals the batches."
OWN_COINS = Assumption.checked(
    "Poisson batches drawn by a generator of the run's own, whose state the operating system drew "
    "and no seed of the program reaches"
)
_SECRETS = {
    BatchOrder.SHUFFLED_ONCE: "; the order of the records was drawn uniformly, and nobody ever "
    "learns it or its seed",
    BatchOrder.RESHUFFLED: "; nobody ever learns the orders of the batches, or the seed of their "
    "generator",
    BatchOrder.POISSON: "; nobody ever learns which records were drawn (or the seed of a generator "
    "that you passed), or the sizes of the batches",
}
# What an order that was read may be called besides: other names of the same batches, and one
# order that differs from a fixed one only in that nobody knows it.
_ALSO = {
    BatchOrder.FULL: set(BatchOrder) - {BatchOrder.POISSON},
    BatchOrder.CYCLIC: {BatchOrder.SHUFFLED_ONCE},
}


def on_trust(order: BatchOrder, loss: str = "the loss", radius: float | None = None) -> Assumption:
    """All that the accountant of a stock engine takes on the user's word.

    Args:
        order: Of the batches.
        loss: What the loop computes of every record.
        radius: Of the ball around 0 on which the user projects, or None.
    """
    outside = ""
    if radius is not None:
        outside = f", but for your projection on the ball of radius {radius:g} after every step"
    return Assumption.declared(
        "Opacus' samplers and its clipped per-example gradients are right, and the loop is the one "
        "of its tutorials: every batch of the loader is one step, no pass over it is left before "
        f"its end, every gradient is that of {loss} of one record by itself, nothing but the "
        f"private optimizer changes the parameters{outside}, and the initial model does not depend "
        f"on the records{_SECRETS.get(order, '')}"
    )


ON_TRUST = on_trust(BatchOrder.POISSON)
"""What undeclared steps rest on."""


def has_own_coins(batch_sampler: Any) -> bool:
    """Whether a sampler of Poisson batches draws with a generator of ours."""
    return isinstance(getattr(batch_sampler, "generator", None), OwnGenerator)


def _loss_geometry(value: Any) -> LossGeometry | str | None:
    if value is None or value == "auto" or isinstance(value, LossGeometry):
        return value  # type: ignore[no-any-return]
    raise TypeError(f'Expected loss_geometry to be a LossGeometry, "auto" or None, got {value!r}.')


@attrs.frozen(kw_only=True, eq=False)
class StockDeclaration:
    """The arguments of `declare_run`; its docstring explains every one.

    The numbers and the order are compared with what is read, and decide nothing.
    """

    criterion: Any = None
    feature_norm: float | None = None
    loss_geometry: LossGeometry | str | None = attrs.field(default=None, converter=_loss_geometry)
    projection_radius: float | None = None
    batch_order: BatchOrder | None = attrs.field(
        default=None, converter=attrs.converters.optional(parse_batch_order)
    )
    dataset_size: int | None = None
    batch_size: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.projection_radius is not None:
            validate.real("projection_radius", self.projection_radius, above=0)
        if self.criterion is not None and isinstance(self.loss_geometry, LossGeometry):
            raise ValueError(
                f"Expected a criterion or a LossGeometry, got {self.criterion!r} and "
                f"{self.loss_geometry!r}: one of them says what the loss is. Leave one out."
            )
        needs_criterion = self.loss_geometry == "auto" or self.feature_norm is not None
        if self.criterion is None and needs_criterion:
            raise ValueError(
                'Expected a criterion with loss_geometry="auto" or feature_norm, got none: the '
                "constants are those of the loss that the loop computes. Pass criterion= and "
                "feature_norm=."
            )

    def compared_with(self, reading: LoaderReading) -> dict[str, Any]:
        """The arguments of the `RunRecorder` of what the loader deals.

        Raises:
            UnsupportedRunError: Something else was declared.
        """
        given, read = self.batch_order, reading.order
        self._compare("batch_order", {read, *_ALSO.get(read, ())}, reading, read)
        n, b = reading.dataset_size, reading.batch_size
        self._compare("dataset_size", {n}, reading, n)
        sizes = {b}
        if reading.sampling_rate is not None and self.batch_size is not None:
            # Opacus rounds: any batch size of a loader with as many batches.
            counts = (-(-n // self.batch_size), n // self.batch_size)
            sizes |= {self.batch_size} if reading.num_batches in counts else set()
        self._compare("batch_size", sizes, reading, b)
        is_kept_secret = given is BatchOrder.SHUFFLED_ONCE and read is BatchOrder.CYCLIC
        return {**reading.fields, "batch_order": given if is_kept_secret else read}

    def _compare(self, name: str, known: set[Any], reading: LoaderReading, read: Any) -> None:
        given = getattr(self, name)
        if given is None or given in known:
            return
        read, given = (f'"{x.value}"' if isinstance(x, BatchOrder) else x for x in (read, given))
        raise UnsupportedRunError(
            f"Expected {name} = {read}, which is what the loader deals ({reading.description}), "
            f"got {given} in declare_run. Leave {name} out, it is read from the loader that "
            "make_private returned; for other batches use another loader, or poisson_sampling= of "
            "make_private."
        )


class StockRun(AccountedRun):
    """What the loader of a stock engine deals, and the record of its steps.

    If the optimizer is one that no last-iterate theorem covers (momentum, Adam, clipping per
    layer, ghost clipping), the run is recorded without a loss geometry, so that only composition
    applies; a log line says so.

    Args:
        declared: What cannot be read, and what is compared with what is read.
        data_loader: What make_private returned.
        module: Likewise.
        optimizer: Likewise.
        relation: Of the guarantee.

    Raises:
        UnsupportedRunError: The loader cannot be read, deals other batches than were declared, or
            no bound covers them.
        TypeError, ValueError: As `LastIterateDpEvent`.
    """

    recorder: RunRecorder

    def __init__(
        self,
        declared: StockDeclaration,
        *,
        data_loader: Any,
        module: Any,
        optimizer: DPOptimizer,
        relation: NeighboringRelation,
    ):
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise UnsupportedRunError(
                "Expected neighboring_relation = REPLACE_SPECIAL or REPLACE_ONE, got "
                "ADD_OR_REMOVE_ONE: Opacus' own engine computes the rate and the divisor from the "
                "number of records, which is what adding or removing changes. Use REPLACE_SPECIAL, "
                "or HiddenStatePrivacyEngine with constants in Batches."
            )
        check_processes(data_loader, num_processes(optimizer))
        reading = read_loader(data_loader)
        self._batches = declared.compared_with(reading)
        self._order = BatchOrder(self._batches["batch_order"])
        self._radius = declared.projection_radius
        given = declared.loss_geometry
        self._loss = given if isinstance(given, LossGeometry) else None
        inner = module._module if isinstance(module, AbstractGradSampleHooks) else module
        geometry.check_convexity(self._loss, inner, [inner.parameters()])
        loss = "the declared loss" if self._loss is not None else "the loss"
        if declared.criterion is not None:
            self._loss = _derive_loss(declared, inner, optimizer)
            loss = f"{as_module(declared.criterion)} on the whole output"
            loss += f", with features of norm at most {declared.feature_norm:g}"
        super().__init__(self._new_recorder())
        self.recorder.check_relation(relation)
        self._is_composition: bool | None = None
        self.assume(
            Assumption.checked(f"the loader deals {reading.description}"),
            *([OWN_COINS] if has_own_coins(reading.sampler) else []),
            on_trust(self._order, loss, self._radius),
        )

    def _new_recorder(self) -> RunRecorder:
        """A record without steps."""
        diameter = math.inf if self._radius is None else 2 * self._radius
        return RunRecorder(**self._batches, loss=self._loss, domain_diameter=diameter)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `AccountedRun.load_state_dict`; also where the stock loader cannot go on."""
        recorder, composed = self._new_recorder(), RunRecorder(**self._batches)
        is_composition = _declared(recorder) != state.get("declared") == _declared(composed)
        recorder = composed if is_composition else recorder
        recorder.load_state_dict(state)
        steps = recorder.num_steps
        in_epoch = -(-int(self._batches["dataset_size"]) // int(self._batches["batch_size"]))
        is_fixed = self._order is BatchOrder.SHUFFLED_ONCE and steps
        if is_fixed or (self._order in EPOCH_ORDERS and steps % in_epoch):
            expected = "no steps to restore" if is_fixed else "a state at the end of an epoch"
            raise ValueError(
                f"Expected {expected} for {self._order.value} batches, got {steps} steps, "
                f"{steps % in_epoch} of them in the last epoch: the stock loader would start again "
                "at batch 0, or in another order. Use HiddenStatePrivacyEngine, whose loader goes "
                "on where it was, and whose checkpoints can hold the order."
            )
        self.recorder, self._is_composition = recorder, is_composition or None
        self.assume(*declared_by(state))

    def observe(self, optimizer: DPOptimizer) -> None:
        """Records the step that `optimizer` is about to take, in its step hook.

        Raises:
            UnsupportedRunError: It is not one of the run.
        """
        step = self.recorder.num_steps + 1
        rows = _count_rows(optimizer, step)
        if rows is None and self._order is not BatchOrder.POISSON:
            rows = int(self._batches["batch_size"])  # all of the batch, as is the user's word
        settings = self._settings(optimizer, step)
        noise = float(optimizer.noise_multiplier)
        self.recorder.add_counted(Step(noise_multiplier=noise, rows=rows, **settings), 1)

    def _settings(self, optimizer: DPOptimizer, step: int) -> dict[str, Any]:
        reason = _why_composition(optimizer)
        if self._is_composition is None:
            self._is_composition = self._becomes_composition(reason)
        if self._is_composition:
            # The update rule is post-processing; any positive learning rate stands for it.
            return {"clip_norm": 1.0, "learning_rate": 1.0, "weight_decay": 0.0}
        if reason:
            raise UnsupportedRunError(
                f"step {step} changed the optimizer: {reason}. Keep one update rule during a run."
            )
        for param in optimizer.params:
            check_precision("parameters", param)
        if self._loss is not None:
            check_clip_margin(float(optimizer.max_grad_norm), self._loss.lipschitz)
        norm = 0.0 if self._radius is None else float(joint_norm(optimizer.params))
        if self._radius is not None and not norm <= self._radius * (1 + ROUNDING):
            raise UnsupportedRunError(
                f"step {step} starts at norm {norm:.8g}, outside the ball of radius "
                f"{self._radius:.8g}. Project all parameters together after every step. "
                f"{_USE_ENGINE}"
            )
        options = sgd_options(optimizer.original_optimizer)
        # Events divide by batch_size, Opacus by expected_batch_size or not at all.
        is_mean = optimizer.loss_reduction == "mean"
        divisor = float(optimizer.expected_batch_size) if is_mean else 1.0
        scale = float(self._batches["batch_size"]) / divisor
        return {
            "clip_norm": float(optimizer.max_grad_norm),
            "learning_rate": options["lr"] * scale,
            "weight_decay": options["weight_decay"] / scale,
        }

    def _becomes_composition(self, reason: str) -> bool:
        """Decides at the first step seen here, which may follow restored ones."""
        has_steps = self.recorder.num_steps > 0
        if not reason or (has_steps and self._loss is not None):
            return False
        if not has_steps:
            self.recorder = RunRecorder(**self._batches)
        _logger.info(
            "No last-iterate theorem here covers this optimizer (%s), so epsilon is that of "
            "composition.",
            reason,
        )
        return True


def check_processes(data_loader: Any, count: int) -> None:
    """Refuses several processes whose batches together cannot be read.

    The processes add up their sums, so a step uses the batches of all of them at once. Opacus'
    Poisson sampler for several processes makes one Poisson batch of them, since every process
    draws from a share of the records. Of other loaders a process sees its own batches only: the
    participations of a record in those of the others go unseen.

    Raises:
        UnsupportedRunError: There are several processes with another loader.
    """
    if count == 1 or draws_from_shares(data_loader):
        return
    raise UnsupportedRunError(
        f"Expected one process, got {count} with {type(data_loader).__name__} loaders of their "
        "own: a step uses the batches of all processes, and the size and order of a batch across "
        "them cannot be read. Train in a single process, or with Poisson batches (DPDDP and "
        "poisson_sampling=True), which are accounted by composition."
    )


def _derive_loss(
    declared: StockDeclaration, module: nn.Module, optimizer: DPOptimizer
) -> LossGeometry | None:
    """The constants of the criterion at the linear head; None where no theorem needs them."""
    loss = geometry.auto_loss_geometry(
        module, declared.criterion, declared.feature_norm, optimizer.loss_reduction
    )
    return None if _why_composition(optimizer) else loss


def _why_composition(optimizer: DPOptimizer) -> str:
    """Why no last-iterate theorem covers the update of an optimizer, or ""."""
    if type(optimizer) is not DPOptimizer:
        return f"Expected DPOptimizer, got {type(optimizer).__name__}"
    try:
        sgd_options(optimizer.original_optimizer)
    except UnsupportedUpdateError as error:
        return error.what
    return ""


def _count_rows(optimizer: DPOptimizer, step: int) -> int | None:
    """The rows of the batch; None if ghost clipping or BatchMemoryManager hides them.

    Raises:
        UnsupportedRunError: The gradients of several batches were accumulated.
    """
    if isinstance(optimizer, DPOptimizerFastGradientClipping) or optimizer._is_last_step_skipped:
        return None
    if optimizer.accumulated_iterations > 1:
        raise UnsupportedRunError(
            f"step {step}: got the gradients of {optimizer.accumulated_iterations} batches, "
            "expected 1: a record may be in several of the batches, and counts once for each. Call "
            "optimizer.zero_grad() after every step and backward() once per batch. For batches "
            "that do not fit into memory raise the batch_size of the DataLoader and let "
            "opacus.utils.batch_memory_manager.BatchMemoryManager split them."
        )
    return max(map(len, optimizer.grad_samples))


def _declared(recorder: RunRecorder) -> Any:
    return recorder.state_dict()["declared"]
