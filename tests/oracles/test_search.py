"""Adversarial search: no run that hypothesis can find refutes a sound bound.

The losses of every run belong to the class that its event declares, so that a claim which fails
here is wrong, whatever its proof. `make test-deep` searches for about an hour.
"""

import math
import time

import attrs
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from gaussian_runs import gaussian_runs
from grid_runs import GridRun, grid_runs
from hypothesis import HealthCheck, given, seed, settings, target
from hypothesis import strategies as st
from secret_order_runs import secret_order_runs
from strategies import (
    CYCLIC,
    EPOCHS,
    FULL,
    REPLACE_ONE,
    SAMPLED,
    quick_search,
    sound_guarantees,
)  # fmt: skip

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.shifted_interpolation import position_mus, worst_mu_squared
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.process.noisy_process import noisy_process, update_lipschitz

RENYI_ORDERS = (1.5, 2.0, 3.0, 8.0, 32.0)
ROUND = 500  # examples between two reports of a deep search; each round climbs from a fresh start


class Violation(AssertionError):
    """A claim below a lower bound."""


@attrs.define
class Tally:
    """What was searched, and how close a run came to each claim (1 is a tight bound)."""

    runs: int = 0
    comparisons: int = 0
    closest: dict[str, float] = attrs.field(factory=dict)
    visited: set[str] = attrs.field(factory=set)

    def record(self, name, share):
        self.closest[name] = max(self.closest.get(name, 0.0), share)

    def __str__(self):
        closest = ", ".join(f"{name} {share:.4f}" for name, share in sorted(self.closest.items()))
        return f"{self.runs} runs, {self.comparisons} comparisons; closest: {closest}"


def judge(run, guarantees, tally, epsilons=None):
    """Holds every claim against the oracle of the run.

    Returns:
        How close the run came to a claim, and how close to one well below composition.
    """
    closest = {"any": 0.0, "amplified": 0.0}
    if not guarantees:
        return closest
    tally.runs += 1
    tally.visited |= features(run)
    renyi = {order: lower_bound(run, "renyi", order) for order in RENYI_ORDERS}
    for name, guarantee in guarantees.items():
        shares = [0.0]
        tried = epsilons
        if tried is None:
            tried = {0.0, *(e for d in (1e-2, 1e-6) if (e := guarantee.epsilon(d)) < 30)}
        for epsilon in sorted(tried):
            lower = lower_bound(run, "delta", epsilon)
            compare(run, name, "delta", epsilon, guarantee.delta(epsilon), lower, tally)
        for order, claim in zip(RENYI_ORDERS, guarantee.rdp(RENYI_ORDERS).tolist(), strict=True):
            compare(run, name, "renyi", order, claim, renyi[order], tally)
            shares.append(renyi[order] / claim if 1e-9 < claim < math.inf else 0.0)
        composition = guarantees.get("composition", guarantee)
        closest["any"] = max(closest["any"], *shares)
        tally.record(name, max(shares))
        if guarantee.rdp([2.0])[0] < 0.7 * composition.rdp([2.0])[0]:
            closest["amplified"] = max(closest["amplified"], *shares)
            tally.record(f"{name} (amplified)", max(shares))
    return closest


def features(run):
    """What is special about a run."""
    event, loss = run.event, run.event.loss
    eta = event.per_step("learning_rate")
    found = {
        "one record per batch": event.batch_size == 1,
        "one epoch": event.num_steps <= event.batches_per_epoch,
        "a partial epoch": event.num_steps % event.batches_per_epoch > 0,
        "a domain": event.domain_diameter < math.inf,
        "releases": bool(event.release_steps),
        "a schedule": event.has_schedules,
        "steps without learning rate": bool((eta == 0).any()),
        "a large learning rate": loss is not None and bool((eta * loss.smoothness > 2).any()),
        "decay near its limit": bool((eta * event.per_step("weight_decay") > 0.95).any()),
        "no clipping": event.clip_norm is None,
    }
    always = {event.batch_order.name, run.relation.name, loss.kind.name if loss else "no loss"}
    return always | {name for name, is_there in found.items() if is_there}


ANYWHERE = {
    *("FULL", "CYCLIC"),
    *(relation.name for relation in NeighboringRelation),
    *(kind.name for kind in hsa.LossKind),
    *("one record per batch", "one epoch", "a partial epoch", "a domain", "a schedule"),
    *("steps without learning rate", "a large learning rate", "decay near its limit"),
    *"no clipping",
}
VISITED = {"quadratic": {*ANYWHERE, "releases"}, "one dimension": ANYWHERE}


def lower_bound(run, divergence, argument):
    """The larger of the two directions, 0 if the oracle has no answer."""
    return max(getattr(run, divergence)(argument), default=0.0)


def compare(run, name, divergence, argument, claim, lower, tally):
    """Raises if a divergence certainly is above the claim."""
    if claim == math.inf:
        return
    tally.comparisons += 1
    if lower > claim * (1 + 1e-6) + 1e-12 or is_refuted(run, divergence, argument, claim):
        raise Violation(
            f"{name} claims {divergence}({argument:g}) = {claim:.9g}, but it is at least "
            f"{lower:.9g}.\n{run.relation}\n{run!r}"
        )


def is_refuted(run, divergence, argument, claim):
    """Whether a grid's uncertified value, which is sharper, stays above the claim if refined."""
    if not isinstance(run, GridRun):
        return False

    def likely(refine):
        estimates = run.estimates(divergence, argument, refine)
        return max((e.value - 3 * e.error for e in estimates), default=0.0)

    limit = claim * (1 + 1e-3) + 1e-9
    return likely(1) > limit and likely(4) > limit


# name: (runs, examples per 100 of the profile)
SEARCHES = {
    "quadratic": (gaussian_runs(), 800),
    "long quadratic": (gaussian_runs(most_steps=100), 200),
    "linear, secret orders": (secret_order_runs(EPOCHS), 400),
    "linear, sampled": (secret_order_runs(SAMPLED), 60),
    "one dimension": (grid_runs((FULL, CYCLIC)), 350),
    "one dimension, longer": (grid_runs((FULL, CYCLIC), most_steps=25), 120),
    "one dimension, secret orders": (grid_runs(EPOCHS, most_steps=6), 150),
    "one dimension, sampled": (grid_runs(SAMPLED, most_steps=5), 60),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_no_run_refutes_a_sound_bound(name, record_property, usual):
    runs, weight = SEARCHES[name]
    is_deep = settings.get_current_profile_name() == "deep"
    half = 1 if is_deep else usual(2, 1)  # in "make test"
    left = max(1, settings().max_examples * weight // 100 // half)
    tally, start = Tally(), time.monotonic()
    while left > 0:
        examples = min(left, ROUND) if is_deep else left
        left -= examples

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)
        @given(runs, st.integers(0, 9))
        def search(run, luck):
            is_public = run.event.batch_order in (FULL, CYCLIC)
            ask_all = is_public or luck == 9  # delta under a secret order may take a PLD: seconds
            guarantees = sound_guarantees(run.event, run.relation, ask_all)
            if is_public and guarantees:
                mu = position_mus(run.event, run.relation)[run.position]
                guarantees["its position"] = Guarantee(GaussianCurve(mu), run.relation, "")
            epsilons = None if is_public else [0.5] if ask_all else []
            closest = judge(run, guarantees, tally, epsilons)
            for label, share in closest.items():
                target(share, label=label)

        try:
            search()
        finally:
            text = f"{name}: {tally} ({time.monotonic() - start:.0f} s)"
            record_property("search", text)
        if is_deep:
            print(f"\n{text}; {left} to go", flush=True)
    assert tally.runs > 0
    if settings().max_examples >= 100:
        assert VISITED.get(name, set()) <= tally.visited


# --- the search can fail --------------------------------------------------------------------------


def theorem_a(run, **changes):
    """Theorem A with parts of its process changed."""
    process = noisy_process(run.event, run.relation)
    return worst_mu_squared(attrs.evolve(process, **{n: f(process) for n, f in changes.items()}))


def only_the_last_epoch(process):
    """The process of the last epoch: what is left of the shift at its start is forgotten."""
    last = slice(-process.period, None)
    arrays = ("contraction", "sensitivity", "noise_std", "drift_contraction", "drift")
    return attrs.evolve(
        process,
        **{name: getattr(process, name)[last] for name in arrays},
        positions=range(min(process.period, process.num_steps)),
        release_steps=(),
    )


def unclipped(run):
    loss, event = run.event.loss, run.event
    never = np.zeros(event.num_steps, dtype=bool)
    return update_lipschitz(
        loss, event.per_step("learning_rate"), event.per_step("weight_decay"), never
    )


FIXED = (gaussian_runs(), grid_runs((FULL, CYCLIC)))

# name: (runs in which it fails, mu squared)
MISTAKES = {
    "three percent too small": (FIXED[0], lambda run: 0.97**2 * theorem_a(run)),
    "forgets the shift after every epoch": (
        FIXED[0],
        lambda run: worst_mu_squared(only_the_last_epoch(noisy_process(run.event, run.relation))),
    ),
    "takes the last position despite schedules": (
        FIXED[0],
        lambda run: theorem_a(
            run,
            positions=lambda p: (
                ((p.num_steps - 1) % p.period,) if len(p.positions) > 1 else p.positions
            ),
        ),
    ),
    "no map ever expands": (
        FIXED[0],
        lambda run: theorem_a(run, contraction=lambda p: np.minimum(p.contraction, 1)),
    ),
    "the map always contracts": (
        FIXED[0],
        lambda run: theorem_a(run, contraction=lambda p: 0.9 * p.contraction),
    ),
    "weight decay counts twice": (
        FIXED[0],
        lambda run: theorem_a(run, contraction=lambda p: p.contraction * p.drift_contraction),
    ),
    "nothing but the end is released": (
        FIXED[0],
        lambda run: theorem_a(run, release_steps=lambda p: ()),
    ),
    "one sensitivity for all relations": (
        FIXED[0],
        lambda run: theorem_a(
            run,
            sensitivity=lambda p: p.sensitivity / (2 if run.relation is REPLACE_ONE else 1),
        ),
    ),
    "a bounded domain forgets all but the last step": (
        FIXED[1],
        lambda run: theorem_a(
            run, domain_diameter=lambda p: 1e-6 if p.domain_diameter < math.inf else math.inf
        ),
    ),
    "strong convexity contracts inside an active clip": (
        FIXED[1],
        lambda run: theorem_a(run, contraction=lambda p: unclipped(run)),
    ),
}


def find(runs, claim, examples):
    """Searches with one claim from several seeds, without shrinking what it finds."""

    @quick_search(examples)
    @given(runs)
    def search(run):
        guarantee = claim(run)
        if guarantee is not None:
            closest = judge(run, {"mistake": guarantee}, Tally())
            target(closest["any"])

    for number in range(5):
        seed(number)(search)()


@pytest.mark.exhaustive  # a test of the test
@pytest.mark.parametrize("name", MISTAKES)
def test_the_search_finds_a_mistake(name):
    runs, mu_squared = MISTAKES[name]
    theorem_a_bound = hsa.bounds.ShiftedInterpolation()

    def claim(run):
        if theorem_a_bound.check(run.event, run.relation):
            return None
        mistaken = mu_squared(run)
        if mistaken >= theorem_a(run):
            return None  # a search that looks elsewhere finds the mistake with fewer runs
        curve = GaussianCurve(math.sqrt(mistaken))
        return Guarantee(curve=curve, neighboring_relation=run.relation, theorem=name)

    with pytest.raises(Violation, match="mistake claims"):
        find(runs, claim, examples=1000)


@attrs.frozen
class RenyiOnly:
    """Another curve's Renyi divergences: dp-accounting's PLD takes seconds."""

    curve: object
    mu: None = None

    def epsilon(self, delta):
        return math.inf

    def delta(self, epsilon):
        return math.inf

    def rdp(self, orders):
        return self.curve.rdp(orders)


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", EPOCHS)
def test_the_search_finds_that_a_shuffled_order_is_not_poisson_sampling(order):
    composition = hsa.bounds.Composition()

    def claim(run):
        sampled = attrs.evolve(run.event, batch_order=hsa.BatchOrder.POISSON)
        if composition.check(sampled, run.relation):
            return None
        guarantee = composition.guarantee(sampled, run.relation)
        return attrs.evolve(guarantee, curve=RenyiOnly(guarantee.curve))

    with pytest.raises(Violation, match="mistake claims"):
        find(secret_order_runs((order,)), claim, examples=500)
