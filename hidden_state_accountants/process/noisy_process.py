r"""The contractive noisy process that an event stands for under a neighbouring relation.

    X_t = Pi(phi_t(X_{t-1}) + N(0, sigma_t**2 I)),  |phi_t(x) - phi_t(y)| <= c_t |x - y|

The modulus c_t is that of :math:`\phi(x) = (1 - \eta w)x - \eta\, G(x)`, G the mean of b gradients,
clipped or not (proofs: docs/theory/moduli.md). `tests/core/test_process.py` re-derives every entry
from the update rule.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import (
    BINS,
    EPOCH_ORDERS,
    OF_RANDOM_SIZE,
    BatchOrder,
)
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.events.schedule import same_in_all_steps
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.conditions import UnmetCondition

SMALLEST_MODULUS = 1e-300
"""What a modulus of 0 is rounded up to where its logarithm is taken."""


def unclipped_update_lipschitz(
    learning_rate: npt.ArrayLike,
    smoothness: float,
    lower_curvature: float = 0.0,
    weight_decay: npt.ArrayLike = 0.0,
) -> np.ndarray:
    r"""Modulus of a step in which clipping never acts.

    .. math:: c = \max(|1 - \eta w - \eta h|, |1 - \eta w - \eta M|)

    for Hessians between h (mu if strongly convex, 0 if convex, -m if weakly convex) and M. Exactly
    b terms must be averaged.
    """
    eta, w = np.asarray(learning_rate), np.asarray(weight_decay)
    decay = 1 - eta * w
    return np.maximum(np.abs(decay - eta * lower_curvature), np.abs(decay - eta * smoothness))


def clipped_update_lipschitz(
    learning_rate: npt.ArrayLike,
    smoothness: float,
    weak_convexity: float = 0.0,
    weight_decay: npt.ArrayLike = 0.0,
) -> float | np.ndarray:
    r"""Modulus of a step with per-example clipping of M-smooth, m-weakly convex losses.

    With :math:`e = \eta(M - m)/4` and :math:`r = \eta(M + m)/4`

    .. math::
        c(\eta) = \begin{cases}
          1 + \eta m & e \le 0 \text{ or } r(1 - 2e) \ge 2e(1 - e) \\
          \eta M - 1 & e \ge 1 \text{ or } r(2e - 1) \ge 2e(1 - e) \\
          \sqrt{1 + r^2 / (e(1 - e))} & \text{otherwise}
        \end{cases}

    which for convex losses (m = 0) is :math:`2/\sqrt{4 - \eta M}` up to :math:`\eta M = 3`. It is
    the exact maximum, not a grid value. Decoupled decay: :math:`(1-\eta w)\,c(\eta/(1-\eta w))`.

    Formal guarantees: valid for every clip that is firmly nonexpansive (the projection on a ball,
    and Opacus' factor min(1, C/(norm + 1e-6))), any clip norm, batch and b; not for normalisation.

    Args:
        learning_rate: eta >= 0.
        smoothness: M >= 0.
        weak_convexity: m >= 0.
        weight_decay: w >= 0 with learning_rate * weight_decay < 1.

    Returns:
        c >= 0, a float if learning_rate and weight_decay are numbers.

    Source: this project (the open question of Chien & Li 2024, arXiv 2410.01068, section 5).
    """
    eta = np.asarray(learning_rate, dtype=np.float64)
    w = np.asarray(weight_decay, dtype=np.float64)
    big = validate.real("smoothness", smoothness, minimum=0)
    small = validate.real("weak_convexity", weak_convexity, minimum=0)
    for name, array in (("learning_rate", eta), ("weight_decay", w)):
        if not (np.isfinite(array) & (array >= 0)).all():
            raise ValueError(f"Expected finite {name} >= 0, got {array!r}.")
    decay = 1 - eta * w
    if not (decay > 0).all():
        raise ValueError(
            f"Expected learning_rate * weight_decay < 1, got {float(np.max(eta * w)):g}."
        )
    result = decay * _clipped(eta / decay, big, small)
    return float(result) if result.ndim == 0 else result


def _clipped(eta: np.ndarray, big: float, small: float) -> np.ndarray:
    e = eta * (big - small) / 4
    r = eta * (big + small) / 4
    product = 2 * e * (1 - e)
    inside = np.where((e > 0) & (e < 1), e * (1 - e), 1.0)
    return np.where(
        (e <= 0) | ((e < 1) & (r * (1 - 2 * e) >= product)),
        1 + eta * small,
        np.where(
            (e >= 1) | (r * (2 * e - 1) >= product),
            eta * big - 1,
            np.sqrt(1 + r * r / inside),
        ),
    )


def update_lipschitz(
    loss: LossGeometry,
    learning_rate: np.ndarray,
    weight_decay: np.ndarray,
    clip_is_active: np.ndarray,
) -> np.ndarray:
    """Modulus per step of the update that averages b gradients of a loss with a linear one.

    A generalized linear model keeps the unclipped row: clipping the gradient loss'(z) x gives the
    gradient of another convex function of z whose second derivative is no larger. A clip is not
    active where the gradient bound is at most the clip norm.
    """
    if loss.kind is LossKind.HOELDER and loss.exponent != 1:
        raise ValueError("A Hölder gradient has no linear modulus.")
    lower = loss.strong_convexity if loss.kind is LossKind.STRONGLY_CONVEX else -loss.weak_convexity
    if loss.kind is LossKind.HOELDER:  # exponent 1: smooth, nothing known from below
        lower = -loss.smoothness
    unclipped = unclipped_update_lipschitz(learning_rate, loss.smoothness, lower, weight_decay)
    if loss.kind in (LossKind.LINEAR, LossKind.GENERALIZED_LINEAR) or not clip_is_active.any():
        return unclipped
    clipped = clipped_update_lipschitz(learning_rate, loss.smoothness, max(-lower, 0), weight_decay)
    return np.where(clip_is_active, clipped, unclipped)


@attrs.frozen(eq=False)
class NoisyProcess:
    """Arrays of shape (num_steps,), index t-1 for step t.

    Attributes:
        contraction: c_t, the Lipschitz constant of the update map.
        sensitivity: s_t, how far one record moves the update of a batch that holds it.
        noise_std: sigma_t, the noise on the iterate.
        drift_contraction: kappa_t and
        drift: 2 eta_t G_t k_t/b: |phi_t(x) - phi'_t(y)| <= kappa_t |x - y| + drift_t, because no
            gradient is longer than G_t. Holds whatever the loss is, and contains s_t.
        domain_diameter: R, of the states before a prox: what it shrinks to the event's.
        period: The record is in batch t exactly if (t-1) % period equals its position.
        positions: The positions the record may have.
        release_steps: Steps after which the iterate is released as well; ascending, below T.
        is_constant: True if all arrays are constant.
    """

    contraction: np.ndarray
    sensitivity: np.ndarray
    noise_std: np.ndarray
    drift_contraction: np.ndarray
    drift: np.ndarray
    domain_diameter: float
    period: int
    positions: tuple[int, ...] | range
    release_steps: tuple[int, ...]
    is_constant: bool

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.contraction)

    @property
    def expands(self) -> bool:
        """True if a step stretches distances."""
        return bool((self.contraction[: 1 if self.is_constant else None] > 1).any())

    def from_step(self, start: int) -> NoisyProcess:
        """The steps after `start`, the end of an epoch, without releases."""
        arrays = ("contraction", "sensitivity", "noise_std", "drift_contraction", "drift")
        rest = {name: getattr(self, name)[start:] for name in arrays}
        positions = range(min(self.period, self.num_steps - start))
        return attrs.evolve(self, positions=positions, release_steps=(), **rest)

    def sensitivity_at(self, position: int, steps: slice = slice(None)) -> np.ndarray:
        """s_t of a record at `position`: zero where the batch does not hold it."""
        whole = self.sensitivity[steps]
        if self.period == 1:
            return whole
        first = (position - (steps.start or 0)) % self.period
        result = np.zeros(len(whole))
        result[first :: self.period] = whole[first :: self.period]
        return result


@functools.lru_cache(maxsize=2)  # asked by the conditions of a bound, and by its proof
def segments(event: LastIterateDpEvent) -> Counter[tuple[int, int]]:
    """Steps before and at the end of segments, which start at 0 if steps are equal, and numbers."""
    ends = itertools.pairwise((0, *event.release_steps, event.num_steps))
    if event.has_schedules:
        return Counter(ends)
    return Counter((0, stop - start) for start, stop in ends)


def unmet_conditions(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    orders: Sequence[BatchOrder] = (BatchOrder.FULL, BatchOrder.CYCLIC),
    *,
    is_linear: bool = True,
) -> tuple[UnmetCondition, ...]:
    """Unmet conditions of a contractive noisy process in one of the batch orders.

    A caller with a modulus of its own, who needs no Lipschitz gradient, says is_linear=False.
    """
    return (
        *conditions.batches(event, relation, orders),
        *conditions.declared_loss(event),
        *(conditions.linear_modulus(event.loss) if is_linear else ()),
    )


def process_of(event: LastIterateDpEvent, relation: NeighboringRelation) -> NoisyProcess | None:
    """The process of any run; None if `unmet_conditions` has some for every order."""
    if unmet_conditions(event, relation, tuple(BatchOrder)):
        return None
    return noisy_process(event, relation)


@same_in_all_steps
def clips_act(event: LastIterateDpEvent) -> np.ndarray:
    """Says where a gradient may be longer than the clip norm; booleans of shape (num_steps,)."""
    if event.clip_norm is None:
        return np.zeros(event.num_steps, dtype=bool)
    lipschitz = None if event.loss is None else event.loss.lipschitz
    limit = np.inf if lipschitz is None else lipschitz
    return limit > event.per_step("clip_norm")


def noisy_process(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    most_terms: int | None = None,
    *,
    is_linear: bool = True,
) -> NoisyProcess:
    """Builds the process of a run, for each position that the record may have in an epoch.

    A random order is a mixture of these positions: the caller's business. Where batches are drawn
    at random, the record joins every one of them. The contraction holds for batches of up to
    `most_terms` gradients, by default `batch_size`; that of a Hölder gradient is infinite.

    Raises:
        UnsupportedRunError: A condition of `unmet_conditions` is not met, whatever the order.
    """
    unmet = unmet_conditions(event, relation, tuple(BatchOrder), is_linear=is_linear)
    if unmet:
        raise UnsupportedRunError("; ".join(map(str, unmet)))
    period = event.batches_per_epoch if event.batch_order in (*EPOCH_ORDERS, *BINS) else 1
    positions = range(min(period, event.num_steps))
    num_steps, release_steps = event.num_steps, event.release_steps
    event = event.one_step_if_constant()
    assert event.loss is not None
    eta, decay = event.per_step("learning_rate"), event.per_step("weight_decay")
    bound = event.gradient_bound()
    b = event.batch_size
    most_terms = most_terms or b
    # One record more or less is one clip norm; only a record in a slot can be replaced by another.
    factor = 2 if relation is NeighboringRelation.REPLACE_ONE else 1
    # k terms divided by b act like b terms at the learning rate eta k / b. The modulus is a
    # supremum of functions that are convex in k: the largest is at an end.
    stretch = most_terms / b
    if event.loss.exponent == 1:
        contraction = update_lipschitz(event.loss, eta * stretch, decay / stretch, clips_act(event))
    else:
        contraction = np.full(len(eta), np.inf)
    terms = 2 * most_terms
    if event.batch_order in OF_RANDOM_SIZE:
        contraction = np.maximum(contraction, np.abs(1 - eta * decay))
    elif relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        terms += 1  # the neighbour's full batch may hold b + 1 records
    per_step = functools.partial(np.broadcast_to, shape=(num_steps,))
    before = _shrunk_before(event)
    return NoisyProcess(
        contraction=per_step(contraction * before),
        sensitivity=per_step(factor * eta * bound / b),
        noise_std=per_step(eta * event.noise_std_on_sum() / b),
        drift_contraction=per_step(np.abs(1 - eta * decay) * before),
        drift=per_step(eta * bound * terms / b),
        domain_diameter=event.domain_diameter / float(np.min(before)),
        period=period,
        positions=positions,
        release_steps=release_steps,
        is_constant=not event.has_schedules,
    )


def _shrunk_before(event: LastIterateDpEvent) -> np.ndarray:
    """Factor that the prox of the step before leaves of a distance; shape as `event.per_step`.

    States are those before the prox, so that the prox of step t is counted with step t + 1. The
    first step starts at a shared state. (docs/theory/theorem_a.md, "A prox after the noise")
    """
    shrunk = 1 / (1 + event.per_step("learning_rate") * event.prox_strong_convexity)
    return shrunk if len(shrunk) == 1 else np.concatenate([[1.0], shrunk[:-1]])
