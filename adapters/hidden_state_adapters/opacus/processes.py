"""The processes that train one run together: what they agree on, and what they add up."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
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


class AgreedError(UnsupportedRunError):
    """An error that ended a step in all processes, with the same text; nobody has to be told."""


class Totals(NamedTuple):
    """Number of records of a whole batch, and the largest norm of their gradients: data."""

    rows: int
    largest_norm: float

    def __repr__(self) -> str:
        return "Totals"  # no text shows how large a batch was


class ProcessGroup:
    """The processes of `torch.distributed` that train one run, seen from one of them.

    Every logical step has one vote, on the host, and then one sum. Both have process groups of
    their own, between which the loop cannot get.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        share: Part of every batch that this process uses.
        secret: Random bytes that process 0 drew from the operating system for the run at hand.
        run_id: Name of the run.
    """

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.share = Share(self.rank, self.size)
        self._talk, self._sums = distributed.new_group(backend="gloo"), distributed.new_group()

    def start_run(self, hear: Callable[[str, str], None]) -> None:
        """Takes secret and name of a run from process 0; `hear` is told what others were told."""
        drawn = secrets.token_bytes(_SECRET_BYTES), secrets.token_hex(16)
        self.secret, self.run_id = self._gathered(drawn)[0]
        self._hear, self._news = hear, list[tuple[str, str]]()

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

    def agreed(
        self, prepare: Callable[[], _T], fields: Callable[[_T], Mapping[str, Any]] | None = None
    ) -> _T:
        """Returns what `prepare` does, if it raises nowhere and its `fields` are equal in all."""
        made: Any = None
        problem, described = None, {}
        try:
            made = prepare()
            described = {} if fields is None else dict(fields(made))
        except Exception as error:  # whatever it may be, nobody may wait for this process
            problem = error
        told = self._gathered((None if problem is None else str(problem), described))
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
                        f"process 0 and {others.get(name)!r} in process {rank}. Start one script "
                        "with the same arguments, data, initial model and versions everywhere."
                    )
        return made  # type: ignore[no-any-return]

    def tell(self, kind: str, text: str) -> None:
        """Tells the others at the next step of an event here (a release, an assumption)."""
        self._news.append((kind, text))

    def agree(
        self,
        settings: str = "",
        rows: int = 0,
        largest_norm: float = 0.0,
        *,
        refusal: str = "",
        is_admitted: bool = True,
    ) -> Totals:
        """Votes for a step or against it, and returns the figures of the whole batch.

        Args:
            settings: All that has to be the same in all processes, in words.
            rows: Number of records here.
            largest_norm: Largest norm of their gradients.
            refusal: Reason against the step, or "".
            is_admitted: False if the run allows no step at all, whatever the gradients are.

        Raises:
            AgreedError: A process refuses a step that another one would take, steps with other
                settings or is gone; with the same text in all of them.
        """
        own = settings, rows, largest_norm, refusal, is_admitted, tuple(self._news)
        try:
            votes = self._gathered(own)
        except RuntimeError as error:
            raise AgreedError(
                f"Another process of the run ended or did not answer in time: {error}"
            ) from error
        told, counts, norms, refusals, admitted, news = zip(*votes, strict=True)
        for kind, text in dict.fromkeys(itertools.chain.from_iterable(news)):
            if (kind, text) not in self._news:
                self._hear(kind, text)
        self._news.clear()
        for rank in range(self.size):
            if refusals[rank] and any(admitted):
                raise AgreedError(f"Process {rank} of {self.size} refused: {refusals[rank]}")
            if told[rank] != told[0] and not any(refusals):
                raise AgreedError(
                    f"The processes take different steps: process 0 has {told[0]}, process {rank} "
                    f"has {told[rank]}. Every process takes every step, with the same settings; "
                    "schedulers step in all of them."
                )
        return Totals(sum(counts), max(norms))

    def _gathered(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in their order."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._talk)
        return found

    @torch.no_grad()
    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces every tensor by the sum of those of all processes; equal in all of them."""
        for kind in dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors):
            parts = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind]
            together = torch.cat([part.reshape(-1) for part in parts])
            distributed.all_reduce(together, group=self._sums)
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
    is_initialized = distributed.is_available() and distributed.is_initialized()
    count = distributed.get_world_size() if is_initialized else 1
    return max(count, getattr(optimizer, "world_size", 1))


def trains_together(module: nn.Module, distributed: bool | None) -> bool:
    """Tells whether several processes are to train a module together."""
    kind, count = type(module).__name__, num_processes()
    if "FSDP" in kind:
        raise UnsupportedRunError(
            f"Expected whole parameters in every process, got {kind}: a shard shows neither the "
            "parameters nor the whole gradient of a record. Use Opacus' DPDDP, with "
            "BatchMemoryManager or ghost clipping where memory is short."
        )
    if count == 1:
        if distributed and not torch.distributed.is_initialized():
            raise UnsupportedRunError(
                "Expected torch.distributed.init_process_group before make_private with "
                "distributed=True, got no process group. Start the script with torchrun."
            )
        return False
    if distributed is False or not (isinstance(module, WRAPPERS) or distributed):
        raise UnsupportedRunError(
            f"Expected a model in Opacus' DPDDP (or distributed=True), got distributed = "
            f"{distributed} and {kind} in a group of {count} processes: one model together or one "
            "each would be two different guarantees. Wrap it."
        )
    return True
