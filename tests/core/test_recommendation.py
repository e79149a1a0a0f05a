"""Recommended runs meet their targets, whatever accountant is asked."""

import math

import dp_accounting
import pytest
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_accountants.bounds.balls_in_bins import _process
from hidden_state_accountants.calibration import gaussian_log_mu

COMPOSED = (BatchOrder.FULL, BatchOrder.POISSON)


def recommend(n=1200, epsilon=1.0, delta=1e-5, **options):
    return hsa.recommend(n, epsilon, delta, **{"classes": 10, "epochs": 16, **options})


@pytest.mark.parametrize(
    ("n", "epsilon", "classes", "bias", "relation"),
    [
        (455, 0.1, 2, False, NeighboringRelation.ADD_OR_REMOVE_ONE),
        (455, 0.3, 10, True, NeighboringRelation.REPLACE_ONE),
        (3001, 3.0, 2, True, NeighboringRelation.REPLACE_SPECIAL),
    ],
)
def test_every_run_meets_the_target_and_wastes_little(n, epsilon, classes, bias, relation):
    found = recommend(n, epsilon, classes=classes, bias=bias, neighboring_relation=relation)
    for candidate in found:
        accountant = hsa.LastIterateAccountant(relation).compose(candidate.event)
        assert 0.99 * epsilon <= accountant.get_epsilon(1e-5) <= epsilon
        assert candidate.guarantee().neighboring_relation is relation
    scores = [round(c.score, 2) for c in found]
    assert scores == sorted(scores)


def test_composition_is_that_of_stock_accountants():
    """Nothing of this package is needed to believe these runs."""
    for candidate in recommend(orders=["poisson", "full"]):
        event = candidate.event.as_composition(NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant = dp_accounting.pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
        assert 0.98 < accountant.compose(event).get_epsilon(1e-5) < 1.01
        assert candidate.is_composition
        assert candidate.event.loss is None
        assert "Stock Opacus" in candidate.reason


def test_hidden_runs_need_less_noise_than_their_composition():
    found = recommend(orders=["cyclic", "shuffled_once"])
    assert {c.event.batch_order for c in found} == {BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE}
    for candidate in found:
        event = candidate.event
        composed = event.as_composition("REPLACE_SPECIAL")
        accountant = dp_accounting.pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
        assert accountant.compose(composed).get_epsilon(1e-5) > 1.2
        assert event.loss.lipschitz < event.clip_norm < event.loss.lipschitz * 1.0001
        # c = 1: a step moves no two weights apart.
        assert event.learning_rate * event.loss.smoothness <= 2
        assert not candidate.is_composition


def test_all_orders_but_fresh_ones_are_tried():
    assert {c.event.batch_order for c in recommend()} == set(hsa.BatchOrder) - {
        BatchOrder.RESHUFFLED,
        BatchOrder.WITHOUT_REPLACEMENT,
        BatchOrder.BALLS_IN_BINS_REDRAWN,
    }


@pytest.mark.parametrize(("relation", "clips"), [("REPLACE_SPECIAL", 1), ("REPLACE_ONE", 2)])
def test_the_rate_makes_the_noise_of_a_weight_what_the_recipe_says(relation, clips):
    options = {"orders": ["full"], "epochs": 64, "neighboring_relation": relation}
    (full,) = recommend(n=2000, epsilon=0.3, **options)
    event = full.event
    std = event.learning_rate * event.noise_std_on_sum()[0] / event.batch_size * math.sqrt(64)
    assert full.reach == 1
    assert std == pytest.approx(1.4 * full.noise_factor, rel=1e-3)
    assert full.noise_factor == pytest.approx(1, rel=2e-3)
    mu = math.exp(gaussian_log_mu(0.3, 1e-5))
    assert event.learning_rate == pytest.approx(1.4 * 2000 * mu / clips / (0.3 * 64), rel=1e-3)


@pytest.mark.parametrize(("norm", "bias"), [(3.0, False), (1.0, True)])
def test_a_unit_of_the_features_changes_nothing(norm, bias):
    """The same predictions: the rate falls with the square of the norm, the noise stays."""
    orders = ["full", "cyclic"]
    pairs = zip(
        recommend(orders=orders),
        recommend(orders=orders, feature_norm=norm, bias=bias),
        strict=True,
    )
    square = norm**2 + bias
    for one, other in pairs:
        a, b = one.event, other.event
        assert b.learning_rate * square == pytest.approx(a.learning_rate, rel=1e-3)
        assert b.noise_multiplier == pytest.approx(a.noise_multiplier, rel=2e-3)
        assert b.clip_norm == pytest.approx(a.clip_norm * math.sqrt(square), rel=1e-5)


def test_add_or_remove_leaves_the_orders_that_it_covers():
    found = recommend(neighboring_relation="add_or_remove_one")
    assert {c.event.batch_order for c in found} == set(COMPOSED)


def test_the_text_says_relation_criterion_and_what_stock_tools_do():
    text = str(recommend(orders=["full", "cyclic"]))
    assert "REPLACE_SPECIAL" in text
    assert "Stock Opacus" in text
    assert "last iterate only" in text
    hidden = recommend(orders=["cyclic"])
    assert f"criterion: {hidden.best.criterion};" in str(hidden)
    assert len(hidden) == len(list(hidden)) == len(hidden.to_dict()["candidates"])


def test_what_is_printed_is_enough():
    """Who copies the figures of the table trains a run that meets the target."""
    found = recommend(orders=["cyclic", "full"], feature_norm=1.3, weight_decay=0.01)
    for candidate, line in zip(found, str(found).splitlines()[2:], strict=False):
        event = candidate.event
        order, batch, epochs, noise, _, rate, *_ = line.split()
        assert (order, int(batch)) == (event.batch_order.value, event.batch_size)
        assert int(epochs) == candidate.epochs
        assert float(noise) >= event.noise_multiplier
        assert float(rate) == event.learning_rate
        if candidate.smoothing is not None:
            printed = float(candidate.criterion.split("smoothing=")[1].rstrip(")"))
            assert 0 < candidate.smoothing <= printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 1}, "n >= 2"),
        ({"epsilon": 0.0}, "epsilon > 0"),
        ({"classes": 1}, "classes >= 2"),
        ({"loss": "huber"}, "loss to be one of"),
        ({"orders": ["reshuffled"]}, "orders among"),
        ({"orders": []}, "none is named"),
        (
            {"orders": ["cyclic"], "neighboring_relation": "ADD_OR_REMOVE_ONE"},
            "cannot add or remove",
        ),
    ],
)
def test_impossible_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        recommend(**changes)


def test_one_order_is_a_list_too():
    with pytest.raises(TypeError, match="list of batch orders"):
        recommend(orders="cyclic")


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
@pytest.mark.parametrize(
    "spent",
    [
        dp_accounting.GaussianDpEvent(20.0),
        dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(30.0)] * 2),  # has no hash
    ],
)
def test_the_target_is_for_what_was_spent_as_well(relation, spent):
    for candidate in recommend(
        orders=["full", "cyclic"], spent=spent, neighboring_relation=relation
    ):
        accountant = hsa.LastIterateAccountant(relation).compose(candidate.event)
        alone = accountant.get_epsilon(1e-5)
        accountant.compose(spent)
        both = accountant.get_epsilon(1e-5)
        assert 0.99 < both <= 1
        assert alone < 0.99
        assert candidate.guarantee().epsilon(1e-5) == pytest.approx(both, rel=1e-6)


def test_more_spent_than_the_target_is_refused():
    with pytest.raises(ValueError, match="a part of the run does not depend on it"):
        recommend(epsilon=0.1, orders=["full"], spent=dp_accounting.GaussianDpEvent(1.0))


def test_many_records_are_trained_on_for_longer():
    """The total rate is that of the noise up to what learns single records, 3 n."""
    for n, longest in ((2000, 1e4), (50_000, 1.5e5)):
        (full,) = recommend(n=n, epsilon=50.0, orders=["full"], epochs=4000)
        total = full.event.learning_rate * full.event.num_steps
        assert total == pytest.approx(longest, rel=1e-3)


@pytest.mark.parametrize(
    ("features", "bias", "classes", "times"),
    [
        (None, False, 10, 1),
        (100, False, 10, 1),
        (9, False, 10, 1 / math.sqrt(90)),
        (9, True, 10, 1 / math.sqrt(100)),
        (29, True, 2, 1 / math.sqrt(30)),  # one logit
        (1, False, 2, 4),
    ],
)
def test_few_weights_and_many_records_are_trained_for_longer(features, bias, classes, times):
    """By n mu over 35 times the square root of the number of weights, at most four times."""
    options = {"orders": ["full"], "epochs": 2000, "classes": classes, "bias": bias}
    (full,) = recommend(n=4000, epsilon=0.6, features=features, **options)
    total = 4000 * math.exp(gaussian_log_mu(0.6, 1e-5))
    kappa = full.event.learning_rate * (1 + bias) * full.event.num_steps * 0.3 / total
    if times < 1:
        times *= total / 35
        assert 1.1 < times < 3.9
    assert kappa == pytest.approx(1.4 * times, rel=0.01)
    if times == 4:  # a prediction of a number has a scale, and noise in it counts
        same = [
            recommend(n=4000, epsilon=0.6, features=f, loss="squared_error", **options)
            for f in (features, None)
        ]
        assert same[0].best.event == same[1].best.event


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "squared_error"])
def test_steps_of_small_batches_are_as_long_where_curvature_fades(loss):
    """Composition alone, where nothing limits a step but k."""
    best = recommend(n=100_000, epsilon=50.0, orders=["poisson"], epochs=4, loss=loss).best
    k = 64 if loss == "softmax_cross_entropy" else 4 / math.sqrt(100) / 2
    assert 100_000 // best.event.batch_size == 100
    assert best.event.learning_rate == pytest.approx(k, rel=1e-3)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "squared_error"])
@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE", "ADD_OR_REMOVE_ONE"])
def test_full_batches_with_momentum_go_as_far_as_the_recipe_wants(loss, relation):
    """In closed form: no noise is searched for, and steps are 64 however many records there are."""
    options = dict(loss=loss, orders=["full"], neighboring_relation=relation)
    plain = recommend(n=1_000_000, epsilon=0.3, epochs=10_000, **options).best
    fast = recommend(n=1_000_000, epsilon=0.3, epochs=None, momentum=True, **options).best
    assert fast.event.num_steps == 64
    assert 0 < fast.momentum <= 0.97
    assert plain.momentum == 0
    reached = 64 * fast.event.learning_rate / (1 - fast.momentum)
    wanted = 10_000 * plain.event.learning_rate
    assert reached == pytest.approx(fast.reach / plain.reach * wanted, rel=0.01)
    assert fast.guarantee().epsilon(1e-5) == pytest.approx(0.3, rel=1e-5)
    stock = dp_accounting.pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    one = dp_accounting.GaussianDpEvent(fast.event.noise_multiplier)
    stock.compose(
        dp_accounting.SelfComposedDpEvent(one, 64 * (4 if relation == "REPLACE_ONE" else 1))
    )
    assert stock.get_epsilon(1e-5) == pytest.approx(0.3, rel=1e-3)


def test_balls_in_bins_are_smoothed_for_large_batches():
    """A batch of more records acts at a larger rate, which the smoothing is for."""
    best = hsa.recommend(20_000, epsilon=1.0, delta=1e-5, orders=["balls_in_bins"], epochs=16).best
    event = best.event
    assert event.batch_order is hsa.BatchOrder.BALLS_IN_BINS
    assert event.dataset_size == 20_000
    accountant = hsa.LastIterateAccountant().compose(event)
    assert 0.98 < accountant.get_epsilon(1e-5) <= 1
    assert accountant.guarantee.theorem.startswith("Theorem E")
    process = _process(event, NeighboringRelation.REPLACE_SPECIAL)[0]
    assert process.contraction.max() <= 1
