"""Ways to get a silently wrong epsilon with random and secret orders: each raises or is accounted.

A loop runs under every order that it is listed for; see test_event_matches_reality_*.py.
"""

import itertools
import logging

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import Batches

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

EPOCHS = ["shuffled_once", "reshuffled"]  # every record once per epoch
SAMPLED = ["without_replacement", "poisson"]  # a fresh batch in every step
SECRET = EPOCHS + SAMPLED


def pieces_of(run, size):
    return BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=size, optimizer=run.optimizer
    ).__enter__()


def never_empty(run):
    """A non-empty batch first, for loops that take a batch apart."""
    while not run.optimizer.run.plan.batch(run.steps):
        run.step(next(iter(run.loader)))


# Batches that are not the declared ones.


def skip_a_batch(run):
    for index, batch in enumerate(run.loader):
        if index != 2:
            run.step(batch)


def skip_empty_and_small_batches(run):
    # What a loop does that has no use for an empty batch: it then depends on the data.
    for batch in run.loader:
        if len(batch[0]) > 7:  # six small ones in a row would be met again and again
            run.step(batch)


def step_twice_on_one_batch(run):
    for batch in run.loader:
        run.step(batch)
        run.step(batch)


def leave_a_row_out(run):
    never_empty(run)
    features, labels = next(iter(run.loader))
    run.step((features[1:], labels[1:]))


def pad_to_the_expected_size(run):
    # Repeats records of a small Poisson batch, so that all batches are equally large.
    for features, labels in run.loader:
        index = torch.arange(10) % max(1, len(features))
        run.step((features[index], labels[index]))


def cut_to_the_expected_size(run):
    for features, labels in run.loader:
        run.step((features[:10], labels[:10]))


RAISES = [
    (skip_a_batch, EPOCHS, "step 3 used batch 3, expected batch 2"),
    (skip_a_batch, SAMPLED, "step 3 used batch 3, expected batch 2"),
    (step_twice_on_one_batch, SECRET, "step 2 used no new batch, expected batch 1"),
    (leave_a_row_out, [*EPOCHS, "without_replacement"], r"step \d+ used \d+ rows, expected"),
    (leave_a_row_out, ["poisson"], r"step \d+ used another number of rows"),
]


@pytest.mark.parametrize(
    ("loop", "order", "text"),
    [(loop, order, text) for loop, orders, text in RAISES for order in orders],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_different_loop_raises(make_run, loop, order, text):
    run = make_run(batch_order=order, noise_generator=torch.Generator())
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        loop(run)


def many_times(run, loop):
    for _ in range(20):  # until a batch of another size comes
        loop(run)


@pytest.mark.parametrize(
    "loop", [skip_empty_and_small_batches, pad_to_the_expected_size, cut_to_the_expected_size]
)
def test_poisson_batches_are_used_as_they_are(make_run, loop):
    run = make_run(batch_order="poisson")
    with pytest.raises(hsa.UnsupportedRunError, match=r"step \d+ used"):
        many_times(run, loop)


@pytest.mark.parametrize(
    ("order", "workers", "pieces"),
    [
        *((order, 0, pieces) for order in SECRET for pieces in (None, 4)),
        ("poisson", 2, 4),
        ("reshuffled", 2, None),
    ],
)
def test_a_loop_cannot_choose_among_batches(make_run, order, workers, pieces):
    """It looks at batches until one pleases it; it gets the same ones again."""
    run = make_run(batch_order=order, loader={"num_workers": workers})
    loader = run.loader if pieces is None else pieces_of(run, pieces)
    firsts = [next(iter(loader))[0] for _ in range(3)]
    assert all(torch.equal(features, firsts[0]) for features in firsts)
    for _ in range(2):
        looked_at = [features for features, _ in loader]
        used = []
        for features, labels in loader:
            used.append(features)
            run.step((features, labels))
        assert len(used) == len(looked_at)
        assert all(torch.equal(a, b) for a, b in zip(used, looked_at, strict=True))
    assert run.engine.privacy_event.num_steps == 12


# Loops that differ in a way that the event can express.


def break_and_go_on(run):
    """An epoch goes on with its next batch; where every step draws one there are no epochs."""
    for batch in itertools.islice(run.loader, 4):
        run.step(batch)
    run.epoch()
    return 6 if run.loader.batch_sampler.plan.order.value in EPOCHS else 10


def next_iter_every_step(run):
    for _ in range(5):
        run.step(next(iter(run.loader)))
    return 5


def pieces(run):
    run.epoch(pieces_of(run, 3))
    run.epoch(pieces_of(run, 3))
    return 12


def evaluation_between_epochs(run):
    for _ in range(2):
        with torch.no_grad():
            for features, _ in run.loader:
                run.model(features)
        run.epoch()
    return 12


ACCOUNTED = [
    (pieces, SECRET),
    (evaluation_between_epochs, SECRET),
    (break_and_go_on, SECRET),
    (next_iter_every_step, SECRET),
]


@pytest.mark.parametrize(
    ("loop", "order"),
    [(loop, order) for loop, orders in ACCOUNTED for order in orders],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_happened_is_accounted(make_run, loop, order):
    run = make_run(batch_order=order, noise_multiplier=4.0)
    steps = loop(run)
    assert run.engine.privacy_event == hsa.LastIterateDpEvent(
        noise_multiplier=4.0, learning_rate=0.5, clip_norm=2.1, batch_size=10, dataset_size=60,
        num_steps=steps, batch_order=order, weight_decay=0.1,
        loss=hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True),
    )  # fmt: skip


# Who knows the order.


def test_a_seed_is_in_no_error_message_and_no_log(make_run, caplog):
    seed = 123456789
    with caplog.at_level(logging.DEBUG), pytest.raises(hsa.UnsupportedRunError) as error:
        make_run(batch_order=Batches("reshuffled", seed=seed))
    assert str(seed) not in str(error.value) + caplog.text
    with pytest.raises(ValueError, match="an integer") as wrong:
        make_run(batch_order=Batches("reshuffled", seed=seed + 0.5))
    assert str(seed) not in str(wrong.value)


# Resuming.
