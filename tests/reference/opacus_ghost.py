"""Models and runs of the tests of ghost clipping."""

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import (
    HiddenStatePrivacyEngine,
)

# --- the engine -----------------------------------------------------------------------------------


RECORDS, BATCH = 60, 10


def records(dtype=torch.float32):
    features = torch.randn(RECORDS, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    features = features / features.norm(dim=1, keepdim=True)
    return TensorDataset(features, torch.arange(RECORDS) % 3)


def make_private(mode="ghost", *, model=None, dtype=torch.float32, engine=None, **changes):
    """(engine, model, optimizer, criterion, loader)"""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(dtype) if model is None else model
    arguments = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1),
        "data_loader": DataLoader(records(dtype), batch_size=BATCH),
        "noise_multiplier": 0.0,
        "max_grad_norm": 0.6,
        "batch_order": "cyclic",
        "criterion": nn.CrossEntropyLoss(),
        "loss_geometry": "auto",
        "feature_norm": 1.0,
        **changes,
    }
    if arguments["loss_geometry"] is None:
        arguments.pop("feature_norm")
    engine = engine or HiddenStatePrivacyEngine()
    result = engine.make_private(module=model, grad_sample_mode=mode, **arguments)
    if mode != "ghost":
        model, optimizer, loader = result
        return engine, model, optimizer, arguments["criterion"], loader
    model, optimizer, criterion, loader = result
    assert criterion is arguments["criterion"]
    return engine, model, optimizer, criterion, loader


def train(model, optimizer, criterion, loader, epochs=2, pieces=None):
    for _ in range(epochs):
        if pieces is None:
            steps(model, optimizer, criterion, loader)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=pieces, optimizer=optimizer
            ) as smaller:
                steps(model, optimizer, criterion, smaller)


def steps(model, optimizer, criterion, batches):
    for features, targets in batches:
        optimizer.zero_grad()
        criterion(model(features), targets).backward()
        optimizer.step()


def flat(parameters):
    return torch.cat([p.detach().reshape(-1) for p in parameters]).numpy().astype(float)
