"""A budget adds up what is released inside of it, and refuses what goes over."""

import math
import subprocess
import sys

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from runs import probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.ledger import active_budget, budget_at

POISSON = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
WORKER = """
import sys
from dp_accounting import GaussianDpEvent
from hidden_state_accountants.ledger import active_budget

print("ready", flush=True)
for line in sys.stdin:
    budget = active_budget()
    try:
        print(budget and budget.spend(GaussianDpEvent(9.0), "REPLACE_SPECIAL"), flush=True)
    except ValueError:
        print("refused", flush=True)
"""


@pytest.mark.parametrize(
    ("relation", "releases"),
    [
        ("REPLACE_ONE", [GaussianDpEvent(9.0), GaussianDpEvent(11.0), GaussianDpEvent(9.0)]),
        ("ADD_OR_REMOVE_ONE", [GaussianDpEvent(4.0), POISSON]),
        ("REPLACE_SPECIAL", [probe_run(num_steps=1000, clip_norm=1.4143)]),
        ("REPLACE_SPECIAL", [probe_run(), probe_run(noise_multiplier=4.0), probe_run()]),
    ],
)
def test_the_guarantee_is_that_of_an_accountant(relation, releases):
    accountant = hsa.LastIterateAccountant(relation)
    with hsa.budget(9.0, 1e-5) as spent:
        for number, event in enumerate(releases):
            assert spent.spend(event, relation) == number + 1
            accountant.compose(event)
            assert spent.spent_epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
            assert spent.spent_epsilon >= accountant.get_epsilon(1e-5)
    own, expected = spent.guarantee, accountant.guarantee
    assert own.neighboring_relation.name == relation
    assert set(own.assumptions) == set(expected.assumptions)
    assert own.theorem == expected.theorem
    assert spent.releases == len(releases)
    assert f"epsilon {math.ceil(spent.spent_epsilon * 1e4) / 1e4:.4f} of 9 spent" in str(spent)


def test_a_worker_that_was_started_before_counts_in_the_budget():
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WORKER], **streams) as worker:

        def work():
            print(file=worker.stdin, flush=True)
            return worker.stdout.readline().strip()

        assert worker.stdout.readline().strip() == "ready"
        assert work() == "None"
        with hsa.budget(0.6, 1e-5) as spent:
            assert [work(), work(), work()] == ["1", "2", "refused"]
        assert work() == "None"
        worker.stdin.close()
    assert spent.releases == 2


def test_what_goes_over_is_refused_and_costs_nothing():
    with hsa.budget(1.0, 1e-5) as spent:
        spent.spend(GaussianDpEvent(5.0), "REPLACE_SPECIAL")
        before = spent.spent_epsilon
        with pytest.raises(hsa.BudgetExceededError, match="number 2, which makes epsilon"):
            spent.spend(GaussianDpEvent(5.0), "REPLACE_SPECIAL")
        with pytest.raises(ValueError, match="REPLACE_SPECIAL, that of the releases before"):
            spent.spend(GaussianDpEvent(500.0), "REPLACE_ONE")
        assert (spent.releases, spent.spent_epsilon) == (1, before)
        spent.spend(GaussianDpEvent(50.0), "REPLACE_SPECIAL")


def test_a_block_ends():
    with hsa.budget(1.0, 1e-5) as spent:
        assert active_budget() is spent
    assert active_budget() is None
    assert str(spent) == "epsilon 0 of 1 spent at delta 1e-05: no release"
    assert spent.spent_epsilon == 0
    for late in (lambda: spent.spend(POISSON, "REPLACE_SPECIAL"), lambda: budget_at(spent.ledger)):
        with pytest.raises(ValueError, match="has ended"):
            late()
    with pytest.raises(ValueError, match="at least one release"):
        _ = spent.guarantee


def test_impossible_blocks():
    for epsilon, delta in ((0.0, 1e-5), (1.0, 0.0), (1.0, 1.5)):
        with pytest.raises(ValueError, match=r"epsilon|delta"), hsa.budget(epsilon, delta):
            pass
    with hsa.budget(1.0, 1e-5), pytest.raises(ValueError, match="one budget at a time"):
        with hsa.budget(1.0, 1e-5):
            pass
