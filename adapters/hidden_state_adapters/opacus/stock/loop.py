"""A model, an optimizer and a loader that Opacus' own engine made private together."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import attrs
from dp_accounting import NeighboringRelation
from opacus.optimizers import DPOptimizer

from hidden_state_accountants import Assumption, BatchOrder, UnsupportedRunError
from hidden_state_accountants.runs.base import Run
from hidden_state_adapters.opacus.data.reading import drawn_rate, is_poisson, read_loader
from hidden_state_adapters.opacus.guards.row_counts import RowCounts
from hidden_state_adapters.opacus.run.processes import check_processes, num_processes
from hidden_state_adapters.opacus.stock.assumptions import unseen
from hidden_state_adapters.opacus.stock.batches import FollowedBatches
from hidden_state_adapters.opacus.stock.checks import hides_rows
from hidden_state_adapters.opacus.stock.coins import take_over_coins
from hidden_state_adapters.opacus.stock.moves import MoveWatch
from hidden_state_adapters.opacus.stock.pieces import PieceWatch
from hidden_state_adapters.opacus.stock.run import StockRun

_DECLARE = (
    "Call engine.accountant.declare_run() before the first step: it reads the loader, and without "
    "further arguments epsilon is that of composition."
)


@attrs.define(eq=False)
class StepCount:
    """The steps of a loop; all that is remembered of it with the parameters.

    Attributes:
        num_steps: Those recorded.
        run: The record of a declared run; undeclared ones release every iterate.
    """

    num_steps: int = 0
    run: Run | None = None

    @property
    def release_steps(self) -> tuple[int, ...]:
        """Those after which the iterate was released."""
        return () if self.run is None else self.run.release_steps

    @property
    def releases_every_iterate(self) -> bool:
        """Whether epsilon covers every iterate, whatever is released."""
        return self.run is None or self.run.releases_every_iterate


@attrs.define(eq=False)
class StockLoop:
    """What one call of `PrivacyEngine.make_private` made, and who records its steps.

    Attributes:
        sample_rate: What Opacus says of the sampling: 1 / len(data_loader).
        data_loader: The loader that make_private returned; None if it could not be found.
        module: The private model; None likewise.
        optimizer: The private optimizer, at the latest since its first step; None before.
        is_calibrated: Whether make_private_with_epsilon found the noise.
        run: The declared run, or None.
        pieces: Counts what the optimizer adds up; None before it is known.
        moves: Notices steps that were not recorded; likewise.
        count: The recorded steps.
    """

    sample_rate: float
    data_loader: Any = None
    module: Any = None
    optimizer: DPOptimizer | None = None
    is_calibrated: bool = False
    run: StockRun | None = None
    pieces: PieceWatch | None = None
    moves: MoveWatch | None = None
    count: StepCount = attrs.field(factory=StepCount)
    _batches: FollowedBatches | None = None  # of an undeclared run
    _why_not_followed: str = ""
    _counts: RowCounts | None = None

    @classmethod
    def of_caller(cls, accountant: Any, sample_rate: float) -> StockLoop:
        """The loop that an engine with this accountant is making now.

        Opacus hands nothing but the sampling rate to its accountants, so everything else is read
        where make_private has it: in its own variables. Where they are not found (a hook that was
        attached by hand), `declare_run` has to be given the loader.
        """
        frame = _frame_of("make_private", accountant, sys._getframe(1))
        if frame is None:
            return cls(sample_rate)
        made = frame.f_locals
        take_over_coins(made.get("data_loader"))
        calibration = _frame_of("make_private_with_epsilon", accountant, frame)
        return cls(
            sample_rate,
            data_loader=made.get("data_loader"),
            module=made.get("module"),
            optimizer=made.get("optimizer"),
            is_calibrated=calibration is not None,
        )

    @property
    def has_begun(self) -> bool:
        """Whether a step was recorded."""
        return self.count.num_steps > 0

    @property
    def is_poisson(self) -> bool | None:
        """Whether the batches are Poisson batches, as far as the loader says; None if unknown.

        The one batch of all records is a Poisson batch of rate 1.
        """
        if self.data_loader is None or self.sample_rate < 1:
            return is_poisson(self.data_loader)
        try:
            return read_loader(self.data_loader).order in (BatchOrder.FULL, BatchOrder.POISSON)
        except UnsupportedRunError:
            return is_poisson(self.data_loader)

    def check_calibration(self) -> None:
        """Raises UnsupportedRunError if the noise was found for other batches than these."""
        if self.is_calibrated and not self.is_poisson:
            raise UnsupportedRunError(
                "Expected a Poisson loader (poisson_sampling=True) in make_private_with_epsilon of "
                f"a PrivacyEngine, got {type(self.data_loader).__name__} with other batches: "
                "Opacus finds the noise for Poisson batches, and with these epsilon would miss the "
                "target. Use make_private_with_epsilon of HiddenStatePrivacyEngine, or find the "
                "noise with hidden_state_accountants.calibrate_noise and call make_private."
            )

    def start(self, run: StockRun, relation: NeighboringRelation) -> None:
        """Lets `run` record the steps; nothing is changed if it raises; see `StockRun.start`."""
        run.start(
            relation,
            data_loader=self.data_loader,
            module=self.module,
            optimizer=self.optimizer,
        )
        self.run = run
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def follow(self) -> None:
        """Follows the Poisson batches of a run that nobody declares, where they can be read."""
        try:
            reading = read_loader(self.data_loader)
            check_processes(self.data_loader, num_processes(self.optimizer))
        except UnsupportedRunError as error:
            self._why_not_followed = str(error)
            return
        if reading.order in (BatchOrder.FULL, BatchOrder.POISSON):
            self._batches = FollowedBatches(self.data_loader, reading)

    def check_owner(self, optimizer: DPOptimizer) -> None:
        """Raises UnsupportedRunError if the steps of another optimizer come through the hook."""
        if self.optimizer is None:
            self.optimizer = optimizer
        if self.optimizer is not optimizer:
            raise UnsupportedRunError(
                "Expected the steps of one optimizer, got those of a second through the same "
                "hook. Call make_private and declare_run for each."
            )

    def check_undeclared(self) -> None:
        """Raises UnsupportedRunError if the loader does not deal Poisson batches."""
        if self.is_poisson is False:
            raise UnsupportedRunError(
                "Expected a Poisson loader for a run that was not declared, got a "
                f"{type(self.data_loader).__name__} with batches of fixed size "
                "(poisson_sampling=False): the epsilon that stock accountants report is not one of "
                f"this run. {_DECLARE}"
            )
        if self.is_poisson and self._why_not_followed:
            raise UnsupportedRunError(self._why_not_followed)
        rate = 0.0 if self._batches is None else self._batches.sampling_rate
        if rate > drawn_rate(self.sample_rate) * (1 + 1e-9):
            raise UnsupportedRunError(
                f"Expected a loader that samples at a rate of 1 / len(data_loader) = "
                f"{self.sample_rate:g}, got {rate:g}: the epsilon that stock accountants report is "
                f"not one of this run. {_DECLARE}"
            )

    def take_undeclared(self, optimizer: DPOptimizer, step: int, rows: int | None) -> None:
        """Takes the batch of step `step` of a run that nobody declared.

        Raises:
            UnsupportedRunError: It is not the next Poisson batch, or those of a loader that cannot
                be followed do not look like Poisson batches.
        """
        if self._batches is not None:
            self._batches.take(step, rows)
            self._batches.stepped(self.count.num_steps + 1)
            return
        if self._counts is None:
            self._counts = RowCounts(optimizer.expected_batch_size or 1, self.sample_rate)
        reason = self._counts.why_not_poisson(optimizer)
        if reason:
            raise UnsupportedRunError(f"{reason} {_DECLARE}")

    def undeclared_assumptions(self, optimizer: DPOptimizer) -> tuple[Assumption, ...] | None:
        """What a run that nobody declared rests on; None if its batches are not followed."""
        if self._batches is None:
            return None
        return (
            *self._batches.assumptions(None, NeighboringRelation.ADD_OR_REMOVE_ONE),
            *unseen(radius=None, is_ghost=hides_rows(optimizer)),
        )

    def check(self) -> None:
        """Raises UnsupportedRunError if steps were not recorded, or batches left out in a pass."""
        if self.moves is not None:
            self.moves.check()
        if self._batches is not None:
            self._batches.check_finished()

    def check_without_steps(self) -> None:
        """Raises UnsupportedRunError if no step was recorded, but the model seems to be trained."""
        followed = self._batches if self.run is None else self.run
        if self.moves is not None and followed is not None and followed.has_dealt:
            self.moves.check_nothing_moved()


def _frame_of(name: str, accountant: Any, frame: FrameType | None) -> FrameType | None:
    """The running call of a method of the `opacus.PrivacyEngine` that has the accountant."""
    while frame is not None:
        is_of_opacus = frame.f_globals.get("__name__") == "opacus.privacy_engine"
        if is_of_opacus and frame.f_code.co_name == name:
            engine = frame.f_locals.get("self")
            return frame if getattr(engine, "accountant", None) is accountant else None
        frame = frame.f_back
    return None
