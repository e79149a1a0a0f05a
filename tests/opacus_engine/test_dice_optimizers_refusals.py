"""DiceSGD and DiceAdam in PyTorch: what is refused."""

import math

import numpy as np
import pytest
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.schedulers import ExponentialNoise
from opacus_dice import backward, batches, flat, layers, make, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import DiceAdamOptimizer, DiceSGDOptimizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier >= 0"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm > 0"),
        ({"max_grad_norm": math.inf}, ValueError, "max_grad_norm"),
        ({"max_grad_norm": [1.0] * 4}, hsa.UnsupportedRunError, "one number"),
        ({"error_max_grad_norm": [1.0] * 4}, hsa.UnsupportedRunError, "error_max_grad_norm"),
        ({"error_max_grad_norm": 0.0}, ValueError, "error_max_grad_norm > 0"),
        ({"error_max_grad_norm": 1e-20, "model": torch.float32}, ValueError, "underflow"),
        ({"max_grad_norm": 1e-20, "model": torch.float32}, ValueError, "underflow"),
        ({"expected_batch_size": None}, TypeError, "expected_batch_size to be an integer"),
        ({"expected_batch_size": 2.0}, TypeError, "expected_batch_size to be an integer"),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size >= 1"),
        ({"automatic": 1}, TypeError, "automatic to be True or False"),
        ({"loss_reduction": "none"}, ValueError, "'mean' or 'sum'"),
        ({"generator": 3}, TypeError, "torch.Generator"),
        ({"secure_mode": None}, TypeError, "secure_mode"),
        ({"model": torch.bfloat16}, hsa.UnsupportedRunError, "float32 or float64"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
    ],
)
def test_impossible_arguments(arguments, error, text):
    dtype = arguments.pop("model", torch.float64)
    with pytest.raises(error, match=text):
        make(model=layers(dtype), **arguments)


@pytest.mark.parametrize(
    ("cls", "base", "text"),
    [
        (DiceSGDOptimizer, torch.optim.Adam, "torch.optim.SGD in DiceSGDOptimizer, got Adam"),
        (DiceAdamOptimizer, torch.optim.SGD, "torch.optim.Adam or torch.optim.AdamW"),
        (DiceSGDOptimizer, torch.optim.LBFGS, "got LBFGS"),
    ],
)
def test_other_optimizers(cls, base, text):
    inner = base(layers().parameters(), lr=0.1)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        cls(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)


def test_an_optimizer_that_is_private_already():
    inner = make()[1]
    with pytest.raises(hsa.UnsupportedRunError, match="Pass its original_optimizer"):
        DiceSGDOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)


def test_ghost_clipping():
    """Refused at the first step: only a backward pass tells the mode."""
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
    ghost, _, criterion, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(), data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost",
    )  # fmt: skip
    _, optimizer = make(model=ghost)
    before = flat(model.parameters())
    criterion(ghost(data.tensors[0]), data.tensors[1]).backward()
    with pytest.raises(hsa.UnsupportedRunError, match="second backward pass leaves only a sum"):
        optimizer.step()
    np.testing.assert_array_equal(flat(model.parameters()), before)
    with pytest.raises(hsa.UnsupportedRunError, match="ghost clipping"):
        make(model=ghost)


def test_the_step_hook_is_closed():
    """An accountant behind it would report the epsilon of DP-SGD, which is too small."""
    _, optimizer = make()
    for name in ("rdp", "prv", "hidden_state"):
        hook = PrivacyEngine(accountant=name).accountant.get_optimizer_hook_fn(sample_rate=0.1)
        with pytest.raises(hsa.UnsupportedRunError, match="takes the run for DP-SGD"):
            optimizer.attach_step_hook(hook)


def change_noise(model, optimizer):
    ExponentialNoise(optimizer, gamma=0.9).step()


def change(name, value):
    def apply(model, optimizer):
        setattr(optimizer, name, value)

    return apply


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def freeze(model, optimizer):
    next(model.parameters()).requires_grad_(False)


def reseed(model, optimizer):
    optimizer.generator.manual_seed(3)


@pytest.mark.parametrize(
    ("tamper", "text"),
    [
        (change_noise, "step 2 uses noise_multiplier = "),
        (change("max_grad_norm", 0.1), "step 2 uses max_grad_norm = 0.1, expected 0.5"),
        (change("error_max_grad_norm", 0.1), "step 2 uses error_max_grad_norm"),
        (change("expected_batch_size", 5), "step 2 uses expected_batch_size"),
        (change("automatic", True), "step 2 uses automatic"),
        (change("loss_reduction", "sum"), "step 2 uses loss_reduction"),
        (change("step_hook", print), "step_hook"),
        (change("original_optimizer", None), "original_optimizer|param_groups"),
        (change("grad_scale", 1.0), "GradScaler"),
        (add_group, "step 2 trains 5 parameters, expected the 4"),
        (freeze, "step 2 trains 3 parameters, expected the 4"),
        (reseed, "step 2: the noise generator is in a state"),
    ],
)
def test_runs_that_are_not_covered(tamper, text):
    model, optimizer = make(noise_multiplier=1.0, generator=torch.Generator().manual_seed(3))
    first, second = batches([4, 4])
    train(model, optimizer, [first])
    before = flat(model.parameters())
    optimizer.zero_grad()
    backward(model, second)
    tamper(model, optimizer)
    with pytest.raises((hsa.UnsupportedRunError, AttributeError), match=text):
        optimizer.step()
    np.testing.assert_array_equal(flat(list(model.parameters())[:4]), before)
    assert optimizer.num_steps == 1


def test_a_frozen_parameter_with_an_old_gradient():
    model_frozen = layers()
    frozen = next(model_frozen.parameters())
    frozen.requires_grad_(False)
    inner = torch.optim.SGD(model_frozen.parameters(), lr=0.1)
    optimizer = DiceSGDOptimizer(
        inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4
    )
    backward(model_frozen, batches([4])[0])
    frozen.grad = torch.ones_like(frozen)
    with pytest.raises(hsa.UnsupportedRunError, match="would move a frozen parameter"):
        optimizer.step()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_no_clip_bounds(value):
    model, optimizer = make(noise_multiplier=1.0)
    train(model, optimizer, batches([4]))
    optimizer.zero_grad()
    features = batches([4])[0]
    backward(model, features)
    next(model.parameters()).grad_sample[2, 0, 0] = value
    before = flat(model.parameters())
    with pytest.raises(hsa.UnsupportedRunError, match="step 2 has a per-example gradient whose"):
        optimizer.step()
    np.testing.assert_array_equal(flat(model.parameters()), before)
    optimizer.zero_grad()
    backward(model, features)
    with pytest.raises(hsa.UnsupportedRunError, match="An earlier step of this run was refused"):
        optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="may depend on the records"):
        optimizer.privacy_event(dataset_size=8, batch_order="poisson")
    with pytest.raises(hsa.UnsupportedRunError, match="may depend on the records"):
        optimizer.run_state_dict(include_private_state=True)


def test_an_error_that_overflows():
    """An infinite error has no direction to clip."""
    model = GradSampleModule(nn.Linear(1, 1, bias=False))
    optimizer = DiceSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=1,
    )  # fmt: skip
    for raises in (False, True):
        optimizer.zero_grad()
        model(torch.full((4, 1), 3e38)).mean().backward()
        if raises:
            with pytest.raises(hsa.UnsupportedRunError, match="step 2: the error overflowed"):
                optimizer.step()
        else:
            optimizer.step()


def test_gradients_of_two_passes():
    model, optimizer = make()
    for features in batches([4, 4]):
        backward(model, features)
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of 2 batches"):
        optimizer.step()


def test_gradients_that_were_used_before():
    model, optimizer = make()
    train(model, optimizer, batches([4]))
    with pytest.raises(hsa.UnsupportedRunError, match=r"Call optimizer.zero_grad\(\)"):
        optimizer.step()


def drop(p):
    p.summed_grad = None


def double(p):
    p.summed_grad.mul_(2)


def swap(p):
    p.summed_grad = p.summed_grad.clone()


@pytest.mark.parametrize("tamper", [drop, double, swap])
def test_a_piece_whose_sum_was_changed(tamper):
    """The error would keep what the sum has lost."""
    model, optimizer = make()
    optimizer.signal_skip_step()
    train(model, optimizer, batches([4]))
    for p in model.parameters():
        tamper(p)
    with pytest.raises(hsa.UnsupportedRunError, match="does not come from the pieces"):
        train(model, optimizer, batches([4]))


def test_no_gradients():
    _, optimizer = make()
    with pytest.raises(hsa.UnsupportedRunError, match="got no per-example gradients"):
        optimizer.step()
