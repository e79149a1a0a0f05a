"""The batches of a stock loader, from its sampler to the step."""

from __future__ import annotations

from typing import Any

import torch
from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, BatchOrder, UnsupportedRunError
from hidden_state_adapters.opacus.data.reading import LoaderReading
from hidden_state_adapters.opacus.data.watch import LoaderWatch
from hidden_state_adapters.opacus.guards.base import Piece, at_step
from hidden_state_adapters.opacus.guards.collation import CollationGuard
from hidden_state_adapters.opacus.guards.records import RecordsGuard
from hidden_state_adapters.opacus.stock.assumptions import batch_assumptions
from hidden_state_adapters.opacus.stock.coins import has_own_coins


class FollowedBatches:
    """Compares every step with the batch that the loader dealt, and the records with themselves.

    Args:
        loader: A loader that was read.
        reading: What was read.

    Raises:
        UnsupportedRunError: Its collate_fn makes something else of a record beside other ones.
    """

    def __init__(self, loader: Any, reading: LoaderReading):
        self._reading = reading
        self._records = RecordsGuard(loader.dataset)
        self._collation = CollationGuard(loader)
        self._watch = LoaderWatch(
            loader,
            reading.num_batches,
            counts_steps=reading.order is BatchOrder.POISSON,
            batch=None if reading.plan is None else reading.plan.batch,
            why_not=reading.why_not,
            generator=self._generator,
        )

    def _generator(self) -> torch.Generator | None:
        """What draws the batches, if somebody may set it back."""
        order, sampler = self._reading.order, self._reading.sampler
        if order not in (BatchOrder.POISSON, BatchOrder.RESHUFFLED) or has_own_coins(sampler):
            return None
        drawing = sampler if order is BatchOrder.POISSON else sampler.sampler
        return drawing.generator or torch.default_generator

    @property
    def sampling_rate(self) -> float:
        """The probability with which a record joins a batch; 1 for one batch of all records."""
        rate = self._reading.sampling_rate
        return 1.0 if rate is None else rate

    def assumptions(
        self, order: BatchOrder | None, relation: NeighboringRelation
    ) -> tuple[Assumption, ...]:
        """What was read and is followed, what is secret, and what is known of the records.

        Args:
            order: That is accounted; None for the one that was read.
            relation: Of the guarantee.
        """
        order = self._reading.order if order is None else order
        of_records = (*self._records.assumptions, *self._collation.assumptions)
        return (*batch_assumptions(self._reading, order, relation), *of_records)

    def take(self, step: int, rows: int | None) -> None:
        """Takes the batch that step `step` has to be about.

        Args:
            step: From 1 on.
            rows: That the step added up; None if it does not show them.

        Raises:
            UnsupportedRunError: It is about another batch, or the records changed.
        """
        self._records.before(Piece(step=step, params=()))
        expected = at_step(step, self._watch.take)
        if rows not in (None, expected):
            raise UnsupportedRunError(
                f"step {step} used {rows} rows, expected the {expected} records of its batch: "
                "another batch, one whose rows were left out or repeated (two views of a record?), "
                "or one after a batch that a pass was left in the middle of (BatchMemoryManager). "
                "Train on the batches of the loader that make_private returned, as they are, to "
                "the end of every batch."
            )

    @property
    def has_dealt(self) -> bool:
        """Whether a batch was dealt."""
        return self._watch.has_dealt

    def stepped(self, steps: int) -> None:
        """The step was recorded; now there are `steps`."""
        self._watch.stepped(steps)

    def resume(self, steps: int) -> None:
        """The run goes on after `steps` steps."""
        self._watch.resume(steps)

    def check_finished(self) -> None:
        """Raises UnsupportedRunError if batches were left out in a pass that has ended."""
        self._watch.check_finished()

    def close(self) -> None:
        """Leaves the loader as it was."""
        self._watch.close()
