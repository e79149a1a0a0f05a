"""Ghost clipping: norms and sums of per-example gradients without the gradients."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from opacus.grad_sample.linear import compute_linear_norm_sample
from opacus.layers import DPLSTM, DPMultiheadAttention
from opacus_ghost import BATCH, RECORDS, flat, make_private, records, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    DiceSGDOptimizer,
    GhostGradSampleModule,
)
from hidden_state_adapters.opacus.gradients import ghost as ghost_gradients
from hidden_state_adapters.opacus.gradients.sums import ghost_norms, take_ghost_sums

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
    monkeypatch.setattr(ghost_gradients, "_KEPT", 10**6)  # made once where a chunk holds them
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


@pytest.mark.parametrize("large", [2**16, 1], ids=["in float64", "in float32 first"])
def test_norms_of_short_and_long_factors(monkeypatch, large):
    """Neither square can be represented in float32, the product can."""
    monkeypatch.setattr(ghost_gradients, "_LARGE", large)
    model = GhostGradSampleModule(nn.Linear(2, 1, bias=False), loss_reduction="sum")
    (model(torch.full((1, 2), 1e22)) * 1e-23).sum().backward()
    assert float(ghost_norms(trained(model))) == pytest.approx(0.1 * math.sqrt(2), rel=1e-5)


def test_norms_of_many_numbers_are_not_those_of_float32_where_it_has_none():
    """Of 70,000 numbers: a row whose squares vanish in float32, one of zeros, and ordinary ones."""
    model = GhostGradSampleModule(nn.Linear(7000, 1), loss_reduction="sum")
    data = torch.full((10, 7000), 0.1)
    data[0], data[1] = 1e-25, 0.0
    (model(data) * 1.0).sum().backward()
    expected = np.sqrt(1 + 7000 * np.array([1e-25, 0.0] + [0.1] * 8) ** 2)
    assert ghost_norms(trained(model)).numpy() == pytest.approx(expected, rel=1e-6)
    use = model._module.weight.grad_sample.gradients
    assert float(use.input_norms[0]) == pytest.approx(1e-25 * math.sqrt(7000), rel=1e-6, abs=0)


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


# --- Extreme records ------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [2**16, 1], ids=["in float64", "in float32 first"])
@pytest.mark.parametrize(
    ("activation", "backprop", "clip"),
    [
        (7e18, 7e18, 1e-5), (1e38, 1e-10, 1e-5), (1e-30, 1e30, 1e-5), (3e38, 1e-40, 1e-2),
        (5e5, 1e-44, 1.1e-11), (5e5, 1e-16, 1.1e-11), (1e-44, 5e5, 1.1e-11), (5e5, 5e5, 1.1e-11),
    ],
)  # fmt: skip
def test_one_record_counts_for_the_clip_norm_at_most(
    monkeypatch, activation, backprop, clip, large
):
    """Factors that are weighted one by one round up where float32 has few digits left."""
    monkeypatch.setattr(ghost_gradients, "_LARGE", large)
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
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
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
