"""A run of Opacus' own engine, as far as its step hook and its loader show it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from dp_accounting import NeighboringRelation
from opacus.optimizers import DPOptimizer

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    RunRecorder,
    UnsupportedRunError,
)
from hidden_state_adapters.opacus.data.reading import read_loader
from hidden_state_adapters.opacus.gradients.norms import joint_norm
from hidden_state_adapters.opacus.gradients.sums import gradient_norms
from hidden_state_adapters.opacus.guards.base import Piece
from hidden_state_adapters.opacus.guards.gradients import GradientGuard, check_clip_margin
from hidden_state_adapters.opacus.guards.precision import check_precision
from hidden_state_adapters.opacus.guards.projection import check_inside
from hidden_state_adapters.opacus.guards.settings import sgd_options
from hidden_state_adapters.opacus.run.processes import check_processes, num_processes
from hidden_state_adapters.opacus.stock.account import StockAccount
from hidden_state_adapters.opacus.stock.assumptions import unseen
from hidden_state_adapters.opacus.stock.batches import FollowedBatches
from hidden_state_adapters.opacus.stock.checks import (
    USE_ENGINE,
    check_finite,
    count_rows,
    hides_rows,
    is_in_pieces,
    why_composition,
)
from hidden_state_adapters.opacus.stock.declared import StockDeclaration
from hidden_state_adapters.opacus.stock.loss import WatchedLoss

_logger = logging.getLogger("hidden_state_accountants")


class StockRun:
    """Records from Opacus' step hook; the batches are read off the loader, and followed.

    If the optimizer is one that no last-iterate theorem covers (momentum, Adam, clipping per
    layer), the run is recorded without a loss geometry, so that only composition applies; a log
    line says so. Opacus' ghost clipping hides the rows of a batch: it needs Poisson batches. What
    reaches a gradient past the hooks of the layers is not clipped there.

    Args:
        declared: What cannot be read, and what is compared with what is read.

    Attributes:
        has_begun: Whether a step was taken here.
    """

    def __init__(self, declared: StockDeclaration):
        self._declared = declared
        self._account: StockAccount | None = None
        self._record: RunRecorder | None = None
        self._batches: FollowedBatches | None = None
        self._watched_loss: WatchedLoss | None = None
        self._batch_assumptions: tuple[Assumption, ...] = ()
        self._is_composition: bool | None = None
        self._is_ghost = self.has_begun = False
        if declared.batches is not None:  # a state can be restored into it at once
            radius = declared.projection_radius
            self._account = StockAccount(declared.batches, declared.given_loss, radius)
            self._record = self._account.recorder()

    @property
    def is_known(self) -> bool:
        """Whether the batches are known, so that there is a record."""
        return self._record is not None

    @property
    def has_dealt(self) -> bool:
        """Whether the loader dealt a batch."""
        return self._batches is not None and self._batches.has_dealt

    @property
    def recorder(self) -> RunRecorder:
        """The record of the steps, once the batches are known."""
        assert self._record is not None
        return self._record

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What was read and is checked, and what the accountant takes on the user's word."""
        own = () if self._watched_loss is None else self._watched_loss.assumptions
        radius = self._declared.projection_radius
        return (*self._batch_assumptions, *unseen(radius=radius, is_ghost=self._is_ghost), *own)

    # The loader

    def start(
        self,
        relation: NeighboringRelation,
        *,
        data_loader: Any,
        module: Any,
        optimizer: DPOptimizer | None,
    ) -> None:
        """Reads the loader, and follows its batches from now on; nothing is changed if it raises.

        Args:
            relation: Of the guarantee.
            data_loader: What make_private returned; None if that is not known.
            module: Likewise.
            optimizer: Likewise.

        Raises:
            UnsupportedRunError: The loader cannot be read, deals other batches than were declared,
                or no bound covers them.
            TypeError, ValueError: As `LastIterateDpEvent`; or steps that were restored before are
                those of another run.
        """
        loader = self._the_loader(data_loader)
        check_processes(loader, num_processes(optimizer))
        reading = read_loader(loader)
        batches = self._declared.compared_with(reading)
        if reading.why_not():
            raise UnsupportedRunError(reading.why_not())
        loss = self._derive_loss(module, optimizer)
        geometry = self._declared.given_loss if loss is None else loss.geometry
        account = StockAccount(batches, geometry, self._declared.projection_radius)
        record = account.recorder()
        record.check_relation(relation)
        is_composition = None
        if self._record is not None and self._record.num_steps:
            record, is_composition = account.restored(self._record.state_dict())
        self.close()
        self._account, self._record, self._is_composition = account, record, is_composition
        self._watched_loss = loss
        if loss is not None:
            loss.watch()
        self._batches = FollowedBatches(loader, reading)
        self._batch_assumptions = self._batches.assumptions(account.order, relation)
        self._batches.resume(record.num_steps)

    def _the_loader(self, found: Any) -> Any:
        given = self._declared.data_loader
        if found is None and given is None:
            raise UnsupportedRunError(
                "Expected a loader to read, got none: the steps do not come from make_private of "
                "an opacus.PrivacyEngine. Pass data_loader= to declare_run (and module= with a "
                f"criterion), the objects that the loop uses. {USE_ENGINE}"
            )
        if found is not None and given is not None and given is not found:
            raise UnsupportedRunError(
                "Expected data_loader to be the loader that make_private returned, got another "
                "one, whose batches are not those of the run. Leave it out, and train on the "
                "loader that make_private returned."
            )
        return given if found is None else found

    def _derive_loss(self, module: Any, optimizer: DPOptimizer | None) -> WatchedLoss | None:
        declared = self._declared
        if declared.criterion is None:
            return None
        module = module if declared.module is None else declared.module
        loss = WatchedLoss(module, declared.criterion, declared.feature_norm)
        return None if optimizer is not None and why_composition(optimizer) else loss

    def close(self) -> None:
        """Leaves loader, model and criterion as they were."""
        for watch in (self._batches, self._watched_loss):
            if watch is not None:
                watch.close()

    def check(self) -> None:
        """Raises UnsupportedRunError if batches were left out in a pass that has ended."""
        if self._batches is not None:
            self._batches.check_finished()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a recorder into a run without steps.

        Raises:
            ValueError: As `RunRecorder.load_state_dict`, or the batches are not known yet, or the
                state is not of the end of an epoch. Nothing is changed then.
        """
        if self._account is None or self.recorder.num_steps:
            raise ValueError(
                "Expected a run whose loader was read and which has no steps, got another one. "
                "Call make_private on a fresh engine, then load."
            )
        self._record, self._is_composition = self._account.restored(state)
        if self._batches is not None:
            self._batches.resume(self._record.num_steps)

    # The steps

    def check_piece(self, optimizer: DPOptimizer, norms: torch.Tensor | None) -> None:
        """Raises UnsupportedRunError if a piece of a batch has longer gradients than declared."""
        loss = None if self._account is None else self._account.loss
        if loss is not None and not why_composition(optimizer):
            self._check_norms(optimizer, self.recorder.num_steps + 1, loss.lipschitz, norms)

    def observe(
        self, optimizer: DPOptimizer, added: int | None, norms: torch.Tensor | None
    ) -> None:
        """Records the step that `optimizer` is about to take.

        Args:
            optimizer: In its step hook.
            added: The rows that it added up for the step; None if nobody counted.
            norms: Of the gradients that it added up last, shape (rows,); None if nobody knows.

        Raises:
            UnsupportedRunError: It is not one of the run.
        """
        step = self.recorder.num_steps + 1
        rows = self._take_batch(optimizer, step, added)
        check_finite(optimizer, step)
        reason = why_composition(optimizer)
        if self._is_composition is None:
            self._is_composition = self._becomes_composition(reason)
        if self._is_composition:
            # The update rule is post-processing; any positive learning rate stands for it.
            self._add(optimizer, clip_norm=1.0, learning_rate=1.0, weight_decay=0.0, rows=rows)
        elif reason:
            raise UnsupportedRunError(
                f"step {step} changed the optimizer: {reason}. Keep one update rule during a run."
            )
        else:
            self._add_last_iterate(optimizer, step, rows, norms)
        self.has_begun = True

    def _take_batch(self, optimizer: DPOptimizer, step: int, added: int | None) -> int | None:
        """The rows of the batch that the step is about; None if nobody knows them."""
        assert self._account is not None
        assert self._batches is not None
        self._is_ghost = hides_rows(optimizer)
        is_poisson = self._account.order is BatchOrder.POISSON
        rows = count_rows(optimizer, step, is_poisson=is_poisson)
        rows = rows if added is None else added
        self._batches.take(step, rows)
        return rows

    def _becomes_composition(self, reason: str) -> bool:
        """Decides at the first step seen here, which may follow restored ones."""
        assert self._account is not None
        has_steps = self.recorder.num_steps > 0
        if not reason or (has_steps and self._account.loss is not None):
            return False
        if not has_steps:
            self._record = self._account.composed().recorder()
        _logger.warning(
            "No last-iterate theorem here covers this optimizer (%s), so epsilon is that of "
            "composition.",
            reason,
        )
        return True

    def _add_last_iterate(
        self, optimizer: DPOptimizer, step: int, rows: int | None, norms: torch.Tensor | None
    ) -> None:
        account, params = self._account, optimizer.params
        assert account is not None
        for param in params:
            check_precision("parameters", param)
        lipschitz = None if account.loss is None else account.loss.lipschitz
        check_clip_margin(float(optimizer.max_grad_norm), lipschitz)
        self._check_gradients(optimizer, step, lipschitz, norms)
        if account.radius is not None:
            remedy = f" Project all parameters together after every step. {USE_ENGINE}"
            check_inside(step, float(joint_norm(params)), account.radius, remedy)
        options = sgd_options(optimizer.original_optimizer)
        # Events divide by batch_size, Opacus by expected_batch_size or not at all.
        divisor = 1.0
        if optimizer.loss_reduction == "mean":
            divisor = float(optimizer.expected_batch_size)
        scale = float(account.batches["batch_size"]) / divisor
        self._add(
            optimizer,
            clip_norm=float(optimizer.max_grad_norm),
            learning_rate=options["lr"] * scale,
            weight_decay=options["weight_decay"] / scale,
            rows=rows,
        )

    def _check_gradients(
        self,
        optimizer: DPOptimizer,
        step: int,
        lipschitz: float | None,
        norms: torch.Tensor | None,
    ) -> None:
        params = optimizer.params
        if self._watched_loss is not None and is_in_pieces(optimizer):
            raise UnsupportedRunError(
                f"step {step} used a batch in several pieces, of which only the last can be held "
                f"against the criterion. Declare a LossGeometry. {USE_ENGINE}"
            )
        norms = self._check_norms(optimizer, step, lipschitz, norms)
        if self._watched_loss is not None:
            piece = Piece(step=step, params=params, rows=len(norms), norms=norms)
            self._watched_loss.check(piece, optimizer.loss_reduction)

    def _check_norms(
        self,
        optimizer: DPOptimizer,
        step: int,
        lipschitz: float | None,
        norms: torch.Tensor | None,
    ) -> torch.Tensor:
        """The norms of the gradients at hand, where they are needed; shape (rows,)."""
        if lipschitz is None and self._watched_loss is None:
            return torch.zeros(0)
        norms = gradient_norms(optimizer.params) if norms is None else norms
        if len(norms):
            GradientGuard.of_lipschitz(lipschitz).check(step, float(norms.max()))
        return norms

    def _add(
        self,
        optimizer: DPOptimizer,
        *,
        clip_norm: float,
        learning_rate: float,
        weight_decay: float,
        rows: int | None,
    ) -> None:
        assert self._batches is not None
        self.recorder.step(
            noise_multiplier=float(optimizer.noise_multiplier),
            learning_rate=learning_rate,
            clip_norm=clip_norm,
            weight_decay=weight_decay,
            batch_index=self.recorder.expected_batch_index,
            batch_rows=rows,
        )
        self._batches.stepped(self.recorder.num_steps)
