"""`hsa.audit` and its attacks: exact laws, false claims that are caught, true ones that are not."""

import json
import math

import attrs
import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from gaussian_oracle import GaussianOracle, equally_likely_orders
from grid_oracle import GridOracle
from hypothesis import given
from mixtures_of_gaussians import OF_RANDOM_SIZE, patterns
from runs import cyclic_run, full_run, probe_run
from strategies import events, sound_guarantees

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing import LinearLosses, QuadraticLosses
from hidden_state_accountants.auditing.linear_losses import (
    mu_by_position,
    participation_probability,
)
from hidden_state_accountants.auditing.quadratic_losses import quadratic_runs
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.curves.gaussian import delta_from_mu

ADD, SPECIAL, ONE = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_SPECIAL,
    NeighboringRelation.REPLACE_ONE,
)
LINEAR = hsa.LossGeometry.linear(1.0)
STRONGLY_CONVEX = hsa.LossGeometry.strongly_convex(1.0, 0.3, lipschitz=0.9)


def evidence_of(attack, event, relation=SPECIAL):
    return attack.evidence(event, relation, lambda text: None)


def exact_mu(event, position, curvature=0.0, factor=1):
    """By linear algebra; the record's own curvature is 0."""
    b, size, record = event.batch_size, event.dataset_size, position * event.batch_size
    hessians = np.full((size, 1, 1), curvature)
    hessians[record] = 0.0
    epoch = [list(range(i, min(i + b, size))) for i in range(0, event.batches_per_epoch * b, b)]
    batches = [epoch[t % len(epoch)] for t in range(event.num_steps)]
    difference = [factor * event.gradient_bound()[0]]
    return GaussianOracle.of(
        event, hessians, [(1.0, batches)], record=record, slope_difference=difference
    ).mu


# --- linear losses --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_linear_losses_are_exact_at_every_position(seed):
    rng = np.random.default_rng(seed)
    steps, size = int(rng.integers(1, 20)), int(rng.integers(3, 9))  # often a short last batch
    event = cyclic_run(
        dataset_size=size,
        batch_size=min(size, int(rng.integers(1, 4))),
        num_steps=steps,
        noise_multiplier=rng.uniform(0.5, 3, steps),
        learning_rate=rng.uniform(0.1, 1, steps),
        weight_decay=rng.uniform(0, 0.9, steps),
        release_steps=rng.integers(1, steps + 1, 2).tolist(),
        loss=LINEAR,
    )
    for position, mu in enumerate(mu_by_position(event)):
        assert mu == pytest.approx(exact_mu(event, position), rel=1e-10)
    best = max(exact_mu(event, p, factor=2) for p in range(event.batches_per_epoch))
    evidence = evidence_of(LinearLosses(), event, ONE)
    assert evidence.delta(0.7) == pytest.approx(delta_from_mu(best, 0.7), rel=1e-9)


@pytest.mark.parametrize(
    ("noise", "releases", "mu"), [(1e-3, (), 1e3), (1.0, (1, 2), math.sqrt(3))]
)
def test_extreme_but_legal_rates_leave_no_trace_of_overflow(noise, releases, mu):
    event = full_run(
        learning_rate=[1e-74, 1e74, 1e-74], num_steps=3, noise_multiplier=noise, weight_decay=0.0,
        release_steps=releases,
    )  # fmt: skip
    assert mu_by_position(event)[0] == pytest.approx(mu, rel=1e-12)


def enumerated(event, there, others):
    """The mixture over all batch sequences, exactly, for constant gradients; the record's is 1."""
    b, steps, size = event.batch_size, event.num_steps, event.dataset_size
    if event.batch_order in OF_RANDOM_SIZE:  # the record alone: the others have no gradient
        found, weights = patterns(event.batch_order, steps, event.batches_per_epoch, b / size)
        orders = [(p, [(0,) * i for i in row]) for row, p in zip(found, weights, strict=True)]
        size = 1
    else:
        orders = equally_likely_orders(event.batch_order.value, size, b, steps)
    slopes = [[1.0]] + [[others]] * (size - 1)
    return GaussianOracle.of(
        event,
        np.zeros((size, 1, 1)),
        orders,
        record=0,
        slopes=slopes,
        slope_difference=[there - 1.0],
    )


@pytest.mark.parametrize(
    ("order", "size", "batch", "steps", "relation", "is_scheduled"),
    [
        ("poisson", 6, 2, 5, SPECIAL, True),
        ("balls_in_bins", 6, 2, 5, SPECIAL, True),
        ("balls_in_bins_redrawn", 6, 2, 5, SPECIAL, False),
        ("without_replacement", 4, 2, 3, ONE, True),
        ("shuffled_once", 4, 2, 5, SPECIAL, False),
        ("shuffled_once", 3, 2, 4, ONE, True),  # a short last batch
        ("reshuffled", 3, 1, 5, SPECIAL, True),  # a partial last epoch
        ("reshuffled", 3, 2, 4, ONE, False),
    ],
)
def test_random_orders_against_enumeration(order, size, batch, steps, relation, is_scheduled):
    event = cyclic_run(
        batch_order=order,
        dataset_size=size,
        batch_size=batch,
        num_steps=steps,
        noise_multiplier=0.9,
        weight_decay=0.4 if is_scheduled else 0.0,
        learning_rate=np.linspace(1.0, 0.3, steps) if is_scheduled else 0.5,
        loss=LINEAR,
    )
    there = 0.0 if relation is SPECIAL else -1.0
    oracles = [enumerated(event, there, others) for others in (0.0, -1.0)]
    evidence = evidence_of(LinearLosses(), event, relation)
    for epsilon in (0.0, 0.3, 1.0, 2.5):
        exact = max(max(oracle.delta(epsilon)) for oracle in oracles)
        assert 0.99 * exact - 1e-6 <= evidence.delta(epsilon) <= exact * (1 + 1e-9) + 1e-15
    assert evidence.epsilon(0.999) == 0


def test_releases_of_a_random_order_show_more_and_no_more_than_composition():
    arguments = {"batch_order": "poisson", "weight_decay": 0.3, "num_steps": 6, "loss": LINEAR}
    event = cyclic_run(release_steps=range(1, 6), **arguments)
    hidden, released = (evidence_of(LinearLosses(), e) for e in (cyclic_run(**arguments), event))
    composed = hsa.LastIterateAccountant().compose(event)
    for epsilon in (0.0, 0.2, 1.0):
        assert hidden.delta(epsilon) < released.delta(epsilon) <= composed.get_delta(epsilon)


def test_a_cap_keeps_a_record_out_of_full_batches():
    event = cyclic_run(batch_order="poisson", max_batch_size=2)
    rng = np.random.default_rng(0)
    joins = rng.random((200_000, 20)) < 5 / 20
    rank = np.where(joins, rng.random(joins.shape), 2.0)
    kept = joins[:, 0] & ((rank < rank[:, :1]).sum(axis=1) < 2)
    assert participation_probability(event) == pytest.approx(kept.mean(), abs=4e-3)
    assert participation_probability(event) < 5 / 20


# --- quadratic losses -----------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(4))
def test_quadratic_runs_are_exact_where_they_stay(position):
    event = cyclic_run(num_steps=19, release_steps=(4, 11))
    for curvature in (-0.2, 0.0, 1.0):
        h = np.array([curvature])
        mu = quadratic_runs(event, position, (1, -1), h, h)[0][0]
        exact = exact_mu(event, position, curvature, factor=2)
        assert mu == pytest.approx(exact, rel=1e-8)
        assert mu < exact


@pytest.mark.parametrize("domain", [math.inf, 3.0])
def test_the_chance_to_leave_is_not_underestimated(domain):
    event = full_run(
        batch_size=4, dataset_size=4, num_steps=10, noise_multiplier=2.0, domain_diameter=domain
    )
    h = np.array([0.7])
    _, (leaves,), (neighbour_leaves,) = quadratic_runs(event, 0, (1, 0), h, h)
    rng = np.random.default_rng(1)
    for record, bound in ((1.0, leaves), (0.0, neighbour_leaves)):
        x, left = np.zeros(200_000), np.zeros(200_000, dtype=bool)
        for _ in range(10):
            left |= 0.7 * np.abs(x) > 1.0
            x = 0.9 * x - 0.5 / 4 * (3 * 0.7 * x + record + 2.0 * rng.normal(size=x.shape))
            left |= np.abs(x) > domain / 2
        assert 0 < left.mean() <= bound * 1.05
        assert bound < 12 * left.mean()


@pytest.mark.parametrize("relation", [SPECIAL, ONE])
def test_quadratic_evidence_is_below_the_truth_of_the_huber_run(relation):
    """The run in the class, where gradients are cut, on the grid."""
    event = full_run(batch_size=4, dataset_size=4, num_steps=6, noise_multiplier=1.0)
    evidence = evidence_of(QuadraticLosses(), event, relation)
    replaced = (lambda x: -np.ones_like(x)) if relation is ONE else None
    grids = []
    for slope in (1e-9, 0.5, 0.9, 1.0):
        others = [lambda x, slope=slope: np.clip(slope * x, -1, 1)] * 3
        grids.append(GridOracle(event, [np.ones_like, *others], replaced))
    for epsilon in (0.0, 0.5, 1.5):
        truth = max(v.value + v.error for grid in grids for v in grid.delta(epsilon))
        assert 0.5 * truth < evidence.delta(epsilon) <= truth


def test_curvature_undoes_decay():
    anything = full_run(
        batch_size=100, dataset_size=100, loss=hsa.LossGeometry.smooth(0.5), weight_decay=0.1
    )
    found = evidence_of(QuadraticLosses(), anything).delta(1.0)
    assert found == pytest.approx(delta_from_mu(math.sqrt(24) / 2, 1.0), rel=1e-3)


SECRET = {"batch_order": "poisson"}


@pytest.mark.parametrize(
    ("attack", "changes", "relation", "text"),
    [
        (LinearLosses(), {}, ADD, "fixed size"),
        (LinearLosses(), {"domain_diameter": 1.0}, SPECIAL, "no projection"),
        (LinearLosses(), {"loss": STRONGLY_CONVEX}, SPECIAL, "not strongly convex"),
        (LinearLosses(), {**SECRET, "noise_multiplier": 0.0}, SPECIAL, "noise_multiplier > 0"),
        (QuadraticLosses(), SECRET, SPECIAL, "FULL or CYCLIC"),
        (QuadraticLosses(), {"loss": LINEAR}, SPECIAL, "curvature"),
        (QuadraticLosses(), {"loss": STRONGLY_CONVEX}, SPECIAL, "no strong convexity"),
        (QuadraticLosses(), {"noise_multiplier": 0.0}, SPECIAL, "noise_multiplier > 0"),
    ],
)
def test_where_an_attack_does_not_apply(attack, changes, relation, text):
    assert text in "; ".join(map(str, attack.check(cyclic_run(**changes), relation)))


# --- claims ---------------------------------------------------------------------------------------


def gaussian(mu, relation=SPECIAL):
    return hsa.Guarantee(GaussianCurve(mu), relation, "a claim")


@pytest.mark.parametrize(
    ("run", "relation", "decay", "released"),
    [(full_run, SPECIAL, 0.0, ()), (cyclic_run, ONE, 0.2, (3, 9)), (cyclic_run, SPECIAL, 0.2, ())],
)
def test_five_percent_less_than_the_truth_is_caught(run, relation, decay, released):
    event = run(weight_decay=decay, loss=LINEAR, release_steps=released)
    mu = mu_by_position(event).max() * (2 if relation is ONE else 1)
    report = hsa.audit(gaussian(0.95 * mu, relation), event)
    assert report.violated_by == "linear_losses"
    assert report.lower_bound > report.claimed
    assert report.tightness < 1
    assert not hsa.audit(gaussian(mu, relation), event).violated


def test_a_contraction_does_not_forget_all_earlier_epochs():
    """A claim that only the last participation counts because c < 1."""
    once = 1 / 2.0  # gradient bound / noise
    assert hsa.audit(gaussian(once), full_run(weight_decay=0.02)).violated


@pytest.mark.parametrize("order", ["poisson", "reshuffled", "shuffled_once", "without_replacement"])
def test_random_orders_are_not_for_free(order):
    event = cyclic_run(batch_order=order, weight_decay=0.0, noise_multiplier=1.0)
    relation = ONE if order == "without_replacement" else SPECIAL
    epsilon = hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-5)
    true, false = (
        hsa.audit((claim, 1e-5), event, neighboring_relation=relation)
        for claim in (epsilon, epsilon / 8)
    )
    assert not true.violated
    assert 1 < true.tightness < 8
    assert false.violated_by == "linear_losses"


def test_a_claim_can_be_false_away_from_the_target_delta():
    event = full_run(loss=LINEAR)

    class Kinked(GaussianCurve):
        def delta(self, epsilon):
            return super().delta(epsilon) * (0.5 if epsilon > 8 else 1.0)

    claim = hsa.Guarantee(Kinked(mu_by_position(event).max()), SPECIAL, "a claim")
    assert not hsa.audit(claim, event, attacks=(QuadraticLosses(),)).violated
    assert hsa.audit(claim, event).violated


@given(events())
def test_no_sound_accountant_is_violated(case):
    """test_search.py beside this file judges more runs, by exact laws."""
    event, relation = case
    if not sound_guarantees(event, relation, accountant=False):
        return
    claim = accountant = hsa.LastIterateAccountant(relation).compose(event)
    if accountant.guarantee.mu is None:  # one point of the curve, because each takes long
        claim = (accountant.get_epsilon(1e-3), 1e-3)
    report = hsa.audit(claim, event, neighboring_relation=relation)
    assert not report.violated, str(report)
    assert report.tightness >= 1


def test_linear_losses_meet_composition():
    for event in (
        full_run(loss=LINEAR, weight_decay=0.0),
        full_run(loss=None, weight_decay=0.0),
        cyclic_run(release_steps=range(1, 24)),
    ):
        report = hsa.audit(hsa.LastIterateAccountant(), event)
        assert report.tightness == pytest.approx(1.0, abs=1e-6)


def test_the_probe_of_the_readme_is_quick_and_useful():
    report = hsa.audit(hsa.LastIterateAccountant(), probe_run())
    assert not report.violated
    assert 1.3 < report.tightness < 1.6


def test_infinity_is_never_violated():
    report = hsa.audit(hsa.LastIterateAccountant(), full_run(noise_multiplier=0.0))
    assert not report.violated
    assert report.claimed == math.inf == report.lower_bound
    assert report.tightness == 1.0


def test_forms_of_claims_agree():
    event = cyclic_run()
    accountant = hsa.LastIterateAccountant(ONE).compose(event)
    epsilon = accountant.get_epsilon(1e-6)
    reports = [
        hsa.audit(claim, event, **arguments)
        for claim, arguments in [
            (hsa.LastIterateAccountant(ONE), {"target_delta": 1e-6}),
            (accountant, {"target_delta": 1e-6}),
            (accountant.guarantee, {"target_delta": 1e-6}),
            ((epsilon, 1e-6), {"neighboring_relation": ONE}),
        ]
    ]
    first = reports[0]
    assert (first.claimed, first.neighboring_relation) == (epsilon, "REPLACE_ONE")
    for other in reports[1:]:
        assert attrs.evolve(other, claim=first.claim) == first


def test_stock_accountants_account_for_the_composition():
    event = full_run(weight_decay=0.0)
    composed = dp_accounting.pld.PLDAccountant()
    composed.compose(event.as_composition(SPECIAL))
    for accountant in (RdpAccountant(), composed):
        report = hsa.audit(accountant, event, neighboring_relation=SPECIAL)
        assert 1 <= report.tightness < 1.2
    assert not hsa.audit(RdpAccountant(), event).violated  # FULL: add or remove


@pytest.mark.parametrize(
    ("claim", "arguments", "error", "text"),
    [
        ("1.0", {}, TypeError, "a Guarantee or a pair"),
        ((1.0, 1e-5), {}, ValueError, "neighboring_relation"),
        ((-1.0, 1e-5), {"neighboring_relation": ONE}, ValueError, "epsilon of the claim >= 0"),
        (gaussian(1.0), {"neighboring_relation": ONE}, ValueError, "which the claim is for"),
        (
            hsa.LastIterateAccountant().compose(cyclic_run(), 2),
            {},
            ValueError,
            "nothing else, got the ledger",
        ),
        (gaussian(1.0), {"target_delta": 2.0}, ValueError, "target_delta"),
        (gaussian(1.0), {"attacks": ()}, TypeError, "an attack is about"),
        (gaussian(1.0), {"event": "run"}, TypeError, "DpEvent"),
    ],
)
def test_what_is_refused(claim, arguments, error, text):
    with pytest.raises(error, match=text):
        hsa.audit(claim, **{"event": cyclic_run(), **arguments})


def test_the_report_says_what_happened():
    event, lines = cyclic_run(batch_order="poisson", loss=LINEAR), []
    report = hsa.audit((0.01, 1e-5), event, neighboring_relation=SPECIAL, progress=lines.append)
    assert any("linear_losses" in line for line in lines)
    for text in (
        "VIOLATED by linear_losses: epsilon is at least ",
        "claimed 0.01 by (0.01, 1e-05)",
        "Witness (certified): linear losses, POISSON",
    ):
        assert text in str(report)
    linear, quadratic = report.rows
    assert linear.applies
    assert linear.violation
    assert not quadratic.applies
    assert "FULL or CYCLIC" in quadratic.detail
    plain = report.to_dict()
    assert json.loads(json.dumps(plain)) == plain | {"rows": list(plain["rows"])}
    assert plain["violated"] is True
    projected = cyclic_run(batch_order="poisson", domain_diameter=1.0)
    report = hsa.audit((1.0, 1e-5), projected, neighboring_relation=SPECIAL)
    assert report.violated_by is None
    assert report.tightness == math.inf
    assert "not tested: no attack applies" in str(report)
