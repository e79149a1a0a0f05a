"""What the estimators do in a step: the engine's steps, the event's noise, the event's batches."""

import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy import sparse

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder, UnsupportedRunError
from hidden_state_adapters.sklearn.randomness import OwnGenerator
from hidden_state_adapters.sklearn.records import Records, row_norms
from hidden_state_adapters.sklearn.steps import Slopes, batches, gradient_sum, train

N, D, K = 24, 5, 3
rng = np.random.default_rng(0)
X = rng.normal(size=(N, D)) * np.exp(rng.normal(size=(N, 1)))
ONE_HOT = np.eye(K)[rng.integers(K, size=N)]
BINARY = rng.integers(2, size=(N, 1)).astype(float)
REAL = rng.uniform(-1, 1, size=(N, 1))


class Silent(OwnGenerator):
    """The batches of a run without its noise."""

    def normal(self, std, shape):
        return np.zeros(shape)


def event(order="cyclic", **changes):
    settings = dict(
        noise_multiplier=2.0,
        learning_rate=3.0,
        clip_norm=0.30001,
        batch_size=8,
        dataset_size=N,
        num_steps=9,
        batch_order=order,
    )
    return hsa.LastIterateDpEvent(**{**settings, **changes})


def run(run_event, targets, slopes, x=X, generator=None, constant=0.0, norm=1.0):
    records = Records.of(x, norm, "scale", constant)
    generator = generator or Silent()
    return train(
        run_event,
        records,
        lambda i: targets[i],
        targets.shape[1],
        slopes,
        generator,
        lambda *_: None,
    )


LOSSES = [
    ("softmax_cross_entropy", ONE_HOT, None),
    ("softmax_cross_entropy", ONE_HOT, 0.7),
    ("logistic", BINARY, None),
    ("logistic", BINARY, 1.5),
    ("squared_error", REAL, 0.5),
]


def criterion(loss, smoothing):
    from torch import nn

    from hidden_state_adapters import opacus

    if smoothing is None:
        plain = {"softmax_cross_entropy": nn.CrossEntropyLoss, "logistic": nn.BCEWithLogitsLoss}
        return plain[loss]()
    envelope = {
        "softmax_cross_entropy": opacus.EnvelopeCrossEntropyLoss,
        "logistic": opacus.EnvelopeBCEWithLogitsLoss,
        "squared_error": opacus.EnvelopeSquaredErrorLoss,
    }
    return envelope[loss](clip_norm=0.3, smoothing=smoothing)


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
@pytest.mark.parametrize(("loss", "targets", "smoothing"), LOSSES)
def test_steps_without_noise_are_those_of_the_engine(loss, targets, smoothing):
    torch = pytest.importorskip("torch")
    from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

    run_event = event(weight_decay=0.05)
    features = X / np.linalg.norm(X, axis=1, keepdims=True)
    labels = targets.argmax(1) if loss == "softmax_cross_entropy" else targets
    data = torch.utils.data.TensorDataset(torch.tensor(features), torch.tensor(labels))
    model = torch.nn.Linear(D, targets.shape[1], bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    loss_function = criterion(loss, smoothing)
    model, optimizer, loader = HiddenStatePrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=3.0, weight_decay=0.05),
        data_loader=torch.utils.data.DataLoader(data, batch_size=8),
        noise_multiplier=0.0,
        max_grad_norm=0.30001,
        batch_order="cyclic",
        criterion=loss_function,
    )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()
    ours = run(run_event, targets, Slopes(loss, 0.3, smoothing))
    theirs = next(model.parameters()).detach().numpy()
    # Opacus clips with C / (norm + 1e-6).
    np.testing.assert_allclose(ours[:-1].T, theirs, rtol=2e-5, atol=1e-6)
    assert np.abs(theirs).max() > 0.1


@pytest.mark.parametrize("kind", [np.float32, sparse.csr_matrix, sparse.csr_array])
def test_kinds_of_matrices_agree(kind):
    slopes = Slopes("softmax_cross_entropy", 0.3, None)
    expected = run(event(), ONE_HOT, slopes, constant=0.4)
    given = X.astype(np.float32) if kind is np.float32 else kind(X)
    tolerance = 1e-5 if kind is np.float32 else 1e-12
    np.testing.assert_allclose(
        run(event(), ONE_HOT, slopes, given, constant=0.4), expected, atol=tolerance
    )


@pytest.mark.parametrize("order", ["cyclic", "full", "shuffled_once", "poisson"])
def test_the_noise_is_the_events(order):
    """Records without features have no gradient: what is left is the noise of all steps."""
    run_event = event(order, batch_size=N if order == "full" else 8, weight_decay=0.1)
    nothing = np.zeros((N, 4000))
    weights = run(run_event, BINARY, Slopes("logistic", 0.3, None), nothing, OwnGenerator())
    step = 3.0 / run_event.batch_size * 2.0 * 0.30001
    decayed = math.sqrt(sum((1 - 0.3) ** (2 * k) for k in range(9)))
    assert weights.std() == pytest.approx(step * decayed, rel=0.07)
    assert abs(weights.mean()) < 6 * weights.std() / math.sqrt(4000)


def test_every_step_draws_its_noise_once():
    drawn = []

    class Counting(OwnGenerator):
        def normal(self, std, shape):
            drawn.append((std, shape))
            return super().normal(std, shape)

    run(event(), ONE_HOT, Slopes("softmax_cross_entropy", 0.3, None), generator=Counting())
    assert drawn == [(2.0 * 0.30001, (D + 1, K))] * 9


@pytest.mark.parametrize("smoothing", [None, 0.0, 3.0])
@pytest.mark.parametrize("normalization", ["scale", "clip"])
def test_no_record_moves_a_sum_by_more_than_the_clip_norm(normalization, smoothing):
    """Whatever is in its row, and wherever the weights are."""
    rows = np.array([[1e200, 1e-200], [1e-300, 0.0], [0.0, 0.0], [3.0, -4.0], [1e30, 1e30]])
    run_event = event(clip_norm=0.3 * math.hypot(2.0, 0.5) * (1 + 1e-5))
    for matrix in (rows, sparse.csr_matrix(rows)):
        records = Records.of(matrix, 2.0, normalization, 0.5)
        assert (records.norms <= math.hypot(2.0, 0.5) * (1 + 1e-12)).all()
        for size in (0.0, 1.0, 1e4):
            weights = size * np.random.default_rng(1).normal(size=(3, K))
            slopes = Slopes("softmax_cross_entropy", 0.3, smoothing)
            for row in range(len(rows)):
                part = slice(row, row + 1)
                total = gradient_sum(
                    run_event, records, lambda i: ONE_HOT[i], slopes, weights, part
                )
                assert np.linalg.norm(total) <= run_event.clip_norm * (1 + 1e-6)


def test_row_norms_neither_overflow_nor_underflow():
    rows = np.array([[3e200, 4e200], [3e-200, 4e-200], [0.0, 0.0]])
    for matrix in (rows, sparse.csr_matrix(rows)):
        np.testing.assert_allclose(row_norms(matrix), [5e200, 5e-200, 0.0], rtol=1e-12)


def test_fixed_batches():
    expected = [(0, 8), (8, 16), (16, 24)] * 3
    dealt = list(batches(event("cyclic"), OwnGenerator()))
    assert [(part.start, part.stop) for part in dealt] == expected
    once = [part.tolist() for part in batches(event("shuffled_once"), OwnGenerator())]
    assert once[:3] == once[3:6] == once[6:]
    epoch = [row for batch in once[:3] for row in batch]
    assert sorted(epoch) == list(range(N)) != epoch
    full = list(batches(event("full", batch_size=N, num_steps=2), OwnGenerator()))
    assert full == [slice(0, N)] * 2


def test_poisson_batches_have_the_rate_of_the_event():
    sizes = [len(i) for i in batches(event("poisson", num_steps=3000), OwnGenerator())]
    assert np.mean(sizes) == pytest.approx(8, abs=5 * math.sqrt(8 * 16 / 24 / 3000))
    assert np.var(sizes) == pytest.approx(8 * 16 / 24, rel=0.2)
    assert len(OwnGenerator().members(100, 1.0)) == 100


def test_orders_that_are_not_dealt_are_refused():
    with pytest.raises(UnsupportedRunError, match="RESHUFFLED"):
        next(batches(event(BatchOrder.RESHUFFLED), OwnGenerator()))


def test_a_gradient_that_is_no_number_ends_the_run():
    with pytest.raises(UnsupportedRunError, match="no epsilon covers"):
        run(event(), BINARY * math.nan, Slopes("logistic", 0.3, None))


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
