"""Accuracy of the estimators as they come and of tuned peers at equal epsilon; writes the page.

    python benchmarks/utility/accuracy.py    # goes on where it stopped
    python benchmarks/utility/accuracy.py --methods diffprivlib    # in an environment of its own

Data sets and peers take part whose packages are installed (benchmarks/README.md).
"""

import argparse
import json
import math
import pathlib
import sys
import warnings

import accuracy_data
import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

ROOT = pathlib.Path(__file__).parents[2]
EPSILONS, DELTA = (0.1, 0.3, 1.0, 3.0), 1e-5
OURS = ("as it comes", "whitened", "splines", "public features")
PEERS = ("DP-SGD, tuned", "DP-FC, tuned", "diffprivlib", "DP-EBM")
NONE, FREQUENCIES = "no privacy", "frequencies"
CLIPS, RATES, LENGTHS = (0.3, 1.0), (0.125, 0.25, 0.5, 1.0, 2.0, 4.0), (16, 64)
COVARIANCE, RIDGES = 0.2, (0.003, 0.03, 0.3)  # of DP-FC: share of the squared mu, of the mean u u'


def rows_of(X):
    """What peers that descend see: records of norm 1 with a constant."""
    rows = np.c_[X, np.ones(len(X))]
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def answers(data, weights):
    """Probabilities of the classes, or numbers, for new records."""

    def predict(X):
        z = np.asarray(rows_of(X) @ weights, dtype=np.float64)
        if data.bounds is not None:
            low, high = data.bounds
            return (high + low) / 2 + (high - low) / 2 * z[:, 0]
        z = z if z.shape[1] > 1 else np.c_[np.zeros(len(z)), z]
        odds = np.exp(z - z.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    return predict


def targets_of(data, y):
    if data.bounds is not None:
        low, high = data.bounds
        return ((y - (high + low) / 2) / ((high - low) / 2))[:, None]
    return y[:, None].astype(float) if len(data.classes) == 2 else np.eye(len(data.classes))[y]


def recommended(data, n, epsilon, **options):
    import hidden_state_accountants as hsa

    kind = {"loss": "squared_error"} if data.bounds is not None else {"classes": len(data.classes)}
    return hsa.recommend(n, epsilon, DELTA, **kind, **options).best


# Every method yields its settings: functions of the training records that return predictions.


def ours(data, epsilon, **options):
    from hidden_state_adapters.sklearn import PrivateClassifier, PrivateRegressor

    def fit(X, y):
        if data.bounds is None:
            model = PrivateClassifier(epsilon, DELTA, classes=data.classes, **options)
            return model.fit(X, y).predict_proba
        model = PrivateRegressor(epsilon, DELTA, target_bounds=data.bounds, **options)
        return model.fit(X, y).predict

    yield fit


def whitened(data, epsilon):
    """Where that is not refused for its noise."""
    from hidden_state_adapters.recipe import Target

    columns, target = data.X.shape[1], Target.of(epsilon, DELTA, "REPLACE_SPECIAL")
    if data.public is None and target.whitening_pays(len(data.split(0)[0][1]), columns):
        yield from ours(data, epsilon, preprocessing="whiten")


def splines(data, epsilon):
    if data.knots is not None:
        yield from ours(data, epsilon, column_bounds=(-1, 1), splines=data.knots)


def head(data, epsilon, public):
    """`fit_head`, for features of a network."""
    import torch

    from hidden_state_adapters.opacus import fit_head

    def fit(X, y):
        given = None if public is None else torch.tensor(public)
        kinds = {"epsilon": epsilon, "delta": DELTA, "classes": len(data.classes)}
        layer, _ = fit_head(torch.tensor(X), torch.tensor(y), public_features=given, **kinds)
        return lambda new: torch.softmax(layer(torch.tensor(new)).double(), 1).detach().numpy()

    yield fit


def as_it_comes(data, epsilon):
    yield from ours(data, epsilon) if data.public is None else head(data, epsilon, None)


def public_features(data, epsilon):
    if data.public is not None:
        yield from head(data, epsilon, data.public)


def dp_sgd(data, epsilon):
    """Poisson batches, every iterate released, rates around ours."""
    import attrs
    from utility_training import train

    from hidden_state_adapters.own_noise import OwnGenerator

    n = len(data.split(0)[0][1])
    for epochs in LENGTHS:
        for clip in CLIPS:
            options = {"orders": ["poisson"], "epochs": epochs, "clip_norm": clip}
            found = recommended(data, n, epsilon, **options)
            for factor in RATES:
                rate = factor * found.event.learning_rate
                run = attrs.evolve(found, event=attrs.evolve(found.event, learning_rate=rate))

                def fit(X, y, run=run):
                    weights = train(run, rows_of(X), targets_of(data, y), OwnGenerator())
                    return answers(data, weights)

                yield fit


def dp_fc(data, epsilon):
    """Mehta et al. 2023 (arXiv 2305.13651): steps divided by a covariance that is released once."""
    from hidden_state_accountants.calibration import gaussian_log_mu
    from hidden_state_accountants.losses.arrays import NUMPY
    from hidden_state_accountants.losses.linear import BY_NAME

    mu, normal = math.exp(gaussian_log_mu(epsilon, DELTA)), np.random.default_rng().normal
    loss = "squared_error"
    if data.bounds is None:
        loss = "logistic" if len(data.classes) == 2 else "softmax_cross_entropy"

    def fit(X, y, ridge, steps, clip, rate):
        rows, targets = rows_of(X).astype(float), targets_of(data, y)
        n, d = rows.shape
        upper = np.triu(normal(0, 1 / (math.sqrt(COVARIANCE) * mu), (d, d)))
        covariance = (rows.T @ rows + upper + np.triu(upper, 1).T) / n
        values, vectors = np.linalg.eigh(covariance)
        inverse = (vectors / (np.maximum(values, 0) + ridge)) @ vectors.T
        std = clip * math.sqrt(steps / (1 - COVARIANCE)) / mu
        slopes = BY_NAME[loss](NUMPY, targets.shape[1]).slopes
        weights = np.zeros((d, targets.shape[1]))
        for _ in range(steps):
            y = slopes(rows @ weights, targets)
            norms = np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-300)
            total = rows.T @ (y * np.minimum(clip / norms, 1)) + normal(0, std, weights.shape)
            weights -= rate * inverse @ total / n
        return answers(data, weights)

    for ridge in RIDGES:
        for steps in (8, 32):
            for clip in CLIPS:
                for rate in (0.5, 1.0, 2.0):
                    settings = (ridge, steps, clip, rate)
                    yield lambda X, y, settings=settings: fit(X, y, *settings)


def diffprivlib(data, epsilon):
    """Its logistic regression with 12 strengths of the penalty, or its linear one."""
    import sklearn
    from diffprivlib.models import LinearRegression, LogisticRegression

    if tuple(map(int, sklearn.__version__.split(".")[:2])) >= (1, 4):
        raise ImportError("diffprivlib 0.6.5 adds n times too much noise with scikit-learn 1.4")

    def linear(X, y):
        bounds = {"bounds_X": (-1, 1), "bounds_y": data.bounds}
        return LinearRegression(epsilon=epsilon, **bounds).fit(X, y).predict

    def logistic(X, y, decay):
        options = {"data_norm": 1.0, "C": 1 / (decay * len(y)), "fit_intercept": False}
        model = LogisticRegression(epsilon=epsilon, max_iter=300, **options).fit(rows_of(X), y)
        return lambda new: model.predict_proba(rows_of(new))

    if data.bounds is not None:
        yield linear
        return
    for decay in np.geomspace(1e-4, 3, 12):
        yield lambda X, y, decay=decay: logistic(X, y, decay)


def dp_ebm(data, epsilon):
    """Nori et al. 2021, package interpret, with its settings; two classes or numbers."""
    from interpret.privacy import DPExplainableBoostingClassifier, DPExplainableBoostingRegressor

    def fit(X, y):
        options = {"epsilon": epsilon, "delta": DELTA, "n_jobs": 1}
        options["privacy_bounds"] = [(-1.0, 1.0)] * X.shape[1]
        if data.bounds is None:
            return DPExplainableBoostingClassifier(**options).fit(X, y).predict_proba
        low, high = data.bounds
        options |= {"privacy_target_min": low, "privacy_target_max": high}
        return DPExplainableBoostingRegressor(**options).fit(X, y).predict

    if data.public is None and (data.bounds is not None or len(data.classes) == 2):
        if data.X.shape[1] <= 100:  # a fit of more takes minutes
            yield fit


def no_privacy(data, epsilon):
    from sklearn.linear_model import LogisticRegression, Ridge

    if data.bounds is not None:
        yield lambda X, y: Ridge(1e-3).fit(X, y).predict
        return
    for strength in (1.0, 100.0):
        yield (
            lambda X, y, c=strength: LogisticRegression(C=c, max_iter=2000).fit(X, y).predict_proba
        )


def frequencies(data, epsilon):
    if data.bounds is None:
        found = lambda y: np.bincount(y, minlength=len(data.classes)) / len(y)  # noqa: E731
        yield lambda X, y: lambda new: np.tile(found(y), (len(new), 1))


METHODS = {
    "as it comes": as_it_comes,
    "whitened": whitened,
    "splines": splines,
    "public features": public_features,
    "DP-SGD, tuned": dp_sgd,
    "DP-FC, tuned": dp_fc,
    "diffprivlib": diffprivlib,
    "DP-EBM": dp_ebm,
    NONE: no_privacy,
    FREQUENCIES: frequencies,
}


def scores(data, predict, part):
    """Accuracy, AUC (mean of each class against the rest) and log loss, or R2 alone."""
    X, y = part
    found = predict(X)
    if data.bounds is not None:
        return [float(1 - np.sum((y - found) ** 2) / np.sum((y - y.mean()) ** 2))]
    found = np.maximum(np.nan_to_num(found), 1e-15)
    found = found / found.sum(axis=1, keepdims=True)
    area = [roc_auc_score(y == k, found[:, k]) for k in data.classes]
    accuracy = float(np.mean(found.argmax(axis=1) == y))
    return [accuracy, float(np.mean(area)), float(log_loss(y, found, labels=data.classes))]


def measure(data, method, epsilon, seeds):
    """Scores on the test splits; a validation split picks the setting, at no cost in privacy."""
    settings = list(METHODS[method](data, epsilon))
    if not settings:
        return None
    best = settings[0]
    if len(settings) > 1:
        train, validation, _ = data.split(0)
        tried = [scores(data, fit(*train), validation)[0] for fit in settings]
        best = settings[int(np.argmax(tried))]
    found = []
    for seed in range(seeds):
        train, _, test = data.split(seed)
        found.append(scores(data, best(*train), test))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "build/accuracy.json")
    parser.add_argument("--methods", nargs="+", default=[m for m in METHODS if m != "diffprivlib"])
    parser.add_argument("--sets", nargs="+", default=list(accuracy_data.SETS))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument(
        "--page", type=pathlib.Path, default=ROOT / "benchmarks/results/accuracy.md"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    path = arguments.results
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.sets:
        data = None
        for method in arguments.methods:
            for epsilon in (0.0,) if method in (NONE, FREQUENCIES) else EPSILONS:
                key = f"{name}|{method}|{epsilon:g}"
                if key in results:
                    continue
                try:
                    data = accuracy_data.SETS[name]() if data is None else data
                    found = measure(data, method, epsilon, arguments.seeds)
                except ImportError as error:
                    print(f"{name}, {method}: left out: {error}", file=sys.stderr, flush=True)
                    break
                about = {
                    "shape": data.X.shape,
                    "classes": data.bounds is None and len(data.classes),
                }
                results[name] = {**about, "named": data.is_named}
                results[key] = found
                path.write_text(json.dumps(results))
                if found:
                    print(key, np.round(np.mean(found, axis=0), 3), flush=True)
    if "diffprivlib" not in arguments.methods:
        from accuracy_page import write

        write(results, arguments.page)


if __name__ == "__main__":
    main()
