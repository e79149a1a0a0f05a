"""The processes that train one run together: what they agree on, and what they add up."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import attrs
import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.batch_plans import Share
from hidden_state_adapters.opacus.loader import tensors_of

WRAPPERS = (DifferentiallyPrivateDistributedDataParallel, DistributedDataParallel)
"""Opacus' wrapper for several processes, and torch's."""
_T = TypeVar("_T")
_SECRET_BYTES = 32

News = tuple[str, str]
"""An event that one process was told of: a kind and a text."""


class AgreedError(UnsupportedRunError):
    """An error that ended a step in all processes, with the same text; nobody has to be told."""


class Totals(NamedTuple):
    """Number of records of a whole batch, and the largest norm of their gradients: data."""

    rows: int
    largest_norm: float

    def __repr__(self) -> str:
        return "Totals"  # no text shows how large a batch was


class _Vote(NamedTuple):
    """The part of one process in the vote of a step, which the run may not allow at all."""

    settings: str = ""
    totals: Totals = Totals(0, 0.0)
    refusal: str = ""
    is_admitted: bool = True
    news: tuple[News, ...] = ()


class ProcessGroup:
    """The processes of `torch.distributed` that train one run, seen from one of them.

    Every logical step has one vote, on the host: each process says whether its checks let the step
    pass, with which settings, and what it was told since the step before. One that refuses ends the
    run in all of them, with the same text. Then sums are added up. Both have process groups of
    their own, between which the loop cannot get. A process that ended, or does not answer within
    the timeout of `torch.distributed.init_process_group`, is an error in all others.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        share: Part of every batch that this process uses.
        heard: Function that is called with the news of another process.
        secret: Random bytes that process 0 drew from the operating system for the run at hand.
        run_id: Name of the run.
    """

    secret, run_id = b"", ""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.share = Share(self.rank, self.size)
        self._whole = distributed.group.WORLD
        patience = _patience()
        self._talk = distributed.new_group(backend="gloo", timeout=patience)
        self._sums = distributed.new_group(timeout=patience)
        self.heard: Callable[[News], None] = lambda news: None
        self._news: list[News] = []

    @property
    def is_current(self) -> bool:
        """True if it belongs to the default process group that there is now."""
        return _is_initialized() and distributed.group.WORLD is self._whole

    @property
    def draws_noise(self) -> bool:
        """True in process 0, which draws the noise of the run, once."""
        return self.rank == 0

    @property
    def assumptions(self) -> Sequence[Assumption]:
        """The checked and the declared assumptions about the processes."""
        return (
            Assumption.checked(
                f"{self.size} processes with disjoint parts of every batch: the same steps and "
                "settings in all, sums added up once, noise drawn once"
            ),
            Assumption.declared("an index is the same record in all processes"),
            Assumption.declared(
                "a release or a look after the last step is known where epsilon is asked for"
            ),
        )

    def start_run(self) -> None:
        """Takes the secret and the name of a run from process 0; no news of an earlier one stay."""
        drawn = secrets.token_bytes(_SECRET_BYTES), secrets.token_hex(16)
        self.secret, self.run_id = self._exchanged(drawn)[0]
        self._news = []

    def agreed(
        self, prepare: Callable[[], _T], fields: Callable[[_T], Mapping[str, Any]] | None = None
    ) -> _T:
        """Returns what `prepare` returns, if it raises nowhere and its `fields` are equal in all.

        Fields are plain values by name. A value that is not for the eye is a `Digest`.

        Raises:
            UnsupportedRunError: `prepare` raised in another process, or a field differs.
        """
        made: Any = None
        problem: Exception | None = None
        described: dict[str, Any] = {}
        try:
            made = prepare()
            described = {} if fields is None else dict(fields(made))
        except Exception as error:  # whatever it may be, nobody may wait for this process
            problem = error
        told = self._exchanged((None if problem is None else str(problem), described))
        if problem is not None:
            raise problem
        first = told[0][1]
        for rank, (text, others) in enumerate(told):
            if text is not None:
                raise UnsupportedRunError(f"Process {rank} of {self.size} refused: {text}")
            for name in dict.fromkeys((*first, *others)):  # the first that differs, in all alike
                if first.get(name) != others.get(name):
                    raise UnsupportedRunError(
                        f"Expected the same {name} in all processes, got {first.get(name)!r} in "
                        f"process 0 and {others.get(name)!r} in process {rank}: one run has one "
                        "program. Start the same script with the same arguments, data, seed of "
                        "the initial model and versions everywhere."
                    )
        return made  # type: ignore[no-any-return]

    def tell(self, kind: str, text: str) -> None:
        """Tells the others at the next step of an event here (a release, an assumption)."""
        if (kind, text) not in self._news:
            self._news.append((kind, text))

    def agree(self, settings: str, rows: int, largest_norm: float) -> Totals:
        """Votes for a step; `settings` are all that has to be the same, in words.

        Returns:
            Figures of the whole batch.

        Raises:
            AgreedError: Another process refuses, steps with other settings, or does not answer.
        """
        votes = self._vote(_Vote(settings, Totals(rows, largest_norm)))
        for rank, vote in enumerate(votes):
            if vote.settings != votes[0].settings:
                raise AgreedError(
                    f"The processes take different steps: process 0 has {votes[0].settings}, "
                    f"process {rank} has {vote.settings}. Every process takes every step, with the "
                    "same settings; schedulers step in all of them."
                )
        counts, norms = zip(*(vote.totals for vote in votes), strict=True)
        return Totals(sum(counts), max(norms))

    def refuse(self, text: str, *, is_admitted: bool) -> None:
        """Votes against a step; `is_admitted` is False if the run allows no step at all.

        Raises:
            AgreedError: Not all processes found, before they looked at a gradient, that there is no
                step; with a text that is the same in all of them.
        """
        try:
            self._vote(_Vote(refusal=text, is_admitted=is_admitted))
        except _LostError as lost:
            raise AgreedError(f"{text} (Not all of the others could be told. {lost})") from None

    def _vote(self, own: _Vote) -> list[_Vote]:
        """Returns the votes of all; raises AgreedError if one refuses, but for all alike."""
        votes = self._exchanged(own._replace(news=tuple(self._news)))
        told, self._news = self._news, []
        for news in dict.fromkeys(news for vote in votes for news in vote.news):
            if news not in told:
                self.heard(news)
        for rank, vote in enumerate(votes):
            if vote.refusal and any(other.is_admitted for other in votes):
                raise AgreedError(f"Process {rank} of {self.size} refused: {vote.refusal}")
        return votes

    def _exchanged(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in their order."""
        found: list[Any] = [None] * self.size
        _answered(distributed.all_gather_object, found, value, group=self._talk)
        return found

    @torch.no_grad()
    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces every tensor by the sum of those of all processes; equal in all of them."""
        for kind in dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors):
            parts = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind]
            together = torch.cat([part.reshape(-1) for part in parts])
            _answered(distributed.all_reduce, together, group=self._sums)
            sums = together.split([part.numel() for part in parts])
            for part, total in zip(parts, sums, strict=True):
                part.copy_(total.view_as(part))


@attrs.frozen
class Digest:
    """A hash of values that are compared between processes and shown to nobody."""

    value: str = attrs.field(repr=False)

    @classmethod
    def of(cls, *values: Any) -> Digest:
        """Returns a hash of all tensors in containers, or else of the words for a value."""
        found = hashlib.sha256()
        for value in values:
            tensors = [tensor.detach().cpu().contiguous() for tensor in tensors_of(value)]
            told = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
            found.update(repr(told or value).encode())
            for tensor in tensors:
                found.update(tensor.flatten().view(torch.uint8).numpy().data)
        return cls(found.hexdigest())


def num_processes(optimizer: Any = None) -> int:
    """Returns the number of processes, as far as torch or a distributed optimizer says."""
    count = distributed.get_world_size() if _is_initialized() else 1
    return max(count, getattr(optimizer, "world_size", 1))


def trains_together(module: nn.Module, distributed: bool | None) -> bool:
    """Tells whether several processes are to train a module together.

    Raises:
        UnsupportedRunError: They cannot, or nobody said whether they do.
    """
    _refuse_shards(module)
    count, is_wrapped = num_processes(), isinstance(module, WRAPPERS)
    if distributed and not _is_initialized():
        raise UnsupportedRunError(
            "Expected torch.distributed.init_process_group before make_private with "
            "distributed=True, got no process group. Start the script with torchrun, and call it "
            "first."
        )
    if count == 1:
        return False
    if distributed is False or not (is_wrapped or distributed):
        raise UnsupportedRunError(
            f"Expected a model in Opacus' DPDDP (or distributed=True), got distributed = "
            f"{distributed} and {type(module).__name__} in a group of {count} processes: whether "
            "they train one model together or one each, on the same records, would be two "
            "different guarantees. Wrap it: "
            "opacus.distributed.DifferentiallyPrivateDistributedDataParallel(model). Models of "
            "their own train in processes without a common group."
        )
    return True


def _refuse_shards(module: nn.Module) -> None:
    kind = type(module).__name__
    if "FSDP" in kind:
        raise UnsupportedRunError(
            f"Expected whole parameters in every process, got {kind}: FSDP leaves each process a "
            "shard of them, so that nobody sees the parameters that the steps are compared with, "
            "nor the whole gradient of a record that a clip is about; and Opacus clips sharded "
            "models by a second backward pass, whose sum holds more than its norms know. Use "
            "Opacus' DPDDP, with BatchMemoryManager or ghost clipping where memory is short."
        )
    if isinstance(module, nn.DataParallel):
        raise UnsupportedRunError(
            "Expected one process for each device, got nn.DataParallel, whose copies of the model "
            "leave their per-example gradients where no step finds them. Start one process for "
            "each device, with Opacus' DPDDP."
        )


def _is_initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()


class _LostError(AgreedError):
    """A process of the run is gone."""


def _answered(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Calls a function of torch.distributed; raises _LostError if a process does not answer."""
    try:
        function(*args, **options)
    except RuntimeError as error:
        raise _LostError(
            "Another process of the run ended or did not answer in time, so the run ends here, "
            "too. (The timeout is that of torch.distributed.init_process_group.) Look at the "
            f"output of the others; torch.distributed says: {error}"
        ) from error


def _patience() -> timedelta | None:
    """Returns the timeout of the default process group; None, torch's own, where it has none."""
    whole: Any = distributed.group.WORLD
    for device in ("cpu", "cuda"):
        with contextlib.suppress(AttributeError, RuntimeError):
            found = whole._get_backend(torch.device(device)).options._timeout
            return found if isinstance(found, timedelta) else None
    return None
