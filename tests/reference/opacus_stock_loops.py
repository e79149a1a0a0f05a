"""Loops on Opacus' own engine with accountant="hidden_state", as a user writes them."""

import secrets
import warnings

import attrs
import torch
from opacus import PrivacyEngine
from opacus_stock import DELTA
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_adapters.opacus  # noqa: F401  registers the accountant

RECORDS, BATCH, FEATURES, CLASSES = 60, 10, 5, 3


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
    *, declared=None, data=None, loader=None, original=None, engine=None, base=None, **arguments
):
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
        "module": model,
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
