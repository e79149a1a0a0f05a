"""Opacus' own engine with our accountant: what its make_private made, and the steps that follow."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from dp_accounting import NeighboringRelation
from opacus.optimizers import (
    DistributedDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
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
from hidden_state_accountants.runs.run import Step
from hidden_state_adapters.opacus import criteria
from hidden_state_adapters.opacus.frozen import refuse_packed_sequences
from hidden_state_adapters.opacus.gradients import check_clip_margin, read, rows_of
from hidden_state_adapters.opacus.noise import OwnGenerator
from hidden_state_adapters.opacus.order import (
    description_of,
    drawn_rate,
    draws_from_shares,
    poisson_rate,
    read_loader,
)
from hidden_state_adapters.opacus.precision import check_precision
from hidden_state_adapters.opacus.processes import num_processes
from hidden_state_adapters.opacus.registry import AccountedRun
from hidden_state_adapters.opacus.update_rules import UnsupportedUpdateError, update_of

_logger = logging.getLogger("hidden_state_accountants")
_ENGINE = "opacus.privacy_engine"
_KINDS = (  # with one fixed clip, and noise from optimizer.generator
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    SimpleDistributedPerLayerOptimizer,
)

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


@attrs.define(eq=False)
class StockRun:
    """The outcome of one `make_private` of a stock engine, which observes the steps.

    Attributes:
        sample_rate: Sampling rate as Opacus tells it: 1 / len(data_loader).
        inner: Model itself, behind Opacus' wrapper or its hooks.
        accounted: Record of the steps that `declare` made, or None.
        num_steps: Number of observed steps.
    """

    sample_rate: float
    data_loader: Any
    inner: nn.Module
    optimizer: DPOptimizer
    accounted: AccountedRun | None = None
    num_steps: int = 0
    _loss: LossGeometry | None = None
    _fields: Mapping[str, Any] = {}
    _writes: int = attrs.field(init=False)

    @_writes.default
    def _count_writes(self) -> int:
        return sum(param._version for param in self.optimizer.params)

    @classmethod
    def by_caller(cls, accountant: Any, sample_rate: float) -> StockRun | None:
        """Reads off the variables of make_private, which tells its accountant the rate only.

        Returns:
            The run; None if something else asks for the hook.
        """
        frame: Any = sys._getframe(1)
        calls = {}
        while frame is not None:
            names = frame.f_locals if frame.f_globals.get("__name__") == _ENGINE else {}
            if getattr(names.get("self"), "accountant", None) is accountant:
                calls[frame.f_code.co_name] = names
            frame = frame.f_back
        if "make_private" not in calls:
            return None
        made = calls["make_private"]
        inner = getattr(made["module"], "_module", made["module"])
        run = cls(sample_rate, made["data_loader"], inner, made["optimizer"])
        run._start(is_calibrated="make_private_with_epsilon" in calls)
        return run

    def _start(self, *, is_calibrated: bool) -> None:
        """Gives noise and Poisson batches generators of their own; every script seeds torch's."""
        loader = self.data_loader
        if is_calibrated and poisson_rate(loader) > 1:
            raise UnsupportedRunError(
                "Expected a Poisson loader (poisson_sampling=True) in make_private_with_epsilon of "
                f"a PrivacyEngine, got {type(loader).__name__} with other batches: Opacus finds "
                "noise for Poisson batches only. Use HiddenStatePrivacyEngine."
            )
        if getattr(loader.collate_fn, "rand_on_empty", False):
            raise UnsupportedRunError(
                "Expected rand_on_empty = False, got True: a made-up record in an empty batch "
                "moves the sum by two clip norms. Leave it out: empty batches are steps."
            )
        _check_layers(self.inner)
        if self.optimizer.generator is None:
            self.optimizer.generator = OwnGenerator(self.optimizer.params[0].device)
        sampler: Any = getattr(loader, "batch_sampler", None)
        if type(sampler) is UniformWithReplacementSampler and sampler.generator is None:
            sampler.generator = OwnGenerator(torch.device("cpu"))

    def declare(
        self,
        relation: NeighboringRelation,
        criterion: Any,
        feature_norm: float | None,
        loss_geometry: LossGeometry | str | None,
        **declared: Any,
    ) -> AccountedRun:
        """Reads loader and optimizer, and returns the record of the steps."""
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise UnsupportedRunError(
                "Expected neighboring_relation = REPLACE_SPECIAL or REPLACE_ONE, got "
                "ADD_OR_REMOVE_ONE: Opacus computes the rate and the divisor from the number of "
                "records. Use HiddenStatePrivacyEngine with constants in Batches."
            )
        self._check_processes()
        plan = read_loader(self.data_loader)
        fields, words = plan.fields, description_of(plan)
        for name, given in declared.items():
            # Opacus rounds the size of Poisson batches.
            if name != "batch_size" or plan.order is not BatchOrder.POISSON:
                fields[name] = _compared(name, given, fields[name], words)
        loss, text = loss_geometry, "the declared loss" if loss_geometry else "the loss"
        if criterion is not None and loss in (None, "auto"):
            reduction = self.optimizer.loss_reduction
            loss = criteria.auto_loss_geometry(self.inner, criterion, feature_norm, reduction)
            text = f"{criteria.as_module(criterion)} on the whole output, with features of norm "
            text += f"at most {feature_norm:g}"
        if not isinstance(loss, LossGeometry | None):
            raise TypeError(
                f'Expected loss_geometry to be a LossGeometry, "auto" with a criterion or None, '
                f"got {loss!r}."
            )
        criteria.check_convexity(loss, self.inner, [self.inner.parameters()])
        _, reason = _update(self.optimizer, fields["batch_size"])
        if reason and loss is not None:
            loss = None
            _logger.info(
                "No last-iterate theorem here covers this optimizer (%s), so epsilon is that of "
                "composition.",
                reason,
            )
        run = AccountedRun(RunRecorder(**fields, loss=loss))
        run.recorder.check_relation(relation)
        trusted = on_trust(BatchOrder(fields["batch_order"]), text)
        run.assume(Assumption.checked(f"the loader deals {words}"), trusted)
        self.accounted, self._loss, self._fields = run, loss, fields
        return run

    def check_undeclared(self) -> None:
        """Raises UnsupportedRunError if a loader that is known does not deal Poisson batches."""
        self._check_processes()
        if poisson_rate(self.data_loader) > drawn_rate(self.sample_rate) * (1 + 1e-9):
            raise UnsupportedRunError(
                "Expected a Poisson loader that samples at a rate of 1 / len(data_loader) = "
                f"{self.sample_rate:g} for a run that was not declared, got a "
                f"{type(self.data_loader).__name__} with other batches. Call "
                "engine.accountant.declare_run() before the first step: it reads the loader."
            )

    def check_moved(self) -> None:
        """Raises UnsupportedRunError if no step was observed, but the parameters were written."""
        if not self.num_steps and self._count_writes() != self._writes:
            raise UnsupportedRunError(
                "Expected a step of the optimizer that make_private returned, got none, but "
                "parameters that were written since: by another optimizer, by hand, or with "
                "another step hook (there is a single slot). Train with that optimizer."
            )

    def observe(self, step: int) -> None:
        """Records a step; raises UnsupportedRunError if it is none of the run."""
        rows = rows_of_step(self.optimizer, step)
        if self.accounted is not None:
            self.accounted.recorder.add_counted(self._step(step, rows), 1)
        self.num_steps += 1

    def _step(self, step: int, rows: int | None) -> Step:
        """Returns the record of a step of a declared run."""
        optimizer = self.optimizer
        size = int(self._fields["batch_size"])
        if rows is None and BatchOrder(self._fields["batch_order"]) is not BatchOrder.POISSON:
            rows = size  # all of the batch, as is the user's word
        update, reason = _update(optimizer, size)
        noise, clip_norm = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        for param in [] if reason else optimizer.params:
            check_precision("parameters", param)
        if self._loss is not None:
            if reason:
                raise UnsupportedRunError(
                    f"step {step} changed the optimizer: {reason}. Keep one update rule during a "
                    "run; without what says something of the loss any rule is accounted."
                )
            check_clip_margin(clip_norm, self._loss.lipschitz)
        return Step(noise_multiplier=noise, clip_norm=clip_norm, rows=rows, **update)

    @property
    def coins(self) -> list[Assumption]:
        """Assumption about the generator of the sampler, if `start` put it in."""
        sampler = getattr(self.data_loader, "batch_sampler", None)
        is_own = isinstance(getattr(sampler, "generator", None), OwnGenerator)
        return [_OWN_COINS] if is_own else []

    def _check_processes(self) -> None:
        """Raises UnsupportedRunError for processes whose batches do not make one Poisson batch."""
        count = num_processes(self.optimizer)
        if count > 1 and not draws_from_shares(self.data_loader):
            raise UnsupportedRunError(
                f"Expected one process, got {count} with {type(self.data_loader).__name__} loaders "
                "of their own: the batches across them cannot be read. Use Poisson batches (DPDDP "
                "and poisson_sampling=True)."
            )


def _compared(name: str, given: Any, found: Any, words: str) -> Any:
    """Returns a field of the loader; raises UnsupportedRunError for another declared one."""
    if (given, found) == (BatchOrder.SHUFFLED_ONCE, BatchOrder.CYCLIC):
        return given
    # A full batch is one of any fixed order.
    if given in (None, found) or (found is BatchOrder.FULL and given is not BatchOrder.POISSON):
        return found
    shown = [f'"{x.value}"' if isinstance(x, BatchOrder) else x for x in (found, given)]
    raise UnsupportedRunError(
        f"Expected {name} = {shown[0]}, which is what the loader deals ({words}), got {shown[1]} "
        f"in declare_run. Leave {name} out: it is read from the loader."
    )


def _update(optimizer: DPOptimizer, batch_size: float) -> tuple[dict[str, Any], str]:
    """Returns rate and decay of plain SGD; or nothing, and why it is another update."""
    if type(optimizer) is not DPOptimizer:
        return {}, f"Expected DPOptimizer, got {type(optimizer).__name__}"
    try:
        return update_of(optimizer, float(batch_size)), ""
    except UnsupportedUpdateError as error:
        return {}, error.what


def _check_layers(module: nn.Module) -> None:
    """Raises UnsupportedRunError for embeddings that write to their rows in a forward pass."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise UnsupportedRunError(
                f"Expected layers that leave their parameters alone, got {type(layer).__name__} "
                f"{name} with max_norm = {layer.max_norm:g}: it shortens the rows that a batch "
                "uses, without noise. Leave max_norm out."
            )
    refuse_packed_sequences(module)


def rows_of_step(optimizer: DPOptimizer, step: int) -> int | None:
    """Returns the rows of the batch of a step, or None where Opacus hides them.

    Raises:
        UnsupportedRunError: It is not one step of Opacus on one batch.
    """
    _check_kind(optimizer, step)
    _check_finite(optimizer, step)
    return _count_rows(optimizer, step)


def _check_kind(optimizer: DPOptimizer, step: int) -> None:
    """Raises UnsupportedRunError unless clip norm and noise are what the accountant reads."""
    is_adaptive = hasattr(optimizer, "_adjusted_noise_multiplier")  # PrivacyEngineAdaptiveClipping
    if is_adaptive or type(optimizer) not in _KINDS:
        raise UnsupportedRunError(
            f"step {step}: expected a DPOptimizer with a fixed clip norm, for one device or DPDDP, "
            f"got {type(optimizer).__name__}: some of its noise (of the counts of adaptive "
            "clipping) is not paid for, or comes from torch's default generator. Use "
            'clipping="flat" or "per_layer".'
        )


def _check_finite(optimizer: DPOptimizer, step: int) -> None:
    """Raises UnsupportedRunError if the noisy gradients are not finite."""
    gradients = [param.grad for param in optimizer.params if param.grad is not None]
    sums = [gradient.sum(dtype=torch.float64) for gradient in gradients]  # of fewer passes
    if not all(map(math.isfinite, read(sums))):
        raise UnsupportedRunError(
            f"step {step} has a gradient that is not finite, which no clip bounds and no noise "
            "hides. Look for a division by 0, or scale the loss down."
        )


def _count_rows(optimizer: DPOptimizer, step: int) -> int | None:
    """Returns the rows of the batch; None if ghost clipping or BatchMemoryManager hides them."""
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        return None
    params = {f"parameter {i}": param for i, param in enumerate(optimizer.params)}
    try:
        rows = rows_of(params, None)
    except UnsupportedRunError as error:
        raise UnsupportedRunError(f"step {step}: {error}") from None
    return None if optimizer._is_last_step_skipped else rows
