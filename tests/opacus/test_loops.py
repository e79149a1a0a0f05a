"""Ways to go through the batches: what is not the run of the event raises, the rest is accounted.

What every optimizer refuses is in tests/misuse/misuse.py.
"""

import itertools

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_stock import event
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import Batches

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SECRET = ["shuffled_once", "reshuffled", "without_replacement", "poisson"]


def event_of(order, steps):
    size = 60 if order == "full" else 10
    return event(batch_order=order, batch_size=size, num_steps=steps, sampling_rate=None)


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
    """As accelerate does, but for a loader that says it is prepared."""
    assert run.loader._is_accelerate_prepared
    run.epoch(DataLoader(run.loader.dataset, batch_sampler=run.loader.batch_sampler))


def skip_a_batch(run):
    for index, batch in enumerate(run.loader):
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


def a_row_left_out(run):
    while not run.optimizer.run.declared.plan.batch(run.steps):
        run.step(next(iter(run.loader)))
    features, labels = next(iter(run.loader))
    run.step((features[1:], labels[1:]))


def small_batches_skipped(run):
    """What a loop does that has no use for an empty batch: it then depends on the data."""
    for batch in itertools.chain(*[run.loader] * 20):  # until a batch of another size comes
        if len(batch[0]) > 7:
            run.step(batch)


def piece_skipped(run):
    for index, batch in enumerate(pieces_of(run, 5)):
        if index != 2:
            run.step(batch)


def last_piece_left_out(run):
    """Its workers are already done with the epoch."""
    *first, _ = pieces_of(run, 5)
    run.epoch(first)


def gradient_accumulation(run):
    for index, (features, labels) in enumerate(run.loader):
        (run.criterion(run.model(features), labels) / 2).backward()
        if index % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()


def one_cycle(run):
    OneCycleLR(run.optimizer, max_lr=0.5, total_steps=6)
    run.epoch()


def with_a_gradient_scaler(run):
    """Which leaves out steps by itself, for gradients that overflow."""
    scaler = torch.amp.GradScaler("cpu")
    for features, labels in run.loader:
        scaler.scale(run.criterion(run.model(features), labels)).backward()
        scaler.step(run.optimizer)


CAPPED = {"batch_order": Batches("poisson", max_batch_size=30), "loader": {"batch_size": 60}}
WORKERS = {"loader": {"num_workers": 1, "prefetch_factor": 4}}
POISSON = {"batch_order": "poisson"}
RAISES = [
    (own_loader_around_the_private_batches, {}, "no new batch, .*Another loader was built around"),
    (skip_a_batch, POISSON, "step 3 used batch 3, expected batch 2"),
    (two_ahead, {}, "step 3 used no new batch, expected batch 2.*fetches ahead"),
    (ahead_beyond_the_end_of_a_pass, {}, r"step \d used .* expected batch \d"),
    (
        ahead_beyond_the_end_of_a_pass,
        {"batch_order": "without_replacement"},
        r"step \d used .* expected batch \d",
    ),
    (ahead_beyond_the_end_of_a_pass, CAPPED, r"step \d used .* expected batch \d"),
    (transformed, {}, "no new batch, expected batch 0.*what the loader delivered"),
    (a_row_left_out, POISSON, r"step \d+ used another number of rows"),
    (small_batches_skipped, POISSON, r"step \d+ used .*an empty batch is a step, too"),
    (piece_skipped, {}, "step 2: a piece of a batch"),
    (last_piece_left_out, WORKERS, r"step \d+"),
    (gradient_accumulation, {}, "gradients of 2 .*raise the batch_size.*BatchMemoryManager"),
    (with_a_gradient_scaler, {"loss_geometry": None}, "a call through torch.amp.GradScaler"),
    (one_cycle, {}, "momentum = 0, got 0.95: .*OneCycleLR .*cycle_momentum=False"),
]


@pytest.mark.parametrize(("loop", "options", "text"), RAISES)
def test_a_different_loop_raises(make_run, loop, options, text):
    run = make_run(**options)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        loop(run)
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        run.engine.get_epsilon(1e-5)


# --- what happened is accounted -------------------------------------------------------------------


def left_early(run):
    """An epoch goes on with its next batch; where every step draws one there are no epochs."""
    for batch in itertools.islice(run.loader, 4):
        run.step(batch)
    run.epoch()
    return {"poisson": 10, "full": 2}


def left_with_one_batch_fetched(run):
    """Where each step draws its batch, the next pass deals the one that was not used."""
    for batch in itertools.islice(ahead(run.loader), 4):
        run.step(batch)
    run.epoch(ahead(run.loader))
    return {"poisson": 10, "full": 2}


def next_iter_every_step(run):
    for _ in range(5):
        run.step(next(iter(run.loader)))
    return dict.fromkeys(ORDERS, 5)


def in_pieces(run):
    run.epoch(pieces_of(run, 3))
    return {}


def looked_at_in_the_middle(run):
    for number, batch in enumerate(run.loader):
        if number in (0, 3):
            next(iter(run.loader))
            list(run.loader)
        run.step(batch)
    return {}


def one_batch_ahead(run):
    """Lightning, accelerate, prefetchers: the cursor follows what goes into the model."""
    for _ in range(2):
        run.epoch(ahead(run.loader))
    return {"full": 2, "poisson": 12, "cyclic": 12, "reshuffled": 12}


def as_lightning_passes_it(run):
    """Forward pass, then zero_grad(), then backward(), all inside of step()."""
    for features, labels in ahead(run.loader):

        def closure(features=features, labels=labels):
            loss = run.criterion(run.model(features), labels)
            run.optimizer.zero_grad()
            loss.backward()
            return loss

        run.optimizer.step(closure=closure)
    return {}


def one_batch_that_is_kept(run):
    batch = next(iter(run.loader))
    run.step(batch)
    run.step(batch)
    return {"full": 2}


ORDERS = ["cyclic", "full", "reshuffled", "poisson"]
ACCOUNTED = [
    left_early, left_with_one_batch_fetched, next_iter_every_step, in_pieces,
    looked_at_in_the_middle, one_batch_ahead, as_lightning_passes_it,
]  # fmt: skip


@pytest.mark.parametrize(
    ("loop", "order"),
    [*itertools.product(ACCOUNTED, ORDERS), (one_batch_that_is_kept, "full")],
)
def test_what_happened_is_accounted(make_run, loop, order):
    """The steps of an epoch, unless the loop says how many."""
    run = make_run(batch_order=order)
    steps = loop(run).get(order, len(run.loader))
    assert run.engine.privacy_event == event_of(order, steps)


def test_workers_that_fetch_ahead_do_not_move_the_cursor(make_run):
    run = make_run(loader={"num_workers": 2})
    for _ in range(2):
        for batch in itertools.islice(pieces_of(run, 5), 4):  # two logical batches
            run.step(batch)
    assert run.steps == 4
    run.epoch()  # the other two
    run.epoch(ahead(run.loader))
    assert run.engine.privacy_event == event_of("cyclic", 12)


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
    looked_at = [features for features, _ in loader]
    for (features, labels), seen in zip(loader, looked_at, strict=True):
        assert torch.equal(features, seen)
        run.step((features, labels))
    assert run.steps == 6


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, inputs, mask):
        return self.head(inputs * mask)


def test_batches_of_any_form_are_followed(make_run, dataset):
    data = [{"inputs": [x, torch.ones(5)], "labels": y} for x, y in dataset]

    def epoch(run, change):
        for batch in ahead(run.loader):
            run.optimizer.zero_grad()
            features, mask = batch["inputs"]
            output = run.model(change(features), mask=mask)
            run.criterion(output, batch["labels"]).backward()
            run.optimizer.step()

    run = make_run(model=Masked(), loader={"dataset": data})
    epoch(run, torch.clone)
    assert run.engine.privacy_event == event_of("cyclic", 6)
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


def cleared_on_the_model(run):
    """transformers' Trainer calls what knows no sums of clipped gradients."""
    for features, labels in run.loader:
        run.model.zero_grad()
        run.criterion(run.model(features), labels).backward()
        run.optimizer.step()


@pytest.mark.parametrize("mode", [None, "hooks", "functorch"])
@pytest.mark.parametrize("loop", [no_zero_grad, accuracy_without_no_grad, cleared_on_the_model])
def test_the_weights_are_those_of_a_plain_loop(make_run, loop, mode):
    runs = [
        make_run(noise_generator=torch.Generator().manual_seed(1), grad_sample_mode=mode)
        for _ in range(2)
    ]
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
    scheduler = OneCycleLR(run.optimizer, max_lr=0.5, total_steps=6, cycle_momentum=False)
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    assert len(set(run.engine.privacy_event.per_step("learning_rate"))) == 6
