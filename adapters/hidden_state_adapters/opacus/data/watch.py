"""A loader that somebody else made, watched: what it deals, and which batch a step is about.

The sampler of its batches becomes one of a class that tells, and deals what it dealt before.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import BatchSampler, DataLoader

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.data.cursor import BatchCursor
from hidden_state_adapters.opacus.data.subsets import FixedSubsets

_FETCHED_AHEAD = 1  # batches that a loop may take from the loader before it steps on them


@attrs.define(eq=False)
class _Pass:
    """What is known of the batches of a pass, by their index.

    Attributes:
        problem: What is wrong with the loader, or "".
        rows: Of every batch.
        states: Of the generator, before it drew the batch.
    """

    problem: str
    rows: dict[int, int] = attrs.field(factory=dict)
    states: dict[int, Hashable] = attrs.field(factory=dict)

    def note(self, problem: str) -> None:
        """The first problem stays."""
        self.problem = self.problem or problem


class LoaderWatch:
    """Follows the batches of a loader, from its sampler to the step.

    The sampler may be ahead of the loop, by what workers prefetch and by one batch that the loop
    itself fetches in advance (as Lightning's does). A batch that was left out is therefore noticed
    at the end of its pass at the latest.

    Nothing is raised while the loader is iterated, which may be for another purpose; only a step
    is refused. Several watches may follow one loader, each for a run of its own.

    Args:
        data_loader: One that `reading.read_loader` reads.
        num_batches: Batches of one pass.
        counts_steps: Whether batches are drawn for every step, and have no place in an epoch.
        batch: Gives the indices of a batch by its place in the epoch, where they are fixed.
        why_not: Looks at the loader when a pass starts; returns what is wrong with it, or "".
        generator: What draws the batches, whose states are compared, or None.
    """

    def __init__(
        self,
        data_loader: DataLoader,
        num_batches: int,
        *,
        counts_steps: bool,
        batch: Callable[[int], Sequence[int]] | None,
        why_not: Callable[[], str],
        generator: Callable[[], torch.Generator | None],
    ):
        prefetched = data_loader.num_workers * (data_loader.prefetch_factor or 0)
        self._cursor = BatchCursor(
            num_batches,
            prefetched + _FETCHED_AHEAD,
            counts_steps=counts_steps,
            # A Poisson batch that was left out shows in the rows of the one that is used for it.
            may_wait=prefetched if counts_steps else 0,
        )
        self._draws_each, self._generator = counts_steps, generator
        self._is_prefetched = prefetched > 0
        self._subsets = FixedSubsets(data_loader.dataset)
        self._loader, self._collate = data_loader, data_loader.collate_fn
        self._changed = ""  # for good, unlike the problem of a pass
        self._passes: dict[int, _Pass] = {}
        self._used_states: set[Hashable] = set()
        self._is_kept = num_batches == 1 and not counts_steps
        self._batch, self._why_not = batch, why_not
        self._sampler: Any = data_loader.batch_sampler
        self._was = _unwatched(type(self._sampler))
        if "watches" not in vars(self._sampler):
            self._sampler.__class__ = _WATCHED[self._was]
            self._sampler.watches = []
        self._sampler.watches.append(self)

    def follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of a pass that starts now, as they are."""
        pass_id, first = self._cursor.start_pass(), self._cursor.first_index
        # What went wrong before concerned passes that are over.
        passes = {**self._passes, pass_id: _Pass(self._why_not() or self._why_not_collate())}
        self._passes = {number: passes[number] for number in self._cursor.open_passes & set(passes)}
        self._compare_subsets()
        return self._batches(iter(batches), pass_id, first)

    def _batches(self, batches: Iterator[Any], pass_id: int, first: int) -> Iterator[Any]:
        try:
            yield from self._followed(batches, pass_id, first)
        except GeneratorExit:
            self._cursor.end_pass(pass_id)
            raise
        if self._cursor.pass_id == pass_id:
            self._cursor.exhaust()
            if not self._is_prefetched:  # otherwise the loop may still use what waits
                self._cursor.end_pass(pass_id)
        self._compare_subsets()

    def _followed(self, batches: Iterator[Any], pass_id: int, first: int) -> Iterator[Any]:
        for index in itertools.count(first):
            if index == first or self._draws_each:
                state = state_of(self._generator())
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._cursor.pass_id == pass_id:
                self._announce(index, batch)
                # An order is drawn once, and a state of its own for every batch of it.
                own = state if self._draws_each else state and (state, index)
                self._pass.states[index] = own
            else:
                self._pass.note(
                    "a pass over the loader went on after another one had been started, so the "
                    "batches of both mix. Finish an epoch before the next one, and evaluate on a "
                    "loader of its own."
                )
            yield batch

    def _why_not_collate(self) -> str:
        if self._loader.collate_fn is self._collate:
            return ""
        return (
            "the loader has another collate_fn than at make_private, at which nobody looked "
            "whether it takes every record by itself. Pass it to the DataLoader before "
            "make_private."
        )

    @property
    def _pass(self) -> _Pass:
        return self._passes[self._cursor.pass_id]

    def _compare_subsets(self) -> None:
        self._changed = self._changed or self._subsets.why_not()

    def _announce(self, index: int, batch: Sequence[int]) -> None:
        if self._batch is not None and list(batch) != list(self._batch(index)):
            self._pass.note(
                f"batch {index} of the loader holds other records than when the loader was read. "
                "Call make_private and declare_run again for another loader."
            )
        self._pass.rows[index] = len(batch)
        if self._is_kept:
            self._cursor.deliver(index)
        else:
            self._cursor.emit(index)
            self._cursor.signal(False)

    @property
    def has_dealt(self) -> bool:
        """Whether a batch was dealt."""
        return any(known.rows for known in self._passes.values())

    def take(self) -> int:
        """The rows of the batch that the step at hand has to be about.

        Raises:
            UnsupportedRunError: It is about none, or about another one.
        """
        known = self._passes.get(self._cursor.pass_id, _Pass(""))
        if self._changed or known.problem:
            raise UnsupportedRunError(self._changed or known.problem)
        expected = self._cursor.expected_index
        index, _ = self._cursor.take()
        if index is None or index != expected:
            raise UnsupportedRunError(
                f"it used {'no new batch' if index is None else f'batch {index}'} of the loader "
                f"that make_private returned, expected batch {expected}: every batch is used in "
                "order, exactly once per epoch. Iterate that loader itself, to its end, and step "
                "once per batch."
            )
        self._use_state(known.states[index])
        return known.rows[index]

    def _use_state(self, state: Hashable) -> None:
        if state is None:
            return
        if state in self._used_states:
            raise UnsupportedRunError(
                "its batch was drawn from a state of the generator that drew an earlier batch of "
                "the run already, so that batch came again: the generator was seeded or set back "
                "(manual_seed, set_state, torch.random.fork_rng). Leave it alone during a run, or "
                "give the DataLoader none."
            )
        self._used_states.add(state)

    def stepped(self, steps: int) -> None:
        """The step was recorded; now there are `steps`."""
        self._cursor.steps_taken = steps

    def resume(self, steps: int) -> None:
        """The run goes on after `steps` steps."""
        self._cursor.resume_at(steps)

    def check_finished(self) -> None:
        """Raises UnsupportedRunError if batches were left out in a pass that has ended."""
        self._compare_subsets()
        if self._changed:
            raise UnsupportedRunError(self._changed)
        self._cursor.check_finished()

    def close(self) -> None:
        """Leaves the sampler as it was."""
        watches = self._sampler.__dict__.get("watches", [])
        if self in watches:
            watches.remove(self)
            if not watches:
                self._sampler.__class__ = self._was
                del self._sampler.watches


def state_of(generator: torch.Generator | None) -> bytes | None:
    """A short hash of the state of a generator; None without one, or where nobody can read it."""
    try:
        state = None if generator is None else generator.get_state()
    except RuntimeError:  # that of secure_mode reads the operating system's source
        return None
    return None if state is None else hashlib.sha256(state.numpy().tobytes()).digest()[:8]


def _followed(watches: Iterable[LoaderWatch], batches: Iterable[Any]) -> Iterator[Any]:
    for watch in watches:
        batches = watch.follow(batches)
    return iter(batches)


# One base each and nothing new to hold: a sampler has to be able to become one of these.


class WatchedBatchSampler(BatchSampler):
    """torch's sampler of fixed-size batches, which tells its watches about every pass."""

    watches: list[LoaderWatch]

    def __iter__(self) -> Iterator[list[int]]:
        return _followed(self.watches, super().__iter__())


class WatchedPoissonSampler(UniformWithReplacementSampler):
    """Opacus' Poisson sampler, likewise."""

    watches: list[LoaderWatch]

    def __iter__(self) -> Iterator[list[int]]:
        return _followed(self.watches, super().__iter__())


class WatchedDistributedPoissonSampler(DistributedUniformWithReplacementSampler):
    """Opacus' Poisson sampler for several processes, likewise."""

    watches: list[LoaderWatch]

    def __iter__(self) -> Iterator[Any]:
        return _followed(self.watches, super().__iter__())


_WATCHED: dict[type, type] = {
    BatchSampler: WatchedBatchSampler,
    UniformWithReplacementSampler: WatchedPoissonSampler,
    DistributedUniformWithReplacementSampler: WatchedDistributedPoissonSampler,
}


def _unwatched(kind: type) -> type:
    return next((own for own, watched in _WATCHED.items() if watched is kind), kind)


def samples_as(batch_sampler: Any, kind: type) -> bool:
    """Whether a sampler is exactly of a kind that can be watched, watched or not."""
    return _unwatched(type(batch_sampler)) is kind
