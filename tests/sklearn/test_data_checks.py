"""Ordinary mistakes of scikit-learn's users: what is warned of, listed or counted in a budget."""

import copy
import warnings

import numpy as np
import pytest

pytest.importorskip("sklearn")

from joblib import Parallel, delayed
from scipy import sparse
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, OneHotEncoder, StandardScaler

import hidden_state_accountants as hsa
from hidden_state_adapters.sklearn import (
    PrivacyBudgetWarning,
    PrivateClassifier,
    PrivateRegressor,
    UnaccountedStepWarning,
)


def records(n=300, d=3):
    """Never the same ones: every test is the first to train on its records."""
    rng = np.random.default_rng()
    y = rng.integers(2, size=n)
    return np.c_[y, np.ones((n, d - 1))] + 0.3 * rng.normal(size=(n, d)), y


def classifier(**changes):
    return PrivateClassifier(**{"classes": [0, 1], **changes})


def test_another_estimator_on_the_same_records():
    """A loop over settings by hand, which clones nothing."""
    X, y = records()
    classifier().fit(X, y)
    with pytest.warns(PrivacyBudgetWarning, match="fit 2 of a PrivateClassifier to these"):
        classifier(feature_norm=2.0).fit(X[::-1].copy(), y[::-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyBudgetWarning)  # it was said
        classifier().fit(sparse.csr_matrix(X), 1 - y)
        model = PrivateRegressor(target_bounds=(0, 1)).fit(X, y)
    assert "fits: 4 that this process knows of" in model.report_


def test_the_same_object_a_clone_and_a_search():
    X, y = records()
    model = classifier().fit(X, y)
    with pytest.warns(PrivacyBudgetWarning, match="fit 2 of this PrivateClassifier and its"):
        model.fit(*records())
    fresh = clone(classifier())
    with pytest.warns(PrivacyBudgetWarning, match="copy 2 of a PrivateClassifier"):
        clone(fresh)
    for search in (
        lambda: GridSearchCV(classifier(), {"feature_norm": [1.0, 2.0]}, cv=2).fit(X, y),
        lambda: cross_val_score(classifier(), X, y, cv=2),
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            search()
        assert [w.category for w in found].count(PrivacyBudgetWarning) == 1  # one a search


def test_there_is_no_start_from_a_trained_model_and_no_seed():
    for name in ("warm_start", "random_state"):
        with pytest.raises(TypeError, match=name):
            PrivateClassifier(**{name: 1})
    assert not hasattr(classifier(), "partial_fit")


# Rows that were fitted to the same records, or stand for one person.


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("step", [StandardScaler(), PCA(2), MinMaxScaler()])
def test_a_step_in_a_pipeline_that_is_fitted_to_the_records(step, kind):
    X, y = records()
    with pytest.warns(UnaccountedStepWarning, match="fitted to these very records"):
        make_pipeline(step, classifier()).fit(X.astype(kind), y)


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix])
def test_oversampling(kind):
    X, y = records()
    rare = np.flatnonzero(y)[:20]
    X, y = np.vstack([X, X[rare]]), np.r_[y, y[rare]]
    with pytest.warns(UnaccountedStepWarning, match="some records are equal"):
        classifier().fit(kind(X), y)


@pytest.mark.parametrize(
    "X",
    [
        records()[0],
        np.tile(records(150)[0], (2, 1)),  # with other labels
        Normalizer().fit_transform(records()[0]),
        StandardScaler().fit(records()[0]).transform(records()[0]),
        OneHotEncoder(sparse_output=False).fit_transform(np.arange(300)[:, None] % 7)
        + 1e-3 * np.arange(300)[:, None],
        np.c_[np.arange(300) % 2, np.arange(300) % 3 == 0, np.linspace(0.1, 0.7, 300)],
        np.linspace(-1, 1, 300)[:, None],
        np.c_[np.linspace(0, 1, 300), np.random.default_rng(0).random(300)],
    ],
)
def test_what_is_no_mistake_is_not_warned_of(X):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnaccountedStepWarning)
        report = classifier().fit(X, np.arange(300) // 150).report_
    assert "X was not transformed with statistics of these records" in report


X = np.random.default_rng(0).normal(size=(300, 3))
Y = (X[:, 0] > 0).astype(int)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [None, 2])
def test_a_search_adds_up_and_warns_of_nothing(jobs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hsa.budget(4.0, 1e-5) as spent:
            search = GridSearchCV(
                classifier(epsilon=0.5), {"fit_intercept": [True, False]}, cv=2, n_jobs=jobs
            ).fit(X, Y)
    assert spent.releases == 5
    accountant = hsa.LastIterateAccountant()
    accountant.compose(search.best_estimator_.privacy_event_, 5)
    assert spent.spent_epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert "fits: number 5 in a budget of epsilon 4" in search.best_estimator_.report_


@pytest.mark.slow
def test_estimators_that_are_made_in_older_workers_are_counted():
    def fitted_there(_):
        return PrivateClassifier(epsilon=0.1, classes=[0, 1]).fit(X, Y).n_iter_

    with Parallel(n_jobs=2) as parallel:
        parallel(delayed(abs)(number) for number in range(2))
        with hsa.budget(4.0, 1e-5) as spent:
            parallel(delayed(fitted_there)(number) for number in range(3))
    assert spent.releases == 3


def test_the_fit_that_would_go_over_is_refused_before_training(monkeypatch):
    with hsa.budget(0.7, 1e-5) as spent:
        classifier(epsilon=0.5).fit(X, Y)
        monkeypatch.setattr(
            "hidden_state_adapters.recipe.Recipe.train", lambda *_: pytest.fail("trained")
        )
        with pytest.raises(hsa.BudgetExceededError, match="number 2"):
            cross_val_score(classifier(epsilon=0.5), X, Y, cv=2, error_score="raise")
    assert spent.releases == 1


def test_what_was_sent_from_a_block_that_has_ended_is_refused():
    with hsa.budget(4.0, 1e-5):
        sent = copy.deepcopy(classifier(epsilon=0.5))
    for model in (sent, clone(sent)):
        with pytest.raises(ValueError, match="its block has ended"):
            model.fit(X, Y)
