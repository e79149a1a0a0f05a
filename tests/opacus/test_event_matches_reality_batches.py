"""Batches that are not the declared ones raise.

See docs/threat_model.md. What every optimizer
refuses is in tests/misuse/misuse.py.
"""

import contextlib
import copy
import itertools

import pytest
import torch
from misuse import each_row
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

import hidden_state_accountants as hsa

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


DELTA = 1e-5


# Batches that are not the declared ones.


def own_loader_around_the_private_batches(run):
    run.epoch(DataLoader(run.loader.dataset, batch_sampler=run.loader.batch_sampler))


def copy_of_the_loader(run):
    run.epoch(copy.deepcopy(run.loader))


def gradient_accumulation(run):
    for index, (features, labels) in enumerate(run.loader):
        run.criterion(run.model(features), labels).backward()
        if index % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()


def no_zero_grad(run):
    for features, labels in run.loader:
        run.criterion(run.model(features), labels).backward()
        run.optimizer.step()


def two_passes_in_one_step(run):
    # Row i of the gradient then mixes two records.
    features, labels = next(iter(run.loader))
    flipped = run.criterion(run.model(features.flip(0)), labels.flip(0))
    (flipped + run.criterion(run.model(features), labels)).backward()
    run.optimizer.step()


def layer_by_itself(run):
    first, _ = run.loader.dataset.tensors
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        output = run.model(features) + 0.1 * run.plain_model[1](first[:10])
        run.criterion(output, labels).backward()
        run.optimizer.step()


def memory_manager_left_early(run):
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
        ) as pieces:
            for batch in itertools.islice(pieces, 6):  # two logical batches
                run.step(batch)


def memory_manager_piece_skipped(run):
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as pieces:
        for index, batch in enumerate(pieces):
            if index != 2:
                run.step(batch)


def cycle_over_the_loader(run):
    for batch in itertools.islice(itertools.cycle(run.loader), 12):  # keeps the first epoch
        run.step(batch)


def backward_twice(run):
    for features, labels in run.loader:
        loss = run.criterion(run.model(features), labels)
        loss.backward(retain_graph=True)
        with contextlib.suppress(hsa.UnsupportedRunError):  # from the backward pass
            loss.backward()
        run.optimizer.step()


# Hooks, scalers, copies, settings.


RAISES = [
    (1, own_loader_around_the_private_batches, "no new batch, expected batch 0.*another loader", 0),
    (1, copy_of_the_loader, "step 1 used no new batch, expected batch 0", 0),
    (
        1,
        gradient_accumulation,
        "gradients of 2 batches, expected 1.*Memory",
        0,
    ),
    (1, two_passes_in_one_step, "step 1 got the gradients of 2 batches", 0),
    (1, memory_manager_piece_skipped, "step 2: a piece of a batch", 1),
    (1, cycle_over_the_loader, "step 7 used no new batch, expected batch 0", 6),
    (1, backward_twice, "its gradients are 2 times as long", 0),
]


def test_two_iterators_deal_the_same_batches(make_run):
    run, plain = make_run(batch_order="reshuffled"), make_run(batch_order="reshuffled")
    for batch, again in zip(run.loader, run.loader, strict=True):
        assert all(map(torch.equal, batch, again))
        run.step(batch)
    plain.epoch()
    assert run.engine.privacy_event == plain.engine.privacy_event


@each_row(("loop", "text", "steps"), RAISES)
def test_a_different_loop_raises(make_run, loop, text, steps):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        loop(run)
    if steps is not None:
        assert run.steps == steps


def test_a_layer_that_is_called_by_itself(make_run):
    run = make_run(model=nn.Sequential(nn.Flatten(), nn.Linear(5, 3)))
    with pytest.raises(hsa.UnsupportedRunError, match="step 1 got the gradients of 2 batches"):
        layer_by_itself(run)


def test_without_zero_grad_nothing_changes(make_run):
    runs = [make_run(noise_generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    no_zero_grad(runs[0])
    runs[1].epoch()
    assert torch.equal(runs[0].plain_model.weight, runs[1].plain_model.weight)
    assert runs[0].engine.get_epsilon(DELTA) == runs[1].engine.get_epsilon(DELTA)


def test_memory_manager_tail_with_workers(make_run):
    run = make_run(loader={"num_workers": 1, "prefetch_factor": 4})
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as pieces:
        *first, _ = pieces  # the workers are already done with the epoch
        with pytest.raises(hsa.UnsupportedRunError, match=r"step \d+"):
            run.epoch(first)
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        run.engine.get_epsilon(DELTA)


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_workers_do_not_move_the_cursor(make_run, workers):
    run = make_run(loader={"num_workers": workers})
    run.epoch()
    for batch in itertools.islice(run.loader, 2):
        run.step(batch)
    run.epoch()  # the other four
    assert run.engine.privacy_event.num_steps == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_manager_left_early(make_run, workers):
    run = make_run(loader={"num_workers": workers})
    memory_manager_left_early(run)
    assert run.engine.privacy_event.num_steps == 4
