"""What is audited: a privacy claim in one of the forms that users have it in."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Guarantee

_SMALLEST_DELTA = 1e-10
_NUM_EPSILONS = 6  # a composed curve takes up to seconds for each
LARGEST_EPSILON = 700.0


@attrs.frozen(eq=False)
class Claim:
    """An upper bound on the privacy loss of a run.

    Attributes:
        name: In words.
        relation: The neighbouring relation that it is about.
        epsilon: The claimed epsilon at a delta; inf where nothing is claimed.
        delta: The claimed delta at an epsilon; 1 where nothing is claimed.
        rdp: The claimed Renyi divergences of an array of orders, if the claim has any.
        target_delta: The delta that the claim is about, if it is about one only.
    """

    name: str
    relation: NeighboringRelation
    epsilon: Callable[[float], float]
    delta: Callable[[float], float]
    rdp: Callable[[np.ndarray], np.ndarray] | None = None
    target_delta: float | None = None

    def test_epsilons(self) -> tuple[float, ...]:
        """Where the claim says something: from 0 to where its delta is tiny."""
        if self.target_delta is not None:
            top = 2 * self.epsilon(self.target_delta)
        else:
            top = self.epsilon(_SMALLEST_DELTA)
        if top == math.inf:
            return ()
        top = min(top, LARGEST_EPSILON)
        return tuple(sorted({top * k / (_NUM_EPSILONS - 1) for k in range(_NUM_EPSILONS)}))


def read_claim(
    claim: Any, event: dp_accounting.DpEvent, relation: NeighboringRelation | None
) -> Claim:
    """The claim about `event` that an accountant, a guarantee or a pair makes.

    Raises:
        TypeError: It is none of these.
        ValueError: It is about another run or another relation, or the relation is missing.
    """
    if relation is not None:
        relation = validate.neighboring_relation(relation)
    if isinstance(claim, Guarantee):
        return _of_guarantee(claim, relation)
    if isinstance(claim, dp_accounting.PrivacyAccountant):
        return _of_accountant(claim, event, relation)
    if isinstance(claim, tuple | list) and len(claim) == 2:
        return _of_pair(claim[0], claim[1], relation)
    raise TypeError(
        "Expected claim to be a dp_accounting.PrivacyAccountant, a Guarantee or a pair "
        f"(epsilon, delta), got {claim!r}."
    )


def _of_guarantee(guarantee: Guarantee, relation: NeighboringRelation | None) -> Claim:
    _same_relation(relation, guarantee.neighboring_relation)
    scope = f" (only for {guarantee.only_for})" if guarantee.only_for else ""
    return Claim(
        guarantee.theorem + scope,
        guarantee.neighboring_relation,
        guarantee.epsilon,
        guarantee.delta,
        guarantee.rdp,
    )


def _of_pair(epsilon: Any, delta: Any, relation: NeighboringRelation | None) -> Claim:
    if relation is None:
        raise ValueError(
            "Expected neighboring_relation for a claim that is a pair (epsilon, delta), got none."
        )
    e, d = validate.target_pair(epsilon, delta, ("epsilon of the claim", "delta of the claim"))
    return Claim(
        f"({e:g}, {d:g})",
        relation,
        lambda at: e if at >= d else math.inf,
        lambda at: d if at >= e else 1.0,
        target_delta=d,
    )


def _of_accountant(
    accountant: Any, event: dp_accounting.DpEvent, relation: NeighboringRelation | None
) -> Claim:
    name = type(accountant).__name__
    standard = None
    if relation is None:
        relation = accountant.neighboring_relation
    if isinstance(event, LastIterateDpEvent):
        try:
            standard = event.as_composition(relation, for_one_position=True)
        except UnsupportedRunError:
            standard = None
    ledger = accountant.ledger
    if isinstance(ledger, dp_accounting.NoOpDpEvent):
        accountant = copy.deepcopy(accountant)
        ledger = event if standard is None or accountant.supports(event) else standard
        accountant.compose(ledger)
    if ledger == event:
        _same_relation(relation, accountant.neighboring_relation)
    elif standard is None or ledger != standard:
        raise ValueError(
            f"Expected an accountant that has composed the event and nothing else, got the ledger "
            f"{_short(ledger)}. Compose the event once into an accountant of its own."
        )
    guarantee = getattr(accountant, "guarantee", None)
    if isinstance(guarantee, Guarantee):
        claim = _of_guarantee(guarantee, relation)
        return attrs.evolve(claim, name=f"{name}: {claim.name}")
    return Claim(name, relation, accountant.get_epsilon, accountant.get_delta)


def _same_relation(asked: NeighboringRelation | None, found: NeighboringRelation) -> None:
    if asked not in (None, found):
        assert asked is not None
        raise ValueError(
            f"Expected neighboring_relation = {found.name}, which the claim is for, got "
            f"{asked.name}. Leave it out."
        )


def _short(event: dp_accounting.DpEvent) -> str:
    text = repr(event)
    return text if len(text) <= 200 else f"{text[:200]}..."
