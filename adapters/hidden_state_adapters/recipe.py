"""The recommended private fit of a linear model, as the estimators and `fit_head` share it.

Gradient descent on all records with momentum, from zero, by `hidden_state_accountants.recommend`.
Everything that is released beside the steps is a Gaussian mechanism with a fixed share of the
target. No training framework is needed: who has the records sums their gradients.
"""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants import (
    Assumption,
    Candidate,
    Guarantee,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.bounds.assumptions import ONE_EXAMPLE, PUBLIC_CALLS
from hidden_state_accountants.calibration import gaussian_log_mu
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.guarantee import Topic, replace_assumptions
from hidden_state_accountants.ledger import active_budget, budget_at
from hidden_state_adapters import temperature
from hidden_state_adapters.own_noise import OWN_NOISE, OwnGenerator
from hidden_state_adapters.public_numbers import warn_of_delta
from hidden_state_adapters.whitening import moment_bound, noise_is_short

INTERCEPT_SHARE = 0.3
"""The constant feature of an intercept, in norms of a record."""
_STATISTICS = 0.1  # of the squared mu of the target is for the statistics of the columns
_COVARIANCE = 0.1  # of it is for their covariance, beside the statistics
_CORRECTION = 0.03  # of it is for what corrects probabilities or the intercept of a regression
_MOST_NOISE = 0.025  # of its noise, in records: with more a correction is not worth its share
_LONGEST_LOSSES = temperature.RECORD_NORM
_LONGEST_RESIDUAL = 0.5  # in a mean of residuals, for targets in [-1, 1]
_SECONDS = 2.0  # between two lines of progress

Progress = Callable[[int, int], None]
GradientSum = Callable[[np.ndarray], np.ndarray]


@attrs.frozen(eq=False)
class Target:
    """An epsilon at a delta, of everything that one fit releases.

    Attributes:
        epsilon, delta: > 0.
        relation: REPLACE_SPECIAL or REPLACE_ONE.
    """

    epsilon: float
    delta: float
    relation: NeighboringRelation

    @classmethod
    def of(cls, epsilon: float, delta: float, relation: NeighboringRelation | str) -> Target:
        """Checks the arguments of a fit; raises TypeError or ValueError for impossible values."""
        validate.target_pair(epsilon, delta, ("epsilon", "delta"))
        validate.real("epsilon", epsilon, above=0)
        validate.real("delta", delta, above=0)
        relation = validate.neighboring_relation(relation)
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise ValueError(
                "Expected neighboring_relation REPLACE_SPECIAL or REPLACE_ONE, got "
                "ADD_OR_REMOVE_ONE: the number of records sets the batches and the learning rate "
                "here, so it is public. REPLACE_SPECIAL is add-or-remove with that number fixed."
            )
        return cls(epsilon, delta, relation)

    def share(self, of_squared_mu: float) -> GaussianDpEvent:
        """Returns the release of a sum that has this share of the target.

        The multiplier is for the norm bound of one record, which counts twice under REPLACE_ONE.
        """
        mu = math.sqrt(of_squared_mu) * math.exp(gaussian_log_mu(self.epsilon, self.delta))
        norms = 2.0 if self.relation is NeighboringRelation.REPLACE_ONE else 1.0
        return GaussianDpEvent(norms / mu)

    def centring_pays(self, records: int, columns: int) -> bool:
        """Tells, by public numbers, whether the noise in the means is no longer than a record."""
        return self.share(_STATISTICS).noise_multiplier * math.sqrt(columns) / records <= 1

    def whitening_pays(self, records: int, columns: int) -> bool:
        """Tells, by public numbers alone, whether noise leaves much of means and covariance."""
        std = self.share(_COVARIANCE).noise_multiplier * moment_bound(self.relation)
        return self.centring_pays(records, columns) and noise_is_short(std, records, columns)

    def correction_pays(self, records: int) -> bool:
        """Tells, by public numbers, whether noise in mean losses or residuals is small."""
        return self.share(_CORRECTION).noise_multiplier / records <= _MOST_NOISE


@attrs.frozen(eq=False)
class Recipe:
    """A fit that meets a target.

    Attributes:
        run: The steps.
        statistics: Release of the statistics of the columns; None for none.
        covariance: Release of their covariance after that; None for none.
        correction: Release of a temperature or of a mean residual; None for none.
    """

    run: Candidate
    statistics: GaussianDpEvent | None = None
    covariance: GaussianDpEvent | None = None
    correction: GaussianDpEvent | None = None

    @classmethod
    def of(
        cls,
        target: Target,
        shape: tuple[int, int],
        feature_norm: float,
        constant: float,
        has_statistics: bool,
        has_correction: bool,
        has_covariance: bool = False,
        **options: Any,
    ) -> Recipe:
        """Returns the recommended fit to public numbers.

        Args:
            target: Target of everything.
            shape: (records, columns).
            feature_norm: Norm of every record.
            constant: Feature of the intercept; 0 without one.
            has_statistics: True to release statistics of the columns.
            has_correction: True to release a correction, where that pays.
            has_covariance: True to release their covariance.
            **options: Loss, classes and clip norm, for `hidden_state_accountants.recommend`.
        """
        warn_of_delta(target.delta, shape[0])
        has_correction = has_correction and target.correction_pays(shape[0])
        statistics = target.share(_STATISTICS) if has_statistics else None
        covariance = target.share(_COVARIANCE) if has_covariance else None
        correction = target.share(_CORRECTION) if has_correction else None
        run = hsa.recommend(
            shape[0],
            target.epsilon,
            target.delta,
            features=shape[1] + bool(constant),
            feature_norm=math.hypot(feature_norm, constant),
            orders=["full"],
            momentum=True,
            neighboring_relation=target.relation,
            spent=_together(statistics, covariance, correction),
            **options,
        ).best
        return cls(run, statistics, covariance, correction)

    @property
    def beside(self) -> DpEvent | None:
        """Everything that is released beside the steps."""
        return _together(self.statistics, self.covariance, self.correction)

    @property
    def event(self) -> DpEvent:
        """Everything that is released."""
        released = (self.statistics, self.covariance, self.run.event, self.correction)
        parts = [event for event in released if event is not None]
        return parts[0] if len(parts) == 1 else ComposedDpEvent(parts)

    @property
    def covariance_std(self) -> float:
        """The noise in every entry of the sum of moments of rows of norm 1; 0 for public rows."""
        if self.covariance is None:
            return 0.0
        return self.covariance.noise_multiplier * moment_bound(self.run.neighboring_relation)

    def guarantee(self, *assumptions: Assumption) -> Guarantee:
        """Returns the guarantee of the fit, with what it rests on and what an adapter adds."""
        accountant = hsa.LastIterateAccountant(self.run.neighboring_relation).compose(self.event)
        event, found, checked = self.run.event, accountant.guarantee, Assumption.checked
        texts = [
            checked(
                f"{event.num_steps} steps with constant settings, chosen before the records are "
                "looked at",
                Topic.FIXED_IN_ADVANCE,
            ),
            checked(
                "every step is about all records, and all its noisy gradients may be released",
                Topic.ORDER,
            ),
            checked(
                f"sums of gradients are divided by the constant {event.batch_size}", Topic.DIVISOR
            ),
            checked(
                "every record is brought to its norm by itself, and its gradient is no longer than "
                f"{event.gradient_bound()[0]:g}",
                Topic.GRADIENT_NORM,
            ),
            checked("training starts at zero", Topic.START),
            OWN_NOISE,
            ONE_EXAMPLE,
            PUBLIC_CALLS,
            Assumption.public(f"the number of records, {event.dataset_size}"),
        ]
        if self.covariance is not None:
            what = (
                "the second moment of the centred features, each brought to norm 1 by itself, was"
            )
            texts.append(_released(what, self.covariance))
        if self.correction is not None:
            what = f"the losses at four temperatures, together no longer than {_LONGEST_LOSSES:g}"
            if self.run.loss == "squared_error":
                what = f"the sum of the residuals, each no longer than {_LONGEST_RESIDUAL:g}"
            texts.append(_released(f"{what}, were", self.correction))
        return attrs.evolve(
            found, assumptions=replace_assumptions(found.assumptions, *texts, *assumptions)
        )

    def released(self, what: str) -> Assumption:
        """Returns the assumption about statistics, `what` with its verb, that were released."""
        assert self.statistics is not None
        return _released(what, self.statistics)

    def spend(self, sent_from: pathlib.Path | None = None) -> str | None:
        """Counts the fit in a budget, before anything of it happens, and says so; None for none.

        The ledger of another process (`sent_from`) counts where this one has none.

        Raises:
            BudgetExceededError: The fit would go over it.
        """
        found = active_budget()
        if found is None and sent_from is not None:
            found = budget_at(sent_from)
        if found is None:
            return None
        number = found.spend(self.event, self.run.neighboring_relation)
        return (
            f"number {number} in a budget of epsilon {found.epsilon:g} at delta {found.delta:g}, "
            "which holds for all of them together"
        )

    def train(
        self,
        gradient_sum: GradientSum,
        shape: tuple[int, int],
        generator: OwnGenerator,
        progress: Progress,
    ) -> np.ndarray:
        """Returns the last iterate of the run, from zero.

        Formal guarantees: that of the event of the run, with the noisy sums of all steps released:
        everything else is computed from them and from public numbers.

        Args:
            gradient_sum: Sum over all records of gradients that are no longer than the clip norm of
                the event, wherever the weights are; in float64.
            shape: Shape of the weights.
            generator: Generator of the noise.
            progress: Function that is called with the number of steps taken and of all steps.

        Raises:
            UnsupportedRunError: A gradient is not finite. No epsilon covers what was trained so
                far.
        """
        event = self.run.event
        std = float(event.noise_std_on_sum()[0])
        rate, decay = (float(event.per_step(n)[0]) for n in ("learning_rate", "weight_decay"))
        weights, velocity = np.zeros(shape), np.zeros(shape)
        for step in range(event.num_steps):
            total = gradient_sum(weights)
            if not np.isfinite(total).all():
                raise UnsupportedRunError(
                    f"Step {step + 1} has a gradient that is not a finite number, so no epsilon "
                    "covers the run. Look for extreme values in the records, and start again with "
                    "other ones."
                )
            total = total + generator.normal(std, shape)
            velocity = self.run.momentum * velocity + total / event.batch_size + decay * weights
            weights = weights - rate * velocity
            progress(step + 1, event.num_steps)
        return weights

    def scale(
        self, losses: Callable[[], np.ndarray], classes: int, generator: OwnGenerator
    ) -> float:
        """Returns the factor of the logits that makes them probabilities of so many classes.

        Formal guarantees: that of the event `correction`, whatever the logits are. `losses` returns
        the sum of `temperature.clipped_losses` over all records.
        """
        if self.correction is None:
            run = self.run
            target = Target(run.target_epsilon, run.delta, run.neighboring_relation)
            records = run.event.dataset_size / target.share(1.0).noise_multiplier
            return temperature.public_scale(classes, records)
        return temperature.best_scale(self._mean(losses(), _LONGEST_LOSSES, generator))

    def shift(self, residuals: Callable[[], np.ndarray], generator: OwnGenerator) -> float:
        """Returns the mean error of predictions of targets in [-1, 1], to be added to them.

        Huber's loss finds about the median, which is not the mean where targets are skewed.

        Formal guarantees: that of the event `correction`, whatever the residuals are. `residuals`
        returns targets less predictions, of all records.
        """
        if self.correction is None:
            return 0.0
        cut = np.clip(residuals(), -_LONGEST_RESIDUAL, _LONGEST_RESIDUAL)
        return float(self._mean(np.array([cut.sum()]), _LONGEST_RESIDUAL, generator)[0])

    def _mean(self, total: np.ndarray, longest: float, generator: OwnGenerator) -> np.ndarray:
        """Returns the noisy mean, for a sum to which no record adds more than `longest`."""
        assert self.correction is not None
        noisy = total + generator.normal(self.correction.noise_multiplier * longest, total.shape)
        return noisy / self.run.event.batch_size


def _together(*events: GaussianDpEvent | None) -> DpEvent | None:
    given = [event for event in events if event is not None]
    return ComposedDpEvent(given) if len(given) > 1 else next(iter(given), None)


def _released(what: str, event: GaussianDpEvent) -> Assumption:
    return Assumption.checked(
        f"{what} released once, with Gaussian noise of multiplier {event.noise_multiplier:.6g}; "
        "epsilon is that of everything together"
    )


def shrunk(means: np.ndarray, std: float) -> np.ndarray:
    """Returns noisy means, moved towards zero where noise is most (James and Stein 1961)."""
    square = float(means @ means)
    noise = max(len(means) - 2, 0) * std**2
    return means * (max(1 - noise / square, 0.0) if square > 0 else 0.0)


def middle_and_half(bounds: Any) -> tuple[float, float]:
    """Returns middle and half distance of `target_bounds`; raises ValueError for others."""
    try:
        low, high = (validate.real("target_bounds", bound) for bound in bounds)
    except (TypeError, ValueError):
        low = high = 0.0
    if not low < high:
        raise ValueError(
            f"Expected target_bounds=(low, high), two numbers with low < high, got {bounds!r}: the "
            "range of the targets is private. Take it from public knowledge."
        )
    return (high + low) / 2, (high - low) / 2


def check_public_features(shape: tuple[int, ...], columns: int, is_same: bool) -> None:
    """Raises ValueError for public features of other columns, or that are the records."""
    if shape[1] != columns:
        raise ValueError(
            f"Expected public_features of {columns} columns, as the records have, got shape "
            f"{tuple(shape)}."
        )
    if is_same:
        raise ValueError(
            "Expected public_features of other data, got the records themselves, which are what "
            "epsilon protects. Leave public_features out."
        )


def progress(name: str, candidate: Candidate, is_printed: Any) -> Progress:
    """Returns what prints how far a training is: the number of steps, nothing of the records."""
    if not is_printed:
        return silent
    event, last = candidate.event, time.monotonic()
    print(
        f"{name}: {event.num_steps} passes over {event.dataset_size} records, epsilon "
        f"{text_up(candidate.target_epsilon)} at delta {candidate.delta:g} "
        f"({candidate.neighboring_relation.name})",
        flush=True,
    )

    def tell(step: int, steps: int) -> None:
        nonlocal last
        now = time.monotonic()
        if step == steps or now - last > _SECONDS:
            last = now
            print(f"{name}: pass {step} of {steps}", flush=True)

    return tell


def silent(step: int, steps: int) -> None:
    """No progress."""
