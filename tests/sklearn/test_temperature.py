"""One temperature for probabilities: what one record moves, what it costs, and what it is worth."""

import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.metrics import log_loss

from hidden_state_adapters.sklearn import PrivateClassifier
from hidden_state_adapters.temperature import RECORD_NORM, best_scale, clipped_losses

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


def fitted(**changes):
    return PrivateClassifier(**{"classes": [0, 1], **changes}).fit(X, HARD)


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
def test_it_is_accounted_with_the_rest(relation):
    model = fitted(neighboring_relation=relation)
    assert 0.9999 < model.guarantee_.epsilon(1e-5) <= 1
    clips = 2 if relation == "REPLACE_ONE" else 1
    parts = [
        clips / model._recipe.temperature.noise_multiplier,
        clips / model._recipe.statistics.noise_multiplier,
        8 * clips / model._recipe.run.event.noise_multiplier,
    ]
    assert model.guarantee_.mu == pytest.approx(np.linalg.norm(parts), rel=1e-6)
    assert parts[0] ** 2 == pytest.approx(0.03 * model.guarantee_.mu**2, rel=1e-3)
    assert "the losses at four temperatures" in model.report_


def test_the_noise_is_the_accounted_one(monkeypatch):
    drawn = []
    from hidden_state_adapters.own_noise import OwnGenerator

    normal = OwnGenerator.normal
    monkeypatch.setattr(
        OwnGenerator,
        "normal",
        lambda s, std, shape: (drawn.append((std, shape)), normal(s, std, shape))[1],
    )
    model = fitted()
    multiplier = model._recipe.temperature.noise_multiplier
    assert drawn[-1] == (pytest.approx(RECORD_NORM * multiplier), (4,))


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
    assert plain._recipe.temperature is None
    assert log_loss(HARD, plain.predict_proba(X)) > np.mean(losses)


def test_it_is_not_released_where_its_noise_exceeds_its_use():
    model = fitted(epsilon=0.05)
    assert model._recipe.temperature is None
    assert model.temperature_ == 1
