"""The gain of a script: one run, accounted by all its iterates and by the last one."""

from __future__ import annotations

import math
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.advice import single_changes, why_nothing_contracts
from hidden_state_accountants.bounds.composition import composition_of
from hidden_state_accountants.calibration import calibrate_noise
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.guarantee import change_lines
from hidden_state_accountants.process.noisy_process import process_of

_ONLY = "only with these batches"
_LEAST = 0.99  # of the stock epsilon; a gain of less is none
_TOLERANCE = 1e-3  # of the noise multiplier at equal epsilon


@attrs.frozen
class Gain:
    """The epsilons of one run, with every iterate published and with the last one only.

    Attributes:
        event: The run.
        delta: Where all epsilons are read.
        neighboring_relation: The relation of all of them.
        epsilon: Epsilon of the last iterate.
        theorem: The theorem behind it.
        every_iterate: Epsilon of all iterates, with the batches of the run.
        with_poisson_batches: The same with Poisson batches, as Opacus draws them; inf for a run of
            Poisson or full batches.
        noise_multiplier: Noise with which the last iterate has epsilon `stock`; None where nothing
            is gained, or the noise changes while training.
        change: The change that helps most, those that cost no accuracy first, and the epsilon of
            the last iterate after it; None if none helps.
        reason: Why nothing is gained, where it is known; else empty.
    """

    event: LastIterateDpEvent
    delta: float
    neighboring_relation: NeighboringRelation
    epsilon: float
    theorem: str
    every_iterate: float
    with_poisson_batches: float
    noise_multiplier: float | None = None
    change: tuple[str, float] | None = None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Says "yes", "no", or "only with these batches" where stock Poisson batches cost less."""
        if not self.epsilon < _LEAST * self.every_iterate:
            return "no"
        return "yes" if self.epsilon < _LEAST * self.with_poisson_batches else _ONLY

    @property
    def stock(self) -> float:
        """Epsilon to compare with: of all iterates, with Poisson batches if the run beats them."""
        poisson = self.with_poisson_batches if self.verdict == "yes" else math.inf
        return min(self.every_iterate, poisson)

    def to_dict(self) -> dict[str, Any]:
        """Plain types; the event as its own `to_dict`."""
        plain = attrs.asdict(self, recurse=False)
        relation, event = self.neighboring_relation.name, self.event.to_dict()
        return {"verdict": self.verdict, **plain, "neighboring_relation": relation, "event": event}

    def __str__(self) -> str:
        last, every = text_up(self.epsilon, 4), text_up(self.every_iterate, 4)
        where = f"delta {self.delta:g}, {self.neighboring_relation.name}"
        lines = [
            f"would it gain: {self.verdict}",
            f"at equal noise ({where}): epsilon {last} of the last iterate, {every} of all of them",
        ]
        if self.with_poisson_batches < math.inf:
            poisson = text_up(self.with_poisson_batches, 4)
            lines.append(f"with Poisson batches, as stock Opacus draws: {poisson} of all of them")
        if self.noise_multiplier is not None:
            lines.append(
                f"at equal epsilon, {text_up(self.stock, 4)}: noise multiplier "
                f"{text_up(self.noise_multiplier, 4)} instead of {self.event.noise_multiplier:g}"
            )
        lines += [f"reason: {self.reason}"] if self.reason else []
        lines += change_lines(self.epsilon, [self.change] if self.change else ())
        return "\n".join([*lines, f"theorem: {self.theorem}"])


def would_gain(
    event: dp_accounting.DpEvent,
    delta: float = 1e-5,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
) -> Gain:
    """Accounts for a run with every iterate published, and with the last one only.

    Formal guarantees: every epsilon is an upper bound that this package proves, of the run that its
    text describes.

    Args:
        event: Run of noisy SGD.
        delta: Delta where epsilon is read, in (0, 1).
        neighboring_relation: Relation of all figures.

    Returns:
        A `Gain`; `print` it.

    Raises:
        TypeError: `event` is no LastIterateDpEvent: of other runs every step counts.
        UnsupportedRunError: No theorem covers the run.
        ValueError: `delta` is not in (0, 1).
    """
    if not isinstance(event, LastIterateDpEvent):
        raise TypeError(
            f"Expected a LastIterateDpEvent, got {type(event).__name__}: hiding the iterates is "
            "about noisy SGD. Ask hsa.compare what the accountants say of this run."
        )
    delta = validate.target_delta(delta)
    relation = validate.neighboring_relation(neighboring_relation)
    guarantee = LastIterateAccountant(relation).compose(event).guarantee
    epsilon = guarantee.epsilon(delta)

    def of_all(run: LastIterateDpEvent) -> float:
        composed = composition_of(run, relation)
        return math.inf if composed is None else composed.epsilon(delta)

    poisson = math.inf
    if event.batch_order not in (BatchOrder.POISSON, BatchOrder.FULL):
        poisson = of_all(attrs.evolve(event, batch_order=BatchOrder.POISSON, max_batch_size=None))
    gain = Gain(
        event=event,
        delta=delta,
        neighboring_relation=relation,
        epsilon=epsilon,
        theorem=guarantee.theorem,
        every_iterate=of_all(event),
        with_poisson_batches=poisson,
        change=next(iter(single_changes(event, relation, delta, epsilon)), None),
    )
    if gain.verdict == "no":
        reason = why_nothing_contracts(event, relation)
        if not reason and (process := process_of(event, relation)) is not None:
            c = float(process.contraction.max())
            reason = f"too few steps: one of them keeps up to c = {c:.4g} of a distance"
        return attrs.evolve(gain, reason=reason)
    if isinstance(event.noise_multiplier, Schedule) or gain.stock == math.inf:
        return gain
    options: Any = {"neighboring_relation": relation, "tolerance": _TOLERANCE}
    return attrs.evolve(gain, noise_multiplier=calibrate_noise(gain.stock, delta, event, **options))
