"""Public numbers about columns, classes and records: bounds, hat functions, weights."""

import math
import warnings

import numpy as np
import pytest

pytest.importorskip("sklearn")

from hidden_state_adapters.sklearn import (
    PrivateClassifier,
    PrivateRegressor,
    UnaccountedStepWarning,
    estimators,
)
from hidden_state_adapters.sklearn.columns import Columns
from hidden_state_adapters.sklearn.record_weights import class_weights

pytestmark = pytest.mark.filterwarnings(  # the same records in every test
    "ignore::hidden_state_adapters.sklearn.PrivacyBudgetWarning"
)

rng = np.random.default_rng(6)
X = np.c_[rng.uniform(-4, 4, size=(2000, 2)), rng.integers(2, size=2000)]
LABELS = (np.abs(X[:, 0]) > 2).astype(int)  # no line tells them apart
BOUNDS = [(-4, 4), (-4, 4), (0, 1)]
RARE = (rng.random(2000) < 0.1).astype(int)
ROWS = np.c_[RARE + 0.7 * rng.normal(size=2000), np.ones(2000)]


def classifier(**changes):
    settings = dict(epsilon=1.0, classes=[0, 1], column_bounds=BOUNDS, splines=[9, 9, 0])
    return PrivateClassifier(**{**settings, **changes})


def weighted(weight=None):
    options = dict(epsilon=3.0, classes=[0, 1], preprocessing=None, calibrate=False)
    return PrivateClassifier(class_weight=weight, **options)


def test_a_column_is_linear_between_its_knots():
    columns = Columns.of(BOUNDS, [5, 3, 0], ["a", "b", "c"])
    found = columns.apply(np.vstack([X, [[9, -9, 5]]]))
    cut = np.clip(np.r_[X[:, 0], 9], -4, 4)
    hats = [np.interp(cut, [-4, -2, 0, 2, 4], unit) for unit in np.eye(5)]
    np.testing.assert_allclose(found[:, 4:].T, hats, atol=1e-12)
    np.testing.assert_allclose(found[:, 1:4].sum(axis=1), 1)
    np.testing.assert_array_equal(found[:, 0], np.r_[2 * X[:, 2] - 1, 1])
    assert columns.width == found.shape[1] == 9
    alone = np.vstack([columns.apply(row[None]) for row in X[:50]])
    np.testing.assert_array_equal(found[:50], alone)  # no knot moves with the other records


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


# Weights.


def test_weights_change_the_model_and_not_the_event():
    plain = weighted().fit(ROWS, RARE)
    by_class = weighted({1: 9.0}).fit(ROWS, RARE)
    by_record = weighted().fit(ROWS, RARE, np.where(RARE, 1.0, 1 / 9))
    both = weighted({1: 9.0}).fit(ROWS, RARE, 1.0 - RARE)  # of the rare ones nothing is left
    for model in (by_class, by_record, both):
        assert model.privacy_event_ == plain.privacy_event_
    classes = np.array(["a", "b", "c"])
    np.testing.assert_allclose(class_weights({"b": 4.0, "c": 0.5}, classes), [0.25, 1.0, 0.125])
    rare = RARE == 1
    for model in (by_class, by_record):
        assert model.predict(ROWS)[rare].mean() > plain.predict(ROWS)[rare].mean() + 0.2
        assert model.predict(ROWS)[rare].mean() > both.predict(ROWS)[rare].mean() + 0.2
    assert "the weights of the classes, {1: 9.0}" in by_class.report_
    assert "the weight of every record is a function of it alone" in by_record.report_
    assert "weight of every record" not in plain.report_


def test_weights_that_were_computed_from_the_labels_are_warned_of():
    counts = np.bincount(RARE)
    balanced = {label: 2000 / (2 * count) for label, count in enumerate(counts)}
    with pytest.warns(UnaccountedStepWarning, match="computed from these very labels"):
        weighted(balanced).fit(ROWS, RARE)
    with pytest.warns(UnaccountedStepWarning, match="computed from these very labels"):
        weighted().fit(ROWS, RARE, counts.min() / counts[RARE])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnaccountedStepWarning)
        weighted({0: 0.1, 1: 0.9}).fit(ROWS, RARE)
        weighted().fit(ROWS, RARE, np.full(2000, 0.5))
        weighted().fit(ROWS, RARE, np.zeros(2000))


def test_sample_weights_that_are_refused():
    regressor = PrivateRegressor(target_bounds=(0, 1))
    for model in (weighted(), regressor):
        for bad in (1.5, -0.1, np.nan):
            weights = np.ones(2000)
            weights[7] = bad
            with pytest.raises(ValueError, match="largest one that there can be"):
                model.fit(ROWS, RARE, weights)
        with pytest.raises(ValueError, match="shape"):
            model.fit(ROWS, RARE, np.ones(3))
    assert not hasattr(regressor, "privacy_event_")
    assert regressor.fit(ROWS, RARE, np.ones(2000)).coef_.shape == (2,)
