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
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.auditing.evidence import LARGEST_EPSILON, Attack, Evidence, Progress
from hidden_state_accountants.auditing.linear_losses import LinearLosses
from hidden_state_accountants.auditing.quadratic_losses import QuadraticLosses
from hidden_state_accountants.figures import text_down, text_up
from hidden_state_accountants.guarantee import Guarantee

ATTACKS: tuple[Attack, ...] = (LinearLosses(), QuadraticLosses())
"""Every attack. `audit` runs those whose `event_type` fits and whose `check` finds no obstacle."""

_SMALLEST_DELTA = 1e-10  # where the tested epsilons end
_NUM_EPSILONS = 6  # a composed curve takes up to seconds for each
_SLACK = 1e-9  # relative: rounding of an exact figure and of the claim


@attrs.frozen
class AttackRow:
    """Result of one attack.

    Attributes:
        attack: The name of the attack.
        applies: True if it could be run.
        strength: Certainty of its bounds: "exact", "certified"; empty if it does not apply.
        detail: The run that shows the bounds, or why there is none.
        epsilon: The lower bound on epsilon at the target delta; 0 if it does not apply.
        violation: Where the bounds exceed the claim; empty if they do not.
    """

    attack: str
    applies: bool
    strength: str
    detail: str
    epsilon: float = 0.0
    violation: str = ""


@attrs.frozen
class AuditReport:
    """A claim held against lower bounds.

    Attributes:
        claim: The claim in words.
        neighboring_relation: Relation of the claim.
        target_delta: The delta at which epsilons are compared.
        claimed: The claimed epsilon at `target_delta`.
        rows: One per attack on runs of this kind.
    """

    claim: str
    neighboring_relation: str
    target_delta: float
    claimed: float
    rows: tuple[AttackRow, ...]

    @property
    def violated(self) -> bool:
        """True if a lower bound exceeds the claim, at any epsilon tested."""
        return any(row.violation for row in self.rows)

    @property
    def violated_by(self) -> str | None:
        """The attack that exceeds the claim (with the largest epsilon, of several), or None."""
        return self._strongest().attack if self.violated else None

    def _strongest(self) -> AttackRow:
        return max(self.rows, key=lambda row: (row.violation != "", row.applies, row.epsilon))

    @property
    def lower_bound(self) -> float:
        """The largest lower bound on epsilon at `target_delta`; 0 if no attack applies."""
        return max(row.epsilon for row in self.rows)

    @property
    def tightness(self) -> float:
        """claimed / lower_bound: 1 is a claim that is met; inf if the lower bound is 0."""
        if self.claimed == self.lower_bound:
            return 1.0
        return self.claimed / self.lower_bound if self.lower_bound else math.inf

    def __str__(self) -> str:
        at = f"at delta {self.target_delta:g} under {self.neighboring_relation}"
        best, claimed = self._strongest(), f"claimed {text_up(self.claimed, 6)}"
        if best.violation:
            return (
                f"VIOLATED by {best.attack}: epsilon is at least {text_down(best.epsilon)} {at}, "
                f"{claimed} by {self.claim}. {best.violation}. "
                f"Witness ({best.strength}): {best.detail}."
            )
        if not best.applies:
            return (
                f"Not violated, and not tested: no attack applies; {claimed} {at} by {self.claim}. "
                + " ".join(f"{row.attack}: {row.detail}." for row in self.rows)
            )
        return (
            f"Not violated: epsilon is at least {text_down(self.lower_bound)} {at}, {claimed} by "
            f"{self.claim}; ratio {self.tightness:.3f}. The largest lower bound is by "
            f"{best.attack} ({best.strength}): {best.detail}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain types; infinity stays a float."""
        derived = ("violated", "violated_by", "lower_bound", "tightness")
        return attrs.asdict(self) | {name: getattr(self, name) for name in derived}


def audit(
    claim: Any,
    event: dp_accounting.DpEvent,
    *,
    neighboring_relation: NeighboringRelation | str | None = None,
    target_delta: float | None = None,
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
            Deltas are compared where the claimed one goes down to 1e-10.
        attacks: By default all of `hidden_state_accountants.auditing.ATTACKS`.
        progress: Receives a line of text at each stage.

    Raises:
        TypeError: An argument has the wrong type, or no attack is about this kind of event.
        ValueError: The claim is about another run or relation.
    """
    chosen = [
        attack
        for attack in (ATTACKS if attacks is None else attacks)
        if isinstance(event, attack.event_type)
    ]
    if not chosen:
        raise TypeError(
            f"Expected an event that an attack is about, got {type(event).__name__}: those of the "
            "package are about LastIterateDpEvent. Give attacks of your own (attacks=)."
        )
    tell = progress or (lambda line: None)
    if neighboring_relation is not None:
        neighboring_relation = validate.neighboring_relation(neighboring_relation)
    read = _read(claim, event, neighboring_relation)
    delta = read.delta if target_delta is None else validate.target_delta(target_delta)
    tell(f"audit of {read.name}")
    claimed = float(read.epsilon_at(delta))
    # From 0 to where the claimed delta is tiny, and what is claimed.
    top, last = read.epsilon_at(read.smallest_delta), _NUM_EPSILONS - 1
    epsilons = {claimed, *(top * k / last for k in range(_NUM_EPSILONS))}
    finite = sorted({min(e, LARGEST_EPSILON) for e in epsilons if e < math.inf})
    tested = {e: float(read.delta_at(e)) for e in finite}
    rows = []
    for index, attack in enumerate(chosen, start=1):
        if unmet := attack.check(event, read.relation):
            rows.append(AttackRow(attack.name, False, "", "; ".join(map(str, unmet))))
            continue
        tell(f"attack {index} of {len(chosen)}: {attack.name}")
        evidence = attack.evidence(event, read.relation, tell)
        rows.append(
            AttackRow(
                attack=evidence.attack,
                applies=True,
                strength=evidence.strength,
                detail=evidence.witness,
                epsilon=evidence.epsilon(delta) if delta < 1 else 0.0,
                violation=_violation(evidence, tested),
            )
        )
    return AuditReport(read.name, read.relation.name, delta, claimed, tuple(rows))


def _violation(evidence: Evidence, claimed: dict[float, float]) -> str:
    """Says where the evidence exceeds the claimed deltas (by epsilon) most clearly, or ""."""
    slack = 1 + _SLACK if evidence.strength == "exact" else 1.0
    excess = [
        (at_least / max(said, 1e-300), epsilon, at_least, said)
        for epsilon, said in claimed.items()
        if (at_least := evidence.delta(epsilon)) > said * slack
    ]
    if not excess:
        return ""
    _, epsilon, at_least, said = max(excess)
    figures = f"at least {text_down(at_least, 4)}, claimed {text_up(said, 4)}"
    return f"At epsilon {epsilon:.6g} delta is {figures}"


@attrs.frozen(eq=False)
class _Claim:
    name: str
    relation: NeighboringRelation
    epsilon_at: Callable[[float], float]  # inf: nothing is claimed
    delta_at: Callable[[float], float]  # 1: nothing is claimed
    delta: float = 1e-5  # where epsilons are compared
    smallest_delta: float = _SMALLEST_DELTA


def _read(claim: Any, event: Any, relation: NeighboringRelation | None) -> _Claim:
    """The claim about `event` that an accountant, a guarantee or a pair makes."""
    if isinstance(claim, Guarantee):
        found = claim.neighboring_relation
        if relation not in (None, found):
            raise ValueError(
                f"Expected neighboring_relation = {found.name}, which the claim is for, got "
                f"{getattr(relation, 'name', relation)}. Leave it out."
            )
        return _Claim(claim.theorem, found, claim.epsilon, claim.delta)
    if isinstance(claim, dp_accounting.PrivacyAccountant):
        return _of_accountant(claim, event, relation)
    if not isinstance(claim, tuple | list) or len(claim) != 2:
        raise TypeError(
            "Expected claim to be a dp_accounting.PrivacyAccountant, a Guarantee or a pair "
            f"(epsilon, delta), got {claim!r}."
        )
    if relation is None:
        raise ValueError(
            "Expected neighboring_relation for a claim that is a pair (epsilon, delta), got none."
        )
    e, d = validate.target_pair(claim[0], claim[1], ("epsilon of the claim", "delta of the claim"))
    return _Claim(
        f"({e:g}, {d:g})",
        relation,
        lambda at: e if at >= d else math.inf,
        lambda at: d if at >= e else 1.0,
        delta=d,
        smallest_delta=d,
    )


def _of_accountant(accountant: Any, event: Any, relation: NeighboringRelation | None) -> _Claim:
    composed = event
    if not accountant.supports(event):  # one of dp-accounting's: every iterate may be released
        relation = relation or accountant.neighboring_relation
        composed = event.as_composition(relation)
    if isinstance(accountant.ledger, dp_accounting.NoOpDpEvent):
        accountant = copy.deepcopy(accountant).compose(composed)
    if accountant.ledger != composed:
        ledger = repr(accountant.ledger)
        raise ValueError(
            "Expected an accountant that has composed the event and nothing else, got the ledger "
            f"{ledger if len(ledger) <= 200 else ledger[:200] + '...'}. Compose the event once "
            "into an accountant of its own."
        )
    name, guarantee = type(accountant).__name__, getattr(accountant, "guarantee", None)
    if isinstance(guarantee, Guarantee):
        claim = _read(guarantee, event, relation)
        return attrs.evolve(claim, name=f"{name}: {claim.name}")
    relation = relation or accountant.neighboring_relation
    return _Claim(name, relation, accountant.get_epsilon, accountant.get_delta)
