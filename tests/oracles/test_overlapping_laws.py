"""Theorem D against exact laws: of random kernels on a few states, and of runs on an interval."""

import itertools
import math

import attrs
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from grid_oracle import GridOracle

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import OverlappingLaws, ShiftedInterpolation
from hidden_state_accountants.bounds.overlapping_laws import StateProfile
from hidden_state_accountants.curves.profiles import polygon

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
EPSILONS = np.concatenate([[0.0, 0.05, 0.2], np.arange(0.5, 8.5)])


def divergence(p, q, epsilon):
    """sup_S p(S) - e^epsilon q(S), for laws on few outcomes; epsilon may be an array."""
    gaps = p - np.exp(np.asarray(epsilon, dtype=float))[..., None] * q
    return np.maximum(gaps, 0).sum(axis=-1)


def largest_of(pairs):
    """The profile that bounds all pairs in both directions, at any real epsilon."""
    pairs = [order for pair in pairs for order in (pair, pair[::-1])]
    return lambda epsilon: np.max([divergence(p, q, epsilon) for p, q in pairs], axis=0)


def random_windows(seed):
    """Laws before a window, and its kernels, on three states and three outcomes."""
    random = np.random.default_rng(seed)
    spread = random.choice([0.2, 1.0, 5.0])
    p, q = random.dirichlet([spread] * 3, size=2)
    first = random.dirichlet([random.choice([0.2, 1.0])] * 3, size=3)
    near = random.dirichlet([1.0] * 3, size=3)
    share = random.choice([0.02, 0.2, 0.5])
    return p, q, first, (1 - share) * first + share * near


def after_the_window(p, q, kernel, other):
    """What the Lemma says of the two laws after the window, as a function."""
    before = StateProfile.of(largest_of([(p, q)]), 12.0)
    after = before.after(
        largest_of(zip(kernel, other, strict=True)),
        largest_of(itertools.product(kernel, other)),
    )
    return polygon(after.epsilons, after.deltas)


def test_no_window_of_random_kernels_leaves_more():
    closest = 0.0
    for seed in range(50):
        p, q, kernel, other = random_windows(seed)
        claim = after_the_window(p, q, kernel, other)(EPSILONS)
        exact = largest_of([(p @ kernel, q @ other)])(EPSILONS)
        assert (exact <= claim + 1e-15).all(), seed
        closest = max(closest, float(np.max(exact[claim > 1e-6] / claim[claim > 1e-6])))
    assert closest > 0.98  # a search that comes close


def test_kernels_that_attain_the_lemma():
    """What is matched and what is not end in different outcomes, and the bound is met."""
    kernel = np.array([[0.7, 0.3, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    other = np.array([[0.3, 0.7, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    p, q = np.array([0.9, 0.1, 0.0]), np.array([0.9, 0.0, 0.1])
    claim = after_the_window(p, q, kernel, other)
    for epsilon in (0.0, 0.3):
        exact = divergence(p @ kernel, q @ other, epsilon)
        assert claim(np.array([epsilon]))[0] == pytest.approx(exact, rel=2e-3)


def run(**changes):
    """Full batches on an interval, twice as long as the noise."""
    arguments = {
        "noise_multiplier": 3.0,
        "learning_rate": 0.6,
        "clip_norm": 1.0,
        "batch_size": 4,
        "dataset_size": 4,
        "num_steps": 24,
        "batch_order": "full",
        "loss": hsa.LossGeometry.generalized_linear(1.0),
        "domain_diameter": 1.0,
    }
    return hsa.LastIterateDpEvent(**(arguments | changes))


def epsilon_of(event, bound=None):
    return (bound or OverlappingLaws()).guarantee(event, REPLACE_ONE).epsilon(1e-5)


CYCLIC = {"batch_order": "cyclic", "batch_size": 2, "dataset_size": 6, "num_steps": 12}
RUNS = {
    "wide noise": run(),
    "narrow noise": run(noise_multiplier=1.2, num_steps=12),
    "small steps": run(learning_rate=0.1, noise_multiplier=6.0, num_steps=60),
    "decay": run(weight_decay=0.2),
    "cyclic": run(**CYCLIC),
    "schedules": run(
        noise_multiplier=np.resize([3.0, 4.5, 3.0], 24), learning_rate=np.linspace(0.6, 0.5, 24)
    ),
    "cyclic, small steps": run(
        **CYCLIC | {"num_steps": 30}, learning_rate=0.2, noise_multiplier=2.0
    ),
}


def constant(value):
    return lambda x: np.full_like(x, value)


def centred(x):
    return np.clip(x, -1, 1)


@pytest.mark.parametrize("name", RUNS)
def test_no_run_on_an_interval_has_more(name):
    event = RUNS[name]
    guarantee = OverlappingLaws().guarantee(event, REPLACE_ONE)
    claims = np.array([guarantee.delta(e) for e in EPSILONS])
    largest = np.zeros(len(EPSILONS))
    record = event.dataset_size - 1  # in the batch that is processed last
    for other, start in itertools.product(
        (constant(1.0), constant(0.3), constant(0.0), centred), (-0.5, 0.0, 0.5)
    ):
        gradients = [other] * event.dataset_size
        gradients[record] = constant(1.0)
        oracle = GridOracle(
            event, gradients, constant(-1.0), record=record, start=start,
            domain=(-0.5, 0.5), cells_per_std=10, reach=8.0,
        )  # fmt: skip
        found = [max(e.lower_bound for e in oracle.delta(epsilon)) for epsilon in EPSILONS]
        largest = np.maximum(largest, found)
    assert (largest <= claims).all()
    assert largest[0] > 0.3 * claims[0]  # a search that comes close


PAUSES = {"learning_rate": np.where(np.arange(3000) % 5 < 2, 0.0, 0.6)}
WARM_UP = {"learning_rate": np.where(np.abs(np.arange(3000) - 1500) < 1499, 0.6, 0.0)}


@pytest.mark.parametrize("decay", [0.02, 0.2, 0.9])
@pytest.mark.parametrize(
    "changes",
    [{}, CYCLIC, PAUSES, CYCLIC | WARM_UP],
    ids=["full", "cyclic", "full with pauses", "cyclic with a warm-up"],
)
def test_a_domain_that_does_nothing_hides_nothing(changes, decay):
    """Two runs with the same noise stay close, but what is left of their laws does not.

    Linear losses with decay: the laws are Gaussian, and Theorem A without the domain is exact.
    """
    event = run(
        **changes | {"num_steps": 3000}, weight_decay=decay, loss=hsa.LossGeometry.linear(1.0)
    )
    exact = hsa.LastIterateAccountant(REPLACE_ONE).compose(
        attrs.evolve(event, domain_diameter=math.inf)
    )
    for diameter in (30.0, 44.0):  # up to 98 standard deviations of the noise
        guarantee = OverlappingLaws().guarantee(
            attrs.evolve(event, domain_diameter=diameter), REPLACE_ONE
        )
        for delta in (1e-2, 1e-5):
            assert math.inf > guarantee.epsilon(delta) >= exact.get_epsilon(delta) * (1 - 1e-6)


def test_figures_of_the_page():
    """docs/theory/bounded_domains.md: R, s and sigma of full batches with c = 1."""
    for sigma, published in ((0.2, 0.98), (0.1, 4.60)):
        event = run(
            noise_multiplier=sigma / 0.005,
            learning_rate=0.5,
            loss=hsa.LossGeometry.generalized_linear(2.0),
            batch_size=100,
            dataset_size=100,
            num_steps=10**6,
        )
        assert epsilon_of(event) == pytest.approx(published, rel=0.01)
        assert epsilon_of(event) < 0.9 * epsilon_of(event, ShiftedInterpolation())
        accountant = hsa.LastIterateAccountant(REPLACE_ONE).compose(event)
        assert accountant.get_epsilon(1e-5) <= epsilon_of(event)


def test_a_run_costs_what_its_worst_step_does():
    assert epsilon_of(run(num_steps=2)) == epsilon_of(run(num_steps=10**7))
    worst = epsilon_of(run(noise_multiplier=2.0))
    assert epsilon_of(run(noise_multiplier=np.linspace(2, 4, 24))) == pytest.approx(worst)
    # Twice the rate is twice the noise, too: in its units the domain is half as wide.
    faster = epsilon_of(run(learning_rate=np.linspace(0.6, 1.2, 24)))
    assert faster > epsilon_of(run(learning_rate=1.2))


def test_what_it_is_not_about():
    refused = [
        ("domain_diameter", run(domain_diameter=math.inf)),
        ("domain_diameter", run(domain_diameter=46.0)),  # 102 standard deviations of the noise
        ("releases", run(release_steps=(5,))),
        ("batch order", run(batch_order="poisson", batch_size=2)),
        ("domain_diameter", run(noise_multiplier=0.0)),
        ("domain_diameter", run(num_steps=3, noise_multiplier=[3.0, 0.0, 3.0])),
    ]
    for condition, event in refused:
        unmet = OverlappingLaws().check(event, REPLACE_ONE)
        assert condition in {u.condition for u in unmet}


def test_where_nothing_is_hidden():
    """Updates that expand: 2.1 to the power of 800 is 1e257. And 1 but for rounding."""
    expanding = run(
        **CYCLIC | {"batch_size": 1, "dataset_size": 800, "num_steps": 1600},
        learning_rate=1.0,
        loss=hsa.LossGeometry.smooth(1.1),
    )
    assert epsilon_of(expanding) == math.inf
    far = run(
        **CYCLIC | {"batch_size": 4, "dataset_size": 12, "num_steps": 2}, noise_multiplier=4.77,
        learning_rate=2.02, clip_norm=0.0143, domain_diameter=2.4,
    )  # fmt: skip
    expanded, nearly_one = (OverlappingLaws().guarantee(e, REPLACE_ONE) for e in (expanding, far))
    assert expanded.delta(0.0) == nearly_one.delta(0.0) == 1
    assert nearly_one.epsilon(1.0) == 0


def paused(*pauses, period=1, rate=0.6):
    """12 steps and pauses before the given ones of them."""
    rates = [rate] * 12
    for place in sorted(pauses, reverse=True):
        rates.insert(place, 0.0)
    cyclic = CYCLIC if period > 1 else {}
    return run(**cyclic | {"num_steps": len(rates), "learning_rate": rates})


def test_pauses_are_passed_over():
    steady = epsilon_of(paused(12))
    for pauses in ((0,), (0, 0, 12), (5,), (0, 3, 7, 12)):
        assert epsilon_of(paused(*pauses)) == steady < 20
    for pauses in ((0,), (12,), (0, 0, 12)):
        assert epsilon_of(paused(*pauses, period=3)) == epsilon_of(run(**CYCLIC))
    assert OverlappingLaws().check(paused(5, period=3), REPLACE_ONE)  # epochs of other lengths
    assert epsilon_of(run(num_steps=2, learning_rate=[0.0, 0.0])) == 0
