"""DiceSGD and DiceAdam in PyTorch: the error is in no state, text or copy."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus_dice import (
    MARK,
    NEEDLE,
    SHOWN,
    VARIANTS,
    batches,
    error_of,
    everything_in,
    flat,
    make,
    saved,
    train,
)
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import DiceSGDOptimizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def marked(base_options=None):
    """An optimizer whose error is MARK in one coordinate."""
    model = GradSampleModule(nn.Linear(1, 1, bias=False).double())
    optimizer = DiceSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0, **(base_options or {})), noise_multiplier=1.0,
        max_grad_norm=1.0, expected_batch_size=1, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    model(torch.full((1, 1), MARK + 1, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert error_of(optimizer) == [MARK]
    return model, optimizer


def test_the_error_is_in_no_state():
    model, optimizer = marked({"momentum": 0.9})
    states = [optimizer.state_dict(), dict(optimizer.state), model.state_dict(),
              optimizer.defaults, optimizer.param_groups]  # fmt: skip
    assert MARK not in everything_in(states)
    assert NEEDLE not in saved(states)
    assert NEEDLE in saved(optimizer.run_state_dict(include_private_state=True))
    model_and_attributes = [p.__dict__ for p in model.parameters()]
    assert MARK not in everything_in(model_and_attributes)


def test_the_error_is_in_no_text():
    _, optimizer = marked()
    report = optimizer.report(1e-5, dataset_size=1, batch_order="full")
    for text in (repr(optimizer), str(optimizer), str(vars(optimizer)), report):
        assert not SHOWN.search(text)


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy, saved])
def test_optimizer_and_error_cannot_be_copied(copier):
    _, optimizer = marked()
    for value in (optimizer, optimizer.mechanism.hidden):
        with pytest.raises(hsa.UnsupportedRunError, match="cannot be copied or pickled"):
            copier(value)


def test_the_error_is_in_no_checkpoint_of_opacus(tmp_path):
    model, optimizer = marked()
    engine = PrivacyEngine()
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    content = torch.load(tmp_path / "c.pt", weights_only=False)
    assert NEEDLE not in saved(content)
    assert MARK not in everything_in(content)


def test_a_model_that_is_saved_as_a_whole_lacks_the_error(tmp_path):
    model, _ = marked()
    assert NEEDLE not in saved(list(model._module.parameters()))
    assert NEEDLE not in saved(copy.deepcopy(model._module).state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_goes_on_with_its_private_state(variant):
    data = batches([4] * 6)
    whole_model, whole = make(variant)
    train(whole_model, whole, data)
    model, optimizer = make(variant)
    train(model, optimizer, data[:3])
    state = torch.load(
        io.BytesIO(saved(optimizer.run_state_dict(include_private_state=True))), weights_only=True
    )
    base, weights = optimizer.state_dict(), model.state_dict()
    model, optimizer = make(variant)
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(base))
    optimizer.load_run_state_dict(state)
    train(model, optimizer, data[3:])
    np.testing.assert_array_equal(flat(model.parameters()), flat(whole_model.parameters()))
    np.testing.assert_array_equal(error_of(optimizer), error_of(whole))
    arguments = {"dataset_size": 8, "batch_order": "cyclic"}
    assert optimizer.privacy_event(**arguments) == whole.privacy_event(**arguments)


def test_a_private_state_of_version_0_1():
    model, optimizer = make()
    train(model, optimizer, batches([3, 5]))
    state = optimizer.run_state_dict(include_private_state=True)
    totals = state.pop("run")["totals"]
    state["private"] |= {
        "largest_gradient_norm": totals["largest_norm"], "fewest_rows": 3, "most_rows": 5,
    }  # fmt: skip
    _, other = make()
    other.load_run_state_dict(state)
    declared = {"dataset_size": 8, "batch_order": "poisson"}
    assert other.privacy_event(**declared) == optimizer.privacy_event(**declared)
    for arguments in ({"batch_order": "cyclic"}, {"gradient_bound": 0.9 * totals["largest_norm"]}):
        with pytest.raises(hsa.UnsupportedRunError):
            other.privacy_event(**(declared | arguments))


def test_the_private_state_has_to_be_asked_for():
    _, optimizer = marked()
    for arguments in ({}, {"include_private_state": False}, {"include_private_state": 1}):
        with pytest.raises(ValueError, match="Expected include_private_state=True"):
            optimizer.run_state_dict(**arguments)


def test_private_states_that_do_not_fit():
    model, optimizer = make()
    with pytest.raises(ValueError, match="no step yet"):
        optimizer.run_state_dict(include_private_state=True)
    train(model, optimizer, batches([4]))
    state = optimizer.run_state_dict(include_private_state=True)
    optimizer.signal_skip_step()
    train(model, optimizer, batches([4]))
    with pytest.raises(ValueError, match="a piece of one"):
        optimizer.run_state_dict(include_private_state=True)
    with pytest.raises(ValueError, match="without steps, got one with 1"):
        optimizer.load_run_state_dict(state)
    _, other = make(max_grad_norm=0.6)
    with pytest.raises(ValueError, match=r"max_grad_norm = 0.6, got 0.5"):
        other.load_run_state_dict(state)
    _, fresh = make()
    private, run = state["private"], state["run"]
    for damaged, text in [
        ({}, "missing keys"),
        (state | {"schema": 9}, "schema 9"),
        (state | {"num_steps": 0}, "num_steps >= 1"),
        (state | {"private": private | {"error": private["error"][:-1]}}, "error of shapes"),
        (state | {"private": private | {"error": [e * math.nan for e in private["error"]]}},
         "not finite"),
        (state | {"run": run | {"totals": run["totals"] | {"most_rows": 1}}}, "most_rows >= 4"),
        (state | {"run": run | {"num_steps": 2}}, "2 steps are recorded"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            fresh.load_run_state_dict(damaged)
    assert fresh.num_steps == 0
    fresh.load_run_state_dict(state)
    assert fresh.num_steps == 1
