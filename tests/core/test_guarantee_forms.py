"""What a guarantee is good for beside epsilon: trade-off, privacy loss, groups, selection."""

import math

import attrs
import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, pld, rdp
from runs import cyclic_run
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.renyi import STOCK_ORDERS
from hidden_state_accountants.guarantee import Assumption

ONE = NeighboringRelation.REPLACE_ONE


def gaussian_mu(event):
    return hsa.LastIterateAccountant("add_or_remove_one").compose(event).guarantee.mu


ORDERS = ("cyclic", "shuffled_once", "reshuffled", "without_replacement", "poisson")


def guarantee(order="cyclic", relation=ONE, **changes):
    event = cyclic_run(batch_order=order, noise_multiplier=8.0, **changes)
    return hsa.LastIterateAccountant(relation).compose(event).guarantee


class TestText:
    def test_what_it_is_only_about_and_what_is_not_proven_are_said(self):
        about_some = guarantee(record_position=1)
        assert "ONLY FOR records of batch 1" in repr(about_some)
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
        assert "one person has at most 3 records" in guarantee().for_groups_of(3).statement()
        assert "only for records of batch 1" in guarantee(record_position=1).statement()
        unproven = attrs.evolve(guarantee(), caveat="a gap in Lemma 1")
        assert "NOT PROVEN: a gap in Lemma 1" in unproven.statement()


class TestTradeOff:
    def test_gaussian(self):
        alpha = np.array([[0.0, 0.05], [0.5, 1.0]])
        expected = stats.norm.cdf(stats.norm.isf(alpha) - guarantee().mu)
        np.testing.assert_allclose(guarantee().tradeoff(alpha), expected, rtol=1e-12)

    @pytest.mark.parametrize("order", ["shuffled_once", "poisson"])
    def test_says_what_the_deltas_say(self, order):
        """delta(epsilon) = max over alpha of 1 - e^epsilon alpha - f(alpha)."""
        found = guarantee(order)
        alpha = np.append(0.0, np.geomspace(1e-9, 1, 4000))
        errors = found.tradeoff(alpha)
        assert (np.diff(errors) <= 0).all()
        for epsilon in (0.0, 0.1, 0.3):
            delta = float(np.max(1 - math.exp(epsilon) * alpha - errors))
            assert delta == pytest.approx(found.delta(epsilon), rel=2e-3)

    def test_the_ends(self):
        nothing = attrs.evolve(guarantee(), curve=GaussianCurve(0.0))
        everything = attrs.evolve(guarantee(), curve=GaussianCurve(math.inf))
        assert nothing.tradeoff(0.3) == pytest.approx(0.7, rel=1e-15)
        assert everything.tradeoff([0.0, 0.3]).tolist() == [0.0, 0.0]
        with pytest.raises(ValueError, match="alpha in"):
            nothing.tradeoff(1.5)


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

    def test_some_records_only(self):
        about_some = guarantee(record_position=1)
        with pytest.raises(ValueError, match="for_one_position"):
            about_some.privacy_loss()
        loss = about_some.privacy_loss(for_one_position=True)
        assert loss.get_delta_for_epsilon(0.1) >= about_some.delta(0.1)


class TestGroups:
    def test_gaussian(self):
        group = guarantee().for_groups_of(3)
        assert group.mu == pytest.approx(3 * guarantee().mu, rel=1e-15)
        (unit,) = [a for a in group.assumptions if "at most 3 records" in a.text]
        assert unit.status is hsa.guarantee.Status.DECLARED
        assert "3 records" in group.theorem
        assert guarantee().for_groups_of(1) == guarantee()

    @pytest.mark.parametrize("relation", ["replace_special", "add_or_remove_one"])
    def test_relations_whose_chains_leave_the_declared_losses(self, relation):
        with pytest.raises(ValueError, match="group_size=2"):
            guarantee("poisson", relation).for_groups_of(2)

    def test_some_records_only(self):
        with pytest.raises(ValueError, match="records of batch 1"):
            guarantee(record_position=1).for_groups_of(2)


class TestSelection:
    def test_some_records_only(self):
        with pytest.raises(ValueError, match="records of batch 1"):
            guarantee(record_position=1).after_selection(5.0, math.inf)

    def test_geometric_number_by_hand(self):
        """Theorem 2 with eta = 1 and gamma = 1/m, at the best of all lambda-hat."""
        mu, mean = guarantee().mu, 20.0
        others = 1 + np.geomspace(1e-3, 1e4, 200_000)
        fixed = 2 * np.min((1 - 1 / others) * others * mu**2 / 2 + math.log(mean) / others)
        for order in (2.0, 40.0):
            expected = order * mu**2 / 2 + fixed + math.log(mean) / (order - 1)
            found = guarantee().after_selection(mean, 1.0).rdp([order])[0]
            assert expected * (1 - 1e-6) <= found <= expected * (1 + 1e-3)

    def test_poisson_number_by_hand(self):
        """Theorem 6, with the exact delta of the Gaussian mechanism."""
        mu, mean = guarantee().mu, 20.0
        for order in (2.0, 5.0):
            e = 1 + 1 / (order - 1)
            a = math.log(e) / mu
            delta = stats.norm.cdf(mu / 2 - a) - e * stats.norm.cdf(-mu / 2 - a)
            expected = order * mu**2 / 2 + mean * delta + math.log(mean) / (order - 1)
            found = guarantee().after_selection(mean, math.inf).rdp([order])[0]
            assert found == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize(
        ("mean", "shape"), [(1.5, 0.0), (20.0, 0.5), (1.5, 1.0), (20.0, 3.0), (1.5, math.inf)]
    )
    def test_agrees_with_dp_accounting(self, mean, shape):
        once = dp_accounting.GaussianDpEvent(1 / guarantee().mu)
        stock = rdp.RdpAccountant().compose(
            dp_accounting.dp_event.RepeatAndSelectDpEvent(once, mean, shape)
        )
        found = guarantee().after_selection(mean, shape)
        expected = stock.get_epsilon(1e-5)
        # (The stock accountant reads the delta of Theorem 6 off divergences.)
        assert (
            (0.7 if shape == math.inf else 0.99) * expected
            <= found.epsilon(1e-5)
            <= expected * (1 + 1e-6)
        )
        assert found.epsilon(1e-5) > guarantee().epsilon(1e-5)

    @pytest.mark.parametrize("order", ["shuffled_once", "poisson"])
    def test_other_orders(self, order):
        found = guarantee(order)
        selected = found.after_selection(5.0, math.inf).curve
        if order == "poisson":  # at others dp-accounting takes a minute
            np.testing.assert_array_equal(selected.orders, STOCK_ORDERS)
            assert compose_curves([(selected, 2)]).orders is STOCK_ORDERS
        assert found.epsilon(1e-5) < found.after_selection(5.0, math.inf).epsilon(1e-5) < math.inf

    def test_what_is_assumed_and_cited(self):
        found = guarantee().after_selection(5.0, math.inf)
        (choice,) = [a for a in found.assumptions if "number of runs" in a.text]
        assert isinstance(choice, Assumption)
        assert "Poisson distribution with mean 5" in choice.text
        assert "Theorem 6 (Papernot, Steinke 2022, arXiv 2110.03620)" in found.theorem
        assert "papernot2022hyperparameter" in found.cite()

    @pytest.mark.parametrize(("mean", "shape"), [(1.0, 1.0), (5.0, -0.5), (math.inf, 1.0)])
    def test_numbers_that_no_distribution_has(self, mean, shape):
        with pytest.raises(ValueError, match="Expected"):
            guarantee().after_selection(mean, shape)


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

    def test_compositions_groups_and_cohorts_of_mixtures(self):
        once = cyclic_run(batch_order="shuffled_once", noise_multiplier=8.0)
        worst = guarantee("cyclic").mu
        composed = hsa.LastIterateAccountant(ONE).compose(once, 2).compose(once)
        assert gaussian_mu(composed.guarantee.to_dpevent()) == pytest.approx(3**0.5 * worst)
        group = guarantee("shuffled_once").for_groups_of(3)
        assert gaussian_mu(group.to_dpevent()) == pytest.approx(3 * worst)
        cohort = dp_accounting.PoissonSampledDpEvent(0.25, once)
        event = hsa.LastIterateAccountant().compose(cohort).guarantee.to_dpevent()
        assert event.sampling_probability == 0.25
        assert gaussian_mu(event.event) == pytest.approx(worst / 2)

    @pytest.mark.parametrize("relation", ["replace_special", "replace_one"])
    def test_none(self, relation):
        with pytest.raises(ValueError, match="No standard event"):
            guarantee("without_replacement", relation).to_dpevent()
