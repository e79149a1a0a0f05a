"""What the estimators do in a step: torch's steps, the event's noise, gradients that are short."""

import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy import sparse

import hidden_state_accountants as hsa
from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.own_noise import OwnGenerator
from hidden_state_adapters.recipe import Recipe, silent
from hidden_state_adapters.sklearn.records import Records, gradient_sum, row_norms

N, D, K = 24, 5, 3
rng = np.random.default_rng(0)
X = rng.normal(size=(N, D)) * np.exp(rng.normal(size=(N, 1)))
ONE_HOT = np.eye(K)[rng.integers(K, size=N)]
BINARY = rng.integers(2, size=(N, 1)).astype(float)
REAL = rng.uniform(-1, 1, size=(N, 1))
LOSSES = [("softmax_cross_entropy", ONE_HOT), ("logistic", BINARY), ("squared_error", REAL)]


class Silent(OwnGenerator):
    """No noise."""

    def normal(self, std, shape):
        return np.zeros(shape)


def planned(loss="softmax_cross_entropy", n=N, **options):
    settings = dict(loss=loss, classes=K, orders=["full"], momentum=True)
    return hsa.recommend(n, 300.0, 1e-5, **{**settings, **options}).best


def trained(run, targets, x=X, generator=None, constant=0.0, norm=1.0, sum_of=gradient_sum):
    records = Records.of(x, norm, "scale", constant)
    clip_norm = run.event.clip_norm

    def summed(weights):
        return sum_of(run.loss, clip_norm, records, lambda part: targets[part], weights)

    shape = (records.num_weights, targets.shape[1])
    return Recipe(run).train(summed, shape, generator or Silent(), silent)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize(("loss", "targets"), LOSSES)
def test_steps_without_noise_are_those_of_torch(loss, targets, decay):
    torch = pytest.importorskip("torch")
    run = planned(loss, epochs=16, weight_decay=decay, clip_norm=0.3)
    rate = run.event.learning_rate
    assert run.momentum > 0
    features = torch.tensor(X / np.linalg.norm(X, axis=1, keepdims=True))
    weights = torch.zeros((D, targets.shape[1]), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], rate, momentum=run.momentum, weight_decay=decay)
    clip_norm = run.event.clip_norm
    losses = {
        "softmax_cross_entropy": torch.nn.CrossEntropyLoss(),
        "logistic": torch.nn.BCEWithLogitsLoss(),
        "squared_error": torch.nn.HuberLoss(delta=1e6),  # half the square
    }
    for _ in range(16):
        total = torch.zeros_like(weights)
        for row in range(N):
            value = losses[loss](features[row] @ weights, torch.tensor(targets[row]))
            (gradient,) = torch.autograd.grad(value, weights)
            total += gradient * min(1.0, clip_norm / max(float(gradient.norm()), 1e-300))
        weights.grad = total / N
        optimizer.step()
    theirs = weights.detach().numpy()
    np.testing.assert_allclose(trained(run, targets)[:-1], theirs, rtol=1e-9, atol=1e-9)
    assert np.abs(theirs).max() > 0.1


@pytest.mark.parametrize("kind", [np.float32, sparse.csr_matrix, sparse.csr_array])
def test_kinds_of_matrices_agree(kind, monkeypatch):
    """In one part, and in parts."""
    run = planned(epochs=9)
    expected = trained(run, ONE_HOT, constant=0.4)
    monkeypatch.setattr("hidden_state_adapters.sklearn.records._BLOCK", 7 * D)
    given = X.astype(np.float32) if kind is np.float32 else kind(X)
    tolerance = 1e-4 if kind is np.float32 else 1e-10
    np.testing.assert_allclose(trained(run, ONE_HOT, given, constant=0.4), expected, atol=tolerance)


def test_the_noise_is_the_events():
    """Records without features have no gradient: what is left is the noise of all steps."""
    run = planned("logistic", epochs=16, weight_decay=0.001)
    event, rate = run.event, run.event.learning_rate
    assert run.momentum > 0
    weights = trained(run, BINARY, np.zeros((N, 4000)), OwnGenerator())
    impulse, weight, velocity = [], 0.0, 0.0
    for step in range(event.num_steps):
        velocity = run.momentum * velocity + (step == 0) + 0.001 * weight
        weight -= rate * velocity
        impulse.append(weight)
    std = event.noise_multiplier * event.clip_norm / N * np.linalg.norm(impulse)
    assert weights.std() == pytest.approx(std, rel=0.07)
    assert abs(weights.mean()) < 6 * weights.std() / math.sqrt(4000)


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
@pytest.mark.parametrize(("loss", "targets"), LOSSES)
def test_the_law_of_all_that_is_released_is_no_further_apart_than_the_guarantee(
    loss, targets, relation
):
    """An audit without sampling: of two data sets that differ in their first record.

    The noisy sums of all steps are released. Given the earlier ones, each is a Gaussian whose mean
    moves by the difference of the sums, which is measured along a run: the distances over the noise
    add up to the mu of the worst case, which the run must not pass and nearly reaches.
    """
    run = planned(loss, neighboring_relation=relation)
    event, targets = run.event, targets.copy()
    if loss == "squared_error":
        targets[0] = 1e3  # so that the clip acts
    moved, other = X.copy(), targets.copy()
    if relation == "REPLACE_ONE":  # the same features with the farthest target
        other[0] = {"logistic": 1 - targets[0], "squared_error": -targets[0]}.get(
            loss, np.roll(targets[0], 1)
        )
    else:
        moved[0] = 0.0
    neighbours, distances = Records.of(moved, 1.0, "scale", 0.0), []

    def recorded(loss, clip_norm, records, given, weights, factors=None):
        total = gradient_sum(loss, clip_norm, records, given, weights, factors)
        there = gradient_sum(loss, clip_norm, neighbours, lambda part: other[part], weights)
        distances.append(np.linalg.norm(total - there))
        return total

    trained(run, targets, generator=OwnGenerator(), sum_of=recorded)
    assert len(distances) == event.num_steps
    mu = np.linalg.norm(distances) / (event.noise_multiplier * event.clip_norm)
    assert 0.3 * run.guarantee().mu < mu <= run.guarantee().mu * (1 + 1e-9)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "squared_error"])
@pytest.mark.parametrize("normalization", ["scale", "clip"])
def test_no_record_moves_a_sum_by_more_than_the_clip_norm(normalization, loss):
    """Whatever is in its row, and wherever the weights are."""
    rows = np.array([[1e200, 1e-200], [1e-300, 0.0], [0.0, 0.0], [3.0, -4.0], [1e30, 1e30]])
    clip_norm = 0.3 * math.hypot(2.0, 0.5) * (1 + 1e-5)
    for matrix in (rows, sparse.csr_matrix(rows)):
        for row in range(len(rows)):
            records = Records.of(matrix[row : row + 1], 2.0, normalization, 0.5)
            assert (records.norms <= math.hypot(2.0, 0.5) * (1 + 1e-12)).all()
            for size in (0.0, 1.0, 1e4):
                weights = size * np.random.default_rng(1).normal(size=(3, K))
                total = gradient_sum(
                    loss, clip_norm, records, lambda i, r=row: ONE_HOT[r : r + 1][i], weights
                )
                assert np.linalg.norm(total) <= clip_norm * (1 + 1e-6)


def test_the_gradient_of_a_record_is_clipped_and_then_weighted():
    clip_norm = planned("logistic").event.clip_norm
    weights_of_records = np.random.default_rng(5).random(N)
    weights_of_records[0] = 0.0

    def sum_of(rows, factors):
        targets = BINARY[rows]
        records = Records.of(X[rows], 1.0, "scale", 0.3)
        given = None if factors is None else factors[rows]
        return gradient_sum(
            "logistic", clip_norm, records, lambda part: targets[part], np.ones((D + 1, 1)), given
        )

    for row in range(5):
        alone = sum_of([row], None)
        weighted = sum_of([row], weights_of_records)
        np.testing.assert_allclose(weighted, weights_of_records[row] * alone, atol=1e-15)
        assert np.linalg.norm(weighted) <= clip_norm * weights_of_records[row] * (1 + 1e-12)
    parts = [sum_of([row], weights_of_records) for row in (3, 1, 8)]
    np.testing.assert_allclose(sum_of([3, 1, 8], weights_of_records), sum(parts), atol=1e-14)


def test_one_of_many_records_in_float32_moves_the_sum_by_no_more_than_its_gradient():
    """A float32 sum of so many is rounded by some per cent of the clip norm, either way."""
    n, clip_norm, random = 2**18, 0.3, np.random.default_rng(1)
    records, targets = Records.of(np.ones((n, 1), "f4"), 1.0, "clip", 0.0), np.full((n, 1), -1.0)

    def sum_of(factors):
        weights = np.zeros((2, 1))
        return gradient_sum(
            "squared_error", clip_norm, records, lambda part: targets[part], weights, factors
        )

    for _ in range(20):
        factors = np.full(n, random.uniform(0.5, 1))
        row = random.integers(n)
        factors[row] = 1.0
        there = sum_of(factors)
        factors[row] = 0.0
        assert np.linalg.norm(there - sum_of(factors)) <= clip_norm * (1 + 1e-9)


def test_row_norms_neither_overflow_nor_underflow():
    rows = np.array([[3e200, 4e200], [3e-200, 4e-200], [0.0, 0.0]])
    for matrix in (rows, sparse.csr_matrix(rows)):
        np.testing.assert_allclose(row_norms(matrix), [5e200, 5e-200, 0.0], rtol=1e-12)


def test_a_gradient_that_is_no_number_ends_the_run():
    with pytest.raises(UnsupportedRunError, match="no epsilon covers"):
        trained(planned("logistic"), BINARY * math.nan)


def test_no_seed_reaches_the_generator():
    import copy
    import pickle

    first, second = [], []
    for drawn in (first, second):
        np.random.seed(0)  # noqa: NPY002
        drawn += OwnGenerator().normal(1.0, (3,)).tolist()
    assert not set(first) & set(second)
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="protects nobody"):
            take(OwnGenerator())
