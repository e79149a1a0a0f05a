"""Public maps of the columns: bounds, and hat functions between them."""

import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from hidden_state_adapters.sklearn import PrivateClassifier, PrivateRegressor, estimators
from hidden_state_adapters.sklearn.columns import Columns

pytestmark = pytest.mark.filterwarnings(  # the same records in every test
    "ignore::hidden_state_adapters.sklearn.PrivacyBudgetWarning"
)

rng = np.random.default_rng(6)
X = np.c_[rng.uniform(-4, 4, size=(2000, 2)), rng.integers(2, size=2000)]
LABELS = (np.abs(X[:, 0]) > 2).astype(int)  # no line tells them apart
BOUNDS = [(-4, 4), (-4, 4), (0, 1)]


def classifier(**changes):
    settings = dict(epsilon=1.0, classes=[0, 1], column_bounds=BOUNDS, splines=[9, 9, 0])
    return PrivateClassifier(**{**settings, **changes})


def test_a_column_is_linear_between_its_knots():
    columns = Columns.of(BOUNDS, [5, 3, 0], ["a", "b", "c"])
    found = columns.apply(np.vstack([X, [[9, -9, 5]]]))
    cut = np.clip(np.r_[X[:, 0], 9], -4, 4)
    hats = [np.interp(cut, [-4, -2, 0, 2, 4], unit) for unit in np.eye(5)]
    np.testing.assert_allclose(found[:, 4:].T, hats, atol=1e-12)
    np.testing.assert_allclose(found[:, 1:4].sum(axis=1), 1)
    np.testing.assert_array_equal(found[:, 0], np.r_[2 * X[:, 2] - 1, 1])
    assert columns.width == found.shape[1] == 9


def test_a_record_is_mapped_by_itself():
    """The knots do not move with the other records."""
    columns = Columns.of(BOUNDS, [9, 9, 0], ["a", "b", "c"])
    alone = np.vstack([columns.apply(row[None]) for row in X[:50]])
    np.testing.assert_array_equal(columns.apply(X)[:50], alone)


@pytest.mark.parametrize("normalization", ["scale", "clip"])
@pytest.mark.parametrize("preprocessing", [None, "whiten"])
def test_hat_functions_are_brought_to_their_norm(normalization, preprocessing, monkeypatch):
    norms, gradient_sum = [], estimators.gradient_sum

    def spied(loss, clip_norm, records, *rest):
        norms.append(records.norms.max())
        return gradient_sum(loss, clip_norm, records, *rest)

    monkeypatch.setattr(estimators, "gradient_sum", spied)
    classifier(normalization=normalization, feature_norm=0.5, preprocessing=preprocessing).fit(
        X, LABELS
    )
    assert max(norms) <= 0.5 * math.hypot(1, 0.3) * (1 + 1e-12)


def test_what_no_line_tells_apart():
    model = classifier().fit(X, LABELS)
    assert model.score(X, LABELS) > 0.85 > classifier(splines=None).fit(X, LABELS).score(X, LABELS)
    assert model.coef_.shape == (1, 19)
    assert model.n_features_in_ == 3
    assert "splines=[9, 9, 0]" in model.report_
    regressor = PrivateRegressor(target_bounds=(0, 4), column_bounds=BOUNDS, splines=9)
    assert regressor.fit(X, np.abs(X[:, 0])).score(X, np.abs(X[:, 0])) > 0.5
    with pytest.raises(AttributeError, match="no one number says what a column does"):
        _ = regressor.coef_of_columns_


def test_the_arguments_are_public_numbers():
    np.testing.assert_array_equal(Columns.of((0, 1), np.array([2, 0]), ["a", "b"]).knots, [2, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column_bounds": None}, "column_bounds beside splines"),
        ({"splines": 1}, "at least 2"),
        ({"splines": [9, 9]}, "for 3 columns"),
        ({"splines": 9.0}, "at least 2"),
        ({"splines": "nine"}, "at least 2"),
        ({"preprocessing": "whiten", "epsilon": 0.01}, "of 19 columns"),
    ],
)
def test_refused_before_training(changes, message, monkeypatch):
    monkeypatch.setattr(
        "hidden_state_adapters.recipe.Recipe.train", lambda *_: pytest.fail("trained")
    )
    with pytest.raises(ValueError, match=message):
        classifier(**changes).fit(X, LABELS)
