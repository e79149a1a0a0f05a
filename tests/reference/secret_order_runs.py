"""Runs in secret orders for hypothesis: quadratic losses, and every order that may have been."""

import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from hypothesis import assume
from hypothesis import strategies as st
from strategies import (
    EPOCHS,
    REPLACE_ONE,
    SAMPLED,
    decays,
    draw_sampling_rate,
    magnitudes,
    per_step,
    relations,
)

import hidden_state_accountants as hsa


@attrs.frozen(eq=False)
class SecretOrderRun:
    """Linear losses under a random order: mixtures of Gaussians with one covariance.

    Only the record has a gradient, so that the neighbour's law is one Gaussian if its record has
    none. Then the Renyi divergences of integer orders are finite sums, whatever is released.
    """

    event: hsa.LastIterateDpEvent
    relation: NeighboringRelation
    weights: np.ndarray
    means: np.ndarray  # (orders, released), whitened
    oracle: GaussianOracle | None

    def delta(self, epsilon):
        return [] if self.oracle is None else list(self.oracle.delta(epsilon))

    def renyi(self, order):
        if self.oracle is not None:
            return list(self.oracle.renyi(order))
        products = self.means @ self.means.T
        if order == 2:
            return [float(np.log(self.weights @ np.exp(products) @ self.weights))]
        if order == 3:
            terms = np.exp(products)
            inner = np.einsum("ij,ik,jk,j,k->i", terms, terms, terms, self.weights, self.weights)
            return [float(np.log(self.weights @ inner)) / 2]
        return []


@st.composite
def secret_order_runs(draw, orders=(*EPOCHS, *SAMPLED)):
    """Linear losses under every random order, with and without releases."""
    order = draw(st.sampled_from(orders))
    relation = draw(relations(order))
    period, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = period * batch
    steps = draw(st.integers(1, 6 if order in SAMPLED or order is EPOCHS[1] else 12))
    if order is EPOCHS[1]:
        assume(period ** (-(-steps // period)) <= 64)
    released = []
    if relation is not REPLACE_ONE:
        released = draw(st.one_of(st.just([]), st.lists(st.integers(1, steps)), st.just("all")))
        released = list(range(1, steps)) if released == "all" else released
    eta = draw(per_step(magnitudes(0.05, 2), steps, jump=30))
    decay = draw(decays(eta))
    noise = draw(per_step(magnitudes(0.3, 5), steps, jump=30))
    sampling_rate = draw_sampling_rate(draw, order)
    patterns = list(_patterns(order, size, batch, steps, sampling_rate))
    weights = np.array([w for w, _ in patterns])
    present = np.array([p for _, p in patterns], dtype=float)  # (orders, T)
    event = hsa.LastIterateDpEvent(
        noise_multiplier=noise,
        learning_rate=eta,
        weight_decay=decay,
        clip_norm=1.0,
        batch_size=batch,
        dataset_size=size,
        num_steps=steps,
        batch_order=order,
        loss=draw(
            st.sampled_from([hsa.LossGeometry.linear(1.0), hsa.LossGeometry.convex(0.5, 1.0), None])
        ),
        release_steps=released,
        sampling_rate=sampling_rate,
        max_batch_size=size + 1 if order is SAMPLED[1] and draw(st.booleans()) else None,
    )
    kappa = 1 - np.broadcast_to(eta, steps) * decay
    powers = np.array([[np.prod(kappa[i + 1 : t + 1]) * (i <= t) for i in range(steps)]
                       for t in range(steps)])  # fmt: skip
    seen = [r - 1 for r in sorted({*released, steps})]
    step_map = (powers * np.broadcast_to(eta, steps) / batch)[seen]
    noise_map = step_map * np.broadcast_to(noise, steps)
    assume(np.linalg.cond(noise_map) < 1e4)
    means = present @ step_map.T @ np.linalg.pinv(noise_map).T
    assume(np.abs(means @ means.T).max() < 60)
    oracle = None
    if not event.release_steps:
        others = draw(st.sampled_from([0.0, 1.0, -1.0])) if order is not SAMPLED[1] else 0.0
        oracle = GaussianOracle(
            np.zeros((2, 1, 1)),
            [(w, [[0] * p + [1] * (batch - p) for p in map(int, row)]) for w, row in patterns],
            learning_rate=eta,
            noise_std=noise,
            weight_decay=decay,
            batch_size=batch,
            record=0,
            slopes=[[-1.0], [others]] if relation is REPLACE_ONE else [[0.0], [others]],
            slope_difference=[2.0 if relation is REPLACE_ONE else 1.0],
        )
    return SecretOrderRun(event, relation, weights, means, oracle)


def _patterns(order, size, batch, steps, sampling_rate):
    """(probability, presence of the record in each step) pairs."""
    period = size // batch
    if order is EPOCHS[0]:
        for position in range(period):
            yield 1 / period, [t % period == position for t in range(steps)]
        return
    if order is EPOCHS[1]:
        epochs = -(-steps // period)
        for code in range(period**epochs):
            where = [code // period**e % period for e in range(epochs)]
            yield period**-epochs, [t % period == where[t // period] for t in range(steps)]
        return
    rate = sampling_rate or batch / size
    for code in range(2**steps if rate < 1 else 1):
        present = [bool(code >> t & 1) if rate < 1 else True for t in range(steps)]
        yield math.prod(rate if p else 1 - rate for p in present), present
