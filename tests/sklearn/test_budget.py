"""Fits inside of a budget are counted, in worker processes, too."""

import copy
import warnings

import numpy as np
import pytest

pytest.importorskip("sklearn")

from joblib import Parallel, delayed
from sklearn.model_selection import GridSearchCV, cross_val_score

import hidden_state_accountants as hsa
from hidden_state_adapters.sklearn import PrivateClassifier

X = np.random.default_rng(0).normal(size=(300, 3))
Y = (X[:, 0] > 0).astype(int)


def classifier(**changes):
    return PrivateClassifier(**{"epsilon": 0.5, "classes": [0, 1], **changes})


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [None, 2])
def test_a_search_adds_up_and_warns_of_nothing(jobs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hsa.budget(4.0, 1e-5) as spent:
            search = GridSearchCV(
                classifier(), {"fit_intercept": [True, False]}, cv=2, n_jobs=jobs
            ).fit(X, Y)
    assert spent.releases == 5
    accountant = hsa.LastIterateAccountant()
    accountant.compose(search.best_estimator_.privacy_event_, 5)
    assert spent.spent_epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    report = search.best_estimator_.report_
    assert "fits: number 5 in a budget of epsilon 4 at delta 1e-05" in report


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
        classifier().fit(X, Y)
        monkeypatch.setattr(
            "hidden_state_adapters.recipe.Recipe.train", lambda *_: pytest.fail("trained")
        )
        with pytest.raises(hsa.BudgetExceededError, match="number 2"):
            cross_val_score(classifier(), X, Y, cv=2, error_score="raise")
    assert spent.releases == 1


def test_what_was_sent_from_a_block_that_has_ended_is_refused():
    with hsa.budget(4.0, 1e-5):
        sent = copy.deepcopy(classifier())
    with pytest.raises(ValueError, match="its block has ended"):
        sent.fit(X, Y)
