"""dp_accounting.PrivacyAccountant subclasses: thin, no formulas.

>>> import hidden_state_accountants as hsa
>>> event = hsa.LastIterateDpEvent(
...     noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.4143, batch_size=500,
...     dataset_size=50_000, num_steps=20_000, batch_order="cyclic",
...     loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0), weight_decay=0.1)
>>> accountant = hsa.LastIterateAccountant().compose(event)
>>> round(accountant.get_epsilon(target_delta=1e-5), 4)
1.993
>>> round(accountant.guarantee.mu, 5)
0.49997
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.advice import single_changes
from hidden_state_accountants.best_bound import RUN_EVENTS, best_guarantee, bound_guarantee
from hidden_state_accountants.bounds import (
    BlockCoordinate,
    Bound,
    ChienLi,
    DiceSgd,
    KongRibero,
    Langevin,
    ShiftedInterpolation,
)
from hidden_state_accountants.curves.base import Curve, GaussianCurve
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.standard import standard_curve
from hidden_state_accountants.curves.transformed import of_groups
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import (
    Guarantee,
    group_guarantee,
    merge_assumptions,
)
from hidden_state_accountants.process.groups import run_of_groups

_Details = dp_accounting.PrivacyAccountant.CompositionErrorDetails


@attrs.frozen(slots=False)
class _Composed:
    """Everything composed so far: the guarantees of the runs, with counts, and all else."""

    relation: NeighboringRelation
    guarantees: tuple[tuple[Guarantee, int], ...] = ()
    rest: Curve = GaussianCurve(0.0)
    size: int = 1  # of groups, each of whose members the guarantees are about

    @functools.cached_property
    def curve(self) -> Curve:
        runs = [(guarantee.curve, count) for guarantee, count in self.guarantees]
        return compose_curves([*runs, (self.rest, 1)])

    @functools.cached_property
    def curve_of_groups(self) -> Curve:
        return self.curve if self.size == 1 else of_groups(self.curve, self.size)

    def guarantee(self) -> Guarantee:
        guarantees = [guarantee for guarantee, _ in self.guarantees]
        if [count for _, count in self.guarantees] == [1] and self.rest.mu == 0:
            return guarantees[0]
        theorems = list(dict.fromkeys(guarantee.theorem for guarantee in guarantees))
        if self.rest.mu != 0:
            is_private = self.rest.mu != math.inf
            theorems.append("dp-accounting events" if is_private else "a non-private event")

        caveats = dict.fromkeys(g.caveat for g in guarantees if g.caveat)
        return Guarantee(
            curve=self.curve,
            neighboring_relation=self.relation,
            group_size=guarantees[0].group_size if guarantees else 1,
            theorem="composition of: " + "; ".join(theorems) if theorems else "nothing composed",
            assumptions=merge_assumptions([guarantee.assumptions for guarantee in guarantees]),
            alternatives=guarantees[0].alternatives if len(guarantees) == 1 else (),
            caveat="; ".join(caveats),
            citations=tuple(dict.fromkeys(c for g in guarantees for c in g.citations)),
        )


def compose_guarantees(
    guarantees: Sequence[Guarantee], neighboring_relation: NeighboringRelation | str
) -> Guarantee:
    """The guarantee of several runs together, each with its own guarantee under the relation."""
    relation = validate.neighboring_relation(neighboring_relation)
    for guarantee in guarantees:
        if guarantee.neighboring_relation is not relation:
            raise ValueError(
                f"Expected guarantees for {relation.name}, got one for "
                f"{guarantee.neighboring_relation.name}."
            )
    sizes = {guarantee.group_size for guarantee in guarantees}
    if len(sizes) > 1:
        raise ValueError(
            f"Expected guarantees for groups of one size, got {sorted(sizes)}. Compose the runs in "
            "one LastIterateAccountant with group_size."
        )
    found = _Composed(relation, tuple((guarantee, 1) for guarantee in guarantees)).guarantee()
    events = [guarantee.event for guarantee in guarantees]
    if len(events) < 2 or None in events:
        return found
    return attrs.evolve(found, event=dp_accounting.ComposedDpEvent(events))


class _LastIterateBase(dp_accounting.PrivacyAccountant):
    """Composes last-iterate runs with each other and with standard events."""

    def __init__(
        self,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        *,
        group_size: int = 1,
    ):
        super().__init__(validate.neighboring_relation(neighboring_relation))
        self.group_size = validate.integer("group_size", group_size, minimum=1)
        self._composed = _Composed(self.neighboring_relation, size=self.group_size)
        self._after = self._composed

    def _run_guarantee(self, event: dp_accounting.DpEvent) -> Guarantee:
        raise NotImplementedError

    def compose(self, event: dp_accounting.DpEvent, count: int = 1) -> Any:
        """Accounts for `count` runs of `event`, each on its own; a failure changes nothing.

        Raises:
            UnsupportedRunError: No bound covers the event; the text names the condition.
        """
        try:
            return super().compose(event, count)
        except dp_accounting.UnsupportedEventError as error:
            raise UnsupportedRunError(str(error)) from None

    def _maybe_compose(self, event: dp_accounting.DpEvent, count: int, do_compose: bool) -> Any:
        if do_compose:  # of the event that `compose` asked about just before
            self._composed = self._after
            return None
        count = max(count, 0)  # `supports` asks with 0; the ledger rejects a negative count
        composed = self._composed
        for leaf, leaf_count in _leaves(event, count):
            try:
                composed = self._with(composed, leaf, leaf_count)
            except UnsupportedRunError as error:
                return _Details(leaf, str(error))
        if count:
            try:  # does the work now: a stock accountant may choke on an event
                composed.curve_of_groups.epsilon(1e-5)
            except (ArithmeticError, AssertionError, TypeError, ValueError) as error:
                return _Details(event, f"dp-accounting rejects it: {error!r}")
        self._after = composed
        return None

    def _with(self, composed: _Composed, leaf: dp_accounting.DpEvent, count: int) -> _Composed:
        if isinstance(leaf, RUN_EVENTS):
            guarantees = (*composed.guarantees, (self._of_run(leaf), count))
            return attrs.evolve(composed, guarantees=guarantees)
        try:
            curve = standard_curve(leaf, count, self.neighboring_relation)
        except (TypeError, ValueError) as error:
            raise UnsupportedRunError(str(error)) from None
        try:
            rest = compose_curves([(composed.rest, 1), (curve, count)])
        except ValueError as error:
            text = f"{error}, together with what is composed already"
            raise UnsupportedRunError(text) from None
        return attrs.evolve(composed, rest=rest)

    def _of_run(self, event: dp_accounting.DpEvent) -> Guarantee:
        relation = self.neighboring_relation
        if self.group_size > 1:
            event = run_of_groups(event, relation, self.group_size)
        return with_changes(self._run_guarantee(event), event, relation)

    def get_epsilon(self, target_delta: float) -> float:
        """The smallest proved epsilon of everything composed, at a delta in [0, 1].

        It is 0 before anything is composed, and inf after a non-private event or zero noise.
        """
        return self._composed.curve_of_groups.epsilon(validate.target_delta(target_delta))

    def get_delta(self, target_epsilon: float) -> float:
        """The smallest proved delta of everything composed, at an epsilon in [0, inf]."""
        return self._composed.curve_of_groups.delta(validate.target_epsilon(target_epsilon))

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of everything composed, with theorem and assumptions."""
        found = group_guarantee(self._composed.guarantee(), self.group_size)
        return attrs.evolve(found, curve=self._composed.curve_of_groups, event=self.ledger)


def _leaves(
    event: dp_accounting.DpEvent, count: int
) -> Iterator[tuple[dp_accounting.DpEvent, int]]:
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from _leaves(event.event, event.count * count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from _leaves(part, count)
    else:
        yield event, count


def with_changes(
    guarantee: Guarantee, event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> Guarantee:
    """The guarantee of a run, which can then say what ran and what would lower its epsilon."""
    guarantee = attrs.evolve(guarantee, event=event)
    if not isinstance(event, LastIterateDpEvent):
        return guarantee
    return attrs.evolve(guarantee, changes=functools.partial(single_changes, event, relation))


class LastIterateAccountant(_LastIterateBase):
    """The smallest of all sound bounds that apply to each run, ordinary composition included.

    Formal guarantees:
      - Every figure is an upper bound, in both directions of `neighboring_relation`.
      - Released: per run the last iterate and the iterates after its `release_steps`.
      - Runs compose with each other and with standard events: exactly (mu-GDP) while all are
        Gaussian, otherwise by privacy losses or RDP, whichever is tighter; the error of the
        arithmetic is added (docs/theory/numerical_error.md).

    Standard events are read under `neighboring_relation`; a Gaussian event under REPLACE_ONE has
    sensitivity 2.

    Args:
        neighboring_relation: REPLACE_SPECIAL (a record is replaced by one with zero gradient),
            REPLACE_ONE, or ADD_OR_REMOVE_ONE (FULL and POISSON batches only).
        group_size: Number of records that one person has at most: all figures are then about data
            sets that differ in that many (docs/theory/theorem_a.md).
    """

    def _run_guarantee(self, event: dp_accounting.DpEvent) -> Guarantee:
        return best_guarantee(event, self.neighboring_relation)


class BoundAccountant(_LastIterateBase):
    """The theorems of one source alone; an error names an unmet condition."""

    def __init__(
        self, neighboring_relation: NeighboringRelation, bound: Bound, *, group_size: int = 1
    ):
        super().__init__(neighboring_relation, group_size=group_size)
        self._bound = bound

    def _run_guarantee(self, event: dp_accounting.DpEvent) -> Guarantee:
        if not isinstance(event, self._bound.event_type):
            raise UnsupportedRunError(
                f"{type(self).__name__} accounts for {self._bound.event_type.__name__}, "
                f"got {type(event).__name__}."
            )
        try:
            guarantee = bound_guarantee(self._bound, event, self.neighboring_relation)
        except UnsupportedRunError as error:
            text = str(error).rstrip(".")
            raise UnsupportedRunError(f"{text}. Or use LastIterateAccountant.") from None
        if guarantee.caveat:
            warnings.warn(f"{guarantee.theorem}: {guarantee.caveat}", UserWarning, stacklevel=2)
        return guarantee


class _PaperAccountant(BoundAccountant):
    """One paper's theorems, each soundly or as published."""

    _bound_type: Callable[[str], Bound]

    def __init__(
        self,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        *,
        analysis: str = "sound",
    ):
        super().__init__(neighboring_relation, type(self)._bound_type(analysis))


class ShiftedInterpolationAccountant(_PaperAccountant):
    """Theorem A alone (`bounds.ShiftedInterpolation`); its only `analysis` is "sound"."""

    _bound_type = ShiftedInterpolation


class LangevinAccountant(_PaperAccountant):
    """Chourasia, Ye, Shokri 2021 (arXiv 2102.05855) alone (`bounds.Langevin`).

    `analysis="sound"` is what Theorem A proves of the paper's runs, from a fixed start; "published"
    is Corollary 1.
    """

    _bound_type = Langevin


class ChienLiAccountant(_PaperAccountant):
    """Chien & Li 2024 (arXiv 2410.01068) alone (`bounds.ChienLi`); its relation is REPLACE_ONE.

    `analysis="sound"` is what Theorem A proves of the paper's runs; "published" reads
    WITHOUT_REPLACEMENT batches by Theorem 3.12, which is false and warns.
    """

    _bound_type = ChienLi


class KongRiberoAccountant(_PaperAccountant):
    """Kong & Ribero 2025 (arXiv 2407.05237) alone (`bounds.KongRibero`); it has REPLACE_ONE.

    `analysis="sound"` is what Theorem A proves of the paper's runs; "published" are the formulas as
    stated, of which Theorem 2.2 is false under clipping and warns.
    """

    _bound_type = KongRibero


class BlockCoordinateAccountant(_PaperAccountant):
    """Runs of `BlockCoordinateDpEvent` alone (`bounds.BlockCoordinate`).

    The relation decides how far one clipped record moves a sum; a declared gradient_sensitivity is
    read as that of this relation. `analysis="sound"`, or "published" for Chen & Liu 2025 (arXiv
    2407.08233), Theorem 4.6, which is false in general and warns.
    """

    _bound_type = BlockCoordinate


class DiceSgdAccountant(_PaperAccountant):
    """Runs of `DiceSgdDpEvent` alone (`bounds.DiceSgd`).

    `analysis="sound"`, or "published" for Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Theorem 3.7,
    which is false and warns.
    """

    _bound_type = DiceSgd
