"""Holds a claim about a run against every attack on runs of its kind.

>>> import hidden_state_accountants as hsa
>>> run = hsa.LastIterateDpEvent(
...     noise_multiplier=4.0, learning_rate=0.5, clip_norm=1.0, batch_size=8, dataset_size=8,
...     num_steps=16, batch_order="full", loss=hsa.LossGeometry.linear(1.0))
>>> report = hsa.audit(hsa.LastIterateAccountant(), run)
>>> report.violated, round(report.tightness, 6)
(False, 1.0)
>>> from dp_accounting import NeighboringRelation
>>> half = (report.claimed / 2, 1e-5)
>>> hsa.audit(half, run, neighboring_relation=NeighboringRelation.REPLACE_SPECIAL).violated_by
'linear_losses'
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.auditing.evidence import Attack, Evidence, Progress
from hidden_state_accountants.auditing.linear_losses import LinearLosses
from hidden_state_accountants.auditing.quadratic_losses import QuadraticLosses
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import text_down, text_up
from hidden_state_accountants.guarantee import Guarantee

ATTACKS: tuple[Attack, ...] = (LinearLosses(), QuadraticLosses())
"""Every attack. `audit` runs those whose `event_type` fits and whose `check` finds no obstacle."""

_LOGGER = logging.getLogger(__name__)
_TARGET_DELTA = 1e-5
_ORDERS = (1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 64.0)
_SLACK = 1e-9  # relative: rounding of an exact figure and of the claim


@attrs.frozen
class AttackRow:
    """What one attack showed.

    Attributes:
        attack: The name of the attack.
        applies: Whether it could be run.
        strength: How sure its bounds are: "exact", "certified", "confidence ..."; empty if it does
            not apply.
        detail: The run that shows the bounds, or why there is none.
        epsilon: The lower bound on epsilon at the target delta; 0 if it does not apply.
        deltas: The lower bounds on delta at the epsilons of the report.
        violation: Where the bounds exceed the claim; empty if they do not.
    """

    attack: str
    applies: bool
    strength: str
    detail: str
    epsilon: float = 0.0
    deltas: tuple[float, ...] = ()
    violation: str = ""


@attrs.frozen
class AuditReport:
    """A claim held against lower bounds.

    Attributes:
        claim: The claim in words.
        neighboring_relation: Its relation.
        target_delta: The delta at which epsilons are compared.
        claimed: The claimed epsilon at `target_delta`.
        rows: One per attack on runs of this kind.
        epsilons: The epsilons at which deltas were compared.
        claimed_deltas: The claimed deltas there.
    """

    claim: str
    neighboring_relation: str
    target_delta: float
    claimed: float
    rows: tuple[AttackRow, ...]
    epsilons: tuple[float, ...] = ()
    claimed_deltas: tuple[float, ...] = ()

    @property
    def _strongest(self) -> AttackRow | None:
        applied = [row for row in self.rows if row.applies]
        violating = [row for row in applied if row.violation]
        return max(violating or applied, key=lambda row: row.epsilon, default=None)

    @property
    def violated(self) -> bool:
        """Whether a lower bound exceeds the claim, at any epsilon or Renyi order tested."""
        return any(row.violation for row in self.rows)

    @property
    def violated_by(self) -> str | None:
        """The attack that exceeds the claim (with the largest epsilon, of several), or None."""
        return self._strongest.attack if self.violated and self._strongest else None

    @property
    def lower_bound(self) -> float:
        """The largest lower bound on epsilon at `target_delta`; 0 if no attack applies."""
        return max((row.epsilon for row in self.rows), default=0.0)

    @property
    def tightness(self) -> float:
        """claimed / lower_bound: 1 is a claim that is met; inf if the lower bound is 0."""
        if self.claimed == self.lower_bound:
            return 1.0
        return self.claimed / self.lower_bound if self.lower_bound else math.inf

    def __str__(self) -> str:
        at = f"at delta {self.target_delta:g} under {self.neighboring_relation}"
        best, claimed = self._strongest, text_up(self.claimed, 6)
        if best is not None and self.violated:
            return (
                f"VIOLATED by {best.attack}: epsilon is at least {text_down(best.epsilon)} {at}, "
                f"claimed {claimed} by {self.claim}. {best.violation}. "
                f"Witness ({best.strength}): {best.detail}."
            )
        if best is None:
            return (
                f"Not violated, and not tested: no attack applies; claimed {claimed} {at} "
                f"by {self.claim}. " + " ".join(f"{r.attack}: {r.detail}." for r in self.rows)
            )
        return (
            f"Not violated: epsilon is at least {text_down(self.lower_bound)} {at}, claimed "
            f"{claimed} by {self.claim}; ratio {self.tightness:.3f}. The largest lower "
            f"bound is by {best.attack} ({best.strength}): {best.detail}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain types; infinity stays a float."""
        result = attrs.asdict(self)
        result["rows"] = [attrs.asdict(row) for row in self.rows]
        for name in ("violated", "violated_by", "lower_bound", "tightness"):
            result[name] = getattr(self, name)
        return result


def audit(
    claim: Any,
    event: dp_accounting.DpEvent,
    *,
    neighboring_relation: NeighboringRelation | str | None = None,
    target_delta: float | None = None,
    target_epsilons: Sequence[float] | None = None,
    attacks: Sequence[Attack] | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Searches runs of the class that `event` declares for one that refutes the claim.

    Formal guarantees:
      - A violation by an attack of strength "exact" or "certified" is a proof that the claim is
        false for the declared class: some run of the class has a larger privacy loss. Statistical
        attacks say what their confidence is.
      - No violation proves nothing. The ratio of the claim to the largest lower bound says how much
        room there is for a better bound or for a better attack.

    Args:
        claim: A dp_accounting.PrivacyAccountant that has composed the event and nothing else, or
            nothing at all (a copy of it then composes the event; an accountant that does not know
            the event composes its `as_composition`); a `Guarantee`; or a pair (epsilon, delta).
        event: The run.
        neighboring_relation: Required for a pair, and for stock accountants of `as_composition`
            unless it is theirs; otherwise taken from the claim.
        target_delta: The delta at which epsilons are reported; by default that of a pair, or 1e-5.
        target_epsilons: Where deltas are compared as well; by default where the claimed delta goes
            down to 1e-10.
        attacks: By default all of `hidden_state_accountants.auditing.ATTACKS`.
        progress: Receives one line of text at each stage; by default they are logged at INFO.

    Raises:
        TypeError: An argument has the wrong type, or no attack is about this kind of event.
        ValueError: The claim is about another run or relation.
    """
    if not isinstance(event, dp_accounting.DpEvent):
        raise TypeError(f"Expected event to be a dp_accounting.DpEvent, got {event!r}.")
    chosen = [
        attack
        for attack in (ATTACKS if attacks is None else attacks)
        if isinstance(event, attack.event_type)
    ]
    if not chosen:
        raise TypeError(
            f"Expected an event that an attack is about, got {type(event).__name__}: those of the "
            "package are about LastIterateDpEvent. Give attacks of your own, or test a trainer of "
            "any kind with hidden_state_accountants.auditing.monte_carlo_audit."
        )
    tell = _LOGGER.info if progress is None else progress
    read = read_claim(claim, event, neighboring_relation)
    delta = _target_delta(target_delta, read)
    epsilons = read.test_epsilons()
    if target_epsilons is not None:
        given = (validate.real("target_epsilons", e, minimum=0) for e in target_epsilons)
        epsilons = tuple(sorted({*epsilons, *given}))
    tell(f"audit of {read.name}")
    claimed = float(read.epsilon(delta))
    if claimed < math.inf:
        epsilons = tuple(sorted({*epsilons, min(claimed, LARGEST_EPSILON)}))
    deltas = tuple(float(read.delta(e)) for e in epsilons)
    return AuditReport(
        claim=read.name,
        neighboring_relation=read.relation.name,
        target_delta=delta,
        claimed=claimed,
        rows=tuple(
            _row(attack, event, read, delta, epsilons, deltas, tell, f"{index} of {len(chosen)}")
            for index, attack in enumerate(chosen, start=1)
        ),
        epsilons=epsilons,
        claimed_deltas=deltas,
    )


def _target_delta(given: float | None, claim: Claim) -> float:
    if given is None:
        return _TARGET_DELTA if claim.target_delta is None else claim.target_delta
    return validate.target_delta(given)


def _row(
    attack: Attack,
    event: dp_accounting.DpEvent,
    claim: Claim,
    target_delta: float,
    epsilons: Sequence[float],
    claimed: Sequence[float],
    tell: Progress,
    number: str,
) -> AttackRow:
    unmet = attack.check(event, claim.relation)
    if unmet:
        return AttackRow(attack.name, False, "", "; ".join(map(str, unmet)))
    tell(f"attack {number}: {attack.name}")
    try:
        evidence = attack.evidence(event, claim.relation, tell)
    except UnsupportedRunError as error:
        return AttackRow(attack.name, False, "", str(error))
    epsilon = evidence.epsilon(target_delta) if target_delta < 1 else 0.0
    tell(f"{attack.name}: epsilon is at least {text_down(epsilon)} at delta {target_delta:g}")
    deltas = tuple(evidence.delta(e) for e in epsilons)
    return AttackRow(
        attack=evidence.attack,
        applies=True,
        strength=evidence.strength,
        detail=evidence.witness,
        epsilon=epsilon,
        deltas=deltas,
        violation=_violation(evidence, claim, epsilons, deltas, claimed),
    )


def _violation(
    evidence: Evidence,
    claim: Claim,
    epsilons: Sequence[float],
    found: Sequence[float],
    claimed: Sequence[float],
) -> str:
    """Where the evidence exceeds the claim most clearly; empty if nowhere."""
    slack = 1 + _SLACK if evidence.strength == "exact" else 1.0
    excess = [
        (at_least / max(said, 1e-300), epsilon, at_least, said)
        for epsilon, at_least, said in zip(epsilons, found, claimed, strict=True)
        if at_least > said * slack
    ]
    if excess:
        _, epsilon, at_least, said = max(excess)
        figures = f"at least {text_down(at_least, 4)}, claimed {text_up(said, 4)}"
        return f"At epsilon {epsilon:.6g} delta is {figures}"
    if claim.rdp is None or evidence.renyi is None:
        return ""
    for order, said in zip(_ORDERS, claim.rdp(np.array(_ORDERS)).tolist(), strict=True):
        if said < math.inf and (bound := evidence.renyi(order)) > said * slack:
            figures = f"at least {text_down(bound)}, claimed {text_up(said, 6)}"
            return f"At Renyi order {order:g} it is {figures}"
    return ""


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
