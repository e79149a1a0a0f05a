"""Stock engines: no parameter moves in a step that is not recorded."""

import itertools

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus_stock import SOFTMAX
from opacus_stock_loops import BATCH, FEATURES, RECORDS, records, stock_loop
from torch import nn
from torch.utils.data import DataLoader

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RUNS = [{"poisson_sampling": True}, {"declared": {"loss_geometry": SOFTMAX}}]
each_run = pytest.mark.parametrize("arguments", RUNS, ids=["undeclared", "declared"])


def other_hook(loop):
    hook = PRVAccountant().get_optimizer_hook_fn(sample_rate=BATCH / RECORDS)
    loop.optimizer.attach_step_hook(hook)
    loop.epoch()


def train_with(loop, optimizer):
    for features, labels in loop.loader:
        loop.model.zero_grad()
        loop.criterion(loop.model(features), labels).backward()
        optimizer.step()


def plain_optimizer(loop):
    train_with(loop, torch.optim.Adam(loop.model.parameters(), lr=0.1))


def wrapped_optimizer(loop):
    train_with(loop, loop.optimizer.original_optimizer)


UNRECORDED = [
    (other_hook, "got a step of its SGD without it: attach_step_hook has a single slot"),
    (wrapped_optimizer, "got a step of its SGD without it"),
    (plain_optimizer, r"got a step of another one \(Adam\) on the same parameters"),
]
each_way = pytest.mark.parametrize(
    ("go_on", "text"), UNRECORDED, ids=[way.__name__ for way, _ in UNRECORDED]
)


@each_run
@each_way
@pytest.mark.parametrize("epochs", [0, 1])
def test_steps_that_nobody_records(arguments, go_on, text, epochs):
    """Reported 0 without a recorded step."""
    loop = stock_loop(**arguments)
    for _ in range(epochs):
        loop.epoch()
    go_on(loop)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        _ = loop.epsilon


@each_run
def test_updates_by_hand_without_a_step(arguments):
    loop = stock_loop(**arguments)
    with torch.no_grad():
        loop.model._module.weight[:] = 0.0  # before the first batch it is another public start
    assert loop.epsilon == 0.0
    for features, labels in loop.loader:
        loop.model.zero_grad()
        loop.criterion(loop.model(features), labels).backward()
        with torch.no_grad():
            for p in loop.model.parameters():
                p -= 0.1 * p.grad
    with pytest.raises(hsa.UnsupportedRunError, match="parameters that were written since"):
        _ = loop.epsilon


@each_way
def test_they_are_not_forgotten(go_on, text):
    loop = stock_loop(**RUNS[0])
    go_on(loop)
    again = stock_loop(engine=loop.engine, **RUNS[0])
    for ask in (again.epoch, lambda: again.epsilon):
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            ask()


def test_a_plain_step_between_private_ones():
    loop = stock_loop(**RUNS[1])
    loop.epoch()
    plain = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    plain.step()
    with pytest.raises(hsa.UnsupportedRunError, match=r"another one \(SGD\)"):
        loop.epoch()


# --- honest loops ---------------------------------------------------------------------------------


@each_run
def test_both_hooks_in_one_function(arguments):
    loop, other = stock_loop(**arguments), PRVAccountant()
    own, hook = loop.optimizer.step_hook, other.get_optimizer_hook_fn(sample_rate=BATCH / RECORDS)
    loop.optimizer.attach_step_hook(lambda optimizer: (own(optimizer), hook(optimizer)))
    loop.epoch()
    assert other.history == [(2.0, BATCH / RECORDS, 6)]
    assert len(loop.accountant) == 6
    assert loop.epsilon > 0


def test_other_optimizers_on_other_parameters_and_after_the_run():
    first = stock_loop(**RUNS[0])
    elsewhere = nn.Linear(2, 2)
    torch.optim.SGD(elsewhere.parameters(), lr=0.1).step()
    first.epoch()
    second = stock_loop(engine=first.engine, **RUNS[0])
    second.epoch()
    plain_optimizer(first)  # on public data, say: the first run ended
    assert second.accountant.history == [(2.0, 1 / 6, 12)]
    assert second.epsilon > 0


@each_run
def test_no_step_is_no_secret(arguments):
    loop = stock_loop(**arguments)
    assert loop.epsilon == 0.0
    assert "no step was recorded" in loop.accountant.guarantee.explain()


# --- row 26 ---------------------------------------------------------------------------------------


def make_private(engine, model, **arguments):
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=BATCH),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        **arguments,
    )


@pytest.mark.parametrize("engine", [PrivacyEngine, HiddenStatePrivacyEngine])
def test_a_model_that_a_stock_engine_has_trained(engine):
    """A notebook's cell is run again, and the older steps are missing."""
    arguments = {"accountant": "hidden_state"} if engine is PrivacyEngine else {}
    stock = PrivacyEngine(accountant="hidden_state")
    model, optimizer, loader = make_private(stock, nn.Linear(FEATURES, 3))
    make_private(engine(**arguments), model)  # before the first step nothing is lost
    for features, labels in itertools.islice(loader, 3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="got one with 3 steps of another engine"):
        make_private(engine(**arguments), model)
    make_private(stock, model)  # whose steps compose
    assert len(stock.accountant) == 3
