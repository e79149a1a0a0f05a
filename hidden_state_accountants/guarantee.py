"""Guarantees: a privacy curve with its theorem and its assumptions."""

from __future__ import annotations

import enum
import html
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution

from hidden_state_accountants import validate
from hidden_state_accountants.curves import transformed
from hidden_state_accountants.curves.base import Curve, known_of
from hidden_state_accountants.events.plain_types import plain
from hidden_state_accountants.figures import finite, text_up

_DELTA = 1e-5  # where epsilon is read in one line
_NEIGHBOURS = {
    "ADD_OR_REMOVE_ONE": "one of which lacks a person",
    "REPLACE_ONE": "that differ in the records of one person",
    "REPLACE_SPECIAL": "that differ in one person, whose records have no gradient in one of them",
}
Changes = Callable[[float, float], Sequence[tuple[str, float]]]


class Status(enum.Enum):
    """Who vouches for an assumption."""

    CHECKED = "checked"  # made or compared by the software: in every step, or when the text says
    DECLARED = "declared"  # the user's word
    PUBLIC = "public"  # a value that an adversary may know


class Topic(enum.Enum):
    """Topic of an assumption: one that says more replaces those of its topic.

    See `replace_assumptions`. Neither the text of an assumption nor its place in a list ever
    decides anything.
    """

    UNIT = "unit"  # who a record belongs to and how it is clipped
    METRICS = "metrics"  # what else is computed from the private records
    RELEASES = "releases"  # what is seen of the training
    LOSS = "loss"
    GRADIENT_NORM = "gradient norm"
    SENSITIVITY = "sensitivity"
    DIVISOR = "divisor"
    FIXED_IN_ADVANCE = "fixed in advance"
    DOMAIN = "domain"  # the set that the iterates are projected on
    ORDER = "order"  # how the records are dealt to the batches, and whether that is secret
    HYPER_PARAMETERS = "hyper-parameters"
    START = "start"
    HIDDEN_STATE = "hidden state"  # private state besides the iterates
    REGULARISER = "regulariser"
    OTHER = "other"  # of no topic: never replaced


@attrs.frozen
class Assumption:
    """One thing that has to be true for the guarantee to hold.

    Attributes:
        text: What has to be true.
        status: Who vouches for it.
        topic: What it is about; assumptions of equal text and status are equal, whatever it is.
    """

    text: str
    status: Status
    topic: Topic = attrs.field(default=Topic.OTHER, eq=False, repr=False)

    @classmethod
    def checked(cls, text: str, topic: Topic = Topic.OTHER) -> Assumption:
        """Verified by the software."""
        return cls(text, Status.CHECKED, topic)

    @classmethod
    def declared(cls, text: str, topic: Topic = Topic.OTHER) -> Assumption:
        """Taken on the user's word."""
        return cls(text, Status.DECLARED, topic)

    @classmethod
    def public(cls, text: str, topic: Topic = Topic.OTHER) -> Assumption:
        """Not secret."""
        return cls(text, Status.PUBLIC, topic)

    def __str__(self) -> str:
        return f"{self.status.value}: {self.text}"


_VOUCHED = {
    Status.CHECKED: "Checked by the software",
    Status.DECLARED: "Declared by those who trained",
    Status.PUBLIC: "Public",
}


@attrs.frozen
class Citation:
    """Source of a bound."""

    authors: str
    theorem: str
    arxiv: str | None = None

    def __str__(self) -> str:
        source = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f"{self.authors}, {self.theorem}{source}"


@attrs.frozen(repr=False)
class Guarantee:
    """A proved privacy guarantee of everything that was released.

    Attributes:
        curve: The numbers.
        neighboring_relation: The relation they hold for, in both directions.
        theorem: What proves them.
        assumptions: What has to be true, each checked, declared or public.
        alternatives: Name and reason of the bounds that do not apply or are larger.
        caveat: Why the claim is NOT proven; empty unless a published formula was asked for.
        citations: The papers behind the theorem.
        changes: Maps a delta and the epsilon there to (description, epsilon) of the run with one
            thing changed, the most helpful first; None if it is not that of a single run.
        group_size: In how many records two data sets may differ.
        event: What it is about: one run, or all that was composed; None if nobody told.
    """

    curve: Curve
    neighboring_relation: NeighboringRelation = attrs.field(converter=validate.neighboring_relation)
    theorem: str
    assumptions: tuple[Assumption, ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()
    caveat: str = ""
    citations: tuple[Citation, ...] = ()
    changes: Changes | None = attrs.field(default=None, eq=False, repr=False)
    group_size: int = 1
    event: dp_accounting.DpEvent | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def relation(self) -> str:
        """The relation in words, with the size of groups."""
        groups = f", groups of {self.group_size}" if self.group_size > 1 else ""
        return self.neighboring_relation.name + groups

    @property
    def mu(self) -> float | None:
        """The smallest mu of mu-GDP that is proved; None if none is.

        Where another bound is joined, epsilon may be smaller than that of mu-GDP.
        """
        known = (single.mu for single, failure in known_of(self.curve) if not failure)
        return min((mu for mu in known if mu is not None), default=None)

    def epsilon(self, delta: float) -> float:
        """The smallest proved epsilon at `delta` in [0, 1]."""
        return self.curve.epsilon(validate.target_delta(delta))

    def delta(self, epsilon: float) -> float:
        """The smallest proved delta at `epsilon` >= 0."""
        return self.curve.delta(validate.target_epsilon(epsilon))

    def rdp(self, orders: npt.ArrayLike) -> np.ndarray:
        """Upper bounds, shape as `orders`, on the Renyi divergences of orders > 1."""
        array = np.asarray(orders)
        if array.dtype.kind not in "fiu" or not (array > 1).all():
            raise ValueError(f"Expected orders > 1, got {orders!r}.")
        return self.curve.rdp(array.astype(np.float64))

    def privacy_loss(self) -> privacy_loss_distribution.PrivacyLossDistribution:
        """dp-accounting's privacy loss distribution, for composition with anything else.

        Formal guarantees: a pessimistic pair that dominates the released mechanism under
        `neighboring_relation`, in both directions, on a grid of 1e-4; deltas below 1e-15 are
        rounded up. What is composed with it has to be meant for the same relation, and the errors
        of dp-accounting's own arithmetic (about 1e-16 per composition) are not in it.

        Raises:
            ValueError: No epsilon is finite.
        """
        return transformed.loss_distribution(self.curve)

    def to_dpevent(self) -> dp_accounting.DpEvent:
        """A standard event for accountants under ADD_OR_REMOVE_ONE, whatever the relation is.

        Its curve is that of the guarantee where it is Gaussian, or composed of standard events and
        Gaussians. Otherwise it lies above: the event is that of the worst place of a record in a
        secret order, or of all iterates released. `privacy_loss` is as small as the guarantee.

        Raises:
            ValueError: No standard event is known to dominate it (batches without replacement,
                POISSON batches under REPLACE_ONE or with a cap, bounds that are Renyi divergences).
        """
        event = self.curve.to_dpevent()
        if event is None:
            raise ValueError(f"No standard event expresses the guarantee by {self.theorem}.")
        return event

    def explain(self, delta: float = 1e-5, *, bounds: bool = False) -> str:
        """Names theorem and relation, what would lower epsilon, and all assumptions.

        Args:
            delta: Where epsilon is read.
            bounds: True to name the bounds that were not used as well, each with the reason.
        """
        epsilon = self.epsilon(delta)
        lines = [f"{label}: {text}" for label, text in self._facts(delta)]
        lines += change_lines(epsilon, self.changes(delta, epsilon) if self.changes else ())
        lines += [f"assumption, {assumption}" for assumption in self.assumptions]
        if bounds:
            lines += [f"not used: {name}: {reason}" for name, reason in self.alternatives]
        return "\n".join(lines)

    def _facts(self, delta: float) -> Iterator[tuple[str, str]]:
        yield "theorem", self.theorem
        yield "neighboring relation", self.relation
        if self.curve.mu is not None:
            yield "mu (Gaussian differential privacy)", text_up(self.curve.mu, 6)
        yield f"epsilon at delta {delta:g}", text_up(self.epsilon(delta), 6)
        if self.caveat:
            yield "NOT PROVEN", self.caveat

    def statement(self, delta: float = 1e-5) -> str:
        """The guarantee in sentences, for a paper or a model card.

        Args:
            delta: Where epsilon is read; it should be well below 1 over the number of records.
        """
        relation = self.neighboring_relation.name
        sentences = [
            f"What is released is (epsilon, delta)-differentially private with epsilon = "
            f"{text_up(self.epsilon(delta), 4)} and delta = {delta:g}.",
            f"Neighbouring are data sets {_NEIGHBOURS[relation]} ({relation}).",
            f"They differ in up to {self.group_size} records." if self.group_size > 1 else "",
            f"It is NOT PROVEN: {self.caveat}." if self.caveat else "",
            f"It is computed by hidden-state-accountants from: {self.theorem}.",
        ]
        for status, words in _VOUCHED.items():
            texts = "; ".join(self._texts(status))
            sentences.append(f"{words}: {texts}." if texts else "")
        return "\n".join(filter(None, sentences))

    def to_dict(self, delta: float = 1e-5) -> dict[str, Any]:
        """Returns what is claimed as plain types: figures, assumptions, event and versions.

        An event of this package is read back by its `from_dict`.

        Args:
            delta: Where epsilon is read.
        """
        return {
            "epsilon": self.epsilon(delta),
            "delta": delta,
            "mu": self.curve.mu,
            "neighboring_relation": self.neighboring_relation.name,
            "group_size": self.group_size,
            "theorem": self.theorem,
            "is_proven": not self.caveat,
            "caveat": self.caveat,
            "citations": [str(citation) for citation in self.citations],
            "assumptions": {status.value: list(self._texts(status)) for status in Status},
            "event": None if self.event is None else plain(self.event),
            "versions": {
                "hidden_state_accountants": _version(),
                "dp_accounting": metadata.version("dp-accounting"),
            },
        }

    def to_json(self, delta: float = 1e-5) -> str:
        """Returns `to_dict` as standard JSON; infinity is the text inf."""
        return json.dumps(finite(self.to_dict(delta)), indent=2, allow_nan=False)

    def to_markdown(self, delta: float = 1e-5) -> str:
        """Returns a block for a model card.

        Args:
            delta: Where epsilon is read.
        """
        lines = ["## Privacy", "", "| | |", "|---|---|"]
        lines += [f"| {label} | {_cell(text)} |" for label, text in self._rows(delta)]
        for status, words in _VOUCHED.items():
            texts = [f"- {text}" for text in self._texts(status)]
            lines += ["", f"**{words}**", "", *texts] if texts else []
        return "\n".join(lines) + "\n"

    def save(self, path: str | os.PathLike[str], delta: float = 1e-5) -> None:
        """Writes `to_json` beside a saved model, and `to_markdown` under the same name in .md.

        Args:
            path: Where to, ending in .json.
            delta: Where epsilon is read.

        Raises:
            ValueError: The path has another ending.
        """
        file = Path(path)
        if file.suffix != ".json":
            raise ValueError(f"Expected a path that ends in .json, got {str(path)!r}.")
        file.write_text(self.to_json(delta) + "\n", encoding="utf-8")
        file.with_suffix(".md").write_text(self.to_markdown(delta), encoding="utf-8")

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{k}</th><td>{html.escape(v)}</td></tr>" for k, v in self._rows(_DELTA))
        parts = ["<table>", *rows, "</table>"]
        for status, words in _VOUCHED.items():
            texts = [f"<li>{html.escape(text)}</li>" for text in self._texts(status)]
            parts += [f"<p>{words}</p><ul>", *texts, "</ul>"] if texts else []
        return "\n".join(parts)

    def _rows(self, delta: float) -> Iterator[tuple[str, str]]:
        yield from self._facts(delta)
        if self.event is not None:
            yield "what ran", repr(self.event)
        yield "computed by", f"hidden-state-accountants {_version()}"

    def _texts(self, status: Status) -> Iterator[str]:
        return (a.text for a in self.assumptions if a.status is status)

    def __repr__(self) -> str:
        mu = "" if self.mu is None else f"mu = {text_up(self.mu, 4)}, "
        epsilon = text_up(self.epsilon(_DELTA), 4)
        caveat = ", NOT PROVEN" if self.caveat else ""
        return (
            f"<Guarantee: {mu}epsilon = {epsilon} at delta = {_DELTA:g}, "
            f"{self.relation}{caveat}; {self.theorem}>"
        )


def _version() -> str:
    from hidden_state_accountants import __version__  # which imports this module

    return __version__


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def change_lines(epsilon: float, changes: Iterable[tuple[str, float]]) -> list[str]:
    """One line for each (description, epsilon) of a changed run, beside the epsilon of the run."""
    now = text_up(epsilon, 4)
    return [f"one change: {text}: epsilon {now} -> {text_up(value, 4)}" for text, value in changes]


def cited(theorem: str, paper: Citation) -> str:
    """Name that a guarantee gives to a theorem of a paper."""
    return f"{theorem} ({paper.authors}, arXiv {paper.arxiv})"


def group_guarantee(guarantee: Guarantee, size: int) -> Guarantee:
    """The guarantee for groups, given that it holds for every two neighbours on the way."""
    if size == 1:
        return guarantee
    unit = Assumption.declared(
        f"one person has at most {size} records, each of which is clipped on its own", Topic.UNIT
    )
    return attrs.evolve(
        guarantee,
        curve=transformed.of_groups(guarantee.curve, size),
        theorem=f"{guarantee.theorem}, for groups of {size} records",
        assumptions=replace_assumptions(guarantee.assumptions, unit),
        alternatives=(),
        changes=None,
        group_size=guarantee.group_size * size,
    )


def merge_assumptions(groups: Sequence[tuple[Assumption, ...]]) -> tuple[Assumption, ...]:
    """All assumptions once, in order of appearance."""
    return tuple(dict.fromkeys(assumption for group in groups for assumption in group))


def replace_assumptions(
    assumptions: Sequence[Assumption], *new: Assumption
) -> tuple[Assumption, ...]:
    """Drops the assumptions whose topic one of `new` has, and appends `new`.

    Assumptions of `Topic.OTHER` replace nothing and are never replaced.
    """
    topics = {assumption.topic for assumption in new} - {Topic.OTHER}
    kept = tuple(assumption for assumption in assumptions if assumption.topic not in topics)
    return merge_assumptions([kept, new])
