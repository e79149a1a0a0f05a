"""Noise of our own in the optimizers that Opacus makes, from the first step on."""

import pytest
import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.optimizers import FSDPOptimizerFastGradientClipping
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from opacus_stock import DECLARED
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStateAccountant

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

BATCH, RECORDS, SEED = 10, 60, 42
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [1.0, 1.0]}
# What make_private is told, by the optimizer that it makes.
KINDS = {
    "DPOptimizer": {},
    "DPPerLayerOptimizer": PER_LAYER,
    "DPOptimizerFastGradientClipping": {"grad_sample_mode": "ghost"},
    "DistributedDPOptimizer": {},
    "SimpleDistributedPerLayerOptimizer": PER_LAYER,
    "DistributedDPOptimizerFastGradientClipping": {"grad_sample_mode": "ghost"},
}


class Loop:
    """A script with a stock engine; it seeds torch."""

    def __init__(self, kind, engine=None, loader=None, **arguments):
        torch.manual_seed(SEED)
        self.engine = engine or PrivacyEngine(accountant="hidden_state")
        self.model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
        module = DPDDP(self.model) if "Distributed" in kind else self.model
        features = nn.functional.normalize(torch.randn(RECORDS, 4))
        data = TensorDataset(features, torch.arange(RECORDS) % 3)
        self.module, self.optimizer, *rest = self.engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
            criterion=criterion,
            data_loader=DataLoader(data, batch_size=BATCH, **(loader or {})),
            **{"noise_multiplier": 2.0, "max_grad_norm": 1.0} | KINDS.get(kind, {}) | arguments,
        )
        self.loader, self.criterion = rest[-1], rest[0] if len(rest) == 2 else criterion
        assert kind in ("Ghost", type(self.optimizer).__name__)

    def backward(self, batch):
        features, labels = batch
        self.optimizer.zero_grad()
        self.criterion(self.module(features), labels).backward()

    def steps(self, loader=None):
        for batch in loader or self.loader:
            self.backward(batch)
            self.optimizer.step()
            yield self.noise()

    def noise(self):
        """Of the step that was taken; each number over its standard deviation, up to a factor."""
        params = self.optimizer.params
        return torch.cat([(p.grad * BATCH - p.summed_grad).flatten() for p in params])

    @property
    def assumptions(self):
        return [str(a) for a in self.engine.accountant.guarantee.assumptions]


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_tells_nothing(kind, alone):
    one, other = (torch.stack(list(Loop(kind).steps())) for _ in range(2))
    assert (one != other).all()
    assert 0.7 < float((one - other).norm() / one.norm()) < 3.0


# --- whose noise it is ----------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_it_is_listed(declared, given):
    engine = PrivacyEngine(accountant="hidden_state")
    generator = torch.Generator() if given else None
    loop = Loop("DPOptimizer", engine, noise_generator=generator, poisson_sampling=not declared)
    if declared:
        engine.accountant.declare_run(**DECLARED)
    list(loop.steps())
    noise = "noise from a generator", "noise_generator"
    (line,) = [line for line in loop.assumptions if any(name in line for name in noise)]
    words = "declared: noise_generator has a" if given else "checked: noise from a generator of its"
    assert line.startswith(words)
    assert loop.optimizer.generator is generator or not given
    plain = HiddenStateAccountant()
    plain.load_state_dict(engine.accountant.state_dict())
    kept = [str(a) for a in plain.guarantee.assumptions if "noise" in str(a)]
    assert kept == ([line] if given else [])  # what is checked is checked again where it goes on


# --- optimizers whose noise would not be ours -----------------------------------------------------


def test_fsdp_is_refused_by_name(alone):
    """Its ranks hold pieces of one noise: theirs has to be the same."""
    base = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    optimizer = FSDPOptimizerFastGradientClipping(
        base, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=2
    )
    hook = HiddenStateAccountant().get_optimizer_hook_fn(sample_rate=0.1)
    with pytest.raises(hsa.UnsupportedRunError, match="got FSDPOptimizerFastGradientClipping"):
        hook(optimizer)


def test_the_noise_of_a_hook_by_hand_is_declared():
    """It is drawn before the accountant sees a step."""
    loop, accountant = Loop("DPOptimizer"), HiddenStateAccountant()
    loop.optimizer.generator = None
    loop.optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=1 / 6))
    list(loop.steps())
    lines = [str(line) for line in accountant.guarantee.assumptions]
    assert any(line.startswith("declared: the seed of torch's default generator") for line in lines)


# --- which records a batch holds ------------------------------------------------------------------


def sizes_of_batches(**arguments):
    loop = Loop("DPOptimizer", **arguments)
    torch.manual_seed(SEED)
    return [len(labels) for _ in range(8) for _, labels in loop.loader]


def test_a_seed_tells_nothing_about_the_batches():
    """Whoever knows which batches hold a record gains all that sampling takes away."""
    assert sizes_of_batches() != sizes_of_batches()


def test_a_generator_of_the_loader_stays():
    generator = torch.Generator().manual_seed(SEED)
    loop = Loop("DPOptimizer", loader={"generator": generator})
    assert loop.loader.batch_sampler.generator is generator


@pytest.mark.parametrize("is_own", [True, False])
def test_whose_coins_they_are_is_listed(is_own):
    loop = Loop("DPOptimizer")
    if not is_own:
        loop.loader.batch_sampler.generator = torch.Generator()
    loop.engine.accountant.declare_run()
    list(loop.steps())
    is_listed = any(
        "Poisson batches drawn by a generator of the run's own" in line for line in loop.assumptions
    )
    assert is_listed == is_own


@pytest.mark.parametrize("declared", [False, True])
def test_ghost_clipping_with_an_adaptive_norm(declared):
    """Counts clipped gradients with noise of torch's default generator in backward().

    Opacus wants more records in a batch than ten times the noise: one is enough here.
    """
    engine = PrivacyEngineAdaptiveClipping(accountant="hidden_state")
    arguments = {"grad_sample_mode": "ghost", "noise_multiplier": 0.05}
    loop = Loop("Ghost", engine, poisson_sampling=not declared, **arguments)
    if declared:
        engine.accountant.declare_run(**DECLARED)
    with pytest.raises(hsa.UnsupportedRunError, match="got PrivacyEngineAdaptiveClipping"):
        next(loop.steps())
