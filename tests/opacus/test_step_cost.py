"""What a step costs beside Opacus' own: transfers from the device; and the other device.

tests/rehearsal counts them on every path of the adapter.
"""

import warnings

import pytest
import torch
from opacus import PrivacyEngine
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
KINDS = ["cyclic", "linear", "dice_sgd", "dice_adam"]


class Loop:
    """A model with one of the optimizers, on six batches of ten; `noise` is the multiplier."""

    def __init__(self, kind, device="cpu", noise=0.7, width=(5, 4), dtype=torch.float32):
        torch.manual_seed(0)
        layers = [nn.Linear(width[0], width[1]), nn.Tanh(), nn.Linear(width[1], 3)]
        if kind in ("linear", "weighted"):
            layers = [nn.Linear(width[0], 3)]
        self.model = nn.Sequential(*layers).to(device=device, dtype=dtype)
        features = torch.randn(60, width[0], generator=torch.Generator().manual_seed(1))
        features = nn.functional.normalize(features, dim=1).to(device=device, dtype=dtype)
        self.dataset = TensorDataset(features, (torch.arange(60) % 3).to(device))
        self.criterion = nn.CrossEntropyLoss()
        adam = kind.endswith("adam")
        base = (torch.optim.Adam if adam else torch.optim.SGD)(self.model.parameters(), lr=0.1)
        loader = DataLoader(self.dataset, batch_size=10)
        arguments = {"noise_multiplier": noise, "max_grad_norm": 0.05}
        if kind.startswith("opacus"):
            engine, more = PrivacyEngine(accountant="rdp"), {"poisson_sampling": False}
        else:
            engine, more = HiddenStatePrivacyEngine(), {"batch_order": "cyclic"}
        if kind == "weighted":
            weight = torch.tensor([1.0, 0.5, 0.5], device=device)
            self.criterion = nn.CrossEntropyLoss(weight=weight, reduction="sum")
            more |= {"loss_geometry": "auto", "feature_norm": 1.0, "criterion": self.criterion,
                    "loss_reduction": "sum"}  # fmt: skip
        elif kind == "linear":
            more |= {"loss_geometry": "auto", "feature_norm": 1.0, "criterion": self.criterion,
                    "after": BallProjection(50.0)}  # fmt: skip
        elif kind.startswith("dice"):
            more |= {"optimizer_class": DiceAdamOptimizer if adam else DiceSGDOptimizer}
        self.module, self.optimizer, self.loader = engine.make_private(
            module=self.model, optimizer=base, data_loader=loader, **arguments, **more
        )

    def step(self, batch):
        features, labels = batch
        self.optimizer.zero_grad()
        self.criterion(self.module(features), labels).backward()
        self.optimizer.step()

    def epoch(self):
        for batch in self.loader:
            self.step(batch)


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


def test_the_count_sees_every_way(waits):
    tensor = torch.ones(2)
    for call in (
        lambda: tensor[0].item(),
        lambda: float(tensor[0]),
        lambda: bool(tensor[0]),
        lambda: tensor.tolist(),
        lambda: tensor.cpu(),
        lambda: torch.equal(tensor, tensor.clone()),
        lambda: tensor[tensor > 0],
    ):
        assert waits(call) == 1
    assert waits(lambda: tensor.add(1).sum()) == 0


@pytest.mark.parametrize("kind", [*KINDS, "weighted"])
def test_one_transfer_in_a_step(waits, kind):
    """Beside what Opacus and Adam do: one, with all checks in it."""
    stock, ours = Loop("opacus_adam" if kind.endswith("adam") else "opacus"), Loop(kind)
    counts = []
    for loop in (stock, ours):
        batches = iter(loop.loader)
        loop.step(next(batches))
        counts.append(waits(lambda: [loop.step(next(batches)) for _ in range(2)]))  # noqa: B023
    assert counts[1] - counts[0] == 2


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [*KINDS, "weighted"])
def test_one_transfer_on_a_gpu(kind):
    stock, ours = (
        Loop(k, "cuda") for k in ("opacus_adam" if kind.endswith("adam") else "opacus", kind)
    )
    counts = []
    for loop in (stock, ours):
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_trajectory_on_a_gpu(kind, dtype):
    ends = []
    for device in ("cpu", "cuda"):
        loop = Loop(kind, device, noise=0.0, dtype=dtype)
        for _ in range(3):
            loop.epoch()
        ends.append([p.detach().cpu() for p in loop.model.parameters()])
    tolerance = 1e-10 if dtype == torch.float64 else 5e-5
    for on_cpu, on_gpu in zip(*ends, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, atol=tolerance, rtol=0)
