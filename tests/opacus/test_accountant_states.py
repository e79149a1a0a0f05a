"""The state of accountant="hidden_state": histories, checkpoints, declaring again."""

import math
import warnings

import dp_accounting
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_stock import DECLARED, DELTA, KINDS, SOFTMAX, epsilon, event, recorder, resume, step
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStateAccountant
from hidden_state_adapters.opacus.registry import AccountedRun

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")


@pytest.mark.parametrize(
    ("kind", "loss"), [("sgd", SOFTMAX), ("sgd", None), ("adam", SOFTMAX), ("per layer", None)]
)
def test_resumed_runs_never_forget(train, kind, loss):
    declared = {**DECLARED, "loss_geometry": loss}
    optimizer, arguments = KINDS[kind]
    first, *_ = train(declared, optimizer=optimizer, epochs=4, **arguments)
    whole, *_ = train(declared, optimizer=optimizer, epochs=5, **arguments)
    second, model, private, batches = resume(train, first, declared, kind)
    assert len(second.accountant) == len(first.accountant) == 24
    assert second.get_epsilon(DELTA) == first.get_epsilon(DELTA)
    spent = second.get_epsilon(DELTA)
    for steps, batch in enumerate(batches, 25):
        step(model, private, [batch])
        assert len(second.accountant) == steps
        assert second.get_epsilon(DELTA) >= spent
        spent = second.get_epsilon(DELTA)
    assert second.get_epsilon(DELTA) == pytest.approx(whole.get_epsilon(DELTA), rel=1e-12)


@pytest.mark.parametrize(("before", "after"), [("sgd", "adam"), ("adam", "sgd")])
@pytest.mark.parametrize("loss", [SOFTMAX, None])
def test_resuming_with_another_optimizer_keeps_the_steps(train, before, after, loss):
    """Or it is refused, where the loss was of use for one of them."""
    declared = {**DECLARED, "loss_geometry": loss}
    optimizer, _ = KINDS[before]
    first, *_ = train(declared, optimizer=optimizer)
    if loss is not None:
        with pytest.raises(ValueError, match="of another run: expected loss"):
            resume(train, first, declared, after)
        return
    second, model, private, batches = resume(train, first, declared, after)
    for batch in batches:
        step(model, private, [batch])
    composed = event(loss=None, weight_decay=0.0, num_steps=18)
    assert second.get_epsilon(DELTA) == epsilon(composed)


def test_a_state_that_is_refused_changes_nothing(train):
    engine, *_ = train(DECLARED)
    _, *second = train(DECLARED, engine=engine, epochs=1)
    state = engine.accountant.state_dict()
    step(*second)
    other = train(DECLARED, epochs=0)[0].accountant
    with pytest.raises(ValueError, match="end of an epoch"):
        other.load_state_dict(engine.accountant.state_dict())
    assert len(other) == 0
    other.load_state_dict(state)
    assert len(other) == 18
    engine = PrivacyEngine(accountant="hidden_state")
    engine.accountant.load_state_dict(state)
    assert other.get_epsilon(DELTA) == engine.get_epsilon(DELTA)


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_raises_for_every_optimizer(train, kind):
    optimizer, arguments = KINDS[kind]
    engine, model, private, batches = train(DECLARED, optimizer=optimizer, epochs=0, **arguments)
    criterion = nn.CrossEntropyLoss()
    for _, (features, labels) in zip(range(2), batches, strict=False):
        criterion(model(features), labels).backward()
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: got the gradients of 2 batches"):
        private.step()
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_batches_in_pieces(train, kind):
    optimizer, arguments = KINDS[kind]
    engine, model, private, batches = train(DECLARED, optimizer=optimizer, epochs=0, **arguments)
    with BatchMemoryManager(
        data_loader=batches, max_physical_batch_size=4, optimizer=private
    ) as loader:
        for batch in loader:
            step(model, private, [batch])
    whole, *_ = train(DECLARED, optimizer=optimizer, epochs=1, **arguments)
    assert len(engine.accountant) == 6
    assert engine.get_epsilon(DELTA) == whole.get_epsilon(DELTA)


def _nothing():
    """Checks no model."""


@pytest.mark.filterwarnings("error:No run was declared")
def test_undeclared_steps_and_runs_do_not_mix(train):
    undeclared = HiddenStateAccountant()
    undeclared.step(noise_multiplier=5.0, sample_rate=0.1)
    loaded = HiddenStateAccountant()
    loaded.load_state_dict(undeclared.state_dict())
    for accountant in (undeclared, loaded):
        with pytest.raises(hsa.UnsupportedRunError, match="undeclared steps already"):
            accountant.add_run(AccountedRun(recorder(0)), _nothing)
        assert len(accountant) == 1
    for steps in (0, 3):
        accountant = HiddenStateAccountant()
        accountant.add_run(AccountedRun(recorder(steps)), _nothing)
        for rows in ([(5.0, 0.1, 6)], []):
            with pytest.raises(ValueError, match="history is overwritten, got 1"):
                accountant.history = rows
    declared = train(DECLARED, epochs=0)[0].accountant
    with pytest.raises(ValueError, match="declared run, got undeclared steps"):
        declared.load_state_dict(undeclared.state_dict())
    declared.load_state_dict(HiddenStateAccountant().state_dict())
    accountant._history.append((5.0, 0.1, 6))  # whatever way it came there
    with pytest.raises(hsa.UnsupportedRunError, match="different neighboring relations"):
        accountant.guarantee.epsilon(DELTA)


def test_a_written_history_warns_once_that_it_assumes_poisson_sampling():
    accountant = HiddenStateAccountant()
    accountant.history = [(2.0, 0.1, 6)]
    with pytest.warns(UserWarning, match="for Poisson loaders only"):
        accountant.get_epsilon(DELTA)
    accountant.history = [(3.0, 0.1, 6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accountant.get_epsilon(DELTA)


@pytest.mark.filterwarnings("ignore:No run was declared")
def test_written_history():
    accountant = HiddenStateAccountant()
    assert accountant.get_epsilon(DELTA) == 0
    values = []
    for noise in (1.0, 2.0, 4.0, 50.0):
        accountant.history = [(noise, 0.05, 100)]
        values.append(accountant.get_epsilon(delta=DELTA))
    assert values == sorted(values, reverse=True)
    assert all(0 < value < 100 for value in values)
    accountant.history = [(0.0, 0.05, 100)]
    assert accountant.get_epsilon(DELTA) == math.inf
    accountant.history = [(1.0, 1.0, 4)]
    assert accountant.get_epsilon(DELTA) == pytest.approx(
        epsilon(dp_accounting.GaussianDpEvent(0.5), NeighboringRelation.ADD_OR_REMOVE_ONE)
    )
    accountant.history = []
    assert accountant.get_epsilon(DELTA) == 0


@pytest.mark.filterwarnings("error:No run was declared")
def test_step_keeps_three_tuples():
    accountant = HiddenStateAccountant()
    for noise in (1.0, 1.0, 2.0):
        accountant.step(noise_multiplier=noise, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 2), (2.0, 0.1, 1)]
    assert len(accountant) == 3
    state = accountant.state_dict()
    assert state["history"] == accountant.history
    assert state["history"] is not accountant.history
    other = HiddenStateAccountant()
    other.load_state_dict(state)
    assert other.history == accountant.history
    other.step(noise_multiplier=2.0, sample_rate=0.1)
    assert len(accountant) == 3
    destination = {"mine": 1}
    assert accountant.state_dict(destination) is destination
    assert destination["mine"] == 1


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"mechanism": "hidden_state"},
        {"history": []},
        {"history": [], "mechanism": "prv"},
        {"history": [], "mechanism": "hidden_state", "neighboring_relation": "REPLACE_ONE"},
    ],
)
def test_states_that_are_refused(state):
    with pytest.raises(ValueError):  # noqa: PT011
        HiddenStateAccountant().load_state_dict(state)


def test_declared_state_round_trip(train, tmp_path):
    engine, model, private, _ = train(DECLARED)
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=private)
    state = torch.load(path, weights_only=True)["privacy_accountant_state_dict"]
    plain = HiddenStateAccountant()
    plain.load_state_dict(state)
    declared = train(DECLARED, epochs=0)[0].accountant
    declared.load_state_dict(state)
    for accountant in (plain, declared):
        assert accountant.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
        assert len(accountant) == 12
    with pytest.raises(ValueError, match="without steps, got one with 12"):
        plain.load_state_dict(state)
    with pytest.raises(ValueError, match="history is overwritten"):
        plain.history = []
    other = train({**DECLARED, "batch_size": 20}, epochs=0, loader={"batch_size": 20})[0]
    with pytest.raises(ValueError, match="batch_size = 20, got 10"):
        other.accountant.load_state_dict(state)


def test_a_state_keeps_what_was_said_and_replaces_nothing(train):
    accountant = train(DECLARED)[0].accountant
    accountant.assume("nobody looked")
    accountant.refuse("a look at private data")
    loaded = HiddenStateAccountant()
    loaded.load_state_dict(accountant.state_dict())
    with pytest.raises(hsa.UnsupportedRunError, match="a look at private data"):
        loaded.get_epsilon(DELTA)
    (run,) = loaded.state_dict()["runs"]
    assert "nobody looked" in run["assumptions"]
    with pytest.raises(ValueError, match="without steps, got one with"):
        loaded.load_state_dict(accountant.state_dict())
