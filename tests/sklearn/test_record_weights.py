"""Weights of classes and records: public, at most 1, and nothing that is accounted changes."""

import warnings

import numpy as np
import pytest

pytest.importorskip("sklearn")

from hidden_state_adapters.sklearn import (
    PrivateClassifier,
    PrivateRegressor,
    UnaccountedStepWarning,
)
from hidden_state_adapters.sklearn.record_weights import class_weights
from hidden_state_adapters.sklearn.records import Records, gradient_sum

pytestmark = pytest.mark.filterwarnings(  # the same records in every test
    "ignore::hidden_state_adapters.sklearn.PrivacyBudgetWarning"
)

rng = np.random.default_rng(4)
LABELS = (rng.random(2000) < 0.1).astype(int)
X = np.c_[LABELS + 0.7 * rng.normal(size=2000), np.ones(2000)]


def classifier(**changes):
    settings = dict(epsilon=3.0, classes=[0, 1])
    settings |= {"preprocessing": None, "calibrate": False}
    return PrivateClassifier(**{**settings, **changes})


def test_weights_change_the_model_and_not_the_event():
    plain = classifier().fit(X, LABELS)
    weighted = classifier(class_weight={1: 9.0}).fit(X, LABELS)
    by_record = classifier().fit(X, LABELS, np.where(LABELS, 1.0, 1 / 9))
    assert weighted.privacy_event_ == plain.privacy_event_ == by_record.privacy_event_
    rare = LABELS == 1
    for model in (weighted, by_record):
        assert model.predict(X)[rare].mean() > plain.predict(X)[rare].mean() + 0.2
    assert "the weights of the classes, {1: 9.0}" in weighted.report_
    assert "the weight of every record is a function of it alone" in by_record.report_
    assert "weight of every record" not in plain.report_


def test_weights_that_were_computed_from_the_labels_are_warned_of():
    counts = np.bincount(LABELS)
    balanced = {label: 2000 / (2 * count) for label, count in enumerate(counts)}
    with pytest.warns(UnaccountedStepWarning, match="computed from these very labels"):
        classifier(class_weight=balanced).fit(X, LABELS)
    with pytest.warns(UnaccountedStepWarning, match="computed from these very labels"):
        classifier().fit(X, LABELS, counts.min() / counts[LABELS])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnaccountedStepWarning)
        classifier(class_weight={0: 0.1, 1: 0.9}).fit(X, LABELS)
        classifier().fit(X, LABELS, np.full(2000, 0.5))
        classifier().fit(X, LABELS, np.zeros(2000))


def test_the_gradient_of_a_record_is_clipped_and_then_weighted():
    clip_norm = classifier().fit(X, LABELS).privacy_event_.clip_norm
    weights_of_records = np.random.default_rng(5).random(2000)
    weights_of_records[0] = 0.0

    def sum_of(rows, factors):
        targets = LABELS[rows, None].astype(float)
        records = Records.of(X[rows], 1.0, "scale", 0.3)
        given = None if factors is None else factors[rows]
        return gradient_sum(
            "logistic", clip_norm, records, lambda part: targets[part], np.ones((3, 1)), given
        )

    for row in range(5):
        alone = sum_of([row], None)
        weighted = sum_of([row], weights_of_records)
        np.testing.assert_allclose(weighted, weights_of_records[row] * alone, atol=1e-15)
        assert np.linalg.norm(weighted) <= clip_norm * weights_of_records[row] * (1 + 1e-12)
    parts = [sum_of([row], weights_of_records) for row in (3, 1, 8)]
    np.testing.assert_allclose(sum_of([3, 1, 8], weights_of_records), sum(parts), atol=1e-14)


def test_class_weights_are_relative_to_the_largest():
    classes = np.array(["a", "b", "c"])
    np.testing.assert_allclose(class_weights({"b": 4.0, "c": 0.5}, classes), [0.25, 1.0, 0.125])
    assert class_weights(None, classes) is None


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        ("balanced", ValueError, "how often a label occurs is private"),
        ([1.0, 2.0], TypeError, "a dictionary from labels"),
        ({2: 1.0}, ValueError, "labels among classes"),
        ({1: 0.0}, ValueError, "> 0"),
        ({1: -1.0}, ValueError, "> 0"),
        ({1: float("inf")}, ValueError, "class_weight"),
    ],
)
def test_class_weights_that_are_refused(weight, error, message):
    with pytest.raises(error, match=message):
        classifier(class_weight=weight).fit(X, LABELS)


def test_sample_weights_that_are_refused():
    regressor = PrivateRegressor(target_bounds=(0, 1))
    for model in (classifier(), regressor):
        for bad in (1.5, -0.1, np.nan):
            weights = np.ones(2000)
            weights[7] = bad
            with pytest.raises(ValueError, match="largest one that there can be"):
                model.fit(X, LABELS, weights)
        with pytest.raises(ValueError, match="shape"):
            model.fit(X, LABELS, np.ones(3))
    assert not hasattr(regressor, "privacy_event_")
    assert regressor.fit(X, LABELS, np.ones(2000)).coef_.shape == (2,)


def test_one_of_many_records_in_float32_moves_the_sum_by_no_more_than_its_gradient():
    """A float32 sum of so many is rounded by some per cent of the clip norm, either way."""
    n, clip_norm, random = 2**18, 0.3, np.random.default_rng(1)
    records, targets = (
        Records.of(np.ones((n, 1), "float32"), 1.0, "clip", 0.0),
        np.full((n, 1), -1.0),
    )

    def sum_of(factors):
        return gradient_sum(
            "squared_error",
            clip_norm,
            records,
            lambda part: targets[part],
            np.zeros((2, 1)),
            factors,
        )

    for _ in range(20):
        factors = np.full(n, random.uniform(0.5, 1))
        row = random.integers(n)
        factors[row] = 1.0
        there = sum_of(factors)
        factors[row] = 0.0
        assert np.linalg.norm(there - sum_of(factors)) <= clip_norm * (1 + 1e-9)
