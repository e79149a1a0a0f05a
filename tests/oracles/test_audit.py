"""`hsa.audit`: false claims are caught, true ones are not, and the report says so."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from one_dimensional import OneDimensional
from runs import cyclic_run, full_run, probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing import (
    LinearLosses,
    QuadraticLosses,
)
from hidden_state_accountants.auditing.linear_losses import mu_by_position
from hidden_state_accountants.curves.base import GaussianCurve

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
LINEAR = hsa.LossGeometry.linear(1.0)
QUICK = (LinearLosses(), QuadraticLosses())
ALL = (*QUICK, OneDimensional(effort=3e8))


def gaussian(mu, relation=SPECIAL):
    return hsa.Guarantee(GaussianCurve(mu), relation, "a claim")


# --- false claims -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "relation", "decay", "released"),
    [(full_run, SPECIAL, 0.0, ()), (cyclic_run, ONE, 0.2, (3, 9)), (cyclic_run, SPECIAL, 0.2, ())],
)
def test_five_percent_less_than_the_truth_is_caught(run, relation, decay, released):
    event = run(weight_decay=decay, loss=LINEAR, release_steps=released)
    mu = mu_by_position(event).max() * (2 if relation is ONE else 1)
    report = hsa.audit(gaussian(0.95 * mu, relation), event, attacks=QUICK)
    assert report.violated
    assert report.violated_by == "linear_losses"
    assert report.lower_bound > report.claimed
    assert report.tightness < 1
    assert not hsa.audit(gaussian(mu, relation), event, attacks=QUICK).violated


def test_hiding_the_iterates_does_not_halve_epsilon():
    for event in (full_run(weight_decay=0.0), full_run(weight_decay=0.0, loss=None)):
        composed = hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5)
        report = hsa.audit((composed / 2, 1e-5), event, neighboring_relation=SPECIAL)
        assert report.violated
        assert report.lower_bound == pytest.approx(composed, rel=1e-6)


def test_a_contraction_does_not_forget_all_earlier_epochs():
    """A claim that only the last participation counts because c < 1."""
    event = cyclic_run(weight_decay=0.02, batch_size=20, dataset_size=20, batch_order="full")
    once = 1 / 2.0  # gradient bound / noise
    assert hsa.audit(gaussian(once), event, attacks=QUICK).violated
    cyclic = cyclic_run(weight_decay=0.02, num_steps=240, noise_multiplier=1.0, loss=LINEAR)
    assert hsa.audit(gaussian(0.4), cyclic, attacks=QUICK).violated


@pytest.mark.parametrize("order", ["poisson", "reshuffled", "shuffled_once", "without_replacement"])
def test_random_orders_are_not_for_free(order):
    event = cyclic_run(batch_order=order, weight_decay=0.0, noise_multiplier=1.0)
    relation = ONE if order == "without_replacement" else SPECIAL
    epsilon = hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-5)
    claim = (epsilon, 1e-5)  # one point of its curve, because each takes long
    report = hsa.audit(claim, event, neighboring_relation=relation, attacks=QUICK)
    assert not report.violated
    assert 1 < report.tightness < 8
    half = hsa.audit(
        (report.lower_bound / 1.05, 1e-5), event, neighboring_relation=relation, attacks=QUICK
    )
    assert half.violated_by == "linear_losses"


def test_a_claim_can_be_false_away_from_the_target_delta():
    event = full_run(loss=LINEAR)

    class Kinked(GaussianCurve):
        def delta(self, epsilon):
            return super().delta(epsilon) * (0.5 if epsilon > 8 else 1.0)

    claim = hsa.Guarantee(Kinked(mu_by_position(event).max()), SPECIAL, "a claim")
    assert not hsa.audit(claim, event, attacks=(QuadraticLosses(),)).violated
    assert hsa.audit(claim, event, attacks=QUICK).violated


# --- true claims --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(2 * len(hsa.BatchOrder), len(hsa.BatchOrder)))
def test_no_sound_accountant_is_violated(seed):
    rng = np.random.default_rng(seed)
    order = tuple(hsa.BatchOrder)[seed % len(hsa.BatchOrder)]
    full = order is hsa.BatchOrder.FULL
    batch, period = int(rng.integers(1, 4)), 1 if full else int(rng.integers(2, 4))
    steps = int(rng.integers(1, 11))
    scheduled = rng.random() < 0.4

    def draw(low, high):
        return rng.uniform(low, high, steps) if scheduled else float(rng.uniform(low, high))

    lipschitz = None if rng.random() < 0.5 else float(rng.uniform(0.3, 1.5))
    losses = [
        hsa.LossGeometry.convex(1.0, lipschitz),
        hsa.LossGeometry.generalized_linear(2.0, lipschitz),
        hsa.LossGeometry.smooth(0.5, lipschitz),
        hsa.LossGeometry.weakly_convex(1.0, 0.2, lipschitz),
        hsa.LossGeometry.strongly_convex(1.0, 0.3, lipschitz),
        None,
    ]
    domain = float(rng.uniform(0.3, 2.0)) if rng.random() < 0.3 else math.inf
    event = hsa.LastIterateDpEvent(
        noise_multiplier=draw(0.7, 3.0),
        learning_rate=draw(0.1, 1.0),
        clip_norm=draw(0.5, 1.2),
        weight_decay=draw(0.0, 0.5),
        batch_size=batch,
        dataset_size=batch * period,
        num_steps=steps,
        batch_order=order,
        loss=losses[int(rng.integers(6))],
        domain_diameter=domain,
        release_steps=(1, 4) if rng.random() < 0.3 and steps > 4 else (),
    )
    relations = [SPECIAL, ONE]
    if order is hsa.BatchOrder.POISSON:
        relations = [SPECIAL]
    for relation in relations:
        accountant = hsa.LastIterateAccountant(relation).compose(event)
        claim = accountant
        if accountant.guarantee.mu is None:  # one point of the curve, because each takes long
            claim = (accountant.get_epsilon(1e-3), 1e-3)
        report = hsa.audit(claim, event, neighboring_relation=relation, attacks=ALL)
        assert not report.violated, str(report)
        assert report.tightness >= 1


def test_linear_losses_meet_composition():
    report = hsa.audit(hsa.LastIterateAccountant(), full_run(loss=LINEAR, weight_decay=0.0))
    assert report.tightness == pytest.approx(1.0, abs=1e-6)
    everything = cyclic_run(release_steps=range(1, 24))
    assert hsa.audit(hsa.LastIterateAccountant(), everything).tightness == pytest.approx(1.0)


def test_the_probe_of_the_readme_is_quick_and_useful():
    report = hsa.audit(hsa.LastIterateAccountant(), probe_run())
    assert not report.violated
    assert 1.3 < report.tightness < 1.6


def test_infinity_is_never_violated():
    report = hsa.audit(hsa.LastIterateAccountant(), full_run(noise_multiplier=0.0), attacks=QUICK)
    assert not report.violated
    assert report.claimed == math.inf == report.lower_bound
    assert report.tightness == 1.0
    claim = (math.inf, 1e-5)
    assert not hsa.audit(claim, full_run(), neighboring_relation=ONE, attacks=QUICK).violated


# --- forms of claims ----------------------------------------------------------------------------


def test_accountants_guarantees_and_pairs_agree():
    event = cyclic_run()
    accountant = hsa.LastIterateAccountant(ONE).compose(event)
    epsilon = accountant.get_epsilon(1e-6)
    reports = [
        hsa.audit(hsa.LastIterateAccountant(ONE), event, target_delta=1e-6, attacks=QUICK),
        hsa.audit(accountant, event, target_delta=1e-6, attacks=QUICK),
        hsa.audit(accountant.guarantee, event, target_delta=1e-6, attacks=QUICK),
        hsa.audit((epsilon, 1e-6), event, neighboring_relation=ONE, attacks=QUICK),
    ]
    assert {(r.claimed, r.lower_bound, r.target_delta) for r in reports} == {
        (epsilon, reports[0].lower_bound, 1e-6)
    }
    assert all(r.neighboring_relation == "REPLACE_ONE" for r in reports)


def test_stock_accountants_account_for_the_composition():
    event = full_run(weight_decay=0.0)
    composed = dp_accounting.pld.PLDAccountant()
    composed.compose(event.as_composition(SPECIAL))
    for accountant in (RdpAccountant(), composed):
        report = hsa.audit(accountant, event, neighboring_relation=SPECIAL, attacks=QUICK)
        assert not report.violated
        assert 1 <= report.tightness < 1.2
    assert not hsa.audit(RdpAccountant(), event, attacks=QUICK).violated  # FULL: add or remove


@pytest.mark.parametrize(
    ("claim", "arguments", "error", "text"),
    [
        ("1.0", {}, TypeError, "a Guarantee or a pair"),
        ((1.0, 1e-5), {}, ValueError, "neighboring_relation"),
        ((-1.0, 1e-5), {"neighboring_relation": ONE}, ValueError, "epsilon of the claim >= 0"),
        ((1.0, 1e-5), {"neighboring_relation": "one"}, ValueError, "REPLACE_ONE"),
        (gaussian(1.0), {"neighboring_relation": ONE}, ValueError, "which the claim is for"),
        (
            hsa.LastIterateAccountant(),
            {"neighboring_relation": ONE},
            ValueError,
            "which the claim is for",
        ),
        (
            hsa.LastIterateAccountant().compose(cyclic_run(), 2),
            {},
            ValueError,
            "nothing else, got the ledger",
        ),
        (
            hsa.LastIterateAccountant().compose(full_run()),
            {},
            ValueError,
            "nothing else, got the ledger",
        ),
        (gaussian(1.0), {"target_delta": 2.0}, ValueError, "target_delta"),
        (gaussian(1.0), {"attacks": ()}, TypeError, "an attack is about"),
        (gaussian(1.0), {"event": "run"}, TypeError, "DpEvent"),
        (
            gaussian(1.0),
            {"event": dp_accounting.GaussianDpEvent(1.0)},
            TypeError,
            "an attack is about",
        ),
    ],
)
def test_what_is_refused(claim, arguments, error, text):
    arguments = {"event": cyclic_run()} | arguments
    with pytest.raises(error, match=text):
        hsa.audit(claim, **arguments)


# --- the report ---------------------------------------------------------------------------------


def test_the_report_says_what_happened():
    event = cyclic_run(batch_order="poisson", loss=LINEAR)
    report = hsa.audit((0.01, 1e-5), event, neighboring_relation=SPECIAL, attacks=QUICK)
    assert str(report).startswith("VIOLATED by linear_losses: epsilon is at least ")
    assert "claimed 0.01 by (0.01, 1e-05)" in str(report)
    assert "Witness (certified): linear losses, POISSON" in str(report)
    linear, quadratic = report.rows
    assert linear.applies
    assert linear.violation
    assert not quadratic.applies
    assert "FULL or CYCLIC" in quadratic.detail
    plain = report.to_dict()
    assert json.loads(json.dumps(plain)) == plain | {"rows": list(plain["rows"])}
    assert plain["violated"] is True
    assert plain["rows"][0]["attack"] == "linear_losses"


def test_no_attack_is_not_a_clean_bill():
    event = cyclic_run(batch_order="poisson", domain_diameter=1.0)
    report = hsa.audit((1.0, 1e-5), event, neighboring_relation=SPECIAL, attacks=QUICK)
    assert not report.violated
    assert report.violated_by is None
    assert report.tightness == math.inf
    assert "not tested: no attack applies" in str(report)


def test_progress_goes_to_the_caller():
    lines = []
    hsa.audit(gaussian(1.0), cyclic_run(), attacks=QUICK, progress=lines.append)
    assert any("quadratic_losses" in line for line in lines)
