"""What is drawn has the law that the bounds assume, is drawn once, and stays secret."""

import collections
import copy
import itertools
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_adapters.batch_plans import (
    BinsPlan,
    EqualPlan,
    RandomKeys,
    SampledPlan,
    Share,
    plan_of,
)
from hidden_state_adapters.binomial import Binomial

RECORDS = (7, 3, 11, 2, 5, 0)  # indices into a larger data set


def shuffled(seed=None, records=RECORDS, b=2):
    return EqualPlan(records, b, BatchOrder.SHUFFLED_ONCE, RandomKeys(seed))


def reshuffled(seed=None, records=RECORDS, b=2):
    return EqualPlan(records, b, BatchOrder.RESHUFFLED, RandomKeys(seed))


def subsets(seed=None, records=RECORDS, b=2):
    return SampledPlan(records, b, BatchOrder.WITHOUT_REPLACEMENT, RandomKeys(seed))


def poisson(seed=None, records=RECORDS, b=2, cap=None):
    return SampledPlan(records, b, BatchOrder.POISSON, RandomKeys(seed), cap)


def bins(seed=None, records=RECORDS, b=2, cap=None):
    return BinsPlan(records, b, BatchOrder.BALLS_IN_BINS, RandomKeys(seed), cap)


def redrawn(seed=None, records=RECORDS, b=2, cap=None):
    return BinsPlan(records, b, BatchOrder.BALLS_IN_BINS_REDRAWN, RandomKeys(seed), cap)


def poisson_batches(records, b, secret=None):
    return plan_of(BatchOrder.POISSON, records, b, RandomKeys(secret=secret), how="")


SECRET = [shuffled, reshuffled, subsets, poisson, bins, redrawn]


def p_value(drawn, weight=lambda found: 1.0):
    """Of counts, if what is found has chances in proportion to the weights."""
    weights = np.array([weight(found) for found in drawn])
    expected = weights / weights.sum() * drawn.total()
    return stats.chisquare(list(drawn.values()), expected).pvalue


def test_orders_are_uniform():
    # All 720 orders of six records, not only the places of one.
    keys = RandomKeys(1)
    orders = collections.Counter(tuple(keys.permutation(k, 6).tolist()) for k in range(14_400))
    assert len(orders) == 720
    assert p_value(orders) > 1e-4


def test_subsets_are_uniform_and_independent_from_step_to_step():
    plan = subsets(seed=3, records=range(4), b=2)
    drawn = collections.Counter()
    for step in range(0, 18_000, 2):
        plan.start_pass(step)
        drawn[tuple(plan.batch(step)), tuple(plan.batch(step + 1))] += 1
    assert len(drawn) == 36
    assert p_value(drawn) > 1e-4


@pytest.mark.parametrize(
    ("n", "b", "cap", "weight"),
    [
        (3, 1, None, lambda batch: 0.5 ** len(batch)),  # q = 1/3
        (4, 2, 2, lambda batch: 1 if len(batch) < 2 else 11 / 6),  # 11 of 16 have two or more
    ],
)
def test_poisson_batches_are_independent_coins(n, b, cap, weight):
    """Of those beyond a cap a uniform subset stays."""
    plan, drawn = poisson(4, range(n), b, cap), collections.Counter()
    for step in range(10_000):
        plan.start_pass(step)
        drawn[tuple(plan.batch(step))] += 1
    assert len(drawn) == (8 if cap is None else 11)
    assert p_value(drawn, weight) > 1e-4


@pytest.mark.parametrize("make", [bins, redrawn])
def test_balls_in_bins_are_independent_and_uniform(make):
    """All 27 ways of three balls; of draws of two epochs only those of one draw are the same."""
    drawn, same = collections.Counter(), 0
    plan = redrawn(seed=5, records=range(3), b=1)
    for number in range(5_400):
        if make is bins:
            plan = bins(seed=number, records=range(3), b=1)
        first = number * 6
        ways = [tuple(tuple(plan.batch(first + e + k)) for k in range(3)) for e in (0, 3)]
        plan.start_pass(first + 6)
        drawn[ways[0]] += 1
        same += ways[0] == ways[1]
    assert len(drawn) == 27
    assert p_value(drawn) > 1e-4
    expected = 5_400 if make is bins else 200
    assert abs(same - expected) < 80


@pytest.mark.parametrize(
    ("draw", "words", "expected"),
    [
        (lambda keys: keys.bins(0, 3, 3), [[2**64 - 1, 5, 2**64 - 1], [2**64 - 1, 7], [9]],
         [0, 2, 1]),
        # 2**64 - 6 is 0 modulo 10, and equal places count once.
        (lambda keys: keys.subset(0, 10, 4), [[5, 15, 2**64 - 1, 7], [7, 2**64 - 7], [2**64 - 6],
                                              [30]], [0, 5, 7, 9]),
    ],
)  # fmt: skip
def test_integers_that_would_be_likelier_are_drawn_again(draw, words, expected, monkeypatch):
    monkeypatch.setattr(
        "hidden_state_adapters.batch_plans.os.urandom",
        lambda count: np.array(words.pop(0), dtype=np.uint64).tobytes(),
    )
    assert draw(RandomKeys()).tolist() == expected
    assert not words


@pytest.mark.parametrize("make", [bins, redrawn])
def test_bins_beyond_the_cap_lose_a_uniform_subset(make):
    kept = collections.Counter()
    for seed in range(1_000):
        plan = make(seed=seed, records=range(4), b=4, cap=2)  # one bin
        kept[tuple(sorted(plan.batch(0)))] += 1
        assert plan.num_rows(0) == 2
    assert len(kept) == 6
    assert p_value(kept) > 1e-4


def weights_of(law):
    """What at() gives, and for which share of the uniform integers."""
    ends = [law._upto[0], *(b - a for a, b in itertools.pairwise(law._upto))]
    return {law._smallest + i: Fraction(end, law._upto[-1]) for i, end in enumerate(ends)}


@pytest.mark.parametrize("trials", [1, 2, 7, 200])
@pytest.mark.parametrize("share", [0, 1, 3, 2**64 // 3, 2**63, 2**64 - 1, 2**64])
def test_sizes_are_binomial(trials, share):
    found, q = weights_of(Binomial(trials, share)), Fraction(share, 2**64)
    law = [math.comb(trials, k) * q**k * (1 - q) ** (trials - k) for k in range(trials + 1)]
    assert sum(abs(found.get(k, 0) - p) for k, p in enumerate(law)) < Fraction(1, 2**200)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5])
def test_subsets_of_every_size_are_uniform(size):
    drawn = collections.Counter(
        tuple(RandomKeys(7).subset(number, 5, size).tolist()) for number in range(4000)
    )
    assert len(drawn) == math.comb(5, size)
    assert all(list(chosen) == sorted(set(chosen)) for chosen in drawn)
    assert size in (0, 5) or p_value(drawn) > 1e-4


@pytest.mark.parametrize("make", SECRET)
def test_seeds(make):
    batches = [[make(seed).batch(step) for step in range(9)] for seed in (1, 1, 2)]
    assert batches[0] == batches[1] != batches[2]
    plan = make(1)
    assert [plan.batch(step) for step in range(6, 9)] == batches[0][6:]  # resumed
    assert make(1).is_seeded
    assert not make().is_seeded
    assert set(itertools.chain.from_iterable(batches[0])) <= set(RECORDS)
    without = [[make(None, range(60), 10).batch(step) for step in range(6)] for _ in range(2)]
    assert without[0] != without[1]
    assert "seed" not in repr(RandomKeys(12345))


@pytest.mark.parametrize("make", SECRET)
def test_a_secret_order_is_neither_copied_nor_shown(make):
    plan = make()
    plan.batch(0)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(hsa.UnsupportedRunError, match="cannot be copied"):
            copying(plan)
    assert not any(character.isdigit() for character in repr(plan) + str(plan))
    assert plan.fingerprint() == ""


def test_a_public_order_may_be_copied():
    plan = EqualPlan(RECORDS, 2, BatchOrder.CYCLIC)
    assert copy.deepcopy(plan).batch(1) == pickle.loads(pickle.dumps(plan)).batch(1) == [11, 2]
    other = EqualPlan(tuple(reversed(RECORDS)), 2, BatchOrder.CYCLIC)
    assert plan.fingerprint() != other.fingerprint()
    ranged, listed = (EqualPlan(of, 2, BatchOrder.CYCLIC) for of in (range(4), [0, 1, 2, 3]))
    assert ranged.fingerprint() == listed.fingerprint()


@pytest.mark.parametrize("make", SECRET)
@pytest.mark.parametrize("step", [0, 3, 4])
def test_private_state_goes_on_with_the_same_batches(make, step):
    plan = make()
    for k in range(step + 1):
        plan.batch(k)
    other = make()
    other.load_private_state(plan.private_state(step))
    per_epoch = {subsets: 1, poisson: 1, shuffled: 6, bins: 6}
    drawn = per_epoch.get(make, 3 - step % 3)
    steps = range(step, step + drawn)
    assert [other.batch(k) for k in steps] == [plan.batch(k) for k in steps]
    damaged = plan.private_state(step)
    for own in damaged["draws"].values():
        own[0] = [*own[0][1:], 99]
    with pytest.raises(ValueError, match="private state"):
        make().load_private_state(damaged)


@pytest.mark.parametrize("secret", [None, b"32 bytes that nobody ever knows."])
def test_poisson_batches_of_every_source(secret):
    """Each record joins with its probability, by itself, and every process finds the same ones."""
    plan = poisson_batches(range(5, 205, 2), 25, secret)
    batches = [plan.batch(step) for step in range(400)]
    assert all(batch == sorted(set(batch)) for batch in batches)
    counts = np.bincount(np.concatenate(batches), minlength=205)
    assert not counts[::2].any()
    assert not counts[:5].any()
    assert abs(counts[5::2].mean() - 100) < 6 * np.sqrt(75 / 100)
    assert counts[5::2].std() == pytest.approx(np.sqrt(75), rel=0.45)
    neighbours = np.corrcoef(np.array([[r in batch for r in (5, 7, 19)] for batch in batches]).T)
    assert np.abs(neighbours[np.triu_indices(3, 1)]).max() < 0.3  # 0.05 by chance
    again = poisson_batches(range(5, 205, 2), 25, secret)
    assert ([again.batch(step) for step in range(400)] == batches) == (secret is not None)


@pytest.mark.parametrize("size", [0, 1, 7, 10])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_disjoint_and_together_the_batch(size, count):
    batch = list(range(size))
    shares = [Share(rank, count) for rank in range(count)]
    assert sorted(i for share in shares for i in share.of(batch)) == batch
    for share in shares:
        assert share.rows(size) == len(share.of(batch))
        assert share.rows(size) - size // count in (0, 1)
