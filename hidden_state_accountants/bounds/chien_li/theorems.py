"""The theorems of Chien & Li 2024 for full and epoch-wise batches, as numbers of a run."""

from __future__ import annotations

import itertools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.chien_li import linear
from hidden_state_accountants.bounds.chien_li.hoelder import HoelderModulus, HoelderProblem
from hidden_state_accountants.bounds.solvers.constant_run import ConstantRun
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind

SECRET = (BatchOrder.SHUFFLED_ONCE, BatchOrder.RESHUFFLED)


def theorem_of(event: LastIterateDpEvent) -> str:
    """The theorem of the paper that is about such a run."""
    hoelder = event.loss is not None and event.loss.exponent != 1
    return {
        BatchOrder.FULL: "Theorem 3.7" if hoelder else "Theorem 3.1",
        BatchOrder.WITHOUT_REPLACEMENT: "Theorem 3.12",
        BatchOrder.SHUFFLED_ONCE: "Corollary A.3",
        BatchOrder.RESHUFFLED: "Corollary A.3",
    }.get(event.batch_order, "Theorem A.1")


def sound_values(
    event: LastIterateDpEvent, relation: NeighboringRelation, run: ConstantRun
) -> np.ndarray:
    """2 D_alpha/alpha per equally likely order, with this package's moduli."""
    if _is_hoelder(run):
        # Under add-or-remove all terms of the smaller batch are in both.
        share = 1 if relation is NeighboringRelation.ADD_OR_REMOVE_ONE else None
        return _hoelder_values(event, run, share)
    c = run.contraction()
    return _linear_values(event, run, c, c)


def _is_hoelder(run: ConstantRun) -> bool:
    return run.loss.kind is LossKind.HOELDER and run.loss.exponent != 1


def published_values(event: LastIterateDpEvent, run: ConstantRun) -> tuple[np.ndarray, str]:
    """2 D_alpha/alpha per equally likely order, and the theorem."""
    theorem = theorem_of(event)
    if _is_hoelder(run):
        full = event.batch_order is BatchOrder.FULL
        return _hoelder_values(event, run, 1 if full else None), theorem
    stretch = run.learning_rate * _gradient_lipschitz(run)
    smooth = 1 + stretch
    if event.batch_order is not BatchOrder.FULL:
        own = 1 + stretch * (run.batch_size - 1) / run.batch_size
        return _linear_values(event, run, smooth, own), theorem
    c = published_lipschitz(run)
    distance = closed_form_distance(c, run)
    lipschitz = linear.least_value(c, run.sensitivity, distance, period=1, position=0)
    hoelder = float(_linear_values(event, run, smooth, smooth)[0])
    return np.array([min(hoelder, lipschitz)]), "Theorem 3.7" if hoelder < lipschitz else theorem


def _gradient_lipschitz(run: ConstantRun) -> float:
    """L: Hessians between -m and M."""
    return max(run.loss.smoothness, run.loss.weak_convexity)


def published_lipschitz(run: ConstantRun) -> float:
    """Lemma 3.4: 1 + eta L; 1 for convex and 1 - eta m for strongly convex losses, if unclipped."""
    eta, smoothness, kind = run.learning_rate, _gradient_lipschitz(run), run.loss.kind
    not_convex = (LossKind.WEAKLY_CONVEX, LossKind.SMOOTH, LossKind.HOELDER)
    # Chien & Li 2024, Lemma 3.4, arXiv 2410.01068
    if run.clip_is_active or kind in not_convex or eta * smoothness > 2:
        return 1 + eta * smoothness
    if kind is LossKind.STRONGLY_CONVEX and eta * smoothness <= 1:
        return 1 - eta * run.loss.strong_convexity
    return 1.0


# --- the distance of the two runs ------------------------------------------------------------


def tracked_distance(
    with_record: HoelderModulus,
    without_record: HoelderModulus,
    run: ConstantRun,
    participations: np.ndarray,
) -> np.ndarray:
    r"""D_0..D_T under shared noise.

    .. math:: D_t = \min(g(D_{t-1}) + s_t,\; \kappa D_{t-1} + 2\eta K,\; R)

    Args:
        with_record: g where the batch holds the record.
        without_record: g elsewhere.
        run: s, kappa, 2 eta K and R.
        participations: Booleans of shape (T,).
    """
    result, z = [0.0], 0.0
    for holds in participations.tolist():
        if holds or z > 0:
            modulus = with_record if holds else without_record
            stretched = float(modulus.decay * z + modulus.coefficient * z**modulus.exponent)
            own = run.sensitivity if holds else 0.0
            # Chien & Li 2024, Lemmas 3.5, 3.10 and A.2, arXiv 2410.01068
            z = min(stretched + own, run.decay * z + run.drift, run.diameter)
        result.append(z)
    return np.array(result)


def closed_form_distance(contraction: float, run: ConstantRun) -> np.ndarray:
    """min(s sum_{t<tau} c^t, 2 eta K tau, R) for tau = 0..T, the distance of Theorem 3.1."""
    taus = np.arange(run.num_steps + 1, dtype=np.float64)
    with np.errstate(over="ignore"):
        geometric = (
            (
                taus
                if contraction == 1
                else np.expm1(taus * math.log(contraction)) / (contraction - 1)
            )
            if contraction > 0
            else np.minimum(taus, 1.0)
        )
        # Chien & Li 2024, Theorem 3.1, arXiv 2410.01068
        return np.minimum(np.minimum(run.sensitivity * geometric, run.drift * taus), run.diameter)


def _every(period: int, position: int, num_steps: int) -> np.ndarray:
    steps = np.arange(num_steps)
    return (steps >= position) & ((steps - position) % period == 0)


def _positions(event: LastIterateDpEvent, run: ConstantRun) -> np.ndarray:
    """The positions to look at: constant parameters make the batch processed last the worst."""
    if event.batch_order in SECRET:
        return np.arange(run.period)
    return np.array([run.last_position if run.position is None else run.position])


def _late(distance: np.ndarray, position: int) -> np.ndarray:
    """The distance of a record that takes part `position` steps later."""
    late = np.concatenate([np.zeros(min(position, len(distance))), distance])
    return late[: len(distance)]


# --- the theorems ----------------------------------------------------------------------------


def _linear_values(
    event: LastIterateDpEvent, run: ConstantRun, contraction: float, own_contraction: float
) -> np.ndarray:
    """Theorem 3.1 or A.1 with recursive tracking; `own_contraction` where the record takes part."""
    others, own = (HoelderModulus(0.0, c, 1.0) for c in (contraction, own_contraction))
    if event.batch_order is BatchOrder.RESHUFFLED and run.period > 1:
        return _reshuffled_values(run, others, own)
    distance = tracked_distance(own, others, run, _every(run.period, 0, run.num_steps))
    return np.array(
        [
            linear.least_value(
                contraction,
                run.sensitivity,
                _late(distance, position),
                period=run.period,
                position=position,
            )
            for position in _positions(event, run).tolist()
        ]
    )


def hoelder_moduli(run: ConstantRun, share: float | None) -> tuple[HoelderModulus, HoelderModulus]:
    """g, and g where the record takes part: (b - 1)/b of the terms are the same on both sides."""
    scale = run.noise_std ** (run.loss.exponent - 1) if run.noise_std > 0 else 1.0
    coefficient = run.learning_rate * _gradient_lipschitz(run) * scale
    if share is None:
        share = (run.batch_size - 1) / run.batch_size
    whole = HoelderModulus(run.decay, coefficient, run.loss.exponent)
    return whole, attrs.evolve(whole, coefficient=coefficient * share)


def _hoelder_values(event: LastIterateDpEvent, run: ConstantRun, share: float | None) -> np.ndarray:
    """Theorem 3.7 or A.1."""
    whole, own = hoelder_moduli(run, share)
    if event.batch_order is BatchOrder.RESHUFFLED and run.period > 1:
        return _reshuffled_values(run, whole, own)
    distance = tracked_distance(own, whole, run, _every(run.period, 0, run.num_steps))
    positions = _positions(event, run)
    problem = HoelderProblem.periodic(whole, run.sensitivity, distance, run.period, positions)
    return problem.least_values()


def _reshuffled_values(run: ConstantRun, others: HoelderModulus, own: HoelderModulus) -> np.ndarray:
    """Theorem A.1 for every equally likely sequence of positions."""
    epochs, steps = -(-run.num_steps // run.period), np.arange(run.num_steps)
    present = np.array([
        np.array(chosen)[steps // run.period] == steps % run.period
        for chosen in itertools.product(range(run.period), repeat=epochs)
    ])  # fmt: skip
    distances = np.array([tracked_distance(own, others, run, row) for row in present])
    return HoelderProblem.tabulated(others, run.sensitivity, present, distances).least_values()
