"""Which batch of the plan the training loop is working on."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from typing import Any

import attrs
import torch

from hidden_state_accountants import UnsupportedRunError

_AT_ONCE = 2  # the batch of the step, and one that is fetched ahead


@attrs.frozen(eq=False)
class Delivery:
    """A batch that the private loader handed to the loop.

    Attributes:
        index: Of the batch.
        tensors: What it consists of; no copies.
        steps_before: How many pieces had been used when it was handed over.
    """

    index: int
    tensors: tuple[torch.Tensor, ...]
    steps_before: int
    _writes: list[int] = attrs.field(init=False)

    @_writes.default
    def _count(self) -> list[int]:
        return [0 if x.is_inference() else x._version for x in self.tensors]

    @property
    def is_as_delivered(self) -> bool:
        """Whether torch counted no write to the tensors since then."""
        return self._count() == self._writes


class BatchCursor:
    """Written by the loader in the main process, read by the optimizer at every step.

    There are two ways to the optimizer. The private loader calls `deliver` when it hands a batch
    to the loop. A loop may fetch one batch ahead of its steps; which of the two it then used is not
    known here, so that `take` answers with the older one and `was_fetched_ahead` tells whoever sees
    the training passes to compare what went in (`guards.batch.BatchGuard`). Opacus'
    BatchMemoryManager builds a loader of its own around the batch sampler and announces every
    physical piece with `signal` when the sampler is asked for it; those announcements queue up, so
    that prefetching workers cannot run ahead of the optimizer. Such a loader asks for one more
    piece whenever it hands one over, so the queue is never longer than what it prefetches, plus
    one, unless the loop left a piece out.

    A pass may be interrupted by a look at the batches: another pass that ends, or whose iterator is
    dropped, before a step is taken in it. The interrupted pass then goes on where it was. A pass
    that is left early for good, with steps, is followed by one that goes on with the next batch.

    Attributes:
        taken: The batch of the latest `take`; None for a piece, and where nothing was delivered.
        was_fetched_ahead: Whether that batch is only presumably the one that the loop used.
        was_looked: Whether a look came between the batch that is taken next and its step.

    Args:
        num_batches: Batches per pass. A single fixed batch may be stepped on again and again.
        prefetched: How many batches the loader's workers fetch in advance.
        counts_steps: Whether the index of a batch is the number of its step (batches that are drawn
            for every step), not its place in the epoch.
    """

    def __init__(self, num_batches: int, prefetched: int = 0, *, counts_steps: bool = False):
        # What the flags mean, and what changes them:
        #
        #   flag           true if                                      set by           unset by
        #   _is_kept       one fixed batch, stepped on again and again  construction     -
        #   _has_taken     a step used a piece of this pass             take             start_pass
        #   _left_out      a piece of this pass was passed over         deliver, signal  start_pass
        #   _is_exhausted  the sampler has no more pieces in this pass  exhaust          start_pass
        #   _was_delivered the private loader handed over a batch       deliver          start_pass
        #   _is_open       a batch was dealt, and more may be            emit, deliver    end_pass
        #   was_looked     a look came between a batch and its step      end_pass         take
        #   _is_over       the loader has no more batches in this pass  deliver          start_pass
        #   _was_left_out  one was passed over in an earlier pass in    start_pass       -
        #                  which steps were taken
        #
        # _fetches_ahead is set by the first batch that was fetched ahead and stays set: every later
        # batch is compared with what went in. (A loop that fetches beyond the end of a pass is
        # dealt a random batch again, and would use it for the one after it.)
        #
        # A pass that is only looked at leaves nothing out. Pieces that wait when the sampler is
        # exhausted were passed over, too; before that they may still be prefetched ones.
        self._num_batches, self._prefetched = num_batches, prefetched
        self._counts_steps = counts_steps
        self._is_kept = num_batches == 1 and not counts_steps
        self.steps_taken = self._first_batch = 0
        self._times_taken = 0
        self._was_left_out = self._has_taken = self._fetches_ahead = self._is_open = False
        self._waiting: collections.deque[Delivery] = collections.deque(maxlen=_AT_ONCE)
        self._pieces: collections.deque[tuple[int | None, bool]] = collections.deque()
        self._ids = itertools.count()
        self._interrupted: list[dict[str, Any]] = []  # what passes were that may go on
        self._forget_pass()

    @property
    def pass_id(self) -> int:
        """Identifies the latest pass over the batches."""
        return self._pass_id

    @property
    def expected_index(self) -> int:
        """The index that the next batch must have."""
        return self.steps_taken if self._counts_steps else self.steps_taken % self._num_batches

    @property
    def batches_left(self) -> int:
        """The batches of a pass that starts now: the rest of an epoch that was left early.

        Batches that are drawn for every step have no epochs; only a run that goes on from a
        checkpoint ends its pass where it would have ended.
        """
        begun = self._first_batch if self._counts_steps else self.expected_index
        return self._num_batches - begun

    def resume_at(self, step: int) -> None:
        """The next pass starts where a run after `step` steps goes on."""
        self._interrupted.clear()
        self._forget_pass()
        self.steps_taken, self._first_batch = step, step % self._num_batches

    def start_pass(self) -> int:
        """Forgets what an earlier pass announced, but not that the loop left a piece out.

        Until a step is taken, the pass may turn out to be a look; see `end_pass`.
        """
        if self._is_open:
            kept = {name: value for name, value in vars(self).items() if name != "_interrupted"}
            self._interrupted.append(kept)
        self._forget_pass()
        return self._pass_id

    def end_pass(self, pass_id: int) -> None:
        """Nobody can ask for further batches of a pass.

        If no step was taken in it, it was a look: what it delivered is forgotten, and the pass that
        it interrupted goes on.
        """
        self._interrupted = [kept for kept in self._interrupted if kept["_pass_id"] != pass_id]
        if pass_id != self._pass_id:
            return
        self._is_open = False
        if self._has_taken or not self._interrupted:
            return
        vars(self).update(self._interrupted.pop())
        self.was_looked = bool(self._waiting or self._pieces)

    def _forget_pass(self) -> None:
        self._was_left_out |= self._has_taken and self._is_incomplete()
        self._pass_id = next(self._ids)
        self._emitted: int | None = None
        # In passes of one batch nothing else tells a loop that fetches ahead.
        self._fetches_ahead |= self._num_batches == 1 and bool(self._waiting)
        # New ones: those of an interrupted pass are kept.
        self._waiting = collections.deque(maxlen=_AT_ONCE)
        self._pieces = collections.deque()
        self.taken: Delivery | None = None
        self.was_fetched_ahead = self.was_looked = False
        self._left_out = self._is_exhausted = self._has_taken = self._is_over = False
        self._was_delivered = self._is_open = False

    def check_pass(self, pass_id: int) -> None:
        """Raises UnsupportedRunError if another pass was started since `pass_id`."""
        if pass_id != self._pass_id:
            raise UnsupportedRunError(
                "A second iterator over the private loader was started before the first one had "
                "ended, so the batches of both would mix. Finish an epoch before the next one, and "
                "evaluate on a loader of its own."
            )

    def emit(self, index: int) -> None:
        """The batch sampler is about to yield batch `index` (possibly long before it is used)."""
        self._is_open, self._emitted = True, index

    def exhaust(self) -> None:
        """The batch sampler has no more batches in this pass."""
        self._is_exhausted = True

    def deliver(self, index: int | None, tensors: Iterable[torch.Tensor] = ()) -> None:
        """The loader hands batch `index` to the loop; None at the end of the pass."""
        self._left_out |= bool(self._pieces)
        self._is_open = self._was_delivered = True
        if index is None:
            self._is_over = True  # what was fetched ahead may still be used
            return
        if self._is_kept:
            self._waiting.clear()
        self._waiting.append(Delivery(index, tuple(tensors), self._times_taken))

    def signal(self, do_skip: bool) -> None:
        """The next piece belongs to the current batch and, if `do_skip`, is not its last."""
        if not self._waiting:
            self._left_out |= len(self._pieces) > self._prefetched
            self._pieces.append((self._emitted, do_skip))
        else:
            self._pieces.append((self._waiting[-1].index, do_skip))

    @property
    def next_is_skipped(self) -> bool:
        """Whether the piece that `take` returns next is not the last of its batch."""
        return bool(self._pieces) and self._pieces[0][1]

    def take(self) -> tuple[int | None, bool]:
        """Consumes the next piece: the index of its batch, and whether more pieces follow.

        The index is None if the loader delivered nothing that was not used.

        Raises:
            UnsupportedRunError: The loop left a piece out.
        """
        self._has_taken = True
        self._interrupted.clear()
        if self._left_out or self._was_left_out:
            raise UnsupportedRunError(
                "a piece of a batch was delivered, but no step was taken on it. Step once per "
                "batch, empty ones included, and once per piece that BatchMemoryManager delivers."
            )
        self.taken, self.was_fetched_ahead = None, False
        if self._pieces:
            self._check_not_looked()
            index, do_skip = self._pieces.popleft()
            if not do_skip and not self._is_kept:
                self._waiting.clear()
        else:
            self._take_delivered()
            index, do_skip = None if self.taken is None else self.taken.index, False
        self.was_looked = False
        self._times_taken += 1
        self._first_batch = 0
        return index, do_skip

    def _check_not_looked(self) -> None:
        """Raises UnsupportedRunError if another batch of the same size may have been used.

        Batches that are drawn for every step have sizes of their own.
        """
        if self.was_looked and not (self._counts_steps or self._is_kept):
            raise UnsupportedRunError(
                "the loader was iterated anew between a batch and its step, so that nobody can "
                "tell which of both the step used. Look at batches before training, right after a "
                "step, or with a loader of your own (DataLoader(loader.dataset, ...))."
            )

    def _take_delivered(self) -> None:
        if not self._waiting:
            return
        self.taken = self._waiting[0]
        if self._is_kept:
            return
        is_newest = len(self._waiting) == 1 and not self._is_over
        is_new = self.taken.steps_before == self._times_taken
        self._fetches_ahead |= not (is_newest and is_new)
        self.was_fetched_ahead = self._fetches_ahead or self.was_looked
        self._waiting.popleft()

    @property
    def is_bypassed(self) -> bool:
        """Whether a loader that is not the private one asked for the batches of this pass."""
        return self._emitted is not None and not self._was_delivered

    def forget(self) -> None:
        """The step is over, and the tensors of its batch are no longer needed."""
        self.taken = None

    @property
    def waiting(self) -> tuple[Delivery, ...]:
        """The batches that were delivered and not taken."""
        return tuple(self._waiting)

    def check_finished(self) -> None:
        """Raises UnsupportedRunError if pieces may have been left out at the end of a pass."""
        if self._was_left_out or (self._has_taken and self._is_incomplete()):
            raise UnsupportedRunError(
                f"Pieces of an epoch were announced ({len(self._pieces)} are waiting), but no step "
                "was taken on them. Step once per batch and once per piece that BatchMemoryManager "
                "delivers; with workers, ask for epsilon at the end of an epoch."
            )

    def _is_incomplete(self) -> bool:
        return self._left_out or (self._is_exhausted and bool(self._pieces))
