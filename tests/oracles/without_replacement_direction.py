"""Linear losses and random batches of a fixed size: exact mixtures, in both directions."""

from __future__ import annotations

import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from renyi_evidence import RenyiEvidence
from scipy import stats

from hidden_state_accountants.auditing.evidence import Evidence, Progress
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent

_NEGLIGIBLE = 1e-290  # probability of a number of participations; smaller ones lose digits


@attrs.frozen
class WithoutReplacementDirection:
    r"""Refutes claims that take a subsampled Gaussian in its smaller direction.

    All losses are linear and the gradients lie on a line: the record has the gradient G (G is
    the bound on gradients), every other record h, and the neighbour's record g'. Counted from where
    all batches without the record lead, and in units of the noise, the last iterate is a Gaussian
    mixture over the number k of participations,

    .. math::
        X_T \sim \sum_k \binom{T}{k} q^k (1-q)^{T-k}\, \mathcal{N}(k\,m, T), \qquad
        m = \frac{G - h}{\sigma}, \quad m' = \frac{g' - h}{\sigma}, \quad q = \frac{b}{n}.

    REPLACE_ONE: h = -G, g' = -G (a mixture with m = 2G/sigma against one Gaussian) and h = 0,
    g' = -G (a mixture on each side). REPLACE_SPECIAL: g' = 0, with h = 0 and with h = -G. The
    evidence is the largest value of the four laws' two directions.

    Formal guarantees: the divergences are exact for these runs (up to floating-point rounding), and
    the runs belong to every class of losses but the strongly convex ones. Released iterates
    are not used: they only add to the loss.

    Source: this project. Chien & Li 2024 (arXiv 2410.01068 v1), Definition 3.11 and Theorem 3.12,
    state :math:`D_\alpha(N_0 \| \text{mixture})` at T = 1; the truth is the larger
    :math:`D_\alpha(\text{mixture} \| N_0)`. See docs/papers/last_iterate.md.
    """

    name = "without_replacement_direction"
    event_type = LastIterateDpEvent

    def evidence(
        self, event: dp_accounting.DpEvent, relation: NeighboringRelation, progress: Progress
    ) -> Evidence:
        """The largest exact divergences of the four laws."""
        assert isinstance(event, LastIterateDpEvent)
        progress(f"{self.name}: mixtures over the participations in {event.num_steps} steps")
        bound = float(event.gradient_bound()[0])
        neighbour = -bound if relation is NeighboringRelation.REPLACE_ONE else 0.0
        oracles = [_oracle(event, bound, neighbour, others) for others in (-bound, 0.0)]
        return RenyiEvidence(
            attack=self.name,
            strength="exact",
            witness=(
                f"linear losses with gradient {bound:g} for the record, {neighbour:g} for its "
                f"neighbour, and {-bound:g} or 0 for every other record"
            ),
            delta=lambda epsilon: max(max(oracle.delta(epsilon)) for oracle in oracles),
            renyi=lambda order: max(max(oracle.renyi(order)) for oracle in oracles),
        )


def _oracle(
    event: LastIterateDpEvent, record: float, neighbour: float, others: float
) -> GaussianOracle:
    """The exact law of the last iterate, as one step with all gradients and all noise."""
    steps = event.num_steps
    q = event.sampling_probability
    probabilities = stats.binom.pmf(np.arange(steps + 1), steps, q)
    # The sum of all gradients is T b times `others`, on both sides, and (own - others) for each
    # participation.
    return GaussianOracle(
        np.zeros((1, 1, 1)),
        [
            (float(p), [np.zeros(k, dtype=int)])
            for k, p in enumerate(probabilities)
            if p > _NEGLIGIBLE
        ],
        learning_rate=1.0,
        noise_std=float(event.noise_std_on_sum()[0]) * math.sqrt(steps),
        batch_size=1,
        record=0,
        slope_difference=[neighbour - record],
        slopes=[[record - others]],
    )
