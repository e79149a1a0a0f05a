"""Every path of the Opacus adapter on a device: a pretend one, or DEVICE=cuda.

Not part of the tests ("make rehearsal"): the pretend device has to be built.
"""

import contextlib
import io
import math
import os

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters import opacus as adapter

if os.environ.get("DEVICE", "sim") == "sim":
    from pretend_device import DEVICE, transfers
else:  # of a real one nobody counts
    DEVICE, transfers = os.environ["DEVICE"], lambda: 0

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

BATCH, DELTA = 40, 1e-5
CRITERION = nn.CrossEntropyLoss()
X = nn.functional.normalize(torch.randn(240, 16, generator=torch.Generator().manual_seed(0)))
Y = torch.arange(240) % 4


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32, elementwise_affine=False)
        self.backbone = nn.Sequential(*layers).requires_grad_(False)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(nn.functional.normalize(self.backbone(x)))


def head():
    return nn.Linear(16, 4)


def one():
    return nn.Linear(16, 1)


def deep():
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def by_layer(model):
    layers = [part for part in model if isinstance(part, nn.Linear)]
    return torch.optim.SGD([{"params": part.parameters()} for part in layers], lr=0.1)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


class Run:
    """A run on the device; keyword arguments go to make_private or are named here."""

    def __init__(self, make=head, optimizer=sgd, data=(X, Y), on_device=False, pieces=0, **given):
        torch.manual_seed(0)
        self.engine, self.pieces = adapter.HiddenStatePrivacyEngine(), pieces
        model = make().to(DEVICE)
        start, arguments = self.engine.make_private, {"noise_multiplier": 2.0, "max_grad_norm": 1.0}
        if "target_epsilon" in given:
            start = self.engine.make_private_with_epsilon
            del arguments["noise_multiplier"]
        data = TensorDataset(*(tensor.to(DEVICE) if on_device else tensor for tensor in data))
        self.model, self.optimizer, *criterion, self.loader = start(
            module=model,
            optimizer=optimizer(model),
            data_loader=DataLoader(data, batch_size=BATCH),
            **{**arguments, **given},
        )
        (self.criterion,) = criterion or [given.get("criterion", CRITERION)]

    def step(self, x, y):
        """Returns the number of transfers of the step itself."""

        def backward():
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()

        takes_closure = len(self.optimizer.blocks) > 1
        if not takes_closure:
            backward()
        before = transfers()
        self.optimizer.step(*[backward] * takes_closure)
        return transfers() - before

    def epochs(self, count=2):
        """Returns the transfers of every step."""
        found = []
        for _ in range(count):
            pieces = contextlib.nullcontext(self.loader)
            if self.pieces:
                pieces = BatchMemoryManager(
                    data_loader=self.loader,
                    max_physical_batch_size=self.pieces,
                    optimizer=self.optimizer,
                )
            with pieces as loader:
                found += [self.step(x.to(DEVICE), y.to(DEVICE)) for x, y in loader]
        return found


HEAD = {"criterion": CRITERION, "feature_norm": 1.0, "max_grad_norm": "auto"}
DICE = {"mechanism": adapter.DiceSGD(), "batch_order": "without_replacement"}
FIXED = {**HEAD, "batch_order": "shuffled_once"}
ONE = {**FIXED, "make": one, "data": (X, X[:, :1])}
BLOCKS = {"mechanism": adapter.BlockCoordinate(), "batch_order": "cyclic"}
PATHS = {
    **{f"head, {order.value}": {**HEAD, "batch_order": order} for order in hsa.BatchOrder},
    "data set on the device": {**FIXED, "on_device": True},
    "frozen backbone": {**FIXED, "make": Probe, "feature_norm": 1.001},
    "logistic": {**ONE, "criterion": nn.BCEWithLogitsLoss(), "data": (X, (Y > 1)[:, None].float())},
    "squared error": {**ONE, "criterion": nn.MSELoss(), "max_grad_norm": 1.0},
    "Huber": {**ONE, "criterion": nn.HuberLoss()},
    "envelope": {**FIXED, "criterion": adapter.EnvelopeCrossEntropyLoss(0.5)},
    "schedule": {**FIXED, "schedule": 0.5},
    "ball": {**FIXED, "after": adapter.BallProjection(3.0)},
    "l1": {**FIXED, "after": hsa.Regulariser(l1=1e-3)},
    "pieces": {**FIXED, "pieces": 16},
    "target epsilon": {**HEAD, "target_epsilon": 2.0, "target_delta": DELTA, "epochs": 2},
    "declared loss": {"loss_geometry": hsa.LossGeometry.convex(1.0), "batch_order": "cyclic"},
    "Dice on a head": {**DICE, "criterion": CRITERION, "feature_norm": 1.0},
    "Dice": {**DICE, "make": deep},
    "Dice, Adam": {**DICE, "make": deep, "optimizer": adam},
    "blocks": {**BLOCKS, "make": deep, "optimizer": by_layer},
    "composition": {"make": deep},
    "composition, pieces": {"make": deep, "pieces": 16},
    "Adam": {"make": deep, "optimizer": adam},
    "functorch": {"make": deep, "grad_sample_mode": "functorch"},
    "ghost": {"make": deep, "grad_sample_mode": "ghost", "criterion": CRITERION},
    "per layer": {"make": deep, "clipping": "per_layer", "max_grad_norm": [1.0] * 4},
}  # fmt: skip


def check_transfers(run, found):
    """The first step also looks around; every later one waits once for each block.

    An envelope also compares its arguments with those of the loop, whose result it has.
    """
    further = 2 * isinstance(run.criterion, adapter.EnvelopeCrossEntropyLoss)
    if transfers():
        assert set(found[1:]) == {len(run.optimizer.blocks) + further}, found


@pytest.mark.parametrize("path", PATHS)
def test_a_run_waits_once_a_step(path):
    run = Run(**PATHS[path])
    check_transfers(run, run.epochs())
    assert all(param.device.type == DEVICE for param in run.model.parameters())
    assert 0 < run.engine.get_epsilon(DELTA) < math.inf
    assert run.engine.report(DELTA)


def test_a_checkpoint_goes_on():
    first, again = (Run(**HEAD, batch_order="reshuffled") for _ in range(2))
    first.epochs(1)
    file = io.BytesIO()
    first.engine.save_checkpoint(path=file)
    file.seek(0)
    again.engine.load_checkpoint(path=file)
    check_transfers(again, again.epochs(1))
    assert again.engine.privacy_event.num_steps == 12


def test_a_head_in_one_call():
    features, labels = X.to(DEVICE), Y.to(DEVICE)
    layer, guarantee = adapter.fit_head(features, labels, epsilon=1.0, delta=DELTA, classes=4)
    assert layer.weight.device.type == DEVICE
    assert guarantee.epsilon(DELTA) <= 1.0


def test_a_stock_engine():
    engine, model = PrivacyEngine(accountant="hidden_state"), deep().to(DEVICE)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=sgd(model),
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=BATCH),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        CRITERION(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()
    assert 0 < engine.get_epsilon(DELTA) < 100
