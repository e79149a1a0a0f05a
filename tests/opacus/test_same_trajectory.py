"""From the same start without noise the iterates are those of the reference, as for Keras.

tests/keras/test_same_trajectory.py compares with the same numbers.
"""

import numpy as np
import pytest
import shared_runs as shared
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import (
    BallProjection,
    DiceSGD,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def layer():
    model = nn.Linear(shared.FEATURES, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(shared.START[None, :-1]))
        model.bias.copy_(torch.from_numpy(shared.START[-1:]))
    return model


def data():
    x, y = map(torch.from_numpy, shared.records())
    return DataLoader(TensorDataset(x, y[:, None]), batch_size=shared.BATCH)


def iterates(model, optimizer, loader):
    found = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()
            parts = [p.detach().numpy().ravel().copy() for p in model.parameters()]
            found.append(np.concatenate(parts))
    return np.array(found)


def test_cyclic():
    model = layer()
    model, optimizer, loader = HiddenStatePrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=shared.RATE, weight_decay=shared.DECAY
        ),
        data_loader=data(), noise_multiplier=0.0, max_grad_norm=shared.CLIP, batch_order="cyclic",
        after=BallProjection(shared.RADIUS),
    )  # fmt: skip
    found = iterates(model, optimizer, loader)
    # Opacus clips with C / (norm + 1e-6).
    np.testing.assert_allclose(found, shared.cyclic_iterates(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", shared.DICE)
def test_dice(variant):
    model = layer()
    if variant == "adam":
        base = torch.optim.Adam(
            model.parameters(), lr=shared.RATE, betas=shared.BETAS, eps=shared.ADAM_EPSILON
        )
    else:
        base = torch.optim.SGD(model.parameters(), lr=shared.RATE)
    model, optimizer, loader = HiddenStatePrivacyEngine().make_private(
        module=model, optimizer=base, data_loader=data(), noise_multiplier=0.0,
        max_grad_norm=shared.CLIP, batch_order="cyclic",
        mechanism=DiceSGD(
            error_max_grad_norm=shared.CLIP if variant == "automatic" else shared.ERROR_CLIP,
            automatic=variant == "automatic",
        ),
    )  # fmt: skip
    found = iterates(model, optimizer, loader)
    np.testing.assert_allclose(found, shared.dice_iterates(variant), rtol=0, atol=1e-12)


@pytest.mark.parametrize("prox", shared.PROXES, ids=str)
def test_prox(prox):
    model = layer()
    model, optimizer, loader = HiddenStatePrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=shared.RATE),
        data_loader=data(), noise_multiplier=0.0, max_grad_norm=shared.CLIP, batch_order="cyclic",
        after=prox,
    )  # fmt: skip
    expected = shared.prox_iterates(prox, lambda x: [x[None, :-1], x[-1:]])
    np.testing.assert_allclose(iterates(model, optimizer, loader), expected, rtol=0, atol=1e-5)
