"""From the same start without noise the iterates are those of the reference, as for Keras.

tests/keras/test_same_trajectory.py compares with the same numbers.
"""

import numpy as np
import pytest
import shared_runs as shared
import torch
from opacus_runs import flat
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import BallProjection, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def iterates(after, **options):
    module = nn.Linear(shared.FEATURES, 1).double()
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(shared.START[None, :-1]))
        module.bias.copy_(torch.from_numpy(shared.START[-1:]))
    x, y = map(torch.from_numpy, shared.records())
    model, optimizer, loader = HiddenStatePrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=shared.RATE, **options),
        data_loader=DataLoader(TensorDataset(x, y[:, None]), batch_size=shared.BATCH),
        noise_multiplier=0.0,
        max_grad_norm=shared.CLIP,
        batch_order="cyclic",
        after=after,
    )
    found = []
    for _ in range(2):
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(features), labels).backward()
            optimizer.step()
            found.append(flat(module.parameters()))
    return np.array(found)


def test_cyclic():
    found = iterates(BallProjection(shared.RADIUS), weight_decay=shared.DECAY)
    # Opacus clips with C / (norm + 1e-6).
    np.testing.assert_allclose(found, shared.cyclic_iterates(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("prox", shared.PROXES, ids=str)
def test_prox(prox):
    expected = shared.prox_iterates(prox, lambda x: [x[None, :-1], x[-1:]])
    np.testing.assert_allclose(iterates(prox), expected, rtol=0, atol=1e-5)
