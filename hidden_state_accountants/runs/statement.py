"""What a person reads about a run: the statement, in two layouts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import LastIterateAccountant, compose_guarantees
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.figures import fixed_up
from hidden_state_accountants.guarantee import Assumption, Guarantee, Status, group_guarantee
from hidden_state_accountants.process.groups import run_of_groups
from hidden_state_accountants.runs.description import (
    Description,
    describer_of,
    with_every_iterate,
)

_MEANING = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "one example is added or removed",
    NeighboringRelation.REPLACE_ONE: "one example is replaced by another",
    NeighboringRelation.REPLACE_SPECIAL: (
        "one example is replaced by one with zero gradient, which is add-or-remove-one with the "
        "number of examples fixed and public"
    ),
}
_LABELS = {
    Status.CHECKED: "checked by the software",
    Status.DECLARED: "declared by you",
    Status.PUBLIC: "public",
}
_HEADINGS = {
    Status.CHECKED: "Checked",
    Status.DECLARED: "Declared by you",
    Status.PUBLIC: "Public",
}
_ABOUT_SEVERAL = (
    "epsilon and theorem are those of all together, the other lines are about the last one"
)
_NO_USERS = (
    "No user-level privacy guarantee is possible without a bound on the number of examples per "
    "user."
)


class Statement:
    """What was run, what is proved of it, and what has to be true for that.

    Of several runs the epsilons and the theorem are those of all together, the rest is about the
    last one.

    Args:
        events: The runs, in order.
        guarantee: Of all of them together.
        assumptions: What has to be true; those of the guarantee, with what an adapter adds.
        delta: Where epsilon is read, in [0, 1].
        beside: What else was released of the same records, if `guarantee` is about it as well.
        **notes: What the events do not say: `microbatch`, the examples of a record of a
            `LastIterateRun`, and `update`, what is said of an update that is not its event's;
            `update_rule`, the name of the optimizer behind a `DiceSgdRun`. Those that the last run
            has no use for are left out.

    Raises:
        TypeError: One of the events is not that of a run, or `delta` is no number.
        ValueError: `delta` is not in [0, 1], or there is no event.
    """

    def __init__(
        self,
        events: Sequence[DpEvent],
        guarantee: Guarantee,
        assumptions: Sequence[Assumption],
        delta: float,
        beside: DpEvent | None = None,
        **notes: Any,
    ):
        if not events:
            raise ValueError("Expected the event of at least one run, got none.")
        self.events, self.guarantee, self.assumptions = events, guarantee, assumptions
        self.delta, self.beside, self.notes = validate.target_delta(delta), beside, notes
        self._describe = [describer_of(event) for event in events][-1]

    def lines(self) -> str:
        """About a dozen lines "label: text" to paste, and the assumptions, one a line."""
        guarantee, described = self.guarantee, self._description()
        several = f" ({len(self.events)} runs)" if len(self.events) > 1 else ""
        theory = f" ({described.theory})" if described.theory else ""
        rows = [
            ("neighboring relation", f"{guarantee.neighboring_relation.name}{self._of_groups}"),
            ("theorem", f"{guarantee.theorem}{theory}"),
        ]
        if guarantee.caveat:
            rows.append(("NOT PROVEN", guarantee.caveat))
        if self._hides_iterates:
            every = _number(self._epsilon_of_every_iterate(), 4)
            rows.append(("epsilon if every iterate were released", every))
        rows += described.facts
        if several:
            rows.append(("runs", f"{len(self.events)}; {_ABOUT_SEVERAL}"))
        return "\n".join(
            [
                f"{described.title}{several}",
                f"epsilon = {fixed_up(guarantee.epsilon(self.delta), 4)} at delta = {self.delta:g}",
                *(f"{label}: {text}" for label, text in rows),
                *self._items(_LABELS, "  - {}".format),
            ]
        )

    def paragraphs(self) -> str:
        """The shape of TensorFlow Privacy's compute_dp_sgd_privacy_statement."""
        guarantee, described = self.guarantee, self._description()
        relation = guarantee.neighboring_relation
        figures = [_figure(described.released, guarantee.epsilon(self.delta))]
        if self._hides_iterates:
            every = self._epsilon_of_every_iterate()
            figures.append(_figure("Epsilon if all checkpoints are released:", every))
        if described.other_label:
            other = None if guarantee.is_of_groups else described.other()
            epsilon = None if other is None else other.epsilon(self.delta)
            figures.append(_figure(described.other_label, epsilon))
        level = "User-level" if guarantee.is_of_groups else "Example-level"
        heading = (
            f"{level} DP with {relation.name} adjacency ({_MEANING[relation]}{self._of_groups}) at "
            f"delta = {self.delta}, computed by {guarantee.theorem}:"
        )
        parts = [_wrapped(described.run), _wrapped(described.protects)]
        if len(self.events) > 1:
            parts.append(_wrapped(f"{len(self.events)} runs: {_ABOUT_SEVERAL}."))
        parts.append("\n".join([_wrapped(heading), *figures]))
        if guarantee.caveat:
            parts.append(_wrapped(f"NOT PROVEN: {guarantee.caveat}"))
        parts += self._items(_HEADINGS, _item)
        if not guarantee.is_of_groups:
            parts.append(_wrapped(_NO_USERS))
        if described.footnote:
            parts.append(_wrapped(described.footnote))
        return "\n\n".join(parts) + "\n"

    def _description(self) -> Description:
        relation = self.guarantee.neighboring_relation
        return self._describe(self.events[-1], relation, self.delta, self.notes)

    @property
    def _hides_iterates(self) -> bool:
        return not all(isinstance(event, DiceSgdDpEvent) for event in self.events)

    @property
    def _of_groups(self) -> str:
        size = self.guarantee.group_size
        return f", up to {size} of them" if size > 1 else ""

    def _epsilon_of_every_iterate(self) -> float | None:
        relation, size = self.guarantee.neighboring_relation, self.guarantee.group_size
        events = [run_of_groups(event, relation, size) for event in self.events]
        guarantees = [with_every_iterate(event, relation) for event in events]
        if self.beside is not None:
            guarantees.append(LastIterateAccountant(relation).compose(self.beside).guarantee)
        known = [guarantee for guarantee in guarantees if guarantee is not None]
        if len(known) < len(guarantees):
            return None
        return group_guarantee(compose_guarantees(known, relation), size).epsilon(self.delta)

    def _items(self, titles: Mapping[Status, str], item: Callable[[str], str]) -> list[str]:
        """The assumptions by their status, one an item."""
        found = []
        for status, title in titles.items():
            texts = [a.text for a in self.assumptions if a.status is status]
            if texts:
                found.append("\n".join([f"{title}:", *map(item, texts)]))
        return found


def _number(epsilon: float | None, decimals: int) -> str:
    return "not computed" if epsilon is None else fixed_up(epsilon, decimals)


def _figure(label: str, epsilon: float | None) -> str:
    return f"    {label:<50} {_number(epsilon, 3):>14}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, width=80)


def _item(text: str) -> str:
    return textwrap.fill(text, width=80, initial_indent="  - ", subsequent_indent="    ")
