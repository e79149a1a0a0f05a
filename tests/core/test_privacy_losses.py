"""Profiles, losses on a grid and their composition, against exact arithmetic."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from scipy import fft, stats

from hidden_state_accountants.curves import (
    composed_loss,
    losses,
    profiles,
    standard,
)
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.curves.by_profile import zeroed_without_replacement
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.composed_loss import ComposedLoss, Parts
from hidden_state_accountants.curves.gaussian import deltas_from_mu
from hidden_state_accountants.curves.losses import GRID, UNIT, PrivacyLoss


def poisson_reference(mu, rate, epsilon, *, is_forward):
    """(1 - q) N(0, 1) + q N(mu, 1) against N(0, 1), or the reverse, from the likelihood ratio."""
    ratio = mpmath.exp(epsilon if is_forward else -epsilon)
    threshold = mpmath.log((ratio - 1 + rate) / rate) / mu + mpmath.mpf(mu) / 2
    sign = -1 if is_forward else 1  # beyond the threshold, or below it
    own, shifted = (mpmath.ncdf(sign * (threshold - m)) for m in (0, mu))
    mixture = (1 - mpmath.mpf(rate)) * own + rate * shifted
    return mixture - ratio * own if is_forward else own - mixture / ratio


@pytest.mark.parametrize("mu", [1e-3, 0.1, 0.9, 3.0, 12.0])
@pytest.mark.parametrize("rate", [1e-4, 0.03, 0.7])
def test_poisson_sampled_gaussians(mu, rate):
    profile = profiles.poisson(profiles.gaussian(mu), rate)
    with mpmath.workdps(60):
        for share in (0.0, 0.01, 0.2, 0.5, 0.8, 0.99):
            epsilon = share * profile.largest
            exact = poisson_reference(mu, rate, epsilon, is_forward=True)
            found = float(profile.forward(np.array([epsilon]))[0])
            assert abs(found / exact - 1) <= profiles.RELATIVE_ERROR
            epsilon = share * -math.log1p(-rate)
            exact = poisson_reference(mu, rate, epsilon, is_forward=False)
            found = float(profile.backward(np.array([epsilon]))[0])
            assert found >= exact * (1 - profiles.RELATIVE_ERROR) - 1e-300
            assert found <= exact * (1 + 1e-6) + 1e-30


PROFILES = {
    "gaussian": profiles.gaussian(0.7),
    "laplace": profiles.laplace(3.0),
    "mixture": profiles.gaussian_mixture(np.array([0.7, 0.3]), np.array([0.1, 1.1])),
    "without replacement": profiles.without_replacement(profiles.gaussian(2.0), 0.1),
    "poisson": profiles.poisson(profiles.gaussian(1.5), 0.05),
    "poisson laplace": profiles.poisson(profiles.laplace(0.5), 0.2),
    "rare": profiles.poisson(profiles.gaussian(0.5), 1e-5),
    "two far peaks": profiles.gaussian_mixture(np.array([1 - 1e-6, 1e-6]), np.array([0.01, 3.0])),
}


@pytest.mark.parametrize("name", PROFILES)
def test_divergences_lie_just_above_the_profile(name):
    profile, loss = PROFILES[name], PrivacyLoss.of(PROFILES[name])
    composed = ComposedLoss([(loss, 1)])
    swapped = ComposedLoss([(PrivacyLoss(loss.backward, loss.forward), 1)])
    for share in (0.0, 1e-3, 0.1, 0.3, 0.5, 0.7):
        epsilon = share * profile.largest
        at = np.array(epsilon)
        exact = max(float(profile.forward(at)), float(profile.backward(at)))
        # The rest counts as infinite, or between two far peaks as the transform's error.
        if exact > (1e-19 if name in ("rare", "two far peaks") else 1e-45):
            assert exact <= composed.delta(epsilon) <= exact * (1 + 3e-4)
            assert swapped.delta(epsilon) == composed.delta(epsilon)
    there, back = loss.forward, loss.backward
    for masses in (there, back):  # are a law
        assert (masses.masses >= 0).all()
        assert 1 <= masses.masses.sum() + masses.infinite <= 1 + 1e-11
    below = there.masses[: -there.lower][::-1]  # zero: is that of the opposite direction
    above = back.masses[-back.lower + 1 :]
    losses = np.arange(1, len(above) + 1) * back.grid
    np.testing.assert_allclose(below, np.exp(-losses) * above, rtol=1e-12)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", PROFILES)
def test_a_coarse_law_bounds_every_exponential_and_every_tail(name, direction):
    """Tails are bounded by it: were it smaller anywhere, losses would leave a window unpaid."""
    masses = getattr(PrivacyLoss.of(PROFILES[name]), direction)
    losses = np.arange(masses.lower, masses.highest + 1) * masses.grid
    nodes, coarse = masses.coarse
    assert len(nodes) < 0.2 * len(losses)
    assert nodes @ coarse == pytest.approx(losses @ masses.masses, rel=1e-10)
    for theta in (-20.0, -1.0, 0.0, 0.5, 3.0, 20.0, 100.0):
        top = (theta * nodes).max()
        exact = masses.masses @ np.exp(theta * losses - top)
        bound = coarse @ np.exp(theta * nodes - top)
        assert exact * (1 - 1e-12) <= bound
        assert bound <= exact * (1.01 if abs(theta) <= 3 else math.e)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", PROFILES)
def test_no_divergence_is_smaller_on_a_wider_grid(name, direction):
    """Sum and mean of exp(-loss) stay: the dots that are connected are those of the same pair."""
    fine = getattr(PrivacyLoss.of(PROFILES[name]), direction)
    losses = np.arange(fine.lower, fine.highest + 1) * fine.grid
    for factor in (2, 64):
        wide = fine.on_grid(factor * fine.grid)
        places = np.arange(wide.lower, wide.highest + 1) * wide.grid
        assert wide.masses.sum() == pytest.approx(fine.masses.sum(), rel=1e-12)
        opposite = wide.masses @ np.exp(-places)
        assert opposite == pytest.approx(fine.masses @ np.exp(-losses), rel=1e-12)
        for epsilon in np.linspace(-1.0, losses[-1], 50):
            exact, bound = (
                np.maximum(-np.expm1(epsilon - x), 0.0) @ masses
                for x, masses in ((losses, fine.masses), (places, wide.masses))
            )
            assert exact <= bound * (1 + 1e-13)
            if epsilon % wide.grid < fine.grid / 2:
                assert bound <= exact * (1 + 1e-2) + 1e-12


@pytest.mark.parametrize(
    "gaussians", [[(1.0, 500)], [(2.0, 5000)], [(40.0, 1)], [(40.0, 1), (1.5, 144)]]
)
def test_large_epsilons_on_wider_grids(gaussians):
    """Also of losses on two grids; the exact curve is known."""
    composed = ComposedLoss([(PrivacyLoss.of(profiles.gaussian(mu)), n) for mu, n in gaussians])
    exact = GaussianCurve(math.sqrt(sum(n * mu**2 for mu, n in gaussians))).epsilon(1e-5)
    assert exact > 300
    assert exact <= composed.epsilon(1e-5) <= exact * (1 + 1e-4)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_directions_that_meet_at_zero_only_up_to_rounding_lose_no_mass(direction):
    """Others' gradients may be 0: then these are Poisson sampled steps, many of which are Gaussian.

    2e-9 of the mass of a step was missing, a fifth of that of all.
    """
    mu, rate, times = 1e-5, 0.5, 10**8
    loss = getattr(PrivacyLoss.of(zeroed_without_replacement(mu, rate)), direction)
    assert loss.masses.sum() + loss.infinite >= 1
    exact = GaussianCurve(rate * mu * math.sqrt(times))
    composed = ComposedLoss([(PrivacyLoss(loss, loss), times)])
    for delta in (1e-3, 1e-10):
        assert delta <= composed.delta(exact.epsilon(delta)) <= 1.1 * delta


SMALL = {
    "gaussian": [(profiles.gaussian(0.004), 5)],
    "poisson": [(profiles.poisson(profiles.gaussian(0.03), 0.1), 4)],
    "two": [(profiles.gaussian(0.003), 2), (profiles.poisson(profiles.laplace(20.0), 0.2), 3)],
}
HAS_MORE_DIGITS = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps


@pytest.mark.skipif(not HAS_MORE_DIGITS, reason="long doubles are doubles here")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", SMALL)
def test_composition_against_sums_in_more_digits(name, direction):
    parts = [(getattr(PrivacyLoss.of(profile), direction), n) for profile, n in SMALL[name]]
    grid = max(part.grid for part, _ in parts)
    parts = [(part.on_grid(grid), n) for part, n in parts]
    law, lower, finite = np.ones(1, dtype=np.longdouble), 0, np.longdouble(1)
    for part, count in parts:
        for _ in range(count):
            law = np.convolve(law, part.masses.astype(np.longdouble))
            lower += part.lower
            finite *= 1 - np.longdouble(part.infinite)
    losses = (lower + np.arange(len(law))) * np.longdouble(grid)
    composed = ComposedLoss([(PrivacyLoss(part, part), count) for part, count in parts])
    for epsilon in np.linspace(0, 0.9, 19) * float(losses[-1]):
        above = losses > epsilon
        exact = 1 - finite + law[above] @ -np.expm1(np.longdouble(epsilon) - losses[above])
        assert exact <= composed.delta(epsilon)
        assert composed.delta(epsilon) <= exact * (1 + 1e-6) or exact < 1e-40


@pytest.mark.parametrize(
    ("chosen", "mu", "times", "closeness"),
    [(0.01, 0.5, 2000, 2e-6), (1e-6, 1.7, 10**5, 2e-4), (1e-6, 1.7, 10**6, 2e-4)],
)
def test_a_mechanism_that_runs_now_and_then_and_says_so(chosen, mu, times, closeness):
    """The number of runs is binomial, and Gaussian runs add up."""
    profile = profiles.gaussian_mixture(np.array([1 - chosen, chosen]), np.array([0.0, mu]))
    composed = ComposedLoss([(PrivacyLoss.of(profile), times)])
    runs = np.arange(1, min(times, 2000) + 1)
    weights = stats.binom.pmf(runs, times, chosen)
    for delta in (0.1, 1e-3, 1e-6, 1e-10, 1e-14):
        epsilon = composed.epsilon(delta)
        exact = float(weights @ deltas_from_mu(mu * np.sqrt(runs), epsilon))
        assert delta * (1 - closeness) <= exact <= delta or epsilon == 0


def test_the_error_of_the_transform_is_added(monkeypatch):
    """Of 100,000 steps whose masses are all left to the fast transform."""
    loss = PrivacyLoss.of(profiles.poisson(profiles.gaussian(1.0), 0.01))

    def deltas():
        composed = ComposedLoss([(loss, 10**5)])
        return np.array([composed.delta(epsilon) for epsilon in (1.0, 5.0, 10.0, 20.0, 40.0)])

    with monkeypatch.context() as patch:
        patch.setattr(composed_loss, "fft", WorstTransform)
        found = deltas()
    monkeypatch.setattr(composed_loss, "_norm_of_weights", lambda *_: 0.0)
    assert (deltas() <= found).all()
    assert (found <= 1.001 * deltas()).all()


def largest_error(size):
    """Relative, of 2-norms."""
    return 8 * UNIT * math.log2(size)


class WorstTransform:
    """All of the error of a transform in the coefficient of the sum, which is then too small."""

    @staticmethod
    def rfft(values):
        result = fft.rfft(values)
        size = len(values)
        result[0] -= largest_error(size) * math.sqrt(size) * np.linalg.norm(values)
        return result

    @staticmethod
    def irfft(values, size):
        result = fft.irfft(values, size)
        return result - largest_error(size) * np.linalg.norm(result) / math.sqrt(size)


@pytest.mark.skipif(not HAS_MORE_DIGITS, reason="long doubles are doubles here")
@pytest.mark.parametrize("size", [2, 6, 256, 2**13, 3 * 2**16, 2**18])
def test_the_transform_is_as_exact_as_assumed(size):
    generator = np.random.default_rng(size)
    bell = np.exp(-(np.linspace(-8, 8, size) ** 2))
    for masses in (generator.random(size), bell, bell * generator.random(size), np.eye(1, size)[0]):
        found, exact = (fft.rfft(masses.astype(kind)) for kind in (np.float64, np.longdouble))
        allowed = largest_error(size) * np.linalg.norm(exact)
        assert np.linalg.norm(found - exact) <= allowed / math.sqrt(2)  # rfft gives one half
        back, exact = (fft.irfft(exact.astype(kind), size) for kind in (complex, np.clongdouble))
        assert np.linalg.norm(back - exact) <= largest_error(size) * np.linalg.norm(exact)


def test_powers_are_as_exact_as_assumed():
    turns = np.linspace(0, 1, 1000, endpoint=False)
    base = np.exp(2j * np.pi * turns) * (1 - 1e-5 * turns)
    for exponent in (1, 2, 7, 1000, 12345):
        with mpmath.workdps(40):
            exact = np.array([complex(mpmath.mpc(z) ** exponent) for z in base])
        found = composed_loss._power(base, exponent)
        assert np.abs(found / exact - 1).max() <= 2.3 * UNIT * exponent + UNIT


@pytest.mark.parametrize("count", [1024, 10**6, 10**9])
def test_logarithms_are_as_exact_as_assumed(count):
    """Of a loss that is nearly always the same: a long power has the error of its small rest."""
    generator = np.random.default_rng(count)
    size, cells = 64, np.array([5, 6, 4, 11, 60])
    masses = np.zeros(size)
    masses[cells] = np.append(1.0, generator.random(4) / np.sqrt(count))
    masses /= masses.sum() * (1 + 256 * UNIT)
    found = composed_loss._transformed_power(masses, count, np.ones(size // 2 + 1, dtype=bool))
    assert (found.rest, found.place) == (0.0, 5)
    assert (found.error < (2e-12 if count == 10**6 else 1e-10)).all()
    with mpmath.workdps(60):
        for k in range(0, size // 2 + 1, 4):
            turn = mpmath.expjpi(mpmath.mpf(-2 * k) / size)
            terms = (mpmath.mpf(float(masses[i])) * turn ** int(i - 5) for i in cells)
            exact = mpmath.fsum(terms) ** count
            off = found.values[k] - complex(exact)
            assert abs(off) <= found.error[k] * abs(complex(exact)) + 1e-40


def test_the_error_of_the_inverse_transform_is_added(monkeypatch):
    """Of masses that are all evaluated one by one there is no other error of a transform."""
    masses = np.zeros(64)
    masses[[0, 1, 5, 63]] = 1e-6, 1 - 3e-6, 1e-6, 1e-6
    parts = Parts([(losses.LossMasses(-1, masses, 0.0), 1000)], GRID)
    how = parts.tilt(0.0), -100, 900
    direction = composed_loss._Direction(parts)
    exact, _ = direction._convolved(*how)
    more = direction._finite_part(how[0]._replace(lost=1e-3), -100, 900, 0, 9)
    assert (more - direction._finite_part(*how, 0, 9) >= 1e-3).all()  # of cells left out of a part

    class WorstInverse(WorstTransform):
        rfft = staticmethod(fft.rfft)

        @staticmethod
        def irfft(values, size):
            result = fft.irfft(values, size)
            result[np.argmax(result)] -= largest_error(size) * np.linalg.norm(result)
            return result

    monkeypatch.setattr(composed_loss, "fft", WorstInverse)
    found, error = composed_loss._Direction(parts)._convolved(*how)
    assert 1e-15 < np.linalg.norm(found - exact) <= error < 1e-13


@pytest.mark.parametrize(("mu", "times"), [(3.0, 10**7), (1e-3, 10**14)])
def test_what_is_too_long_or_too_often_claims_nothing(mu, times):
    composed = ComposedLoss([(PrivacyLoss.of(profiles.gaussian(mu)), times)])
    assert composed.delta(1.0) == 1.0
    assert composed.epsilon(0.5) == math.inf
    assert PrivacyLoss.of(profiles.gaussian(1e4)) is None  # would take gigabytes


@pytest.mark.parametrize(("infinite", "total"), [(1.0, 1.0), (1e-12, 1e-9)])
def test_mass_at_infinity_is_paid_exactly(infinite, total):
    gaussian = PrivacyLoss.of(profiles.gaussian(0.5)).forward
    leaking = type(gaussian)(gaussian.lower, gaussian.masses, infinite)
    composed = ComposedLoss([(PrivacyLoss(leaking, leaking), 1000)])
    assert composed.delta(500.0) == pytest.approx(total, rel=1e-8, abs=0)
    assert composed.epsilon(0.99 * total) == math.inf
    assert composed.epsilon(1.01 * total) < math.inf


def test_what_sums_of_masses_round_off_counts_as_infinite():
    small, times = 0.9 * UNIT, 10**12
    parts = Parts([(losses.LossMasses(0, np.append(1.0, np.full(6, small)), 1e-13), times)], GRID)
    with mpmath.workdps(40):
        finite = 1 + 6 * mpmath.mpf(small)
        assert (finite + 1e-13) ** times - finite**times <= parts.infinite


def test_what_is_remembered_belongs_to_a_relation():
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
    removed, replaced = (
        compose_curves([(standard.EventCurve(event, relation), 7)]).epsilon(1e-5)
        for relation in (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE)
    )
    assert replaced > 1.01 * removed
