"""One call for a head on features in memory: the estimator's fit, as a layer."""

import math
import sys

import numpy as np
import pytest

pytest.importorskip("opacus")
pytest.importorskip("sklearn")

import torch

from hidden_state_adapters.opacus import fit_head
from hidden_state_adapters.own_noise import OwnGenerator
from hidden_state_adapters.sklearn import PrivateClassifier, PrivateRegressor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the same records in every test

rng = np.random.default_rng(0)
N, D = 400, 6
Y = rng.integers(3, size=N)
ROWS = rng.normal(size=(N, D)) + 1.0 + 5 * np.eye(3, D)[Y]
ROWS /= np.linalg.norm(ROWS, axis=1, keepdims=True)
X, LABELS = torch.tensor(ROWS), torch.tensor(Y)


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr(OwnGenerator, "normal", lambda self, std, shape: np.zeros(shape))


def fitted(x=X, y=LABELS, **changes):
    return fit_head(x, y, **{"epsilon": 3.0, "delta": 1e-5, "classes": 3, **changes})


@pytest.mark.parametrize(
    ("classes", "preprocessing", "public", "relation"),
    [
        (2, "whiten", None, "REPLACE_ONE"),
        (3, "whiten", None, "REPLACE_SPECIAL"),
        (3, "auto", X[:50], "REPLACE_SPECIAL"),
    ],
)
def test_without_noise_it_is_the_estimator(silent, classes, preprocessing, public, relation):
    y = np.minimum(Y, classes - 1)
    options = {"classes": classes, "neighboring_relation": relation, "public_features": public}
    head, guarantee = fitted(y=torch.tensor(y), **options)
    options |= {
        "classes": list(range(classes)),
        "public_features": None if public is None else public.numpy(),
    }
    model = PrivateClassifier(3.0, 1e-5, preprocessing=preprocessing, **options).fit(ROWS, y)
    means = model._statistics.means
    rows = (ROWS - means) / math.sqrt(1 - means @ means)
    if model._statistics.whitening is not None:
        rows = rows @ model._statistics.whitening
    logits = (rows @ model.coef_.T + model.intercept_) / model.temperature_
    if classes == 2:
        logits = logits * [-0.5, 0.5]
    np.testing.assert_allclose(head(X).detach().numpy(), logits, rtol=1e-7, atol=1e-7)
    assert guarantee.epsilon(1e-5) == model.guarantee_.epsilon(1e-5)
    assert guarantee.neighboring_relation.name == relation


def test_without_noise_squared_error_is_the_estimators(silent):
    y = ROWS @ rng.normal(size=D) + 5
    head, guarantee = fitted(y=torch.tensor(y), classes=None, target_bounds=(0, 12))
    model = PrivateRegressor(
        3.0, 1e-5, target_bounds=(0, 12), preprocessing=None, calibrate=False
    ).fit(ROWS, y)
    np.testing.assert_allclose(head(X)[:, 0].detach().numpy(), model.predict(ROWS), rtol=1e-9)
    assert guarantee.epsilon(1e-5) == model.guarantee_.epsilon(1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_is_of_the_kind_of_the_features(dtype):
    x = X.to(dtype)
    before = x.clone()
    head, guarantee = fitted(x)
    assert head.weight.dtype is dtype
    assert (head.weight.shape, head.bias.shape) == ((3, D), (3,))
    assert (head(x).argmax(dim=1) == LABELS).float().mean() > 0.9
    assert torch.equal(x, before)
    assert 2.999 < guarantee.epsilon(1e-5) <= 3
    text = guarantee.explain()
    assert "the mean of the features was released once" in text
    assert "a network that did not see these records" in text


def test_features_are_centred_where_noise_would_hide_their_covariance():
    x = torch.nn.functional.normalize(torch.tensor(rng.normal(size=(N, 40))))
    texts = [fitted(x, epsilon=epsilon)[1].explain() for epsilon in (3.0, 0.5)]
    assert ["second moment" in text for text in texts] == [True, False]
    assert all("mean of the features was released" in text for text in texts)
    assert "was released once" not in fitted(epsilon=0.02, calibrate=False)[1].explain()


def test_whether_to_whiten_is_read_off_the_released_moment_alone(silent, monkeypatch):
    module, columns = sys.modules[fit_head.__module__], 40
    long = torch.nn.functional.normalize(torch.tensor(rng.normal(size=(N, columns))))
    few = torch.nn.functional.normalize(long * torch.tensor([10.0] * 4 + [1.0] * 36))
    rows = [module._Rows.of(x, 1.0, 0.3) for x in (long, few)]
    found = [r.whitened(1e-3, OwnGenerator()).whitening is not None for r in rows]
    assert found == [False, True]
    flat = N * np.eye(columns) / columns
    monkeypatch.setattr(module.whitening, "noisy_moment", lambda *_: flat)
    assert rows[1].whitened(1e-3, OwnGenerator()).whitening is None


def test_all_that_is_drawn_has_the_std_of_the_accounted_event(monkeypatch):
    drawn, normal = [], OwnGenerator.normal

    def recorded(self, std, shape):
        drawn.append((std, shape))
        return normal(self, std, shape)

    monkeypatch.setattr(OwnGenerator, "normal", recorded)
    _, guarantee = fitted(feature_norm=2.0, x=2 * X)
    (mean, shape), (moment, of_moment), *steps, (losses, four) = drawn
    assert four == (4,)
    assert (shape, of_moment) == ((D,), (D, D))
    assert set(steps) == {(steps[0][0], (D + 1, 3))}
    bound = 0.3 * 2 * math.hypot(1, 0.3) * (1 + 1e-5)
    square = (2.0 / mean) ** 2 + (1.0 / moment) ** 2 + (2.0 / losses) ** 2
    square += len(steps) * (bound / steps[0][0]) ** 2
    assert guarantee.mu == pytest.approx(math.sqrt(square), rel=1e-5)


def test_no_record_moves_the_moments_by_more_than_one(silent, monkeypatch):
    """Though rows that were centred have other norms than they had."""
    sums = []

    def recorded(total, std, normal):
        sums.append(total)
        return total

    module = sys.modules[fit_head.__module__]
    monkeypatch.setattr(module.whitening, "noisy_moment", recorded)
    means = torch.linspace(-0.9, 0.3, D, dtype=torch.float64)
    lone = torch.nn.functional.normalize(torch.eye(D, dtype=torch.float64) - 0.2)
    for x in lone:
        rows = module._Rows.of(torch.stack([x, torch.zeros_like(x)]), 1.0, 0.3)
        rows = module.attrs.evolve(rows, means=means).rescaled()
        rows.whitened(0.0, OwnGenerator())
    zeros = module.attrs.evolve(rows, features=0 * rows.features).rescaled()
    zeros.whitened(0.0, OwnGenerator())
    *found, without = sums
    np.testing.assert_allclose([np.linalg.norm(m - without / 2) for m in found], 1)


def test_no_record_moves_what_is_summed_by_more_than_its_bound(silent, monkeypatch):
    """The steps of two data sets that differ in one record, along the same weights."""
    sums = []

    def recorded(self, gradient_sum, shape, *_):
        random = np.random.default_rng(1)
        sums.append([gradient_sum(s * random.normal(size=shape)) for s in (0, 1, 100)])
        return np.zeros(shape)

    monkeypatch.setattr("hidden_state_adapters.recipe.Recipe.train", recorded)
    rows = sys.modules[fit_head.__module__]._Rows
    monkeypatch.setattr(rows, "centred", lambda self, *_: self)
    monkeypatch.setattr(rows, "whitened", lambda self, *_: self)
    zeroed = X.clone()
    zeroed[7] = 0.0
    moved = X.clone()
    moved[7] = -X[7]
    other = LABELS.clone()
    other[7] = (LABELS[7] + 1) % 3
    for x, y in ((X, LABELS), (zeroed, LABELS), (moved, other)):
        fitted(x, y)
    bound = 0.3 * math.hypot(1, 0.3) * (1 + 1e-5)
    constant = 0.3 * 0.3  # what a row of zeros still has
    for one, without, replaced in zip(*sums, strict=True):
        assert np.linalg.norm(one - without) <= bound + constant
        assert np.linalg.norm(one - replaced) <= 2 * bound


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": 3 * X}, ValueError, "Normalise every record by itself"),
        ({"x": X * math.nan}, ValueError, "feature_norm"),
        ({"x": X.long()}, TypeError, "floating point tensor, got torch.int64"),
        ({"x": X[0]}, ValueError, "shape"),
        ({"x": X.to_sparse()}, NotImplementedError, "Sparse"),
        ({"public_features": X}, ValueError, "got the records themselves"),
        ({"public_features": X[:, 1:]}, ValueError, "of 6 columns"),
        ({"y": LABELS[:-1]}, ValueError, "targets of shape"),
        ({"y": LABELS.double()}, TypeError, "classes=None"),
        ({"classes": 2}, ValueError, "indices from 0 to 1, got 2"),
        ({"classes": 1}, ValueError, "classes >= 2"),
        ({"classes": None}, ValueError, "target_bounds="),
        ({"epsilon": 0.0}, ValueError, "epsilon > 0"),
        ({"neighboring_relation": "add_or_remove_one"}, ValueError, "number of records"),
    ],
)
def test_refused_before_training(changes, error, message, monkeypatch):
    monkeypatch.setattr(
        "hidden_state_adapters.recipe.Recipe.train", lambda *_: pytest.fail("trained")
    )
    with pytest.raises(error, match=message):
        fitted(**changes)
