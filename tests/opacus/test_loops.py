"""Ways to go through the batches: what is not the run of the event raises, the rest is accounted.

What every optimizer refuses is in tests/misuse/misuse.py.
"""

import contextlib
import copy
import itertools

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import Batches

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

EPOCHS = ["shuffled_once", "reshuffled"]  # every record once per epoch
SECRET = [*EPOCHS, "without_replacement", "poisson"]
ORDERS = ["cyclic", "full", *SECRET]


def event(order, steps, **settings):
    return hsa.LastIterateDpEvent(**{
        "noise_multiplier": 2.0, "learning_rate": 0.5, "clip_norm": 2.1, "num_steps": steps,
        "batch_size": 60 if order == "full" else 10, "dataset_size": 60, "batch_order": order,
        "weight_decay": 0.1, "loss": hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True),
        **settings,
    })  # fmt: skip


def pieces_of(run, size):
    return BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=size, optimizer=run.optimizer
    ).__enter__()


def ahead(batches, count=1):
    """Yields batches, fetching `count` more than it has yielded; the last ones at the end."""
    fetched = []
    for batch in batches:
        fetched.append(batch)
        if len(fetched) > count:
            yield fetched.pop(0)
    yield from fetched


# --- other batches than those of the event --------------------------------------------------------


def own_loader_around_the_private_batches(run):
    run.epoch(DataLoader(run.loader.dataset, batch_sampler=run.loader.batch_sampler))


def copy_of_the_loader(run):
    run.epoch(copy.deepcopy(run.loader))


def of_another_loader(run):
    next(iter(run.loader))
    own = TensorDataset(*(part.flip(0) for part in run.loader.dataset.tensors))
    for batch, _ in zip(DataLoader(own, batch_size=10), run.loader, strict=True):
        run.step(batch)
        run.step(batch)


def cycle_over_the_loader(run):
    for batch in itertools.islice(itertools.cycle(run.loader), 12):  # keeps the first epoch
        run.step(batch)


def skip_a_batch(run):
    for index, batch in enumerate(run.loader):
        if index != 2:
            run.step(batch)


def one_left_out_ahead(run):
    for index, batch in enumerate(ahead(run.loader)):
        if index != 2:
            run.step(batch)


def two_ahead(run):
    run.epoch(ahead(run.loader, 2))


def ahead_beyond_the_end_of_a_pass(run):
    """A random batch is dealt again there, and would be used for the one after it."""

    def forever(loader):
        while True:
            yield from loader

    run.epoch(itertools.islice(ahead(forever(run.loader)), 15))


def transformed(run):
    for features, labels in ahead(run.loader):
        run.step((0.5 * features, labels))


def swapped(run):
    batches = iter(run.loader)
    for first, second in zip(batches, batches, strict=True):
        run.step(second)
        run.step(first)


def best_of_two(run):
    batches = iter(run.loader)
    for pair in zip(batches, batches, strict=True):
        run.step(max(pair, key=lambda batch: float(batch[0].sum())))


def a_row_left_out(run):
    while not run.optimizer.run.declared.plan.batch(run.steps):
        run.step(next(iter(run.loader)))
    features, labels = next(iter(run.loader))
    run.step((features[1:], labels[1:]))


def empty_and_small_batches_skipped(run):
    """What a loop does that has no use for an empty batch: it then depends on the data."""
    for batch in itertools.chain(*[run.loader] * 20):  # until a batch of another size comes
        if len(batch[0]) > 7:
            run.step(batch)


def padded_to_the_expected_size(run):
    for features, labels in itertools.chain(*[run.loader] * 20):
        index = torch.arange(10) % max(1, len(features))
        run.step((features[index], labels[index]))


def cut_to_the_expected_size(run):
    for features, labels in itertools.chain(*[run.loader] * 20):
        run.step((features[:10], labels[:10]))


def piece_skipped(run):
    for index, batch in enumerate(pieces_of(run, 5)):
        if index != 2:
            run.step(batch)


def gradient_accumulation(run):
    for index, (features, labels) in enumerate(run.loader):
        (run.criterion(run.model(features), labels) / 2).backward()
        if index % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()


def two_passes_in_one_step(run):
    """Row i of the gradient then mixes two records."""
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


def backward_twice(run):
    for features, labels in run.loader:
        loss = run.criterion(run.model(features), labels)
        loss.backward(retain_graph=True)
        with contextlib.suppress(hsa.UnsupportedRunError):  # from the backward pass
            loss.backward()
        run.optimizer.step()


def weights_loaded_late(run):
    run.plain_model.load_state_dict(nn.Linear(5, 3).state_dict())
    run.epoch()


def one_cycle(run):
    torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.5, total_steps=6)
    run.epoch()


CAPPED = Batches("poisson", max_batch_size=30)
RAISES = [
    (own_loader_around_the_private_batches, "cyclic", "no new batch, .*Another loader"),
    (copy_of_the_loader, "cyclic", "step 1 used no new batch, expected batch 0"),
    (of_another_loader, "cyclic", "not what the loader drew"),
    (cycle_over_the_loader, "cyclic", "step 7 used no new batch, expected batch 0"),
    (skip_a_batch, "reshuffled", "step 3 used batch 3, expected batch 2"),
    (skip_a_batch, "poisson", "step 3 used batch 3, expected batch 2"),
    (one_left_out_ahead, "cyclic", "step 3 used batch 3, expected batch 2"),
    (two_ahead, "cyclic", "step 3 used no new batch, expected batch 2.*fetches ahead"),
    (ahead_beyond_the_end_of_a_pass, "cyclic", r"step \d used .* expected batch \d"),
    (ahead_beyond_the_end_of_a_pass, "without_replacement", r"step \d used .* expected batch \d"),
    (ahead_beyond_the_end_of_a_pass, CAPPED, r"step \d used .* expected batch \d"),
    (transformed, "cyclic", "no new batch, expected batch 0.*what the loader delivered"),
    (swapped, "cyclic", "step 1 used batch 1, expected batch 0"),
    (best_of_two, "cyclic", r"step \d used (batch \d|no new batch), expected batch \d"),
    (a_row_left_out, "without_replacement", r"step \d+ used \d+ rows, expected"),
    (a_row_left_out, "poisson", r"step \d+ used another number of rows"),
    (empty_and_small_batches_skipped, "poisson", r"step \d+ used .*an empty batch is a step, too"),
    (padded_to_the_expected_size, "poisson", r"step \d+ used"),
    (cut_to_the_expected_size, "poisson", r"step \d+ used"),
    (piece_skipped, "cyclic", "step 2: a piece of a batch"),
    (gradient_accumulation, "cyclic", "gradients of 2 .*raise the batch_size.*BatchMemoryManager"),
    (two_passes_in_one_step, "cyclic", "step 1 got the gradients of 2 batches"),
    (layer_by_itself, "cyclic", "step 1 got the gradients of 2 batches"),
    (backward_twice, "cyclic", "its gradients are 2 times as long"),
    (weights_loaded_late, "cyclic", "step 1: .*Load public weights before make_private"),
    (one_cycle, "cyclic", "momentum = 0, got 0.95: .*OneCycleLR .*cycle_momentum=False"),
]


@pytest.mark.parametrize(
    ("loop", "order", "text"), RAISES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_different_loop_raises(make_run, loop, order, text):
    options = {"loader": {"batch_size": 60}} if order is CAPPED else {}
    if loop is layer_by_itself:
        options["model"] = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    run = make_run(batch_order=order, **options)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        loop(run)
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        run.engine.get_epsilon(1e-5)


def test_memory_manager_tail_with_workers(make_run):
    run = make_run(loader={"num_workers": 1, "prefetch_factor": 4})
    *first, _ = pieces_of(run, 5)  # the workers are already done with the epoch
    with pytest.raises(hsa.UnsupportedRunError, match=r"step \d+"):
        run.epoch(first)
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        run.engine.get_epsilon(1e-5)


# --- what happened is accounted -------------------------------------------------------------------


def break_and_go_on(run):
    """An epoch goes on with its next batch; where every step draws one there are no epochs."""
    for batch in itertools.islice(run.loader, 4):
        run.step(batch)
    run.epoch()
    return 6 if run.optimizer.run.declared.plan.order.value in EPOCHS else 10


def next_iter_every_step(run):
    for _ in range(5):
        run.step(next(iter(run.loader)))
    return 5


def pieces(run):
    run.epoch(pieces_of(run, 3))
    run.epoch(pieces_of(run, 3))
    return 12


def pieces_left_early(run):
    for _ in range(2):
        for batch in itertools.islice(pieces_of(run, 5), 4):  # two logical batches
            run.step(batch)
    return 4


def evaluation_between_epochs(run):
    for _ in range(2):
        with torch.no_grad():
            for features, _ in run.loader:
                run.model(features)
        run.epoch()
    return 12


@pytest.mark.parametrize("order", ["reshuffled", "poisson"])
@pytest.mark.parametrize(
    "loop", [pieces, evaluation_between_epochs, break_and_go_on, next_iter_every_step]
)
def test_what_happened_is_accounted(make_run, loop, order):
    run = make_run(batch_order=order)
    steps = loop(run)
    assert run.engine.privacy_event == event(order, steps)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_fetch_ahead_do_not_move_the_cursor(make_run, workers):
    run = make_run(loader={"num_workers": workers})
    assert pieces_left_early(run) == run.engine.privacy_event.num_steps
    run.epoch()  # the other two
    assert run.engine.privacy_event == event("cyclic", 6)


@pytest.mark.parametrize(
    ("order", "workers", "size"),
    [*((order, 0, 4) for order in SECRET), ("poisson", 2, 4), ("reshuffled", 2, None)],
)
def test_a_loop_cannot_choose_among_batches(make_run, order, workers, size):
    """It looks at batches until one pleases it; it gets the same ones again."""
    run = make_run(batch_order=order, loader={"num_workers": workers})
    loader = run.loader if size is None else pieces_of(run, size)
    firsts = [next(iter(loader))[0] for _ in range(3)]
    assert all(torch.equal(features, firsts[0]) for features in firsts)
    for _ in range(2):
        looked_at = [features for features, _ in loader]
        used = []
        for features, labels in loader:
            used.append(features)
            run.step((features, labels))
        assert all(torch.equal(a, b) for a, b in zip(used, looked_at, strict=True))
    assert run.engine.privacy_event.num_steps == 12


@pytest.mark.parametrize(("order", "workers"), [*((order, 0) for order in ORDERS), ("cyclic", 2)])
def test_one_batch_ahead_is_a_plain_loop(make_run, order, workers):
    """Lightning, accelerate, prefetchers: the cursor follows what goes into the model."""
    run = make_run(batch_order=order, loader={"num_workers": workers})
    for _ in range(2):
        run.epoch(ahead(run.loader))
    assert run.engine.privacy_event == event(order, 2 * len(run.loader))


@pytest.mark.parametrize("order", ["without_replacement", "poisson"])
def test_a_loop_may_stop_with_one_batch_fetched(make_run, order):
    """Where each step draws its batch, the next pass deals the one that was not used."""
    run = make_run(batch_order=order)
    for batch in itertools.islice(ahead(run.loader), 3):
        run.step(batch)
    first = run.optimizer.run.declared.plan.batch(3)
    run.epoch(ahead(run.loader))
    assert run.optimizer.run.declared.plan.batch(3) == first
    assert run.engine.privacy_event == event(order, 9)


@pytest.mark.parametrize("order", ["cyclic", "full", "reshuffled", "poisson"])
@pytest.mark.parametrize("look", [lambda loader: next(iter(loader)), list])
def test_a_look_in_the_middle_of_a_pass(make_run, order, look):
    run = make_run(batch_order=order)
    for _ in range(2):
        for number, batch in enumerate(run.loader):
            if number == 3:
                look(run.loader)
            run.step(batch)
    assert run.engine.privacy_event == event(order, 2 * len(run.loader))


@pytest.mark.parametrize(
    "move",
    [
        torch.clone,  # as to another device: the same numbers elsewhere
        lambda features: features.double().float(),
        lambda features: features.t().contiguous().t(),
        lambda features: features.reshape(len(features), 5, 1),
    ],
)
def test_a_batch_that_is_moved_is_followed(make_run, move):
    run = make_run(model=nn.Sequential(nn.Flatten(), nn.Linear(5, 3)))
    for features, labels in ahead(run.loader):
        run.step((move(features), labels))
    assert run.engine.privacy_event == event("cyclic", 6)


class Dictionaries(Dataset):
    def __init__(self, features, labels):
        self.features, self.labels = features, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        mask = torch.ones(5)
        return {"inputs": [self.features[index], mask], "labels": self.labels[index]}


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, inputs, mask):
        return self.head(inputs * mask)


def test_batches_of_any_form_are_followed(make_run, dataset):
    data = Dictionaries(*dataset.tensors)

    def epoch(run, change):
        for batch in ahead(run.loader):
            run.optimizer.zero_grad()
            features, mask = batch["inputs"]
            output = run.model(change(features), mask=mask)
            run.criterion(output, batch["labels"]).backward()
            run.optimizer.step()

    run = make_run(model=Masked(), loader={"dataset": data})
    epoch(run, torch.clone)
    assert run.engine.privacy_event == event("cyclic", 6)
    # The mask alone, which is the same in all batches, does not say which one it is.
    with pytest.raises(hsa.UnsupportedRunError, match="no new batch, expected batch 0"):
        epoch(make_run(model=Masked(), loader={"dataset": data}), lambda x: 0.5 * x)


# --- what changes nothing -------------------------------------------------------------------------


def no_zero_grad(run):
    for features, labels in run.loader:
        run.criterion(run.model(features), labels).backward()
        run.optimizer.step()


def accuracy_without_no_grad(run):
    for features, labels in run.loader:
        run.step((features, labels))
        (run.model(features).argmax(dim=1) == labels).float().mean()


@pytest.mark.parametrize("loop", [no_zero_grad, accuracy_without_no_grad])
def test_the_weights_are_those_of_a_plain_loop(make_run, loop):
    runs = [make_run(noise_generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    loop(runs[0])
    runs[1].epoch()
    assert torch.equal(runs[0].plain_model.weight, runs[1].plain_model.weight)
    assert runs[0].engine.get_epsilon(1e-5) == runs[1].engine.get_epsilon(1e-5)


class Checkpointed(nn.Module):
    """Its layer is called once more in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, features):
        return checkpoint(self.layer, features, use_reentrant=False)


def test_activation_checkpointing_of_a_head_changes_nothing(make_run):
    weights = []
    for model in (Checkpointed(), nn.Linear(5, 3)):
        for param in model.parameters():
            nn.init.zeros_(param)
        generator = torch.Generator().manual_seed(1)
        make_run(model=model, loss_geometry=None, noise_generator=generator).epoch()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)


def test_one_cycle_without_momentum(make_run):
    run = make_run()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        run.optimizer, max_lr=0.5, total_steps=6, cycle_momentum=False
    )
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    assert len(set(run.engine.privacy_event.per_step("learning_rate"))) == 6


# --- trainers of Lightning, accelerate and transformers, imitated ---------------------------------
# The libraries are not among what the package installs; two examples run with them.


@pytest.mark.parametrize("order", ["cyclic", "poisson"])
def test_a_closure_as_lightning_passes_it(make_run, order):
    """Forward pass, then zero_grad(), then backward(), all inside of step()."""
    run = make_run(batch_order=order, criterion=nn.functional.cross_entropy)
    run.model.train()
    for _ in range(2):
        for features, labels in ahead(run.loader):
            called = []

            def closure(features=features, labels=labels, called=called):
                loss = nn.functional.cross_entropy(run.model(features), labels) / 1
                run.optimizer.zero_grad()
                loss.backward()
                called.append(loss.detach())
                return loss

            run.optimizer.step(closure=closure)
            assert len(called) == 1
    assert run.engine.privacy_event == event(order, 12)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_gradients_cleared_on_the_model(make_run, mode):
    """transformers' Trainer calls model.zero_grad(), which knows no sums of clipped gradients."""
    arguments = {"noise_multiplier": 0.0, "grad_sample_mode": mode}
    run, plain = make_run(**arguments), make_run(**arguments)
    for features, labels in run.loader:
        run.model.zero_grad()
        run.criterion(run.model(features), labels).backward()
        run.optimizer.step()
    plain.epoch()
    for a, b in zip(run.plain_model.parameters(), plain.plain_model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert run.engine.privacy_event == plain.engine.privacy_event


def test_a_loader_that_says_it_is_prepared(make_run):
    """accelerate returns it unchanged; in place of it, it would build one around the sampler."""
    run = make_run()
    assert run.loader._is_accelerate_prepared
    rebuilt = DataLoader(run.loader.dataset, batch_sampler=run.loader.batch_sampler)
    with pytest.raises(hsa.UnsupportedRunError, match="Another loader was built around"):
        run.epoch(ahead(rebuilt))
