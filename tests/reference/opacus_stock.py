"""Opacus' own engine with accountant="hidden_state": the declared run of the tests."""

import math

import pytest
import torch
from dp_accounting import NeighboringRelation
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants.runs.run import Step

DELTA = 1e-5
SOFTMAX = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)
DECLARED = {"batch_order": "cyclic", "dataset_size": 60, "batch_size": 10, "loss_geometry": SOFTMAX}


def drawn(rate):
    """The rate at which Opacus draws: its random numbers are multiples of 2**-24."""
    return math.ceil(rate * 2**24) / 2**24


def event(**changes):
    if changes.get("batch_order") == "poisson":
        rate = changes.get("batch_size", 10) / changes.get("dataset_size", 60)
        changes = {"sampling_rate": drawn(rate), **changes}
    arguments = {
        "noise_multiplier": 2.0, "learning_rate": 0.5, "clip_norm": 2.1, "batch_size": 10,
        "dataset_size": 60, "num_steps": 12, "batch_order": "cyclic", "loss": SOFTMAX,
        "weight_decay": 0.1, **changes,
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**arguments)


def epsilon(event, relation=NeighboringRelation.REPLACE_SPECIAL):
    return pytest.approx(
        hsa.LastIterateAccountant(relation).compose(event).get_epsilon(DELTA),
        rel=1e-12,
    )


def step(model, private, batches, factor=1.0):
    features, labels = next(iter(batches))
    private.zero_grad()
    (factor * nn.CrossEntropyLoss()(model(features), labels)).backward()
    private.step()


KINDS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.1), {}),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), {}),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01), {}),
    "per layer": (
        lambda p: torch.optim.SGD(p, lr=0.5),
        {"clipping": "per_layer", "max_grad_norm": [1.5, 1.5]},
    ),
}


def resume(train, first, declared, kind):
    """A fresh engine that goes on where `first` stopped."""
    optimizer, arguments = KINDS[kind]
    engine, *private = train(declared, optimizer=optimizer, epochs=0, **arguments)
    engine.accountant.load_state_dict(first.accountant.state_dict())
    return engine, *private


def recorder(steps):
    recorder = hsa.RunRecorder(batch_order="full", batch_size=60, dataset_size=60)
    for _ in range(steps):
        recorder.add(Step(noise_multiplier=0.3, learning_rate=0.1, clip_norm=1.0, rows=60))
    return recorder
