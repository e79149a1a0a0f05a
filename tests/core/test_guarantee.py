"""What a guarantee says, and what it is good for beside epsilon."""

import copy
import html
import json
import pickle

import attrs
import dp_accounting
import pytest
from dp_accounting import NeighboringRelation, pld
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


class TestForms:
    def test_json_is_read_back_with_the_event(self):
        event = cyclic_run(learning_rate=[0.5] * 12 + [0.1] * 12)
        found = guarantee(event)
        data = json.loads(found.to_json(1e-6))
        assert data["epsilon"] == found.epsilon(1e-6)
        assert (data["delta"], data["mu"]) == (1e-6, found.mu)
        assert data["neighboring_relation"] == "REPLACE_SPECIAL"
        assert data["theorem"] == found.theorem
        assert data["is_proven"]
        assert data["assumptions"]["declared"] == [
            a.text for a in found.assumptions if a.status.value == "declared"
        ]
        assert hsa.LastIterateDpEvent.from_dict(data["event"]) == event
        assert data["versions"]["hidden_state_accountants"] == hsa.__version__

    def test_compositions_and_infinity(self):
        accountant = hsa.LastIterateAccountant().compose(cyclic_run(noise_multiplier=0.0), 2)
        accountant.compose(dp_accounting.LaplaceDpEvent(3.0))
        data = json.loads(accountant.guarantee.to_json())
        assert data["epsilon"] == "inf"
        twice, laplace = data["event"]["events"]
        assert (twice["type"], twice["count"]) == ("SelfComposedDpEvent", 2)
        assert hsa.LastIterateDpEvent.from_dict(twice["event"]).noise_multiplier == 0
        assert laplace == {"type": "LaplaceDpEvent", "noise_multiplier": 3.0}

    def test_a_guarantee_that_nobody_told_its_event(self):
        claimed = hsa.Guarantee(hsa.curves.GaussianCurve(1.0), "REPLACE_ONE", "a claim")
        assert claimed.to_dict()["event"] is None
        assert "what ran" not in claimed.to_markdown()

    def test_composed_guarantees_hold_the_events_of_all(self):
        one, two = guarantee(cyclic_run()), guarantee(full_run())
        assert hsa.compose_guarantees([one], "replace_special").event == one.event
        both = hsa.compose_guarantees([one, two], "replace_special").event
        assert both == dp_accounting.ComposedDpEvent([one.event, two.event])
        untold = attrs.evolve(two, event=None)
        assert hsa.compose_guarantees([one, untold], "replace_special").event is None

    def test_both_are_saved_beside_a_model(self, tmp_path):
        found = guarantee(cyclic_run())
        found.save(tmp_path / "model.json", 1e-6)
        assert json.loads((tmp_path / "model.json").read_text()) == json.loads(found.to_json(1e-6))
        assert (tmp_path / "model.md").read_text() == found.to_markdown(1e-6)
        with pytest.raises(ValueError, match=r"Expected a path that ends in \.json"):
            found.save(tmp_path / "model.pt")

    def test_model_card_and_notebook(self):
        claimed = attrs.evolve(guarantee(cyclic_run()), caveat="c < 1 | d")
        card, shown = claimed.to_markdown(1e-6), claimed._repr_html_()
        assert f"| epsilon at delta 1e-06 | {text_up(claimed.epsilon(1e-6), 6)} |" in card
        assert "| NOT PROVEN | c < 1 \\| d |" in card
        for text in (claimed.theorem, "REPLACE_SPECIAL", "LastIterateDpEvent(", hsa.__version__):
            assert text in card
            assert html.escape(text) in shown
        assert "<td>c &lt; 1 | d</td>" in shown
        for assumption in claimed.assumptions:
            assert f"- {assumption.text}\n" in card
            assert f"<li>{html.escape(assumption.text)}</li>" in shown


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


ONE = NeighboringRelation.REPLACE_ONE


def gaussian_mu(event):
    return hsa.LastIterateAccountant("add_or_remove_one").compose(event).guarantee.mu


ORDERS = ("cyclic", "shuffled_once", "reshuffled", "without_replacement", "poisson")


def of_order(order="cyclic", relation=ONE, size=1):
    event = cyclic_run(batch_order=order, noise_multiplier=8.0)
    return hsa.LastIterateAccountant(relation, group_size=size).compose(event).guarantee


class TestText:
    def test_what_is_not_proven_is_said(self):
        assert "NOT PROVEN" in repr(attrs.evolve(of_order(), caveat="a gap in Lemma 1"))

    @pytest.mark.parametrize(
        ("relation", "words"),
        [
            ("add_or_remove_one", "lacks a person"),
            ("replace_one", "differ in the records of one person"),
            ("replace_special", "no gradient in one of them"),
        ],
    )
    def test_sentences_for_a_paper(self, relation, words):
        found = of_order("poisson", relation)
        text = found.statement(1e-6)
        assert f"epsilon = {hsa.figures.text_up(found.epsilon(1e-6), 4)} and delta = 1e-06" in text
        assert words in text
        assert found.theorem in text
        assert all(assumption.text in text for assumption in found.assumptions)

    def test_sentences_say_whose_privacy_it_is(self):
        assert "one person has at most 3 records" in of_order(size=3).statement()
        unproven = attrs.evolve(of_order(), caveat="a gap in Lemma 1")
        assert "NOT PROVEN: a gap in Lemma 1" in unproven.statement()


class TestPrivacyLoss:
    @pytest.mark.parametrize("order", ORDERS)
    def test_never_below_the_guarantee_and_close_to_it(self, order):
        found = of_order(order)
        loss = found.privacy_loss()
        for epsilon in (0.0, 0.05, 0.2, 0.5):
            delta = found.delta(epsilon)
            assert delta * (1 - 1e-9) <= loss.get_delta_for_epsilon(epsilon) <= 1.01 * delta + 1e-14


class TestStandardEvents:
    """What a stock accountant makes of the event is never below the guarantee."""

    @pytest.mark.parametrize(
        ("order", "relation"),
        [
            ("cyclic", "replace_one"),
            ("shuffled_once", "replace_one"),
            ("reshuffled", "replace_special"),
            ("poisson", "replace_special"),
            ("poisson", "add_or_remove_one"),
        ],
    )
    def test_dominate(self, order, relation):
        event = cyclic_run(batch_order=order, noise_multiplier=8.0)
        runs = [event, event] if order == "cyclic" else [event]
        accountant = hsa.LastIterateAccountant(relation)
        for one in runs:
            accountant.compose(one)
        standard = accountant.guarantee.to_dpevent()
        stock = pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE).compose(standard)
        for delta in (1e-3, 1e-5, 1e-7):
            expected = accountant.get_epsilon(delta)
            assert expected * (1 - 1e-3) <= stock.get_epsilon(delta)
            if order == "cyclic":
                assert stock.get_epsilon(delta) <= expected * 1.001
        assert stock.get_epsilon(1e-5) < 5 * accountant.get_epsilon(1e-5)

    def test_compositions_and_groups_of_mixtures(self):
        once = cyclic_run(batch_order="shuffled_once", noise_multiplier=8.0)
        worst = of_order("cyclic").mu
        composed = hsa.LastIterateAccountant(ONE).compose(once, 2).compose(once)
        assert gaussian_mu(composed.guarantee.to_dpevent()) == pytest.approx(3**0.5 * worst)
        group = of_order("shuffled_once", size=3)
        assert gaussian_mu(group.to_dpevent()) == pytest.approx(3 * worst)

    @pytest.mark.parametrize("relation", ["replace_special", "replace_one"])
    def test_none(self, relation):
        with pytest.raises(ValueError, match="No standard event"):
            of_order("without_replacement", relation).to_dpevent()
