"""Theorem C: the law of the distance before the window, products of moduli, reference values."""

import itertools
import math
from typing import ClassVar

import attrs
import numpy as np
import pytest
from cases import first, seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds import Subsampling, subsampling
from hidden_state_accountants.bounds.composition import composed_steps, step_profile
from hidden_state_accountants.bounds.solvers.windows import (
    DistanceLaw,
    QuickLosses,
    Window,
    best_plan,
    fewer_levels,
    law_of_sum,
)
from hidden_state_accountants.bounds.subsampling import (
    FOR_SMALL_DELTAS,
    USUAL,
    PlannedCurve,
    SampledRun,
    planned_run,
)
from hidden_state_accountants.process.distances import tracked_distances
from hidden_state_accountants.process.noisy_process import noisy_process
from hidden_state_accountants.process.stretching import (
    BatchSizes,
    ModulusLines,
    Stretching,
    modulus_lines,
)

SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
ONE = NeighboringRelation.REPLACE_ONE


def exact_law(weights, rate):
    """All patterns of coins: (value, probability) pairs, ascending."""
    sums = [
        (sum(itertools.compress(weights, coins)), math.prod(rate if c else 1 - rate for c in coins))
        for coins in itertools.product((0, 1), repeat=len(weights))
    ]
    return map(np.array, zip(*sorted(sums), strict=True))


def survival(levels, probabilities, at):
    """P(level >= x) at each x."""
    return np.array([probabilities[levels >= x].sum() for x in at])


class TestLaw:
    @pytest.mark.parametrize("seed", seeds(6))
    @pytest.mark.parametrize("precision", [8, 64])
    def test_is_stochastically_larger_but_not_by_much(self, seed, precision):
        rng = np.random.default_rng(seed)
        weights = rng.choice([0.9 ** np.arange(10), rng.random(10) ** 4, np.ones(10)], axis=0)
        rate = rng.choice([0.02, 0.3, 0.8])
        values, probabilities = exact_law(weights, rate)
        law = law_of_sum(weights, rate, 1e9, precision)
        few = fewer_levels(law, 40)
        for found in (law, few):
            assert found.probabilities.sum() + found.rare == pytest.approx(1, abs=1e-14)
            above = survival(found.levels, found.probabilities, values) + found.rare
            exact = np.cumsum(probabilities[::-1])[::-1]
            assert (above >= exact * (1 - 1e-12)).all()
        mean = rate * weights.sum()
        assert mean <= law.levels @ law.probabilities <= mean * (1 + 3 / precision) + 2e-3
        assert len(few.levels) <= 45

    def test_is_cut_at_what_is_certain(self):
        weights = np.array([1.0, 0.5, 0.25])
        law = law_of_sum(weights, 0.4, 1.1, 32)
        assert law.levels[-1] == pytest.approx(1.1)
        values, probabilities = exact_law(weights, 0.4)
        at = np.minimum(values, 1.1)
        assert (survival(law.levels, law.probabilities, at) > 0).all()
        expected = probabilities[values >= 1.1].sum()
        assert law.probabilities[law.levels >= 1.1 * (1 - 1e-6)].sum() >= expected * (1 - 1e-12)

    @pytest.mark.parametrize(
        ("weights", "rate", "level"), [([], 0.5, 0.0), ([0.0], 0.5, 0.0), ([1.0, 0.5], 1.0, 1.5)]
    )
    def test_nothing_random(self, weights, rate, level):
        law = law_of_sum(np.array(weights), rate, 10.0, 32)
        assert law.levels == pytest.approx([level])
        assert law.probabilities.tolist() == [1.0]

    @pytest.mark.parametrize("contraction", [0.9, 0.998, 1.0])
    def test_of_many_coins(self, contraction):
        """Mean and variance of a long run; tails by Chernoff's bound from both sides."""
        weights, rate = contraction ** np.arange(5000.0), 0.01
        law = law_of_sum(weights, rate, float(weights.sum()), 128)
        mean = law.levels @ law.probabilities
        variance = law.probabilities @ (law.levels - mean) ** 2
        assert rate * weights.sum() <= mean < 1.02 * rate * weights.sum() + 3e-3
        exact = rate * (1 - rate) * np.sum(weights**2)
        assert exact * 0.99 < variance < exact * 1.06
        tail = np.cumsum(law.probabilities[::-1])[::-1]
        level = law.levels[np.flatnonzero(tail > 1e-9)[-1]]
        thetas = np.geomspace(0.01, 10, 400)
        moments = [np.log1p(rate * np.expm1(t * weights)).sum() for t in thetas]
        chernoff = min((m + 9 * math.log(10)) / t for t, m in zip(thetas, moments, strict=True))
        assert 0.8 * chernoff < level < 1.03 * chernoff

    def test_certain(self):
        law = fewer_levels(DistanceLaw(np.array([2.0]), np.ones(1)), 10)
        assert law.levels.tolist() == [2.0]


class TestStretching:
    def test_given_moduli_multiply(self):
        c = np.array([0.5, 2.0, 0.9, 0.0])
        stretching = Stretching.of_moduli(c, is_constant=False)
        for i, j in itertools.combinations(range(4), 2):
            found = float(stretching.log_product(i, j))
            assert found == pytest.approx(np.log(c[i:j]).sum())
        assert stretching.log_product(2, 2) == 0
        assert stretching.log_product(0, 4) < -600
        tail = stretching.between(1, 3)
        assert float(tail.log_product(0, 2)) == pytest.approx(np.log(1.8))

    @pytest.mark.parametrize("slope", [0.03, -0.04])
    def test_fails_as_rarely_as_planned(self, slope):
        """Exact binomial tails, window by window; and the sum over the windows of a plan."""
        sizes, failure, steps = BatchSizes(0, 60, 200, 200, 0.1, 0.0), 0.05, 30
        lines = ModulusLines(np.full(steps, -0.7), np.full(steps, slope))
        largest = np.full(steps, 1.2)
        bounds = {
            constant: Stretching.of_sizes(largest, lines, sizes, failure, constant)
            for constant in (True, False)
        }
        lengths = np.arange(1, steps + 1)
        stops = range(1, steps + 1)
        found = bounds[True].log_product(0, stops)
        np.testing.assert_allclose(found, bounds[False].log_product(0, stops))
        failed = []
        for length, bound in zip(lengths.tolist(), found.tolist(), strict=True):
            size = (bound + 0.7 * length) / slope  # of all batches of the window together
            law = stats.binom(length * 200, 0.1)
            certain = bound >= length * math.log(1.2) * (1 - 1e-12)
            tail = law.sf(math.ceil(size) - 1) if slope > 0 else law.cdf(math.floor(size))
            failed.append(0.0 if certain else tail)
        assert sum(failed) <= failure
        assert max(failed) > failure / steps / 50  # Chernoff's bound is not that far away
        expected = lengths * (-0.7 + slope * 20)
        assert (found >= expected).all()
        assert found[-1] < expected[-1] + 0.6 * (30 * math.log(1.2) - expected[-1])

    def test_uneven_steps(self):
        """A window of steps with different lines: the exact law of a weighted sum of sizes."""
        sizes, failure = BatchSizes(0, 9, 8, 8, 0.3, 0.0), 0.3
        lines = ModulusLines(np.array([-0.5, -0.2, -0.4]), np.array([0.1, 0.0, 0.25]))
        stretching = Stretching.of_sizes(np.full(3, 9.0), lines, sizes, failure, False)
        law = stats.binom(8, 0.3).pmf(np.arange(9))
        for i, j in itertools.combinations(range(4), 2):
            bound = float(stretching.log_product(i, j))
            beyond = sum(
                math.prod(law[list(k)])
                for k in itertools.product(range(9), repeat=j - i)
                if lines.intercept[i:j].sum() + lines.slope[i:j] @ np.array(k) > bound + 1e-12
            )
            assert beyond <= failure / 3


def clipped(**changes):
    """A probe whose clip acts."""
    arguments = {
        "noise_multiplier": 2.0, "learning_rate": 0.5, "clip_norm": 1.0, "batch_size": 50,
        "dataset_size": 1000, "num_steps": 400, "weight_decay": 0.1, "batch_order": "poisson",
        "loss": hsa.LossGeometry.convex(0.5),
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**(arguments | changes))


class TestModulusLines:
    CASES: ClassVar = {
        "clipped": {},
        "weakly convex": {"loss": hsa.LossGeometry.weakly_convex(0.5, 0.05)},
        "strongly convex": {"loss": hsa.LossGeometry.strongly_convex(0.5, 0.3, lipschitz=1.0)},
        "large steps": {"learning_rate": 4.0},
        "schedule": {"learning_rate": [0.5] * 100 + [1.0] * 300},
        "long schedules": {
            "learning_rate": np.geomspace(3.9, 0.03, 2500), "num_steps": 2500,
            "weight_decay": [0.1] * 1300 + [0.02] * 1200, "noise_multiplier": 2.0,
        },
        "long schedule, strongly convex": {
            "learning_rate": 2.2 + 2 * np.sin(np.arange(1500) / 100), "num_steps": 1500,
            "loss": hsa.LossGeometry.strongly_convex(0.5, 0.3, lipschitz=1.0),
        },
    }  # fmt: skip

    @pytest.fixture(autouse=True)
    def _few_steps(self, monkeypatch):
        monkeypatch.setattr("hidden_state_accountants.process.stretching._NODES", 512)

    @pytest.mark.parametrize("relation", list(NeighboringRelation))
    @pytest.mark.parametrize("name", CASES)
    def test_lie_above_the_moduli_of_all_sizes(self, name, relation):
        event = clipped(**self.CASES[name])
        sizes = BatchSizes.of(event, relation, 1e-12)
        lines = modulus_lines(event, relation, sizes)
        touched = math.inf
        steps = (0, *range(1, event.num_steps, 173), event.num_steps - 1)
        for t in steps if event.num_steps > 400 else (0, -1):
            for k in range(sizes.smallest, sizes.largest):
                terms = (k, k + 1) if relation is ONE else (k,)
                c = max(self.modulus(event, t, n) for n in terms)
                gap = lines.intercept[t] + lines.slope[t] * k - math.log(c)
                assert gap >= -1e-12
                touched = min(touched, gap)
        assert touched < 1e-9
        largest = noisy_process(event, relation, sizes.largest).contraction
        mean = sizes.others * sizes.rate
        assert (lines.intercept + lines.slope * mean < np.log(largest)).all()

    @staticmethod
    def modulus(event, t, terms):
        """Of one step that sums `terms` gradients: the formulas of docs/theory/moduli.md."""
        eta, w = (event.per_step(name)[t] for name in ("learning_rate", "weight_decay"))
        if not terms:
            return abs(1 - eta * w)
        loss, share = event.loss, terms / event.batch_size
        if loss.strong_convexity:
            return max(abs(1 - eta * w - eta * share * h) for h in (0.3, 0.5))
        return hsa.clipped_update_lipschitz(
            eta * share, loss.smoothness, loss.weak_convexity, w / share
        )

    def test_steps_between_those_that_are_looked_at_lose_nothing(self, monkeypatch):
        event = clipped(**self.CASES["long schedules"])
        sizes = BatchSizes.of(event, SPECIAL, 1e-12)
        few = modulus_lines(event, SPECIAL, sizes)
        monkeypatch.setattr("hidden_state_accountants.process.stretching._NODES", 2500)
        all_of_them = modulus_lines(event, SPECIAL, sizes)
        mean = sizes.others * sizes.rate
        heights = [lines.intercept + lines.slope * mean for lines in (few, all_of_them)]
        gaps = np.abs(heights[0] - heights[1])
        assert 0 < gaps.mean() < 1e-3  # with half of the usual number of steps
        assert gaps.max() < 0.03

    def test_none_where_the_size_does_not_matter(self):
        event = clipped(loss=hsa.LossGeometry.generalized_linear(0.5))
        sizes = BatchSizes.of(event, SPECIAL, 5e-13)
        assert modulus_lines(event, SPECIAL, sizes) is None
        assert SampledRun.of(event, SPECIAL, USUAL).failure == event.overfull_delta(
            SPECIAL, sizes.largest
        )

    def test_what_may_fail_is_in_delta(self):
        run = planned_run(clipped(), SPECIAL, USUAL)
        sizes = BatchSizes.of(run.event, SPECIAL, 5e-13)
        assert clipped().num_steps <= run.event.num_steps < 2 * clipped().num_steps
        assert run.failure == sizes.failure + 5e-13 <= 1e-12
        curve = Subsampling().guarantee(clipped(), SPECIAL).curve
        assert min(failure for _, failure in curve.usual.known) == run.failure
        assert curve.usual.epsilon(run.failure) == math.inf
        rarer = planned_run(clipped(), SPECIAL, FOR_SMALL_DELTAS).failure
        assert min(failure for _, failure in curve.small.known) == rarer <= 3e-15
        assert rarer in {failure for _, failure in curve.alternatives()}

    def test_sizes_that_concentrate_gain(self):
        """The effective modulus of 1, 10, 100 and 1000 steps, between those of b and of k_max."""
        event = clipped(batch_size=500, dataset_size=50_000, num_steps=20_000,
                        loss=hsa.LossGeometry.softmax_cross_entropy(1.0))  # fmt: skip
        stretching = SampledRun.of(event, SPECIAL, USUAL).stretching
        effective = [np.exp(stretching.log_product(0, k) / k) for k in (1, 10, 100, 1000)]
        np.testing.assert_allclose(effective, [0.9970, 0.9874, 0.9844, 0.9835], atol=1e-4)


class TestReferenceValues:
    """Independent computations: other searches, other discretisations, the same theorems."""

    @staticmethod
    def epsilon(noise, period, epochs, contraction, order="poisson", relation=SPECIAL):
        event = hsa.LastIterateDpEvent(
            noise_multiplier=noise, learning_rate=0.5, clip_norm=1.0, batch_size=500,
            dataset_size=500 * period, num_steps=period * epochs, batch_order=order,
            weight_decay=(1 - contraction) / 0.5, loss=hsa.LossGeometry.generalized_linear(0.5),
        )  # fmt: skip
        return Subsampling().guarantee(event, relation).epsilon(1e-5)

    @pytest.mark.parametrize(
        ("run", "limit"),
        [
            ((2.0, 100, 50, 0.998), 0.6820),
            ((2.0, 100, 200, 0.95), 0.1534),
            ((1.0, 200, 100, 0.996), 0.7358),
            ((6.0, 10, 200, 0.9975), 2.0197),
            ((2.0, 100, 50, 0.998, "without_replacement", SPECIAL), 1.3183),
            ((2.0, 100, 50, 0.998, "without_replacement", ONE), 2.3156),
            ((2.0, 100, 50, 0.998, "poisson", ONE), 1.3315),
        ],
    )
    def test_last_iterate(self, run, limit):
        assert 0.97 * limit < self.epsilon(*run) <= 1.0005 * limit

    def test_sizes_alone_and_with_the_random_distance(self):
        event = clipped(batch_size=500, dataset_size=50_000, num_steps=20_000,
                        loss=hsa.LossGeometry.softmax_cross_entropy(1.0))  # fmt: skip
        assert Subsampling().guarantee(event, SPECIAL).epsilon(1e-5) <= 0.2593


def test_long_schedules_level_off_too():
    """More steps than there are moduli to look at: it was 1.17 for the longer one."""
    short, long = (
        Subsampling().guarantee(
            clipped(
                batch_size=500, dataset_size=50_000, num_steps=steps,
                learning_rate=np.linspace(0.5, 0.25, steps),
                loss=hsa.LossGeometry.softmax_cross_entropy(1.0),
            ),
            SPECIAL,
        ).epsilon(1e-5)
        for steps in (4000, 40_000)
    )  # fmt: skip
    assert short == pytest.approx(long, rel=0.02)


def test_longer_runs_of_equal_steps_level_off():
    short, long = (
        Subsampling().guarantee(clipped(num_steps=steps), SPECIAL).epsilon(1e-5)
        for steps in (2000, 200_000)
    )
    assert short <= long * 1.001
    assert long < 1.02 * short


@pytest.mark.parametrize("steps", first(1, [10**8, 10**6]))
@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_a_long_run_of_rare_records_forgets_as_one_of_many_does(order, steps):
    """The scale of the longest window is where all other ones are beyond reach, in a million."""
    run = hsa.LastIterateDpEvent(
        noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.0, batch_size=1000,
        dataset_size=10**9, num_steps=steps, batch_order=order, weight_decay=0.1,
        loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0),
    )  # fmt: skip
    found = best_guarantee(run, SPECIAL)
    assert found.epsilon(1e-5) < 2e-4  # composition of a million steps: 0.0162
    assert found.epsilon(1e-10) < 0.01  # composition: 0.355


def test_the_longest_window_is_looked_at():
    """Batches that may expand by a factor of four: 511 steps forget, and no fewer do."""
    run = hsa.LastIterateDpEvent(
        noise_multiplier=0.8, learning_rate=1.9, clip_norm=1.0, batch_size=10, dataset_size=5000,
        num_steps=3000, batch_order="poisson", weight_decay=0.3,
        loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0),
    )  # fmt: skip
    guarantee = best_guarantee(run, NeighboringRelation.REPLACE_ONE)
    assert guarantee.epsilon(1e-5) < 0.62  # composition: 1.302


def test_a_short_window_moves_its_split_with_its_length():
    """From six steps to five: the best split is three values away."""
    run = hsa.LastIterateDpEvent(
        noise_multiplier=3.0, learning_rate=0.8, clip_norm=None, batch_size=20, dataset_size=200,
        num_steps=60, batch_order="poisson", weight_decay=0.5, max_batch_size=60,
        loss=hsa.LossGeometry.softmax_cross_entropy(1.0),
    )  # fmt: skip
    assert best_guarantee(run, ONE).epsilon(1e-5) < 0.62  # was 0.6287


def test_pasts_of_few_steps_have_laws_of_their_own():
    """Ten steps: with the law of four steps before the window in place of three it was 23.43."""
    run = hsa.LastIterateDpEvent(
        noise_multiplier=hsa.Schedule([0.3227, 0.5487], [2, 8]), learning_rate=0.00729,
        clip_norm=3.237, batch_size=8540, dataset_size=63_384, num_steps=10,
        batch_order="without_replacement", weight_decay=1.244,
        loss=hsa.LossGeometry.convex(smoothness=2.606, lipschitz=3.229),
    )  # fmt: skip
    assert best_guarantee(run, SPECIAL).epsilon(1e-5) < 23.15


def test_a_window_that_hides_more_than_it_composes():
    """In a small domain most of the noise hides the distance: the best split is .5."""
    run = hsa.LastIterateDpEvent(
        noise_multiplier=6.3, learning_rate=0.128, clip_norm=3.1, batch_size=4, dataset_size=233,
        num_steps=255, batch_order="without_replacement", weight_decay=0.06,
        domain_diameter=0.0557,
        loss=hsa.LossGeometry.smooth(smoothness=0.3685, lipschitz=5.233),
    )  # fmt: skip
    assert best_guarantee(run, SPECIAL).epsilon(1e-5) < 0.15  # composition: 0.165


@pytest.mark.parametrize(
    ("order", "limit"),
    [("poisson", 2.336), ("without_replacement", 2.735)],  # each alone: 2.413, 2.860
)
def test_segments_that_are_composed_are_planned_together(order, limit):
    run = hsa.LastIterateDpEvent(
        noise_multiplier=4.0, learning_rate=0.5, clip_norm=1.0, batch_size=50, dataset_size=1000,
        num_steps=4000, batch_order=order, weight_decay=0.5,
        loss=hsa.LossGeometry.softmax_cross_entropy(1.0),
        release_steps=tuple(range(100, 4000, 100)),
    )  # fmt: skip
    assert best_guarantee(run, ONE).epsilon(1e-5) < limit


def few_batches(order, steps):
    """Three batches an epoch, as in benchmarks/results/tightness.md."""
    return hsa.LastIterateDpEvent(
        noise_multiplier=2.0, learning_rate=0.6, clip_norm=1.0, batch_size=2, dataset_size=6,
        num_steps=steps, batch_order=order, weight_decay=0.2,
        loss=hsa.LossGeometry.generalized_linear(1.0),
    )  # fmt: skip


def epsilon_of_few_batches(order, steps):
    return best_guarantee(few_batches(order, steps), SPECIAL).epsilon(1e-5)


@pytest.mark.parametrize(
    ("order", "steps", "limit"),
    [
        ("without_replacement", 12, 4.283),  # composition: 4.3031
        ("without_replacement", 16, 4.6031),  # all lengths, all shifts, seven splits: 4.596
        ("without_replacement", 128, 5.041),  # was 5.0656
        ("poisson", 20, 3.7466),  # composition: 3.7586
    ],
)
def test_a_short_run_has_its_best_window(order, steps, limit):
    assert epsilon_of_few_batches(order, steps) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("order", first(1, ["poisson", "without_replacement"]))
def test_more_steps_cost_more(order):
    """Up to the grids of the distances, which differ."""
    found = [
        epsilon_of_few_batches(order, steps) for steps in (11, 13, 24, 26, 31, 33, 63, 65, 150)
    ]
    largest = np.maximum.accumulate(found)
    assert (np.array(found) >= largest * (1 - 5e-4)).all()


def test_a_run_that_goes_on_is_not_searched_again(monkeypatch):
    searched = []

    def counted(*arguments):
        searched.append(arguments)
        return best_plan(*arguments)

    monkeypatch.setattr(subsampling, "best_plan", counted)
    monkeypatch.setattr(subsampling, "_PLANS", {})
    epsilon_of_few_batches("without_replacement", 40)
    assert len(searched) == 1
    for steps in (43, 46, 62):
        epsilon_of_few_batches("without_replacement", steps)
    assert len(searched) == 1  # that of 64 steps
    for steps in (65, 100, 128):
        epsilon_of_few_batches("without_replacement", steps)
    assert len(searched) == 2


@pytest.mark.parametrize("diameter", [math.inf, 0.06])
def test_distances_of_many_steps_at_once_are_those_of_a_recursion(diameter):
    """Never below it: they cap what the coins may add up to."""
    rates = 0.3 * (1 + np.cos(np.arange(1500) / 100)) + 0.01
    loss = hsa.LossGeometry.convex(0.5, lipschitz=0.9)
    event = clipped(learning_rate=rates, domain_diameter=diameter, num_steps=1500, loss=loss)
    process = SampledRun.of(event, SPECIAL).process
    steps = slice(100, 1500)
    found, is_cut = tracked_distances(process, steps, process.sensitivity[steps], 0.05)
    expected = [0.05]
    for t in range(100, 1500):
        stretched = process.contraction[t] * expected[-1] + process.sensitivity[t]
        drifted = process.drift_contraction[t] * expected[-1] + process.drift[t]
        expected.append(min(stretched, drifted, diameter))
    assert is_cut.any() == (diameter < math.inf)
    assert (found >= np.array(expected) * (1 - 1e-15)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-11)


@pytest.mark.parametrize("modulus", [0.055, 0.058, 0.3, 1.5])
def test_distances_are_not_below_the_recursion_where_products_of_moduli_underflow(modulus):
    """256 moduli of 0.055 have a product of 3e-323, which has no digits."""
    sensitivity = np.where(np.arange(600) % 32 == 7, 1e-3, 0.0)
    event = clipped(num_steps=600, learning_rate=0.3 + 1e-6 * np.arange(600))
    process = attrs.evolve(
        SampledRun.of(event, SPECIAL).process,
        contraction=np.full(600, modulus),
        drift_contraction=np.full(600, 1e300),
        drift=np.full(600, 1e300),
    )
    found, _ = tracked_distances(process, slice(0, 600), sensitivity)
    expected = [0.0]
    for s in sensitivity:
        expected.append(modulus * expected[-1] + s)
    assert (found >= np.array(expected) * (1 - 1e-14)).all()


def test_segments_between_releases():
    """Schedules cut at a release: the steps, and the products of their moduli."""
    event = clipped(learning_rate=[0.5] * 150 + [0.25] * 250, release_steps=(150,))
    run = SampledRun.of(event, SPECIAL)
    tail, process = run.segment(150, 400), run.process
    np.testing.assert_array_equal(tail.sensitivity, process.sensitivity[150:])
    np.testing.assert_array_equal(tail.noise_std, process.noise_std[150:])
    assert tail.distance[:2] == pytest.approx([0.0, process.sensitivity[150]], rel=1e-11, abs=0)
    whole = run.stretching.log_product(150, range(151, 401))
    np.testing.assert_allclose(tail.stretching.log_product(0, range(1, 251)), whole)
    assert not np.allclose(run.stretching.log_product(0, range(1, 251)), whole)


def test_losses_that_are_all_beyond_the_first_reach():
    """One record in every batch, at little noise: the search starts far below the epsilon."""
    event = cyclic_run(
        batch_order="without_replacement",
        batch_size=1,
        dataset_size=1,
        num_steps=10,
        noise_multiplier=0.01,
        learning_rate=1.0,
        weight_decay=0.0,
    )
    epsilon = hsa.LastIterateAccountant("replace_special").compose(event).get_epsilon(1e-5)
    mu = 100 * math.sqrt(10)  # of ten Gaussian mechanisms
    assert 0 < epsilon <= mu**2 / 2 + 4.3 * mu


def test_losses_beyond_the_reach_of_a_search_are_not_read_as_none():
    event = hsa.LastIterateDpEvent(
        noise_multiplier=0.68,
        learning_rate=0.1,
        clip_norm=1.0,
        batch_size=32,
        dataset_size=160,
        num_steps=16_384,
        batch_order="without_replacement",
    )
    whole = Window((((2 / 0.68), 16_384),), np.zeros(1), np.ones(1))  # epsilon about 11,000
    for scale in np.geomspace(0.01, 1e4, 25):
        assert QuickLosses(step_profile(event, ONE), 1e-5, scale).epsilon(whole) > 9000


@pytest.mark.parametrize("delta", [1e-5, 1e-8, 1e-10, 1e-12])
def test_losses_with_an_atom_are_read_off_at_small_deltas(delta):
    """Three in four runs never draw the record: a transform that is cut off would ring."""
    event = cyclic_run(
        batch_order="without_replacement", batch_size=109, dataset_size=15_379, num_steps=41,
        noise_multiplier=0.39,
    )  # fmt: skip
    window = Window(((1 / 0.39, 41),), np.zeros(1), np.ones(1))
    exact = composed_steps(event, SPECIAL).epsilon(delta)
    found = QuickLosses(step_profile(event, SPECIAL), delta, exact).epsilon(window)
    assert found == pytest.approx(exact, rel=0.01)


class TestSmallDeltas:
    """Near the failure of a plan about the sizes of batches a second one counts, which is rarer."""

    def test_no_jump_where_the_first_plan_may_fail(self):
        curve = Subsampling().guarantee(clipped(), SPECIAL).curve
        deltas = np.geomspace(1e-8, 1e-14, 37)
        epsilons = np.array([curve.epsilon(d) for d in deltas])
        assert (np.diff(epsilons) >= 0).all()
        assert (epsilons[1:] < 1.06 * epsilons[:-1]).all()  # 6 values for a factor of ten
        for delta, epsilon in zip(deltas.tolist(), epsilons.tolist(), strict=True):
            assert curve.delta(epsilon) <= delta
        assert curve.usual.epsilon(5e-13) == math.inf > curve.epsilon(5e-13)

    def test_a_usual_delta_does_not_work_it_out(self):
        curve = Subsampling().guarantee(clipped(learning_rate=0.45), SPECIAL).curve
        assert curve.epsilon(1e-5) < curve.epsilon(1e-6) < math.inf
        assert curve.delta(0.1) > 0
        assert "small" not in vars(curve)

    def test_a_cap_that_acts_has_one_plan(self):
        event = clipped(max_batch_size=clipped().batch_size + 5)
        assert not isinstance(Subsampling().guarantee(event, SPECIAL).curve, PlannedCurve)


DELTAS = (1e-3, 1e-5, 1e-8)
RELEASE, LOUD = {"release_steps": (150,)}, {"noise_multiplier": 0.8}
FIXED = "without_replacement"
TABLE = [
    # order, schedule, steps, changes, relation, epsilons at the deltas
    ("poisson", False, 30, {}, SPECIAL, (0.046219207, 0.10630285, 0.17993541)),
    ("poisson", False, 300, {}, SPECIAL, (0.13312305, 0.25406086, 0.41038206)),
    (FIXED, False, 300, {}, SPECIAL, (0.22627895, 0.60702484, 1.3812555)),
    ("reshuffled", False, 300, {}, SPECIAL, (0.20313436, 0.51006525, 1.1465979)),
    ("reshuffled", True, 300, {}, SPECIAL, (0.52033415, 1.3050791, 1.9789876)),
    ("poisson", False, 300, {}, ONE, (0.27788312, 0.47515902, 0.74124761)),
    ("poisson", False, 300, LOUD, SPECIAL, (0.81854153, 1.7342783, 3.0786073)),
    ("poisson", True, 20000, {}, SPECIAL, (0.89854485, 1.3740763, 1.9103385)),
    (FIXED, False, 300, {}, ONE, (0.47514543, 0.9221931, 1.74899)),
    (FIXED, False, 300, RELEASE, SPECIAL, (0.29950242, 0.68388423, 1.4299278)),
    (FIXED, False, 20000, {}, SPECIAL, (0.22749852, 0.60957445, 1.3850587)),
]


def cosine(steps):
    return 0.25 * (1 + np.cos(np.pi * np.arange(steps) / steps)) + 0.005


@pytest.mark.parametrize(
    ("order", "schedule", "steps", "changes", "relation", "epsilons"), first(6, TABLE)
)
def test_figures_are_what_they_were(order, schedule, steps, changes, relation, epsilons):
    arguments = {
        "noise_multiplier": 2.0, "learning_rate": cosine(steps) if schedule else 0.5,
        "clip_norm": 1.0, "batch_size": 500, "dataset_size": 50_000, "num_steps": steps,
        "batch_order": order, "loss": hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0),
        "weight_decay": 0.1,
    }  # fmt: skip
    run = hsa.LastIterateDpEvent(**(arguments | changes))
    accountant = hsa.LastIterateAccountant(relation).compose(run)
    found = np.array([accountant.get_epsilon(delta) for delta in DELTAS])
    is_searched = order in ("poisson", "without_replacement")
    smallest = np.array([0.99, 0.995, 0.95]) if is_searched else 1 - 1e-6
    assert (found >= smallest * np.array(epsilons)).all()
    assert (found <= np.array([1.01, 1.003, 1.02]) * epsilons).all()
