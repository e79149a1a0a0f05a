"""Adversarial search: no run that hypothesis can find refutes a sound bound.

The losses of every run belong to the class that its event declares, so that a claim which fails
here is wrong, whatever its proof. `make test-deep` searches for about an hour.
"""

import math
import time

import pytest
from exact_runs import GridRun, gaussian_runs, grid_runs, secret_order_runs
from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st
from strategies import CYCLIC, EPOCHS, FULL, SAMPLED, sound_guarantees

from hidden_state_accountants.bounds.shifted_interpolation import position_mus
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.events.batch_order import BINS
from hidden_state_accountants.guarantee import Guarantee

RENYI_ORDERS = (1.5, 2.0, 3.0, 8.0, 32.0)
ROUND = 500  # examples between two reports of a deep search; each round climbs from a fresh start

# name: (runs, examples per 100 of the profile)
SEARCHES = {
    "quadratic": (gaussian_runs(), 800),
    "long quadratic": (gaussian_runs(most_steps=100), 200),
    "linear, secret orders": (secret_order_runs(EPOCHS), 400),
    "linear, sampled": (secret_order_runs(SAMPLED), 100),
    "one dimension": (grid_runs((FULL, CYCLIC)), 350),
    "one dimension, longer": (grid_runs((FULL, CYCLIC), most_steps=25), 120),
    "one dimension, secret orders": (grid_runs(EPOCHS, most_steps=6), 150),
    "one dimension, bins": (grid_runs(BINS, most_steps=6), 100),
    "one dimension, sampled": (grid_runs(SAMPLED, most_steps=5), 60),
}


def judge(run, guarantees, epsilons):
    """Holds every claim against the oracle of the run.

    Delta is compared at `epsilons`; None stands for those where it is large and small.

    Returns:
        How close the run came to a claim, and how close to one well below composition.
    """
    closest = {"any": 0.0, "amplified": 0.0}
    renyi = {order: max(run.renyi(order), default=0.0) for order in RENYI_ORDERS}
    composed = guarantees["composition"].rdp([2.0])[0] if "composition" in guarantees else math.inf
    for name, guarantee in guarantees.items():
        tried = epsilons
        if tried is None:
            tried = {0.0, *(e for d in (1e-2, 1e-6) if (e := guarantee.epsilon(d)) < 30)}
        claims = guarantee.rdp(RENYI_ORDERS).tolist()
        compared = [("renyi", o, c, renyi[o]) for o, c in zip(RENYI_ORDERS, claims, strict=True)]
        for epsilon in sorted(tried):
            lower = max(run.delta(epsilon), default=0.0)
            compared.append(("delta", epsilon, guarantee.delta(epsilon), lower))
        is_amplified = claims[RENYI_ORDERS.index(2.0)] < 0.7 * composed < math.inf
        for divergence, argument, claim, lower in compared:
            if claim == math.inf:
                continue
            is_above = lower > claim * (1 + 1e-6) + 1e-12
            if is_above or is_refuted(run, divergence, argument, claim):
                raise AssertionError(
                    f"{name} claims {divergence}({argument:g}) = {claim:.9g}, but it is at least "
                    f"{lower:.9g}.\n{run.relation}\n{run!r}"
                )
            share = lower / claim if claim > 1e-9 else 0.0
            closest["any"] = max(closest["any"], share)
            if is_amplified:
                closest["amplified"] = max(closest["amplified"], share)
    return closest


def is_refuted(run, divergence, argument, claim):
    """Whether a grid's uncertified value, which is sharper, stays above the claim if refined."""
    if not isinstance(run, GridRun):
        return False

    def likely(refine):
        estimates = run.estimates(divergence, argument, refine)
        return max((e.value - 3 * e.error for e in estimates), default=0.0)

    limit = claim * (1 + 1e-3) + 1e-9
    return likely(1) > limit and likely(4) > limit


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_no_run_refutes_a_sound_bound(name, usual):
    runs, weight = SEARCHES[name]
    is_deep = settings.get_current_profile_name() == "deep"
    left = max(1, settings().max_examples * weight // (100 if is_deep else usual(200, 100)))
    judged, best, start = 0, 0.0, time.monotonic()
    while left > 0:
        examples = min(left, ROUND) if is_deep else left
        left -= examples

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)
        @given(runs, st.integers(0, 9))
        def search(run, luck):
            nonlocal judged, best
            is_public = run.event.batch_order in (FULL, CYCLIC)
            ask_all = is_public or luck == 9  # delta under a secret order may take a PLD: seconds
            guarantees = sound_guarantees(run.event, run.relation, ask_all)
            if not guarantees:
                return
            if is_public:
                mu = position_mus(run.event, run.relation)[run.position]
                guarantees["its position"] = Guarantee(GaussianCurve(mu), run.relation, "")
            closest = judge(run, guarantees, None if is_public else [0.5] if ask_all else [])
            judged, best = judged + 1, max(best, closest["any"])
            for label, share in closest.items():
                target(share, label=label)

        search()
        if is_deep:
            print(f"\n{name}: {judged} runs, the closest {best:.4f} of a claim; {left} to go "
                  f"({time.monotonic() - start:.0f} s)", flush=True)  # fmt: skip
    assert judged > 0
