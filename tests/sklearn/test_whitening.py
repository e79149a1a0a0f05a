"""Whitening: what one record moves, what is released, what it costs, and what it is worth."""

import itertools
import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from dp_accounting import GaussianDpEvent, NeighboringRelation
from scipy import sparse

from hidden_state_accountants import LastIterateDpEvent
from hidden_state_adapters.own_noise import OwnGenerator
from hidden_state_adapters.sklearn import PrivateClassifier, PrivateRegressor
from hidden_state_adapters.sklearn.preprocessing import Statistics, moment_sum
from hidden_state_adapters.whitening import (
    directions_are_few,
    moment_bound,
    noisy_moment,
    whitening,
)

pytestmark = pytest.mark.filterwarnings(  # the same records in every test
    "ignore::hidden_state_adapters.sklearn.PrivacyBudgetWarning"
)

RELATIONS = ["REPLACE_SPECIAL", "REPLACE_ONE"]
rng = np.random.default_rng(5)
N, D = 3000, 10
LABELS = rng.integers(2, size=N)
STDS = 0.6 ** np.arange(D)


def like_a_network(labels):
    """Labels in a direction of which there is little, far from the origin: one column of ten."""
    x = STDS * rng.normal(size=(len(labels), D)) + 1.0
    x[:, 7] += STDS[7] * 3 * (labels - 0.5)
    return x


X = like_a_network(LABELS)
PUBLIC = like_a_network(np.zeros(200))  # of one class


def classifier(**changes):
    settings = dict(epsilon=1.0, classes=[0, 1], calibrate=False, preprocessing="whiten")
    return PrivateClassifier(**{**settings, **changes})


@pytest.mark.parametrize("normalization", ["scale", "clip"])
@pytest.mark.parametrize("norm", [0.5, 7.0])
def test_one_record_moves_the_moments_by_no_more_than_its_bound(normalization, norm):
    """By 1 where it is replaced by zeros, by the square root of 2 where by another; attained."""
    centred = Statistics(norm * np.array([0.3, -0.2, 0.1]), None)
    random = np.random.default_rng(4)
    rows = [*(1e3 * np.eye(3)), -np.ones(3), np.full(3, 1e20), np.full(3, 1e-40)]
    rows += [*random.normal(size=(30, 3)) * np.exp(3 * random.normal(size=(30, 1)))]
    alone = [moment_sum(centred, row[None], norm, normalization) for row in rows]
    zeroed, replaced = (moment_bound(NeighboringRelation[name]) for name in RELATIONS)
    others = random.normal(size=(4, 3))
    together = moment_sum(centred, np.vstack([others, rows[0]]), norm, normalization)
    rest = moment_sum(centred, others, norm, normalization)
    np.testing.assert_allclose(together - rest, alone[0], atol=1e-12)
    lengths = [np.linalg.norm(m) for m in alone]
    assert max(lengths) == pytest.approx(zeroed, rel=1e-12)
    gaps = [np.linalg.norm(a - b) for a, b in itertools.combinations(alone, 2)]
    assert max(gaps) <= 2 * replaced * (1 + 1e-12)
    perpendicular = [np.outer(row, row) for row in np.eye(3)]
    assert np.linalg.norm(perpendicular[0] - perpendicular[1]) == pytest.approx(2 * replaced)


def test_every_entry_of_the_sum_gets_noise_of_its_own():
    noise = np.random.default_rng(4).normal(size=(3, 3))
    found = noisy_moment(np.eye(3), 5.0, lambda std, shape: std * noise)
    np.testing.assert_allclose(found, np.eye(3) + 5.0 * (noise + noise.T) / 2)


def test_the_best_test_between_two_moments_is_no_better_than_accounted():
    """Of records that are perpendicular, along the line between their moments."""
    one, other = (np.outer(row, row) for row in np.eye(2))
    line, std = (one - other) / math.sqrt(2), 3.0
    normal = np.random.default_rng(4).normal
    seen = [
        np.array([np.sum(line * noisy_moment(m, std, lambda s, n: normal(0, s, n))) for _ in X])
        for m in (one, other)
    ]
    mu = (seen[0].mean() - seen[1].mean()) / np.sqrt((seen[0].var() + seen[1].var()) / 2)
    accounted = 2 * moment_bound(NeighboringRelation.REPLACE_ONE) / std
    assert mu == pytest.approx(accounted, rel=0.15)


@pytest.mark.parametrize("relation", RELATIONS)
def test_all_that_is_drawn_is_accounted(relation, monkeypatch):
    """The squared mu from what is drawn and from how far a record moves what it is drawn for."""
    drawn, normal = [], OwnGenerator.normal

    def recorded(self, std, shape):
        drawn.append((std, shape))
        return normal(self, std, shape)

    monkeypatch.setattr(OwnGenerator, "normal", recorded)
    model = classifier(neighboring_relation=relation).fit(X, LABELS)
    (mean, of_mean), (moment, of_moment), *steps = drawn
    assert (of_mean, of_moment) == ((2, D), (D, D))
    zeroed = relation == "REPLACE_SPECIAL"
    clip_norm = model._recipe.run.event.gradient_bound()[0]
    moved = [(1 if zeroed else 2, mean), (1 if zeroed else math.sqrt(2), moment)]
    moved += [((1 if zeroed else 2) * clip_norm, std) for std, _ in steps]
    mu = math.sqrt(sum((distance / std) ** 2 for distance, std in moved))
    assert model.guarantee_.mu == pytest.approx(mu, rel=1e-5)
    assert 0.999 < model.guarantee_.epsilon(1e-5) <= 1
    first, second, _ = model.privacy_event_.events
    assert isinstance(first, GaussianDpEvent)
    assert isinstance(second, GaussianDpEvent)
    assert "the second moment of the centred features" in model.report_


def test_rows_are_more_even_without_noise_and_of_norm_one_with_it():
    z = X - X.mean(axis=0)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    moment = z.T @ z / N
    even = z @ whitening(moment)
    spreads = [np.linalg.cond(m) for m in (moment, even.T @ even)]
    assert spreads[1] < spreads[0] ** 0.6
    noise = np.random.default_rng(4).normal(size=(D, D)) * 0.05
    for found in (even, z @ whitening(moment + noise + noise.T, 0.1 * math.sqrt(2 * D))):
        assert 0.6 < (found**2).sum(axis=1).mean() < 1.7
    flat = whitening(np.zeros((2, 2)))
    assert np.isfinite(flat).all()


def test_noise_in_a_moment_does_not_make_its_directions_more_or_fewer():
    random = np.random.default_rng(4)
    few, many = (np.diag(np.r_[np.full(k, 1 / k), np.zeros(64 - k)]) for k in (6, 20))
    for std in (1e-6, 0.005, 0.015):
        noisy = [noisy_moment(m, std, lambda s, n: random.normal(0, s, n)) for m in (few, many)]
        assert [directions_are_few(m, std) for m in noisy] == [True, False]


def test_labels_in_a_direction_of_little_variance_are_found():
    fits = [{"preprocessing": "center"}, {}, {"public_features": PUBLIC}]
    scores = [
        np.mean([classifier(**c).fit(X, LABELS).score(X, LABELS) for _ in "123"]) for c in fits
    ]
    assert scores[1] > scores[0] + 0.02
    assert scores[2] > scores[0] + 0.02
    targets = X[:, 7]
    model = PrivateRegressor(target_bounds=(0, 2), preprocessing="whiten").fit(X, targets)
    assert model.score(X, targets) > 0.5
    assert np.argmax(np.abs(model.coef_of_columns_)) == 7


@pytest.mark.parametrize("preprocessing", ["auto", "center", "standardize", "whiten"])
def test_public_features_cost_nothing(preprocessing):
    model = classifier(preprocessing=preprocessing, public_features=PUBLIC).fit(X, LABELS)
    assert isinstance(model.privacy_event_, LastIterateDpEvent)
    assert "epsilon protects nobody in them" in model.report_
    assert "released once" not in model.report_
    units = PUBLIC / np.linalg.norm(PUBLIC, axis=1, keepdims=True)
    np.testing.assert_allclose(model._statistics.means, units.mean(axis=0))
    assert (model._statistics.whitening is not None) == (preprocessing in ("auto", "whiten"))


def test_public_features_are_cut_at_the_bounds_of_the_columns():
    bounds = [(-2, 4)] * D
    found = [
        classifier(public_features=public, column_bounds=bounds).fit(X, LABELS)._statistics.means
        for public in (10 * PUBLIC, np.clip(10 * PUBLIC, -2, 4))
    ]
    np.testing.assert_allclose(*found)


@pytest.mark.parametrize(
    ("x", "changes", "message"),
    [
        (X, {"public_features": X}, "got the records themselves"),
        (X, {"public_features": PUBLIC[:, 1:]}, "of 10 columns"),
        (sparse.csr_matrix(X), {"public_features": PUBLIC, "preprocessing": "auto"}, "stay sparse"),
        (sparse.csr_matrix(X), {}, "stay sparse"),
        (X, {"epsilon": 0.001}, "Pass public_features="),
    ],
)
def test_refused_before_training(x, changes, message, monkeypatch):
    monkeypatch.setattr(
        "hidden_state_adapters.recipe.Recipe.train", lambda *_: pytest.fail("trained")
    )
    with pytest.raises(ValueError, match=message):
        classifier(**changes).fit(x, LABELS)
