"""Short runs with random batches in one dimension, in which the distance before a window matters.

`grid_runs` has any run; here the noise, the rates and the moduli are such that a window of the last
steps is worth having, so that an attack comes close to what is claimed of it.
"""

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from grid_oracle import GridOracle
from grid_runs import Ramp, Sigmoid
from hypothesis import strategies as st
from strategies import REPLACE_ONE, SAMPLED, magnitudes, relations

import hidden_state_accountants as hsa


@attrs.frozen(eq=False)
class SampledRun:
    """A run and its exact laws, on a grid."""

    event: hsa.LastIterateDpEvent
    relation: NeighboringRelation
    arguments: dict

    def deltas(self, epsilons, cells=8):
        """The larger direction's delta, less three times its error, at each epsilon."""
        oracle = GridOracle(self.event, **self.arguments, cells_per_std=cells)
        return np.array([max(e.value - 3 * e.error for e in oracle.delta(x)) for x in epsilons])


@st.composite
def sampled_runs(draw, orders=SAMPLED, most_steps=5, wanted=None):
    """Losses that are linear, quadratic with a clip, sigmoids or hinges; of any relation."""
    order = draw(st.sampled_from(orders))
    relation = draw(relations(order)) if wanted is None else wanted
    is_poisson = order is SAMPLED[1]
    batch, others = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    size = max(batch + 1, 1 + others)
    steps = draw(st.integers(2, most_steps))
    eta = draw(magnitudes(0.3, 1.0))
    smoothness = draw(st.floats(0.0, 1.8)) / eta
    decay = draw(st.just(0.0) | st.floats(0.0, 0.4)) / eta
    bound = 1.0
    domain = draw(st.none() | st.floats(0.3, 2.0)) if draw(st.booleans()) else None
    event = hsa.LastIterateDpEvent(
        noise_multiplier=draw(st.floats(0.7, 2.5)),
        learning_rate=eta,
        clip_norm=bound,
        weight_decay=decay,
        batch_size=batch,
        dataset_size=size,
        num_steps=steps,
        batch_order=order,
        loss=hsa.LossGeometry.generalized_linear(smoothness, lipschitz=bound),
        domain_diameter=np.inf if domain is None else domain * eta,
        sampling_rate=draw(st.floats(0.05, 0.6)) if is_poisson else None,
    )
    pieces = [
        Ramp(smoothness, draw(st.floats(-0.5, 0.5)), -bound, bound),
        Sigmoid(max(smoothness, 1e-9), 0.0, bound),
        Ramp(smoothness, 0.0, 0.0, bound),
        Ramp(0.0, 0.0, bound, bound),
        Ramp(0.0, 0.0, -bound, -bound),
        None,
    ]
    gradients = [draw(st.sampled_from(pieces)) for _ in range(size)]
    gradients[0] = pieces[3]
    arguments = {
        "gradients": gradients,
        "neighbour": draw(st.sampled_from(pieces[:5])) if relation is REPLACE_ONE else None,
        "record": 0,
        "start": 0.0,
        "domain": None if domain is None else (-domain * eta / 2, domain * eta / 2),
    }
    return SampledRun(event, relation, arguments)
