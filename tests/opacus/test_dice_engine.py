"""DiceSGD through the engine: the paper's steps on the plan's batches."""

import math

import numpy as np
import pytest
import torch
from dice import adam_step, automatic_step, sgd_step
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_dice_engine import CLIP, ERROR_CLIP, ORDERS, PRIVATE, RATE, error_of, flat, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import (
    Batches,
    DiceSGDOptimizer,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Reference:
    """The steps of tests/reference/dice.py on one vector."""

    def __init__(self, variant, x, divisor):
        self.variant, self.x, self.error = variant, x, np.zeros_like(x)
        self.moments, self.steps, self.divisor = (0.0, 0.0), 0, divisor

    def step(self, gradients, noise):
        self.steps += 1
        common = {"learning_rate": RATE, "divisor": self.divisor, "clip_norm": CLIP}
        state = self.x, self.error
        if self.variant == "automatic":
            self.x, self.error = automatic_step(*state, gradients, noise, **common)
        elif self.variant == "sgd":
            self.x, self.error = sgd_step(
                *state, gradients, noise, error_clip_norm=ERROR_CLIP, **common
            )
        else:
            self.x, self.error, self.moments = adam_step(
                *state, self.moments, self.steps, gradients, noise,
                error_clip_norm=ERROR_CLIP, **common,
            )  # fmt: skip


def per_example(run):
    samples = [
        p.grad_sample.reshape(len(p.grad_sample), math.prod(p.shape))
        for p in run.plain_model.parameters()
    ]
    return torch.cat(samples, dim=1).cpu().numpy()


def softmax_gradients(run, rows):
    """By hand, from the records that the plan names: weight rows first, then biases."""
    features, labels = (t[rows] for t in run.loader.dataset.tensors)
    with torch.no_grad():
        outputs = features @ run.plain_model.weight.T + run.plain_model.bias
    slopes = torch.softmax(outputs, dim=1) - nn.functional.one_hot(labels, 3)
    parts = (slopes[:, :, None] * features[:, None, :]).flatten(start_dim=1), slopes
    return torch.cat(parts, dim=1).numpy()


# --- the steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["sgd", "adam", "automatic"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_step_is_that_of_the_paper(make_dice, variant, order):
    """On the records that the plan has for the step, with given noise, to rounding."""
    run = make_dice(
        variant, batch_order=order, noise_multiplier=0.7,
        noise_generator=torch.Generator().manual_seed(5), loader={"batch_size": 3},
        grad_sample_mode="hooks",
    )  # fmt: skip
    plan, same_noise = run.optimizer.run.plan, torch.Generator().manual_seed(5)
    divisor = 60 if order == "full" else 3
    reference = Reference(variant, weights(run), divisor)
    sizes = []
    for step in range(25):
        if step % len(run.loader) == 0:
            batches = iter(run.loader)
        run.backward(next(batches))
        rows = plan.batch(step)
        sizes.append(len(rows))
        gradients = softmax_gradients(run, rows)
        np.testing.assert_allclose(per_example(run), gradients, atol=1e-12)
        run.optimizer.step()
        noise = [
            torch.normal(0.0, 1.0, p.shape, generator=same_noise, dtype=p.dtype)
            for p in run.plain_model.parameters()
        ]
        reference.step(gradients, 0.7 * CLIP / divisor * flat(noise))
        np.testing.assert_allclose(weights(run), reference.x, atol=1e-12)
    np.testing.assert_allclose(error_of(run), reference.error, atol=1e-12)
    assert np.linalg.norm(reference.error) > ERROR_CLIP  # both clips acted
    assert run.steps == run.optimizer.num_steps == 25
    assert (order == "poisson") == (len(set(sizes)) > 1)
    assert run.engine.privacy_event.num_steps == 25


@pytest.mark.parametrize(("order", "workers"), [*((one, 0) for one in ORDERS), ("poisson", 2)])
def test_pieces_of_a_batch_are_one_step(make_dice, order, workers):
    """BatchMemoryManager: the same end, the same account."""
    batches = order
    if order not in ("cyclic", "full"):
        batches = Batches(order, seed=3, seed_is_secret=True)
    ends, events = [], []
    for size in (100, 4):
        run = make_dice(
            batch_order=batches, noise_generator=torch.Generator().manual_seed(1),
            loader={"num_workers": workers if size == 4 else 0},
        )  # fmt: skip
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=size, optimizer=run.optimizer
        ) as loader:
            for _ in range(2):
                for batch in loader:
                    run.step(batch)
        ends.append(np.concatenate([weights(run), error_of(run)]))
        events.append(run.engine.privacy_event)
    np.testing.assert_allclose(*ends, atol=1e-12)
    assert events[0] == events[1]
    assert events[0].num_steps == (2 if order == "full" else 12)


@pytest.mark.parametrize("mode", ["functorch", "ew"])
def test_other_ways_to_per_example_gradients(make_dice, mode):
    runs = [make_dice(noise_multiplier=0.0, grad_sample_mode=m) for m in ("hooks", mode)]
    for run in runs:
        run.epoch()
    np.testing.assert_allclose(*map(weights, runs), atol=1e-12)
    np.testing.assert_allclose(*map(error_of, runs), atol=1e-12)


def test_a_known_loss_of_a_linear_head(make_dice):
    """Its gradients follow from the formula, and its Lipschitz constant is the gradient bound."""
    known = {"feature_norm": 1.0, "loss_geometry": "auto", "criterion": nn.CrossEntropyLoss()}
    runs = [make_dice(noise_multiplier=0.0, **more) for more in ({}, known)]
    for run in runs:
        run.epoch()
    np.testing.assert_allclose(*map(weights, runs), atol=1e-12)
    np.testing.assert_allclose(*map(error_of, runs), atol=1e-12)
    assert runs[1].engine.privacy_event.gradient_bound == pytest.approx(2.0)


def test_sum_reduction_needs_a_smaller_learning_rate_only(make_dice):
    mean = make_dice(noise_multiplier=0.0)
    total = make_dice(
        noise_multiplier=0.0, loss_reduction="sum", base={"lr": RATE / 10},
        criterion=nn.CrossEntropyLoss(reduction="sum"),
    )  # fmt: skip
    for run in (mean, total):
        run.epoch()
    np.testing.assert_allclose(weights(mean), weights(total), atol=1e-12)
    assert mean.engine.privacy_event == total.engine.privacy_event


class Residual(nn.Module):
    """x - xi: its squared half has the gradient of Appendix B.1 within reach of the data."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(self.line.weight)

    def forward(self, xi):
        return self.line(torch.ones_like(xi)) - xi


@pytest.mark.parametrize(("dice", "end"), [(True, 0.0), (False, -0.75)])
def test_the_bias_of_clipping_vanishes(dice, end):
    """Appendix B.1 (arXiv 2311.14632), Huber losses bent at 2, records -1, -1 and 2, from 0.

    DP-SGD ends where 2 (x + 1) = 1/2: two records pull with x + 1 each until the clip at 1/2, one
    with 1/2.
    """
    model, records = Residual(), torch.tensor([[-1.0], [-1.0], [2.0]], dtype=torch.float64)
    extra = {"optimizer_class": DiceSGDOptimizer} if dice else {}
    model, optimizer, loader = HiddenStatePrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(records), batch_size=3), noise_multiplier=0.0,
        max_grad_norm=0.5, batch_order="full", **extra,
    )  # fmt: skip
    for _ in range(600):
        for (batch,) in loader:
            optimizer.zero_grad()
            nn.HuberLoss(delta=2.0)(model(batch), torch.zeros_like(batch)).backward()
            optimizer.step()
    assert float(next(model.parameters())) == pytest.approx(end, abs=1e-3)


# --- going on elsewhere ---------------------------------------------------------------------------


@pytest.mark.cuda
def test_cuda(make_dice, tmp_path):
    """The same steps as on the CPU, the error on the device, and a checkpoint that goes on."""
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(3)
        runs = [
            make_dice(model=nn.Linear(5, 3).double().to(device), noise_multiplier=0.0)
            for _ in range(2)
        ]
        for run, other in (runs, (runs[1], None)):
            for features, labels in run.loader:
                run.step((features.to(device), labels.to(device)))
            if other is not None:
                run.engine.save_checkpoint(path=tmp_path / "c.pt", **PRIVATE)
                other.engine.load_checkpoint(path=tmp_path / "c.pt")
        assert run.optimizer._errors[0].device.type == device
        ends.append(np.concatenate([weights(run), error_of(run)]))
        assert run.engine.privacy_event.num_steps == 12
    np.testing.assert_allclose(*ends, atol=1e-12)
