"""Misuses of Opacus' own engine with accountant="hidden_state": each is refused, with a text.

The cases of tests/reference/misuse.py are about optimizers that check everything. What this
accountant sees is the optimizer and the loader. Numbers are those of docs/guards.md.
"""

import itertools
from unittest import mock

import pytest
import torch
from misuse import each_row
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus_stock import DECLARED, SOFTMAX
from opacus_stock_loops import BATCH, RECORDS, records, secret_generator, stock_loop
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Subset, WeightedRandomSampler

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import HiddenStateAccountant, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

POISSON = {**DECLARED, "batch_order": "poisson"}


def train(**arguments):
    loop = stock_loop(**arguments)
    for _ in range(2):
        loop.epoch()
    return loop.epsilon


# --- rows 55 and 56: what was declared is not what the loader deals -------------------------------


def more_records_declared():
    train(declared={**DECLARED, "dataset_size": 2400})


def more_records_declared_without_a_loss():
    train(declared={**DECLARED, "dataset_size": 2400, "loss_geometry": None})


def more_records_declared_afterwards():
    stock_loop().accountant.declare_run(dataset_size=2400)


def more_records_of_a_poisson_loader_declared():
    train(declared={**POISSON, "dataset_size": 66}, poisson_sampling=True)


def another_batch_size_declared():
    train(declared={**DECLARED, "batch_size": 12})


def another_batch_size_of_a_poisson_loader_declared():
    train(declared={**POISSON, "batch_size": 8}, poisson_sampling=True)


def fixed_batches_called_poisson():
    train(declared=POISSON)


def poisson_batches_called_cyclic():
    train(declared=DECLARED, poisson_sampling=True)


def fixed_batches_called_reshuffled():
    train(declared={**DECLARED, "batch_order": "reshuffled"})


def shuffled_batches_called_cyclic():
    train(declared=DECLARED, loader={"shuffle": True, "generator": secret_generator()})


def shuffled_batches_called_drawn_anew():
    shuffles = {"shuffle": True, "generator": secret_generator()}
    train(declared={**DECLARED, "batch_order": "without_replacement"}, loader=shuffles)


def original_loader_given():
    loop = stock_loop(poisson_sampling=True)
    loop.declare(data_loader=loop.original)


def undeclared_fixed_batches():
    train()


def undeclared_shuffled_batches():
    train(loader={"shuffle": True})


def undeclared_draws_with_replacement():
    """One batch of 60 records, of which some are in it several times."""
    sampler = WeightedRandomSampler(torch.ones(RECORDS), RECORDS)
    train(loader={"batch_size": RECORDS, "sampler": sampler})


def undeclared_at_a_higher_rate():
    """Opacus says a rate of 1/20, from the number of batches."""
    batches = UniformWithReplacementSampler(num_samples=RECORDS, sample_rate=0.5, steps=20)
    train(loader={"batch_size": 1, "batch_sampler": batches})


def undeclared_on_the_original_loader():
    loop = stock_loop(poisson_sampling=True)
    for _ in range(5):
        loop.epoch(loop.original)


def undeclared_hook_by_hand():
    """Nobody knows the loader, but the rows of the batches."""
    loop = stock_loop()
    loop.optimizer.attach_step_hook(HiddenStateAccountant().get_optimizer_hook_fn(BATCH / RECORDS))
    for _ in range(5):
        loop.epoch()


# --- row 57: several processes --------------------------------------------------------------------


def two_processes(commit):
    def in_two():
        with (
            mock.patch("torch.distributed.is_initialized", return_value=True),
            mock.patch("torch.distributed.get_world_size", return_value=2),
        ):
            commit()

    in_two.__name__ = f"two_processes_{commit.__name__}"
    return in_two


def cyclic():
    train(declared=DECLARED)


def poisson_from_all_records_in_each():
    train(declared=POISSON, poisson_sampling=True)


# --- row 58: calibration --------------------------------------------------------------------------


def calibrated_and_declared():
    train(declared=DECLARED, target_epsilon=1.0, epochs=2)


def calibrated_without_declaration():
    train(target_epsilon=1.0, epochs=2)


# --- row 66: loaders that cannot be read, or whose order is known ---------------------------------


def drawn_with_replacement():
    sampler = WeightedRandomSampler(torch.ones(RECORDS), RECORDS)
    train(declared={}, loader={"sampler": sampler})


class OwnBatches(BatchSampler):
    def __iter__(self):
        return iter([list(range(BATCH))] * (RECORDS // BATCH))


def batches_of_a_sampler_of_ones_own():
    batches = OwnBatches(range(RECORDS), BATCH, drop_last=False)
    train(declared=DECLARED, loader={"batch_sampler": batches, "batch_size": 1})


def records_repeated():
    train(declared={}, data=Subset(records(), [*range(RECORDS - 1), 0]))


def rest_dropped_after_shuffling():
    shuffles = {"shuffle": True, "generator": secret_generator(), "drop_last": True}
    train(declared={}, data=records(RECORDS + 5), loader=shuffles)


def rest_kept():
    train(declared={}, data=records(RECORDS + 5))


def shuffled_by_a_seeded_script():
    train(declared={}, loader={"shuffle": True})


def shuffled_by_a_seeded_generator():
    train(declared={}, loader={"shuffle": True, "generator": torch.Generator().manual_seed(1)})


def shuffled_by_a_new_generator():
    train(declared={}, loader={"shuffle": True, "generator": torch.Generator()})


def shuffled_by_a_generator_that_is_seeded_later():
    generator = secret_generator()
    loop = stock_loop(declared={}, loader={"shuffle": True, "generator": generator})
    loop.epoch()
    generator.manual_seed(1)
    loop.epoch()


def hook_by_hand():
    accountant = HiddenStateAccountant()
    accountant.declare_run(**DECLARED)
    accountant.get_optimizer_hook_fn(BATCH / RECORDS)


def loader_of_the_other_engine():
    model = nn.Linear(5, 3)
    _, _, loader = HiddenStatePrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    loop = stock_loop()
    loop.engine.make_private(
        module=(other := nn.Linear(5, 3)),
        optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    loop.accountant.declare_run()


# --- row 66: steps that are not about the batches of the loader -----------------------------------


def loop_on(**arguments):
    return stock_loop(declared={"loss_geometry": SOFTMAX}, **arguments)


def batch_left_out():
    loop = loop_on()
    for index, batch in enumerate(loop.loader):
        if index != 1:
            loop.step(batch)
    _ = loop.epsilon


def poisson_batch_left_out():
    loop = loop_on(poisson_sampling=True)
    for index, batch in enumerate(loop.loader):
        if index not in (1, 2):
            loop.step(batch)


def batch_used_twice():
    loop = loop_on()
    for batch in loop.loader:
        loop.step(batch)
        loop.step(batch)


def epoch_broken_off():
    loop = loop_on()
    for batch in itertools.islice(loop.loader, 2):
        loop.step(batch)
    loop.epoch()


def other_loader():
    loop = loop_on()
    loop.epoch(DataLoader(records(), batch_size=BATCH))


def original_loader():
    loop = loop_on(poisson_sampling=True)
    loop.epoch(loop.original)


def two_passes_at_once():
    loop = loop_on()
    for batch, _ in zip(loop.loader, loop.loader, strict=True):
        loop.step(batch)


def batches_fetched_in_advance():
    loop = loop_on()
    for batch in list(loop.loader):
        loop.step(batch)


def rows_left_out():
    loop = loop_on(poisson_sampling=True)
    features, labels = next(batch for batch in loop.loader if len(batch[0]) > 1)
    loop.step((features[1:], labels[1:]))


def sampler_replaced():
    loop = loop_on()
    loop.epoch()
    loop.loader.batch_sampler.sampler = range(RECORDS - 1, -1, -1)
    loop.epoch()


def sampling_rate_raised():
    loop = loop_on(poisson_sampling=True)
    loop.loader.batch_sampler.sample_rate = 0.5
    loop.epoch()


def order_of_the_records_changed():
    order = list(range(RECORDS))
    loop = loop_on(loader={"sampler": order})
    loop.epoch()
    order.reverse()
    loop.epoch()


def pieces_with_a_criterion():
    loop = stock_loop(poisson_sampling=True)
    loop.declare()
    with BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=4, optimizer=loop.optimizer
    ) as loader:
        loop.epoch(loader)


DEALS = "which is what the loader deals"
NO_NEW_BATCH = "used no new batch of the loader that make_private returned, expected batch"

MISUSES = [
    (55, more_records_declared, f"dataset_size = 60, {DEALS}.*got 2400"),
    (55, more_records_declared_without_a_loss, f"dataset_size = 60, {DEALS}.*got 2400"),
    (55, more_records_declared_afterwards, f"dataset_size = 60, {DEALS}.*got 2400"),
    (55, more_records_of_a_poisson_loader_declared, f"dataset_size = 60, {DEALS}.*got 66"),
    (55, another_batch_size_declared, f"batch_size = 10, {DEALS}.*got 12"),
    (55, another_batch_size_of_a_poisson_loader_declared, f"batch_size = 10, {DEALS}.*got 8"),
    (56, fixed_batches_called_poisson, f'batch_order = "cyclic", {DEALS}.*got "poisson"'),
    (56, poisson_batches_called_cyclic, f'batch_order = "poisson", {DEALS}.*got "cyclic"'),
    (56, fixed_batches_called_reshuffled, f'"cyclic", {DEALS}.*got "reshuffled"'),
    (56, shuffled_batches_called_cyclic, f'"reshuffled", {DEALS}.*got "cyclic"'),
    (56, shuffled_batches_called_drawn_anew, f'"reshuffled", {DEALS}.*got "without_rep'),
    (56, original_loader_given, "to be the loader that make_private returned"),
    (56, undeclared_fixed_batches, r"Expected a Poisson loader.*declare_run\(\)"),
    (56, undeclared_shuffled_batches, "Expected a Poisson loader"),
    (56, undeclared_draws_with_replacement, "Expected a Poisson loader"),
    (56, undeclared_at_a_higher_rate, r"1 / len\(data_loader\) = 0.05, got 0.5"),
    (56, undeclared_on_the_original_loader, f"step 1: .*{NO_NEW_BATCH} 0"),
    (56, undeclared_hook_by_hand, "got 10 rows in each of the first 15 batches"),
    (57, two_processes(cyclic), "Expected one process, got 2 with DataLoader"),
    (57, two_processes(poisson_from_all_records_in_each), "Expected one process, got 2"),
    (58, calibrated_and_declared, "Expected a Poisson loader.*in make_private_with_epsilon"),
    (58, calibrated_without_declaration, "Expected a Poisson loader.*make_private_with_epsilon"),
    (66, drawn_with_replacement, "sampler=WeightedRandomSampler"),
    (66, batches_of_a_sampler_of_ones_own, "batch_sampler=OwnBatches"),
    (66, records_repeated, "an index twice"),
    (66, rest_dropped_after_shuffling, "drop_last=True leaves out other records"),
    (66, rest_kept, "batch_size that divides the 65 records, got 10"),
    (66, hook_by_hand, r"a loader to read, got none.*data_loader="),
    (66, loader_of_the_other_engine, "OrderedDataLoader that HiddenStatePrivacyEngine made"),
    (66, shuffled_by_a_seeded_script, r"a script seeded \(with 0\)"),
    (66, shuffled_by_a_seeded_generator, r"a script seeded \(with 1\)"),
    (66, shuffled_by_a_new_generator, r"a script seeded \(torch.Generator\(\)\)"),
    (66, shuffled_by_a_generator_that_is_seeded_later, r"step 7: .*a script seeded \(with 1\)"),
    (66, batch_left_out, r"1 are waiting\), but no step was taken"),
    (66, poisson_batch_left_out, "no step was taken on it|rows, expected the"),
    (66, batch_used_twice, f"step 2: .*{NO_NEW_BATCH} 1"),
    (66, epoch_broken_off, "step 3: .*used batch 0 of the loader"),
    (66, other_loader, f"step 1: .*{NO_NEW_BATCH} 0"),
    (66, original_loader, f"step 1: .*{NO_NEW_BATCH} 0"),
    (66, two_passes_at_once, "went on after another one had been started"),
    (66, batches_fetched_in_advance, "no step was taken on it"),
    (66, rows_left_out, r"step 1 used \d+ rows, expected the \d+ records of its batch"),
    (66, sampler_replaced, "step 7: the sampler of the loader was changed"),
    (66, sampling_rate_raised, "step 1: the sampler of the loader was changed"),
    (66, order_of_the_records_changed, "step 7: batch 0 of the loader holds other records"),
    (66, pieces_with_a_criterion, "only the last can be held against the criterion"),
]


@each_row(("commit", "text"), MISUSES)
def test_misuse(commit, text):
    with pytest.raises(UnsupportedRunError, match=text):
        commit()
