"""A model, an optimizer and a loader that Opacus' own engine made private together."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import attrs
from dp_accounting import NeighboringRelation
from opacus.optimizers import DPOptimizer

from hidden_state_accountants import BatchOrder, UnsupportedRunError
from hidden_state_adapters.opacus.data.reading import is_poisson, read_loader
from hidden_state_adapters.opacus.guards.row_counts import RowCounts
from hidden_state_adapters.opacus.stock.coins import take_over_coins
from hidden_state_adapters.opacus.stock.run import StockRun

_DECLARE = (
    "Call engine.accountant.declare_run() before the first step: it reads the loader, and without "
    "further arguments epsilon is that of composition."
)


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
        has_begun: Whether a step was recorded.
    """

    sample_rate: float
    data_loader: Any = None
    module: Any = None
    optimizer: DPOptimizer | None = None
    is_calibrated: bool = False
    run: StockRun | None = None
    has_begun: bool = False
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
        rate = getattr(getattr(self.data_loader, "batch_sampler", None), "sample_rate", 0.0)
        if rate > self.sample_rate * (1 + 1e-9):
            raise UnsupportedRunError(
                f"Expected a loader that samples at a rate of 1 / len(data_loader) = "
                f"{self.sample_rate:g}, got {rate:g}: the epsilon that stock accountants report is "
                f"not one of this run. {_DECLARE}"
            )

    def why_not_poisson(self, optimizer: DPOptimizer) -> str:
        """What the batches so far say against Poisson sampling, or "" ."""
        if self._counts is None:
            self._counts = RowCounts(optimizer.expected_batch_size or 1, self.sample_rate)
        reason = self._counts.why_not_poisson(optimizer)
        return f"{reason} {_DECLARE}" if reason else ""


def _frame_of(name: str, accountant: Any, frame: FrameType | None) -> FrameType | None:
    """The running call of a method of the `opacus.PrivacyEngine` that has the accountant."""
    while frame is not None:
        is_of_opacus = frame.f_globals.get("__name__") == "opacus.privacy_engine"
        if is_of_opacus and frame.f_code.co_name == name:
            engine = frame.f_locals.get("self")
            return frame if getattr(engine, "accountant", None) is accountant else None
        frame = frame.f_back
    return None
