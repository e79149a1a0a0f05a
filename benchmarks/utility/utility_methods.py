"""The methods: ours without tuning, and others, whose settings a validation split picks.

All are about the same pair of data sets: one record is replaced by one without gradient.
"""

import math

import attrs
import numpy as np
from scipy import optimize, stats
from scipy.linalg import solve_banded
from scipy.special import logsumexp
from utility_data import Split
from utility_training import train

import hidden_state_accountants as hsa
from hidden_state_accountants.calibration import gaussian_log_mu
from hidden_state_adapters.own_noise import OwnGenerator
from hidden_state_adapters.sklearn import PrivateClassifier

DELTA = 1e-5
RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # times that of the recipe
CLIPS = (0.3, 1.0)


@attrs.frozen
class Result:
    """One setting of a method, ready to be run: accuracies on validation and test split."""

    setting: str
    run: object


def mu_of(epsilon: float) -> float:
    return math.exp(gaussian_log_mu(epsilon, DELTA))


# Gradient descent


def head_accuracies(data: Split, candidate, generator) -> tuple[float, float]:
    """Trains a candidate and returns its accuracy on the validation and the test split."""
    features, labels = data.train
    outputs = 1 if len(data.classes) == 2 else len(data.classes)
    table = np.eye(outputs) if outputs > 1 else np.array([[0.0], [1.0]])
    weights = train(candidate, features, table[labels], generator)
    return tuple(accuracy(weights, part) for part in (data.validation, data.test))


def accuracy(weights: np.ndarray, part: tuple[np.ndarray, np.ndarray]) -> float:
    logits = part[0] @ weights
    guess = logits[:, 0] > 0 if logits.shape[1] == 1 else logits.argmax(axis=1)
    return float(np.mean(guess == part[1]))


def recommended(data: Split, epsilon: float, order: str, epochs: int | None, clip=None, **options):
    """The recipe's runs for one order, length and clip norm: the best numbers of batches."""
    return hsa.recommend(
        len(data.train[1]),
        epsilon,
        DELTA,
        classes=len(data.classes),
        orders=[order],
        epochs=epochs,
        clip_norm=clip,
        **options,
    )


def described(candidate) -> str:
    event = candidate.event
    return (
        f"{event.dataset_size // event.batch_size} batches, {candidate.epochs} epochs, clip "
        f"{candidate.clip_norm:g}, rate {event.learning_rate:.3g}"
    )


def at_rates(candidate, rates):
    """The same run at other learning rates: composition does not look at them."""
    for factor in rates:
        rate = candidate.event.learning_rate * factor
        yield attrs.evolve(candidate, event=attrs.evolve(candidate.event, learning_rate=rate))


def descent(data, candidate, setting, make_generator=OwnGenerator):
    return Result(setting, lambda: head_accuracies(data, candidate, make_generator()))


def composition(data: Split, epsilon: float, order: str, lengths, rates):
    """Poisson or full batches, every iterate released: what stock DP-SGD does."""
    for epochs in lengths:
        for clip in CLIPS:
            for found in recommended(data, epsilon, order, epochs, clip):
                for candidate in at_rates(found, rates):
                    yield descent(data, candidate, described(candidate))


def hidden(data: Split, epsilon: float, lengths, rates):
    """Fixed batches, the last iterate only; the smoothing follows the rate."""
    for epochs in lengths:
        for order in ("shuffled_once", "cyclic"):
            for found in recommended(data, epsilon, order, epochs, 0.3):
                for candidate in at_rates(found, rates):
                    candidate = smoothed(candidate, len(data.classes))
                    yield descent(data, candidate, f"{order}, {described(candidate)}")


def smoothed(candidate, classes: int):
    """With c = 1 again, so that the noise multiplier stays right."""
    curvature = 0.25 if classes == 2 else 0.5
    smoothing = hsa.envelope_smoothing(
        candidate.event.learning_rate, curvature=curvature, feature_norm=1.0
    )
    make = hsa.LossGeometry.envelope_logistic
    if classes > 2:
        make = hsa.LossGeometry.envelope_softmax_cross_entropy
    loss = make(1.0, clip_norm=candidate.clip_norm, smoothing=smoothing)
    return attrs.evolve(
        candidate, smoothing=smoothing, event=attrs.evolve(candidate.event, loss=loss)
    )


# Matrix factorisation: the noise of a step takes back a part of the noise of earlier ones


class BandedNoise(OwnGenerator):
    """Noise C^-1 z for the banded Toeplitz matrix C of the coefficients of (1 - x)^(-1/2)."""

    def __init__(self, coefficients: np.ndarray):
        super().__init__()
        self._coefficients, self._before = coefficients, []

    def normal(self, std, shape):
        fresh = super().normal(std, shape)
        for coefficient, old in zip(self._coefficients[1:], self._before, strict=False):
            fresh -= coefficient * old
        self._before = [fresh, *self._before][: len(self._coefficients) - 1]
        return fresh


def coefficients(bands: int) -> np.ndarray:
    k = np.arange(1, bands)
    return np.cumprod(np.r_[1.0, (2 * k - 1) / (2 * k)])


def best_bands(split: int, epochs: int) -> tuple[float, int]:
    """(noise multiplier at mu = 1, bands): the least noise in the last iterate.

    A record takes part once an epoch, so that its columns of C do not overlap for bands up to the
    number of batches: the sensitivity is sqrt(epochs) |c|.
    """
    steps, best = split * epochs, (math.inf, 0.0, 1)
    for bands in sorted({1, 2, 4, 8, 16, split} & set(range(1, split + 1))):
        c = coefficients(bands)
        diagonals = np.zeros((bands, steps))
        for k in range(bands):
            diagonals[bands - 1 - k, k:] = c[k]
        noise = math.sqrt(epochs) * np.linalg.norm(c)
        last = np.linalg.norm(solve_banded((0, bands - 1), diagonals, np.ones(steps)))
        best = min(best, (noise * last, noise, bands))
    return best[1:]


def fixed_order(data: Split, epsilon: float, lengths, rates, factorise: bool):
    """Fixed batches in a public order, every iterate released; the noise correlated or not."""
    for epochs in lengths:
        for clip in CLIPS:
            for found in recommended(data, epsilon, "cyclic", epochs, clip):
                split = found.event.dataset_size // found.event.batch_size
                noise, bands = best_bands(split, epochs) if factorise else (math.sqrt(epochs), 1)
                event = attrs.evolve(
                    found.event, loss=None, noise_multiplier=noise / mu_of(epsilon)
                )
                plain = attrs.evolve(found, event=event, smoothing=None)
                for candidate in at_rates(plain, rates):
                    yield descent(
                        data,
                        candidate,
                        described(candidate),
                        lambda bands=bands: BandedNoise(coefficients(bands)),
                    )


# Perturbation of the minimum or of the objective


def minimiser(data: Split, decay: float, linear=None) -> np.ndarray:
    """Of the mean loss plus decay/2 |W|^2 plus <linear, W>."""
    features, labels = data.train[0].astype(np.float64), data.train[1]
    outputs = 1 if len(data.classes) == 2 else len(data.classes)
    shape = (features.shape[1], outputs)
    linear = np.zeros(shape) if linear is None else linear
    rows = np.arange(len(labels))

    def value(flat):
        weights = flat.reshape(shape)
        logits = features @ weights
        if outputs == 1:
            logits = np.c_[np.zeros(len(logits)), logits]
        normaliser = logsumexp(logits, axis=1)
        slopes = np.exp(logits - normaliser[:, None])
        slopes[rows, labels] -= 1
        loss = np.mean(normaliser - logits[rows, labels])
        gradient = features.T @ slopes[:, -outputs:] / len(labels) + decay * weights + linear
        total = loss + decay / 2 * np.sum(weights**2) + np.sum(linear * weights)
        return total, gradient.ravel()

    found = optimize.minimize(value, np.zeros(linear.size), jac=True, method="L-BFGS-B", tol=1e-10)
    return found.x.reshape(shape)


def longest(data: Split) -> float:
    return 1.0 if len(data.classes) == 2 else math.sqrt(2)


def output_perturbation(data: Split, epsilon: float, decays):
    """Chaudhuri et al. 2011 with Gaussian noise: the minimum moves by at most L/(n decay)."""
    for decay in decays:
        std = longest(data) / (len(data.train[1]) * decay * mu_of(epsilon))

        def run(decay=decay, std=std):
            weights = minimiser(data, decay)
            weights = weights + OwnGenerator().normal(std, weights.shape)
            return tuple(accuracy(weights, part) for part in (data.validation, data.test))

        yield Result(f"decay {decay:.3g}", run)


def objective_perturbation(data: Split, epsilon: float, decays):
    """Kifer et al. 2012 with the analysis of Redberg et al. 2023 for linear models."""
    n = len(data.train[1])
    for decay in decays:
        std = objective_noise(data, decay * n, epsilon)
        if std is None:
            continue

        def run(decay=decay, std=std):
            shape = (data.train[0].shape[1], 1 if len(data.classes) == 2 else len(data.classes))
            weights = minimiser(data, decay, OwnGenerator().normal(std / n, shape))
            return tuple(accuracy(weights, part) for part in (data.validation, data.test))

        yield Result(f"decay {decay:.3g}", run)


def objective_noise(data: Split, decay: float, epsilon: float) -> float | None:
    """The least standard deviation for the total decay; None if there is none.

    The privacy loss is at most the logarithm of a determinant plus (2 chi L std + L^2)/(2 std^2),
    chi with k degrees of freedom: the rank of a record's second derivative.
    """
    k = max(1, len(data.classes) - 1)
    trace = 0.25 if len(data.classes) == 2 else 1 - 1 / len(data.classes)
    determinant = k * math.log1p(trace / (k * decay))
    if determinant >= epsilon:
        return None
    chi, width = np.linspace(0, math.sqrt(stats.chi2.isf(1e-16, k)), 20_001, retstep=True)
    density = stats.chi.pdf(chi, k)
    bound = longest(data)

    def excess(log_std):
        std = math.exp(log_std)
        loss = determinant + bound**2 / (2 * std**2) + chi * bound / std
        delta = np.sum(np.maximum(-np.expm1(epsilon - loss), 0) * density) * width + 1e-16
        return delta - 0.999 * DELTA

    return math.exp(optimize.brentq(excess, math.log(1e-3), math.log(1e7)) + 1e-9)


# Ours without tuning, and no privacy


def recipe(data: Split, epsilon: float, order: str, epochs=None):
    """The best recommendation for one order, on the features that the others have."""
    features = data.train[0].shape[1]
    candidate = recommended(data, epsilon, order, epochs, features=features).best
    yield descent(data, candidate, f"{order}, {described(candidate)}")


def estimator(data: Split, epsilon: float, preprocessing="auto"):
    def run():
        model = PrivateClassifier(
            epsilon,
            DELTA,
            classes=data.classes,
            preprocessing=preprocessing,
            # Features as they are have a constant direction of their own.
            fit_intercept=preprocessing is not None,
        ).fit(*data.train)
        return tuple(float(model.score(*part)) for part in (data.validation, data.test))

    yield Result("as it comes", run)


def not_private(data: Split, decays):
    for decay in decays:

        def run(decay=decay):
            weights = minimiser(data, decay)
            return tuple(accuracy(weights, part) for part in (data.validation, data.test))

        yield Result(f"decay {decay:.3g}", run)
