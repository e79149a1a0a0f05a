"""The records that each step of a run uses: one plan for each kind of batch order.

No plan needs a training framework; every adapter that owns its data deals its batches by one.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from hidden_state_accountants import BatchOrder, UnsupportedRunError
from hidden_state_accountants.events.batch_order import (
    BINS,
    OF_RANDOM_SIZE,
    batches_per_pass,
)
from hidden_state_adapters.binomial import DRAWN_BITS, Binomial

_logger = logging.getLogger("hidden_state_accountants")

_DRAWN_AGAIN = (  # for every epoch, or every step
    BatchOrder.RESHUFFLED, BatchOrder.BALLS_IN_BINS_REDRAWN, BatchOrder.POISSON,
    BatchOrder.WITHOUT_REPLACEMENT,
)  # fmt: skip
_KEY_RANGE = 2**64
_AT_ONCE = 2**22  # records: a data set may have far more than there is memory for
_KEYS, _SIZE, _PLACES = range(3)  # what random integers are for; places are drawn several times


@attrs.frozen
class RandomKeys:
    """Independent uniform 64-bit integers: what every random order is made from.

    Attributes:
        seed: None reads the operating system's cryptographic source; there is no state that could
            leak. A seed makes draw number k a function of (seed, k).
        secret: Bytes that one of several processes read from the operating system's source, for
            the same integers in all: draw number k is SHAKE-128 of them and k (FIPS 202). Without
            a seed only.
    """

    seed: int | None = attrs.field(default=None, repr=False)
    secret: bytes | None = attrs.field(default=None, repr=False)

    def _words(self, number: int, count: int, use: int) -> np.ndarray:
        """Returns uniform 64-bit integers, with a seed or secret others for every use."""
        if self.seed is not None:
            spawn_key = (number, use) if use else (number,)
            sequence = np.random.SeedSequence(self.seed, spawn_key=spawn_key)
            return np.random.PCG64(sequence).random_raw(count)
        if self.secret is None:
            found = os.urandom(8 * count)
        else:
            told = self.secret + number.to_bytes(16, "big") + use.to_bytes(16, "big")
            found = hashlib.shake_128(told).digest(8 * count)
        return np.frombuffer(found, dtype=np.uint64)

    def size(self, number: int, law: Binomial) -> int:
        """Returns the number of records that join the batch of draw `number`."""
        words = self._words(number, DRAWN_BITS // 64, _SIZE)
        return law.at(int.from_bytes(words.tobytes(), "little"))

    def subset(self, number: int, count: int, size: int) -> np.ndarray:
        """Returns a uniform subset of `size` of range(count), in its order, int64: draw `number`.

        Places are drawn until there are `size` different ones. What is found has exactly the law of
        a uniform subset: to exchange two records exchanges draws that are equally likely.
        """
        if 2 * size > count:
            left_out = self.subset(number, count, count - size)
            return np.delete(np.arange(count), left_out)
        last = np.uint64(_KEY_RANGE - _KEY_RANGE % count - 1)  # above it some places were likelier
        found, use = np.arange(0, dtype=np.uint64), _PLACES
        while len(found) < size:
            words = self._words(number, size - len(found), use)
            places = words[words <= last] % np.uint64(count)
            found, use = np.unique(np.concatenate([found, places])), use + 1
        return found.astype(np.int64)

    def bins(self, number: int, count: int, bins: int) -> np.ndarray:
        """Returns independent uniform integers below `bins`, shape (count,): draw `number`."""
        last = np.uint64(_KEY_RANGE - _KEY_RANGE % bins - 1)  # above it some bins were likelier
        words, use = self._words(number, count, _PLACES).copy(), _PLACES
        while len(again := np.flatnonzero(words > last)):
            use += 1
            words[again] = self._words(number, len(again), use)
        return (words % np.uint64(bins)).astype(np.uint16 if bins <= 2**16 else np.int64)

    def permutation(self, number: int, count: int) -> np.ndarray:
        """Returns a uniform permutation of range(count), up to the 2**-64 chance of equal keys."""
        return np.argsort(self._words(number, count, _KEYS), kind="stable")


@attrs.frozen
class Share:
    """The part of every batch that one of several processes uses: every `count`-th record."""

    rank: int = 0
    count: int = 1

    @property
    def part(self) -> str:
        """A name of the part, in words."""
        return "batch" if self.count == 1 else "part of the batch"

    def of(self, batch: list[int]) -> list[int]:
        """Its part of a batch."""
        return batch[self.rank :: self.count]

    def rows(self, size: int) -> int:
        """The size of its part of a batch of `size` records."""
        return len(range(self.rank, size, self.count))


class BatchPlan:
    """The batches of a run. The batch of a step is drawn once and then stays what it is.

    A loop that looks at batches, breaks off and starts again therefore meets the same batches: it
    cannot choose among them.

    Attributes:
        share: Part of every batch that this process uses; all of it, unless another is assigned.
        dataset_size: Number of records as the event has it (see `hide_size`).
        repeats: True if one draw holds for all epochs.

    Args:
        records: Indices of all records, in an order that does not depend on them; public.
        batch_size: b, what a step divides by; the expected size of batches of random sizes.
        order: Batch order that is accounted.
        keys: Source of the randomness, or None.
        max_batch_size: Cap of batches of random sizes, or None.
        sampling_rate: Probability with which a record joins a batch of random size, if it is not
            b/n; or None.
    """

    share = Share()
    draws_every_step = False  # a step is not one of l steps of an epoch

    def __init__(
        self,
        records: Sequence[int],
        batch_size: int,
        order: BatchOrder,
        keys: RandomKeys | None = None,
        max_batch_size: int | None = None,
        sampling_rate: float | None = None,
    ):
        self.records, self.batch_size, self.order, self._keys = records, batch_size, order, keys
        self.max_batch_size, self.sampling_rate = max_batch_size, sampling_rate
        self.dataset_size = len(records)
        self.repeats = order not in _DRAWN_AGAIN
        self._draws: dict[int, _Draw] = {}

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of an event that are about the batches, by name."""
        return {
            "batch_order": self.order,
            "batch_size": self.batch_size,
            "dataset_size": self.dataset_size,
            "sampling_rate": self.sampling_rate,
            "max_batch_size": self.max_batch_size,
        }

    @property
    def num_batches(self) -> int:
        """Batches of one pass of the loader."""
        return batches_per_pass(self.batch_size, len(self.records), self.sampling_rate)

    @property
    def is_secret(self) -> bool:
        """True if the guarantee needs that nobody learns which records a step used."""
        return self.order not in (BatchOrder.CYCLIC, BatchOrder.FULL)

    @property
    def is_seeded(self) -> bool:
        """True if the user's seed fixes everything that is drawn."""
        return self._keys is not None and self._keys.seed is not None

    @property
    def is_shared(self) -> bool:
        """True if a secret that several processes have fixes everything that is drawn."""
        return self._keys is not None and self._keys.secret is not None

    @property
    def description(self) -> str:
        """The checked properties of the batches, in words."""
        raise NotImplementedError

    def hide_size(self) -> None:
        """Makes `dataset_size` what rate and divisor say, where the number of records is hidden."""
        assert self.sampling_rate is not None
        self.dataset_size = max(self.batch_size, round(self.batch_size / self.sampling_rate))

    def batch(self, step: int) -> list[int]:
        """Returns the indices of the records of step `step` >= 0."""
        number, index = self._place(step)
        if number not in self._draws:
            assert number > max(self._draws, default=-1), "an earlier draw is gone"
            self._draws[number] = self._drawn(number)
        own = self._draws[number]
        return np.asarray(own.order[own.part(index)]).tolist()  # type: ignore[no-any-return]

    def num_rows(self, step: int) -> int:
        """Returns the number of records of a step whose batch was drawn."""
        number, index = self._place(step)
        part = self._draws[number].part(index)
        return part.stop - part.start

    def _place(self, step: int) -> tuple[int, int]:
        """Returns the draw that a step is of, and its batch."""
        epoch, index = divmod(step, self.num_batches)
        return (0 if self.repeats else epoch), index

    def _drawn(self, number: int) -> _Draw:
        raise NotImplementedError

    def own_batch(self, step: int) -> list[int]:
        """Returns the part of the batch of step `step` >= 0 that this process uses."""
        return self.share.of(self.batch(step))

    def own_rows(self, step: int) -> int:
        """Returns the number of records of `own_batch`, of a step whose batch was drawn."""
        return self.share.rows(self.num_rows(step))

    def start_pass(self, step: int) -> None:
        """A pass of the loader starts at `step`; earlier batches may be forgotten."""
        earliest = self._place(step)[0] - 1  # whose last steps may still be looked at
        self._draws = {number: own for number, own in self._draws.items() if number >= earliest}

    def fingerprint(self) -> str:
        """Returns a hash of a public order of the records; empty for a secret one."""
        return "" if self.is_secret else hash_of(self._drawn(0).order)

    def why_not_resumable(self, step: int) -> str:
        """Returns the reason why a run needs the private state to go on after a step, or ""."""
        if not self.is_secret or self.is_seeded or self.draws_every_step or not step:
            return ""
        if self.repeats:
            return "the batches of the records, which stay the same for the whole run"
        return (
            "the batches of the epoch that it is in the middle of" if self._place(step)[1] else ""
        )

    def private_state(self, step: int) -> dict[str, Any]:
        """Returns plain types that restore what was drawn for step `step` and later. Secret."""
        first = self._place(step)[0] if self.is_secret else math.inf
        kept = {number: own for number, own in self._draws.items() if number >= first}
        return {"draws": {k: [own.order.tolist(), list(own.ends)] for k, own in kept.items()}}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `private_state`; raises ValueError, and changes nothing, for other records."""
        draws = {int(k): _Draw(np.asarray(o, np.int64), e) for k, (o, e) in state["draws"].items()}
        if not all(np.isin(own.order, self.records).all() for own in draws.values()):
            raise ValueError(
                "Expected batches of the same records in the private state, got others. Load "
                "the checkpoint into a run of the same data set."
            )
        self._draws = draws

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.order.value} batches>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.is_secret:
            raise UnsupportedRunError(
                f"A {self.order.value} order cannot be copied or pickled: it has to stay secret. "
                "Use the loader that make_private returned."
            )
        return super().__reduce_ex__(protocol)


@attrs.frozen(eq=False)
class _Draw:
    """Batches of an epoch or a step: records in the order of use, where each batch ends."""

    order: Any
    ends: Sequence[int]

    def part(self, index: int) -> slice:
        return slice(self.ends[index - 1] if index else 0, self.ends[index])


class EqualPlan(BatchPlan):
    """Batches of b records in the same order in every epoch, or in a new one (RESHUFFLED).

    With `keys` the order of the records is a uniform permutation of them.
    """

    @property
    def description(self) -> str:
        """The checked properties of the batches, in words."""
        kind = "the fixed order" if self._keys is None else "one order, drawn at random"
        kind = kind if self.repeats else "an order drawn anew for every epoch"
        return f"indices of the batches: b each, in {kind}, each once per epoch, one step each"

    def num_rows(self, step: int) -> int:
        """The number of records of a step."""
        return self.batch_size

    def _drawn(self, number: int) -> _Draw:
        size, order = len(self.records), self.records
        if self._keys is not None:
            order = _taken(order, self._keys.permutation(number, size))  # type: ignore[assignment]
        return _Draw(order, range(self.batch_size, size + 1, self.batch_size))


class BinsPlan(BatchPlan):
    """Every record draws a batch of the epoch by itself: once, or anew for every epoch.

    There are n/b batches in an epoch, rounded up. A draw takes as long as there are records. If
    more than `max_batch_size` are in one batch, a uniform subset of that many stays and the others
    are DROPPED, for as long as the draw holds.
    """

    @property
    def description(self) -> str:
        """The checked properties of the batches, in words."""
        cap = "" if self.max_batch_size is None else f", at most {self.max_batch_size}"
        when = "once" if self.repeats else "anew for every epoch"
        return (
            f"indices of the batches: one of {self.num_batches} drawn by every record by itself, "
            f"{when}{cap}, one step each, empty batches included"
        )

    def _drawn(self, number: int) -> _Draw:
        keys, count, cap = self._keys, self.num_batches, self.max_batch_size
        assert keys is not None
        first = number * (count + 1)  # of the numbers of its draws
        bins = keys.bins(first, len(self.records), count)
        places, sizes = np.argsort(bins, kind="stable"), np.bincount(bins, minlength=count)
        if cap is not None:
            batches = np.split(places, np.cumsum(sizes)[:-1])
            for index, own in enumerate(batches):
                if len(own) > cap:
                    batches[index] = own[keys.subset(first + 1 + index, len(own), cap)]
            places, sizes = np.concatenate(batches), np.minimum(sizes, cap)
        return _Draw(_taken(self.records, places), np.cumsum(sizes).tolist())


class SampledPlan(BatchPlan):
    """A fresh random batch in every step: POISSON and WITHOUT_REPLACEMENT (a uniform subset).

    POISSON: every record joins by itself at the sampling rate, rounded down to a multiple of
    2**-64. The size of a batch is drawn first, from the binomial law but for less than 2**-200 in
    total variation, then a uniform subset of that size, in the time of the batch. If more than
    `max_batch_size` join, a uniform subset of that many stays and the others are DROPPED; nothing
    is drawn again, which would change the law of the batch with the data.
    """

    draws_every_step = True

    @functools.cached_property
    def _law(self) -> Binomial | None:
        if self.order is not BatchOrder.POISSON:
            return None
        records, rate = len(self.records), self.sampling_rate
        rate = self.batch_size / records if rate is None else rate
        return Binomial(records, int(rate * _KEY_RANGE))

    @property
    def description(self) -> str:
        """The checked properties of the batches, in words."""
        if self.order is BatchOrder.WITHOUT_REPLACEMENT:
            return "indices of the batches: b records drawn anew for every step, one step each"
        cap = "" if self.max_batch_size is None else f", at most {self.max_batch_size}"
        rate = "b/n"
        if self.sampling_rate is not None:
            is_inverse = self.sampling_rate == 1 / self.num_batches
            rate = f"1/{self.num_batches}" if is_inverse else f"{self.sampling_rate:.8g}"
        return (
            "indices of the batches: every record drawn by itself for every step with probability "
            f"{rate}{cap}, one step each, empty batches included"
        )

    def _place(self, step: int) -> tuple[int, int]:
        return step, 0

    def _drawn(self, number: int) -> _Draw:
        chosen = _taken(self.records, self._draw(number))
        return _Draw(chosen, [len(chosen)])

    def _draw(self, step: int) -> np.ndarray:
        assert self._keys is not None
        size = self.batch_size if self._law is None else self._keys.size(step, self._law)
        size = size if self.max_batch_size is None else min(size, self.max_batch_size)
        return self._keys.subset(step, len(self.records), size)


def plan_of(
    order: BatchOrder,
    records: Sequence[int],
    batch_size: int,
    keys: RandomKeys,
    *,
    max_batch_size: int | None = None,
    sampling_rate: float | None = None,
    num_batches: int | None = None,
    drops: bool = False,
    how: str,
) -> BatchPlan:
    """Returns the batches of a run over `records`.

    Opacus samples Poisson batches at a rate of 1/num_batches and divides by n/num_batches, rounded
    down. Where b does not divide n, that is a little less than b/n.

    Args:
        order: Batch order that is accounted.
        records: Indices of all n records.
        batch_size: b; FULL has one batch of all records, whatever it is.
        keys: Source of what is drawn.
        max_batch_size: Cap of batches of random sizes, or None.
        sampling_rate: Constant rate of those batches, whose divisor b is then constant; or None.
        num_batches: Poisson batches of one pass, as the user's loader counts them; None for n/b,
            rounded up.
        drops: True to leave out the last records that fill no equal batch.
        how: Words with which the user says so, for an error.

    Raises:
        UnsupportedRunError: Equal batches cannot be made.
    """
    size = len(records)
    if order is BatchOrder.FULL:
        return EqualPlan(records, size, order)
    if order is BatchOrder.POISSON and sampling_rate is None:
        rate = 1 / (num_batches or -(-size // batch_size))
        batch_size = max(1, int(size * rate))  # as in Opacus, to the last bit
        sampling_rate = None if rate == batch_size / size else rate
    elif order in BINS and sampling_rate is None:
        batch_size = min(batch_size, size)
    if order in OF_RANDOM_SIZE:
        kind = BinsPlan if order in BINS else SampledPlan
        return kind(records, batch_size, order, keys, max_batch_size, sampling_rate)
    if batch_size > size:
        raise UnsupportedRunError(
            f"Expected batch_size <= {size}, the number of records, got {batch_size}. Lower it."
        )
    if order is BatchOrder.WITHOUT_REPLACEMENT:
        return SampledPlan(records, batch_size, order, keys)
    used = size // batch_size * batch_size
    if used < size and not drops:
        raise UnsupportedRunError(
            f"Expected a batch_size that divides the {size} records, got {batch_size}: "
            f"{order.value} batches must all have the same size. Pass {how} to use only the first "
            f'{used} records, or use batch_order="poisson" or "without_replacement", which take '
            "any batch size."
        )
    if used < size:
        _logger.info(
            "%s: batches of %d use the first %d of %d records; dataset_size is %d",
            how, batch_size, used, size, used,
        )  # fmt: skip
    is_fixed = order is BatchOrder.CYCLIC
    return EqualPlan(records[:used], batch_size, order, None if is_fixed else keys)


def _taken(records: Sequence[int], places: np.ndarray) -> np.ndarray:
    """Returns the records at these places; of a range no array of all is made."""
    if isinstance(records, range):
        return records.start + records.step * places
    taken: np.ndarray = np.asarray(records)[places]
    return taken


def hash_of(records: Sequence[int] | np.ndarray) -> str:
    """Returns a hash of indices in their order, some at a time."""
    found = hashlib.sha256()
    for start in range(0, len(records), _AT_ONCE):
        part = np.asarray(records[start : start + _AT_ONCE], dtype=np.int64)
        found.update(part.tobytes())
    return found.hexdigest()
