"""What a step costs beside Opacus' own: transfers from the device; and the other device.

tests/rehearsal counts them on every path of the adapter.
"""

import warnings

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus_runs import flat, layers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import (
    BallProjection,
    DiceAdamOptimizer,
    DiceSGDOptimizer,
    HiddenStatePrivacyEngine,
    gradients,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "is_nonzero"}
KNOWN = {"loss_geometry": "auto", "feature_norm": 1.0}
KINDS = {
    "cyclic": {},
    "linear": {**KNOWN, "after": BallProjection(50.0)},
    "weighted": {**KNOWN, "loss_reduction": "sum"},
    "dice_sgd": {"optimizer_class": DiceSGDOptimizer},
    "dice_adam": {"optimizer_class": DiceAdamOptimizer},
}


class Loop:
    """A model with one of the optimizers, or with Opacus' own engine, on six batches of ten."""

    def __init__(self, kind, device="cpu", dtype=torch.float32, stock=False, noise=0.7):
        arguments = {} if stock else KINDS[kind]
        self.model = nn.Linear(5, 3) if "feature_norm" in arguments else layers()
        self.model.to(device=device, dtype=dtype)
        self.criterion = nn.CrossEntropyLoss()
        if kind == "weighted" and not stock:
            weight = torch.tensor([1.0, 0.5, 0.5], device=device)
            self.criterion = nn.CrossEntropyLoss(weight=weight, reduction="sum")
        if "feature_norm" in arguments:
            arguments = {**arguments, "criterion": self.criterion}
        features = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
        features = nn.functional.normalize(features, dim=1).to(device=device, dtype=dtype)
        base = torch.optim.Adam if kind.endswith("adam") else torch.optim.SGD
        order = {"poisson_sampling": False} if stock else {"batch_order": "cyclic"}
        engine = PrivacyEngine(accountant="rdp") if stock else HiddenStatePrivacyEngine()
        self.module, self.optimizer, self.loader = engine.make_private(
            module=self.model,
            optimizer=base(self.model.parameters(), lr=0.1),
            data_loader=DataLoader(
                TensorDataset(features, (torch.arange(60) % 3).to(device)), batch_size=10
            ),
            noise_multiplier=noise,
            max_grad_norm=0.05,
            **order,
            **arguments,
        )

    def step(self, batch):
        features, labels = batch
        self.optimizer.zero_grad()
        self.criterion(self.module(features), labels).backward()
        self.optimizer.step()


# --- transfers ------------------------------------------------------------------------------------


class CountWaits(TorchDispatchMode):
    """Counts what would wait for the device, were the tensors on one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = args[1] if name == "index" else ()  # how many rows are left?
        is_mask = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        self.count += name in WAITS or is_mask
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch):
    """Counts the waits of a call; the code takes the way that it takes on a device."""
    monkeypatch.setattr(gradients, "is_on_host", lambda value: False)
    mode = CountWaits()

    def counted(name):
        original = getattr(torch.Tensor, name)

        def method(tensor, *args, **kwargs):
            mode.count += 1
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, method)

    counted("tolist")  # of a tensor on the CPU it passes no dispatcher
    counted("cpu")

    def count(call, *args):
        mode.count = 0
        with mode:
            call(*args)
        return mode.count

    return count


@pytest.mark.parametrize("kind", KINDS)
def test_one_transfer_in_a_step(waits, kind):
    """Beside what Opacus and Adam do: one, with all checks in it."""
    counts = []
    for loop in (Loop(kind, stock=True), Loop(kind)):
        batches = iter(loop.loader)
        loop.step(next(batches))
        counts.append(waits(lambda: [loop.step(next(batches)) for _ in range(2)]))  # noqa: B023
    assert counts[1] - counts[0] == 2


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_one_transfer_on_a_gpu(kind):
    counts = []
    for loop in (Loop(kind, "cuda", stock=True), Loop(kind, "cuda")):
        batches = iter(loop.loader)
        loop.step(next(batches))
        batch = next(batches)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loop.step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(warning.message) for warning in caught))
    assert counts[1] - counts[0] == 1


# --- the other device -----------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "weighted"])
def test_the_same_trajectory_on_a_gpu(kind, dtype, tolerance):
    ends = []
    for device in ("cpu", "cuda"):
        loop = Loop(kind, device, dtype, noise=0.0)
        for _ in range(3):
            for batch in loop.loader:
                loop.step(batch)
        ends.append(flat(loop.model.parameters()))
    np.testing.assert_allclose(*ends, atol=tolerance, rtol=0)
