"""Ghost clipping: the sums of per-example gradients without the gradients, as with "hooks"."""

import copy
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from dice import automatic_step, sgd_step
from opacus import GradSampleModule, PrivacyEngine
from opacus.grad_sample.linear import compute_linear_norm_sample
from opacus.layers import DPLSTM, DPMultiheadAttention
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    DiceAdamOptimizer,
    DiceSGDOptimizer,
    GhostGradSampleModule,
    HiddenStatePrivacyEngine,
    ghost_gradients,
)
from hidden_state_adapters.opacus.ghost_clipping import ghost_norms, take_ghost_sums

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# --- norms and sums -------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Embeddings (with repeated tokens), norms, linear layers on sequences and on vectors."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(4, 6), nn.Embedding(5, 6)
        self.norm, self.hidden = nn.LayerNorm(6), nn.Linear(6, 8)
        self.convolution, self.groups = nn.Conv1d(8, 4, 3), nn.GroupNorm(2, 4)
        self.out = nn.Linear(12, 3, bias=False)

    def forward(self, ids):
        states = self.tokens(ids) + self.places(torch.arange(5).to(ids).expand(len(ids), 5))
        states = torch.tanh(self.hidden(self.norm(states))).transpose(1, 2)
        return self.out(self.groups(self.convolution(states)).flatten(1))


class Twice(nn.Module):
    """A linear layer that is used twice, and frozen ones."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(5, 5), nn.Linear(5, 3)
        self.layer.bias.requires_grad_(False)
        self.out.weight.requires_grad_(False)

    def forward(self, x):
        return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Tied(nn.Module):
    """The embedding's weight is that of the last layer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.out = nn.Embedding(4, 6), nn.Linear(6, 4, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, ids):
        return self.out(self.tokens(ids).tanh().mean(dim=1))


class Own(nn.Module):
    """A parameter without a layer: functorch differentiates the whole model."""

    def __init__(self):
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(x * self.scale) * self.scale.sum()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = DPLSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.cells(x)[0][:, -1])


class Attention(nn.Module):
    """Records second."""

    def __init__(self):
        super().__init__()
        self.heads = DPMultiheadAttention(4, 2, add_bias_kv=True)

    def forward(self, x):
        return self.heads(x, x, x)[0].sum(dim=0)[:, :3]


def ids(rows):
    return torch.randint(0, 4, (rows, 5))


MODELS = {
    "mixed": (Mixed, ids),
    "twice": (Twice, lambda rows: torch.randn(rows, 5)),
    "tied": (Tied, ids),
    "own": (Own, lambda rows: torch.randn(rows, 5)),
    "recurrent": (Recurrent, lambda rows: torch.randn(rows, 6, 2)),
    "attention": (Attention, lambda rows: torch.randn(6, rows, 4)),
    "functorch": (Mixed, ids),
}


def two_of(name, dtype, reduction="mean"):
    """The same model with per-example gradients and with ghost clipping."""
    options = {"batch_first": name != "attention", "loss_reduction": reduction}
    options["force_functorch"] = name == "functorch"
    torch.manual_seed(0)
    model = MODELS[name][0]().to(dtype)
    return GradSampleModule(copy.deepcopy(model), **options), GhostGradSampleModule(
        model, **options
    )


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def cast(data, dtype):
    return data.to(dtype) if data.is_floating_point() else data


@pytest.mark.parametrize("chunk", [2**24, 1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str
)
@pytest.mark.parametrize(
    ("name", "rows"),
    # Opacus' recurrent and attention layers and functorch's convolution stop at an empty batch.
    [(name, rows) for name in MODELS for rows in (7, 1)]
    + [(name, 0) for name in ("mixed", "twice", "tied", "own")],
)
def test_norms_and_sums_are_those_of_the_gradients(
    monkeypatch, name, dtype, tolerance, chunk, rows
):
    monkeypatch.setattr(ghost_gradients, "_CHUNK", chunk)
    plain, ghost = two_of(name, dtype)
    torch.manual_seed(1)
    data, targets = cast(MODELS[name][1](rows), dtype), torch.arange(rows) % 3
    for model in (plain, ghost):
        nn.CrossEntropyLoss()(model(data), targets).backward()
    weights = torch.rand(rows, dtype=dtype), torch.randn(rows, dtype=dtype)
    samples = [p.grad_sample[:rows] for p in trained(plain)]  # Embedding gives a row for no record
    squares = [(s.reshape(rows, math.prod(s.shape[1:])) ** 2).sum(dim=1) for s in samples]
    expected = sum(squares).sqrt()
    norms = ghost_norms(trained(ghost))
    assert norms.shape == (rows,)
    torch.testing.assert_close(norms.to(dtype), expected, rtol=tolerance, atol=tolerance)
    sums = take_ghost_sums(trained(ghost), *weights)  # after ghost_norms
    for (first, second), sample in zip(sums, samples, strict=True):
        for total, weight in ((first, weights[0]), (second, weights[1])):
            right = torch.einsum("i,i...", weight, sample)
            torch.testing.assert_close(total, right, rtol=tolerance, atol=10 * tolerance)
            assert not total.requires_grad


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
def test_cuda(name):
    figures = []
    for device in ("cpu", "cuda"):
        _, ghost = two_of(name, torch.float64)
        ghost.to(device)
        torch.manual_seed(1)
        data = cast(MODELS[name][1](7), torch.float64).to(device)
        ghost(data).square().sum(dim=1).mean().backward()
        norms = ghost_norms(trained(ghost))
        sums = take_ghost_sums(trained(ghost), norms)
        assert all(total.device.type == device for (total,) in sums)
        figures.append((norms.cpu(), [total.cpu() for (total,) in sums]))
    torch.testing.assert_close(*figures)


def test_norms_of_short_and_long_factors():
    """Neither square can be represented in float32, the product can."""
    model = GhostGradSampleModule(nn.Linear(2, 1, bias=False), loss_reduction="sum")
    (model(torch.full((1, 2), 1e22)) * 1e-23).sum().backward()
    assert float(ghost_norms(trained(model))) == pytest.approx(0.1 * math.sqrt(2), rel=1e-5)


def test_norms_where_the_positions_of_a_record_cancel():
    """Opacus' Gram matrices lose half of the digits there, and the clip with them."""
    torch.manual_seed(0)
    layer = nn.Linear(50, 50, bias=False)
    model = GhostGradSampleModule(layer, loss_reduction="sum")
    inputs = torch.randn(1, 1, 50).expand(1, 2, 50) * 100
    outward = torch.randn(50)
    weights = torch.stack([outward, -outward * (1 + 1e-4)]) * 100
    (model(inputs) * weights).sum().backward()
    exact = float(inputs[0, 0].double().norm() * weights.double().sum(dim=0).norm())
    assert float(ghost_norms(trained(model))) == pytest.approx(exact, rel=1e-2)
    gram = compute_linear_norm_sample(layer, [inputs], weights[None])[layer.weight]
    assert float(gram) != pytest.approx(exact, rel=0.1)


class Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("sequence", [False, True])
def test_no_gradients_of_all_records_are_formed(monkeypatch, sequence):
    monkeypatch.setattr(ghost_gradients, "_CHUNK", 2**14)
    model = nn.Sequential(nn.Linear(90, 90), nn.Tanh(), nn.Linear(90, 90))
    ghost = GhostGradSampleModule(model)
    data = torch.randn(64, 3, 90) if sequence else torch.randn(64, 90)
    optimizer = DiceSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=64,
    )  # fmt: skip
    with Largest() as largest:
        ghost(data).square().flatten(1).sum(dim=1).mean().backward()
        optimizer.step()
    # With "hooks" 64 * 90 * 90; the weight itself has 90 * 90.
    assert largest.numbers <= (64 * 3 * 90 if sequence else 90 * 90)
    assert all(p.grad_sample._gradients is None for p in model.parameters())


# --- the engine -----------------------------------------------------------------------------------

RECORDS, BATCH = 60, 10


def records(dtype=torch.float32):
    features = torch.randn(RECORDS, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    features = features / features.norm(dim=1, keepdim=True)
    return TensorDataset(features, torch.arange(RECORDS) % 3)


def make_private(mode="ghost", *, model=None, dtype=torch.float32, engine=None, **changes):
    """(engine, model, optimizer, criterion, loader)"""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(dtype) if model is None else model
    arguments = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1),
        "data_loader": DataLoader(records(dtype), batch_size=BATCH),
        "noise_multiplier": 0.0,
        "max_grad_norm": 0.6,
        "criterion": nn.CrossEntropyLoss(),
        "loss_geometry": "auto",
        "feature_norm": 1.0,
        **changes,
    }
    if arguments["loss_geometry"] is None:
        arguments.pop("feature_norm")
    engine = engine or HiddenStatePrivacyEngine()
    result = engine.make_private(module=model, grad_sample_mode=mode, **arguments)
    if mode != "ghost":
        model, optimizer, loader = result
        return engine, model, optimizer, arguments["criterion"], loader
    model, optimizer, criterion, loader = result
    assert criterion is arguments["criterion"]
    return engine, model, optimizer, criterion, loader


def train(model, optimizer, criterion, loader, epochs=2, pieces=None):
    for _ in range(epochs):
        if pieces is None:
            steps(model, optimizer, criterion, loader)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=pieces, optimizer=optimizer
            ) as smaller:
                steps(model, optimizer, criterion, smaller)


def steps(model, optimizer, criterion, batches):
    for features, targets in batches:
        optimizer.zero_grad()
        criterion(model(features), targets).backward()
        optimizer.step()


def flat(parameters):
    return torch.cat([p.detach().reshape(-1) for p in parameters]).numpy().astype(float)


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


ORDERS = {
    "cyclic": {},
    "full": {"batch_order": "full"},
    "shuffled_once": {"batch_order": "shuffled_once", "order_seed": 1},
    # b = 1: some batches are empty
    "poisson": {
        "batch_order": "poisson",
        "order_seed": 1,
        "order_is_secret": True,
        "data_loader": DataLoader(records(torch.float64), batch_size=1),
        "max_grad_norm": 2.1,
    },
}


@pytest.mark.parametrize("pieces", [None, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_the_trajectory_is_that_of_hooks(order, pieces):
    ends, events = [], []
    for mode in ("hooks", "ghost"):
        engine, *run = make_private(
            mode, dtype=torch.float64, noise_multiplier=0.7, projection_radius=1.2,
            noise_generator=torch.Generator().manual_seed(4), **ORDERS[order],
        )  # fmt: skip
        train(*run, pieces=pieces)
        ends.append(flat(run[0].parameters()))
        events.append(engine.privacy_event)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-12, atol=1e-12)
    assert events[1] == events[0]


@pytest.mark.parametrize("mode", ["functorch", "ew", "ghost"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_mode_trains_a_network_as_hooks_does(mode, reduction):
    ends = []
    for which in ("hooks", mode):
        _, *run = make_private(
            which, model=mlp(), loss_geometry=None, loss_reduction=reduction,
            criterion=nn.CrossEntropyLoss(reduction=reduction),
        )  # fmt: skip
        train(*run)
        ends.append(flat(run[0].parameters()))
    assert np.abs(ends[0] - flat(mlp().parameters())).max() > 0.05
    np.testing.assert_allclose(ends[1], ends[0], atol=2e-6)


def test_the_noise_is_that_of_the_event():
    _, model, optimizer, criterion, loader = make_private(
        noise_multiplier=3.0, max_grad_norm=2.1, model=nn.Linear(5, 3, bias=False)
    )
    (weight,) = model.parameters()
    moves = []
    for _ in range(60):
        for batch in loader:
            before = weight.detach().clone()
            steps(model, optimizer, criterion, [batch])
            rest = weight.detach() - 0.95 * before + 0.05 * weight.summed_grad
            moves.append(rest.flatten())
    draws = torch.cat(moves)
    expected = 0.5 * 3.0 * 2.1 / BATCH
    assert float(draws.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * len(draws)))


def test_schedules_are_recorded_and_used():
    """The clip norm of a step is the one that is recorded."""
    engine, *run = make_private(loss_geometry=None, noise_multiplier=1.0)
    (model, optimizer, criterion, loader) = run
    for index, batch in enumerate(loader):
        optimizer.max_grad_norm = clip = 0.05 * (index + 1)
        steps(model, optimizer, criterion, [batch])
        total = math.sqrt(sum(float(p.summed_grad.norm()) ** 2 for p in model.parameters()))
        assert 0 < total <= BATCH * clip * (1 + 1e-6)
    np.testing.assert_allclose(
        engine.privacy_event.clip_norm.to_array(), [0.05 * (t + 1) for t in range(6)]
    )


def test_checkpoints(tmp_path):
    ends = []
    for stop in (False, True):
        engine, *run = make_private()
        train(*run, epochs=1)
        if stop:
            path = tmp_path / "run.pt"
            engine.save_checkpoint(path=path, module=run[0], optimizer=run[1])
            engine, *run = make_private()
            engine.load_checkpoint(path=path, module=run[0], optimizer=run[1])
        train(*run, epochs=1)
        ends.append(flat(run[0].parameters()))
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"criterion": None, "loss_geometry": None}, hsa.UnsupportedRunError, "third of four"),
        ({"wrap_model": False}, hsa.UnsupportedRunError, "wrap_model = True"),
        ({"mode": "ghost_fsdp"}, hsa.UnsupportedRunError, "could not be checked"),
        ({"model": GradSampleModule(nn.Linear(5, 3))}, ValueError, "Pass the plain module"),
        (
            {"model": GhostGradSampleModule(nn.Linear(5, 3), loss_reduction="sum")},
            ValueError,
            "Pass the plain module",
        ),
        ({"clipping": "per_layer"}, hsa.UnsupportedRunError, "flat"),
    ],
)
def test_what_is_refused_at_the_start(arguments, error, text):
    with pytest.raises(error, match=text):
        make_private(**arguments)


def test_a_model_that_is_wrapped_already():
    first, *run = make_private()
    train(*run, epochs=1)
    engine, *run = make_private(model=run[0], engine=first)
    train(*run, epochs=1)
    assert [r.num_steps for r in engine.accountant.recorders] == [6, 6]


def no_backward(model, optimizer, criterion, batch):
    criterion(model(batch[0]), batch[1])
    optimizer.step()


def part_of_the_batch(model, optimizer, criterion, batch):
    criterion(model(batch[0][:7]), batch[1][:7]).backward()
    optimizer.step()


def two_passes(model, optimizer, criterion, batch):
    for _ in range(2):
        criterion(model(batch[0]), batch[1]).backward()
    optimizer.step()


def two_backward_passes(model, optimizer, criterion, batch):
    criterion(model(batch[0]), batch[1]).backward(retain_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.original_optimizer.zero_grad()
    model(batch[0]).sum().backward()
    optimizer.step()


def another_loss(model, optimizer, criterion, batch):
    (3 * criterion(model(batch[0]), batch[1])).backward()
    optimizer.step()


def write_the_batch(model, optimizer, criterion, batch):
    criterion(model(batch[0]), batch[1]).backward()
    batch[0].mul_(2)
    optimizer.step()


def another_criterion(model, optimizer, criterion, batch):
    nn.CrossEntropyLoss()(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (no_backward, "no per-example gradients"),
        (part_of_the_batch, "7 rows, expected batch_size = 10"),
        (two_passes, "gradients of 2 batches"),
        (two_backward_passes, "2 batches|2 training passes"),
        (another_loss, "per-example gradient of norm"),
        (write_the_batch, "written in place"),
        (another_criterion, "was not called"),
    ],
)
def test_what_is_refused_in_a_step(loop, text):
    engine, model, optimizer, criterion, loader = make_private(max_grad_norm=2.1)
    before = flat(model.parameters())
    for batch in loader:
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            loop(model, optimizer, criterion, batch)
        break
    np.testing.assert_array_equal(flat(model.parameters()), before)
    with pytest.raises(hsa.UnsupportedRunError):
        engine.get_epsilon(1e-5)


def test_features_that_are_too_long():
    backbone = nn.Linear(5, 5, bias=False).requires_grad_(False)
    with torch.no_grad():
        backbone.weight.copy_(torch.eye(5))
    _, model, optimizer, criterion, loader = make_private(
        model=nn.Sequential(backbone, nn.Linear(5, 3)), max_grad_norm=2.1
    )
    batches_seen = iter(loader)
    steps(model, optimizer, criterion, [next(batches_seen)])
    features, targets = next(batches_seen)
    optimizer.zero_grad()
    criterion(model(features * 1.1), targets).backward()
    with pytest.raises(hsa.UnsupportedRunError, match=r"features of norm 1\.(1|0999)"):
        optimizer.step()


def test_gradients_serve_for_one_step():
    _, model, optimizer, criterion, loader = make_private(loss_geometry=None)
    for index, (features, targets) in enumerate(loader):
        if index == 0:
            criterion(model(features), targets).backward()
            optimizer.step()
            for p in model.parameters():
                p.summed_grad = None
            continue
        model(features)
        with pytest.raises(hsa.UnsupportedRunError, match="used before"):
            optimizer.step()
        break


# What reaches a parameter past the layers' hooks is in Opacus' sum, unclipped; here it is not.


def penalty(model, criterion, features, targets):
    return criterion(model(features), targets) + 100 * sum((p**2).sum() for p in model.parameters())


def used_by_hand(model, criterion, features, targets):
    return criterion(model(features), targets) + 100 * (features @ next(model.parameters()).T).sum()


def column(model, criterion, features, targets):
    return nn.MSELoss(reduction=criterion.reduction)(model(features)[:, :1], features[:, :1] * 50)


def plain(model, criterion, features, targets):
    return criterion(model(features), targets)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("loss", [plain, penalty, used_by_hand, column])
def test_nothing_gets_past_the_clip(loss, double):
    """A forward hook, a hook of a tensor, and losses that Opacus' ghost clipping does not clip."""
    layer = nn.Linear(5, 3)
    if double:
        layer.register_forward_hook(lambda module, args, output: 50 * output)
        layer.weight.register_hook(lambda gradient: 50 * gradient)
    _, model, optimizer, criterion, loader = make_private(
        model=layer, loss_geometry=hsa.LossGeometry.convex(1.0, lipschitz=None), max_grad_norm=0.1,
        feature_norm=None,
    )  # fmt: skip
    features, targets = next(iter(loader))
    loss(model, criterion, features, targets).mean().backward()
    optimizer.step()
    total = math.sqrt(sum(float(p.summed_grad.norm()) ** 2 for p in model.parameters()))
    assert 0 < total <= BATCH * 0.1 * (1 + 1e-6)


class Moody(nn.Module):
    """Python's random numbers, which functorch does not notice: every pass is another one."""

    passes = itertools.cycle([1.0, 1000.0])

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return x * self.scale * next(self.passes)


def test_a_layer_that_differs_from_pass_to_pass():
    for _ in range(3):
        _, model, optimizer, _, loader = make_private(
            model=Moody(), loss_geometry=None, max_grad_norm=0.1
        )
        features, _ = next(iter(loader))
        (model(features) ** 2).sum(dim=1).mean().backward()
        optimizer.step()
        total = math.sqrt(sum(float(p.summed_grad.norm()) ** 2 for p in model.parameters()))
        assert 0 < total <= BATCH * 0.1 * (1 + 1e-6)


def test_why_opacus_own_ghost_clipping_is_not_used():
    """A loss of shape (n, 1): its coefficients meet the losses of all records."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    private, _, criterion, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.MSELoss(), data_loader=DataLoader(records(), batch_size=BATCH),
        noise_multiplier=0.0, max_grad_norm=0.1, grad_sample_mode="ghost", poisson_sampling=False,
    )  # fmt: skip
    features, _ = next(iter(loader))
    criterion(private(features), features[:, :1] * 50).backward()
    total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in model.parameters()))
    assert total > 5 * BATCH * 0.1


def test_opacus_own_optimizers_do_not_take_it():
    model = GhostGradSampleModule(nn.Linear(5, 3))
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4,
    )  # fmt: skip
    model(torch.ones(4, 5)).sum().backward()
    with pytest.raises(ValueError, match="GhostSample"):
        optimizer.step()


# --- DiceSGD --------------------------------------------------------------------------------------

DICE = {
    "sgd": (DiceSGDOptimizer, torch.optim.SGD, {}),
    "adam": (DiceAdamOptimizer, torch.optim.Adam, {}),
    "automatic": (DiceSGDOptimizer, torch.optim.SGD, {"automatic": True}),
}
CLIP, ERROR_CLIP, DIVISOR, RATE = 0.5, 0.2, 4, 0.3
SIZES = [4, 6, 0, 3, 5, 4, 1, 0, 7, 4]


def dice(variant, wrapper, dtype=torch.float64, noise=0.0):
    cls, base, extra = DICE[variant]
    model = wrapper(mlp(dtype))
    optimizer = cls(
        base(model.parameters(), lr=RATE), noise_multiplier=noise, max_grad_norm=CLIP,
        error_max_grad_norm=CLIP if variant == "automatic" else ERROR_CLIP,
        expected_batch_size=DIVISOR, generator=torch.Generator().manual_seed(5), **extra,
    )  # fmt: skip
    return model, optimizer


def batches(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 5, generator=generator, dtype=dtype) for size in SIZES]


def backward(model, features):
    losses = 3.0 * (model(features) ** 2).sum(dim=1)
    (losses.mean() if len(features) else losses.sum()).backward()


def error_of(optimizer):
    return flat(optimizer.run_state_dict(include_private_state=True)["private"]["error"])


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str
)
@pytest.mark.parametrize("variant", DICE)
def test_dice_steps_and_error_are_those_of_hooks(variant, dtype, tolerance, in_pieces):
    ends, errors, largest = [], [], []
    for wrapper in (GradSampleModule, GhostGradSampleModule):
        model, optimizer = dice(variant, wrapper, dtype, noise=0.7)
        for features in batches(dtype):
            optimizer.zero_grad()
            if in_pieces and wrapper is GhostGradSampleModule and len(features) > 2:
                optimizer.signal_skip_step(True)
                backward(model, features[:2])
                optimizer.step()
                optimizer.zero_grad()
                optimizer.signal_skip_step(False)
                backward(model, features[2:])
            else:
                backward(model, features)
            optimizer.step()
        ends.append(flat(model.parameters()))
        errors.append(error_of(optimizer))
        largest.append(optimizer._hidden.largest_gradient_norm)
        assert optimizer.num_steps == len(SIZES)
    assert np.linalg.norm(errors[0]) > 0.5
    np.testing.assert_allclose(ends[1], ends[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(errors[1], errors[0], rtol=tolerance, atol=tolerance)
    assert largest[1] == pytest.approx(largest[0])


@pytest.mark.parametrize("variant", ["sgd", "automatic"])
def test_dice_steps_are_those_of_the_paper(variant):
    model, optimizer = dice(variant, GhostGradSampleModule)
    x = flat(model.parameters())
    error = np.zeros_like(x)
    for features in batches():
        gradients = per_example(x, features)
        optimizer.zero_grad()
        backward(model, features)
        optimizer.step()
        common = {"learning_rate": RATE, "divisor": DIVISOR, "clip_norm": CLIP}
        if variant == "automatic":
            x, error = automatic_step(x, error, gradients, 0.0, **common)
        else:
            x, error = sgd_step(x, error, gradients, 0.0, error_clip_norm=ERROR_CLIP, **common)
        np.testing.assert_allclose(flat(model.parameters()), x, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(error_of(optimizer), error, rtol=1e-10, atol=1e-10)


def per_example(x, features):
    """The gradients of single records at x, from a model of its own."""
    model = mlp(torch.float64)
    nn.utils.vector_to_parameters(torch.tensor(x), model.parameters())
    rows = []
    for feature in features:
        model.zero_grad()
        backward(model, feature[None])
        rows.append(flat([p.grad for p in model.parameters()]))
    return np.array(rows).reshape(len(rows), len(x))


@pytest.mark.parametrize("pieces", [None, 3])
@pytest.mark.parametrize("variant", DICE)
def test_the_engine_makes_dice_optimizers_for_it(variant, pieces):
    cls, base, extra = DICE[variant]
    ends, errors, events = [], [], []
    for mode in ("hooks", "ghost"):
        model = mlp(torch.float64)
        engine, *run = make_private(
            mode, model=model, dtype=torch.float64, optimizer=base(model.parameters(), lr=0.1),
            optimizer_class=cls, error_max_grad_norm=CLIP, max_grad_norm=CLIP, loss_geometry=None,
            noise_multiplier=0.5, noise_generator=torch.Generator().manual_seed(4), **extra,
        )  # fmt: skip
        train(*run, pieces=pieces)
        ends.append(flat(model.parameters()))
        errors.append(error_of(run[1]))
        events.append(engine.privacy_event)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(errors[1], errors[0], rtol=1e-11, atol=1e-11)
    assert np.linalg.norm(errors[0]) > 0.01
    assert events[1] == events[0]


def test_dice_refuses_what_it_refuses_with_hooks():
    model, optimizer = dice("sgd", GhostGradSampleModule)
    backward(model, batches()[0])
    optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="does not come from the"):
        optimizer.step()
    model, optimizer = dice("sgd", GhostGradSampleModule)
    for _ in range(2):
        backward(model, batches()[0])
    with pytest.raises(hsa.UnsupportedRunError, match="2 batches"):
        optimizer.step()
    model, optimizer = dice("sgd", GhostGradSampleModule)
    backward(model, batches()[0] * math.inf)
    with pytest.raises(hsa.UnsupportedRunError, match="not finite"):
        optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="refused or interrupted"):
        optimizer.privacy_event(dataset_size=12, batch_order="poisson")


# --- Extreme records ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "backprop", "clip"),
    [(7e18, 7e18, 1e-5), (1e38, 1e-10, 1e-5), (1e-30, 1e30, 1e-5), (3e38, 1e-40, 1e-2)],
)
def test_one_record_counts_for_the_clip_norm_at_most(activation, backprop, clip):
    """Factors that are weighted one by one round up where float32 has few digits left."""
    largest = 0.0
    for scale in np.linspace(0.5, 1.0, 20):
        model = GhostGradSampleModule(nn.Linear(2, 2), loss_reduction="sum")
        (model(torch.full((1, 2), activation * scale)) * backprop).sum().backward()
        factors = (clip / ghost_norms(trained(model))).clamp(max=1.0)
        sums = take_ghost_sums(trained(model), factors)
        norms = [float(total.double().norm()) for (total,) in sums]
        largest = max(largest, math.hypot(*norms))
    assert largest <= clip * (1 + 1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e22])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_gradients_that_are_not_finite(mode, value):
    """In Opacus they make the model NaN: everybody sees that the record was there."""
    data = records()
    data.tensors[0][3] = value
    engine, *run = make_private(
        mode, model=nn.Linear(5, 1), loss_geometry=None, noise_multiplier=1.0,
        data_loader=DataLoader(
            TensorDataset(data.tensors[0], torch.zeros(RECORDS, 1)), batch_size=BATCH
        ),
        criterion=nn.MSELoss(),
    )  # fmt: skip
    before = flat(run[0].parameters())
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 1 has .* not finite"):
        train(*run, epochs=1)
    np.testing.assert_array_equal(flat(run[0].parameters()), before)
    with pytest.raises(hsa.UnsupportedRunError, match="A refused step"):
        engine.get_epsilon(1e-5)


def test_a_layer_whose_parameters_are_not_its_own():
    """Its weight is made of them: the rule for a linear layer gives the gradients of the weight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.utils.weight_norm(nn.Linear(1, 2))
    model = GhostGradSampleModule(layer)
    model(torch.ones(3, 1)).sum().backward()
    with pytest.raises(hsa.UnsupportedRunError, match="weight_norm"):
        ghost_norms(trained(model))


def test_a_layer_without_elements():
    _, *run = make_private(
        model=nn.Sequential(
            nn.Unflatten(1, (1, 5)), nn.Linear(5, 0), nn.Linear(0, 3), nn.Flatten()
        ),
        loss_geometry=None,
    )  # fmt: skip
    before = flat(run[0].parameters())
    train(*run, epochs=1)
    assert not np.array_equal(flat(run[0].parameters()), before)
