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
from hidden_state_accountants.curves.base import GaussianCurve, with_delta
from hidden_state_accountants.figures import text_up


def guarantee(event, relation="replace_special", size=1, count=1):
    return hsa.LastIterateAccountant(relation, group_size=size).compose(event, count).guarantee


def quiet(order="cyclic"):
    return cyclic_run(batch_order=order, noise_multiplier=8.0)


class TestText:
    def test_everything_is_explained(self):
        run = guarantee(probe_run(num_steps=1000))
        text = run.explain()
        for part in (
            "theorem: Theorem A",
            "REPLACE_SPECIAL",
            "epsilon at delta 1e-05",
            "assumption, declared: per-example loss",
            "one change: Poisson batches",
        ):
            assert part in text
        assert "not used" not in text
        assert "not used: composition" in run.explain(bounds=True)
        assert f"epsilon at delta 0.001: {text_up(run.epsilon(1e-3), 6)}" in run.explain(1e-3)
        with pytest.raises(ValueError, match="target_delta"):
            run.explain(2.0)
        for copied in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
            assert copied.explain() == text

    def test_what_is_not_proven_is_said(self):
        claimed = attrs.evolve(guarantee(cyclic_run()), caveat="a gap in Lemma 1")
        for text in (claimed.explain(), claimed.statement()):
            assert "NOT PROVEN: a gap in Lemma 1" in text
        assert "NOT PROVEN" in repr(claimed)

    def test_several_runs_have_no_single_change(self):
        both = hsa.LastIterateAccountant().compose(cyclic_run()).compose(full_run()).guarantee
        assert both.changes is None
        assert "one change" not in both.explain()

    @pytest.mark.parametrize(
        ("relation", "words"),
        [
            ("add_or_remove_one", "lacks a person"),
            ("replace_one", "differ in the records of one person"),
            ("replace_special", "no gradient in one of them"),
        ],
    )
    def test_sentences_for_a_paper(self, relation, words):
        found = guarantee(quiet("poisson"), relation)
        text = found.statement(1e-6)
        assert f"epsilon = {text_up(found.epsilon(1e-6), 4)} and delta = 1e-06" in text
        assert words in text
        assert found.theorem in text
        assert all(assumption.text in text for assumption in found.assumptions)


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

    def test_events_of_composed_guarantees(self):
        one, two = guarantee(cyclic_run()), guarantee(full_run())
        untold = attrs.evolve(two, event=None)
        assert untold.to_dict()["event"] is None
        assert "what ran" not in untold.to_markdown()
        for parts, event in (
            ([one], one.event),
            ([one, two], dp_accounting.ComposedDpEvent([one.event, two.event])),
            ([one, untold], None),
        ):
            assert hsa.compose_guarantees(parts, "replace_special").event == event

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
        batch_order="without_replacement", batch_size=10, dataset_size=500, num_steps=100,
        learning_rate=1.0, weight_decay=0.01, clip_norm=1.4143, domain_diameter=0.1,
    )  # fmt: skip
    found = guarantee(run)
    (bound,) = (bound for bound in hsa.BOUNDS if bound.name == "composition")
    composition = bound.guarantee(run, NeighboringRelation.REPLACE_SPECIAL)
    assert found.theorem == composition.theorem
    for delta in (1e-2, 1e-4, 1e-6, 1e-8):
        assert found.epsilon(delta) >= composition.epsilon(delta) * (1 - 1e-9)


def test_what_may_fail_has_no_mu():
    failing = with_delta(GaussianCurve(0.5), 1e-9)
    assert hsa.Guarantee(failing, "replace_special", "a theorem").mu is None


@pytest.mark.parametrize(
    "order", ["cyclic", "shuffled_once", "reshuffled", "without_replacement", "poisson"]
)
def test_the_privacy_loss_is_never_below_the_guarantee_and_close_to_it(order):
    found = guarantee(quiet(order), "replace_one")
    loss = found.privacy_loss()
    for epsilon in (0.0, 0.05, 0.2, 0.5):
        delta = found.delta(epsilon)
        assert delta * (1 - 1e-9) <= loss.get_delta_for_epsilon(epsilon) <= 1.01 * delta + 1e-14


@pytest.mark.parametrize(
    ("order", "relation", "count", "most"),
    [
        ("cyclic", "replace_one", 2, 1.001),
        ("shuffled_once", "replace_one", 1, 5),
        ("reshuffled", "replace_special", 1, 5),
        ("poisson", "replace_special", 1, 5),
        ("poisson", "add_or_remove_one", 1, 5),
    ],
)
def test_what_a_stock_accountant_makes_of_the_event_is_never_below(order, relation, count, most):
    found = guarantee(quiet(order), relation, count=count)
    stock = pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE).compose(found.to_dpevent())
    for delta in (1e-3, 1e-5, 1e-7):
        assert found.epsilon(delta) * (1 - 1e-3) <= stock.get_epsilon(delta)
    assert stock.get_epsilon(1e-5) <= most * found.epsilon(1e-5)


def test_events_of_compositions_and_of_groups_of_mixtures():
    once, worst = quiet("shuffled_once"), guarantee(quiet(), "replace_one").mu
    composed = hsa.LastIterateAccountant("replace_one").compose(once, 2).compose(once).guarantee
    group = guarantee(once, "replace_one", size=3)
    for found, mu in ((composed, 3**0.5 * worst), (group, 3 * worst)):
        assert guarantee(found.to_dpevent(), "add_or_remove_one").mu == pytest.approx(mu)
    for relation in ("replace_special", "replace_one"):
        with pytest.raises(ValueError, match="No standard event"):
            guarantee(quiet("without_replacement"), relation).to_dpevent()
