"""Ghost clipping with DiceSGD and DiceAdam."""

import math

import numpy as np
import pytest
import torch
from dice import automatic_step, sgd_step
from opacus import GradSampleModule
from opacus_ghost import SIZES, batches, flat, make_private, mlp, train
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    DiceAdamOptimizer,
    DiceSGDOptimizer,
    GhostGradSampleModule,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


DICE = {
    "sgd": (DiceSGDOptimizer, torch.optim.SGD, {}),
    "adam": (DiceAdamOptimizer, torch.optim.Adam, {}),
    "automatic": (DiceSGDOptimizer, torch.optim.SGD, {"automatic": True}),
}
CLIP, ERROR_CLIP, DIVISOR, RATE = 0.5, 0.2, 4, 0.3


def dice(variant, wrapper, dtype=torch.float64, noise=0.0):
    cls, base, extra = DICE[variant]
    model = wrapper(mlp(dtype))
    optimizer = cls(
        base(model.parameters(), lr=RATE), noise_multiplier=noise, max_grad_norm=CLIP,
        error_max_grad_norm=CLIP if variant == "automatic" else ERROR_CLIP,
        expected_batch_size=DIVISOR, generator=torch.Generator().manual_seed(5), **extra,
    )  # fmt: skip
    return model, optimizer


def backward(model, features):
    losses = 3.0 * (model(features) ** 2).sum(dim=1)
    (losses.mean() if len(features) else losses.sum()).backward()


def error_of(optimizer):
    return flat(optimizer.run_state_dict(include_private_state=True)["private"]["error"])


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str
)
@pytest.mark.parametrize("variant", DICE)
def test_dice_steps_and_error_are_those_of_hooks(variant, dtype, tolerance, in_pieces):
    ends, errors, largest = [], [], []
    for wrapper in (GradSampleModule, GhostGradSampleModule):
        model, optimizer = dice(variant, wrapper, dtype, noise=0.7)
        for features in batches(dtype):
            optimizer.zero_grad()
            if in_pieces and wrapper is GhostGradSampleModule and len(features) > 2:
                optimizer.signal_skip_step(True)
                backward(model, features[:2])
                optimizer.step()
                optimizer.zero_grad()
                optimizer.signal_skip_step(False)
                backward(model, features[2:])
            else:
                backward(model, features)
            optimizer.step()
        ends.append(flat(model.parameters()))
        errors.append(error_of(optimizer))
        largest.append(optimizer.run._largest_norm)
        assert optimizer.num_steps == len(SIZES)
    assert np.linalg.norm(errors[0]) > 0.5
    np.testing.assert_allclose(ends[1], ends[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(errors[1], errors[0], rtol=tolerance, atol=tolerance)
    assert largest[1] == pytest.approx(largest[0])


@pytest.mark.parametrize("variant", ["sgd", "automatic"])
def test_dice_steps_are_those_of_the_paper(variant):
    model, optimizer = dice(variant, GhostGradSampleModule)
    x = flat(model.parameters())
    error = np.zeros_like(x)
    for features in batches():
        gradients = per_example(x, features)
        optimizer.zero_grad()
        backward(model, features)
        optimizer.step()
        common = {"learning_rate": RATE, "divisor": DIVISOR, "clip_norm": CLIP}
        if variant == "automatic":
            x, error = automatic_step(x, error, gradients, 0.0, **common)
        else:
            x, error = sgd_step(x, error, gradients, 0.0, error_clip_norm=ERROR_CLIP, **common)
        np.testing.assert_allclose(flat(model.parameters()), x, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(error_of(optimizer), error, rtol=1e-10, atol=1e-10)


def per_example(x, features):
    """The gradients of single records at x, from a model of its own."""
    model = mlp(torch.float64)
    nn.utils.vector_to_parameters(torch.tensor(x), model.parameters())
    rows = []
    for feature in features:
        model.zero_grad()
        backward(model, feature[None])
        rows.append(flat([p.grad for p in model.parameters()]))
    return np.array(rows).reshape(len(rows), len(x))


@pytest.mark.parametrize("pieces", [None, 3])
@pytest.mark.parametrize("variant", DICE)
def test_the_engine_makes_dice_optimizers_for_it(variant, pieces):
    cls, base, extra = DICE[variant]
    ends, errors, events = [], [], []
    for mode in ("hooks", "ghost"):
        model = mlp(torch.float64)
        engine, *run = make_private(
            mode, model=model, dtype=torch.float64, optimizer=base(model.parameters(), lr=0.1),
            optimizer_class=cls, error_max_grad_norm=CLIP, max_grad_norm=CLIP, loss_geometry=None,
            noise_multiplier=0.5, noise_generator=torch.Generator().manual_seed(4), **extra,
        )  # fmt: skip
        train(*run, pieces=pieces)
        ends.append(flat(model.parameters()))
        errors.append(error_of(run[1]))
        events.append(engine.privacy_event)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(errors[1], errors[0], rtol=1e-11, atol=1e-11)
    assert np.linalg.norm(errors[0]) > 0.01
    assert events[1] == events[0]


def test_dice_refuses_what_it_refuses_with_hooks():
    model, optimizer = dice("sgd", GhostGradSampleModule)
    backward(model, batches()[0])
    optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="does not come from the"):
        optimizer.step()
    model, optimizer = dice("sgd", GhostGradSampleModule)
    for _ in range(2):
        backward(model, batches()[0])
    with pytest.raises(hsa.UnsupportedRunError, match="2 batches"):
        optimizer.step()
    model, optimizer = dice("sgd", GhostGradSampleModule)
    backward(model, batches()[0] * math.inf)
    with pytest.raises(hsa.UnsupportedRunError, match="not finite"):
        optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="refused or interrupted"):
        optimizer.privacy_event(dataset_size=12, batch_order="poisson")
