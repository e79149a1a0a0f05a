"""Corrections after training: what one record moves, what they cost, and what they are worth."""

import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.metrics import log_loss

from hidden_state_accountants.calibration import gaussian_log_mu
from hidden_state_adapters.own_noise import OwnGenerator
from hidden_state_adapters.sklearn import PrivateClassifier, PrivateRegressor
from hidden_state_adapters.temperature import (
    RECORD_NORM,
    best_scale,
    clipped_losses,
    public_scale,
)

pytestmark = pytest.mark.filterwarnings(  # the same records in every test
    "ignore::hidden_state_adapters.sklearn.PrivacyBudgetWarning"
)


@pytest.mark.parametrize("outputs", [1, 2, 10])
def test_no_record_moves_the_sum_by_more_than_its_norm(outputs):
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


def test_the_scale_is_that_of_the_least_loss():
    random = np.random.default_rng(1)
    logits = random.normal(size=(3000, 3))
    labels = np.array(
        [random.choice(3, p=row) for row in np.exp(logits) / np.exp(logits).sum(1)[:, None]]
    )
    for factor, expected in ((1.0, 1.0), (2.0, 0.5), (5.0, 0.2), (100.0, 0.125)):
        means = clipped_losses(factor * logits, labels) / len(labels)
        assert best_scale(means) == pytest.approx(expected, rel=0.5)
    assert best_scale(np.array([0.0, 1.0, 0.5, -1.0])) == 1.0  # noise that is not convex


RNG = np.random.default_rng(2)
X = RNG.normal(size=(3000, 4))
HARD = (X[:, 0] + 3 * RNG.normal(size=3000) > 0).astype(int)
SKEWED = np.clip(RNG.lognormal(0, 1, size=3000), 0, 9)


def fitted(**changes):
    return PrivateClassifier(**{"classes": [0, 1], **changes}).fit(X, HARD)


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
def test_it_is_accounted_with_the_rest(relation):
    model = fitted(neighboring_relation=relation)
    assert 0.9999 < model.guarantee_.epsilon(1e-5) <= 1
    clips = 2 if relation == "REPLACE_ONE" else 1
    parts = [
        clips / model._recipe.correction.noise_multiplier,
        clips / model._recipe.statistics.noise_multiplier,
        8 * clips / model._recipe.run.event.noise_multiplier,
    ]
    assert model.guarantee_.mu == pytest.approx(np.linalg.norm(parts), rel=1e-6)
    assert parts[0] ** 2 == pytest.approx(0.03 * model.guarantee_.mu**2, rel=1e-3)
    assert "the losses at four temperatures" in model.report_


def test_the_noise_is_the_accounted_one(monkeypatch):
    drawn = []
    normal = OwnGenerator.normal
    monkeypatch.setattr(
        OwnGenerator,
        "normal",
        lambda s, std, shape: (drawn.append((std, shape)), normal(s, std, shape))[1],
    )
    model = fitted()
    multiplier = model._recipe.correction.noise_multiplier
    assert drawn[-1] == (pytest.approx(RECORD_NORM * multiplier), (4,))
    PrivateRegressor(target_bounds=(0, 9)).fit(X, SKEWED)
    assert drawn[-1] == (pytest.approx(0.5 * multiplier), (1,))


def test_probabilities_of_hard_labels_are_no_worse_than_the_base_rate_and_labels_stay():
    losses = []
    for _ in range(5):
        model = fitted()
        losses.append(log_loss(HARD, model.predict_proba(X)))
        np.testing.assert_array_equal(model.predict(X), model.predict_proba(X)[:, 1] > 0.5)
        assert 1 <= model.temperature_ <= 8
    assert np.mean(losses) < math.log(2) + 0.003
    plain = fitted(calibrate=False)
    assert plain.temperature_ == 1
    assert plain._recipe.correction is None
    assert log_loss(HARD, plain.predict_proba(X)) > np.mean(losses)


def test_it_is_not_released_where_its_noise_exceeds_its_use():
    for relation, records in (("REPLACE_SPECIAL", 3000), ("REPLACE_ONE", 1500)):
        model = fitted(epsilon=0.05, neighboring_relation=relation)
        assert model._recipe.correction is None
        mu = math.exp(gaussian_log_mu(0.05, 1e-5))
        assert model.temperature_ == pytest.approx(1 / public_scale(2, records * mu))
    assert fitted(epsilon=0.05, calibrate=False).temperature_ == 1
    model = PrivateRegressor(0.05, target_bounds=(0, 9)).fit(X, SKEWED)
    assert model._recipe.correction is None


def test_the_public_temperature_is_that_of_logits_with_the_noise_of_a_run():
    """Of two classes, whose own logits are spread as the noise is; less for many classes."""
    random = np.random.default_rng(3)
    for size in (1.0, 1.5):
        clear = size * random.normal(size=20_000)
        labels = (random.logistic(size=20_000) < clear).astype(int)
        seen = clear + 1.45 * random.normal(size=20_000)
        losses = [
            log_loss(labels, 1 / (1 + np.exp(-s * seen))) for s in (1.0, public_scale(2, 1e6))
        ]
        assert losses[1] < losses[0] - 0.04
    assert public_scale(2, 5) < public_scale(2, 1e6) < public_scale(10, 1e6) < 1


def test_predictions_of_skewed_targets_have_their_mean():
    errors = []
    for calibrate in (True, False):
        model = PrivateRegressor(3.0, target_bounds=(0, 9), calibrate=calibrate).fit(X, SKEWED)
        errors.append(abs(np.mean(SKEWED - model.predict(X))))
        assert 2.999 < model.guarantee_.epsilon(1e-5) <= 3
        assert ("the sum of the residuals" in model.report_) == calibrate
    assert errors[0] < errors[1] / 2
    through_zero = PrivateRegressor(target_bounds=(-9, 9), fit_intercept=False).fit(X, SKEWED)
    assert through_zero._recipe.correction is None
    assert through_zero.intercept_ == 0


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
def test_no_residual_moves_the_shift_by_more_than_accounted(relation, monkeypatch):
    """By attack: the last of the draws, for the targets at both bounds and a weight of zero."""
    recipe = (
        PrivateRegressor(target_bounds=(-1, 1), neighboring_relation=relation)
        .fit(X, SKEWED / 9)
        ._recipe
    )
    monkeypatch.setattr(OwnGenerator, "normal", lambda self, std, shape: np.zeros(shape))
    rest = np.linspace(-2, 2, 2999)
    shifts = [
        recipe.shift(lambda last=last: np.r_[rest, last][:, None], OwnGenerator())
        for last in (0.0, -2.0, 2.0)
    ]
    moved = 3000 * np.abs(np.diff(shifts, prepend=shifts[0]))
    assert moved == pytest.approx([0, 0.5, 1.0])
    norms = 2 if relation == "REPLACE_ONE" else 1
    share = norms / recipe.correction.noise_multiplier
    assert share**2 == pytest.approx(0.03 * recipe.guarantee().mu ** 2, rel=1e-3)
