"""DiceSGD and DiceAdam in PyTorch: the event of what ran, and its report."""

import math

import attrs
import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import GradSampleModule
from opacus.data_loader import DPDataLoader
from opacus_dice import (
    CLIP,
    DIVISOR,
    ERROR_CLIP,
    RATE,
    VARIANTS,
    backward,
    batches,
    flat,
    layers,
    make,
    train,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.opacus import DiceSGDOptimizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# --- the account ----------------------------------------------------------------------------------


def test_the_event_is_what_ran():
    model, optimizer = make(noise_multiplier=2.0)
    with pytest.raises(ValueError, match="at least one step"):
        optimizer.privacy_event(dataset_size=8, batch_order="cyclic")
    train(model, optimizer, batches([4] * 6))
    bound = 1e3
    event = optimizer.privacy_event(
        dataset_size=8, batch_order="cyclic", num_steps=6, gradient_bound=bound
    )
    assert event == hsa.DiceSgdDpEvent(
        noise_std=2.0 * CLIP / DIVISOR, clip_norm=CLIP, error_clip_norm=ERROR_CLIP,
        batch_size=DIVISOR, dataset_size=8, num_steps=6, batch_order="cyclic",
        gradient_bound=bound,
    )  # fmt: skip
    assert optimizer.privacy_event(dataset_size=8, batch_order="poisson").gradient_bound == math.inf
    _, automatic = make("automatic", noise_multiplier=2.0)
    assert automatic.automatic


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_steps": 5}, "num_steps = 6, the steps taken, got 5"),
        ({"gradient_bound": 1e-3}, "gradient_bound >= "),
    ],
)
def test_an_event_that_did_not_happen(arguments, text):
    model, optimizer = make(noise_multiplier=2.0)
    train(model, optimizer, batches([4] * 6))
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        optimizer.privacy_event(**{"dataset_size": 8, "batch_order": "cyclic", **arguments})


@pytest.mark.parametrize("sizes", [[4, 3], [3, 4], [4, 5], [4, 0]])
def test_batches_of_a_fixed_size_are_counted(sizes):
    model, optimizer = make(noise_multiplier=2.0)
    train(model, optimizer, batches(sizes))
    for order in ("cyclic", "reshuffled", "without_replacement"):
        with pytest.raises(hsa.UnsupportedRunError, match="Expected 4 rows in every"):
            optimizer.privacy_event(dataset_size=8, batch_order=order)
    assert optimizer.privacy_event(dataset_size=8, batch_order="poisson").num_steps == 2
    if max(sizes) > 4:
        with pytest.raises(hsa.UnsupportedRunError, match="at most dataset_size = 4 rows"):
            optimizer.privacy_event(dataset_size=4, batch_order="poisson")


def test_the_report_has_the_proven_epsilon_and_the_papers():
    model, optimizer = make(noise_multiplier=40.0, error_max_grad_norm=CLIP)
    train(model, optimizer, batches([4] * 6))
    arguments = {"dataset_size": 40, "batch_order": "poisson"}
    event = optimizer.privacy_event(**arguments)
    proven = hsa.DiceSgdAccountant().compose(event).get_epsilon(1e-5)
    claimed = hsa.DiceSgdAccountant(analysis="published").compose(event).get_epsilon(1e-5)
    report = optimizer.report(1e-5, **arguments)
    assert f"epsilon = {fixed_up(proven, 4)} at delta = 1e-05" in report
    assert f"would claim epsilon = {fixed_up(claimed, 4)}; do not use it" in report
    assert "theorem is false" in report
    assert "bound before clipping: none declared" in report
    cyclic = optimizer.report(
        # The noise moves the weights so far that gradients have lengths of hundreds.
        1e-5, dataset_size=40, batch_order="cyclic", gradient_bound=1e5,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )  # fmt: skip
    assert "does not apply" in cyclic
    assert "bound before clipping: 100000" in cyclic
    with pytest.raises(hsa.UnsupportedRunError):
        optimizer.report(
            1e-5, dataset_size=40, batch_order="cyclic",
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        )  # fmt: skip


def updates(gradients, batch, automatic):
    """The mean updates without noise of a run with constant gradients, and its event."""
    model = GradSampleModule(nn.Linear(gradients.shape[1], 1, bias=False).double())
    optimizer = DiceSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=1.0, max_grad_norm=CLIP,
        error_max_grad_norm=ERROR_CLIP, expected_batch_size=batch, automatic=automatic,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    seen = []
    for _ in range(5):
        for rows in gradients.split(batch):
            optimizer.zero_grad()
            model(rows).mean().backward()
            optimizer.step()
            seen.append(flat([p.grad for p in model.parameters()]))
    return np.array(seen), optimizer


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("size", [0.1, 0.7, 3.0, 300.0])
def test_what_one_record_does_is_within_the_bound(size, automatic):
    """The same noise on neighbouring data sets: the squared differences of all updates together.

    The outlier is preceded by a batch that pulls the error the other way.
    """
    gradients = torch.zeros(6, 3, dtype=torch.float64)
    gradients[:2, 0], gradients[2, 0] = -size, size
    without = gradients.clone()
    without[2] = 0.0
    (first, optimizer), (second, _) = (updates(g, 2, automatic) for g in (gradients, without))
    event = optimizer.privacy_event(dataset_size=6, batch_order="cyclic", gradient_bound=size)
    allowed = hsa.DiceSgdAccountant().compose(event).guarantee.mu * event.noise_std
    shown = np.linalg.norm(first - second)
    assert 0.3 * allowed < shown <= allowed * (1 + 1e-9)


def test_a_poisson_loader_by_hand():
    """As in the docstring, with whatever sizes and empty batches it draws."""
    model, optimizer = make(
        noise_multiplier=1.0, expected_batch_size=2, model=layers(torch.float32)
    )
    data = TensorDataset(batches([20], torch.float32)[0])
    generator = torch.Generator().manual_seed(4)
    loader = DPDataLoader.from_data_loader(DataLoader(data, batch_size=2), generator=generator)
    sizes = []
    for _ in range(3):
        for (features,) in loader:
            optimizer.zero_grad()
            backward(model, features)
            optimizer.step()
            sizes.append(len(features))
    assert 0 in sizes
    event = optimizer.privacy_event(dataset_size=20, batch_order="poisson")
    assert event.num_steps == len(sizes) == 30
    assert event.sampling_probability == loader.sample_rate


def test_learning_rates_may_change():
    model, optimizer = make(noise_multiplier=2.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for features in batches([4] * 3):
        train(model, optimizer, [features])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == RATE / 8
    assert optimizer.privacy_event(dataset_size=8, batch_order="poisson").num_steps == 3


# --- the other device -----------------------------------------------------------------------------


def test_events_of_all_variants_are_accounted():
    """Epsilon is that of the accountant and larger than that of DP-SGD at the same noise."""
    for variant in VARIANTS:
        model, optimizer = make(variant, noise_multiplier=20.0)
        train(model, optimizer, batches([4] * 6))
        event = optimizer.privacy_event(dataset_size=40, batch_order="poisson")
        assert event.automatic is (variant == "automatic")
        plain = attrs.evolve(event, gradient_bound=CLIP, automatic=False)
        epsilon, dp_sgd = (
            hsa.DiceSgdAccountant().compose(e).get_epsilon(1e-5) for e in (event, plain)
        )
        assert dp_sgd < epsilon < math.inf
