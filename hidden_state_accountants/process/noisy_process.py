"""The contractive noisy process that an event stands for under a neighbouring relation.

    X_t = Pi(phi_t(X_{t-1}) + N(0, sigma_t**2 I)),  |phi_t(x) - phi_t(y)| <= c_t |x - y|

`tests/core/test_process.py` re-derives every entry from the update rule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import EPOCH_ORDERS, BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.events.schedule import same_in_all_steps
from hidden_state_accountants.process import conditions, geometry
from hidden_state_accountants.process.conditions import UnmetCondition


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
        is_constant: Whether all arrays are constant.
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

    def sensitivity_at(self, position: int, steps: slice = slice(None)) -> np.ndarray:
        """s_t of a record at `position`: zero where the batch does not hold it."""
        whole = self.sensitivity[steps]
        if self.period == 1:
            return whole
        first = (position - (steps.start or 0)) % self.period
        result = np.zeros(len(whole))
        result[first :: self.period] = whole[first :: self.period]
        return result


def unmet_conditions(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    orders: Sequence[BatchOrder] = (BatchOrder.FULL, BatchOrder.CYCLIC),
    *,
    is_linear: bool = True,
) -> tuple[UnmetCondition, ...]:
    """What keeps `event` from being a contractive noisy process in one of the batch orders.

    Args:
        event: The run.
        relation: The neighbouring relation.
        orders: The orders of the batches that are covered.
        is_linear: False for a caller with a modulus of its own, who needs no Lipschitz gradient.
    """
    return (
        *conditions.batches(event, relation, orders),
        *conditions.declared_loss(event),
        *(conditions.linear_modulus(event.loss) if is_linear else ()),
    )


def noisy_process(
    event: LastIterateDpEvent, relation: NeighboringRelation, *, is_linear: bool = True
) -> NoisyProcess:
    """Builds the process of a run with full or epoch-wise batches, for each position of the record.

    A random order is a mixture of these positions: the caller's business.

    Args:
        event: The run.
        relation: The neighbouring relation.
        is_linear: As for `unmet_conditions`. The contraction of a Hölder gradient is infinite.

    Raises:
        UnsupportedRunError: A condition of `unmet_conditions` is not met.
    """
    orders = (BatchOrder.FULL, *EPOCH_ORDERS)
    unmet = unmet_conditions(event, relation, orders, is_linear=is_linear)
    if unmet:
        raise UnsupportedRunError("; ".join(map(str, unmet)))
    period = 1 if event.batch_order is BatchOrder.FULL else event.batches_per_epoch
    last = event.record_position
    return _process(
        event,
        relation,
        period=period,
        positions=range(min(period, event.num_steps)) if last is None else (last,),
        most_terms=event.batch_size,
    )


def sampled_process(
    event: LastIterateDpEvent, relation: NeighboringRelation, most_terms: int
) -> NoisyProcess:
    """The process in which the record joins every batch, of a run with random batches.

    Args:
        event: A POISSON or WITHOUT_REPLACEMENT run whose `unmet_conditions` are met.
        relation: The neighbouring relation.
        most_terms: The largest number of gradients that a batch may sum; the contraction holds
            for every number from 0 on unless the batches have a fixed size.
    """
    return _process(event, relation, period=1, positions=(0,), most_terms=most_terms)


def process_of(event: LastIterateDpEvent, relation: NeighboringRelation) -> NoisyProcess | None:
    """The process of any run, that with batches of b records where they are random.

    None if `unmet_conditions` has some for every order.
    """
    if unmet_conditions(event, relation, tuple(BatchOrder)):
        return None
    if event.batch_order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        return sampled_process(event, relation, event.batch_size)
    return noisy_process(event, relation)


@same_in_all_steps
def clips_act(event: LastIterateDpEvent) -> np.ndarray:
    """Whether a gradient may be longer than the clip norm; booleans of shape (num_steps,)."""
    if event.clip_norm is None:
        return np.zeros(event.num_steps, dtype=bool)
    lipschitz = None if event.loss is None else event.loss.lipschitz
    limit = np.inf if lipschitz is None else lipschitz
    return limit > event.per_step("clip_norm")


def _process(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    *,
    period: int,
    positions: tuple[int, ...] | range,
    most_terms: int,
) -> NoisyProcess:
    num_steps, release_steps = event.num_steps, event.release_steps
    event = event.one_step_if_constant()
    assert event.loss is not None
    eta, decay = event.per_step("learning_rate"), event.per_step("weight_decay")
    bound = event.gradient_bound()
    b = event.batch_size
    # One record more or less is one clip norm; only a record in a slot can be replaced by another.
    factor = 2 if relation is NeighboringRelation.REPLACE_ONE else 1
    # k terms divided by b act like b terms at the learning rate eta k / b. The modulus is a
    # supremum of functions that are convex in k: the largest is at an end.
    stretch = most_terms / b
    if event.loss.exponent == 1:
        contraction = geometry.update_lipschitz(
            event.loss, eta * stretch, decay / stretch, clips_act(event)
        )
    else:
        contraction = np.full(len(eta), np.inf)
    terms = 2 * most_terms
    if event.loss.curvature is not None:
        contraction = np.minimum(contraction, _of_curvature(event, relation, event.loss.curvature))
    if event.batch_order is BatchOrder.POISSON:
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
    """What the prox of the step before leaves of a distance; shape as `event.per_step`.

    States are those before the prox, so that the prox of step t is counted with step t + 1. The
    first step starts at a shared state. (docs/theory/theorem_a.md, "A prox after the noise")
    """
    shrunk = 1 / (1 + event.per_step("learning_rate") * event.prox_strong_convexity)
    return shrunk if len(shrunk) == 1 else np.concatenate([[1.0], shrunk[:-1]])


def _of_curvature(
    event: LastIterateDpEvent, relation: NeighboringRelation, curvature: float
) -> np.ndarray:
    """The modulus if the mean loss of every batch is that curved; inf where it has none."""
    loss = event.loss
    assert loss is not None
    if event.batch_order is BatchOrder.POISSON:  # the sizes of batches enter it
        return np.full(event.num_steps, np.inf)
    strong_convexity = loss.strong_convexity
    if relation is not NeighboringRelation.REPLACE_ONE:
        # The bound may be one for the data without the record alone, whose loss is missing there.
        strong_convexity *= 1 - 1 / event.batch_size
    modulus = geometry.unclipped_update_lipschitz(
        event.per_step("learning_rate"),
        curvature,
        strong_convexity,
        event.per_step("weight_decay"),
    )
    if loss.kind is LossKind.GENERALIZED_LINEAR:  # a clip leaves it one
        return modulus
    return np.where(clips_act(event), np.inf, modulus)
