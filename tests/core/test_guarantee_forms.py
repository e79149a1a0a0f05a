"""What a guarantee is good for beside epsilon: privacy loss, groups, standard events."""

import math

import attrs
import dp_accounting
import pytest
from dp_accounting import NeighboringRelation, pld, rdp
from runs import cyclic_run

import hidden_state_accountants as hsa

ONE = NeighboringRelation.REPLACE_ONE


def gaussian_mu(event):
    return hsa.LastIterateAccountant("add_or_remove_one").compose(event).guarantee.mu


ORDERS = ("cyclic", "shuffled_once", "reshuffled", "without_replacement", "poisson")


def guarantee(order="cyclic", relation=ONE, size=1):
    event = cyclic_run(batch_order=order, noise_multiplier=8.0)
    return hsa.LastIterateAccountant(relation, group_size=size).compose(event).guarantee


class TestText:
    def test_what_is_not_proven_is_said(self):
        assert "NOT PROVEN" in repr(attrs.evolve(guarantee(), caveat="a gap in Lemma 1"))

    @pytest.mark.parametrize(
        ("relation", "words"),
        [
            ("add_or_remove_one", "lacks a person"),
            ("replace_one", "differ in the records of one person"),
            ("replace_special", "no gradient in one of them"),
        ],
    )
    def test_sentences_for_a_paper(self, relation, words):
        found = guarantee("poisson", relation)
        text = found.statement(1e-6)
        assert f"epsilon = {hsa.figures.text_up(found.epsilon(1e-6), 4)} and delta = 1e-06" in text
        assert words in text
        assert found.theorem in text
        assert all(assumption.text in text for assumption in found.assumptions)

    def test_sentences_say_whose_privacy_it_is(self):
        assert "one person has at most 3 records" in guarantee(size=3).statement()
        unproven = attrs.evolve(guarantee(), caveat="a gap in Lemma 1")
        assert "NOT PROVEN: a gap in Lemma 1" in unproven.statement()


class TestPrivacyLoss:
    @pytest.mark.parametrize("order", ORDERS)
    def test_never_below_the_guarantee_and_close_to_it(self, order):
        found = guarantee(order)
        loss = found.privacy_loss()
        for epsilon in (0.0, 0.05, 0.2, 0.5):
            delta = found.delta(epsilon)
            assert delta * (1 - 1e-9) <= loss.get_delta_for_epsilon(epsilon) <= 1.01 * delta + 1e-14

    @pytest.mark.parametrize("order", ["cyclic", "shuffled_once"])
    def test_composes_like_the_guarantee(self, order):
        event = cyclic_run(batch_order=order, noise_multiplier=8.0)
        together = hsa.LastIterateAccountant(ONE).compose(event, 3).get_epsilon(1e-5)
        loss = guarantee(order).privacy_loss().self_compose(3)
        assert together * (1 - 1e-6) <= loss.get_epsilon_for_delta(1e-5) <= 1.01 * together


class TestGroups:
    def test_gaussian(self):
        group = guarantee(size=3)
        assert group.mu == pytest.approx(3 * guarantee().mu, rel=1e-15)
        (unit,) = [a for a in group.assumptions if "at most 3 records" in a.text]
        assert unit.status is hsa.guarantee.Status.DECLARED
        assert "3 records" in group.theorem


class TestSelection:
    """What replaces `after_selection`: dp-accounting's event, with the run's inside."""

    def test_a_poisson_number_of_runs(self):
        once = guarantee().to_dpevent()
        best = dp_accounting.dp_event.RepeatAndSelectDpEvent(once, 5.0, math.inf)
        found = rdp.RdpAccountant().compose(best).get_epsilon(1e-5)
        assert guarantee().epsilon(1e-5) < found < math.inf


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
        worst = guarantee("cyclic").mu
        composed = hsa.LastIterateAccountant(ONE).compose(once, 2).compose(once)
        assert gaussian_mu(composed.guarantee.to_dpevent()) == pytest.approx(3**0.5 * worst)
        group = guarantee("shuffled_once", size=3)
        assert gaussian_mu(group.to_dpevent()) == pytest.approx(3 * worst)

    @pytest.mark.parametrize("relation", ["replace_special", "replace_one"])
    def test_none(self, relation):
        with pytest.raises(ValueError, match="No standard event"):
            guarantee("without_replacement", relation).to_dpevent()
