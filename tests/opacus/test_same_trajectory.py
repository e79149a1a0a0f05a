"""From the same start without noise the iterates are those of the reference, as for Keras.

tests/keras/test_same_trajectory.py compares with the same numbers.
"""

import itertools

import numpy as np
import pytest
import shared_runs as shared
import torch
from opacus_runs import weights
from torch import nn
from torch.utils.data import TensorDataset

from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import BallProjection

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def iterates(make_run):
    def iterates(after, **options):
        model = nn.Linear(shared.FEATURES, 1).double()
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(shared.START[None, :-1]))
            model.bias.copy_(torch.from_numpy(shared.START[-1:]))
        x, y = map(torch.from_numpy, shared.records())
        run = make_run(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=shared.RATE, **options),
            loader={"dataset": TensorDataset(x, y[:, None]), "batch_size": shared.BATCH},
            noise_multiplier=0.0, max_grad_norm=shared.CLIP, after=after,
            loss_geometry=LossGeometry.convex(1.0), criterion=nn.BCEWithLogitsLoss(),
        )  # fmt: skip
        found = []
        for batch in itertools.chain(run.loader, run.loader):
            run.step(batch)
            found.append(weights(run))
        return np.array(found)

    return iterates


def test_cyclic(iterates):
    found = iterates(BallProjection(shared.RADIUS), weight_decay=shared.DECAY)
    # Opacus clips with C / (norm + 1e-6).
    np.testing.assert_allclose(found, shared.cyclic_iterates(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("prox", shared.PROXES, ids=str)
def test_prox(iterates, prox):
    expected = shared.prox_iterates(prox, lambda x: [x[None, :-1], x[-1:]])
    np.testing.assert_allclose(iterates(prox), expected, rtol=0, atol=1e-5)
