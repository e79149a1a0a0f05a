"""DiceSGD and DiceAdam in PyTorch on a tiny model, and the paper's steps on one vector."""

import io
import re

import numpy as np
import torch
from opacus import GradSampleModule
from torch import nn

from hidden_state_adapters.opacus import DiceAdamOptimizer, DiceSGDOptimizer

RATE, DIVISOR, CLIP, ERROR_CLIP = 0.3, 4, 0.5, 0.2
OPTIMIZERS = {
    "sgd": (DiceSGDOptimizer, torch.optim.SGD, {}),
    "adam": (DiceAdamOptimizer, torch.optim.Adam, {}),
    "automatic": (DiceSGDOptimizer, torch.optim.SGD, {"automatic": True}),
}
VARIANTS = list(OPTIMIZERS)

# The error of a run on one record of MARK + 1, clipped at 1: a value that stands out.
MARK = 777.25
NEEDLE = np.float64(MARK).tobytes()
# With its point: addresses and digests have digits of their own, at random.
SHOWN = re.compile(r"77[78]\.25")


def layers(dtype=torch.float64, reduction="mean"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    return GradSampleModule(model, loss_reduction=reduction)


def make(variant="sgd", model=None, base_options=None, **options):
    model = layers() if model is None else model
    cls, base, extra = OPTIMIZERS[variant]
    inner = base(model.parameters(), **{"lr": RATE, **(base_options or {})})
    arguments = {
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "error_max_grad_norm": CLIP if variant == "automatic" else ERROR_CLIP,
        "expected_batch_size": DIVISOR,
    }
    return model, cls(inner, **(arguments | extra | options))


def backward(model, features, scale=3.0):
    outputs = model(features)
    (scale * (outputs**2).sum(dim=1)).mean().backward() if len(features) else (
        scale * (outputs**2).sum()
    ).backward()


def batches(sizes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, generator=generator, dtype=dtype) for size in sizes]


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors]).cpu().numpy().astype(float)


def error_of(optimizer):
    return flat(optimizer.run_state_dict(include_private_state=True)["private"]["error"])


def train(model, optimizer, data):
    for features in data:
        optimizer.zero_grad()
        backward(model, features)
        optimizer.step()


def everything_in(value):
    """All numbers that can be reached from containers and tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(-1).tolist()
    if isinstance(value, dict):
        return [n for v in value.values() for n in everything_in(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in everything_in(v)]
    return [value] if isinstance(value, float) else []


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
