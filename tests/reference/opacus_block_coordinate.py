"""DP-MBCD in PyTorch on a tiny model."""

import torch
from dp_accounting import NeighboringRelation
from opacus import GradSampleModule
from torch import nn

from hidden_state_adapters.opacus import BlockCoordinateOptimizer

ONE, SPECIAL = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
RATE, SIZE, CLIP = 0.2, 4, 0.7


def factors(dtype=torch.float64, reduction="mean", **kwargs):
    """x -> W2 W1 x: bilinear in the two blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)).to(dtype)
    return GradSampleModule(model, loss_reduction=reduction, **kwargs)


def make(model=None, *, num_blocks=2, sgd=None, cls=BlockCoordinateOptimizer, **options):
    model = factors() if model is None else model
    params = list(model.parameters())
    groups = [{"params": [p]} for p in params] if num_blocks == 2 else params
    inner = torch.optim.SGD(groups, **{"lr": RATE, **(sgd or {})})
    arguments = {
        "module": model,
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "expected_batch_size": SIZE,
    }
    return model, cls(inner, **(arguments | options))


def batches(count, dtype=torch.float64, rows=SIZE):
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(count, 2, rows, 3, generator=generator, dtype=dtype)
    return [(x, y) for x, y in draw]


def closure_of(model, optimizer, batch, reduction="mean"):
    x, y = batch

    def closure():
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).sum(dim=1) / 2
        getattr(loss, reduction)().backward()

    return closure


def train(model, optimizer, data, **kwargs):
    for batch in data:
        optimizer.step(closure_of(model, optimizer, batch, **kwargs))


def values(model):
    return [p.detach().cpu().numpy().copy() for p in model.parameters()]


def trained(steps=6, **options):
    model, optimizer = make(noise_multiplier=2.0, **options)
    train(model, optimizer, batches(steps))
    return model, optimizer
