r"""Recommended runs of a linear model, for a given epsilon: order, batches, clip, rate, noise.

The recipe is fixed in advance and looks at no record, so that it costs no privacy. With features
of norm 1, :math:`\mu` the Gaussian parameter of the target, n records, clip norm C and T steps, the
learning rate is the least of

.. math:: \frac{\kappa\, n \mu}{C T}, \qquad \frac{k}{2 M}, \qquad \frac{\max(10^4, 3\, n)}{2 M T}

for the Lipschitz constant M of the gradient. With the first term the noise in every weight has the
standard deviation :math:`\kappa` F, whatever the data are: F, the noise factor, is the noise in the
sum of all gradients over that of full batches. An epoch has the fewest batches with which the
second term is not the least one. docs/recommend.md has the constants and where they come from.

Full batches may have momentum (heavy ball): every noisy gradient is accounted as if it were
released, so that whatever is computed from them costs nothing more.

>>> import hidden_state_accountants as hsa
>>> found = hsa.recommend(1500, 1.0, 1e-5, classes=10, orders=["cyclic", "full"], epochs=64)
>>> [(c.event.batch_order.value, c.event.batch_size) for c in found]
[('full', 1500), ('cyclic', 375)]
>>> found.best.event.learning_rate
29.32
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.calibration import calibrate_noise, gaussian_log_mu
from hidden_state_accountants.events.batch_order import (
    BatchOrder,
    parse_batch_order,
    sensitivity_in_clip_norms,
    unmet_relation,
)
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, square_norm
from hidden_state_accountants.figures import round_up, table, text_up
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.losses.envelope import LEAST_SOFTMAX_CLIP_NORM as LEAST_CLIP_NORM
from hidden_state_accountants.losses.envelope import check_clip_norm, envelope_smoothing
from hidden_state_accountants.process.stretching import likely_size

_REASONS = {
    BatchOrder.POISSON: (
        "composition with random batches: nothing about the last iterate is used, every iterate "
        "may be released. Stock Opacus does this."
    ),
    BatchOrder.FULL: (
        "composition with full batches: no order to keep secret, every iterate may be released. "
        "Stock Opacus does this, with poisson_sampling=False and one batch."
    ),
    BatchOrder.BALLS_IN_BINS: (
        "last iterate only: every record in one batch of an epoch, which it draws by itself, once; "
        "the draws must stay secret."
    ),
    BatchOrder.SHUFFLED_ONCE: (
        "last iterate only: batches of a fixed size in one order, which must stay secret."
    ),
    BatchOrder.CYCLIC: "last iterate only: batches of a fixed size in an order that may be public.",
}
ORDERS = tuple(_REASONS)
_COMPOSED = (BatchOrder.POISSON, BatchOrder.FULL)
_BATCHES = (4, 20, 100)  # per epoch; with more the noise of hidden runs grows as fast as they reach
_LEAST_BATCH = 50  # records; smaller batches have not been measured
_SHORT, _LONG = 16, 64  # epochs
_EVALUATIONS = 8_000_000  # gradients that a long run may take: minutes on one core
# The longest gradient over the noise in one of all records. Above it what is not fitted yet costs
# more than noise does, and the noise in a weight may be up to so many times kappa.
_CLEAR, _MOST_KAPPA = 35.0, 4.0
# Total learning rate at which a linear model without noise begins to learn single records: like a
# weight decay of its inverse, which need not be less than about 1/n.
_LONGEST, _LONGEST_PER_RECORD = 1e4, 3.0
_TOLERANCE, _TOLERANCE_OF_FULL = 1e-3, 1e-9  # relative, of the noise; full batches are quick
_DIGITS = 6  # of the noise, rounded up: what is printed is what is accounted


@attrs.frozen
class _Loss:
    """A loss of a linear model, and the constants of the recipe for it."""

    name: str  # constructor of LossGeometry
    clip_norm: float  # of the gradient in the predictions
    kappa: float
    k: float
    most_momentum: float  # more would not come to rest in 64 steps
    fades: bool  # its curvature falls as it is fitted, and with it the noise of long steps
    plain: str  # its criterion in the adapter for Opacus
    envelope: str

    @property
    def curvature(self) -> float:
        """Lipschitz constant of the gradient in the predictions, M."""
        geometry: LossGeometry = getattr(LossGeometry, self.name)(1.0)
        return geometry.smoothness


# The noise in a prediction of a number counts in units of the number: there kappa is small.
LOSSES = {
    loss.name: loss
    for loss in (
        _Loss("softmax_cross_entropy", 0.3, 1.4, 64.0, 0.97, True,
              "CrossEntropyLoss", "EnvelopeCrossEntropyLoss"),
        _Loss("logistic", 0.3, 1.4, 64.0, 0.97, True,
              "BCEWithLogitsLoss", "EnvelopeBCEWithLogitsLoss"),
        _Loss("squared_error", 0.1, 0.2, 4.0, 0.9, False,
              "MSELoss on half the squares", "EnvelopeSquaredErrorLoss"),
    )
}  # fmt: skip


@attrs.frozen(eq=False)
class Candidate:
    """A run that meets the target, with all that is needed to start it.

    Attributes:
        event: The run. Its learning rate is for the mean of the gradients of a batch.
        loss: The name of the loss, as in `LossGeometry`.
        clip_norm: C, of the gradient in the predictions. The event's is that in the parameters.
        smoothing: Smoothing of the loss's envelope; None for the plain loss, whose gradients the
            optimizer clips.
        epochs: Passes over the data.
        noise_factor: F, the noise in the sum of all gradients over that of full batches: 1 is the
            least.
        reach: The share of the total learning rate that the recipe would like to take.
        target_epsilon: What the event's epsilon is not above.
        delta: Delta of the target.
        neighboring_relation: Relation of the target.
        feature_norm: What the records are normalised to.
        spent: What the target is for as well, beside the run; None for nothing.
        momentum: Momentum of the optimizer (heavy ball, as in torch.optim.SGD); 0 for none.
    """

    event: LastIterateDpEvent
    loss: str
    clip_norm: float
    smoothing: float | None
    epochs: int
    noise_factor: float
    reach: float
    target_epsilon: float
    delta: float
    neighboring_relation: NeighboringRelation
    feature_norm: float
    spent: dp_accounting.DpEvent | None = None
    momentum: float = 0.0

    @property
    def score(self) -> float:
        """Noise for the distance that is wanted, over the least: `noise_factor / reach`."""
        return self.noise_factor / self.reach

    @property
    def gradient_evaluations(self) -> int:
        """Gradients of single records that the run computes (of POISSON batches: on average)."""
        return self.event.num_steps * self.event.batch_size

    @property
    def is_composition(self) -> bool:
        """True if nothing depends on the iterates being hidden: all may be released."""
        return self.event.batch_order in _COMPOSED

    @property
    def criterion(self) -> str:
        """The loss to train with, as a constructor of the adapter for Opacus."""
        if self.smoothing is None:
            return LOSSES[self.loss].plain
        smoothing = text_up(self.smoothing, 8)
        return f"{LOSSES[self.loss].envelope}(clip_norm={self.clip_norm:g}, smoothing={smoothing})"

    @property
    def reason(self) -> str:
        """Reason for the run, and what it asks for."""
        return _REASONS[self.event.batch_order]

    def make_private_arguments(self) -> dict[str, Any]:
        """Arguments of `HiddenStatePrivacyEngine.make_private` beside module, optimizer and loader.

        Model, criterion (`hidden_state_adapters.opacus.recommended_criterion`), learning rate,
        momentum and batch size are still to be given; docs/recommend.md has the lines.
        """
        arguments: dict[str, Any] = {
            "noise_multiplier": self.event.noise_multiplier,
            "max_grad_norm": self.event.clip_norm,
            "batch_order": self.event.batch_order.value,
            "num_steps": self.event.num_steps,
        }
        if self.smoothing is not None:
            arguments |= {"loss_geometry": "auto", "feature_norm": self.feature_norm}
        return arguments

    def guarantee(self) -> Guarantee:
        """Guarantee of the run and of what was spent, with its assumptions."""
        accountant = LastIterateAccountant(self.neighboring_relation)
        return accountant.compose(_beside(self.spent, self.event)).guarantee

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = ("criterion", "momentum", "noise_factor", "gradient_evaluations", "target_epsilon",
                 "delta", "is_composition", "score", "reason")  # fmt: skip
        return {
            "event": self.event.to_dict(),
            "neighboring_relation": self.neighboring_relation.name,
            **{name: getattr(self, name) for name in names},
        }


class Recommendation(tuple[Candidate, ...]):
    """Runs that meet one target, at least one, the best first."""

    __slots__ = ()

    @property
    def best(self) -> Candidate:
        """The first."""
        return self[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"candidates": [candidate.to_dict() for candidate in self]}

    def __str__(self) -> str:
        """A table, and what to do with its first row."""
        head = ("order", "batch", "epochs", "noise", "clip", "rate", "factor", "gradients")
        best = self.best
        lines = [
            f"epsilon <= {text_up(best.target_epsilon)} at delta = {best.delta:g} "
            f"({best.neighboring_relation.name}), best first:",
            *table([head, *map(_cells, self)]),
            f"{best.event.batch_order.value}: {best.reason}",
            f"criterion: {best.criterion}; clip norm in the parameters {best.event.clip_norm!r}",
        ]
        other = next((c for c in self if c.is_composition != best.is_composition), None)
        if other is not None:
            lines.append(f"{other.event.batch_order.value}: {other.reason}")
        return "\n".join(lines)


def _cells(candidate: Candidate) -> tuple[str, ...]:
    event: Any = candidate.event
    return (
        event.batch_order.value,
        str(event.batch_size),
        str(candidate.epochs),
        text_up(event.noise_multiplier, _DIGITS),
        f"{candidate.clip_norm:g}",
        f"{event.learning_rate:.4g}",
        f"{candidate.noise_factor:.3f}",
        f"{candidate.gradient_evaluations:,}",
    )


def recommend(
    n: int,
    epsilon: float,
    delta: float,
    *,
    classes: int = 2,
    features: int | None = None,
    feature_norm: float = 1.0,
    bias: bool = False,
    loss: str | None = None,
    clip_norm: float | None = None,
    weight_decay: float = 0.0,
    orders: Iterable[BatchOrder | str] | None = None,
    epochs: int | None = None,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    spent: dp_accounting.DpEvent | None = None,
    momentum: bool = False,
) -> Recommendation:
    """Complete runs that train a linear model with (epsilon, delta), the best first.

    Nothing here looks at records, so the choice costs no privacy: all arguments are public. Of
    every order and length there is one run. They are ranked by the noise for the total learning
    rate that is wanted, up to a hundredth, and then by the number of steps. Composition is among
    them: where it is as good as hiding the iterates, it comes first.

    Formal guarantees: the noise multipliers are those of `calibrate_noise`, rounded up, so that
    `LastIterateAccountant` gives every event an epsilon that is not above the target. What the
    model is worth is not guaranteed: docs/recommend.md has measurements.

    Args:
        n: The number of records; public.
        epsilon: > 0, of the target.
        delta: In (0, 1), of the target.
        classes: 2 trains one logit, more a softmax; of no meaning for "squared_error".
        features: Their number; public. Few of them and many records allow for longer training of
            a classifier. None for too many to count on that.
        feature_norm: A bound on the L2 norm of every record's features. Normalise every record to
            exactly this norm.
        bias: True if a bias is trained as well.
        loss: "logistic", "softmax_cross_entropy" or "squared_error" (targets in [-1, 1]); None
            goes by the classes.
        clip_norm: C, of the gradient in the predictions; None is that of the recipe.
        weight_decay: Decoupled weight decay. The recipe has none: it did not help.
        orders: The batch orders that can be had; None is all of `ORDERS` that the
            relation covers.
        epochs: Passes over the data; None tries 16, and 64 where these are few gradients.
        neighboring_relation: FULL and POISSON only under ADD_OR_REMOVE_ONE.
        spent: What is released of the same records beside the run, such as statistics of their
            features: the target is for both together. Not in the printed table.
        momentum: True if the optimizer can have momentum: FULL batches then do, and reach in 64
            steps what takes thousands without.

    Raises:
        TypeError, ValueError: An argument has an impossible value, no order is covered, or `spent`
            alone is above the target.
    """
    n = validate.integer("n", n, minimum=2)
    validate.target_pair(epsilon, delta, ("epsilon", "delta"))
    classes = validate.integer("classes", classes, minimum=2)
    found_loss = _loss(loss, classes, clip_norm)
    weights = None
    if features is not None:
        outputs = classes if found_loss.name == "softmax_cross_entropy" else 1
        weights = (validate.integer("features", features, minimum=1) + bias) * outputs
    task = _Task(
        n=n,
        epsilon=validate.real("epsilon", epsilon, above=0),
        delta=validate.real("delta", delta, above=0),
        loss=found_loss,
        weights=weights,
        decay=validate.magnitude("weight_decay", weight_decay),
        square=square_norm(feature_norm, bias),
        feature_norm=float(feature_norm),
        bias=bias,
        relation=validate.neighboring_relation(neighboring_relation),
        spent=spent,
    )
    lengths = (_LONG, _SHORT) if n * _LONG <= _EVALUATIONS else (_SHORT,)
    if epochs is not None:
        lengths = (validate.integer("epochs", epochs, minimum=1),)
    found = []
    for order in _orders(orders, task.relation):
        has_momentum = momentum and order is BatchOrder.FULL
        for length in (_LONG,) if has_momentum and epochs is None else lengths:
            found.append(task.candidate(order, length, has_momentum))
    return Recommendation(sorted(found, key=lambda c: (round(c.score, 2), -c.event.num_steps)))


def _loss(name: str | None, classes: int, clip_norm: float | None) -> _Loss:
    if name is None:
        name = "logistic" if classes == 2 else "softmax_cross_entropy"
    if name not in LOSSES:
        raise ValueError(f"Expected loss to be one of {', '.join(LOSSES)}, got {name!r}.")
    if clip_norm is None:
        return LOSSES[name]
    return attrs.evolve(LOSSES[name], clip_norm=check_clip_norm(clip_norm, least=LEAST_CLIP_NORM))


def _orders(
    given: Iterable[BatchOrder | str] | None, relation: NeighboringRelation
) -> Sequence[BatchOrder]:
    if isinstance(given, str):
        raise TypeError(f"Expected orders to be a list of batch orders, got {given!r}.")
    # What a batch of balls in bins is must not follow from the number of records.
    of_relation = _COMPOSED if relation is NeighboringRelation.ADD_OR_REMOVE_ONE else ORDERS
    orders = of_relation if given is None else tuple(map(parse_batch_order, given))
    for order in orders:
        if order not in ORDERS:
            known = ", ".join(known.value for known in ORDERS)
            raise ValueError(f"Expected orders among {known}, got {order.value!r}.")
    covered = [order for order in orders if unmet_relation(order, relation) is None]
    if not covered:
        reason = unmet_relation(orders[0], relation) if orders else "none is named."
        raise ValueError(f"Expected an order that {relation.name} covers: {reason}")
    return covered


@attrs.frozen
class _Task:
    """The target, and the loss on records of a bounded norm."""

    n: int
    epsilon: float
    delta: float
    loss: _Loss
    weights: int | None
    decay: float
    square: float
    feature_norm: float
    bias: bool
    relation: NeighboringRelation
    spent: dp_accounting.DpEvent | None

    @property
    def mu(self) -> float:
        """Mean of the Gaussian curve through the target, for records that count once in a sum."""
        mu = math.exp(gaussian_log_mu(self.epsilon, self.delta))
        return mu / sensitivity_in_clip_norms(BatchOrder.FULL, self.relation)

    @property
    def total(self) -> float:
        """Total learning rate for features of norm 1 that noise and data ask for."""
        kappa = self.loss.kappa
        if self.weights is not None and self.loss.fades:
            clear = self.n * self.mu / math.sqrt(self.weights)
            kappa *= min(max(clear / _CLEAR, 1.0), _MOST_KAPPA)
        longest = max(_LONGEST, _LONGEST_PER_RECORD * self.n) * 0.5 / self.loss.curvature
        return min(kappa * self.n * self.mu / self.loss.clip_norm, longest)

    def steepest(self, order: BatchOrder, split: int) -> float:
        """The longest rate for features of norm 1."""
        longest = self.loss.k * 0.5 / self.loss.curvature
        if order in _COMPOSED and self.loss.fades:
            return longest
        return longest / math.sqrt(split)  # hidden runs are smoothed by as much, and saturate

    def candidate(self, order: BatchOrder, epochs: int, has_momentum: bool) -> Candidate:
        """The run of the recipe with the noise that it needs."""
        splits = [s for s in _BATCHES if self.n >= s * _LEAST_BATCH] or [min(4, self.n)]
        splits = [1] if order is BatchOrder.FULL else splits
        enough = (s for s in splits if self.total / (s * epochs) <= self.steepest(order, s))
        split = next(enough, splits[-1])
        wanted = self.total / (split * epochs)
        decay = self.decay / self.square
        rate = min(wanted, self.steepest(order, split), 0.5 / decay if decay else math.inf)
        momentum = 0.0
        if has_momentum:  # makes up for a rate below the one wanted, as far as it may
            momentum = min(round(1 - rate / wanted, 4), self.loss.most_momentum)
        event, smoothing = self._run(order, split, epochs, rate)
        noise = calibrate_noise(
            self.epsilon,
            self.delta,
            lambda noise: _beside(self.spent, attrs.evolve(event, noise_multiplier=noise)),
            neighboring_relation=self.relation,
            tolerance=_TOLERANCE if split > 1 else _TOLERANCE_OF_FULL,
        )
        return Candidate(
            event=attrs.evolve(event, noise_multiplier=round_up(noise, _DIGITS)),
            loss=self.loss.name,
            clip_norm=self.loss.clip_norm,
            smoothing=smoothing,
            epochs=epochs,
            noise_factor=noise * self.mu * math.sqrt(split / epochs),
            reach=rate / (1 - momentum) / wanted,
            target_epsilon=self.epsilon,
            delta=self.delta,
            neighboring_relation=self.relation,
            feature_norm=self.feature_norm,
            spent=self.spent,
            momentum=momentum,
        )

    def _run(
        self, order: BatchOrder, split: int, epochs: int, rate: float
    ) -> tuple[LastIterateDpEvent, float | None]:
        """The run with the noise still to be found, and the smoothing of an envelope."""
        has_bins = order is BatchOrder.BALLS_IN_BINS
        size = -(-self.n // split) if has_bins else self.n // split
        learning_rate = float(f"{rate / self.square:.4g}")  # with the digits that are printed
        event = LastIterateDpEvent(
            noise_multiplier=1.0,
            learning_rate=learning_rate,
            weight_decay=self.decay,
            # A little above the gradient bound of the envelope, so that rounding never clips.
            clip_norm=_just_above(self.loss.clip_norm * math.sqrt(self.square)),
            batch_size=size,
            dataset_size=self.n if order in _COMPOSED or has_bins else size * split,
            num_steps=split * epochs,
            batch_order=order,
        )
        if order in _COMPOSED:  # which asks for nothing of the loss
            return event, None
        # A large batch acts at a larger rate.
        largest = likely_size(event, self.relation)[0] if has_bins else size
        smoothing = envelope_smoothing(
            learning_rate * largest / size,
            curvature=self.loss.curvature,
            feature_norm=self.feature_norm,
            bias=self.bias,
            weight_decay=self.decay,
        )
        envelope = getattr(LossGeometry, f"envelope_{self.loss.name}")
        loss = envelope(
            self.feature_norm, self.bias, clip_norm=self.loss.clip_norm, smoothing=smoothing
        )
        return attrs.evolve(event, loss=loss), smoothing


def _beside(spent: dp_accounting.DpEvent | None, event: LastIterateDpEvent) -> Any:
    return event if spent is None else dp_accounting.ComposedDpEvent((spent, event))


def _just_above(bound: float) -> float:
    """A clip norm that does not act: Opacus clips with min(1, C / (norm + 1e-6))."""
    return round_up(max(bound * (1 + 1e-5), bound + 2e-6), 8)
