"""What is released beside the steps: how far one record moves it, its noise, and its account.

Means and scales of the columns, moments, losses at four temperatures, residuals.
"""

import itertools
import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from dp_accounting import GaussianDpEvent, NeighboringRelation
from scipy import sparse
from sklearn.metrics import log_loss

import hidden_state_accountants as hsa
from hidden_state_accountants.calibration import gaussian_log_mu
from hidden_state_adapters.own_noise import OwnGenerator
from hidden_state_adapters.recipe import shrunk
from hidden_state_adapters.sklearn import PrivateClassifier, PrivateRegressor
from hidden_state_adapters.sklearn.preprocessing import (
    STEPS,
    Statistics,
    column_sums,
    moment_sum,
    record_norm,
    release_statistics,
)
from hidden_state_adapters.temperature import (
    RECORD_NORM,
    best_scale,
    clipped_losses,
    public_scale,
)
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
rng = np.random.default_rng(3)
LABELS = rng.integers(2, size=2000)
# Two classes a little apart, far from the origin, in columns of unequal scale.
X = np.c_[LABELS - 0.5, np.zeros((2000, 2))] + 0.2 * rng.normal(size=(2000, 3))
X = X * [1.0, 0.5, 0.1] + [3.0, -2.0, 1.0]
D = 10
STDS = 0.6 ** np.arange(D)


def like_a_network(labels):
    """Labels in a direction of which there is little, far from the origin: one column of ten."""
    x = STDS * rng.normal(size=(len(labels), D)) + 1.0
    x[:, 7] += STDS[7] * 3 * (labels - 0.5)
    return x


FEATURES = like_a_network(LABELS)
PUBLIC = like_a_network(np.zeros(200))  # of one class
HARD = (rng.normal(size=2000) / 3 + X[:, 0] > 3).astype(int)
SKEWED = np.clip(rng.lognormal(0, 1, size=2000), 0, 9)


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch):
    """Records are worked on in several parts, as large data are."""
    monkeypatch.setattr("hidden_state_adapters.sklearn.records._BLOCK", 900)


def silent(std, shape):
    return np.zeros(shape)


def classifier(**changes):
    settings = dict(epsilon=1.0, classes=[0, 1], calibrate=False)
    return PrivateClassifier(**{**settings, **changes})


@pytest.fixture
def drawn(monkeypatch):
    """Standard deviation and shape of everything that is drawn."""
    found, normal = [], OwnGenerator.normal

    def recorded(self, std, shape):
        found.append((std, shape))
        return normal(self, std, shape)

    monkeypatch.setattr(OwnGenerator, "normal", recorded)
    return found


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("normalization", ["scale", "clip"])
@pytest.mark.parametrize("norm", [0.5, 7.0])
def test_one_record_moves_the_sum_by_no_more_than_its_norm(step, normalization, norm):
    """Records along an axis, along the diagonal, and the longest and shortest there are."""
    longest, random = 0.0, np.random.default_rng(4)
    records = [*np.eye(4), *(10 * np.eye(4)), np.ones(4), -np.eye(4)[0]]
    records += [np.full(4, 1e20), np.full(4, 1e-40)]
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
    first = np.array([0.7, 0.2, -0.1]) / math.sqrt(0.54)  # the first record, centred
    np.testing.assert_allclose(alone[0] / np.trace(alone[0]), np.outer(first, first))
    gaps = [np.linalg.norm(a - b) for a, b in itertools.combinations(alone, 2)]
    assert max(gaps) <= 2 * replaced * (1 + 1e-12)
    perpendicular = [np.outer(row, row) for row in np.eye(3)]
    assert np.linalg.norm(perpendicular[0] - perpendicular[1]) == pytest.approx(2 * replaced)


@pytest.mark.parametrize("outputs", [1, 2, 10])
def test_no_record_moves_the_losses_by_more_than_its_norm(outputs):
    """By attack: logits of all sizes, the likeliest label and the least likely one."""
    random, longest = np.random.default_rng(0), 0.0
    for size in (0.0, 1e-3, 1.0, 5.0, 1e3, 1e150):
        logits = size * random.normal(size=(20, outputs))
        labels = random.integers(max(outputs, 2), size=20)
        labels[:10] = logits[:10].argmin(axis=1)
        weights = random.uniform(size=20)
        whole = clipped_losses(logits, labels, weights)
        for row in range(20):
            alone = clipped_losses(logits[[row]], labels[[row]])
            longest = max(longest, np.linalg.norm(alone))
            assert np.linalg.norm(alone) <= RECORD_NORM * (1 + 1e-12)
            other = clipped_losses(
                np.delete(logits, row, 0), np.delete(labels, row), np.delete(weights, row)
            )
            np.testing.assert_allclose(whole - other, weights[row] * alone, atol=1e-9)
    assert longest == pytest.approx(RECORD_NORM)  # nothing is wasted


@pytest.mark.parametrize("relation", RELATIONS)
def test_no_residual_moves_the_shift_by_more_than_accounted(relation, monkeypatch):
    """By attack: the last of the draws, for the targets at both bounds and a weight of zero."""
    recipe = (
        PrivateRegressor(target_bounds=(-1, 1), neighboring_relation=relation)
        .fit(X, SKEWED / 9)
        ._recipe
    )
    monkeypatch.setattr(OwnGenerator, "normal", lambda self, std, shape: np.zeros(shape))
    rest = np.linspace(-2, 2, 1999)
    shifts = [
        recipe.shift(lambda last=last: np.r_[rest, last][:, None], OwnGenerator())
        for last in (0.0, -2.0, 2.0)
    ]
    moved = 2000 * np.abs(np.diff(shifts, prepend=shifts[0]))
    assert moved == pytest.approx([0, 0.5, 1.0])
    norms = 2 if relation == "REPLACE_ONE" else 1
    share = norms / recipe.correction.noise_multiplier
    assert share**2 == pytest.approx(0.03 * recipe.guarantee().mu ** 2, rel=1e-3)


@pytest.mark.parametrize("relation", RELATIONS)
def test_all_that_is_drawn_is_accounted(relation, drawn):
    """The squared mu from what is drawn and from how far a record moves what it is drawn for."""
    model = classifier(neighboring_relation=relation, preprocessing="whiten", calibrate=True)
    model.fit(FEATURES, LABELS)
    (mean, of_mean), (moment, of_moment), *steps, (losses, four) = drawn
    assert (of_mean, of_moment, four) == ((2, D), (D, D), (4,))
    zeroed = relation == "REPLACE_SPECIAL"
    clip_norm = model._recipe.run.event.gradient_bound()[0]
    moved = [(1 if zeroed else 2, mean), (1 if zeroed else math.sqrt(2), moment)]
    moved += [(RECORD_NORM * (1 if zeroed else 2), losses)]
    moved += [((1 if zeroed else 2) * clip_norm, std) for std, _ in steps]
    mu = math.sqrt(sum((distance / std) ** 2 for distance, std in moved))
    assert model.guarantee_.mu == pytest.approx(mu, rel=1e-5)
    assert 0.999 < model.guarantee_.epsilon(1e-5) <= 1
    first, second, _, last = model.privacy_event_.events
    assert isinstance(first, GaussianDpEvent)
    assert isinstance(second, GaussianDpEvent)
    assert isinstance(last, GaussianDpEvent)
    assert (RECORD_NORM / losses) ** 2 == pytest.approx(
        0.03 * model.guarantee_.mu**2 / (1 if zeroed else 4), rel=1e-3
    )
    composed = hsa.LastIterateAccountant(relation).compose(model.privacy_event_)
    assert model.guarantee_.epsilon(1e-5) == composed.get_epsilon(1e-5)
    assert "the losses at four temperatures" in model.report_
    assert "the second moment of the centred features" in model.report_


def test_every_entry_of_the_sum_gets_noise_of_its_own():
    noise = np.random.default_rng(4).normal(size=(3, 3))
    found = noisy_moment(np.eye(3), 5.0, lambda std, shape: std * noise)
    np.testing.assert_allclose(found, np.eye(3) + 5.0 * (noise + noise.T) / 2)


def test_what_is_used_of_the_records_is_the_noisy_sum_alone():
    """Other records with the same sum have the same statistics."""
    one = np.array([[0.6, 0.0], [0.0, 0.6], [0.3, 0.3]])
    for step in STEPS:
        noise = np.random.default_rng(4).normal(size=(2, 2))
        found = [
            release_statistics(rows, step, 1.0, "clip", 0.1, lambda *_, n=noise: n)
            for rows in (one, one[[2, 1, 0]])
        ]
        for name in ("means", "factors"):
            a, b = (getattr(f, name) for f in found)
            assert (a is None) == (b is None)
            assert a is None or np.allclose(a, b)


# What they are worth.


def test_without_noise_columns_have_mean_zero_and_equal_scale():
    z = release_statistics(X, "standardize", 5.0, "clip", 0.0, silent).apply(X, 5.0, "clip")
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose((z**2).mean(axis=0)[:2], 25 / 3, rtol=0.5)
    constant = np.ones((50, 2))
    flat = release_statistics(constant, "standardize", 1.0, "scale", 1.0, silent)
    assert np.isfinite(flat.apply(constant, 1.0, "scale")).all()


def test_noise_shrinks_means_and_a_scale_is_that_of_the_least_loss():
    means, exponents = np.array([3.0, 4.0, 0.0]), np.arange(-3, 1)
    for std, factor in ((2.0, 0.84), (9.0, 0.0)):
        np.testing.assert_allclose(shrunk(means, std), factor * means)
    assert best_scale((exponents + 1.5) ** 2) == pytest.approx(2**-1.5)
    assert best_scale(np.array([0.0, 1.0, 0.5, -1.0])) == 1.0  # noise that is not convex


def test_sparse_records_are_scaled_like_dense_ones():
    dense = X * (np.random.default_rng(4).random(size=X.shape) < 0.3)
    ours, theirs = (
        release_statistics(kind(dense), "scale", 1.0, "clip", 0.0, silent)
        for kind in (np.asarray, sparse.csr_matrix)
    )
    scaled = theirs.apply(sparse.csr_array(dense), 1.0, "clip")
    assert sparse.issparse(scaled)
    np.testing.assert_allclose(scaled.toarray(), ours.apply(dense, 1.0, "clip"))
    rows = sparse.csr_matrix(X)
    assert classifier(preprocessing="scale").fit(rows, LABELS).predict(rows).shape == (2000,)


def test_the_report_names_the_statistics_and_counts_them_for_every_iterate():
    model = classifier().fit(X, LABELS)
    report = model.report_
    assert "preprocessing='center'" in report
    every = hsa.LastIterateAccountant().compose(model.privacy_event_.events[0])
    every.compose(model.privacy_event_.events[1].as_composition("REPLACE_SPECIAL"))
    (line,) = (line for line in report.splitlines() if line.startswith("epsilon if every"))
    assert float(line.split(": ")[1]) == pytest.approx(every.get_epsilon(1e-5), abs=2e-4)


@pytest.mark.parametrize("relation", RELATIONS)
def test_dense_records_are_centred_where_their_number_allows_it(relation):
    """By the shape alone: the noise in the means is no longer than a record may be."""

    def has_step(columns, **changes):
        model = classifier(neighboring_relation=relation, **changes)
        return model._chosen_step(rng.random(size=(300, columns)))

    mu = math.sqrt(0.1) * math.exp(gaussian_log_mu(1.0, 1e-5))
    most = int((300 * mu / (1 + (relation == "REPLACE_ONE"))) ** 2)
    assert 3 < most < 1000
    assert has_step(most) == "center"
    assert has_step(most + 1) is None
    assert has_step(most, preprocessing=None) is None
    assert has_step(most + 1, preprocessing="scale") == "scale"
    assert classifier()._chosen_step(sparse.csr_matrix(X)) is None


def test_noise_in_a_moment_does_not_make_its_directions_more_or_fewer():
    random = np.random.default_rng(4)
    few, many = (np.diag(np.r_[np.full(k, 1 / k), np.zeros(64 - k)]) for k in (6, 20))
    for std in (1e-6, 0.005, 0.015):
        noisy = [noisy_moment(m, std, lambda s, n: random.normal(0, s, n)) for m in (few, many)]
        assert [directions_are_few(m, std) for m in noisy] == [True, False]
    assert np.isfinite(whitening(np.zeros((2, 2)))).all()


def test_labels_in_a_direction_of_little_variance_are_found():
    fits = [{}, {"preprocessing": "whiten"}, {"public_features": PUBLIC}]
    scores = [
        np.mean([classifier(**c).fit(FEATURES, LABELS).score(FEATURES, LABELS) for _ in "123"])
        for c in fits
    ]
    assert scores[1] > scores[0] + 0.02
    assert scores[2] > scores[0] + 0.02


@pytest.mark.parametrize("preprocessing", ["auto", "center", "standardize", "whiten"])
def test_public_features_cost_nothing(preprocessing):
    model = classifier(preprocessing=preprocessing, public_features=PUBLIC).fit(FEATURES, LABELS)
    assert isinstance(model.privacy_event_, hsa.LastIterateDpEvent)
    assert "epsilon protects nobody in them" in model.report_
    assert "released once" not in model.report_
    units = PUBLIC / np.linalg.norm(PUBLIC, axis=1, keepdims=True)
    np.testing.assert_allclose(model._statistics.means, units.mean(axis=0))
    assert (model._statistics.whitening is not None) == (preprocessing in ("auto", "whiten"))


def test_public_features_are_cut_at_the_bounds_of_the_columns():
    bounds = [(-2, 4)] * D
    found = [
        classifier(public_features=public, column_bounds=bounds)
        .fit(FEATURES, LABELS)
        ._statistics.means
        for public in (10 * PUBLIC, np.clip(10 * PUBLIC, -2, 4))
    ]
    np.testing.assert_allclose(*found)


def test_probabilities_of_hard_labels_are_no_worse_than_the_base_rate_and_labels_stay():
    """And better than those of the same weights without a temperature, where no column tells."""
    models = [classifier(calibrate=True).fit(X, HARD) for _ in range(3)]
    losses = [log_loss(HARD, model.predict_proba(X)) for model in models]
    assert np.mean(losses) < math.log(2)
    untold = np.arange(2000) % 2
    unsure = classifier(calibrate=True).fit(X, untold)
    for model in (*models, unsure):
        np.testing.assert_array_equal(model.predict(X), model.predict_proba(X)[:, 1] > 0.5)
        assert 1 <= model.temperature_ <= 8
    loss = log_loss(untold, unsure.predict_proba(X))
    unsure.temperature_ = 1.0
    assert loss < log_loss(untold, unsure.predict_proba(X))
    plain = classifier().fit(X, HARD)
    assert plain.temperature_ == 1
    assert plain._recipe.correction is None


@pytest.mark.parametrize(("relation", "norms"), [("REPLACE_SPECIAL", 1), ("REPLACE_ONE", 2)])
def test_no_correction_is_released_where_its_noise_exceeds_its_use(relation, norms):
    model = classifier(epsilon=0.05, neighboring_relation=relation, calibrate=True).fit(X, HARD)
    assert model._recipe.correction is None
    records = 2000 * math.exp(gaussian_log_mu(0.05, 1e-5)) / norms
    assert model.temperature_ == pytest.approx(1 / public_scale(2, records))
    model = PrivateRegressor(0.05, target_bounds=(0, 9)).fit(X, SKEWED)
    assert model._recipe.correction is None
    assert public_scale(2, 5) < public_scale(2, 1e6) < public_scale(10, 1e6) < 1


def test_predictions_of_skewed_targets_have_their_mean(drawn):
    errors = []
    for calibrate in (True, False):
        model = PrivateRegressor(3.0, target_bounds=(0, 9), calibrate=calibrate).fit(X, SKEWED)
        if calibrate:
            std = 0.5 * model._recipe.correction.noise_multiplier
            assert drawn[-1] == (pytest.approx(std), (1,))
        errors.append(abs(np.mean(SKEWED - model.predict(X))))
        assert 2.999 < model.guarantee_.epsilon(1e-5) <= 3
        assert ("the sum of the residuals" in model.report_) == calibrate
    assert errors[0] < 0.85 * errors[1]
    through_zero = PrivateRegressor(target_bounds=(-9, 9), fit_intercept=False).fit(X, SKEWED)
    assert through_zero._recipe.correction is None
    assert through_zero.intercept_ == 0
