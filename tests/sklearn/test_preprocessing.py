"""Statistics of the columns: what one record moves, what is released, and what it costs."""

import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from dp_accounting import ComposedDpEvent, GaussianDpEvent
from scipy import sparse

import hidden_state_accountants as hsa
from hidden_state_accountants.calibration import gaussian_log_mu
from hidden_state_adapters.recipe import shrunk
from hidden_state_adapters.sklearn import PrivateClassifier, PrivateRegressor
from hidden_state_adapters.sklearn.preprocessing import (
    STEPS,
    Statistics,
    column_sums,
    record_norm,
    release_statistics,
)

pytestmark = pytest.mark.filterwarnings(  # the same records in every test
    "ignore::hidden_state_adapters.sklearn.PrivacyBudgetWarning"
)

rng = np.random.default_rng(3)
LABELS = rng.integers(2, size=2000)
# Two classes a little apart, far from the origin, in columns of unequal scale.
X = (np.c_[LABELS - 0.5, np.zeros((2000, 2))] + 0.2 * rng.normal(size=(2000, 3))) * [
    1.0,
    0.5,
    0.1,
] + [3.0, -2.0, 1.0]


def silent(std, shape):
    return np.zeros(shape)


def classifier(**changes):
    settings = dict(epsilon=1.0, classes=[0, 1], calibrate=False)
    return PrivateClassifier(**{**settings, **changes})


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("normalization", ["scale", "clip"])
@pytest.mark.parametrize("norm", [0.5, 7.0])
def test_one_record_moves_the_sum_by_no_more_than_its_norm(step, normalization, norm):
    """Records along an axis, along the diagonal, and the longest and shortest there are."""
    longest, random = 0.0, np.random.default_rng(4)
    records = [
        *np.eye(4),
        *(10 * np.eye(4)),
        np.ones(4),
        -np.eye(4)[0],
        np.full(4, 1e20),
        np.full(4, 1e-40),
    ]
    records += [*random.normal(size=(50, 4)) * np.exp(3 * random.normal(size=(50, 1)))]
    sums = [column_sums(row[None], step, norm, normalization) for row in records]
    rest = random.normal(size=(5, 4))
    for row, alone in zip(records, sums, strict=True):
        zeroed = column_sums(np.vstack([rest, np.zeros(4)]), step, norm, normalization)
        moved = column_sums(np.vstack([rest, row]), step, norm, normalization) - zeroed
        np.testing.assert_allclose(moved, alone, atol=1e-12)
        longest = max(longest, np.linalg.norm(moved))
        assert np.linalg.norm(moved) <= record_norm(step) * (1 + 1e-12)
        for other in sums:  # replaced by another one
            assert np.linalg.norm(alone - other) <= 2 * record_norm(step) * (1 + 1e-12)
    # Nothing is wasted: what is longer than feature_norm is as long as a record can be.
    assert longest == pytest.approx(record_norm(step))


@pytest.mark.parametrize("step", STEPS)
def test_the_noise_on_the_sum_is_the_multiplier_times_its_bound(step):
    drawn = []

    def normal(std, shape):
        drawn.append((std, shape))
        return np.zeros(shape)

    release_statistics(X, step, 1.0, "clip", 5.0, normal)
    assert drawn == [(5.0 * math.sqrt(sum(STEPS[step])), (2, 3))]


def test_what_is_used_of_the_records_is_the_noisy_sum_alone():
    """Other records with the same sum have the same statistics."""
    one = np.array([[0.6, 0.0], [0.0, 0.6], [0.3, 0.3]])
    other = one[::-1].copy()
    other[0], other[1] = [0.3, 0.3], [0.0, 0.6]
    for step in STEPS:
        noise = np.random.default_rng(4).normal(size=(2, 2))
        found = [
            release_statistics(m, step, 1.0, "clip", 0.1, lambda *_, n=noise: n)
            for m in (one, other)
        ]
        for name in ("means", "factors"):
            a, b = (getattr(f, name) for f in found)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a, b)


def test_without_noise_columns_have_mean_zero_and_equal_scale():
    found = release_statistics(X, "standardize", 5.0, "clip", 0.0, silent)
    z = found.apply(X, 5.0, "clip")
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose((z**2).mean(axis=0)[:2], 25 / 3, rtol=0.5)
    centered = release_statistics(X, "center", 5.0, "clip", 0.0, silent).apply(X, 5.0, "clip")
    np.testing.assert_allclose(centered, X - X.mean(axis=0), atol=1e-12)
    constant = np.ones((50, 2))
    flat = release_statistics(constant, "standardize", 1.0, "scale", 1.0, silent)
    assert np.isfinite(flat.apply(constant, 1.0, "scale")).all()


def test_means_that_are_mostly_noise_move_nothing():
    """Without this, few records with a small epsilon are worse off than without centring."""
    truth, std = np.full(50, 0.1), 0.3
    noisy = truth + std * np.random.default_rng(4).normal(size=(200, 50))
    found = np.array([shrunk(row, std) for row in noisy])
    errors = [np.mean((means - truth) ** 2) for means in (found, noisy, 0 * noisy)]
    assert errors[0] < 0.2 * errors[1]
    assert errors[0] < 1.3 * errors[2]
    np.testing.assert_allclose(shrunk(truth, 1e-6), truth, rtol=1e-6)
    np.testing.assert_array_equal(shrunk(np.zeros(3), 1.0), 0)


def test_sparse_records_are_scaled_like_dense_ones():
    dense = X * (np.random.default_rng(4).random(size=X.shape) < 0.3)
    found = [
        release_statistics(kind(dense), "scale", 1.0, "clip", 0.0, silent)
        for kind in (np.asarray, sparse.csr_matrix)
    ]
    np.testing.assert_allclose(found[0].factors, found[1].factors)
    scaled = found[0].apply(sparse.csr_array(dense), 1.0, "clip")
    assert sparse.issparse(scaled)
    np.testing.assert_allclose(scaled.toarray(), found[0].apply(dense, 1.0, "clip"))
    rows = sparse.csr_matrix(X)
    assert classifier(preprocessing="scale").fit(rows, LABELS).predict(rows).shape == (2000,)


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
def test_statistics_and_training_meet_the_target_together(relation):
    model = classifier(preprocessing="standardize", neighboring_relation=relation).fit(X, LABELS)
    assert isinstance(model.privacy_event_, ComposedDpEvent)
    statistics, run = model.privacy_event_.events
    assert isinstance(statistics, GaussianDpEvent)
    both = hsa.LastIterateAccountant(relation).compose(model.privacy_event_).get_epsilon(1e-5)
    assert model.guarantee_.epsilon(1e-5) == both
    assert 0.99 < both <= 1
    alone = [
        hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-5)
        for event in (statistics, run)
    ]
    assert 0.15 < alone[0] < 0.4 < 0.9 < alone[1] < both


def test_the_report_names_the_statistics_and_counts_them_for_every_iterate():
    model = classifier(preprocessing="center").fit(X, LABELS)
    report = model.report_
    assert "preprocessing='center'" in report
    every = hsa.LastIterateAccountant().compose(model.privacy_event_.events[0])
    every.compose(model.privacy_event_.events[1].as_composition("REPLACE_SPECIAL"))
    (line,) = (line for line in report.splitlines() if line.startswith("epsilon if every"))
    assert float(line.split(": ")[1]) == pytest.approx(every.get_epsilon(1e-5), abs=2e-4)


def test_centring_helps_where_all_records_point_the_same_way():
    scores = [
        np.mean(
            [
                classifier(epsilon=0.1, preprocessing=p).fit(X, LABELS).score(X, LABELS)
                for _ in range(10)
            ]
        )
        for p in (None, "center")
    ]
    assert scores[1] > max(0.9, scores[0] + 0.02)
    y = X @ [1.0, 0.0, 0.0]
    model = PrivateRegressor(
        epsilon=3.0, target_bounds=(2, 4), feature_norm=5.0, preprocessing="standardize",
    )  # fmt: skip
    assert model.fit(X, y).score(X, y) > 0.7


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
def test_dense_records_are_centred_where_their_number_allows_it(relation):
    """By the shape alone: the noise in the means is no longer than a record may be."""

    def has_step(rows, columns, **changes):
        # Of the largest number of columns that is still centred, and of one more.
        X = np.random.default_rng(0).random(size=(rows, columns))
        model = classifier(neighboring_relation=relation, **changes)
        return model._chosen_step(X)

    rows = 300
    most = int((rows / release_noise(1.0, relation)) ** 2)
    assert 3 < most < 1000
    assert has_step(rows, most) == "center"
    assert has_step(rows, most + 1) is None
    assert has_step(rows, most, preprocessing=None) is None
    assert has_step(rows, most + 1, preprocessing="scale") == "scale"


def release_noise(epsilon, relation):
    """Of the mechanism that spends a tenth of the squared mu of the target."""
    mu = math.sqrt(0.1) * math.exp(gaussian_log_mu(epsilon, 1e-5))
    return (1 + (relation == "REPLACE_ONE")) / mu


def test_the_default_centres_and_says_so():
    model = classifier().fit(X, LABELS)
    assert model.preprocessing == "auto"
    assert "preprocessing='center'" in model.report_
    assert isinstance(model.privacy_event_, ComposedDpEvent)
    few = classifier(epsilon=0.003).fit(X, LABELS)
    assert isinstance(few.privacy_event_, hsa.LastIterateDpEvent)
    assert "preprocessing" not in few.report_
    thin = classifier().fit(sparse.csr_matrix(X), LABELS)
    assert isinstance(thin.privacy_event_, hsa.LastIterateDpEvent)


@pytest.mark.parametrize(("kind", "step"), [(np.asarray, "center"), (sparse.csr_matrix, "scale")])
def test_predictions_copy_a_bounded_number_of_records_at_once(kind, step, monkeypatch):
    rows = kind(X)
    model = classifier(preprocessing=step).fit(rows, LABELS)
    expected = model.decision_function(rows)
    sizes = []

    def spied(self, matrix, *arguments, apply=Statistics.apply):
        sizes.append(matrix.shape[0])
        return apply(self, matrix, *arguments)

    monkeypatch.setattr(Statistics, "apply", spied)
    monkeypatch.setattr("hidden_state_adapters.sklearn.records._BLOCK", 3 * 300)
    np.testing.assert_allclose(model.decision_function(rows), expected, rtol=1e-12)
    assert sizes == 6 * [300] + [200]


def test_few_features_of_many_records_are_trained_on_for_longer():
    long, short = (
        classifier(epsilon=0.3, preprocessing=None)
        .fit(np.tile(X, (1, times)), LABELS)
        ._recipe.run.event.learning_rate
        for times in (1, 100)
    )
    assert long > 1.5 * short


def test_refusals():
    with pytest.raises(ValueError, match="None or one of auto, center, scale, standardize"):
        classifier(preprocessing="l2").fit(X, LABELS)
    with pytest.raises(ValueError, match="nothing would stay sparse"):
        classifier(preprocessing="center").fit(sparse.csr_matrix(X), LABELS)
