"""What a guarantee says about itself."""

import copy
import pickle

import attrs
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run, probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.figures import text_up

DELTA = 1e-5


def guarantee(event, relation=NeighboringRelation.REPLACE_SPECIAL):
    return hsa.LastIterateAccountant(relation).compose(event).guarantee


def epsilon(event):
    return guarantee(event).epsilon(DELTA)


class TestExplain:
    def test_everything_is_named(self):
        text = guarantee(probe_run(num_steps=1000)).explain()
        for part in ("theorem: Theorem A", "REPLACE_SPECIAL", "epsilon at delta 1e-05"):
            assert part in text
        assert "assumption, declared: per-example loss" in text
        assert "not used" not in text
        every = guarantee(probe_run(num_steps=1000)).explain(bounds=True)
        assert "not used: composition" in every
        assert "one change: Poisson batches" in text

    def test_delta_is_an_argument(self):
        run = guarantee(cyclic_run())
        assert f"epsilon at delta 0.001: {text_up(run.epsilon(1e-3), 6)}" in run.explain(1e-3)
        with pytest.raises(ValueError, match="target_delta"):
            run.explain(2.0)

    def test_a_caveat_stands_out(self):
        claimed = attrs.evolve(guarantee(cyclic_run()), caveat="its lemma is false")
        assert "NOT PROVEN: its lemma is false" in claimed.explain()

    def test_several_runs_have_no_single_change(self):
        both = hsa.LastIterateAccountant().compose(cyclic_run()).compose(full_run()).guarantee
        assert both.changes is None
        assert "one change" not in both.explain()

    def test_copies(self):
        run = guarantee(cyclic_run())
        for copied in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
            assert copied.explain() == run.explain()


def test_what_holds_for_all_iterates_rests_on_hidden_ones_at_no_delta():
    """Composition is the smaller one at delta 1e-6, where the name is chosen, but not at 1e-4."""
    run = probe_run(
        batch_order="without_replacement",
        batch_size=10,
        dataset_size=500,
        num_steps=100,
        learning_rate=1.0,
        weight_decay=0.01,
        clip_norm=1.4143,
        noise_multiplier=2.0,
        domain_diameter=0.1,
    )
    guarantee = hsa.LastIterateAccountant("replace_special").compose(run).guarantee
    (bound,) = (bound for bound in hsa.BOUNDS if bound.name == "composition")
    composition = bound.guarantee(run, NeighboringRelation.REPLACE_SPECIAL)
    assert guarantee.theorem == composition.theorem
    for delta in (1e-2, 1e-4, 1e-6, 1e-8):
        assert guarantee.epsilon(delta) >= composition.epsilon(delta) * (1 - 1e-9)
