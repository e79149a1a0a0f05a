"""A declared curvature is held against the features of every batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import EnvelopeCrossEntropyLoss, HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.curvature import BatchCurvature
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.gradients import Piece
from hidden_state_adapters.opacus.options import RunArguments
from hidden_state_adapters.opacus.sgd import HiddenStateOptimizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Secure RNG", "ignore:Full backward hook", "ignore::UserWarning"
)
N, D, K, B = 48, 6, 3, 12


def features(seed=0):
    rows = np.random.default_rng(seed).normal(size=(N, D)) * np.geomspace(1, 0.3, D)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def share_of(rows, bias):
    """The largest of lambda_max(X^T X)/(b B^2) of the batches in their order."""
    rows = np.c_[rows, np.ones(N)] / np.sqrt(2) if bias else rows
    return max(np.linalg.eigvalsh(part.T @ part / B)[-1] for part in np.split(rows, N // B))


def geometry(share, bias=False, failure=0.0):
    loss = hsa.LossGeometry.envelope_softmax_cross_entropy(1.0, bias, clip_norm=0.3, smoothing=1.0)
    return loss.with_curvature(share * loss.smoothness, failure)


def start(rows, loss, *, bias=False, order="cyclic", feature_norm=1.0):
    model = nn.Linear(D, K, bias=bias, dtype=torch.float64)
    data = TensorDataset(torch.tensor(rows), torch.arange(N) % K)
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=4.0),
        data_loader=DataLoader(data, batch_size=N if order == "full" else B),
        noise_multiplier=2.0,
        max_grad_norm=0.5,
        batch_order=order,
        loss_geometry=loss,
        feature_norm=feature_norm,
    )
    criterion = EnvelopeCrossEntropyLoss(clip_norm=0.3, smoothing=1.0)

    def epoch():
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return engine, epoch


@pytest.mark.parametrize("bias", [False, True])
def test_batches_within_the_bound_train_and_gain(bias):
    rows = features()
    engine, epoch = start(rows, geometry(share_of(rows, bias), bias), bias=bias)
    epoch()
    epoch()
    other, epoch = start(rows, geometry(1.0, bias), bias=bias)
    epoch()
    epoch()
    assert engine.get_epsilon(1e-5) <= other.get_epsilon(1e-5)
    assert any("smooth" in str(a) and "every batch" in str(a) for a in engine.assumptions)
    assert not any("every batch is" in str(a) for a in other.assumptions)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("failure", [0.0, 1e-6])
def test_row124_a_batch_above_the_bound_ends_the_run(bias, failure):
    rows = features()
    rows[2 * B : 3 * B] = rows[2 * B]  # the third batch has one direction
    below = share_of(np.roll(features(), 1, axis=0), bias) * 1.2
    engine, epoch = start(rows, geometry(below, bias, failure), bias=bias)
    with pytest.raises(hsa.UnsupportedRunError, match="step 3 used a batch whose mean loss"):
        epoch()
    with pytest.raises(hsa.UnsupportedRunError):
        engine.get_epsilon(1e-5)


def test_what_is_released_passes_for_random_batches():
    rows = features()
    release = hsa.release_curvature(
        rows, epsilon=5.0, batch_order="shuffled_once", batch_size=B, num_steps=8, feature_norm=1.0
    )
    loss = hsa.LossGeometry.envelope_softmax_cross_entropy(1.0, clip_norm=0.3, smoothing=1.0)
    engine, epoch = start(rows, release.geometry(loss), order="shuffled_once")
    epoch()
    assert engine.get_epsilon(1e-5) < 10


def test_poisson_batches_do_not_use_it():
    """A refusal would protect nobody."""
    engine, epoch = start(features(), geometry(0.01), order="poisson")
    epoch()
    assert engine.get_epsilon(1e-5) > 0


def test_without_a_norm_nothing_could_be_looked_at():
    with pytest.raises(hsa.UnsupportedRunError, match="feature_norm= beside"):
        start(features(), geometry(0.5), feature_norm=None)


def test_parts_of_a_batch_in_several_processes_show_nothing():
    model = nn.Linear(D, K, bias=False, dtype=torch.float64)
    data = TensorDataset(torch.tensor(features()), torch.arange(N) % K)
    arguments = RunArguments.of(
        {
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
            "data_loader": DataLoader(data, batch_size=B),
            "max_grad_norm": 0.5,
            "batch_order": "cyclic",
            "loss_geometry": geometry(0.5),
            "feature_norm": 1.0,
            "optimizer_class": HiddenStateOptimizer,
        }
    )
    group = SimpleNamespace(size=2, secret=b"")
    with pytest.raises(hsa.UnsupportedRunError, match="without curvature for 2 processes"):
        DeclaredRun.of(arguments, NeighboringRelation.REPLACE_SPECIAL, group)


@pytest.mark.parametrize(("rows", "columns"), [(3, 8), (8, 3), (5, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_bound_is_the_largest_eigenvalue_of_a_batch_in_pieces(rows, columns, bias):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    full = torch.cat([x, torch.ones(rows, 1)], dim=1) if bias else x
    largest = float(torch.linalg.matrix_norm(full.double(), 2)) ** 2
    square = 4.0
    share = largest / (rows * square)
    for factor, holds in ((1.0001, True), (0.9999, False)):
        loss = hsa.LossGeometry.convex(square, 1.0)
        loss = loss.with_curvature(min(share * factor, 0.999) * square)
        curvature = BatchCurvature(loss, square, bias, rows)
        piece = Piece(step=1, params=[])
        for part in (x[:2], x[2:]):
            curvature.take([part])
        if holds:
            curvature.check(piece)
        else:
            with pytest.raises(hsa.UnsupportedRunError, match="smooth"):
                curvature.check(piece)
        curvature.take([])
        curvature.check(piece)  # the next batch is another one, and empty here
