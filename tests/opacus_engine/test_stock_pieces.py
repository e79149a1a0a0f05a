"""Stock engines: every row of every piece counts, declared or not; honest loops go on.

Each loop runs on Poisson batches, so that nothing but the rows tells one batch from another.
"""

import contextlib
import itertools

import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_stock import DELTA, SOFTMAX, drawn
from opacus_stock_loops import BATCH, RECORDS, records, stock_loop
from torch import nn
from torch.utils.data import Subset, default_collate

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus.stock.pieces import PieceWatch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

MODES = {
    "hooks": {},
    "ghost": {"grad_sample_mode": "ghost"},
    "per layer": {"clipping": "per_layer", "max_grad_norm": [1.0, 1.0]},
}
SAMPLED = {"poisson_sampling": True}
each_mode = pytest.mark.parametrize("mode", MODES)
each_declaration = pytest.mark.parametrize("declared", [None, {}], ids=["undeclared", "declared"])


def run_on(mode="hooks", declared=None, **arguments):
    return stock_loop(declared=declared, **{**SAMPLED, **MODES[mode], **arguments})


def in_pieces(loop, size=4):
    manager = BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=size, optimizer=loop.optimizer
    )
    return manager.__enter__()


def begin_a_batch(loop):
    """Takes the first row of a batch with several; returns the pass over the others."""
    while not loop.optimizer._is_last_step_skipped:
        batches = iter(in_pieces(loop, 1))
        loop.step(next(batches))
    return batches


def twice(batch):
    """Two views of every row."""
    features, labels = batch
    return torch.cat([features, 0.9 * features]), torch.cat([labels, labels])


# --- row 92: a pass that is left in the middle of a batch -----------------------------------------


@each_mode
@each_declaration
def test_a_pass_that_is_left_in_the_middle_of_a_batch(mode, declared):
    """Reported 7.42, true 16.03: the pieces so far are added to the next batch."""
    loop = run_on(mode, declared)
    begin_a_batch(loop)
    with pytest.raises(hsa.UnsupportedRunError, match=r"rows, expected the .* middle of"):
        loop.epoch(in_pieces(loop))
    with pytest.raises(hsa.UnsupportedRunError, match="which ended it"):
        _ = loop.epsilon


@each_declaration
def test_sums_that_somebody_else_wrote(declared):
    loop = run_on("hooks", declared)
    batches = begin_a_batch(loop)
    for p in loop.optimizer.params:
        p.summed_grad = 2 * p.summed_grad
    with pytest.raises(hsa.UnsupportedRunError, match="does not come from the pieces of its batch"):
        loop.step(next(batches))


# --- row 93: rows that the loop adds --------------------------------------------------------------


@each_mode
@each_declaration
@pytest.mark.parametrize("managed", [False, True])
def test_two_views_of_every_record(mode, declared, managed):
    """Reported 8.1, true 23.7: every view is clipped by itself."""
    loop = run_on(mode, declared)
    doubled = map(twice, in_pieces(loop) if managed else loop.loader)
    with pytest.raises(hsa.UnsupportedRunError, match="rows were left out or repeated"):
        loop.epoch(doubled)


def test_two_views_that_one_gradient_is_made_of():
    """Both go into the gradient of their record, which is clipped once."""
    loop = run_on()
    for features, labels in loop.loader:
        loop.optimizer.zero_grad()
        views = [loop.criterion(loop.model(s * features), labels) for s in (1.0, 0.9)]
        sum(views).backward()
        loop.optimizer.step()
    assert len(loop.accountant) == 6


def test_every_piece_is_held_against_the_declared_loss():
    """Row 100: of a batch in pieces the last one alone was."""
    loop = run_on(declared={"loss_geometry": SOFTMAX})
    with pytest.raises(hsa.UnsupportedRunError, match="step 1 has a per-example gradient of norm"):
        loop.step(next(iter(in_pieces(loop, 1))), factor=50.0)


# --- row 98: loops that nobody declared -----------------------------------------------------------


def on_the_original_loader():
    """The last of its batches is shorter, so that not all are of one size."""
    loop = run_on(data=records(65))
    loop.epoch(loop.original)


def cycled():
    loop = run_on()
    for batch in itertools.islice(itertools.cycle(loop.loader), 7):
        loop.step(batch)


def kept_in_a_list():
    loop = run_on()
    for batch in list(loop.loader):
        loop.step(batch)


def joined_by_hand():
    loop = run_on()
    for index, batch in enumerate(loop.loader):
        loop.optimizer.signal_skip_step(index % 2 == 0)
        loop.step(batch)


def small_ones_left_out():
    loop = run_on()
    for _ in range(20):
        for batch in loop.loader:
            if len(batch[0]) > BATCH:
                loop.step(batch)


def rows_left_out():
    loop = run_on()
    for _ in range(20):
        for features, labels in loop.loader:
            loop.step((features[: BATCH - 2], labels[: BATCH - 2]))


def rate_raised():
    loop = run_on()
    loop.loader.batch_sampler.sample_rate = 0.5
    loop.epoch()


def records_written():
    loop = run_on()
    loop.epoch()
    loop.loader.dataset.tensors[0][0] *= -1
    loop.epoch()


def coins_of_few_digits():
    """A fifth of 1/60 more: the numbers that bfloat16 has are multiples of 1/256."""
    torch.set_default_dtype(torch.bfloat16)
    loop = run_on(loader={"batch_size": 1})
    torch.set_default_dtype(torch.float32)
    loop.epoch()


def repeated_records():
    run_on(data=Subset(records(), [*range(RECORDS - 1), 0])).epoch()


def last_batch_left_out():
    loop = run_on()
    for batch in itertools.islice(loop.loader, 5):
        loop.step(batch)
    assert 0 < loop.epsilon
    for index, batch in enumerate(loop.loader):
        if index < 5:
            loop.step(batch)
    _ = loop.epsilon


UNDECLARED = [
    (on_the_original_loader, "step 1: it used no new batch of the loader"),
    (cycled, "step 7: it used no new batch of the loader"),
    (kept_in_a_list, "no step was taken on it"),
    (joined_by_hand, "rows, expected the"),
    (small_ones_left_out, "rows, expected the|no step was taken on it"),
    (rows_left_out, "rows, expected the"),
    (rate_raised, "the sampler of the loader was changed"),
    (records_written, "step 7 follows a write to the tensors of the data set"),
    (coins_of_few_digits, r"1 / len\(data_loader\) = 0.0166667, got 0.0195312"),
    (repeated_records, "an index twice in torch.utils.data.Subset"),
    (last_batch_left_out, r"\(1 are waiting\), but no step was taken on them"),
]


@pytest.mark.parametrize(("commit", "text"), UNDECLARED, ids=[c.__name__ for c, _ in UNDECLARED])
def test_undeclared_loops_that_are_refused(commit, text):
    try:
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            commit()
    finally:
        torch.set_default_dtype(torch.float32)


@each_declaration
@pytest.mark.parametrize("wrap_model", [True, False])
def test_embeddings_that_shorten_their_rows(declared, wrap_model):
    """A forward pass writes to the rows of the records in the batch, without noise."""
    loop = run_on(declared=declared)
    model = nn.Sequential(nn.Embedding(9, 3, max_norm=1.0), nn.Flatten(), nn.Linear(15, 2))
    with pytest.raises(hsa.UnsupportedRunError, match=r"got Embedding 0 with max_norm = 1"):
        loop.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loop.original,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            wrap_model=wrap_model,
        )


def test_made_up_records():
    """Row 99: without a record a batch is empty, and another one is in it."""
    with pytest.raises(hsa.UnsupportedRunError, match="rand_on_empty = False, got True"):
        run_on(rand_on_empty=True)


# --- honest loops ---------------------------------------------------------------------------------


def plain(loop):
    loop.epoch()


def managed(loop):
    loop.epoch(in_pieces(loop))


def split_by_hand(loop):
    for features, labels in loop.loader:
        half = len(features) // 2
        loop.optimizer.signal_skip_step(True)
        loop.step((features[:half], labels[:half]))
        loop.optimizer.signal_skip_step(False)
        loop.step((features[half:], labels[half:]))


def fetched_ahead(loop):
    batches = iter(loop.loader)
    ready = next(batches)
    for following in batches:
        loop.step(ready)
        ready = following
    loop.step(ready)


def looked_at_between(loop):
    with torch.no_grad():
        for features, _ in loop.loader:
            loop.model(features)
    loop.epoch()


def asked_in_between(loop):
    for index, batch in enumerate(loop.loader):
        loop.step(batch)
        assert index != 4 or loop.epsilon > 0  # workers hold the last batch


def broken_off(loop):
    for _ in range(2):
        for batch in itertools.islice(loop.loader, 3):
            loop.step(batch)


def zeroed_by_the_model(loop):
    for features, labels in loop.loader:
        loop.model.zero_grad()
        loop.criterion(loop.model(features), labels).backward()
        loop.optimizer.step()


WORKERS = {"loader": {"num_workers": 2}}
RARE = {"loader": {"batch_size": 1}, "data": records(6)}  # a third of the batches is empty
HONEST = [
    (plain, {}),
    (plain, RARE),
    (plain, WORKERS),
    (managed, {}),
    (managed, RARE),
    (managed, WORKERS),
    (split_by_hand, {}),
    (fetched_ahead, {}),
    (looked_at_between, {}),
    (asked_in_between, WORKERS),
    (broken_off, {}),
    (broken_off, WORKERS),
]


@pytest.mark.parametrize(
    ("mode", "epoch", "arguments"),
    [("hooks", *case) for case in HONEST]
    + [(mode, *case) for mode in ("ghost", "per layer") for case in HONEST[:2] + HONEST[3:5]]
    + [("hooks", zeroed_by_the_model, {})],
)
def test_honest_loops_without_a_declaration(mode, epoch, arguments):
    loop = run_on(mode, **arguments)
    for _ in range(3):
        epoch(loop)
    assert loop.accountant.history == [(2.0, 1 / 6, 18)]
    rate, sampled = drawn(1 / 6), hsa.LastIterateDpEvent
    event = sampled(
        noise_multiplier=2.0, learning_rate=1.0, clip_norm=1.0, batch_size=10, dataset_size=60,
        num_steps=18, batch_order="poisson", sampling_rate=rate,
    )  # fmt: skip
    accountant = hsa.LastIterateAccountant("ADD_OR_REMOVE_ONE")
    assert loop.epsilon == pytest.approx(accountant.compose(event).get_epsilon(DELTA), rel=1e-9)


def test_what_an_undeclared_run_rests_on():
    loop = run_on("ghost")
    loop.epoch()
    lines = [str(line) for line in loop.accountant.guarantee.assumptions]
    for start in (
        "checked: the loader deals each of 60 records in every batch with probability 0.16666669",
        "checked: Poisson batches drawn by a generator of the run's own",
        "checked: tensors of the data set without writes",
        "declared: nobody ever learns which records were drawn, or the sizes of the batches",
        "declared: with Opacus' ghost clipping: ",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, start
    assert any(
        line.endswith("p.grad is left alone between backward() and step()") for line in lines
    )
    assert not any("(Poisson sampling)" in line for line in lines)


def test_a_full_batch_rests_on_no_secret():
    loop = stock_loop(loader={"batch_size": RECORDS})
    for _ in range(2):
        loop.epoch()
    assert loop.accountant.history == [(2.0, 1.0, 2)]
    lines = [str(line) for line in loop.accountant.guarantee.assumptions]
    assert any(line.startswith("checked: the loader deals all 60 records") for line in lines)
    assert not any("nobody ever learns" in line for line in lines)


def test_what_undeclared_steps_rest_on_that_nobody_follows():
    loop = run_on()
    loop.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    lines = [str(line) for line in loop.accountant.guarantee.assumptions]
    assert "declared: every record joins every batch independently (Poisson sampling)" in lines


def test_row88_another_collate_fn_later():
    loop = run_on()
    loop.loader.collate_fn = lambda rows: default_collate(rows)
    with pytest.raises(hsa.UnsupportedRunError, match="has another collate_fn than at make_priv"):
        loop.epoch()


# --- row 152: the clip of the sum -----------------------------------------------------------------


def clipped_sum(gradients, *, is_watched):
    params = [nn.Parameter(torch.zeros(one.shape[1:])) for one in gradients]
    optimizer = DPOptimizer(
        torch.optim.SGD(params, lr=1.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    for param, one in zip(params, gradients, strict=True):
        param.grad_sample = one.clone()
    if is_watched:
        watch = PieceWatch(optimizer, contextlib.nullcontext, lambda *args: None)
    optimizer.clip_and_accumulate()
    if is_watched:
        assert len(watch.take()[1]) == len(gradients[0])
    return [param.summed_grad for param in params]


def unclipped(optimizer):
    for param in optimizer.params:
        param.summed_grad = param.grad_sample.sum(dim=0)


@pytest.mark.parametrize("place", ["instance", "class"])
def test_row152_another_method_that_adds_up(monkeypatch, place):
    """Its sum need not be of clipped gradients."""
    if place == "class":
        monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", unclipped)
    loop = run_on()
    if place == "instance":
        loop.optimizer.clip_and_accumulate = lambda: unclipped(loop.optimizer)
    with pytest.raises(hsa.UnsupportedRunError, match="Expected an optimizer of Opacus that clips"):
        loop.epoch()


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_sum_is_that_of_opacus(rows):
    gradients = [torch.randn(rows, 3, 2), 0.1 * torch.randn(rows, 3)]
    torch.testing.assert_close(
        clipped_sum(gradients, is_watched=True), clipped_sum(gradients, is_watched=False)
    )


def test_a_long_gradient_is_no_longer_than_the_clip_norm():
    """A float32 norm of millions of numbers is too short, and the clip as much too long."""
    gradients = [torch.full((1, 2**23), 0.1)]
    lengths = [
        float(torch.linalg.vector_norm(total[0], dtype=torch.float64))
        for total in (clipped_sum(gradients, is_watched=w) for w in (True, False))
    ]
    assert lengths[0] < 1 + 1e-6
    assert lengths[1] > 1.001  # why Opacus' own norms are not used
