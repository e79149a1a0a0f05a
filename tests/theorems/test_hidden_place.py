"""Theorem F: against its formula on a dense grid, a general solver, and wrong variants.

Exact laws of attacks are in test_attacks.py beside this file.
"""

import math

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from mixtures_of_gaussians import divergence
from runs import cyclic_run, probe_run
from scipy import special
from shift_programs import least_squares_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import ShuffledOnce
from hidden_state_accountants.bounds.data_order import _hidden_in_the_last_epochs
from hidden_state_accountants.bounds.solvers import two_places
from hidden_state_accountants.bounds.solvers.two_places import EpochSums, hidden_places
from hidden_state_accountants.curves.hidden_place import Places
from hidden_state_accountants.process.noisy_process import noisy_process

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
RELATIONS = (SPECIAL, ONE)


def brute_force(places, epsilon):
    """The maximum over rho on a dense grid, by the constraints of the theorem."""
    rho = np.linspace(-25, 25, 20_001)[:, None]
    best = -epsilon / places.between - places.between / 2
    y = np.clip(best, rho - places.to_other, rho + places.to_record - places.between)
    values = special.ndtr(y + places.between) - math.exp(epsilon) * special.ndtr(y)
    return float((values @ places.weights).max())


@pytest.mark.parametrize("seed", seeds(30))
def test_the_maximum_over_rho(seed):
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 12))
    between = rng.gamma(1, 0.7, number) * (rng.random(number) > 0.2)
    others = rng.gamma(1, 0.7, (2, number)) * (rng.random((2, number)) > 0.2)
    places = Places.of(np.full(number, 1 / number), others[0], between, others[1])
    epsilons = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])
    for ordered in (places, places.exchanged):
        for epsilon, found in zip(epsilons, ordered.deltas(epsilons), strict=True):
            expected = brute_force(ordered, epsilon)
            assert expected * (1 - 1e-9) - 1e-9 <= found <= expected * 1.002 + 1e-8
        assert ordered.deltas(epsilons[2:3])[0] == pytest.approx(
            ordered.deltas(epsilons)[2], rel=2e-3, abs=1e-12
        )


@pytest.mark.parametrize("seed", seeds(40))
def test_distances_of_two_places_are_those_of_a_general_solver(seed):
    rng = np.random.default_rng(seed)
    period, steps = int(rng.integers(1, 9)), int(rng.integers(1, 40))
    rates = 0.5 * np.exp(0.7 * rng.normal(size=steps))
    run = cyclic_run(
        batch_order="shuffled_once", dataset_size=5 * period, num_steps=steps,
        learning_rate=rates, weight_decay=float(rng.choice([0.0, 0.9 / rates.max()])),
    )  # fmt: skip
    process = noisy_process(run, SPECIAL)
    start, stop = sorted(rng.choice(steps + 1, 2, replace=False))
    sums = EpochSums.of(process, int(start), int(stop))
    place, home = (int(value) for value in rng.integers(0, period, 2))
    step = np.arange(steps)
    shifts = process.sensitivity * ((step % period == place) * 2.0)
    shifts[step % period == home] = process.sensitivity[step % period == home]
    inside = slice(start, stop)
    expected = least_squares_mu_squared(
        process.contraction[inside], shifts[inside], process.noise_std[inside]
    )
    found = sums.mu_squared({place: 2.0, home: 1.0})
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_groups_of_epochs_round_up_by_little():
    run = cyclic_run(batch_order="shuffled_once", num_steps=4 * 400, weight_decay=0.0)
    process = noisy_process(run, SPECIAL)
    grouped = EpochSums.of(process, 0, run.num_steps)
    single = EpochSums.of(process, 0, run.num_steps, growth=0.0)
    assert len(grouped.exponents) < 300 < len(single.exponents) == 400
    for place in range(4):
        exact = single.mu_squared({place: 2.0, 0: 1.0})
        assert exact * (1 - 1e-12) <= grouped.mu_squared({place: 2.0, 0: 1.0}) <= 1.01 * exact


@pytest.mark.parametrize(
    ("order", "batches", "steps", "name"),
    [("shuffled_once", 400, 900, "_GROWTH"), ("reshuffled", 30, 70, "_FEW_PLACES")],
)
def test_few_of_many_places_round_up_by_little(order, batches, steps, name, monkeypatch):
    run = cyclic_run(
        batch_order=order, dataset_size=5 * batches, num_steps=steps, weight_decay=0.02
    )
    process = noisy_process(run, SPECIAL)
    places = two_places._representatives(process, 0)
    assert (places >= np.arange(batches)).all()

    def curve():
        if order == "shuffled_once":
            return ShuffledOnce().guarantee(run, SPECIAL).curve
        return _hidden_in_the_last_epochs(run, SPECIAL, process)

    few = curve()
    monkeypatch.setattr(two_places, name, 0.0)
    every = curve()
    assert len(few.places[-1].weights) < 0.9 * len(every.places[-1].weights)
    epsilons = np.array([0.0, 0.1, 0.5])
    for one, two in zip(few.places, every.places, strict=True):
        assert (one.deltas(epsilons) >= two.deltas(epsilons) * 0.998).all()
        assert (one.deltas(epsilons) <= two.deltas(epsilons) * 1.1).all()


STEPS = NUMBER = 4
ONES, FALLING = np.ones(STEPS), np.array([1.0, 0.05, 0.0025, 0.000125])


@pytest.mark.parametrize(
    ("c", "shifts", "sigma", "g", "other", "relation", "epsilon", "order", "change", "expected"),
    [
        (0.3, ONES, 2.0, -1.0, 0.0, SPECIAL, 1.5, "PQ", "A", 5.981335e-06),
        (1.0, FALLING, 1.0, -1.0, 0.0, SPECIAL, 2.0, "PQ", "home", 4.417001e-07),
        (0.3, ONES, 0.5, 1.0, 0.0, SPECIAL, 2.0, "QP", "C", 3.524436e-02),
        (0.3, ONES, 2.0, 1.0, -1.0, ONE, 3.0, "QP", "C half", 1.254847e-06),
    ],
)
def test_wrong_variants_are_refuted(
    c, shifts, sigma, g, other, relation, epsilon, order, change, expected
):
    """Runs of linear losses whose truth is above what a wrong distance gives."""
    kept = c ** np.arange(STEPS - 1, -1, -1.0)
    moves = kept * shifts / math.sqrt(((kept * sigma) ** 2).sum())
    means = ((1 - g) * moves, (other - g) * moves)[:: 1 if order == "PQ" else -1]
    truth = divergence(*means, epsilon, np.full(NUMBER, 1 / NUMBER))

    def mu(*terms):
        total = np.zeros(STEPS)
        for place, factor in terms:
            total[place] = factor * shifts[place]
        return hsa.shifted_gdp_mu(c, total, sigma)

    def delta(change):
        f = 2 if relation is ONE else 1
        a, b, cs = (np.zeros(NUMBER) for _ in range(3))
        for k in range(NUMBER):
            home = (0, 0.0 if change == "home" else 1.0)
            b[k] = mu((k, f))
            a[k] = mu((k, 1.0 if change == "A" else 2.0), home) if k else mu((0, 1.0))
            at_place = 0.0 if change == "C" else 1.0 if change == "C half" else float(f)
            own = (0, 0.0 if change in ("C", "home") else 1.0)
            cs[k] = mu((k, at_place), own) if k else (mu((0, 1.0)) if f == 2 else 0.0)
        # Not `Places.of`, whose triangle inequalities would repair some of the mistakes.
        places = Places(np.full(NUMBER, 1 / NUMBER), a, np.maximum(b, 1e-9), cs)
        places = places if order == "PQ" else places.exchanged
        return float(places.deltas(np.array([epsilon]))[0])

    assert truth == pytest.approx(expected, rel=1e-3)
    assert truth <= delta("") * (1 + 1e-9)
    assert delta(change) < 0.5 * truth


# --- what follows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.name)
def test_reference_values(relation):
    """The probe without a clip that acts; the average over revealed places is 1.353 and 3.139."""
    for order, expected in (("shuffled_once", (0.3712, 0.6099)), ("reshuffled", (0.3726, 0.6150))):
        run = probe_run(batch_order=order, clip_norm=1.4143)
        epsilon = hsa.LastIterateAccountant(relation).compose(run).get_epsilon(1e-5)
        assert epsilon == pytest.approx(expected[relation is ONE], abs=2e-4)


def test_two_epochs_hide_more_than_one():
    """With the last one alone: 3.109, 7.323 for 9 steps, and 1.115, 2.483 for 1,000."""

    def epsilon(relation, steps, batches, noise, decay):
        run = cyclic_run(
            batch_order="reshuffled", dataset_size=5 * batches, num_steps=steps,
            noise_multiplier=noise, weight_decay=decay,
            loss=hsa.LossGeometry.generalized_linear(0.5),
        )  # fmt: skip
        return hsa.LastIterateAccountant(relation).compose(run).get_epsilon(1e-5)

    for relation, few, many in ((SPECIAL, 2.8776, 0.9461), (ONE, 6.3265, 2.0672)):
        assert epsilon(relation, 9, 8, 1.5, 0.0) == pytest.approx(few, rel=1e-3)
        assert epsilon(relation, 1000, 100, 2.0, 0.004) == pytest.approx(many, rel=1e-3)


def test_a_run_composes():
    run = cyclic_run(batch_order="shuffled_once", num_steps=40)
    once = hsa.LastIterateAccountant().compose(run).get_epsilon(1e-5)
    four = hsa.LastIterateAccountant().compose(run, 4).get_epsilon(1e-5)
    assert once < four < 4 * once
    nothing = cyclic_run(noise_multiplier=1e6, num_steps=4)
    beside = hsa.LastIterateAccountant().compose(run).compose(nothing).get_epsilon(1e-5)
    assert once <= beside <= 1.02 * once


def test_microbatches_are_not_asked():
    run = cyclic_run(batch_order="shuffled_once", is_microbatched=True)
    assert not hasattr(ShuffledOnce().guarantee(run, ONE).curve, "places")


def test_sums_that_are_too_long_reveal_the_place(monkeypatch):
    run = cyclic_run(batch_order="shuffled_once")
    process = noisy_process(run, SPECIAL)
    between = np.ones(4)
    assert hidden_places(process, between, is_replaced=False)
    monkeypatch.setattr(two_places, "_MOST_TERMS", 3)
    assert hidden_places(process, between, is_replaced=False) == ()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_recent_epochs_of_equal_steps_start_from_what_was_before(monkeypatch, is_replaced):
    run = cyclic_run(batch_order="shuffled_once", weight_decay=0.3, num_steps=41)
    process = noisy_process(run, SPECIAL)
    whole = hidden_places(process, np.ones(4), is_replaced=is_replaced)
    monkeypatch.setattr(two_places, "_NEGLIGIBLE", 0.5)
    for every, recent in zip(
        whole, hidden_places(process, np.ones(4), is_replaced=is_replaced), strict=True
    ):
        assert (recent.to_record >= every.to_record * (1 - 1e-12)).all()
        assert (recent.to_record <= 1.5 * every.to_record).all()
        assert not np.array_equal(recent.to_record, every.to_record)
