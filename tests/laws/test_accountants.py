"""What must hold for any accountant, on every relation, which may be given by its name."""

import copy
import itertools
import math
import pickle

import dp_accounting
import numpy as np
import pytest
from cases import first
from dp_accounting import NeighboringRelation, pld, privacy_accountant_test, rdp
from runs import block_run, cyclic_run, full_run, mu_at, probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.runs.run import Step

ADD_OR_REMOVE, REPLACE_ONE, REPLACE_SPECIAL = NeighboringRelation
GAUSSIAN = dp_accounting.GaussianDpEvent(4.0)


def accounted(event, relation=REPLACE_SPECIAL, count=1, accountant=hsa.LastIterateAccountant):
    return accountant(relation).compose(event, count)


def mu(event, relation=REPLACE_SPECIAL):
    return accounted(event, relation).guarantee.mu


def test_the_reference_run():
    """Theory section 7: one linear probe."""
    accountant = accounted(probe_run())
    assert accountant.guarantee.mu == pytest.approx(0.50041, abs=5e-6)
    assert accountant.get_epsilon(1e-5) == pytest.approx(1.9949, abs=5e-5)
    poisson = probe_run(batch_order="poisson")
    assert accounted(poisson).get_epsilon(1e-5) < 0.95  # Theorem B
    for event, options, expected in (
        (probe_run(), {}, 54.377),
        (poisson, {"value_discretization_interval": 1e-3}, 3.1973),
        (poisson, {}, 3.1870),
    ):
        stock = pld.PLDAccountant(**options).compose(event.as_composition())
        assert stock.get_epsilon(1e-5) == pytest.approx(expected, abs=5e-4)


def test_convex_with_a_domain():
    """c = 1, diameter R: mu^2 = min_k (min(R, tau s) + k s)^2 / (k sigma^2)."""
    event = full_run(
        loss=hsa.LossGeometry.convex(1.0, 1.0), weight_decay=0.0, domain_diameter=0.4, num_steps=300
    )
    s, sigma = 0.5 / 20, 0.5 * 2.0 / 20
    k = np.arange(1, 301)
    exact = np.min((np.minimum(0.4, (300 - k) * s) + k * s) ** 2 / (k * sigma**2))
    assert mu(event) ** 2 == pytest.approx(float(exact), rel=1e-12)


class TestComposition:
    @pytest.mark.parametrize("event", [cyclic_run(), GAUSSIAN])
    def test_count_law(self, event):
        once = accounted(event)
        for _ in range(5):
            once.compose(event)
        pair = dp_accounting.ComposedDpEvent([event, dp_accounting.NoOpDpEvent()])
        nested = dp_accounting.SelfComposedDpEvent(dp_accounting.SelfComposedDpEvent(pair, 2), 3)
        counted = accounted(event, count=6)
        for accountant in (once, counted, accounted(nested)):
            assert accountant.guarantee.mu == pytest.approx(mu(event) * math.sqrt(6), rel=1e-14)
        assert once.ledger == counted.ledger == dp_accounting.SelfComposedDpEvent(event, 6)

    def test_gaussian_mixture_is_exact(self):
        composed = accounted(cyclic_run()).compose(dp_accounting.GaussianDpEvent(3.0), 2)
        exact = math.sqrt(mu(cyclic_run()) ** 2 + 2 / 9)
        assert composed.guarantee.mu == pytest.approx(exact, rel=1e-14)

    @pytest.mark.parametrize(
        "other",
        [
            dp_accounting.LaplaceDpEvent(20.0),
            dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.5)),
        ],
    )
    @pytest.mark.parametrize("relation", [ADD_OR_REMOVE, REPLACE_SPECIAL])
    def test_with_other_standard_events(self, other, relation):
        run = full_run(noise_multiplier=20.0)
        composed = accounted(run, relation).compose(other, 3)
        gaussian = dp_accounting.GaussianDpEvent(1 / mu(run, relation))
        together = dp_accounting.ComposedDpEvent(
            [gaussian, dp_accounting.SelfComposedDpEvent(other, 3)]
        )
        stock = [kind().compose(together) for kind in (pld.PLDAccountant, rdp.RdpAccountant)]
        for delta in (1e-3, 1e-6):
            expected = min(a.get_epsilon(delta) for a in stock)
            assert composed.get_epsilon(delta) == pytest.approx(expected, rel=1e-8)
        assert composed.get_delta(1.0) == pytest.approx(min(a.get_delta(1.0) for a in stock))
        assert composed.guarantee.mu is None
        orders = [2.0, 8.0]
        stock_rdp = rdp.RdpAccountant(orders).compose(together).rdp
        np.testing.assert_allclose(composed.guarantee.rdp(orders), stock_rdp)
        exported = pld.PLDAccountant().compose(composed.guarantee.to_dpevent())
        expected = composed.get_epsilon(1e-6)
        assert exported.get_epsilon(1e-6) == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize(
        ("make", "relation"),
        [
            (dp_accounting.GaussianDpEvent, ADD_OR_REMOVE),
            (dp_accounting.LaplaceDpEvent, ADD_OR_REMOVE),
            (
                lambda noise: dp_accounting.SampledWithoutReplacementDpEvent(
                    100, 10, dp_accounting.GaussianDpEvent(noise)
                ),
                REPLACE_ONE,
            ),
        ],
    )
    def test_replaced_records_of_standard_events_move_twice_as_far(self, make, relation):
        orders = [2.0, 8.0]
        stock = rdp.RdpAccountant(orders, relation).compose(make(2.0)).rdp
        ours = accounted(make(4.0), REPLACE_ONE).guarantee.rdp(orders)
        np.testing.assert_allclose(ours, stock, rtol=1e-12)


SAMPLED = dp_accounting.PoissonSampledDpEvent
BAD = [
    ("run", 1),
    (cyclic_run(), 0),
    (cyclic_run(), -2),
    (cyclic_run(), 1.5),
    (cyclic_run(batch_size=6), 1),
    (dp_accounting.UnsupportedDpEvent(), 1),
    (dp_accounting.ComposedDpEvent([cyclic_run(), dp_accounting.UnsupportedDpEvent()]), 1),
    (dp_accounting.GaussianDpEvent(math.nan), 1),
    (dp_accounting.GaussianDpEvent(-2.0), 1),
    (dp_accounting.GaussianDpEvent("a"), 1),
    (dp_accounting.LaplaceDpEvent(-1.0), 1),
    (SAMPLED(2.0, GAUSSIAN), 1),
    (dp_accounting.SampledWithoutReplacementDpEvent(10, 100, GAUSSIAN), 1),
]


@pytest.mark.parametrize(("event", "count"), BAD)
@pytest.mark.parametrize("relation", [REPLACE_ONE, REPLACE_SPECIAL])
def test_a_failed_compose_changes_nothing(event, count, relation):
    ours = accounted(cyclic_run(), relation).compose(dp_accounting.LaplaceDpEvent(9.0))
    before = ours.get_epsilon(1e-6), ours.ledger
    with pytest.raises((ValueError, TypeError)):
        ours.compose(event, count)
    assert (ours.get_epsilon(1e-6), ours.ledger) == before
    if isinstance(event, dp_accounting.ComposedDpEvent):
        assert not ours.supports(event)
        assert (ours.get_epsilon(1e-6), ours.ledger) == before


def test_events_that_no_accountant_takes_together():
    ours = accounted(dp_accounting.SingleEpochTreeAggregationDpEvent(5.0, [10]))  # RDP only
    before = ours.get_epsilon(1e-6), ours.ledger
    with pytest.raises(hsa.UnsupportedRunError, match="together with"):
        ours.compose(SAMPLED(0.1, dp_accounting.LaplaceDpEvent(2.0)))  # has a privacy loss only
    assert (ours.get_epsilon(1e-6), ours.ledger) == before


@pytest.mark.parametrize(
    ("relation", "factor"), [(ADD_OR_REMOVE, 1), (REPLACE_ONE, 2), (REPLACE_SPECIAL, 1)]
)
def test_limits(relation, factor):
    silent = accounted(full_run(noise_multiplier=0.0), relation)
    assert silent.get_epsilon(0.1) == math.inf
    assert silent.get_delta(100.0) == 1.0
    assert silent.compose(dp_accounting.LaplaceDpEvent(1.0)).get_epsilon(0.1) == math.inf
    assert accounted(full_run(learning_rate=0.0), relation).get_epsilon(0.0) == 0.0
    of_the_last_step = mu(full_run(domain_diameter=1e-9, num_steps=500), relation)
    assert of_the_last_step == pytest.approx(factor / 2.0, rel=1e-5)
    released = full_run(release_steps=range(1, 24))
    found = hsa.ShiftedInterpolationAccountant(relation).compose(released).guarantee.mu
    assert found == pytest.approx(factor / 2.0 * math.sqrt(24), rel=1e-12)


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


def test_constant_runs_and_bounded_domains_agree_with_all_positions():
    for diameter, decay, steps in itertools.product(
        (0.05, 0.3, math.inf), (0.0, 0.2), (23, 24, 26)
    ):
        event = cyclic_run(domain_diameter=diameter, weight_decay=decay, num_steps=steps)
        assert mu(event) == pytest.approx(max(mu_at(event, p) for p in range(4)), rel=1e-12)


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
        found.append(accounted(event).get_epsilon(1e-5))
    for before, after in itertools.pairwise(found):
        assert after >= before * (1 - falls)


@pytest.mark.parametrize("relation", first(1, [REPLACE_ONE, REPLACE_SPECIAL]))
@pytest.mark.parametrize("order", list(hsa.BatchOrder))
def test_accountants_and_guarantees_can_be_copied_and_pickled(order, relation):
    size = 1000 if order == hsa.BatchOrder.FULL else 100
    event = cyclic_run(batch_order=order, batch_size=size, dataset_size=1000, num_steps=10)
    accountant = accounted(event, relation)
    for make_copy in (copy.deepcopy, lambda original: pickle.loads(pickle.dumps(original))):
        before = make_copy(accountant)
        epsilon, small = accountant.get_epsilon(1e-5), accountant.get_epsilon(1e-9)
        assert before.get_epsilon(1e-5) == epsilon
        after, guarantee = make_copy(accountant), make_copy(accountant.guarantee)
        assert after.get_epsilon(1e-9) == guarantee.epsilon(1e-9) == small
        assert after.compose(event).get_epsilon(1e-5) > epsilon


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda a: a.guarantee.epsilon(1.5), ValueError, "target_delta"),
        (lambda a: a.guarantee.delta(-1.0), ValueError, "target_epsilon"),
        (lambda a: a.guarantee.epsilon("small"), TypeError, "target_delta"),
        (lambda a: a.guarantee.rdp([1.0]), ValueError, "orders > 1"),
        (lambda a: a.get_epsilon(-1e-5), ValueError, "target_delta"),
        (lambda a: a.get_delta(math.nan), ValueError, "target_epsilon"),
    ],
)
def test_impossible_questions(ask, error, text):
    with pytest.raises(error, match=text):
        ask(accounted(cyclic_run()))


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


# Relations

DICE = hsa.DiceSgdDpEvent(
    noise_std=0.02, clip_norm=1.0, error_clip_norm=1.0, batch_size=10, dataset_size=500, num_steps=9
)
CLIPPED_BLOCKS = block_run(gradient_sensitivity=None, clip_norm=1.0)


def recorded(relation):
    recorder = hsa.RunRecorder(
        batch_order="cyclic", batch_size=5, dataset_size=20, loss=hsa.LossGeometry.convex(1.0, 1.0)
    )
    for step in range(6):
        values = {"noise_multiplier": 2.0, "learning_rate": 0.5, "weight_decay": 0.2}
        recorder.add(Step(clip_norm=1.0, batch=step % 4, rows=5, **values))
    return recorder.guarantee(relation).epsilon(1e-5)


def composed(relation):
    guarantee = accounted(cyclic_run(), relation).guarantee
    return hsa.compose_guarantees([guarantee, guarantee], relation).epsilon(1e-5)


def of(accountant, event=None):
    return lambda r: accounted(event or cyclic_run(), r, accountant=accountant).get_epsilon(1e-5)


WAYS = {
    "accountant": of(hsa.LastIterateAccountant),
    "shifted": of(hsa.ShiftedInterpolationAccountant),
    "chien_li": of(hsa.ChienLiAccountant),
    "kong_ribero": of(hsa.KongRiberoAccountant),
    "blocks": of(hsa.BlockCoordinateAccountant, CLIPPED_BLOCKS),
    "sensitivity": CLIPPED_BLOCKS.sensitivity,
    "compose_guarantees": composed,
    "compare": lambda r: hsa.compare(cyclic_run(), 1e-5, r).best().epsilon,
    "position_profile": lambda r: hsa.position_profile(cyclic_run(), 1e-5, r).max(),
    "calibrate_noise": lambda r: hsa.calibrate_noise(1, 1e-5, full_run(), neighboring_relation=r),
    "calibrate_epochs": lambda r: hsa.calibrate_epochs(
        3.0, 1e-5, cyclic_run(noise_multiplier=8.0, weight_decay=0.0), neighboring_relation=r
    ),
    "audit": lambda r: hsa.audit((9.0, 1e-5), full_run(), neighboring_relation=r).lower_bound,
    "as_composition": lambda r: cyclic_run().as_composition(r).event.noise_multiplier,
    "guarantee": lambda r: hsa.Guarantee(GaussianCurve(1.0), r, "a claim").neighboring_relation,
    "bound": lambda r: hsa.BOUNDS[0].guarantee(cyclic_run(), r).epsilon(1e-5),
    "conditions": lambda r: hsa.bounds.DiceSgd(analysis="published").check(DICE, r),
    "recorder": recorded,
}


@pytest.mark.parametrize("name", WAYS)
def test_a_name_means_the_relation(name):
    way = WAYS[name]
    found = {relation: way(relation) for relation in (REPLACE_SPECIAL, REPLACE_ONE)}
    assert found[REPLACE_SPECIAL] != found[REPLACE_ONE]
    for relation, expected in found.items():
        for text in (relation.name.lower(), f" {relation.name.replace('_', '-')} "):
            assert way(text) == expected
    for relation, error in (("replace", ValueError), (1, TypeError)):
        with pytest.raises(error, match="of ADD_OR_REMOVE_ONE, REPLACE_ONE, REPLACE_SPECIAL"):
            way(relation)
    assert hsa.LastIterateAccountant().neighboring_relation is REPLACE_SPECIAL
