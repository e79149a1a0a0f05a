"""Theorem B: random batches, against exact laws, stock accountants and plain composition."""

import math

import attrs
import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, pld
from runs import cyclic_run, probe_run
from scipy import integrate, stats

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing import GridOracle
from hidden_state_accountants.bounds import Composition, Subsampling
from hidden_state_accountants.bounds.solvers import sampled_windows as windows
from hidden_state_accountants.bounds.subsampling import _most_terms
from hidden_state_accountants.curves.base import CurveWithDelta
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.sampled import SampledWithoutReplacementCurve
from hidden_state_accountants.process.noisy_process import sampled_process

SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
ONE = NeighboringRelation.REPLACE_ONE
RELATIONS = [("poisson", SPECIAL), ("poisson", ADD_OR_REMOVE)]
RELATIONS += [("without_replacement", SPECIAL), ("without_replacement", ONE)]
EPSILONS = (0.0, 0.05, 0.3, 1.0)


class TestWithoutReplacementCurve:
    CURVE = SampledWithoutReplacementCurve(40, 4, 1.7)

    @staticmethod
    def exact(epsilon, first_is_mixture):
        """Hockey-stick of the pair 0.9 N(0) + 0.1 N(1.7) against N(0)."""

        def density(x):
            mixture = 0.9 * stats.norm.pdf(x) + 0.1 * stats.norm.pdf(x, 1.7)
            plain = stats.norm.pdf(x)
            pair = (mixture, plain) if first_is_mixture else (plain, mixture)
            return max(0.0, pair[0] - math.exp(epsilon) * pair[1])

        return integrate.quad(density, -12, 15, limit=500, points=[0.0, 1.0, 2.0, 4.0])[0]

    @pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5, 2.0])
    def test_delta_is_that_of_the_mixture(self, epsilon):
        delta = self.CURVE.delta(epsilon)
        assert delta == pytest.approx(self.exact(epsilon, True), rel=1e-6, abs=1e-12)
        assert delta >= self.exact(epsilon, False) * (1 - 1e-6)

    @pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-3, 0.05, 0.2])
    def test_epsilon_inverts_delta(self, delta):
        epsilon = self.CURVE.epsilon(delta)
        assert self.CURVE.delta(epsilon) == pytest.approx(min(delta, self.CURVE.delta(0.0)))

    def test_large_losses(self):
        curve = SampledWithoutReplacementCurve(10, 1, 60.0)
        assert curve.epsilon(1e-9) == pytest.approx(
            hsa.curves.gaussian.epsilon_from_mu(60.0, 1e-8) + math.log(0.1)
        )

    def test_losses_beyond_the_range_of_exp(self):
        curve = SampledWithoutReplacementCurve(10**7, 1, 60.0)
        for epsilon in (600.0, 690.0, 696.0, 800.0):
            assert curve.delta(epsilon) == pytest.approx(1e-7)
        assert curve.delta(curve.epsilon(5e-8)) == pytest.approx(5e-8, rel=1e-6)
        assert curve.delta(math.inf) == 0.0

    @pytest.mark.parametrize("count", [1, 5, 60])
    def test_composition_lies_below_the_renyi_accountant(self, count):
        curve = compose_curves([(self.CURVE, count)])
        orders = np.array([2.0, 3.0, 6.0])
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            40, 4, dp_accounting.GaussianDpEvent(1 / 1.7)
        )
        stock = dp_accounting.rdp.RdpAccountant(orders, ONE).compose(event, count)
        np.testing.assert_allclose(curve.rdp(orders), stock.rdp)
        assert curve.epsilon(1e-5) <= stock.get_epsilon(1e-5)

    @pytest.mark.parametrize("epsilon", [0.1, 0.6, 1.5])
    def test_two_steps_in_every_direction(self, epsilon):
        """The direction may change between steps: C_q composed covers all four pairs."""
        x = np.linspace(-11, 13, 2401)
        weight = (x[1] - x[0]) ** 2
        plain = stats.norm.pdf(x)
        mixture = 0.9 * plain + 0.1 * stats.norm.pdf(x, 1.7)
        claim = compose_curves([(self.CURVE, 2)]).delta(epsilon)
        for first in ((mixture, plain), (plain, mixture)):
            for second in ((mixture, plain), (plain, mixture)):
                p = np.outer(first[0], second[0])
                q = np.outer(first[1], second[1])
                exact = float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * weight)
                assert exact <= claim * (1 + 1e-6)


def run(**changes):
    """Small enough to enumerate, contracting enough for windows to help."""
    arguments = {
        "noise_multiplier": 3.0, "learning_rate": 1.0, "clip_norm": 1.0, "batch_size": 2,
        "dataset_size": 5, "num_steps": 12, "weight_decay": 0.4,
        "loss": hsa.LossGeometry.generalized_linear(0.5),
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**(arguments | changes))


RUNS = {
    "contracting": {},
    "releases": {"release_steps": (5, 10)},
    "expanding": {
        "weight_decay": 0.0, "domain_diameter": 0.5, "learning_rate": 2.0,
        "loss": hsa.LossGeometry.weakly_convex(0.5, 0.3),
    },
    "noise levels": {"noise_multiplier": [3.0] * 8 + [6.0] * 4},
    "idle steps": {"learning_rate": [1.0, 0.0] * 6},
}  # fmt: skip


def huber(slope, offset):
    return lambda x: np.clip(slope * (x - offset), -1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "relation"), RELATIONS)
@pytest.mark.parametrize("name", ["contracting", "expanding"])
def test_bound_dominates_exact_laws(order, relation, name):
    event = run(batch_order=order, **RUNS[name])
    if order == "poisson":
        # Poisson batches of 5 records hold up to 5; the bound is about that very run.
        assert _most_terms(event, relation)[0] >= 4
    guarantee = Subsampling().guarantee(event, relation)
    slope = event.loss.smoothness
    witnesses = [huber(slope, 0.0), lambda x: np.zeros_like(x)]
    if event.loss.weak_convexity:
        witnesses.append(lambda x: -event.loss.weak_convexity * np.clip(x, -1.0, 1.0))
    half = event.domain_diameter / 2
    for others in witnesses:
        neighbour = (lambda x: -np.ones_like(x)) if relation is ONE else None
        grid = GridOracle(
            event, [lambda x: np.ones_like(x)] + [others] * 4, neighbour,
            domain=(-half, half) if half < math.inf else None, cells_per_std=12,
        )  # fmt: skip
        for epsilon in EPSILONS:
            claim = guarantee.delta(epsilon)
            for estimate in grid.delta(epsilon):
                assert estimate.lower_bound <= claim
                assert estimate.value - 3 * estimate.error <= claim * (1 + 1e-3) + 1e-9


@pytest.mark.parametrize(("order", "relation"), RELATIONS[::2])
@pytest.mark.parametrize("name", ["contracting", "releases", "noise levels", "idle steps"])
def test_never_above_composition(order, relation, name):
    event = run(batch_order=order, **RUNS[name])
    bound = Subsampling().guarantee(event, relation)
    extra = getattr(bound.curve, "extra", 0.0)
    composition = Composition().guarantee(event, relation)
    # A discretised privacy loss is rounded up event by event.
    limit = composition.epsilon(1e-4)
    assert bound.epsilon(1e-4 + extra) <= 1.01 * limit
    assert hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-4) <= limit


class TestReferenceRun:
    def test_poisson(self):
        event = probe_run(batch_order="poisson")
        bound = hsa.LastIterateAccountant().compose(event)
        everything = pld.PLDAccountant().compose(event.as_composition()).get_epsilon(1e-5)
        assert everything == pytest.approx(3.187, abs=1e-3)
        assert bound.get_epsilon(1e-5) < 0.95
        assert "Theorem B" in bound.guarantee.theorem

    def test_without_replacement(self):
        event = probe_run(batch_order="without_replacement")
        assert hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5) < 1.33

    def test_many_epochs_cost_little_more(self):
        longer = probe_run(batch_order="poisson", num_steps=100_000)
        first = Subsampling().guarantee(probe_run(batch_order="poisson"), SPECIAL).epsilon(1e-5)
        second = Subsampling().guarantee(longer, SPECIAL).epsilon(1e-5)
        assert first <= second < 1.1 * first


class TestBatchSizes:
    @pytest.mark.parametrize("relation", [SPECIAL, ADD_OR_REMOVE])
    @pytest.mark.parametrize(("n", "b", "steps"), [(5, 2, 20), (1000, 10, 500), (50_000, 500, 9)])
    def test_limit_is_the_smallest_that_is_almost_never_exceeded(self, relation, n, b, steps):
        event = run(batch_order="poisson", dataset_size=n, batch_size=b, num_steps=steps)
        terms, extra = _most_terms(event, relation)
        others = n - (relation is SPECIAL)
        tail = stats.binom(others, b / n).sf
        assert extra == pytest.approx(steps * tail(terms - 1))
        assert extra <= 1e-12
        assert terms == 1 or steps * tail(terms - 2) > 1e-12

    def test_a_cap_adds_the_probability_that_it_acts(self):
        event = probe_run(batch_order="poisson", max_batch_size=610)
        terms, extra = _most_terms(event, SPECIAL)
        assert terms == 610
        assert extra == pytest.approx(20_000 * stats.binom(49_999, 0.01).sf(609))
        assert 1e-6 < extra < 0.1
        curve = Subsampling().guarantee(event, SPECIAL).curve
        assert isinstance(curve, CurveWithDelta)
        assert curve.epsilon(extra) == math.inf
        assert curve.delta(1.0) == pytest.approx(extra + curve.curve.delta(1.0))

    def test_a_cap_that_never_acts_changes_nothing(self):
        event = probe_run(batch_order="poisson")
        capped = attrs.evolve(event, max_batch_size=10_000)
        assert _most_terms(event, SPECIAL) == _most_terms(capped, SPECIAL)

    @pytest.mark.parametrize("terms", [1, 2, 5, 9])
    def test_contraction_holds_for_every_size(self, terms):
        """k terms over b act like the learning rate eta k / b at the same decay per step."""
        event = run(
            batch_order="poisson", dataset_size=9, loss=hsa.LossGeometry.weakly_convex(1.3, 0.2)
        )
        c = sampled_process(event, SPECIAL, terms).contraction[0]
        for k in range(1, terms + 1):
            rate = event.learning_rate * k / event.batch_size
            decay = event.weight_decay * event.batch_size / k
            assert hsa.clipped_update_lipschitz(rate, 1.3, 0.2, decay) <= c * (1 + 1e-12)
        assert c >= 1 - event.learning_rate * event.weight_decay

    def test_strong_convexity_is_lost_in_an_empty_batch(self):
        loss = hsa.LossGeometry.strongly_convex(1.0, 0.5, lipschitz=1.0)
        event = run(batch_order="poisson", weight_decay=0.0, loss=loss)
        assert sampled_process(event, SPECIAL, 2).contraction[0] == 1.0
        event = run(batch_order="without_replacement", weight_decay=0.0, loss=loss)
        assert sampled_process(event, SPECIAL, 2).contraction[0] == 0.5


class TestWindows:
    @pytest.mark.parametrize("seed", range(20))
    def test_the_quick_shift_is_the_exact_one(self, seed):
        rng = np.random.default_rng(seed)
        total = int(rng.integers(2, 40))
        steps = windows.SampledSteps(
            contraction=rng.uniform(0.3, 1.3, total),
            distance=np.append(0.0, rng.uniform(0.1, 2.0, total)),
            noise_std=rng.uniform(0.1, 2.0, total),
            step_mu=np.ones(total),
        )
        length = int(rng.integers(1, total))
        shifted = np.arange(1, length + 1)
        quick = np.exp(windows._LogShift(steps).mu_squared(length, shifted))
        exact = [windows._shift_mu_squared(steps, length, int(k)) for k in shifted]
        np.testing.assert_allclose(quick, exact, rtol=1e-9)

    def test_shifts_undo_the_distance(self):
        """Replays the shifts that the pool stands for: z ends at 0, mu**2 is their cost."""
        c, sigma, distance = np.array([0.9, 1.1, 0.8]), np.array([1.0, 0.5, 2.0]), 1.5
        later = np.array([1.1 * 0.8, 0.8, 1.0])
        weights = (later * sigma) ** 2
        a = 0.9 * 1.1 * 0.8 * distance * weights / weights.sum() / later
        z = distance
        for t in range(3):
            z = c[t] * z - a[t]
            assert z >= -1e-15
        assert z == pytest.approx(0, abs=1e-15)
        steps = windows.SampledSteps(
            np.append(1.0, c), np.array([0, distance, 9, 9, 9]), np.append(1.0, sigma), np.ones(4)
        )
        cost = float(np.sum((a / sigma) ** 2))
        assert windows._shift_mu_squared(steps, 3, 3) == pytest.approx(cost)

    def test_a_forgotten_past_costs_nothing(self):
        steps = windows.SampledSteps(
            np.array([1.0, 0.0, 1.0]), np.array([0.0, 1.0, 1.0, 2.0]), np.ones(3), np.ones(3)
        )
        assert windows._shift_mu_squared(steps, 2, 1) == 0.0


@pytest.mark.parametrize("diameter", [math.inf, 0.02])
@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_the_window_that_was_found_is_paid_for(order, diameter):
    """Re-derives the shift's mu of the winning window from the run, in closed form."""
    event = probe_run(batch_order=order, domain_diameter=diameter)
    curve = Subsampling().guarantee(event, SPECIAL).curve
    curve = getattr(curve, "curve", curve).curves[0]
    b, n, eta, decay, noise = 500, 50_000, 0.5, 0.1, 2.0
    if order == "poisson":
        steps = {part.event.event.noise_multiplier: part.count for part in curve.events}
        shift_mu = curve.gaussian_mu
        terms = next(k for k in range(b, n) if 20_000 * stats.binom.sf(k - 1, n - 1, b / n) < 1e-12)
    else:
        shift_mu = curve.parts[-1][0].mu
        steps = {2 / part.step_mu: count for part, count in curve.parts[:-1]}
        terms = b
    assert max(steps) == pytest.approx(noise)
    beta = (min(steps) / noise) ** 2
    shifted, length = steps[min(steps)], sum(steps.values())
    assert 0 < beta < 1
    rate = eta * terms / b
    c = (1 - eta * decay) * 2 / math.sqrt(4 - rate * 0.5 / (1 - eta * decay))
    distance = eta / b * (1 - c ** (20_000 - length)) / (1 - c)
    distance = min(distance, diameter) * c ** (length - shifted)
    stretched = sum((eta * noise / b / c**i) ** 2 for i in range(1, shifted + 1))
    assert shift_mu == pytest.approx(math.sqrt(distance**2 / stretched / (1 - beta)), rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "relation", "condition"),
    [
        ({"batch_order": "poisson"}, ONE, "neighboring relation"),
        ({"batch_order": "without_replacement"}, ADD_OR_REMOVE, "neighboring relation"),
        ({"batch_order": "cyclic", "dataset_size": 6}, SPECIAL, "batch order"),
        ({"batch_order": "poisson", "loss": None}, SPECIAL, "loss geometry"),
        (
            {"batch_order": "poisson", "noise_multiplier": np.linspace(1, 2, 12)},
            SPECIAL,
            "noise multiplier",
        ),
    ],
)
def test_refusals(changes, relation, condition):
    unmet = Subsampling().check(run(**changes), relation)
    assert [u.condition for u in unmet] == [condition]


def test_degenerate_runs():
    silent = run(batch_order="poisson", noise_multiplier=0.0)
    assert Subsampling().guarantee(silent, SPECIAL).epsilon(0.5) == math.inf
    idle = run(batch_order="without_replacement", learning_rate=0.0, weight_decay=0.0)
    assert Subsampling().guarantee(idle, SPECIAL).epsilon(1e-9) == 0.0
    whole = run(batch_order="without_replacement", batch_size=5, weight_decay=0.0)
    everything = Composition().guarantee(attrs.evolve(whole, batch_order="full"), ONE)
    assert Subsampling().guarantee(whole, ONE).epsilon(1e-5) <= everything.epsilon(1e-5) * 1.001


def test_a_step_that_forgets_everything_leaves_a_short_window():
    event = run(
        batch_order="without_replacement", weight_decay=0.0, num_steps=40, dataset_size=10,
        loss=hsa.LossGeometry.strongly_convex(1.0, 1.0, lipschitz=1.0), domain_diameter=1.0,
    )  # fmt: skip
    forgets = Subsampling().guarantee(event, ONE).epsilon(1e-5)
    nearly = attrs.evolve(event, learning_rate=0.999)
    assert forgets <= Subsampling().guarantee(nearly, ONE).epsilon(1e-5)


def test_cyclic_runs_are_untouched():
    assert hsa.LastIterateAccountant().compose(cyclic_run()).guarantee.mu is not None
