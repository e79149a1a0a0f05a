"""Opacus' own engine with accountant="hidden_state": what is read off its loader and loop."""

import itertools
import subprocess
import sys

import attrs
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus_stock import DECLARED, DELTA, SOFTMAX, drawn, epsilon, event
from opacus_stock_loops import (
    BATCH,
    FEATURES,
    RECORDS,
    plain_sgd,
    records,
    secret_generator,
    stock_loop,
)
from torch import nn
from torch.utils.data import BatchSampler

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStateAccountant, HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.data.reading import drawn_rate
from hidden_state_adapters.opacus.guards.row_counts import RowCounts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

KINDS = {
    "cyclic": ({}, {}),
    "reshuffled": ({"shuffle": True}, {}),
    "poisson": ({}, {"poisson_sampling": True}),
    "full": ({"batch_size": RECORDS}, {}),
    "full shuffled": ({"batch_size": RECORDS, "shuffle": True}, {}),
}


def make(kind, **arguments):
    loader, options = KINDS[kind]
    if kind == "reshuffled":
        loader = {**loader, "generator": secret_generator()}
    return stock_loop(loader=loader, **options, **arguments)


def expected(kind, steps=None):
    order = kind.split()[0]
    size = RECORDS if order == "full" else BATCH
    return event(batch_order=order, batch_size=size, num_steps=steps or 2 * (RECORDS // size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["make_private", "declare_run"])
def test_the_batches_are_read(kind, first):
    loop = make(kind, declared={"loss_geometry": SOFTMAX} if first == "declare_run" else None)
    if first == "make_private":
        loop.declare()
    for _ in range(2):
        loop.epoch()
    assert loop.event == expected(kind)
    assert loop.epsilon == epsilon(expected(kind))


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        ("cyclic", {}),
        ("cyclic", {"batch_order": "shuffled_once"}),
        ("reshuffled", {}),
        ("poisson", {}),
        ("full", {"batch_order": "cyclic"}),
        ("full shuffled", {"batch_order": "full"}),
    ],
)
def test_what_is_declared_besides_agrees(kind, declared):
    told = expected(kind)
    declared = {
        "batch_order": told.batch_order,
        "dataset_size": told.dataset_size,
        "batch_size": told.batch_size,
        "loss_geometry": SOFTMAX,
        **declared,
    }
    loop = make(kind, declared=declared)
    loop.epoch()
    is_secret = declared["batch_order"] == "shuffled_once"
    assert loop.event.batch_order is (
        hsa.BatchOrder.SHUFFLED_ONCE if is_secret else told.batch_order
    )


def test_nothing_but_the_loss_is_on_trust():
    """Of the batches only what must stay secret is left."""
    loop = make("cyclic")
    loop.declare()
    loop.epoch()
    lines = [str(line) for line in loop.accountant.guarantee.assumptions]
    read = "the loader deals batches of 10 of 60 records, each once per epoch, in the same order"
    assert sum(line.startswith(f"checked: {read}") for line in lines) == 1
    assert "checked: feature norms at most 1" in lines
    assert not any("declared" in line and "the loader" in line for line in lines)
    secret = make("reshuffled")
    secret.declare()
    secret.epoch()
    lines = [str(line) for line in secret.accountant.guarantee.assumptions]
    assert any(line.startswith("declared: nobody ever learns the orders") for line in lines)


# --- divisor and sampling rate --------------------------------------------------------------------


def test_poisson_batches_that_do_not_divide_the_records_are_hidden():
    """1000 records in batches of 64: drawn at a rate of 1/16, divided by 62."""
    data, composed = records(1000), []
    for declared in ({"batch_size": 64, "dataset_size": 1000, "batch_order": "poisson"}, {}):
        loop = stock_loop(
            data=data,
            loader={"batch_size": 64},
            poisson_sampling=True,
            base=lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=1.0),
        )
        loop.declare(**declared)
        for _ in range(3):
            loop.epoch()
        truth = event(
            batch_order="poisson",
            dataset_size=1000,
            batch_size=62,
            sampling_rate=1 / 16,
            num_steps=48,
            weight_decay=1.0,
        )
        assert loop.event == truth
        assert loop.accountant.history == [(2.0, 1 / 16, 48)]
        composed.append(attrs.evolve(truth, loss=None))
    assert "Theorem C" in loop.accountant.guarantee.theorem
    without = hsa.LastIterateAccountant().compose(composed[0]).get_epsilon(DELTA)
    assert loop.epsilon == epsilon(truth)
    assert loop.epsilon < 0.9 * without


def test_the_rate_is_that_of_the_sampler():
    """1 / (1 / 93) is less than 93: Opacus' loader has 92 batches, and says 1/92 to its hook."""
    loop = stock_loop(data=records(93), loader={"batch_size": 1}, poisson_sampling=True)
    assert len(loop.loader) == 92
    loop.declare()
    loop.epoch()
    assert loop.event.sampling_probability == drawn(1 / 93)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_divisor_that_is_not_the_batch_size(reduction):
    """69 records, drop_last: batches of 10 of 60 records, whose sum Opacus divides by 11."""
    loop = stock_loop(data=records(69), loader={"drop_last": True}, loss_reduction=reduction)
    loop.criterion.reduction = reduction
    loop.declare(dataset_size=60)
    assert loop.optimizer.expected_batch_size == 11
    loop.epoch()
    divisor = 11 if reduction == "mean" else 1
    truth = event(num_steps=6, learning_rate=0.5 * 10 / divisor, weight_decay=0.1 * divisor / 10)
    assert loop.epsilon == epsilon(truth)


def test_the_rate_is_what_the_random_numbers_make_of_it():
    """Row 91: torch draws multiples of 2**-24, which are below the rate once too often."""
    loop = stock_loop(data=records(600), loader={"batch_size": 1}, poisson_sampling=True)
    loop.declare()
    loop.epoch()
    rate = loop.event.sampling_probability
    below, at = rate - 2**-24, rate
    assert 1 / 600 < rate < 1 / 600 + 2**-24
    assert (torch.tensor([below, at]) < 1 / 600).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [1e-5, 1 / 1024, 0.01, 1 / 3, 0.7, 1 - 1e-9, 1.0])
def test_rates_of_random_numbers(rate, dtype):
    """The largest number that torch may draw and that is below the rate, and the next one."""
    step = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    drawn = drawn_rate(rate, dtype)
    numbers = torch.tensor([drawn - step, drawn], dtype=torch.float64).to(dtype)
    assert (numbers < rate).tolist() == [True, False]


# --- the loss -------------------------------------------------------------------------------------


def other_loss(loop, features, labels):
    return nn.functional.multi_margin_loss(loop.model(features), labels)


def temperature(loop, features, labels):
    return loop.criterion(loop.model(features) / 2, labels)


def scaled_loss(loop, features, labels):
    return 0.5 * loop.criterion(loop.model(features), labels)


def long_features(loop, features, labels):
    return loop.criterion(loop.model(1.1 * features), labels)


LOSSES = [
    (other_loss, "the criterion passed to make_private was not called"),
    (temperature, "something else than the output of the linear head"),
    (scaled_loss, "gradients of another loss"),
    (long_features, "features of norm 1.1|gradient of norm"),
]


@pytest.mark.parametrize(("loss", "text"), LOSSES, ids=[loss.__name__ for loss, _ in LOSSES])
def test_the_criterion_is_watched(loss, text):
    loop = make("cyclic")
    loop.declare()
    features, labels = next(iter(loop.loader))
    loss(loop, features, labels).backward()
    with pytest.raises(hsa.UnsupportedRunError, match=f"step 1.*({text})"):
        loop.optimizer.step()


def test_the_criterion_may_be_a_function():
    loop, plain = make("cyclic"), make("cyclic")
    loop.criterion = nn.functional.cross_entropy
    for each in (loop, plain):
        each.declare()
        each.epoch()
    assert loop.epsilon == plain.epsilon
    assert loop.event == plain.event
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of another loss"):
        loop.step(next(iter(loop.loader)), factor=0.9)


def test_a_model_that_is_not_wrapped():
    loop = stock_loop(wrap_model=False)
    model, loop.model = loop.model, loop.model._module
    loop.declare()
    loop.epoch()
    assert loop.epsilon == epsilon(event(num_steps=6))
    model.cleanup()


def test_optimizers_without_a_theorem_need_no_watch():
    loop = stock_loop(base=torch.optim.Adam)
    loop.declare()
    for features, labels in loop.loader:
        loop.optimizer.zero_grad()
        other_loss(loop, features, labels).backward()
        loop.optimizer.step()
    assert loop.epsilon == epsilon(event(loss=None, weight_decay=0.0, num_steps=6))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"loss_geometry": "auto"}, 'a criterion with loss_geometry="auto", got none'),
        ({"feature_norm": 1.0}, "a criterion with feature_norm = 1.0, got none"),
        (
            {"criterion": nn.CrossEntropyLoss(), "loss_geometry": SOFTMAX},
            "a criterion or a LossGeometry",
        ),
        ({"dataset_size": 0}, "dataset_size"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_arguments_that_make_no_sense(arguments, text):
    with pytest.raises(ValueError, match=text):
        HiddenStateAccountant().declare_run(**arguments)


# --- loops ----------------------------------------------------------------------------------------


def with_workers():
    return stock_loop(loader={"num_workers": 2}), lambda loop: loop.epoch()


def evaluated_between():
    def epoch(loop):
        loop.epoch()
        with torch.no_grad():
            for (features, _), _ in zip(loop.loader, loop.loader, strict=True):
                loop.model(features)

    return make("cyclic"), epoch


def fetched_one_ahead():
    def epoch(loop):
        batches = iter(loop.loader)
        ready = next(batches)
        for following in batches:
            loop.step(ready)
            ready = following
        loop.step(ready)

    return make("cyclic"), epoch


def one_batch_kept():
    kept = []

    def epoch(loop):
        kept[:] = kept or [next(iter(loop.loader))]
        loop.step(kept[0])

    return make("full"), epoch


def one_at_a_time():
    return make("poisson"), lambda loop: [loop.step(next(iter(loop.loader))) for _ in range(6)]


@pytest.mark.parametrize(
    "honest", [with_workers, evaluated_between, fetched_one_ahead, one_batch_kept, one_at_a_time]
)
def test_honest_loops(honest):
    loop, epoch = honest()
    loop.declare()
    for _ in range(2):
        epoch(loop)
    kind = {one_batch_kept: "full", one_at_a_time: "poisson"}.get(honest, "cyclic")
    assert loop.epsilon == epsilon(expected(kind))


LOOKS = {
    "one batch": lambda loader: next(iter(loader)),
    "all batches": list,
    "a look within a look": lambda loader: [next(iter(loader)) for _ in loader],
}


def training(loop, look, before_the_step):
    """Two passes; in the middle of each, at one batch, the loop looks at the loader."""
    for _ in range(2):
        for number, batch in enumerate(loop.loader):
            if number == 2 and before_the_step:
                look(loop.loader)
            loop.step(batch)
            if number == 2 and not before_the_step:
                look(loop.loader)
                assert loop.epsilon > 0


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("kind", ["cyclic", "reshuffled", "poisson"])
def test_a_look_between_two_steps_lets_the_pass_go_on(kind, look):
    loop = make(kind)
    loop.declare()
    training(loop, look, before_the_step=False)
    assert loop.event == expected(kind)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("declares", [True, False])
def test_a_look_before_the_step_on_a_poisson_batch(declares, look):
    loop = make("poisson")
    if declares:
        loop.declare()
    training(loop, look, before_the_step=True)
    assert len(loop.accountant) == 12


@pytest.mark.parametrize("kind", ["cyclic", "reshuffled"])
def test_a_look_before_the_step_on_a_batch_of_fixed_size(kind):
    """Rows do not tell the two batches apart, and the step may be about either."""
    loop = make(kind)
    loop.declare()
    with pytest.raises(hsa.UnsupportedRunError, match="between a batch and its step"):
        training(loop, LOOKS["one batch"], before_the_step=True)


def test_training_on_what_was_looked_at():
    """The first batch that was looked at and has another number of rows."""
    loop = make("poisson")
    loop.declare()
    batches = itertools.chain.from_iterable(loop.loader for _ in range(100))
    for batch in batches:
        looked = next(iter(loop.loader))
        if len(looked[0]) != len(batch[0]):
            break
        loop.step(batch)
    with pytest.raises(hsa.UnsupportedRunError, match="rows, expected the"):
        loop.step(looked)


def test_poisson_batches_in_pieces():
    loop = make("poisson")
    loop.declare(criterion=None, feature_norm=None, loss_geometry=SOFTMAX)
    with BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=4, optimizer=loop.optimizer
    ) as loader:
        loop.epoch(loader)
    assert loop.epsilon == epsilon(expected("poisson", steps=6))


def test_two_runs_on_one_loader():
    first = make("cyclic", declared=DECLARED)
    for _ in range(2):
        first.epoch()
    second = stock_loop(engine=first.engine)
    second.engine.accountant.declare_run(**DECLARED)
    for _ in range(2):
        second.epoch()
    twice = hsa.LastIterateAccountant().compose(event(), 2).get_epsilon(DELTA)
    assert second.epsilon == pytest.approx(twice, rel=1e-9)


def test_the_loader_is_left_as_it_was():
    loop = make("cyclic")
    loop.declare()
    assert type(loop.original.batch_sampler) is not BatchSampler
    features = nn.Linear(FEATURES, 3)
    HiddenStatePrivacyEngine().make_private(  # which reads a loader that is followed
        module=features,
        optimizer=plain_sgd(features.parameters()),
        data_loader=loop.original,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert len(loop.model._module._forward_hooks) > 1
    loop.epoch()
    make("poisson", engine=loop.engine).declare()
    assert type(loop.original.batch_sampler) is BatchSampler
    assert not hasattr(loop.original.batch_sampler, "watches")


def test_make_private_is_called_again_before_the_first_step():
    loop = make("cyclic", declared=DECLARED)
    again = make("cyclic", engine=loop.engine)
    again.epoch()
    assert again.epsilon == epsilon(event(num_steps=6))
    with pytest.raises(hsa.UnsupportedRunError, match="one declare_run for every make_private"):
        loop.epoch()


def test_another_declaration_before_the_first_step_replaces():
    loop = make("cyclic")
    loop.declare()
    loop.declare(criterion=None, feature_norm=None)
    loop.epoch()
    assert loop.epsilon == epsilon(event(loss=None, num_steps=6))
    assert len(loop.accountant.recorders) == 1


def test_a_refused_declaration_changes_nothing():
    loop = make("cyclic")
    loop.declare()
    with pytest.raises(hsa.UnsupportedRunError, match="got 61"):
        loop.declare(dataset_size=61)
    loop.epoch()
    assert loop.epsilon == epsilon(event(num_steps=6))


def test_a_hook_by_hand_is_given_its_loader():
    loop = make("cyclic")
    accountant = HiddenStateAccountant()
    loop.optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(BATCH / RECORDS))
    with pytest.raises(hsa.UnsupportedRunError, match="Pass module="):
        accountant.declare_run(data_loader=loop.loader, criterion=loop.criterion, feature_norm=1.0)
    accountant.declare_run(
        data_loader=loop.loader, module=loop.model, criterion=loop.criterion, feature_norm=1.0
    )
    loop.epoch()
    assert accountant.get_epsilon(DELTA) == epsilon(event(num_steps=6))


def test_an_undeclared_run_that_was_refused_can_be_declared():
    loop = make("cyclic")
    with pytest.raises(hsa.UnsupportedRunError, match=r"declare_run\(\)"):
        loop.epoch()
    loop.accountant.declare_run()
    loop.epoch()
    assert loop.epsilon == epsilon(event(loss=None, weight_decay=0.0, num_steps=6))


# --- calibration and states -----------------------------------------------------------------------


@pytest.mark.parametrize("declare", [True, False])
def test_calibration_meets_the_target_on_poisson_batches(declare):
    loop = stock_loop(data=records(65), poisson_sampling=True, target_epsilon=1.0, epochs=3)
    if declare:
        loop.declare()
    for _ in range(3):
        loop.epoch()
    assert 0.3 < loop.epsilon <= 1.0


def test_a_state_needs_a_loader_that_was_read():
    first = make("cyclic", declared=DECLARED)
    first.epoch()
    state = first.accountant.state_dict()
    accountant = HiddenStateAccountant()
    accountant.declare_run(loss_geometry=SOFTMAX)
    with pytest.raises(ValueError, match="Call make_private before"):
        accountant.load_state_dict(state)
    early = make("cyclic", declared=DECLARED)
    early.accountant.load_state_dict(state)
    early.epoch()
    assert early.epsilon == epsilon(event())


def test_steps_that_were_restored_before_make_private_are_compared():
    """The state was written for a rate of 11/60, the loader of batches of 11 draws at 1/6."""
    recorder = hsa.RunRecorder(batch_order="poisson", batch_size=11, dataset_size=RECORDS)
    recorder.step(noise_multiplier=2.0, learning_rate=1.0, clip_norm=1.0)
    old = HiddenStateAccountant()
    old.add_run(recorder)
    engine = stock_loop().engine
    engine.accountant = HiddenStateAccountant()
    engine.accountant.declare_run(batch_order="poisson", dataset_size=RECORDS, batch_size=11)
    engine.accountant.load_state_dict(old.state_dict())
    with pytest.raises(ValueError, match="of another run: expected batch_size = 10, got 11"):
        stock_loop(engine=engine, loader={"batch_size": 11}, poisson_sampling=True)
    assert len(engine.accountant) == 1


# --- row counts -----------------------------------------------------------------------------------


@attrs.define
class Stepping:
    """What `RowCounts` sees of an optimizer."""

    rows: int
    pieces: int = 1
    _is_last_step_skipped: bool = attrs.field(default=False, alias="skipped")

    @property
    def params(self):
        param = nn.Parameter(torch.zeros(1))
        samples = [torch.zeros(self.rows, 1)] * self.pieces
        param.grad_sample = samples[0] if self.pieces == 1 else samples
        return [param]


def steps_until_refused(steps, expected=BATCH, rate=BATCH / RECORDS):
    counts = RowCounts(expected, rate)
    said = [counts.why_not_poisson(step) != "" for step in steps]
    return said.index(True) + 1 if any(said) else None


@pytest.mark.parametrize("expected_rows", [1, 10, 64])
def test_poisson_batches_are_never_evidence(expected_rows):
    rate = expected_rows / 600
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        sampler = UniformWithReplacementSampler(
            num_samples=600, sample_rate=rate, generator=generator
        )
        batches = itertools.islice(sampler, 60)
        steps = (Stepping(len(batch)) for batch in batches)
        assert steps_until_refused(steps, expected_rows, rate) is None


@pytest.mark.parametrize(("rows", "rate", "found"), [(10, 1 / 6, 15), (64, 1 / 938, 11)])
def test_equal_batches_are(rows, rate, found):
    assert steps_until_refused([Stepping(rows)] * 40, rows, rate) == found


@pytest.mark.parametrize(
    "hidden", [Stepping(10, pieces=2), Stepping(10, skipped=True), Stepping(9)]
)
def test_what_hides_rows_ends_it(hidden):
    assert steps_until_refused([Stepping(10), hidden, *[Stepping(10)] * 40]) is None


@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_full_batches_are_poisson_batches(rate):
    assert steps_until_refused([Stepping(60)] * 40, 60, rate) is None


# --- several processes ----------------------------------------------------------------------------

TWO_PROCESSES = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
import hidden_state_adapters.opacus
torch.set_num_threads(1)
store, rank = "file://" + sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
data = TensorDataset(torch.randn(120, 5), torch.randint(3, (120,)))

def train(is_poisson, before=None):
    sampler = None if is_poisson else DistributedSampler(data, shuffle=False)
    engine, model = PrivacyEngine(accountant="hidden_state"), DPDDP(nn.Linear(5, 3))
    if before is not None:
        engine.accountant.declare_run(**before)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=20 if is_poisson else 10, sampler=sampler),
        noise_multiplier=2.0, max_grad_norm=1.0, poisson_sampling=is_poisson)
    if before is None:
        engine.accountant.declare_run()
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    return engine.accountant

of_one = {"batch_order": "cyclic", "dataset_size": 120, "batch_size": 10}
for before in (None, of_one):
    try:
        train(False, before)
    except ValueError as error:
        print(error)
poisson = train(True)
print(poisson.get_epsilon(1e-5), poisson.recorders[0].event().sampling_probability)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    """The batches of one process are half of those of a step; Poisson batches are known."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    truth = event(batch_order="poisson", batch_size=20, dataset_size=120, num_steps=6, loss=None)
    for process in processes:
        out, err = process.communicate(timeout=300)
        *refused, accounted = out.splitlines()
        assert len(refused) == 2, err
        assert all("Expected one process, got 2 with DataLoader" in line for line in refused)
        value, rate = map(float, accounted.split())
        assert rate == drawn(20 / 120)
        assert value == epsilon(truth)
