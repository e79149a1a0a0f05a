"""A small softmax model on unit-norm features, made private; 60 records in 6 batches of 10."""

import warnings

import attrs
import pytest
import torch
from opacus_dice import CLIP, ERROR_CLIP, RATE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import DiceSGD, HiddenStatePrivacyEngine

RECORDS, FEATURES, CLASSES, BATCH = 60, 5, 3, 10

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@attrs.define
class Run:
    """An engine with what make_private returned, and the shortest training loop."""

    engine: HiddenStatePrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    plain_model: nn.Module
    criterion: nn.Module

    def backward(self, batch):
        self.optimizer.zero_grad()
        features, labels = batch
        self.criterion(self.model(features), labels).backward()

    def step(self, batch):
        self.backward(batch)
        self.optimizer.step()

    def epoch(self, loader=None):
        for batch in self.loader if loader is None else loader:
            self.step(batch)

    @property
    def steps(self):
        return self.engine.accountant.recorders[-1].num_steps


def unit_rows(rows, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, FEATURES, generator=generator, dtype=dtype)
    return features / features.norm(dim=1, keepdim=True)


@pytest.fixture
def dataset():
    labels = torch.arange(RECORDS) % CLASSES
    return TensorDataset(unit_rows(RECORDS), labels)


@pytest.fixture
def make_loader(dataset):
    def make(**kwargs):
        return DataLoader(kwargs.pop("dataset", dataset), **{"batch_size": BATCH, **kwargs})

    return make


@pytest.fixture
def make_run(make_loader):
    """Builds a Run; keyword arguments go to make_private, `loader`, `sgd`, `model` and `engine`.

    With a `target_epsilon` they go to make_private_with_epsilon.
    """

    def make(*, loader=None, sgd=None, model=None, engine=None, optimizer=None, **kwargs):
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES) if model is None else model
        if optimizer is None:
            optimizer = torch.optim.SGD(
                model.parameters(), **{"lr": 0.5, "weight_decay": 0.1, **(sgd or {})}
            )
        criterion = kwargs.get("criterion") or nn.CrossEntropyLoss()
        arguments = {
            "noise_multiplier": 2.0,
            "max_grad_norm": 2.1,
            "feature_norm": 1.0,
            "criterion": criterion,
            **({} if "poisson_sampling" in kwargs else {"batch_order": "cyclic"}),
            **kwargs,
        }
        if arguments.get("loss_geometry", "auto") != "auto" and "feature_norm" not in kwargs:
            arguments.pop("feature_norm")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Secure RNG turned off")
            engine = engine or HiddenStatePrivacyEngine()
            start = engine.make_private
            if "target_epsilon" in kwargs:
                start = engine.make_private_with_epsilon
                arguments = {"target_delta": 1e-5, "epochs": 2, **arguments}
                del arguments["noise_multiplier"]
            private, optimizer, *own, batches = start(
                module=model,
                optimizer=optimizer,
                data_loader=make_loader(**(loader or {})),
                **arguments,
            )
        criterion = own[0] if own else criterion  # ghost clipping has its own
        return Run(engine, private, optimizer, batches, plain_model=model, criterion=criterion)

    return make


@pytest.fixture
def make_dice(make_run, dataset):
    """A run of DiceSGD in float64; arguments as for make_run, `base` makes the inner optimizer."""
    features, labels = dataset.tensors
    data = TensorDataset(features.double(), labels)

    def make(variant="sgd", *, base=None, loader=None, **kwargs):
        torch.manual_seed(0)
        model = kwargs.pop("model", None) or nn.Linear(5, 3).double()
        kind = torch.optim.Adam if variant == "adam" else torch.optim.SGD
        optimizer = kind(model.parameters(), **{"lr": RATE, **(base or {})})
        options = {
            "error_max_grad_norm": CLIP if variant == "automatic" else ERROR_CLIP,
            "automatic": variant == "automatic",
        }
        names = [field.name for field in attrs.fields(DiceSGD)]
        options |= {name: kwargs.pop(name) for name in names if name in kwargs}
        arguments = {
            **({} if "optimizer_class" in kwargs else {"mechanism": DiceSGD(**options)}),
            "max_grad_norm": CLIP,
            "noise_multiplier": 20.0,
            "loss_geometry": None,
            **kwargs,
        }
        loader = {"dataset": data, **(loader or {})}
        return make_run(model=model, optimizer=optimizer, loader=loader, **arguments)

    return make
