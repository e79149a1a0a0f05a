"""The estimate of Hoelder constants: near the truth, from below; never a proof."""

import copy

import pytest
import torch
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HoelderEstimate, estimate_hoelder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def estimate(module, criterion, inputs, targets, **arguments):
    generator = torch.Generator().manual_seed(0)
    return estimate_hoelder(
        module, criterion, inputs, targets, **{"generator": generator, **arguments}
    )


class Power(nn.Module):
    """|x|**(1 + exponent) of one parameter."""

    def __init__(self, exponent):
        super().__init__()
        self.x, self.power = nn.Parameter(torch.zeros(1)), 1 + exponent

    def forward(self, record):
        return self.x.abs().pow(self.power).expand(len(record))


def output(prediction, target):
    return prediction


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_quadratic(chunk_size):
    features = torch.tensor([[1.0, 2.0], [0.5, 0.0], [-1.0, 1.0]])
    largest = 2 * 5.0  # MSELoss has no 1/2; |features|**2 = 5
    found = estimate(
        nn.Linear(2, 1, bias=False), nn.MSELoss(), features, torch.ones(3, 1),
        exponents=[1.0], chunk_size=chunk_size,
    )  # fmt: skip
    assert 0.99 * largest <= found.constants[0] <= largest * (1 + 1e-12)


@pytest.mark.parametrize("exponent", [0.3, 0.5, 0.9])
def test_a_power(exponent):
    truth = (1 + exponent) * 2 ** (1 - exponent)  # at x = -y
    found = estimate(
        Power(exponent), output, torch.zeros(1, 1), torch.zeros(1), exponents=[exponent]
    )
    assert 0.98 * truth <= found.constants[0] <= truth * (1 + 1e-12)


def test_a_power_is_not_smooth():
    finer = [
        estimate(
            Power(0.5), output, torch.zeros(1, 1), torch.zeros(1), radius=r, exponents=[1, 0.5]
        )
        for r in (1.0, 1e-4)
    ]
    assert finer[1].constants[0] > 50 * finer[0].constants[0]
    assert finer[1].constants[1] == pytest.approx(finer[0].constants[1], rel=1e-6)


def test_softmax_is_below_the_declared_smoothness():
    features = nn.functional.normalize(
        torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    )
    model = nn.Linear(4, 3)
    found = estimate(model, nn.CrossEntropyLoss(), features, torch.arange(20) % 3, exponents=[1.0])
    declared = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True).smoothness
    assert 0.2 * declared <= found.constants[0] <= declared


def test_more_centers_only_add(make_run):
    run = make_run()
    features, labels = run.loader.dataset.tensors
    start = copy.deepcopy(run.model.state_dict())  # with Opacus' prefix
    run.epoch()
    now = run.plain_model.state_dict()
    few, many = (
        estimate(run.model, run.criterion, features, labels, centers=centers, num_points=5)
        for centers in ([start], [start, now])
    )
    assert all(a <= b for a, b in zip(few.constants, many.constants, strict=True))
    assert (few.num_pairs, many.num_pairs) == (9, 18)
    with run.engine.evaluate_on_private_data(stays_private=True):
        estimate(run.model, run.criterion, features, labels, num_points=2)
    run.epoch()  # the model, its mode and its watches are as before
    assert run.steps == 12


def test_only_what_is_trained_is_moved():
    backbone = nn.Linear(2, 2, bias=False).requires_grad_(False)
    backbone.weight.copy_(torch.eye(2))
    model = nn.Sequential(backbone, nn.Linear(2, 1, bias=False))
    found = estimate(model, nn.MSELoss(), torch.eye(2), torch.ones(2, 1), exponents=[1.0])
    assert 1.9 <= found.constants[0] <= 2.0


def test_it_is_no_geometry(make_run):
    found = estimate(nn.Linear(2, 1), nn.MSELoss(), torch.eye(2), torch.ones(2, 1), num_points=3)
    assert "certifies nothing" in str(found)
    assert "private" in str(found)
    assert len(repr(found)) < 200
    assert not isinstance(found, hsa.LossGeometry)
    with pytest.raises(TypeError, match="loss_geometry to be a LossGeometry"):
        make_run(loss_geometry=found, feature_norm=None)
    with pytest.raises(TypeError, match="loss"):
        hsa.LastIterateDpEvent(
            noise_multiplier=1.0, learning_rate=0.1, clip_norm=1.0, batch_size=1, dataset_size=1,
            num_steps=1, batch_order="full", loss=found,
        )  # fmt: skip
    with pytest.raises(TypeError):
        float(found)
    assert isinstance(found, HoelderEstimate)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"exponents": []}, ValueError, "at least one exponent"),
        ({"exponents": [1.5]}, ValueError, "exponents"),
        ({"exponents": [0.0]}, ValueError, "exponents"),
        ({"radius": 0.0}, ValueError, "radius > 0"),
        ({"radius": 1e300}, ValueError, "finite gradients"),
        ({"num_points": 0}, ValueError, "num_points >= 1"),
        ({"centers": [{}]}, ValueError, "state dictionaries"),
    ],
)
def test_impossible_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        estimate(nn.Linear(2, 1), nn.MSELoss(), torch.eye(2), torch.ones(2, 1), **arguments)


def test_as_many_targets_as_records():
    with pytest.raises(ValueError, match="as many targets"):
        estimate(nn.Linear(2, 1), nn.MSELoss(), torch.eye(2), torch.ones(3, 1))
