"""Which records each step of a run uses: one plan for each kind of batch order.

No plan needs a training framework; every adapter that owns its data deals its batches by one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from hidden_state_accountants import BatchOrder, UnsupportedRunError
from hidden_state_accountants.events.batch_order import batches_per_pass
from hidden_state_adapters.binomial import DRAWN_BITS, Binomial

_KEY_RANGE = 2**64
_AT_ONCE = 2**22  # records: a data set may have far more than there is memory for
_KEYS, _SIZE, _PLACES = range(3)  # what random integers are for; places are drawn several times


@attrs.frozen
class RandomKeys:
    """Independent uniform 64-bit integers: what every random order is made from.

    Attributes:
        seed: None reads the operating system's cryptographic source; there is no state that could
            leak. A seed makes draw number k a function of (seed, k).
        secret: Of several processes that need the same integers: bytes that one of them read from
            the operating system's source. Draw number k is SHAKE-128 of them and k, which nobody
            tells from uniform integers who does not know them (FIPS 202). Without a seed only.
    """

    seed: int | None = attrs.field(default=None, repr=False)
    secret: bytes | None = attrs.field(default=None, repr=False)

    def draw(self, number: int, count: int) -> np.ndarray:
        """Draw number `number`, shape (count,), dtype uint64."""
        return self._words(number, count, _KEYS)

    def _words(self, number: int, count: int, use: int) -> np.ndarray:
        """Uniform 64-bit integers; with a seed or a secret, others for every number and use."""
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
        """How many records join the batch of draw `number`."""
        words = self._words(number, DRAWN_BITS // 64, _SIZE)
        return law.at(int.from_bytes(words.tobytes(), "little"))

    def subset(self, number: int, count: int, size: int) -> np.ndarray:
        """A uniform subset of range(count), in its order: draw `number`.

        Places are drawn until there are `size` different ones, so that no record is asked that is
        not drawn. What is found has exactly the law of a uniform subset: to exchange two records
        exchanges draws that are equally likely, and when to stop depends on numbers only.

        Args:
            number: Of the draw.
            count: Records, >= 1.
            size: 0 to `count`.

        Returns:
            Shape (size,), dtype int64.
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
        """Independent uniform integers below `bins`, shape (count,): draw `number`."""
        last = np.uint64(_KEY_RANGE - _KEY_RANGE % bins - 1)  # above it some bins were likelier
        words, use = self._words(number, count, _PLACES).copy(), _PLACES
        while len(again := np.flatnonzero(words > last)):
            use += 1
            words[again] = self._words(number, len(again), use)
        return (words % np.uint64(bins)).astype(np.uint16 if bins <= 2**16 else np.int64)

    def permutation(self, number: int, count: int) -> np.ndarray:
        """A uniform permutation of range(count), up to the 2**-64 chance of equal keys."""
        return np.argsort(self.draw(number, count), kind="stable")


@attrs.frozen
class Share:
    """Which records of every batch one of several processes uses: every `count`-th one.

    The shares of all processes are disjoint, and together they are the batch. Their sizes differ by
    one at most.

    Attributes:
        rank: Of the process, from 0 on.
        count: Processes.
    """

    rank: int = 0
    count: int = 1

    @property
    def part(self) -> str:
        """What it is, in words."""
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
        share: What this process uses of every batch; all of it, unless another one is assigned.
        max_batch_size: The cap of batches of random sizes, or None.
        sampling_rate: The probability with which a record joins a batch of random size, if it is
            not b/n; or None.
        dataset_size: Number of records as the event has it; another one may be assigned where it
            is what the relation hides.

    Args:
        records: The indices of all records, in an order that does not depend on them; public.
        batch_size: b; the expected size for POISSON.
        order: The batch order that is accounted.
        keys: Where the randomness comes from, or None.
    """

    share = Share()
    max_batch_size: int | None = None
    sampling_rate: float | None = None
    draws_every_step = False  # a step is not one of l steps of an epoch

    def __init__(
        self, records: Sequence[int], batch_size: int, order: BatchOrder, keys: RandomKeys | None
    ):
        self.records, self.batch_size, self.order, self._keys = records, batch_size, order, keys
        self.dataset_size = len(records)

    @property
    def num_batches(self) -> int:
        """Batches of one pass of the loader."""
        return batches_per_pass(self.batch_size, len(self.records), self.sampling_rate)

    @property
    def is_secret(self) -> bool:
        """Whether the guarantee needs that nobody learns which records a step used."""
        return self.order not in (BatchOrder.CYCLIC, BatchOrder.FULL)

    @property
    def is_seeded(self) -> bool:
        """Whether the user's seed fixes everything that is drawn."""
        return self._keys is not None and self._keys.seed is not None

    @property
    def is_shared(self) -> bool:
        """Whether a secret that several processes have fixes everything that is drawn."""
        return self._keys is not None and self._keys.secret is not None

    @property
    def description(self) -> str:
        """What is checked about the batches, in words."""
        raise NotImplementedError

    def batch(self, step: int) -> list[int]:
        """The indices of the records of step `step` >= 0."""
        raise NotImplementedError

    def num_rows(self, step: int) -> int:
        """The number of records of a step whose batch was drawn."""
        return self.batch_size

    def own_batch(self, step: int) -> list[int]:
        """What this process uses of the batch of step `step` >= 0."""
        return self.share.of(self.batch(step))

    def own_rows(self, step: int) -> int:
        """The number of records of `own_batch`, of a step whose batch was drawn."""
        return self.share.rows(self.num_rows(step))

    def start_pass(self, step: int) -> None:
        """A pass of the loader starts at `step`; earlier batches may be forgotten."""

    def fingerprint(self) -> str:
        """A hash of a public order of the records; empty for a secret one."""
        return ""

    def why_not_resumable(self, step: int) -> str:
        """Why a run after `step` steps needs the private state to go on, or ""."""
        return ""

    def private_state(self, step: int) -> dict[str, Any]:
        """Plain types that restore what was drawn for step `step` and later. Secret."""
        return {}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `private_state` returned.

        Raises:
            ValueError: The state is of other records; nothing is changed.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.order.value} batches>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.is_secret:
            raise UnsupportedRunError(
                f"A {self.order.value} order cannot be copied or pickled: it has to stay secret. "
                "Use the loader that make_private returned."
            )
        return super().__reduce_ex__(protocol)


class FixedPlan(BatchPlan):
    """The same batches in the same order in every epoch: CYCLIC, FULL and SHUFFLED_ONCE.

    With `keys` the order of the records is one uniform permutation of them.
    """

    def __init__(
        self,
        records: Sequence[int],
        batch_size: int,
        order: BatchOrder,
        keys: RandomKeys | None = None,
    ):
        super().__init__(records, batch_size, order, keys)
        self._sequence = (
            records
            if keys is None
            else _taken(_indexed(records), keys.permutation(0, len(records)))
        )

    @property
    def description(self) -> str:
        """What is checked about the batches, in words."""
        kind = "one order, drawn at random" if self._keys is not None else "the fixed order"
        return f"indices of the batches: b each, in {kind}, each once per epoch, one step each"

    def batch(self, step: int) -> list[int]:
        """The indices of the records of step `step` >= 0."""
        start = step % self.num_batches * self.batch_size
        return [int(index) for index in self._sequence[start : start + self.batch_size]]

    def fingerprint(self) -> str:
        """A hash of a public order of the records; empty for a secret one."""
        if self.is_secret:
            return ""
        return hash_of(self._sequence)

    def why_not_resumable(self, step: int) -> str:
        """Why a run after `step` steps needs the private state to go on, or ""."""
        if not self.is_secret or self.is_seeded or not step:
            return ""
        return "the order of the records, which stays the same for the whole run"

    def private_state(self, step: int) -> dict[str, Any]:
        """Plain types that restore what was drawn for step `step` and later. Secret."""
        return {"order": [int(index) for index in self._sequence]} if self.is_secret else {}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `private_state` returned."""
        if self.is_secret:
            self._sequence = _restored(state["order"], self.records)


class ReshuffledPlan(BatchPlan):
    """A fresh uniform permutation of the records in every epoch."""

    def __init__(self, records: Sequence[int], batch_size: int, keys: RandomKeys):
        super().__init__(records, batch_size, BatchOrder.RESHUFFLED, keys)
        self._random, self._records = keys, _indexed(records)
        self._epoch, self._sequence = -1, np.arange(0)

    @property
    def description(self) -> str:
        """What is checked about the batches, in words."""
        return (
            "indices of the batches: b each, in an order drawn anew for every epoch, each once per "
            "epoch, one step each"
        )

    def batch(self, step: int) -> list[int]:
        """The indices of the records of step `step` >= 0."""
        epoch, index = divmod(step, self.num_batches)
        if epoch != self._epoch:
            assert epoch > self._epoch, "the order of an earlier epoch is gone"
            permutation = self._random.permutation(epoch, len(self.records))
            self._epoch, self._sequence = epoch, _taken(self._records, permutation)
        start = index * self.batch_size
        return [int(i) for i in self._sequence[start : start + self.batch_size]]

    def why_not_resumable(self, step: int) -> str:
        """Why a run after `step` steps needs the private state to go on, or ""."""
        if self.is_seeded or step % self.num_batches == 0:
            return ""
        return "the order of the epoch that it is in the middle of"

    def private_state(self, step: int) -> dict[str, Any]:
        """Plain types that restore what was drawn for step `step` and later. Secret."""
        if self._epoch != step // self.num_batches:
            return {"epoch": -1}
        return {"epoch": self._epoch, "order": [int(index) for index in self._sequence]}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `private_state` returned."""
        self._epoch = int(state["epoch"])
        if self._epoch >= 0:
            self._sequence = _restored(state["order"], self.records)


class BinsPlan(BatchPlan):
    """Every record draws a batch of the epoch by itself: once, or anew for every epoch.

    It takes as long as there are records, once or in every epoch. If more than `max_batch_size` are
    in one batch, a uniform subset of that many stays and the others are DROPPED, for as long as the
    draw holds.

    Args:
        records: The indices of all records.
        batch_size: b, what a step divides by; there are n/b batches in an epoch, rounded up.
        order: BALLS_IN_BINS or BALLS_IN_BINS_REDRAWN.
        keys: Where the randomness comes from.
        max_batch_size: The cap, or None.
        sampling_rate: One over the number of batches in an epoch, if it is not to follow from the
            records; or None.
    """

    def __init__(
        self,
        records: Sequence[int],
        batch_size: int,
        order: BatchOrder,
        keys: RandomKeys,
        max_batch_size: int | None = None,
        sampling_rate: float | None = None,
    ):
        super().__init__(records, batch_size, order, keys)
        self._random, self._records, self.max_batch_size = keys, _indexed(records), max_batch_size
        self.sampling_rate, self._is_one_draw = sampling_rate, order is BatchOrder.BALLS_IN_BINS
        self._draws: dict[int, list[np.ndarray]] = {}  # batches by epoch

    @property
    def description(self) -> str:
        """What is checked about the batches, in words."""
        cap = "" if self.max_batch_size is None else f", at most {self.max_batch_size}"
        when = "once" if self._is_one_draw else "anew for every epoch"
        return (
            f"indices of the batches: one of {self.num_batches} drawn by every record by itself, "
            f"{when}{cap}, one step each, empty batches included"
        )

    def _place(self, step: int) -> tuple[int, int]:
        """The draw that a step is of, and its batch."""
        epoch, batch = divmod(step, self.num_batches)
        return (0 if self._is_one_draw else epoch), batch

    def batch(self, step: int) -> list[int]:
        """The indices of the records of step `step` >= 0."""
        draw, batch = self._place(step)
        if draw not in self._draws:
            assert draw > max(self._draws, default=-1), "the draw of an earlier epoch is gone"
            self._draws[draw] = self._drawn(draw)
        found: list[int] = self._draws[draw][batch].tolist()
        return found

    def _drawn(self, draw: int) -> list[np.ndarray]:
        number, cap = self.num_batches, self.max_batch_size
        first = draw * (number + 1)  # of the numbers of its draws
        bins = self._random.bins(first, len(self.records), number)
        places = np.argsort(bins, kind="stable")
        batches = np.split(places, np.cumsum(np.bincount(bins, minlength=number))[:-1])
        for index, own in enumerate(batches):
            if cap is not None and len(own) > cap:
                batches[index] = own[self._random.subset(first + 1 + index, len(own), cap)]
        return [_taken(self._records, own) for own in batches]

    def num_rows(self, step: int) -> int:
        """The number of records of a step whose batch was drawn."""
        draw, batch = self._place(step)
        return len(self._draws[draw][batch])

    def start_pass(self, step: int) -> None:
        """A pass of the loader starts at `step`; earlier batches may be forgotten."""
        earliest = self._place(step)[0] - 1  # whose last steps may still be looked at
        self._draws = {draw: found for draw, found in self._draws.items() if draw >= earliest}

    def why_not_resumable(self, step: int) -> str:
        """Why a run after `step` steps needs the private state to go on, or ""."""
        if self.is_seeded or not step:
            return ""
        if self._is_one_draw:
            return "the batches of the records, which stay the same for the whole run"
        return (
            "the batches of the epoch that it is in the middle of" if self._place(step)[1] else ""
        )

    def private_state(self, step: int) -> dict[str, Any]:
        """Plain types that restore what was drawn for step `step` and later. Secret."""
        first = self._place(step)[0]
        kept = {draw: found for draw, found in self._draws.items() if draw >= first}
        return {"draws": {k: [own.tolist() for own in found] for k, found in kept.items()}}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `private_state` returned."""
        draws = {
            int(draw): [np.asarray(own, dtype=np.int64) for own in found]
            for draw, found in state["draws"].items()
        }
        for found in draws.values():
            held = np.concatenate(found)
            is_once = len(np.unique(held)) == len(held) and np.isin(held, self._records).all()
            if len(found) != self.num_batches or not is_once:
                raise ValueError("The private state is damaged: a batch holds unknown records.")
        self._draws = draws


class SampledPlan(BatchPlan):
    """A fresh random batch in every step: POISSON and WITHOUT_REPLACEMENT.

    POISSON: every record joins by itself at the sampling rate, rounded down to a multiple of
    2**-64. So the size of a batch is binomial, and all batches of one size are equally likely:
    the size is drawn first, and then a uniform subset, which takes as long as the batch is large,
    however many records there are. The distance in total variation is that of `Binomial`, below
    2**-200 for a step. If more than `max_batch_size` join, a uniform subset of that many stays and
    the others are DROPPED; nothing is drawn again, which would change the law of the batch with the
    data.

    WITHOUT_REPLACEMENT: a uniform subset of b records.

    Args:
        records: The indices of all records.
        batch_size: b; of POISSON batches what a step divides by.
        order: POISSON or WITHOUT_REPLACEMENT.
        keys: Where the randomness comes from.
        max_batch_size: The cap of POISSON batches, or None.
        sampling_rate: The rate of POISSON batches, if it is not b/n; or None.
    """

    draws_every_step = True

    def __init__(
        self,
        records: Sequence[int],
        batch_size: int,
        order: BatchOrder,
        keys: RandomKeys,
        max_batch_size: int | None = None,
        sampling_rate: float | None = None,
    ):
        super().__init__(records, batch_size, order, keys)
        self._random, self._records, self.max_batch_size = keys, _indexed(records), max_batch_size
        self.sampling_rate = sampling_rate
        rate = batch_size / len(records) if sampling_rate is None else sampling_rate
        is_poisson = order is BatchOrder.POISSON
        self._law = Binomial(len(records), int(rate * _KEY_RANGE)) if is_poisson else None
        self._batches: dict[int, list[int]] = {}

    @property
    def description(self) -> str:
        """What is checked about the batches, in words."""
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

    def batch(self, step: int) -> list[int]:
        """The indices of the records of step `step` >= 0."""
        if step not in self._batches:
            self._batches[step] = _taken(self._records, self._draw(step)).tolist()
        return self._batches[step]

    def _draw(self, step: int) -> np.ndarray:
        size = self.batch_size if self._law is None else self._random.size(step, self._law)
        if self.max_batch_size is not None:
            size = min(size, self.max_batch_size)
        return self._random.subset(step, len(self.records), size)

    def num_rows(self, step: int) -> int:
        """The number of records of a step whose batch was drawn."""
        return len(self._batches[step])

    def start_pass(self, step: int) -> None:
        """A pass of the loader starts at `step`; earlier batches may be forgotten."""
        self._batches = {k: batch for k, batch in self._batches.items() if k >= step}

    def private_state(self, step: int) -> dict[str, Any]:
        """Plain types that restore what was drawn for step `step` and later. Secret."""
        return {"batches": {k: list(b) for k, b in self._batches.items() if k >= step}}

    def load_private_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `private_state` returned."""
        known = {int(index) for index in self.records}
        batches = {int(k): [int(i) for i in batch] for k, batch in state["batches"].items()}
        if any(len(set(b)) < len(b) or not known.issuperset(b) for b in batches.values()):
            raise ValueError("The private state is damaged: a batch holds unknown records.")
        self._batches = batches


def poisson_plan(
    records: Sequence[int],
    num_batches: int,
    keys: RandomKeys,
    max_batch_size: int | None = None,
) -> SampledPlan:
    """Poisson batches at the rate, and with the divisor, of Opacus' own engine.

    Opacus samples at a rate of 1/num_batches and divides by n/num_batches, rounded down. Where b
    does not divide n, that is a little less than b/n, and the accountants of Opacus report it so.

    Args:
        records: The indices of all n records.
        num_batches: Of one pass, as a loader of batches of b records counts them.
        keys: Where the randomness comes from.
        max_batch_size: The cap, or None.
    """
    rate, size = 1 / num_batches, len(records)
    divisor = max(1, int(size * rate))  # as in Opacus, to the last bit
    own = None if rate == divisor / size else rate
    return SampledPlan(records, divisor, BatchOrder.POISSON, keys, max_batch_size, own)


def _indexed(records: Sequence[int]) -> range | np.ndarray:
    """What `_taken` takes from; of a range no array of all is made."""
    return records if isinstance(records, range) else np.asarray(records)


def _taken(records: range | np.ndarray, places: np.ndarray) -> np.ndarray:
    """The records at these places."""
    if isinstance(records, range):
        return records.start + records.step * places
    taken: np.ndarray = records[places]
    return taken


def hash_of(records: Sequence[int] | np.ndarray) -> str:
    """A hash of indices in their order, some at a time."""
    found = hashlib.sha256()
    for start in range(0, len(records), _AT_ONCE):
        part = records[start : start + _AT_ONCE]
        if isinstance(part, range):
            part = np.arange(part.start, part.stop, part.step, dtype=np.int64)  # type: ignore[assignment]
        found.update(np.asarray(part, dtype=np.int64).tobytes())
    return found.hexdigest()


def _restored(order: Any, records: Sequence[int]) -> np.ndarray:
    sequence = np.asarray(order)
    if not np.array_equal(np.sort(sequence), np.sort(np.asarray(records))):
        raise ValueError(
            "Expected the order of the same records in the private state, got another. Load the "
            "checkpoint into a run of the same data set."
        )
    return sequence
