"""Stock engines: the batches of a run are drawn anew, and its records stay what they are."""

import pytest
import torch
from opacus_stock import SOFTMAX, epsilon, event
from opacus_stock_loops import (
    BATCH,
    FEATURES,
    plain_sgd,
    records,
    secret_generator,
    stock_loop,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CAME_AGAIN = "a state of the generator that drew an earlier batch of the run already"


def run_on(**arguments):
    return stock_loop(declared={"loss_geometry": SOFTMAX}, **arguments)


# --- row 95: the generator of the batches is set back ---------------------------------------------


def forked(loop):
    with torch.random.fork_rng():
        loop.epoch()


@pytest.fixture
def secret_seed():
    """Of torch's default generator, which shuffles where the loader has no generator."""
    with torch.random.fork_rng():
        yield


@pytest.mark.usefixtures("secret_seed")
def test_epochs_from_the_same_state_of_the_default_generator():
    """Reported 1.28, true 3.13: every epoch deals the batches of the first one."""
    loop = stock_loop(loader={"shuffle": True})
    torch.manual_seed(secret_generator().initial_seed())
    loop.accountant.declare_run(loss_geometry=SOFTMAX)
    forked(loop)
    with pytest.raises(hsa.UnsupportedRunError, match=f"step 7: .*{CAME_AGAIN}"):
        forked(loop)


@pytest.mark.parametrize("kind", ["reshuffled", "poisson"])
def test_a_generator_that_is_set_back(kind):
    generator = secret_generator()
    if kind == "poisson":
        loop = run_on(loader={"generator": generator}, poisson_sampling=True)
    else:
        loop = run_on(loader={"shuffle": True, "generator": generator})
    state = generator.get_state()
    loop.epoch()
    generator.set_state(state)
    with pytest.raises(hsa.UnsupportedRunError, match=f"step 7: .*{CAME_AGAIN}"):
        loop.epoch()


def test_a_generator_that_is_set_back_before_every_batch():
    generator = secret_generator()
    loop = run_on(loader={"generator": generator}, poisson_sampling=True)
    batches, state = iter(loop.loader), generator.get_state()
    loop.step(next(batches))
    generator.set_state(state)
    with pytest.raises(hsa.UnsupportedRunError, match=f"step 2: .*{CAME_AGAIN}"):
        loop.step(next(batches))


def test_an_order_that_was_only_looked_at_may_come_again():
    generator = secret_generator()
    loop = run_on(loader={"shuffle": True, "generator": generator})
    state = generator.get_state()
    assert len(list(loop.loader)) == 6
    generator.set_state(state)
    for _ in range(2):
        loop.epoch()
    assert loop.epsilon == epsilon(event(batch_order="reshuffled"))


# --- row 96: the records change -------------------------------------------------------------------


def test_records_that_are_written_between_epochs():
    loop = run_on()
    loop.epoch()
    loop.loader.dataset.tensors[0][0] *= -1
    with pytest.raises(hsa.UnsupportedRunError, match="step 7 follows a write to the tensors"):
        loop.epoch()


@pytest.mark.parametrize("poisson", [False, True])
def test_indices_of_a_subset_that_change(poisson):
    data = Subset(records(70), list(range(60)))
    loop = run_on(data=data, poisson_sampling=poisson)
    loop.epoch()
    data.indices = list(range(10, 70))
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 7: .*indices of torch"):
        loop.epoch()


def test_indices_that_change_in_the_last_epoch():
    data = Subset(records(70), list(range(60)))
    loop = run_on(data=data)
    for batch in loop.loader:
        loop.step(batch)
        data.indices = list(range(10, 70))
    data.indices = list(range(60))
    with pytest.raises(hsa.UnsupportedRunError, match="the indices of torch"):
        _ = loop.epsilon


class Streamed(Dataset):
    """Records that nobody can watch."""

    def __init__(self):
        self.records = records()

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]


def test_what_is_known_of_the_records_is_listed():
    checked = "checked: tensors of the data set without writes that torch counts"
    declared = "declared: the data set holds the same records during the whole run"
    for data, line in ((records(), checked), (Streamed(), declared)):
        loop = run_on(data=data)
        loop.epoch()
        lines = [str(a) for a in loop.accountant.guarantee.assumptions]
        assert [text for text in (checked, declared) if text in lines] == [line]


# --- one loader for several runs ------------------------------------------------------------------


def test_two_engines_on_one_loader():
    """Neither engine hides the batches from the other one."""
    loader = DataLoader(records(), batch_size=BATCH)
    loops = [run_on(original=loader) for _ in range(2)]
    for _ in range(2):
        for loop in loops:
            loop.epoch()
    for loop in loops:
        assert loop.loader is loader
        assert loop.epsilon == epsilon(event())


# --- a part of the records, in random order -------------------------------------------------------


def on_a_part(indices):
    sampler = SubsetRandomSampler(indices, generator=secret_generator())
    return {"sampler": sampler}


def test_a_part_of_the_records_is_read():
    loop = run_on(loader=on_a_part(range(10, 50)))
    for _ in range(2):
        loop.epoch()
    assert loop.optimizer.expected_batch_size == 15  # of Opacus, which divides all records by four
    truth = event(
        batch_order="reshuffled", dataset_size=40, num_steps=8,
        learning_rate=0.5 * 10 / 15, weight_decay=0.1 / (10 / 15),
    )  # fmt: skip
    assert loop.event == truth
    assert loop.epsilon == epsilon(truth)


def test_another_part_of_the_records():
    indices = list(range(40))
    loop = run_on(loader=on_a_part(indices))
    loop.epoch()
    indices[0] = 59
    with pytest.raises(hsa.UnsupportedRunError, match="step 5: the sampler of the loader was chan"):
        loop.epoch()


def test_a_part_with_a_record_twice():
    with pytest.raises(hsa.UnsupportedRunError, match="an index twice in SubsetRandomSampler"):
        run_on(loader=on_a_part([*range(39), 0]))


def test_a_part_that_the_batches_do_not_divide():
    with pytest.raises(hsa.UnsupportedRunError, match="batch_size that divides the 45 records"):
        run_on(loader={**on_a_part(range(45)), "drop_last": True})


@pytest.mark.parametrize("order", ["reshuffled", "poisson", "cyclic"])
def test_the_other_engine_draws_from_the_part_itself(order):
    model, part = nn.Linear(FEATURES, 3), on_a_part(range(10, 50))
    loader = DataLoader(records(), batch_size=BATCH, **part)

    def make_private():
        return HiddenStatePrivacyEngine().make_private(
            module=model,
            optimizer=plain_sgd(model.parameters()),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            batch_order=order,
        )

    if order == "cyclic":
        with pytest.raises(hsa.UnsupportedRunError, match="got SubsetRandomSampler, which draws a"):
            make_private()
        return
    *_, private = make_private()
    assert sorted(private.batch_sampler.plan.records) == list(range(10, 50))
