"""One row: what one accountant says about one run, and the list of all accountants."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation, pld, rdp

from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.bounds import BOUNDS, Bound
from hidden_state_accountants.curves.event_losses import stock_pld_error
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.guarantee import group_guarantee
from hidden_state_accountants.process.groups import run_of_groups

COMBINED = "LastIterateAccountant"
PROVEN, PUBLISHED = "proven", "published, NOT proven"
OTHER_ALGORITHM, UNMET = "ANOTHER ALGORITHM", "does not apply"

# A privacy loss distribution beyond this epsilon takes gigabytes; RDP is good enough there.
_LARGEST_PLD_EPSILON = 200.0
_MOST_NOISE_LEVELS = 100  # each costs a stock accountant up to seconds


@attrs.frozen
class Row:
    """What one accountant says about one run at one delta.

    Attributes:
        run: The label of the run.
        accountant: The name of the bound in `BOUNDS`, or of the accountant.
        delta: The delta that epsilon is for.
        epsilon: None if the accountant does not apply.
        theorem: What proves it.
        status: "proven", "published, NOT proven", "ANOTHER ALGORITHM" or "does not apply".
        seconds: Wall time of the accounting; what one row computes is reused for further deltas.
        note: Which condition fails and by how much, or what to know about the row.
        scope: Which records the epsilon is about, and what the others have; empty if about all.
    """

    run: str
    accountant: str
    delta: float
    epsilon: float | None
    theorem: str
    status: str
    seconds: float
    note: str
    scope: str = ""

    @property
    def remark(self) -> str:
        """Scope and note."""
        return "; ".join(filter(None, (self.scope and f"ONLY FOR {self.scope}", self.note)))


@attrs.frozen
class _Result:
    epsilon: Callable[[float], float]
    theorem: str
    status: str = PROVEN
    note: str = ""


_Method = tuple[str, Callable[[Any, NeighboringRelation], _Result]]


def _methods(event: dp_accounting.DpEvent, group_size: int) -> Iterator[_Method]:
    """Every way to account for the run: grows with `BOUNDS`."""
    for bound in BOUNDS:
        if isinstance(event, bound.event_type):
            yield bound.name, _bound(bound, group_size)
    yield COMBINED, functools.partial(_combined, group_size)
    if group_size > 1:  # stock accountants are about one record
        return
    yield "RdpAccountant", _stock_rdp
    yield "PLDAccountant", _stock_pld
    if isinstance(event, LastIterateDpEvent):
        if event.batch_order not in (BatchOrder.FULL, BatchOrder.POISSON):
            yield "Poisson batches, PLDAccountant", _poisson


def _bound(bound: Bound, group_size: int) -> Callable[[Any, NeighboringRelation], _Result]:
    def evaluate(event: Any, relation: NeighboringRelation) -> _Result:
        event = run_of_groups(event, relation, group_size)
        unmet = bound.check(event, relation)
        if unmet:
            raise UnsupportedRunError("; ".join(map(str, unmet)))
        guarantee = group_guarantee(bound.guarantee(event, relation), group_size)
        is_proven = bound.sound and not guarantee.caveat
        return _Result(
            guarantee.epsilon,
            guarantee.theorem,
            PROVEN if is_proven else PUBLISHED,
            guarantee.caveat,
        )

    return evaluate


def _combined(group_size: int, event: Any, relation: NeighboringRelation) -> _Result:
    accountant = LastIterateAccountant(relation, group_size=group_size).compose(event)
    return _Result(accountant.get_epsilon, accountant.guarantee.theorem, note="the smallest proven")


def _standard(event: Any, relation: NeighboringRelation) -> tuple[dp_accounting.DpEvent, float]:
    """The run as a standard event and the delta that a cap on its batches adds."""
    if not hasattr(event, "as_composition"):
        raise UnsupportedRunError(f"no standard event expresses a {type(event).__name__}")
    extra = 0.0
    if isinstance(event, LastIterateDpEvent):
        extra = event.cap_delta(relation)
        event = attrs.evolve(event, max_batch_size=None)
    composed = event.as_composition(relation, for_one_position=True)
    if isinstance(composed, dp_accounting.ComposedDpEvent):
        if len(composed.events) > _MOST_NOISE_LEVELS:
            raise UnsupportedRunError(
                f"{len(composed.events)} noise levels: stock accountants take seconds for each"
            )
    return composed, extra


def _stock(
    accountant: dp_accounting.PrivacyAccountant,
    event: dp_accounting.DpEvent,
    extra: float,
    error: float = 0.0,
) -> _Result:
    if not accountant.supports(event):
        raise UnsupportedRunError(f"{type(accountant).__name__} does not evaluate this run")
    accountant.compose(event)

    def epsilon(delta: float) -> float:
        left = delta - extra - error
        return float(accountant.get_epsilon(left)) if left > 0 else math.inf

    note = "every iterate may be released"
    if extra:
        note += f"; delta {extra:.3g} of it pays for the cap on the batches"
    return _Result(epsilon, "dp-accounting, on event.as_composition", note=note)


def _stock_rdp(event: Any, relation: NeighboringRelation) -> _Result:
    composed, extra = _standard(event, relation)
    reads = NeighboringRelation.ADD_OR_REMOVE_ONE
    if getattr(event, "batch_order", None) is BatchOrder.WITHOUT_REPLACEMENT:
        reads = NeighboringRelation.REPLACE_ONE  # the only relation that evaluates the event
    return _stock(rdp.RdpAccountant(neighboring_relation=reads), composed, extra)


def _stock_pld(event: Any, relation: NeighboringRelation) -> _Result:
    composed, extra = _standard(event, relation)
    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    if accountant.supports(composed):
        epsilon = accountant.compose(composed).get_epsilon(1e-5)
        if epsilon > _LARGEST_PLD_EPSILON:
            raise UnsupportedRunError(
                f"epsilon around {epsilon:.3g}: its privacy loss distribution takes gigabytes"
            )
    accountant = pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    return _stock(accountant, composed, extra, stock_pld_error(_compositions(composed)))


def _compositions(event: dp_accounting.DpEvent) -> int:
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return int(event.count) * _compositions(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(map(_compositions, event.events))
    return 1


def _poisson(event: LastIterateDpEvent, relation: NeighboringRelation) -> _Result:
    sampled = attrs.evolve(event, batch_order=BatchOrder.POISSON, record_position=None)
    result = _stock_pld(sampled, relation)
    return attrs.evolve(
        result,
        status=OTHER_ALGORITHM,
        note="the same noise, but every record joins every batch independently with probability "
        f"{event.batch_size}/{event.dataset_size}; every iterate may be released",
    )


def rows_of(
    label: str,
    event: dp_accounting.DpEvent,
    deltas: Sequence[float],
    relation: NeighboringRelation,
    group_size: int,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each accountant and delta; `tell` hears of each accountant before it is asked."""
    rows = []
    methods = list(_methods(event, group_size))
    for index, (name, evaluate) in enumerate(methods, start=1):
        tell(f"compare: {label}, accountant {index} of {len(methods)}: {name}")
        start = time.perf_counter()
        result: _Result | None = None
        reason = ""
        try:
            result = evaluate(event, relation)
        except UnsupportedRunError as error:
            reason = str(error)
        everywhere = _of_all_records(event, result, evaluate, relation)
        for delta in deltas:
            epsilon = None if result is None else float(result.epsilon(delta))
            scope = ""
            if isinstance(event, LastIterateDpEvent) and everywhere is not None:
                largest = text_up(everywhere.epsilon(delta))
                scope = f"{event.records}; other records have epsilon up to {largest}"
            rows.append(
                Row(
                    run=label,
                    accountant=name,
                    delta=delta,
                    epsilon=epsilon,
                    theorem=result.theorem if result else "",
                    status=result.status if result else UNMET,
                    seconds=time.perf_counter() - start,
                    note=result.note if result else reason,
                    scope=scope,
                )
            )
            start = time.perf_counter()
    return rows


def _of_all_records(
    event: Any,
    result: _Result | None,
    evaluate: Callable[[Any, NeighboringRelation], _Result],
    relation: NeighboringRelation,
) -> _Result | None:
    """The row for all records, if the result is about those of one batch only."""
    if getattr(event, "record_position", None) is None:
        return None
    if result is None or result.status == OTHER_ALGORITHM:
        return None
    return evaluate(attrs.evolve(event, record_position=None), relation)
