"""The outcome of an audit."""

from __future__ import annotations

import math
import os
from typing import Any

import attrs

from hidden_state_accountants import plotting
from hidden_state_accountants.figures import text_down, text_up


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

    def to_markdown(self) -> str:
        """A table with one line per attack."""
        lines = [
            f"claimed by {_cell(self.claim)}: epsilon {text_up(self.claimed, 6)} at delta "
            f"{self.target_delta:g} under {self.neighboring_relation}",
            "",
            "| attack | epsilon at least | strength | violated | run, or why not |",
            "|---|---|---|---|---|",
        ]
        for row in self.rows:
            epsilon = text_down(row.epsilon) if row.applies else ""
            verdict = ("yes: " + row.violation if row.violation else "no") if row.applies else ""
            cells = (row.attack, epsilon, row.strength, verdict, row.detail)
            lines.append("| " + " | ".join(map(_cell, cells)) + " |")
        return "\n".join(lines) + "\n"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the claimed delta and the lower bounds over epsilon, as the suffix of `path` says.

        Raises:
            ImportError: matplotlib is missing.
        """
        claimed = plotting.Series(
            "claimed", tuple(zip(self.epsilons, self.claimed_deltas, strict=True))
        )
        found = [
            plotting.Series(
                f"at least, by {row.attack} ({row.strength})",
                tuple(zip(self.epsilons, row.deltas, strict=True)),
            )
            for row in self.rows
            if row.applies
        ]
        plotting.plot_audit(claimed, found, path, verdict=self._verdict())

    def _verdict(self) -> str:
        what = f"violated by {self.violated_by}" if self.violated else "not violated"
        return (
            f"{what}: epsilon claimed {text_up(self.claimed, 4)}, at least "
            f"{text_down(self.lower_bound, 4)} "
            f"(delta = {self.target_delta:g}, {self.neighboring_relation})"
        )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
