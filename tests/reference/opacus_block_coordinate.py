"""DP-MBCD in PyTorch on a tiny model, through the engine."""

import torch
from dp_accounting import NeighboringRelation
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import BlockCoordinate, HiddenStatePrivacyEngine

ONE, SPECIAL = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
RATE, SIZE, CLIP = 0.2, 4, 0.7


def factors(dtype=torch.float64):
    """x -> W2 W1 x: bilinear in the two blocks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)).to(dtype)


def batches(count, dtype=torch.float64, rows=SIZE):
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(count, 2, rows, 3, generator=generator, dtype=dtype)
    return [(x, y) for x, y in draw]


def values(model):
    return [p.detach().cpu().numpy().copy() for p in model.parameters()]


DELTA, NOISE = 1e-5, 2.0
BATCHES = batches(3)  # an epoch
X, Y = (torch.cat(parts) for parts in zip(*BATCHES, strict=True))


class SquaredError(nn.Module):
    """Half of the squared norm of the residual of every record."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs, targets):
        return getattr(((outputs - targets) ** 2).sum(dim=1) / 2, self.reduction)()


class Session:
    """An engine, a model with one or two blocks, and the shortest loop."""

    def __init__(
        self, num_blocks=2, *, engine=None, model=None, module=None, relation=SPECIAL,
        data=(X, Y), loader=None, sgd=None, **options,
    ):  # fmt: skip
        self.engine = engine or HiddenStatePrivacyEngine(neighboring_relation=relation)
        self.inner = factors() if model is None else model
        self.criterion = options.setdefault("criterion", SquaredError())
        params = list(self.inner.parameters())
        groups = params if num_blocks == 1 else [{"params": [p]} for p in params]
        arguments = {
            "module": module or self.inner,
            "optimizer": torch.optim.SGD(groups, **{"lr": RATE, **(sgd or {})}),
            "data_loader": DataLoader(
                TensorDataset(*data), **{"batch_size": SIZE, **(loader or {})}
            ),
            "max_grad_norm": CLIP,
            "batch_order": "cyclic",
            "mechanism": BlockCoordinate(),
        }
        make = self.engine.make_private_with_epsilon
        if "target_epsilon" not in options:
            make = self.engine.make_private
            arguments["noise_multiplier"] = NOISE
        result = make(**arguments | options)
        self.model, self.optimizer, self.loader = result[0], result[1], result[-1]

    def backward(self, batch):
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()

    def step(self, batch):
        self.optimizer.step(lambda: self.backward(batch))

    def train(self, epochs=1, loader=None):
        for _ in range(epochs):
            for batch in self.loader if loader is None else loader:
                self.step(batch)
        return self

    @property
    def values(self):
        return values(self.inner)

    @property
    def event(self):
        return self.engine.privacy_event


def linear(**options):
    """One block with a convex loss: a softmax head on features of norm 1, bounded by 2."""
    if "model" not in options:
        torch.manual_seed(0)
    arguments = {
        "model": options.get("model") or nn.Linear(3, 2).double(),
        "criterion": nn.CrossEntropyLoss(),
        "data": (nn.functional.normalize(X), torch.arange(len(X)) % 2),
        "loss_geometry": "auto", "feature_norm": 1.0, "max_grad_norm": 2.1,
    }  # fmt: skip
    return Session(1, **arguments | options)
