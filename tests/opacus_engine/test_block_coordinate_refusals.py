"""DP-MBCD in PyTorch: constructions, runs and closures that are refused."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import GradSampleModule, PrivacyEngine
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_block_coordinate import (
    ONE,
    SIZE,
    SPECIAL,
    batches,
    closure_of,
    factors,
    make,
    train,
    trained,
    values,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import BlockCoordinateOptimizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm > 0"),
        ({"max_grad_norm": [1.0, 1.0]}, "real number"),
        ({"max_grad_norm": 1e-200}, "in this precision|between"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"expected_batch_size": None}, "expected_batch_size"),
        ({"l1": -0.1}, "l1"),
        ({"l2": math.inf}, "l2"),
        ({"nonnegative": 1}, "nonnegative"),
        ({"loss_reduction": "none"}, "loss_reduction"),
        ({"generator": 3}, "generator"),
        ({"module": nn.Linear(3, 3)}, "GradSampleModule"),
        ({"sgd": {"momentum": 0.9}}, "momentum"),
        ({"sgd": {"weight_decay": 0.1}}, "weight_decay = 0.*Use l2"),
        ({"sgd": {"maximize": True}}, "maximize"),
    ],
)
def test_constructions_that_are_refused(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make(**options)


def test_other_constructions_that_are_refused():
    model = factors()
    first, second = model.parameters()

    def construct(inner, module=model):
        BlockCoordinateOptimizer(
            inner, module=module, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4
        )

    with pytest.raises(hsa.UnsupportedRunError, match="weight is missing"):
        construct(torch.optim.SGD([first], lr=0.1))
    with pytest.raises(hsa.UnsupportedRunError, match="parameters of the module only"):
        construct(torch.optim.SGD([first, second, nn.Parameter(torch.zeros(2))], lr=0.1))
    with pytest.raises(hsa.UnsupportedRunError, match=r"Expected torch.optim.SGD, got Adam"):
        construct(torch.optim.Adam([first, second]))
    with pytest.raises(hsa.UnsupportedRunError, match="original_optimizer"):
        construct(make()[1])
    with pytest.raises(hsa.UnsupportedRunError, match=r"lr = 0\.1 in group 0"):
        construct(
            torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}])
        )
    half = factors(torch.bfloat16)
    with pytest.raises(hsa.UnsupportedRunError, match="float32 or float64"):
        construct(torch.optim.SGD(half.parameters(), lr=0.1), half)
    fast = GradSampleModuleFastGradientClipping(nn.Linear(3, 2), max_grad_norm=1.0)
    with pytest.raises(hsa.UnsupportedRunError, match="Opacus' ghost clipping"):
        construct(torch.optim.SGD(fast.parameters(), lr=0.1), fast)
    second.requires_grad_(False)
    with pytest.raises(hsa.UnsupportedRunError, match="as in the module"):
        make(factors(reduction="sum"))
    with pytest.raises(hsa.UnsupportedRunError, match="none in group 1"):
        construct(torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1))


def change(name, value):
    return lambda model, optimizer: setattr(optimizer, name, value)


def change_rate(model, optimizer):
    optimizer.param_groups[1]["lr"] = 0.1


def change_all_rates(model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 0.1


def add_momentum(model, optimizer):
    for group in optimizer.param_groups:
        group["momentum"] = 0.9


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def freeze(model, optimizer):
    next(model.parameters()).requires_grad_(False)


def move(model, optimizer):
    next(model.parameters()).data.mul_(0.9)


def reseed(model, optimizer):
    optimizer.generator.manual_seed(3)


def extra_pass(model, optimizer):
    model(batches(1)[0][0])


@pytest.mark.parametrize(
    ("tamper", "text"),
    [
        (change("max_grad_norm", 0.1), "step 2 uses max_grad_norm = 0.1, expected 0.7"),
        (change("expected_batch_size", 5), "step 2 uses expected_batch_size"),
        (change("loss_reduction", "sum"), "step 2 uses loss_reduction"),
        (change("l1", 1.0), "step 2 uses l1"),
        (change("l2", 1.0), "step 2 uses l2"),
        (change("nonnegative", True), "step 2 uses nonnegative"),
        (change("secure_mode", True), "step 2 uses secure_mode"),
        (change("generator", None), "step 2 uses another noise generator"),
        (change("noise_multiplier", -1.0), "noise_multiplier >= 0"),
        (change("step_hook", print), "step_hook"),
        (change("original_optimizer", torch.optim.SGD([torch.zeros(1)], 1.0)), "original_optim"),
        (change("grad_scale", 1.0), "GradScaler"),
        (change_rate, "equal options"),
        (change_all_rates, "step 2 uses lr = 0.1, expected 0.2"),
        (add_momentum, "momentum = 0"),
        (add_group, "step 2 optimizes 3 parameters, expected the 2"),
        (freeze, "step 2 trains"),
        (move, "changed outside the private optimizer"),
        (reseed, "step 2: the noise generator is in a state"),
        (extra_pass, "step 2 follows 2 training passes"),
    ],
)
def test_runs_that_are_not_covered(tamper, text):
    model, optimizer = make(noise_multiplier=1.0, generator=torch.Generator().manual_seed(3))
    first, second = batches(2)
    train(model, optimizer, [first])
    tamper(model, optimizer)
    before = values(model)
    with pytest.raises((hsa.UnsupportedRunError, ValueError), match=text):
        optimizer.step(closure_of(model, optimizer, second))
    for now, then in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert optimizer.num_steps == 1
    optimizer.__dict__.pop("grad_scale", None)
    with pytest.raises(hsa.UnsupportedRunError, match="An earlier step of this run was refused"):
        optimizer.step(closure_of(model, optimizer, second))
    with pytest.raises(hsa.UnsupportedRunError, match="may depend on the records"):
        optimizer.privacy_event(dataset_size=SIZE, neighboring_relation=ONE)


def closures(kind, model, optimizer):
    """Closures that do something else in the pass of the second block."""
    first, second = batches(2)
    good, calls = closure_of(model, optimizer, first), []

    def closure():
        calls.append(1)
        if len(calls) == 1 or kind == "nothing wrong":
            return good()
        if kind == "another batch":
            return closure_of(model, optimizer, second)()
        if kind == "nothing":
            return None
        if kind == "two passes":
            model(first[0])
        if kind == "fewer rows":
            return closure_of(model, optimizer, (first[0][:3], first[1][:3]))()
        if kind == "no gradients":
            with torch.no_grad():
                model(first[0])
            return None
        if kind == "not at the iterate":
            p = next(model.parameters())
            kept = p.detach().clone()
            p.data.add_(0.1)
            good()
            p.data.copy_(kept)
            return None
        if kind == "it moves the first block":
            good()
            next(model.parameters()).data.add_(0.1)
            return None
        if kind == "not finite":
            good()
            list(model.parameters())[1].grad_sample[0, 0, 0] = math.inf
            return None
        if kind == "a step inside":
            return optimizer.step(good)
        if kind == "a report inside":
            return optimizer.report(1e-5, dataset_size=SIZE)
        if kind == "the same noise":
            optimizer.generator.manual_seed(3)
        if kind == "in place":
            first[0].mul_(2.0)
        if kind == "an error":
            raise KeyboardInterrupt
        return good()

    return closure


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("another batch", "on different inputs"),
        ("in place", "on different inputs"),
        ("nothing", "follows 0 training passes"),
        ("two passes", "follows 2 training passes"),
        ("fewer rows", "3 rows, expected expected_batch_size = 4"),
        ("no gradients", "follows 0 training passes"),
        ("not at the iterate", "at other parameters"),
        ("it moves the first block", "changed outside the private optimizer"),
        ("not finite", "not finite"),
        ("a step inside", "An earlier step"),
        ("a report inside", "refused or interrupted"),
        ("the same noise", "the noise would repeat"),
        ("an error", ""),
    ],
)
def test_closures_that_are_not_covered(kind, text):
    model, optimizer = make(noise_multiplier=1.0, generator=torch.Generator().manual_seed(3))
    with pytest.raises((hsa.UnsupportedRunError, KeyboardInterrupt), match=text):
        optimizer.step(closures(kind, model, optimizer))
    with pytest.raises(hsa.UnsupportedRunError, match="refused or interrupted"):
        optimizer.report(1e-5, dataset_size=SIZE)
    # The table can fail: the same closure without the mistake goes through.
    model, optimizer = make(noise_multiplier=1.0, generator=torch.Generator().manual_seed(3))
    optimizer.step(closures("nothing wrong", model, optimizer))


def test_several_blocks_need_a_closure():
    model, optimizer = make()
    closure_of(model, optimizer, batches(1)[0])()
    with pytest.raises(hsa.UnsupportedRunError, match="got no closure"):
        optimizer.step()


def test_a_batch_of_another_size():
    for rows in (3, 5):
        model, optimizer = make()
        with pytest.raises(hsa.UnsupportedRunError, match=f"step 1 has {rows} rows"):
            train(model, optimizer, batches(1, rows=rows))


def test_gradients_of_two_passes():
    model, optimizer = make(num_blocks=1)
    for x, _ in batches(2):
        model(x).sum().backward()
    with pytest.raises(hsa.UnsupportedRunError, match="2 training passes"):
        optimizer.step()


def test_gradients_are_used_once():
    model, optimizer = make(num_blocks=1)
    train(model, optimizer, batches(1))
    with pytest.raises(hsa.UnsupportedRunError, match="0 training passes"):
        optimizer.step()


def test_evaluation_between_steps_is_no_pass():
    model, optimizer = make()
    train(model, optimizer, batches(1))
    with torch.no_grad():
        model(batches(1)[0][0])
    model.eval()
    model(batches(1)[0][0])
    model.train()
    train(model, optimizer, batches(1))


def test_batch_statistics():
    model = GradSampleModule(nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3)))
    model._module[1] = nn.BatchNorm1d(3, affine=False)
    _, optimizer = make(model, num_blocks=1)
    with pytest.raises(hsa.UnsupportedRunError, match="no batch statistics"):
        train(model, optimizer, batches(1, torch.float32))


def test_a_buffer_that_counts():
    model = factors()
    model._module.register_buffer("seen", torch.zeros(1))
    _, optimizer = make(model)
    train(model, optimizer, batches(1))
    model._module.seen += 4
    with pytest.raises(hsa.UnsupportedRunError, match="buffer of the module was changed"):
        optimizer.report(1e-5, dataset_size=SIZE)
    with pytest.raises(hsa.UnsupportedRunError, match="buffer of the module was changed"):
        train(model, optimizer, batches(1))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dataset_size": 13}, "multiple of the 4 records"),
        ({"dataset_size": 16}, "whole epochs of 4 steps, got 6"),
        ({"dataset_size": 48}, "whole epochs of 12 steps, got 6"),
        ({"dataset_size": 0}, "dataset_size >= 1"),
        ({"neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE}, "same number of records"),
        ({"neighboring_relation": "replace"}, "Expected neighboring_relation to be one of"),
        ({"block_loss": "convex"}, "LossGeometry"),
    ],
)
def test_events_that_are_refused(arguments, text):
    _, optimizer = trained()
    with pytest.raises((ValueError, TypeError), match=text):
        optimizer.privacy_event(**({"dataset_size": 12, "neighboring_relation": ONE} | arguments))


def test_the_relation_is_that_of_the_accountant():
    _, optimizer = trained()
    event = optimizer.privacy_event(dataset_size=12)
    by_relation = {
        relation: hsa.BlockCoordinateAccountant(relation).compose(event).guarantee.mu
        for relation in (ONE, SPECIAL)
    }
    assert by_relation[ONE] == pytest.approx(2 * by_relation[SPECIAL])


def test_no_step_no_event():
    with pytest.raises(ValueError, match="at least one step"):
        make()[1].report(1e-5, dataset_size=12)


def test_the_model_after_the_run():
    model, optimizer = trained()
    move(model, optimizer)
    with pytest.raises(hsa.UnsupportedRunError, match=r"changed outside .* after step"):
        optimizer.report(1e-5, dataset_size=12)


def test_ways_of_opacus_that_are_closed():
    _, optimizer = trained()
    hook = PrivacyEngine(accountant="rdp").accountant.get_optimizer_hook_fn(sample_rate=0.1)
    with pytest.raises(hsa.UnsupportedRunError, match="sees too little"):
        optimizer.attach_step_hook(hook)
    with pytest.raises(hsa.UnsupportedRunError, match="pre_step"):
        optimizer.pre_step()
    for copier in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(hsa.UnsupportedRunError, match="copied or pickled"):
            copier(optimizer)
    loader = DataLoader(TensorDataset(torch.zeros(8, 3)), batch_size=4)
    with (
        pytest.raises(hsa.UnsupportedRunError, match="whole batches"),
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as pieces,
    ):
        next(iter(pieces))
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_a_copy_of_the_module_is_free():
    model, optimizer = make()
    train(model, optimizer, batches(1))
    other = copy.deepcopy(model)
    other.disable_hooks()  # a copy of Opacus' wrapper counts no passes
    other(batches(1)[0][0]).sum().backward()
    train(model, optimizer, batches(1))
