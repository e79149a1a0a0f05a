"""Noise comes from generators that no seed reaches, or from one that the user vouches for."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus_runs import weights
from opacus_stock import DECLARED, stock_loop
from torch import distributed, nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    BlockCoordinateOptimizer,
    DiceAdamOptimizer,
    DiceSGDOptimizer,
    HiddenStateAccountant,
    HiddenStatePrivacyEngine,
)
from hidden_state_adapters.opacus.noise import OwnGenerator

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA, SEED = 1e-5, 42
# So that the records do not matter: what differs between two models is noise.
NOISE = {"noise_multiplier": 1000.0, "max_grad_norm": 0.1}
CPU = torch.device("cpu")


KINDS = {
    "composition": {},
    "Poisson": {"batch_order": "poisson"},
    "DiceSGD": {"optimizer_class": DiceSGDOptimizer},
    "DiceAdam": {"optimizer_class": DiceAdamOptimizer},
    "DP-MBCD": {"optimizer_class": BlockCoordinateOptimizer},
}


@pytest.fixture
def make(make_run, dataset):
    """A public script, which seeds torch, makes a softmax model private and trains it."""

    def make(kind="composition", changed_record=0.0, **arguments):
        torch.manual_seed(SEED)
        features, labels = dataset.tensors
        features = torch.cat([features[:1] + changed_record, features[1:]])
        model, data = nn.Linear(5, 3), TensorDataset(nn.functional.normalize(features), labels)
        base = torch.optim.Adam if kind == "DiceAdam" else torch.optim.SGD
        return make_run(
            model=model,
            optimizer=base(model.parameters(), lr=0.01),
            loader={"dataset": data},
            loss_geometry=None,
            **NOISE | KINDS[kind] | arguments,
        )

    return make


def move(run):
    """What an epoch adds to the weights."""
    before = weights(run)
    run.epoch()
    return weights(run) - before


def assert_independent(one, other):
    """Two moves by noise: half of the square of their difference is that of each of them."""
    assert (one != other).all()
    ratio = np.linalg.norm(one - other) / np.linalg.norm(one)
    assert 0.4 < ratio < 5.0  # of equal noise it is 0, of independent noise about 1.4


@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_and_neighbouring_data(make, kind):
    """Otherwise who knows the seed subtracts the noise, and sees the record."""
    runs = [make(kind, changed_record=change) for change in (0.0, 1.0)]
    np.testing.assert_array_equal(*map(weights, runs))
    assert_independent(*map(move, runs))


def test_a_run_that_goes_on_draws_other_noise(make, tmp_path):
    """Also with all private state: the generator is in no file."""
    first, path = make("DiceSGD"), tmp_path / "checkpoint.pt"
    first.epoch()
    first.engine.save_checkpoint(path=path, stays_private=True, include_private_state=True)
    moves = [move(first)]
    for _ in range(2):
        again = make("DiceSGD")
        again.engine.load_checkpoint(path=path, discard_later_steps=True)
        moves.append(move(again))
    for one, other in itertools.combinations(moves, 2):
        assert_independent(one, other)


# --- the generator --------------------------------------------------------------------------------


def words_of(generator):
    state = torch.Generator.get_state(generator).numpy()
    return state[24 : 24 + 8 * 624].view(np.uint64)


def test_the_whole_state_is_drawn_and_used():
    """Random bits, and from them the same numbers as of numpy's Mersenne Twister."""
    one, other = (words_of(OwnGenerator(CPU)) for _ in range(2))
    assert np.mean(one != other) > 0.99
    assert 0.4 < np.mean(np.unpackbits(one.astype(np.uint32).view(np.uint8))) < 0.6
    generator, twister = OwnGenerator(CPU), np.random.MT19937()
    words = words_of(generator).astype(np.uint32)
    twister.state = {**twister.state, "state": {"key": words, "pos": 624}}
    numbers = torch.randint(2**20, (2000,), generator=generator)
    assert (twister.random_raw(2000) % 2**20 == numbers.numpy()).all()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda generator: generator.manual_seed(0),
        lambda generator: generator.seed(),
        lambda generator: generator.get_state(),
        lambda generator: generator.set_state(torch.Generator().get_state()),
        lambda generator: generator.clone_state(),
        lambda generator: generator.graphsafe_get_state(),
        lambda generator: generator.graphsafe_set_state(torch.Generator()),
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_it_stays_where_it_is(misuse):
    generator = OwnGenerator(CPU)
    before = words_of(generator)
    with pytest.raises(hsa.UnsupportedRunError, match="cannot be seeded, read, copied or pickled"):
        misuse(generator)
    assert (words_of(generator) == before).all()


@pytest.mark.cuda
def test_it_is_drawn_on_a_gpu():
    device = torch.device("cuda:0")
    states = [torch.Generator.get_state(OwnGenerator(device)).view(torch.int64) for _ in range(2)]
    assert (states[0] != states[1]).all()
    assert all(int(state[1]) % 4 == 0 for state in states)
    torch.cuda.manual_seed_all(0)
    noise = OwnGenerator(device)
    one = torch.randn(5, generator=noise, device=device)
    torch.cuda.manual_seed_all(0)
    assert (one != torch.randn(5, generator=noise, device=device)).all()


# --- a generator of the user's own ----------------------------------------------------------------

OWN, GIVEN = "noise from a generator of its own", "noise_generator has a random seed that nobody"


def listed(assumptions):
    return [str(a) for a in assumptions if OWN in str(a) or GIVEN in str(a)]


def test_whose_noise_it_is_is_listed(make, tmp_path):
    own, given = make(), make(noise_generator=torch.Generator())
    for run in (own, given):
        run.epoch()
    (line,) = listed(own.engine.assumptions)
    assert line.startswith(f"checked: {OWN}")
    (line,) = listed(given.engine.assumptions)
    assert line.startswith(f"declared: {GIVEN}")
    assert GIVEN in given.engine.report(DELTA)
    assert listed(given.engine.accountant.guarantee.assumptions) == listed(given.engine.assumptions)
    given.engine.save_checkpoint(path=tmp_path / "checkpoint.pt")
    later = HiddenStatePrivacyEngine()
    later.load_checkpoint(path=tmp_path / "checkpoint.pt", module=own.model)
    assert listed(later.assumptions) == listed(given.engine.assumptions)


# --- optimizers that Opacus' own engine makes -----------------------------------------------------

PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [1.0, 1.0]}
# What make_private is told, by the optimizer that it makes.
STOCK_KINDS = {
    "DPOptimizer": {},
    "DPPerLayerOptimizer": PER_LAYER,
    "DPOptimizerFastGradientClipping": {"grad_sample_mode": "ghost"},
    "DistributedDPOptimizer": {},
    "SimpleDistributedPerLayerOptimizer": PER_LAYER,
    "DistributedDPOptimizerFastGradientClipping": {"grad_sample_mode": "ghost"},
}


def make_stock(kind="DPOptimizer", **arguments):
    """A script with a stock engine; it seeds torch."""
    wrap = {"wrap": DPDDP} if "Distributed" in kind else {}
    arguments = {"poisson_sampling": True, "max_grad_norm": 1.0, **STOCK_KINDS[kind], **arguments}
    loop = stock_loop(**wrap, **arguments)
    assert type(loop.optimizer).__name__ == kind
    return loop


def noise_of(loop):
    """Of every step; each number over its standard deviation, up to a factor."""
    found = []
    for batch in loop.loader:
        loop.step(batch)
        params = loop.optimizer.params
        found.append(torch.cat([(p.grad * 10 - p.summed_grad).flatten() for p in params]))
    return torch.stack(found)


def listed_by(loop, text):
    return [str(a) for a in loop.accountant.guarantee.assumptions if text in str(a)]


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", STOCK_KINDS)
def test_a_seed_tells_nothing_of_stock_noise(kind, alone):
    one, other = (noise_of(make_stock(kind)) for _ in range(2))
    assert (one != other).all()
    assert 0.7 < float((one - other).norm() / one.norm()) < 3.0


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    ("generator", "words"),
    [
        (None, "checked: noise from a generator of its"),
        (torch.Generator(), "declared: noise_generator has a"),
    ],
)
def test_whose_stock_noise_it_is_is_listed(declared, generator, words):
    arguments = {"declared": DECLARED, "poisson_sampling": False} if declared else {}
    loop = make_stock(noise_generator=generator, **arguments)
    loop.epoch()
    (line,) = listed_by(loop, "noise")
    assert line.startswith(words)
    assert loop.optimizer.generator is generator or generator is None
    plain = HiddenStateAccountant()
    plain.load_state_dict(loop.accountant.state_dict())
    kept = [str(a) for a in plain.guarantee.assumptions if "noise" in str(a)]
    assert kept == ([line] if generator else [])  # what is checked is checked again


def test_a_seed_tells_nothing_about_the_batches():
    """Whoever knows which batches hold a record gains all that sampling takes away."""
    sizes = []
    for _ in range(2):
        loop = make_stock()
        torch.manual_seed(SEED)
        sizes.append([len(labels) for _ in range(8) for _, labels in loop.loader])
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize("is_own", [True, False])
def test_whose_coins_they_are_is_listed(is_own):
    generator = torch.Generator()
    loop = make_stock(loader={} if is_own else {"generator": generator}, declared={})
    assert (loop.loader.batch_sampler.generator is generator) != is_own
    loop.epoch()
    assert bool(listed_by(loop, "Poisson batches drawn by a generator of the run's own")) == is_own
