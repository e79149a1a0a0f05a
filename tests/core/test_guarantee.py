"""What a guarantee says about itself: explanation, advice and citations."""

import copy
import math
import pickle

import attrs
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run, probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.advice import single_changes
from hidden_state_accountants.figures import text_up

DELTA = 1e-5


def guarantee(event, relation=NeighboringRelation.REPLACE_SPECIAL):
    return hsa.LastIterateAccountant(relation).compose(event).guarantee


def epsilon(event):
    return guarantee(event).epsilon(DELTA)


def changes(event):
    return single_changes(event, NeighboringRelation.REPLACE_SPECIAL, DELTA)


class TestAdvice:
    def test_what_costs_no_accuracy_comes_first_with_the_epsilon_of_the_changed_run(self):
        event = cyclic_run(release_steps=(8,))
        found = changes(event)
        assert dict(found)["release the last iterate only, not 1 more"] == epsilon(
            attrs.evolve(event, release_steps=())
        )
        free = [value for text, value in found if "weight decay" not in text]
        assert free == sorted(free) == [value for _, value in found[: len(free)]]
        assert max(value for _, value in found) < 0.99 * epsilon(event)

    def test_decay_is_named_beside_the_noise_of_equal_epsilon(self):
        event = cyclic_run(weight_decay=0.01, num_steps=96)
        ((text, value),) = [c for c in changes(event) if "weight decay" in c[0]]
        noise = float(text.split("noise multiplier ")[1].split()[0])
        same = epsilon(attrs.evolve(event, noise_multiplier=noise))
        assert same == pytest.approx(value, rel=0.02)
        assert noise > event.noise_multiplier

    @pytest.fixture
    def probe(self):
        return hsa.LastIterateDpEvent(
            noise_multiplier=2.0,
            learning_rate=0.5,
            clip_norm=1.4143,
            batch_size=100,
            dataset_size=3000,
            num_steps=900,
            batch_order="cyclic",
            loss=hsa.LossGeometry.softmax_cross_entropy(1.0),
            weight_decay=0.1,
        )

    def test_a_clip_that_never_acts(self, probe):
        event = attrs.evolve(probe, clip_norm=1.0)
        found = {t: v for t, v in changes(event) if "clip norm" in t}
        (text,) = [t for t in found if "same noise multiplier" in t]
        assert text.startswith("clip norm 1.41421, which never acts, instead of 1, at the same")
        assert found[text] == epsilon(attrs.evolve(event, clip_norm=event.loss.lipschitz))

    def test_a_constant_rate_is_named_where_a_schedule_costs(self, probe):
        rates = [0.5 * (1 + math.cos(math.pi * t / 900)) for t in range(900)]
        event = attrs.evolve(probe, learning_rate=rates)
        found = dict(changes(event))
        (text,) = [t for t in found if "constant rate" in t]
        assert text.startswith("a constant rate, 0.5")
        assert found[text] < 0.9 * epsilon(event)

    def test_nothing_is_known_about_the_loss(self):
        found = changes(full_run(loss=None, release_steps=(3,)))
        assert not found  # composition counts every iterate anyway

    def test_doubling_never_reaches_a_forbidden_decay(self):
        event = full_run(learning_rate=1.0, weight_decay=0.7)
        changes(event)  # no event is refused


class TestExplain:
    def test_everything_is_named(self):
        text = guarantee(probe_run(num_steps=1000)).explain()
        for part in ("theorem: Theorem A", "REPLACE_SPECIAL", "epsilon at delta 1e-05"):
            assert part in text
        assert "assumption, declared: per-example loss" in text
        assert "not used: composition" in text
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
