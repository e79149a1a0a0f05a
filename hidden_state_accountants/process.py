"""The contractive noisy process that an event stands for under a neighbouring relation.

    X_t = Pi(phi_t(X_{t-1}) + N(0, sigma_t**2 I)),  |phi_t(x) - phi_t(y)| <= c_t |x - y|

`tests/core/test_process.py` re-derives every entry from the update rule.
"""

from __future__ import annotations

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import geometry
from hidden_state_accountants.as_composition import indivisible_batches
from hidden_state_accountants.batch_order import (
    BatchOrder,
    sensitivity_in_clip_norms,
    unmet_relation,
)
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events import LastIterateDpEvent
from hidden_state_accountants.loss_geometry import LossKind


@attrs.frozen
class UnmetCondition:
    """One condition of a theorem that an event does not meet."""

    condition: str
    required: str
    actual: str

    def __str__(self) -> str:
        return f"{self.condition}: needs {self.required}, got {self.actual}"


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
        domain_diameter: R.
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

    def sensitivity_at(self, position: int) -> np.ndarray:
        """s_t of a record at `position`: zero where the batch does not hold it."""
        if self.period == 1:
            return self.sensitivity
        result = np.zeros(self.num_steps)
        result[position :: self.period] = self.sensitivity[position :: self.period]
        return result


def unmet_conditions(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> tuple[UnmetCondition, ...]:
    """What keeps `event` from being a contractive noisy process with deterministic batches."""
    unmet = []
    order = event.batch_order
    if order not in (BatchOrder.FULL, BatchOrder.CYCLIC):
        unmet.append(UnmetCondition("deterministic batches", "FULL or CYCLIC", order.name))
    reason = unmet_relation(order, relation)
    if reason:
        unmet.append(UnmetCondition("neighboring relation", reason, relation.name))
    if order is BatchOrder.CYCLIC and event.dataset_size % event.batch_size:
        unmet.append(
            UnmetCondition(
                "equal batches",
                indivisible_batches(event),
                f"a remainder of {event.dataset_size % event.batch_size}",
            )
        )
    if event.loss is None:
        unmet.append(
            UnmetCondition("loss geometry", "a declared LossGeometry (loss=)", "loss=None")
        )
    elif event.loss.kind is LossKind.HOELDER and event.loss.exponent != 1:
        unmet.append(
            UnmetCondition(
                "linear modulus",
                "a Lipschitz gradient (exponent 1)",
                f"exponent {event.loss.exponent:g}",
            )
        )
    return tuple(unmet)


def noisy_process(event: LastIterateDpEvent, relation: NeighboringRelation) -> NoisyProcess:
    """Builds the process of a FULL or CYCLIC run.

    Raises:
        UnsupportedRunError: A condition of `unmet_conditions` is not met.
    """
    unmet = unmet_conditions(event, relation)
    if unmet:
        raise UnsupportedRunError("; ".join(map(str, unmet)))
    assert event.loss is not None
    eta, decay = event.per_step("learning_rate"), event.per_step("weight_decay")
    bound = event.gradient_bound()
    clip_is_active = np.zeros(event.num_steps, dtype=bool)
    if event.clip_norm is not None:
        limit = np.inf if event.loss.lipschitz is None else event.loss.lipschitz
        clip_is_active = limit > event.per_step("clip_norm")
    b = event.batch_size
    factor = sensitivity_in_clip_norms(event.batch_order, relation)
    # Under ADD_OR_REMOVE_ONE the neighbour's full batch may hold b + 1 records.
    terms = 2 * b + (relation is NeighboringRelation.ADD_OR_REMOVE_ONE)
    full = event.batch_order is BatchOrder.FULL
    period = 1 if full else event.batches_per_epoch
    last = event.record_position
    return NoisyProcess(
        contraction=geometry.update_lipschitz(event.loss, eta, decay, clip_is_active),
        sensitivity=factor * eta * bound / b,
        noise_std=eta * event.noise_std_on_sum() / b,
        drift_contraction=np.abs(1 - eta * decay),
        drift=eta * bound * terms / b,
        domain_diameter=event.domain_diameter,
        period=period,
        positions=range(min(period, event.num_steps)) if last is None else (last,),
        release_steps=event.release_steps,
        is_constant=not event.has_schedules,
    )
