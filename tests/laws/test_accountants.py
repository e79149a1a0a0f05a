"""What must hold for any accountant, on every relation."""

import copy
import itertools
import math
import pickle

import dp_accounting
import numpy as np
import pytest
from cases import first
from dp_accounting import NeighboringRelation, pld, privacy_accountant_test, rdp
from hypothesis import given
from hypothesis import strategies as st
from runs import cyclic_run, full_run, mu_at, probe_run

import hidden_state_accountants as hsa

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
RELATIONS = list(NeighboringRelation)
ACCOUNTANTS = (hsa.LastIterateAccountant, hsa.ShiftedInterpolationAccountant)


def epsilon(event, relation=REPLACE_SPECIAL, delta=1e-5, accountant=hsa.LastIterateAccountant):
    return accountant(relation).compose(event).get_epsilon(delta)


class TestReferenceRun:
    """Theory section 7: one linear probe."""

    def test_numbers(self):
        accountant = hsa.LastIterateAccountant().compose(probe_run())
        assert accountant.guarantee.mu == pytest.approx(0.50041, abs=5e-6)
        assert accountant.get_epsilon(1e-5) == pytest.approx(1.9949, abs=5e-5)
        composition = pld.PLDAccountant().compose(probe_run().as_composition())
        assert composition.get_epsilon(1e-5) == pytest.approx(54.377, abs=5e-4)

    def test_poisson(self):
        event = probe_run(batch_order="poisson")
        coarse = pld.PLDAccountant(value_discretization_interval=1e-3)
        assert coarse.compose(event.as_composition()).get_epsilon(1e-5) == pytest.approx(
            3.1973, abs=5e-5
        )
        stock = pld.PLDAccountant().compose(event.as_composition())  # the default grid
        assert stock.get_epsilon(1e-5) == pytest.approx(3.1870, abs=5e-5)
        assert epsilon(event) < 0.95  # Theorem B


def test_chien_and_li_figure_1():
    """K=2, sigma=1, R=1, n=5, eta=0.1, s=0.08: epsilon/alpha after 200 steps."""
    from hidden_state_accountants.bounds.shifted_interpolation import worst_mu_squared
    from hidden_state_accountants.process.noisy_process import NoisyProcess

    for c, expected in ((1.1, 0.27317), (1.0, 0.16006), (0.9, 0.06080)):
        arrays = [np.full(200, value) for value in (c, 0.08, 1.0, 1.0, 0.4)]
        process = NoisyProcess(*arrays, 1.0, 1, (0,), (), is_constant=True)
        assert worst_mu_squared(process) / 2 == pytest.approx(expected, abs=5e-6)


def test_convex_with_a_domain():
    """c = 1, diameter R: mu^2 = min_k (min(R, tau s) + k s)^2 / (k sigma^2)."""
    event = full_run(
        loss=hsa.LossGeometry.convex(1.0, 1.0), weight_decay=0.0, domain_diameter=0.4, num_steps=300
    )
    s, sigma = 0.5 / 20, 0.5 * 2.0 / 20
    k = np.arange(1, 301)
    exact = np.min((np.minimum(0.4, (300 - k) * s) + k * s) ** 2 / (k * sigma**2))
    mu = hsa.LastIterateAccountant().compose(event).guarantee.mu
    assert mu**2 == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
class TestComposition:
    def test_count_law(self, accountant):
        once = accountant()
        for _ in range(5):
            once.compose(cyclic_run())
        counted = accountant().compose(cyclic_run(), 5)
        nested = accountant().compose(
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.ComposedDpEvent([cyclic_run(), dp_accounting.NoOpDpEvent()]), 5
            )
        )
        assert once.get_epsilon(1e-6) == counted.get_epsilon(1e-6) == nested.get_epsilon(1e-6)
        assert counted.ledger == once.ledger
        assert counted.ledger == dp_accounting.SelfComposedDpEvent(cyclic_run(), 5)
        one = accountant().compose(cyclic_run()).guarantee.mu
        assert counted.guarantee.mu == pytest.approx(one * math.sqrt(5), rel=1e-14)

    def test_gaussian_mixture_is_exact(self, accountant):
        mu = accountant().compose(cyclic_run()).guarantee.mu
        composed = accountant().compose(cyclic_run()).compose(dp_accounting.GaussianDpEvent(3.0), 2)
        assert composed.guarantee.mu == pytest.approx(math.sqrt(mu**2 + 2 / 9), rel=1e-14)

    @pytest.mark.parametrize(
        "other",
        [
            dp_accounting.LaplaceDpEvent(20.0),
            dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.5)),
        ],
    )
    @pytest.mark.parametrize("relation", [ADD_OR_REMOVE, REPLACE_SPECIAL])
    def test_with_other_standard_events(self, accountant, other, relation):
        run = full_run(noise_multiplier=20.0)
        composed = accountant(relation).compose(run).compose(other, 3)
        mu = accountant(relation).compose(run).guarantee.mu
        together = dp_accounting.ComposedDpEvent(
            [dp_accounting.GaussianDpEvent(1 / mu), dp_accounting.SelfComposedDpEvent(other, 3)]
        )
        stock = [pld.PLDAccountant().compose(together), rdp.RdpAccountant().compose(together)]
        for delta in (1e-3, 1e-6):
            assert composed.get_epsilon(delta) == pytest.approx(
                min(a.get_epsilon(delta) for a in stock), rel=1e-8
            )
        assert composed.get_delta(1.0) == pytest.approx(min(a.get_delta(1.0) for a in stock))
        assert composed.guarantee.mu is None
        orders = [2.0, 8.0]
        stock_rdp = rdp.RdpAccountant(orders).compose(together).rdp
        np.testing.assert_allclose(composed.guarantee.rdp(orders), stock_rdp)
        assert pld.PLDAccountant().compose(composed.guarantee.to_dpevent()).get_epsilon(
            1e-6
        ) == pytest.approx(composed.get_epsilon(1e-6), rel=1e-3)

    def test_events_that_only_rdp_accounts(self, accountant):
        tree = dp_accounting.SingleEpochTreeAggregationDpEvent(5.0, [10])
        composed = accountant(REPLACE_SPECIAL).compose(cyclic_run()).compose(tree)
        assert math.isfinite(composed.get_epsilon(1e-6))
        assert not accountant(ADD_OR_REMOVE).supports(tree)

    def test_laplace_under_replace_one_doubles(self, accountant):
        stock = pld.PLDAccountant().compose(dp_accounting.LaplaceDpEvent(2.0))
        ours = accountant(REPLACE_ONE).compose(dp_accounting.LaplaceDpEvent(4.0))
        assert ours.get_epsilon(1e-6) == pytest.approx(stock.get_epsilon(1e-6), rel=1e-6)

    def test_without_replacement_under_replace_one_doubles(self, accountant):
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            100, 10, dp_accounting.GaussianDpEvent(4.0)
        )
        halved = dp_accounting.SampledWithoutReplacementDpEvent(
            100, 10, dp_accounting.GaussianDpEvent(2.0)
        )
        stock = rdp.RdpAccountant([2.0, 8.0], REPLACE_ONE).compose(halved)
        ours = accountant(REPLACE_ONE).compose(event)
        np.testing.assert_allclose(ours.guarantee.rdp([2.0, 8.0]), stock.rdp, rtol=1e-12)

    def test_a_gaussian_part_beside_a_native_replace_one_event(self, accountant):
        event = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(3.0))
        run = cyclic_run(noise_multiplier=20.0)
        ours = accountant(REPLACE_ONE).compose(run)
        if not ours.supports(event):  # dp-accounting before 0.5
            with pytest.raises(hsa.UnsupportedRunError):
                ours.compose(event)
            return
        # Sensitivity 2 in both parts: at least the run alone, at most without any sampling.
        alone = ours.get_epsilon(1e-6)
        mu = math.hypot(ours.guarantee.mu, 2 / 3)
        both = ours.compose(event).get_epsilon(1e-6)
        assert alone < both < hsa.curves.GaussianCurve(mu).epsilon(1e-6)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
class TestNothingIsLost:
    @pytest.mark.parametrize(
        "bad",
        [
            cyclic_run(batch_size=6),
            dp_accounting.UnsupportedDpEvent(),
            dp_accounting.ComposedDpEvent([cyclic_run(), dp_accounting.UnsupportedDpEvent()]),
        ],
    )
    def test_a_failed_compose_changes_nothing(self, accountant, bad):
        ours = accountant().compose(cyclic_run()).compose(dp_accounting.LaplaceDpEvent(9.0))
        before = ours.get_epsilon(1e-6), ours.ledger
        with pytest.raises(hsa.UnsupportedRunError, match="caused by subevent"):
            ours.compose(bad)
        assert (ours.get_epsilon(1e-6), ours.ledger) == before

    def test_events_that_no_accountant_takes_together(self, accountant):
        ours = accountant(REPLACE_SPECIAL).compose(
            dp_accounting.SingleEpochTreeAggregationDpEvent(5.0, [10])
        )  # RDP only
        only_pld = getattr(dp_accounting.dp_event, "MixtureOfGaussiansDpEvent", None)
        if only_pld is None:
            pytest.skip("dp-accounting 0.4.3 has no event that only its PLD accountant takes")
        before = ours.get_epsilon(1e-6), ours.ledger
        with pytest.raises(hsa.UnsupportedRunError, match="together with"):
            ours.compose(only_pld(2.0, [0.0, 1.0], [0.5, 0.5]))
        assert (ours.get_epsilon(1e-6), ours.ledger) == before

    @pytest.mark.parametrize(
        ("event", "count", "error"),
        [
            ("run", 1, TypeError),
            (cyclic_run(), 0, ValueError),
            (cyclic_run(), -2, ValueError),
            (cyclic_run(), 1.5, TypeError),
        ],
    )
    def test_bad_arguments(self, accountant, event, count, error):
        ours = accountant().compose(cyclic_run())
        before = ours.get_epsilon(1e-6), ours.ledger
        with pytest.raises(error):
            ours.compose(event, count)
        assert (ours.get_epsilon(1e-6), ours.ledger) == before

    def test_supports_does_not_change_anything(self, accountant):
        ours = accountant().compose(cyclic_run())
        before = ours.get_epsilon(1e-6)
        for event in (cyclic_run(), dp_accounting.NonPrivateDpEvent(), cyclic_run(batch_size=6)):
            ours.supports(event)
        assert ours.get_epsilon(1e-6) == before
        assert ours.ledger == cyclic_run()


@pytest.mark.parametrize("relation", RELATIONS)
class TestLimits:
    def test_zero_noise_is_not_private(self, relation):
        ours = hsa.LastIterateAccountant(relation).compose(full_run(noise_multiplier=0.0))
        assert ours.get_epsilon(0.1) == math.inf
        assert ours.get_delta(100.0) == 1.0
        assert ours.compose(dp_accounting.LaplaceDpEvent(1.0)).get_epsilon(0.1) == math.inf
        zero = hsa.LastIterateAccountant(relation).compose(dp_accounting.GaussianDpEvent(0.0))
        assert zero.get_epsilon(0.1) == math.inf

    def test_zero_learning_rate_releases_nothing(self, relation):
        ours = hsa.LastIterateAccountant(relation).compose(full_run(learning_rate=0.0))
        assert ours.get_epsilon(0.0) == 0.0

    def test_a_tiny_domain_leaves_the_last_step(self, relation):
        factor = 2 if relation is REPLACE_ONE else 1
        mu = (
            hsa.LastIterateAccountant(relation)
            .compose(full_run(domain_diameter=1e-9, num_steps=500))
            .guarantee.mu
        )
        assert mu == pytest.approx(factor / 2.0, rel=1e-5)

    def test_every_step_released_is_composition(self, relation):
        event = full_run(release_steps=range(1, 24))
        factor = 2 if relation is REPLACE_ONE else 1
        mu = hsa.ShiftedInterpolationAccountant(relation).compose(event).guarantee.mu
        assert mu == pytest.approx(factor / 2.0 * math.sqrt(24), rel=1e-12)


class TestReleases:
    @pytest.mark.parametrize("schedule", [False, True])
    def test_segments_add_up(self, schedule):
        rates = np.linspace(0.5, 0.2, 24) if schedule else np.full(24, 0.5)
        ends = (3, 4, 11, 24)
        for position in range(4):
            total, start = 0.0, 0
            for end in ends:
                segment = cyclic_run(
                    learning_rate=np.concatenate((np.zeros(start), rates[start:end])),
                    num_steps=end,
                )
                if position < end:
                    total += mu_at(segment, position) ** 2
                start = end
            whole = cyclic_run(learning_rate=rates, release_steps=ends[:-1])
            assert mu_at(whole, position) ** 2 == pytest.approx(total, rel=1e-11)

    @pytest.mark.parametrize("diameter", [math.inf, 0.15])
    @pytest.mark.parametrize("schedule", [False, True])
    def test_worst_position_with_releases(self, diameter, schedule):
        rates = np.linspace(0.5, 0.2, 24) if schedule else 0.5
        make = {"learning_rate": rates, "release_steps": (3, 4, 11), "domain_diameter": diameter}
        event = cyclic_run(**make)
        worst = hsa.ShiftedInterpolationAccountant().compose(event).guarantee.mu
        assert worst == pytest.approx(max(mu_at(event, p) for p in range(4)), rel=1e-12)


PARAMETERS = {
    "noise_multiplier": st.floats(0.3, 5),
    "learning_rate": st.floats(0.01, 1.5),
    "weight_decay": st.floats(0, 0.6),
    "domain_diameter": st.one_of(st.just(math.inf), st.floats(0.01, 5)),
    "num_steps": st.integers(1, 40),
    "smoothness": st.floats(0, 3),
    "clip_norm": st.floats(0.1, 2),
}


def random_run(draw):
    arguments = {name: draw(strategy) for name, strategy in PARAMETERS.items()}
    smoothness = arguments.pop("smoothness")
    kind = draw(st.sampled_from(["convex", "generalized_linear", "smooth", "linear"]))
    lipschitz = draw(st.one_of(st.none(), st.floats(0.1, 2)))
    if kind == "linear":
        loss = hsa.LossGeometry.linear(lipschitz or 1.0)
    else:
        loss = getattr(hsa.LossGeometry, kind)(smoothness, lipschitz)
    make = draw(st.sampled_from([cyclic_run, full_run]))
    return make, arguments | {"loss": loss}


runs = st.composite(random_run)()


def mu_of(make, arguments, **changes):
    return (
        hsa.LastIterateAccountant(REPLACE_ONE).compose(make(**(arguments | changes))).guarantee.mu
    )


@given(runs, st.floats(0.1, 0.9))
def test_epsilon_falls_with_a_smaller_domain(run, factor):
    make, arguments = run
    smaller = mu_of(make, arguments, domain_diameter=factor * min(arguments["domain_diameter"], 9))
    assert smaller <= mu_of(make, arguments) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("order", "falls"),
    [
        ("full", 0.0),
        ("cyclic", 0.0),
        ("shuffled_once", 1e-12),
        ("reshuffled", 1e-4),  # carries are searched
        ("without_replacement", 1e-3),  # windows are searched
        ("poisson", 5e-3),
    ],
)
def test_epsilon_never_falls_from_epoch_to_epoch(order, falls):
    make = full_run if order == "full" else cyclic_run
    found = []
    for epochs in (*range(1, 8), 12, 20, 21, 100, 1000):
        event = make(batch_order=order, num_steps=4 * epochs, noise_multiplier=6.0)
        found.append(hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5))
    for before, after in itertools.pairwise(found):
        assert after >= before * (1 - falls)


@pytest.mark.parametrize("relation", first(1, [REPLACE_ONE, REPLACE_SPECIAL]))
@pytest.mark.parametrize("order", list(hsa.BatchOrder))
def test_accountants_and_guarantees_can_be_copied_and_pickled(order, relation):
    size = 1000 if order == hsa.BatchOrder.FULL else 100
    event = cyclic_run(batch_order=order, batch_size=size, dataset_size=1000, num_steps=10)
    accountant = hsa.LastIterateAccountant(relation).compose(event)
    for make_copy in (copy.deepcopy, lambda original: pickle.loads(pickle.dumps(original))):
        before = make_copy(accountant)
        epsilon, small = accountant.get_epsilon(1e-5), accountant.get_epsilon(1e-9)
        assert before.get_epsilon(1e-5) == epsilon
        after, guarantee = make_copy(accountant), make_copy(accountant.guarantee)
        assert after.get_epsilon(1e-9) == guarantee.epsilon(1e-9) == small
        assert after.compose(event).get_epsilon(1e-5) > epsilon


def test_constant_runs_and_bounded_domains_agree_with_all_positions():
    for diameter in (0.05, 0.3, math.inf):
        for decay in (0.0, 0.2):
            for steps in (23, 24, 26):
                make = {"domain_diameter": diameter, "weight_decay": decay, "num_steps": steps}
                event = cyclic_run(**make)
                mus = [mu_at(event, position) for position in range(4)]
                worst = hsa.LastIterateAccountant().compose(event).guarantee.mu
                assert worst == pytest.approx(max(mus), rel=1e-12)


def test_guarantee_rejects_bad_arguments():
    guarantee = hsa.LastIterateAccountant().compose(cyclic_run()).guarantee
    with pytest.raises(ValueError, match="target_delta"):
        guarantee.epsilon(1.5)
    with pytest.raises(ValueError, match="target_epsilon"):
        guarantee.delta(-1.0)
    with pytest.raises(TypeError, match="target_delta"):
        guarantee.epsilon("small")
    with pytest.raises(ValueError, match="orders > 1"):
        guarantee.rdp([1.0])
    accountant = hsa.LastIterateAccountant()
    with pytest.raises(ValueError, match="target_delta"):
        accountant.get_epsilon(-1e-5)
    with pytest.raises(ValueError, match="target_epsilon"):
        accountant.get_delta(math.nan)


# Six of them do not notice the mutant "only_starts_after_batches_are_tried".
@pytest.mark.parametrize("seed", range(90))
def test_worst_position_with_schedules_and_a_domain_or_drift(seed):
    """Three engines answer for all positions; each equals the answer for one position."""
    rng = np.random.default_rng(seed)
    kind = ("convex", "smooth")[seed % 2]  # contracting or not
    steps = int(rng.integers(1, 40))
    arguments = {
        "num_steps": steps,
        "learning_rate": rng.uniform(0.0, 1.5, steps) * (rng.random(steps) < 0.9),
        "noise_multiplier": rng.uniform(0.5, 4.0, steps),
        "weight_decay": float(rng.choice([0.0, 0.3])),
        "domain_diameter": float(rng.choice([0.1, 0.5, 2.0, math.inf])),
        "loss": getattr(hsa.LossGeometry, kind)(float(rng.uniform(0, 1.2)), lipschitz=1.0),
        "release_steps": [int(rng.integers(1, steps))] if steps > 1 and seed % 3 == 0 else [],
    }
    event = cyclic_run(**arguments)
    worst = hsa.ShiftedInterpolationAccountant().compose(event).guarantee.mu
    assert worst == pytest.approx(max(mu_at(event, p) for p in range(4)), rel=1e-11)


@pytest.mark.parametrize("event", [cyclic_run(), dp_accounting.GaussianDpEvent(4.0)])
def test_repetitions_of_repetitions_multiply(event):
    once = hsa.LastIterateAccountant(REPLACE_SPECIAL).compose(event).guarantee.mu
    nested = dp_accounting.SelfComposedDpEvent(dp_accounting.SelfComposedDpEvent(event, 2), 3)
    pair = dp_accounting.ComposedDpEvent([nested, event])
    accountant = hsa.LastIterateAccountant(REPLACE_SPECIAL).compose(pair, 5)
    assert accountant.guarantee.mu == pytest.approx(once * 35**0.5, rel=1e-12)


def conformance(accountant, *analyses):
    """dp-accounting's own tests of one accountant."""

    def make(self):
        kinds = [{"analysis": analysis} for analysis in analyses] or [{}]
        return [accountant(relation, **kind) for relation in NeighboringRelation for kind in kinds]

    base = privacy_accountant_test.PrivacyAccountantTest
    return type(accountant.__name__, (base,), {"_make_test_accountants": make})


BOTH = ("sound", "published")
LastIterateConformanceTest = conformance(hsa.LastIterateAccountant)
ShiftedInterpolationConformanceTest = conformance(hsa.ShiftedInterpolationAccountant)
ChienLiConformanceTest = conformance(hsa.ChienLiAccountant)
KongRiberoConformanceTest = conformance(hsa.KongRiberoAccountant)
LangevinConformanceTest = conformance(hsa.LangevinAccountant, *BOTH)
BlockCoordinateConformanceTest = conformance(hsa.BlockCoordinateAccountant, *BOTH)
DiceSgdConformanceTest = conformance(hsa.DiceSgdAccountant, *BOTH)


@pytest.mark.parametrize(
    "accountant",
    [
        *ACCOUNTANTS,
        hsa.ChienLiAccountant,
        hsa.KongRiberoAccountant,
        hsa.LangevinAccountant,
        hsa.BlockCoordinateAccountant,
        hsa.DiceSgdAccountant,
    ],
)
def test_relation_is_the_first_argument_and_has_a_default(accountant):
    assert accountant().neighboring_relation is NeighboringRelation.REPLACE_SPECIAL
    relation = NeighboringRelation.REPLACE_ONE
    assert accountant(relation).neighboring_relation is relation
    assert accountant("replace_one").neighboring_relation is relation
    with pytest.raises(ValueError, match="neighboring_relation to be one of ADD_OR_REMOVE_ONE"):
        accountant("replace one")
