"""Opacus' own engine with our accountant: what it made, its declared run and its steps."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import attrs
import torch
from dp_accounting import NeighboringRelation
from opacus.grad_sample import AbstractGradSampleHooks
from opacus.optimizers import (
    DistributedDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import (
    DistributedDPOptimizerFastGradientClipping,
)
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
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
from hidden_state_adapters.opacus import criteria
from hidden_state_adapters.opacus.frozen import refuse_packed_sequences
from hidden_state_adapters.opacus.gradients import rows_of
from hidden_state_adapters.opacus.noise import OwnGenerator, check_noise_source
from hidden_state_adapters.opacus.norms import ROUNDING, check_clip_margin, joint_norm
from hidden_state_adapters.opacus.order import (
    LoaderReading,
    drawn_rate,
    draws_from_shares,
    poisson_rate,
    read_loader,
)
from hidden_state_adapters.opacus.precision import check_precision
from hidden_state_adapters.opacus.processes import num_processes
from hidden_state_adapters.opacus.registry import AccountedRun, declared_by
from hidden_state_adapters.opacus.update_rules import UnsupportedUpdateError, update_of

_logger = logging.getLogger("hidden_state_accountants")
_KINDS = (
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
)
_KNOWN: set[Any] = {kind.add_noise for kind in _KINDS}
"""What adds noise from `optimizer.generator`."""

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
        order: Order of the batches.
        loss: Name of the loss that the loop computes of every record.
        radius: Radius of the ball around 0 on which the user projects, or None.
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


def coins_of(batch_sampler: Any) -> list[Assumption]:
    """Lists the generator of a sampler of Poisson batches, if it is ours."""
    is_own = isinstance(getattr(batch_sampler, "generator", None), OwnGenerator)
    return [OWN_COINS] if is_own else []


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
    """The declared run of a stock engine: the batches of its loader, and the record of its steps.

    If the optimizer is one that no last-iterate theorem covers (momentum, Adam, clipping per
    layer, ghost clipping), the run is recorded without a loss geometry, so that only composition
    applies; a log line says so.

    Args:
        declared: Arguments of `declare_run`.
        data_loader: Loader that make_private returned.
        module: Model that it returned.
        optimizer: Optimizer that it returned.
        relation: Neighbouring relation of the guarantee.

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
        criteria.check_convexity(self._loss, inner, [inner.parameters()])
        loss = "the declared loss" if self._loss is not None else "the loss"
        if declared.criterion is not None:
            self._loss = criteria.auto_loss_geometry(
                inner, declared.criterion, declared.feature_norm, optimizer.loss_reduction
            )
            loss = f"{criteria.as_module(declared.criterion)} on the whole output"
            loss += f", with features of norm at most {declared.feature_norm:g}"
        super().__init__(self._new_recorder())
        self.recorder.check_relation(relation)
        self.assume(
            Assumption.checked(f"the loader deals {reading.description}"),
            *coins_of(reading.sampler),
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
        self.recorder = recorder
        if is_composition:
            self._loss = self._radius = None
        self.assume(*declared_by(state))

    def observe(self, optimizer: DPOptimizer) -> None:
        """Records the step that `optimizer` is about to take, in its step hook.

        Raises:
            UnsupportedRunError: It is not one of the run.
        """
        step = self.recorder.num_steps + 1
        rows = count_rows(optimizer, step)
        if rows is None and self._order is not BatchOrder.POISSON:
            rows = int(self._batches["batch_size"])  # all of the batch, as is the user's word
        update, reason = self._update(optimizer)
        if not reason:
            self._check(optimizer, step)
        elif self._loss is not None or self._radius is not None:
            self._become_composition(reason)
        noise, clip_norm = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        taken = Step(noise_multiplier=noise, clip_norm=clip_norm, rows=rows, **update)
        self.recorder.add_counted(taken, 1)

    def _update(self, optimizer: DPOptimizer) -> tuple[dict[str, Any], str]:
        """Rate and decay of plain SGD; or nothing, and the reason why it is another update."""
        if type(optimizer) is not DPOptimizer:
            return {}, f"Expected DPOptimizer, got {type(optimizer).__name__}"
        try:
            return update_of(optimizer, float(self._batches["batch_size"])), ""
        except UnsupportedUpdateError as error:
            return {}, error.what

    def _check(self, optimizer: DPOptimizer, step: int) -> None:
        """Raises UnsupportedRunError if no bound on hidden iterates is about a step."""
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

    def _become_composition(self, reason: str) -> None:
        """Gives up what no theorem uses of another optimizer; before the first step only."""
        if self.recorder.num_steps:
            raise UnsupportedRunError(
                f"step {self.recorder.num_steps + 1} changed the optimizer: {reason}. Keep one "
                "update rule during a run."
            )
        self._loss = self._radius = None
        self.recorder = self._new_recorder()
        _logger.info(
            "No last-iterate theorem here covers this optimizer (%s), so epsilon is that of "
            "composition.",
            reason,
        )


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


def count_rows(optimizer: DPOptimizer, step: int) -> int | None:
    """The rows of the batch; None if ghost clipping or BatchMemoryManager hides them.

    Raises:
        UnsupportedRunError: The gradients of several batches were accumulated, or a parameter has
            one gradient for all records: clipped by itself, one record may turn it around.
    """
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        return None
    params = {f"parameter {i}": param for i, param in enumerate(optimizer.params)}
    try:
        rows = rows_of(params, None)
    except UnsupportedRunError as error:
        raise UnsupportedRunError(f"step {step}: {error}") from None
    return None if optimizer._is_last_step_skipped else rows


def _declared(recorder: RunRecorder) -> Any:
    return recorder.state_dict()["declared"]


@attrs.define(eq=False)
class MadePrivate:
    """The outcome of one `make_private` of a stock engine, and the run that records its steps.

    Attributes:
        sample_rate: Sampling rate as Opacus tells it: 1 / len(data_loader).
        data_loader: Loader, or None of a step hook that was attached by hand.
        module: Model, or None as above.
        optimizer: Optimizer, or None as above.
        is_calibrated: True if make_private_with_epsilon found the noise.
        run: The declared run, or None.
        num_steps: Number of recorded steps.
    """

    sample_rate: float
    data_loader: Any = None
    module: Any = None
    optimizer: DPOptimizer | None = None
    is_calibrated: bool = False
    run: StockRun | None = None
    num_steps: int = 0
    _writes: int = attrs.field(init=False)

    @_writes.default
    def _count_writes(self) -> int:
        return sum(p._version for p in getattr(self.optimizer, "params", ()))

    @classmethod
    def by_caller(cls, accountant: Any, sample_rate: float) -> MadePrivate:
        """Reads off what the engine with this accountant is making now.

        Opacus hands nothing but the sampling rate to its accountants, so everything else is read
        where make_private has it: in its own variables. Where they are not found (a hook that was
        attached by hand), there is nothing to declare.
        """
        frame = _frame_of("make_private", accountant, sys._getframe(1))
        if frame is None:
            return cls(sample_rate)
        made = frame.f_locals
        return cls(
            sample_rate,
            data_loader=made.get("data_loader"),
            module=made.get("module"),
            optimizer=made.get("optimizer"),
            is_calibrated=_frame_of("make_private_with_epsilon", accountant, frame) is not None,
        )

    def prepare(self) -> None:
        """Refuses noise that was found for other batches; noise and coins become the run's own.

        Opacus takes both from torch's default generator, which every script seeds: whoever knows
        the seed knows the noise, and which batches held a record. Generators that the user passed
        stay, and so do those of a sampler of several processes, which have to toss the same coins.

        Raises:
            UnsupportedRunError: The noise was found for other batches or cannot be drawn, empty
                batches are filled, or a layer lets a record do more than the clip says.
        """
        if self.is_calibrated and poisson_rate(self.data_loader) > 1:
            raise UnsupportedRunError(
                "Expected a Poisson loader (poisson_sampling=True) in make_private_with_epsilon of "
                f"a PrivacyEngine, got {type(self.data_loader).__name__} with other batches: "
                "Opacus finds the noise for Poisson batches, and with these epsilon would miss the "
                "target. Use make_private_with_epsilon of HiddenStatePrivacyEngine, or find the "
                "noise with hidden_state_accountants.calibrate_noise and call make_private."
            )
        if getattr(getattr(self.data_loader, "collate_fn", None), "rand_on_empty", False):
            raise UnsupportedRunError(
                "Expected rand_on_empty = False, got True: it puts a made-up record into an empty "
                "batch, so that one record more or less changes the sum by two clip norms. Leave "
                "it out: empty batches are steps like others."
            )
        if isinstance(self.inner, nn.Module):
            _check_layers(self.inner)
        optimizer = self.optimizer
        if optimizer is not None and optimizer.generator is None:
            check_noise_source(optimizer.params, None)
            optimizer.generator = OwnGenerator(optimizer.params[0].device)
        sampler: Any = getattr(self.data_loader, "batch_sampler", None)
        if type(sampler) is UniformWithReplacementSampler and sampler.generator is None:
            sampler.generator = OwnGenerator(torch.device("cpu"))

    @property
    def inner(self) -> Any:
        """The model itself, behind Opacus' wrapper or its hooks; None if it is not known."""
        return getattr(self.module, "_module", self.module)

    @property
    def coins(self) -> list[Assumption]:
        """Lists the generator of the sampler, if `prepare` put it in."""
        return coins_of(getattr(self.data_loader, "batch_sampler", None))

    def check_undeclared(self) -> None:
        """Raises UnsupportedRunError if a loader that is known does not deal Poisson batches."""
        if self.data_loader is None:
            return
        check_processes(self.data_loader, num_processes(self.optimizer))
        if poisson_rate(self.data_loader) > drawn_rate(self.sample_rate) * (1 + 1e-9):
            raise UnsupportedRunError(
                "Expected a Poisson loader that samples at a rate of 1 / len(data_loader) = "
                f"{self.sample_rate:g} for a run that was not declared, got a "
                f"{type(self.data_loader).__name__} with other batches (poisson_sampling=False?): "
                "the epsilon that stock accountants report is not one of this run. Call "
                "engine.accountant.declare_run() before the first step: it reads the loader, and "
                "without further arguments epsilon is that of composition."
            )

    def check_moved(self) -> None:
        """Raises UnsupportedRunError if no step was recorded, but the parameters were written."""
        if self._count_writes() != self._writes:
            raise UnsupportedRunError(
                "Expected a step of the optimizer that make_private returned, got none, but "
                "parameters that were written since: by another optimizer, by hand, or with "
                "another step hook (attach_step_hook has a single slot). Train with that "
                "optimizer; load public weights before make_private."
            )


def _check_layers(module: nn.Module) -> None:
    """Raises UnsupportedRunError for embeddings that write to their rows in a forward pass.

    Recurrent layers raise it from then on when they are called with packed sequences.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise UnsupportedRunError(
                f"Expected layers that leave their parameters alone, got {type(layer).__name__} "
                f"{name} with max_norm = {layer.max_norm:g}: it shortens the rows that a batch "
                "uses, without noise. Leave max_norm out; max_grad_norm bounds what a record does."
            )
    refuse_packed_sequences(module)


def check_noise(optimizer: DPOptimizer) -> None:
    """Raises UnsupportedRunError unless an optimizer draws all noise from its generator."""
    if getattr(optimizer.add_noise, "__func__", None) not in _KNOWN:
        raise UnsupportedRunError(
            f"Expected DPOptimizer or another optimizer of Opacus for one device or DPDDP, got "
            f"{type(optimizer).__name__}, which adds noise in a way of its own: it may come from "
            "torch's default generator, and whoever knows the seed of the program knows it. Train "
            "with an engine that makes a DPOptimizer."
        )
    if hasattr(optimizer, "_adjusted_noise_multiplier"):
        raise UnsupportedRunError(
            "Expected a fixed clip norm with ghost clipping, got PrivacyEngineAdaptiveClipping: it "
            "counts the clipped gradients with noise of torch's default generator, and whoever "
            "knows the seed of the program knows the count. Use opacus.PrivacyEngine."
        )
    check_noise_source(optimizer.params, None)


def _frame_of(name: str, accountant: Any, frame: FrameType | None) -> FrameType | None:
    """The running call of a method of the `opacus.PrivacyEngine` that has the accountant."""
    while frame is not None:
        is_of_opacus = frame.f_globals.get("__name__") == "opacus.privacy_engine"
        if is_of_opacus and frame.f_code.co_name == name:
            engine = frame.f_locals.get("self")
            return frame if getattr(engine, "accountant", None) is accountant else None
        frame = frame.f_back
    return None
