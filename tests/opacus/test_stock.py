"""Opacus' own engine with accountant="hidden_state": what is read, accounted, refused and kept."""

import itertools
import math

import attrs
import dp_accounting
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus_stock import (
    BATCH,
    DELTA,
    FEATURES,
    RECORDS,
    SOFTMAX,
    drawn,
    epsilon,
    event,
    records,
    secret_generator,
    stock_loop,
)
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Subset,
    WeightedRandomSampler,
)

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStateAccountant, HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.noise import DEFAULT_NOISE
from hidden_state_adapters.opacus.order import drawn_rate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

KINDS = {
    "cyclic": ({}, {}),
    "shuffled_once": ({}, {}),
    "reshuffled": ({"shuffle": True}, {}),
    "poisson": ({}, {"poisson_sampling": True}),
    "full": ({"batch_size": RECORDS}, {}),
    "full shuffled": ({"batch_size": RECORDS, "shuffle": True}, {}),
}
DECLARED = {"loss_geometry": SOFTMAX}


def make(kind, **arguments):
    loader, options = KINDS[kind]
    if kind == "reshuffled":
        loader = {**loader, "generator": secret_generator()}
    return stock_loop(loader=loader, **options, **arguments)


def made(kind):
    """Poisson batches are those of a run that nobody declared."""
    return make(kind, declared=None if kind == "poisson" else DECLARED)


def expected(kind, steps=None):
    order = kind.split()[0]
    size = RECORDS if order == "full" else BATCH
    return event(batch_order=order, batch_size=size, num_steps=steps or 2 * (RECORDS // size))


def loaded(accountant):
    """Another accountant, of the same state."""
    other = HiddenStateAccountant()
    other.load_state_dict(accountant.state_dict())
    return other


# --- what is read and accounted -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_are_read(kind):
    loop = make(kind)
    loop.declare(**({"batch_order": kind} if kind == "shuffled_once" else {}))
    for _ in range(2):
        loop.epoch()
    assert loop.event == expected(kind)
    assert loop.epsilon == epsilon(expected(kind))
    steps = expected(kind).num_steps
    assert loop.accountant.history == [(0.0, 1.0, steps)]  # no reader takes it for DP-SGD
    assert len(loop.accountant) == steps
    is_secret = "nobody ever learns" in loop.accountant.guarantee.explain()
    assert is_secret == (kind in ("shuffled_once", "reshuffled", "poisson"))


def in_pieces(loop):
    with BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=4, optimizer=loop.optimizer
    ) as loader:
        loop.epoch(loader)


def beside_another_accountant(loop, other=None):
    other = PRVAccountant() if other is None else other
    own, hook = loop.optimizer.step_hook, other.get_optimizer_hook_fn(BATCH / RECORDS)
    loop.optimizer.attach_step_hook(lambda optimizer: (own(optimizer), hook(optimizer)))
    loop.epoch()
    loop.optimizer.attach_step_hook(own)


@pytest.mark.parametrize("epoch", [in_pieces, beside_another_accountant])
def test_honest_loops(epoch):
    loop = make("reshuffled")
    loop.declare()
    for _ in range(2):
        epoch(loop)
    assert loop.epsilon == epsilon(expected("reshuffled"))


@pytest.mark.parametrize(
    ("base", "arguments", "text"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), {}, "momentum"),
        (lambda p: torch.optim.Adam(p, lr=0.01), {}, "Adam"),
        (None, {"clipping": "per_layer", "max_grad_norm": [1.5, 1.5]}, "DPPerLayerOptimizer"),
        (None, {"grad_sample_mode": "ghost"}, "FastGradientClipping"),
        (None, {"grad_sample_mode": "ghost", "poisson_sampling": True}, "FastGradientClipping"),
    ],
)
def test_other_optimizers_are_composed(caplog, base, arguments, text):
    with caplog.at_level("INFO", "hidden_state_accountants"):
        loop = stock_loop(base=base, declared=DECLARED, **arguments)
    loop.epoch()
    order = "poisson" if "poisson_sampling" in arguments else "cyclic"
    clip_norm = float(loop.optimizer.max_grad_norm)
    composed = event(
        batch_order=order, num_steps=6, loss=None, weight_decay=0.0, clip_norm=clip_norm
    )
    assert loop.epsilon == epsilon(composed)
    (line,) = [r.message for r in caplog.records if r.name == "hidden_state_accountants"]
    assert text in line
    assert "No last-iterate theorem" in line


def test_an_undeclared_run_is_poisson_composition():
    loop, other = make("poisson"), PRVAccountant()
    for _ in range(3):
        beside_another_accountant(loop, other)
    assert loop.accountant.history == other.history == [(2.0, 1 / 6, 18)]
    gaussian = dp_accounting.GaussianDpEvent(2.0)
    sampled = dp_accounting.PoissonSampledDpEvent(drawn(1 / 6), gaussian)
    exact = dp_accounting.pld.PLDAccountant().compose(sampled, 18).get_epsilon(DELTA)
    with pytest.warns(UserWarning, match="for Poisson loaders only"):
        assert loop.epsilon == pytest.approx(exact, rel=1e-9)
    assert loop.epsilon <= other.get_epsilon(DELTA)
    lines = [str(line) for line in loop.accountant.guarantee.assumptions]
    assert sum("of its tutorials" in line and "sizes of the batches" in line for line in lines) == 1


@pytest.mark.parametrize("declare", [True, False])
def test_calibration_meets_the_target_on_poisson_batches(declare):
    loop = stock_loop(data=records(65), poisson_sampling=True, target_epsilon=1.0, epochs=3)
    if declare:
        loop.declare()
    for _ in range(3):
        loop.epoch()
    assert 0.3 < loop.epsilon <= 1.0


def test_a_hook_by_hand_says_nothing_of_its_loader():
    loop, accountant = make("poisson"), HiddenStateAccountant()
    loop.optimizer.generator = None  # as Opacus' own optimizers have it
    loop.optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(BATCH / RECORDS))
    with pytest.raises(hsa.UnsupportedRunError, match="after make_private of a PrivacyEngine"):
        accountant.declare_run()
    loop.epoch()
    assert accountant.get_epsilon(DELTA) > 0
    assert DEFAULT_NOISE in accountant.guarantee.assumptions
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of 2 batches"):
        accumulated(loop)  # eight batches at a rate are no batch at eight times the rate


def test_each_make_private_needs_its_declaration():
    first = make("cyclic")
    with pytest.raises(hsa.UnsupportedRunError, match="got 61"):
        first.declare(dataset_size=61)  # changes nothing
    first.declare(criterion=None, feature_norm=None)
    first.declare()  # another one before the first step replaces it
    first.epoch()
    with pytest.raises(hsa.UnsupportedRunError, match="before its first step, got it elsewhere"):
        first.declare()
    with pytest.raises(hsa.UnsupportedRunError, match="after every make_private"):
        make("cyclic", engine=first.engine).epoch()
    make("cyclic", engine=first.engine, declared=DECLARED).epoch()
    both = dp_accounting.ComposedDpEvent([expected("cyclic", 6)] * 2)
    assert first.epsilon == epsilon(both)
    with pytest.raises(hsa.UnsupportedRunError, match="ended when make_private was called again"):
        first.epoch()


# --- divisor and sampling rate --------------------------------------------------------------------


def test_poisson_batches_that_do_not_divide_the_records_are_hidden():
    """1000 records in batches of 64: drawn at a rate of 1/16, divided by 62."""
    loop = stock_loop(
        data=records(1000),
        loader={"batch_size": 64},
        poisson_sampling=True,
        base=lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=1.0),
    )
    loop.declare(batch_size=64, dataset_size=1000, batch_order="poisson")
    for _ in range(3):
        loop.epoch()
    truth = event(
        batch_order="poisson", dataset_size=1000, batch_size=62, sampling_rate=1 / 16,
        num_steps=48, weight_decay=1.0,
    )  # fmt: skip
    assert loop.event == truth
    assert "Theorem C" in loop.accountant.guarantee.theorem
    assert loop.epsilon == epsilon(truth)
    composed = hsa.LastIterateAccountant().compose(attrs.evolve(truth, loss=None))
    assert loop.epsilon < 0.9 * composed.get_epsilon(DELTA)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [1e-5, 1 / 1024, 1 / 3, 1.0])
def test_rates_of_random_numbers(rate, dtype):
    """The largest number that torch may draw and that is below the rate, and the next one."""
    step = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    drawn = drawn_rate(rate, dtype)
    numbers = torch.tensor([drawn - step, drawn], dtype=torch.float64).to(dtype)
    assert (numbers < rate).tolist() == [True, False]


# --- declarations and loaders that are refused ----------------------------------------------------


DEALS = "which is what the loader deals"
UNSUPPORTED = hsa.UnsupportedRunError


ADAPTIVE = {
    "poisson_sampling": True, "clipping": "adaptive", "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2, "max_clipbound": 10.0, "min_clipbound": 0.1,
    "unclipped_num_std": 2.0,
}  # fmt: skip


class OwnBatches(BatchSampler):
    def __iter__(self):
        return iter([list(range(BATCH))] * (RECORDS // BATCH))


OWN_BATCHES = {
    "batch_sampler": OwnBatches(range(RECORDS), BATCH, drop_last=False),
    "batch_size": 1,
}


def at_a_higher_rate():
    """Opacus says a rate of 1/20, from the number of batches."""
    return UniformWithReplacementSampler(num_samples=RECORDS, sample_rate=0.5, steps=20)


def drawn_again(generator):
    return {"loader": {"shuffle": True, "generator": generator, "drop_last": True}}


@pytest.mark.parametrize(
    ("declared", "arguments", "error", "text"),
    [
        ({"dataset_size": 2400}, {}, UNSUPPORTED, f"dataset_size = 60, {DEALS}.*got 2400"),
        ({"batch_size": 12}, {}, UNSUPPORTED, f"batch_size = 10, {DEALS}.*got 12"),
        (
            {"batch_order": "cyclic"},
            {"poisson_sampling": True},
            UNSUPPORTED,
            f'batch_order = "poisson", {DEALS}.*got "cyclic"',
        ),
        ({"batch_order": "sorted"}, {}, ValueError, "batch_order to be one of full, cyclic"),
        ({"loss_geometry": "convex"}, {}, TypeError, "LossGeometry"),
        (DECLARED, {"max_grad_norm": 2.0}, UNSUPPORTED, "Raise max_grad_norm"),
        ({}, drawn_again(torch.Generator()), UNSUPPORTED, "a script seeded"),
        ({}, drawn_again(torch.Generator().manual_seed(1)), UNSUPPORTED, "a script seeded"),
        ({}, drawn_again(None), UNSUPPORTED, "a script seeded"),
        (
            {},
            {"loader": {"sampler": WeightedRandomSampler(torch.ones(RECORDS), RECORDS)}},
            UNSUPPORTED,
            "sampler=WeightedRandomSampler",
        ),
        ({}, {"loader": OWN_BATCHES}, UNSUPPORTED, "batch_sampler=OwnBatches"),
        (
            {},
            {"data": Subset(records(), [*range(59), 0]), "poisson_sampling": True},
            UNSUPPORTED,
            "an index twice",
        ),
        (
            {},
            {"data": records(RECORDS + 5), **drawn_again(secret_generator())},
            UNSUPPORTED,
            "drop_last=True leaves out other records",
        ),
        ({}, {"data": records(65)}, UNSUPPORTED, "divides the 65 records, got 10"),
        (None, {"rand_on_empty": True, "poisson_sampling": True}, UNSUPPORTED, "rand_on_empty = F"),
        (None, {"target_epsilon": 1.0, "epochs": 2}, UNSUPPORTED, "Poisson loader.*make_private_w"),
        (None, {}, UNSUPPORTED, r"Expected a Poisson loader.*declare_run\(\)"),
        (None, {"data": records(65)}, UNSUPPORTED, "Expected a Poisson loader"),
        (
            None,
            {"loader": {"batch_size": 1, "batch_sampler": at_a_higher_rate()}},
            UNSUPPORTED,
            r"at a rate of 1 / len\(data_loader\) = 0.05",
        ),
        (None, ADAPTIVE, UNSUPPORTED, r"step 1: .* got AdaClipDPOptimizer"),
    ],
)
def test_what_is_refused(declared, arguments, error, text):
    with pytest.raises(error, match=text):
        stock_loop(declared=declared, **arguments).epoch()


def test_the_relation_of_a_declared_run():
    engine = PrivacyEngine(accountant="hidden_state")
    engine.accountant = HiddenStateAccountant("add_or_remove_one")
    with pytest.raises(hsa.UnsupportedRunError, match="computes the rate and the divisor"):
        make("poisson", engine=engine, declared={})


def test_the_loader_of_the_other_engine():
    model = nn.Linear(FEATURES, 3)
    *_, loader = HiddenStatePrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    loop = stock_loop(original=loader)
    with pytest.raises(hsa.UnsupportedRunError, match="of your own, got OrderedDataLoader"):
        loop.declare()


@pytest.mark.parametrize(("kind", "wraps"), [(nn.Embedding, True), (nn.EmbeddingBag, False)])
def test_embeddings_that_shorten_their_rows(kind, wraps):
    """A forward pass writes to the rows of the records in the batch, without noise."""
    model = nn.Sequential(kind(9, 3, max_norm=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hsa.UnsupportedRunError, match=f"got {kind.__name__} 0 with max_norm = 1"):
        stock_loop(module=model, optimizer=optimizer, wrap_model=wraps)


# --- steps that are refused -----------------------------------------------------------------------


def not_finite(loop):
    loop.step(next(iter(loop.loader)), factor=math.inf)


def accumulated(loop):
    loop.model.allow_grad_accumulation()
    loop.optimizer.zero_grad()
    for features, labels in itertools.islice(loop.loader, 2):
        loop.criterion(loop.model(features), labels).backward()
    loop.optimizer.step()


def with_momentum(loop):
    loop.optimizer.param_groups[0]["momentum"] = 0.9
    loop.epoch()


@pytest.mark.parametrize(
    ("kind", "act", "text"),
    [
        ("cyclic", not_finite, "step 7 has a gradient that is not finite"),
        ("poisson", not_finite, "step 7 has a gradient that is not finite"),
        ("cyclic", accumulated, "step 7: got the gradients of 2 batches"),
        ("cyclic", with_momentum, "step 7 changed the optimizer"),
    ],
)
def test_a_refused_step_ends_the_run(kind, act, text):
    """Which step a loop leaves out would depend on the record."""
    loop = made(kind)
    if kind == "poisson":  # no batch of it is empty
        loop.loader.batch_sampler.generator = torch.Generator().manual_seed(2**62)
    loop.epoch()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(loop)
    resumed = loaded(loop.accountant)
    for go_on in (loop.epoch, lambda: loop.epsilon, lambda: resumed.get_epsilon(DELTA)):
        with pytest.raises(hsa.UnsupportedRunError, match=f"which ended it: {text}"):
            go_on()


@pytest.mark.parametrize("kind", ["cyclic", "poisson"])
def test_no_steps_inside_a_budget(kind):
    loop = made(kind)
    with hsa.budget(1.0, DELTA), pytest.raises(hsa.UnsupportedRunError, match="inside of"):
        loop.epoch()
    assert len(loop.accountant) == 0


class Positions(nn.Module):
    """As in GPT-2 and BERT: the input of the second embedding has one row."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(9, 3), nn.Embedding(FEATURES, 3)

    def forward(self, records):
        words = self.words((3 * records).long().clamp(0, 8))
        return (words + self.positions(torch.arange(FEATURES)[None])).mean(1)


@pytest.mark.parametrize("kind", ["cyclic", "poisson"])
def test_a_layer_with_one_gradient_for_all_records(kind):
    """Clipped by itself one record may turn it around: 4.377 was reported, up to 9.99 true."""
    model = Positions()
    loop = make(
        kind, module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        declared={} if kind == "cyclic" else None, clipping="per_layer", max_grad_norm=[0.1, 5.0],
    )  # fmt: skip
    with pytest.raises(hsa.UnsupportedRunError, match=r"a gradient of parameter 1 .* whole batch"):
        loop.epoch()


def other_hook(loop):
    loop.optimizer.attach_step_hook(PRVAccountant().get_optimizer_hook_fn(BATCH / RECORDS))
    loop.epoch()


def plain_optimizer(loop):
    optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.1)
    for features, labels in loop.loader:
        loop.model.zero_grad()
        loop.criterion(loop.model(features), labels).backward()
        optimizer.step()


@pytest.mark.parametrize(("kind", "train"), [("cyclic", other_hook), ("poisson", plain_optimizer)])
def test_steps_that_nobody_records(kind, train):
    """Reported 0."""
    loop = made(kind)
    assert loop.epsilon == 0.0
    train(loop)
    with pytest.raises(hsa.UnsupportedRunError, match="got none, but parameters that were written"):
        _ = loop.epsilon


# --- histories and states -------------------------------------------------------------------------


def test_undeclared_steps_and_runs_do_not_mix(make_run):
    undeclared = HiddenStateAccountant()
    undeclared.step(noise_multiplier=5.0, sample_rate=0.1)
    run, loop = make_run(), made("cyclic")
    for accountant in (undeclared, loaded(undeclared)):
        with pytest.raises(hsa.UnsupportedRunError, match="got both"):
            accountant.add_run(run.optimizer.run)
        assert len(accountant) == 1
    for act in (
        lambda own: setattr(own, "history", [(5.0, 0.1, 6)]),
        lambda own: own.step(noise_multiplier=5.0, sample_rate=0.1),
        lambda own: own.load_state_dict(undeclared.state_dict()),
    ):
        for accountant in (run.engine.accountant, loop.accountant):
            with pytest.raises(hsa.UnsupportedRunError, match="got both"):
                act(accountant)
    loop.accountant.load_state_dict(HiddenStateAccountant().state_dict())
    poisson = made("poisson")
    poisson.epoch()
    with pytest.raises(hsa.UnsupportedRunError, match="declared runs or undeclared steps"):
        poisson.declare()


def test_histories_of_opacus():
    accountant = HiddenStateAccountant()
    for noise in (1.0, 1.0, 2.0):
        accountant.step(noise_multiplier=noise, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 2), (2.0, 0.1, 1)]
    assert len(accountant) == 3
    own = {"mine": 1}
    assert accountant.state_dict(own) is own
    other = loaded(accountant)
    other.step(noise_multiplier=2.0, sample_rate=0.1)
    assert other.history == [(1.0, 0.1, 2), (2.0, 0.1, 2)]
    adds = NeighboringRelation.ADD_OR_REMOVE_ONE
    for history, exact in (
        ([], 0.0),
        ([(0.0, 0.05, 100)], math.inf),
        ([(1.0, 1.0, 4)], epsilon(dp_accounting.GaussianDpEvent(0.5), adds)),
    ):
        accountant.history = history
        assert accountant.get_epsilon(delta=DELTA) == exact


@pytest.mark.parametrize("declared", [DECLARED, {}])
def test_a_run_that_goes_on_is_a_second_one(declared):
    """Of which the loader starts again, in whatever order; the checkpoint counts as a release."""
    first, second = make("cyclic", declared=declared), make("cyclic", declared=declared)
    first.epoch()
    first.step(next(iter(first.loader)))  # within an epoch
    second.accountant.load_state_dict(first.accountant.state_dict())
    assert len(second.accountant) == 7
    assert second.epsilon == first.epsilon
    second.step(next(iter(second.loader)))
    events = [each.event() for each in second.accountant.recorders]
    assert [each.num_steps for each in events] == [7, 1]
    assert second.epsilon == epsilon(dp_accounting.ComposedDpEvent(events))
    assert second.epsilon > first.epsilon


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


def test_a_state_keeps_what_was_said_and_replaces_nothing(tmp_path):
    loop, path = made("cyclic"), tmp_path / "checkpoint.pt"
    loop.epoch()
    loop.accountant.assume("nobody looked")
    loop.engine.save_checkpoint(path=path, module=loop.model, optimizer=loop.optimizer)
    state = torch.load(path, weights_only=True)["privacy_accountant_state_dict"]
    other = HiddenStateAccountant()
    other.load_state_dict(state)
    assert other.get_epsilon(DELTA) == loop.epsilon
    (run,) = other.state_dict()["runs"]
    assert "nobody looked" in run["assumptions"]
    for accountant in (loop.accountant, other):
        lines = [str(assumption) for assumption in accountant.guarantee.assumptions]
        (line,) = [line for line in lines if "clipped per-example gradients are right" in line]
        assert "every gradient is that of the declared loss of one record by itself" in line
    with pytest.raises(ValueError, match="without steps, got one with 6"):
        other.load_state_dict(state)
    loop.accountant.refuse("a look at private data")
    with pytest.raises(hsa.UnsupportedRunError, match="a look at private data"):
        loaded(loop.accountant).get_epsilon(DELTA)
