"""Opacus' own engine with accountant="hidden_state": declared runs, and loops of users."""

import math
import secrets
import warnings

import attrs
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
import hidden_state_adapters.opacus  # noqa: F401  registers the accountant

RECORDS, BATCH, FEATURES, CLASSES = 60, 10, 5, 3
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


def records(count=RECORDS):
    features = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(nn.functional.normalize(features), torch.arange(count) % CLASSES)


def secret_generator():
    return torch.Generator().manual_seed(2**62 + secrets.randbits(62))


@attrs.define
class StockLoop:
    """An engine, what its make_private returned, and the shortest loop."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    criterion: nn.Module
    original: DataLoader

    @property
    def accountant(self):
        return self.engine.accountant

    @property
    def epsilon(self):
        return self.engine.get_epsilon(DELTA)

    @property
    def event(self):
        return self.accountant.recorders[-1].event()

    def step(self, batch, factor=1.0):
        features, labels = batch
        self.optimizer.zero_grad()
        (factor * self.criterion(self.model(features), labels)).backward()
        self.optimizer.step()

    def epoch(self, loader=None):
        for batch in self.loader if loader is None else loader:
            self.step(batch)

    def declare(self, **changes):
        self.accountant.declare_run(**{"criterion": self.criterion, "feature_norm": 1.0, **changes})


def stock_loop(
    *, declared=None, data=None, loader=None, original=None, engine=None, base=None,
    wrap=lambda model: model, **arguments,
):  # fmt: skip
    """make_private of a PrivacyEngine; `declared` is a dictionary of declare_run."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES)
    original = original or DataLoader(
        records() if data is None else data, **{"batch_size": BATCH, **(loader or {})}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus: secure mode is off
        engine = engine or PrivacyEngine(accountant="hidden_state")
    options = {
        "module": wrap(model),
        "optimizer": (base or plain_sgd)(model.parameters()),
        "data_loader": original,
        "max_grad_norm": 2.1,
        "poisson_sampling": False,
        **arguments,
    }
    if "target_epsilon" in arguments:
        private = engine.make_private_with_epsilon(target_delta=DELTA, **options)
    else:
        private = engine.make_private(**{"noise_multiplier": 2.0, **options})
    if declared is not None:
        engine.accountant.declare_run(**declared)
    model, optimizer, *criterion, made = private  # with ghost clipping a criterion as well
    criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
    return StockLoop(engine, model, optimizer, made, criterion, original)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, weight_decay=0.1)
