"""Opacus' own engine with our accountant: what it made, its declared run and its steps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import attrs
import torch
from dp_accounting import NeighboringRelation
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
)
from hidden_state_accountants.events.batch_order import EPOCH_ORDERS
from hidden_state_accountants.runs.run import Step
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus import criteria
from hidden_state_adapters.opacus.frozen import refuse_packed_sequences
from hidden_state_adapters.opacus.gradients import check_clip_margin, rows_of
from hidden_state_adapters.opacus.noise import OwnGenerator, check_noise_source
from hidden_state_adapters.opacus.order import (
    description_of,
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

_OWN_COINS = Assumption.checked(
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


def on_trust(order: BatchOrder, loss: str = "the loss") -> Assumption:
    """Returns all that the accountant of a stock engine takes on the user's word."""
    return Assumption.declared(
        "Opacus' samplers and its clipped per-example gradients are right, and the loop is the one "
        "of its tutorials: every batch of the loader is one step, no pass over it is left before "
        f"its end, every gradient is that of {loss} of one record by itself, nothing but the "
        "private optimizer changes the parameters, and the initial model does not depend on the "
        f"records{_SECRETS.get(order, '')}"
    )


ON_TRUST = on_trust(BatchOrder.POISSON)
"""What undeclared steps rest on."""


def _compared(plan: BatchPlan, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of what a loader deals; raises if others were declared."""
    fields = plan.fields
    for name, given in declared.items():
        found = fields[name]
        is_secret = (given, found) == (BatchOrder.SHUFFLED_ONCE, BatchOrder.CYCLIC)
        # Opacus rounds the batch size of Poisson batches; a full batch is one of any fixed order.
        fits = name == "batch_size" and plan.order is BatchOrder.POISSON
        fits |= found is BatchOrder.FULL and given is not BatchOrder.POISSON
        if is_secret:
            fields[name] = given
        elif given not in (None, found) and not fits:
            words = [f'"{x.value}"' if isinstance(x, BatchOrder) else x for x in (found, given)]
            raise UnsupportedRunError(
                f"Expected {name} = {words[0]}, which is what the loader deals "
                f"({description_of(plan)}), got {words[1]} in declare_run. Leave {name} out, it is "
                "read from the loader that make_private returned; for other batches use another "
                "loader, or poisson_sampling= of make_private."
            )
    return fields


class StockRun(AccountedRun):
    """The declared run of a stock engine: the batches of its loader, and the record of its steps.

    Where no last-iterate theorem covers the optimizer (momentum, Adam, clipping per layer, ghost
    clipping), only composition applies; a log line says so.

    Raises:
        UnsupportedRunError: The loader cannot be read, deals other batches than were declared, or
            no bound covers them.
        TypeError, ValueError: An argument of `declare_run` has an impossible value.
    """

    recorder: RunRecorder

    def __init__(
        self,
        made: MadePrivate,
        relation: NeighboringRelation,
        *,
        criterion: Any,
        feature_norm: float | None,
        loss_geometry: LossGeometry | str | None,
        **declared: Any,
    ):
        self._loss = loss_geometry if isinstance(loss_geometry, LossGeometry) else None
        if self._loss is None and loss_geometry not in (None, "auto"):
            raise TypeError(
                f'Expected loss_geometry to be a LossGeometry, "auto" or None, got '
                f"{loss_geometry!r}."
            )
        if criterion is not None and self._loss is not None:
            raise ValueError(
                f"Expected a criterion or a LossGeometry, got {criterion!r} and {self._loss!r}: "
                "one of them says what the loss is. Leave one out."
            )
        if criterion is None and (loss_geometry == "auto" or feature_norm is not None):
            raise ValueError(
                'Expected a criterion with loss_geometry="auto" or feature_norm, got none: the '
                "constants are those of the loss that the loop computes. Pass criterion= and "
                "feature_norm=."
            )
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise UnsupportedRunError(
                "Expected neighboring_relation = REPLACE_SPECIAL or REPLACE_ONE, got "
                "ADD_OR_REMOVE_ONE: Opacus' own engine computes the rate and the divisor from the "
                "number of records, which is what adding or removing changes. Use REPLACE_SPECIAL, "
                "or HiddenStatePrivacyEngine with constants in Batches."
            )
        check_processes(made.data_loader, num_processes(made.optimizer))
        plan = read_loader(made.data_loader)
        self._batches = _compared(plan, declared)
        self._order = BatchOrder(self._batches["batch_order"])
        criteria.check_convexity(self._loss, made.inner, [made.inner.parameters()])
        loss = "the declared loss" if self._loss is not None else "the loss"
        if criterion is not None:
            self._loss = criteria.auto_loss_geometry(
                made.inner, criterion, feature_norm, made.optimizer.loss_reduction
            )
            loss = f"{criteria.as_module(criterion)} on the whole output"
            loss += f", with features of norm at most {feature_norm:g}"
        _, reason = self._update(made.optimizer)
        if reason and self._loss is not None:
            self._loss = None
            _logger.info(
                "No last-iterate theorem here covers this optimizer (%s), so epsilon is that of "
                "composition.",
                reason,
            )
        super().__init__(RunRecorder(**self._batches, loss=self._loss))
        self.recorder.check_relation(relation)
        self.assume(
            Assumption.checked(f"the loader deals {description_of(plan)}"),
            *made.coins,
            on_trust(self._order, loss),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state into a run without steps, where the stock loader can go on."""
        recorder = RunRecorder(**self._batches, loss=self._loss)
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
        self.assume(*declared_by(state))

    def observe(self, optimizer: DPOptimizer) -> None:
        """Records the step that `optimizer` is about to take, if it is one of the run."""
        step = self.recorder.num_steps + 1
        rows = count_rows(optimizer, step)
        if rows is None and self._order is not BatchOrder.POISSON:
            rows = int(self._batches["batch_size"])  # all of the batch, as is the user's word
        update, reason = self._update(optimizer)
        for param in [] if reason else optimizer.params:
            check_precision("parameters", param)
        if self._loss is not None:
            if reason:
                raise UnsupportedRunError(
                    f"step {step} changed the optimizer: {reason}. Keep one update rule during a "
                    "run; without what says something of the loss any rule is accounted."
                )
            check_clip_margin(float(optimizer.max_grad_norm), self._loss.lipschitz)
        noise, clip_norm = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        taken = Step(noise_multiplier=noise, clip_norm=clip_norm, rows=rows, **update)
        self.recorder.add_counted(taken, 1)

    def _update(self, optimizer: DPOptimizer) -> tuple[dict[str, Any], str]:
        """Returns rate and decay of plain SGD; or nothing, and why it is another update."""
        if type(optimizer) is not DPOptimizer:
            return {}, f"Expected DPOptimizer, got {type(optimizer).__name__}"
        try:
            return update_of(optimizer, float(self._batches["batch_size"])), ""
        except UnsupportedUpdateError as error:
            return {}, error.what


def check_processes(data_loader: Any, count: int) -> None:
    """Raises UnsupportedRunError for several processes whose batches together cannot be read.

    A step uses the batches of all processes at once. Opacus' Poisson sampler makes one Poisson
    batch of them; of other loaders a process sees its own batches only.
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
    """Returns the rows of the batch; None if ghost clipping or BatchMemoryManager hides them.

    Raises:
        UnsupportedRunError: The gradients of several batches were accumulated, or a parameter has
            one gradient for all records.
    """
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        return None
    params = {f"parameter {i}": param for i, param in enumerate(optimizer.params)}
    try:
        rows = rows_of(params, None)
    except UnsupportedRunError as error:
        raise UnsupportedRunError(f"step {step}: {error}") from None
    return None if optimizer._is_last_step_skipped else rows


@attrs.define(eq=False)
class MadePrivate:
    """The outcome of one `make_private` of a stock engine, and the run that records its steps.

    Of a step hook that was attached by hand nothing is known but the sampling rate.

    Attributes:
        sample_rate: Sampling rate as Opacus tells it: 1 / len(data_loader).
        is_calibrated: True if make_private_with_epsilon found the noise.
        run: The declared run, or None.
        num_steps: Number of recorded steps.
    """

    sample_rate: float
    data_loader: Any = None
    module: Any = None
    optimizer: Any = None
    is_calibrated: bool = False
    run: StockRun | None = None
    num_steps: int = 0
    _writes: int = attrs.field(init=False)

    @_writes.default
    def _count_writes(self) -> int:
        return sum(p._version for p in getattr(self.optimizer, "params", ()))

    @classmethod
    def by_caller(cls, accountant: Any, sample_rate: float) -> MadePrivate:
        """Reads off the variables of make_private, which tells its accountant the rate only."""
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
        """Takes noise and Poisson batches from generators of the run's own, but where the user gave
        one.

        Opacus takes both from torch's default generator, which every script seeds.

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
        sampler = getattr(self.data_loader, "batch_sampler", None)
        is_own = isinstance(getattr(sampler, "generator", None), OwnGenerator)
        return [_OWN_COINS] if is_own else []

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
    """Raises UnsupportedRunError for embeddings that write to their rows in a forward pass."""
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
    name, counts = type(optimizer).__name__, hasattr(optimizer, "_adjusted_noise_multiplier")
    if counts or getattr(optimizer.add_noise, "__func__", None) not in _KNOWN:
        raise UnsupportedRunError(
            "Expected a fixed clip norm and an optimizer of Opacus for one device or DPDDP, got "
            f"{'PrivacyEngineAdaptiveClipping' if counts else name}: some of its noise comes from "
            "torch's default generator, and whoever knows the seed of the program knows it. Use "
            "opacus.PrivacyEngine, which makes a DPOptimizer."
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
