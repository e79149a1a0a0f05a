"""Settings of torch that round float32 as if it were coarser: what is refused, and where."""

import contextlib
import math

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from torch import nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import DiceSGDOptimizer, precision, sampled
from hidden_state_adapters.opacus.gradients import (
    clip_factors,
    gradients_of,
    joint_norms,
    row_norms,
    smallest_norm,
    to_precision,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

AUTOCAST, PRODUCTS = "Expected no autocast", "Expected float32 matrix products"


@pytest.fixture(autouse=True)
def _usual_precision():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@contextlib.contextmanager
def products(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


COARSE = [
    (lambda: torch.autocast("cpu"), AUTOCAST),
    (lambda: products("high"), PRODUCTS),
    (lambda: products("medium"), PRODUCTS),
]
EVERYWHERE = pytest.mark.parametrize(("coarse", "text"), COARSE, ids=["autocast", "tf32", "bf16"])


@EVERYWHERE
def test_a_step_is_computed_in_float32(make_run, coarse, text):
    """Whatever is set around it: the sum of clipped gradients is a matrix product."""
    weights = []
    for around in (contextlib.nullcontext, coarse):
        run = make_run(loss_geometry=None, noise_multiplier=0.0)
        run.backward(next(iter(run.loader)))
        with around():
            run.optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in run.plain_model.parameters()]))
    assert torch.equal(*weights)


@EVERYWHERE
def test_a_head_run_computes_in_float32_whatever_the_loop_sets(make_run, coarse, text):
    """The whole loop under autocast: the same weights as without."""
    weights = []
    for around in (contextlib.nullcontext, coarse):
        run = make_run(noise_multiplier=0.0)
        with around():
            run.epoch()
        weights.append(torch.cat([p.detach().flatten() for p in run.plain_model.parameters()]))
    assert torch.equal(*weights)


@EVERYWHERE
@pytest.mark.parametrize("is_head", [True, False])
def test_a_training_pass_of_a_declared_loss(make_run, coarse, text, is_head):
    """Its gradients would be off by more than any contraction forgives."""
    deep = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model = nn.Linear(5, 3) if is_head else deep
    run = make_run(model=model, loss_geometry=LossGeometry.smooth(1.0), feature_norm=None)
    features, _ = next(iter(run.loader))
    with coarse():
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            run.model(features)
        with torch.no_grad():
            run.model(features)


@pytest.mark.parametrize("kind", ["composition", "dice"])
def test_gradients_under_autocast_are_clipped_in_float32(make_run, kind):
    """Where every step counts it does not matter how coarsely a gradient was computed."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    dice = {"optimizer_class": DiceSGDOptimizer} if kind == "dice" else {}
    run = make_run(
        model=model, loss_geometry=None, noise_multiplier=0.0, max_grad_norm=0.01, **dice
    )
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    for group in run.optimizer.param_groups:
        group.update(lr=10.0, weight_decay=0.0)
    with torch.autocast("cpu"):
        run.step(next(iter(run.loader)))
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (after - before).norm() <= 10 * 0.01 * (1 + 1e-5)


class Backbone(nn.Module):
    """A frozen layer, run as coarsely as `coarse` says, and a head."""

    def __init__(self, coarse, around_head):
        super().__init__()
        self.frozen, self.head = nn.Linear(5, 4).requires_grad_(False), nn.Linear(4, 3)
        self.coarse, self.around_head = coarse, around_head

    def forward(self, features):
        with self.coarse():
            features = nn.functional.normalize(self.frozen(features).float(), dim=1) / 1.001
            if self.around_head:
                return self.head(features)
        return self.head(features)


@EVERYWHERE
def test_a_frozen_backbone_is_a_fixed_map(make_run, coarse, text):
    model = Backbone(coarse, around_head=False)
    model.frozen.eval()
    run = make_run(model=model, loss_geometry=None)
    run.epoch()
    assert run.steps == 6


def test_float64_is_never_rounded(make_run, dataset):
    features, labels = dataset.tensors
    data = TensorDataset(features.double(), labels)
    run = make_run(model=nn.Linear(5, 3).double(), loader={"dataset": data})
    with products("medium"):
        run.epoch()
    assert run.steps == 6


@pytest.mark.parametrize("name", ["cuda", "mkldnn"])
def test_products_that_were_set_the_new_way(name):
    """Since torch 2.9 every device has a setting of its own."""
    backend = getattr(getattr(torch.backends, name), "matmul", None)
    if not hasattr(backend, "fp32_precision"):
        pytest.skip("an older torch")
    params = [nn.Parameter(torch.zeros(2))]
    backend.fp32_precision = "tf32"
    try:
        with pytest.raises(hsa.UnsupportedRunError, match="of a device by itself"):
            precision.check_arithmetic(params)
    finally:
        backend.fp32_precision = "ieee"
    precision.check_arithmetic(params)


# --- convolutions ---------------------------------------------------------------------------------


class OnAGpu(nn.Parameter):
    """Says that it is."""

    @property
    def device(self):
        return torch.device("cuda")


def test_convolutions_on_a_gpu():
    """cuDNN uses TF32 unless told otherwise."""
    params = [OnAGpu(torch.zeros(2))]
    assert torch.backends.cudnn.allow_tf32
    with pytest.raises(hsa.UnsupportedRunError, match=r"cudnn.allow_tf32 = False"):
        precision.check_convolutions(params)
    precision.check_convolutions([nn.Parameter(torch.zeros(2))])
    precision.check_convolutions([OnAGpu(torch.zeros(2, dtype=torch.float64))])
    torch.backends.cudnn.allow_tf32 = False
    precision.check_convolutions(params)


@pytest.mark.parametrize(("case", "asked"), [("declared", 6), ("auto", 0), ("none", 0)])
def test_convolutions_matter_to_a_declared_loss(make_run, monkeypatch, case, asked):
    """Of a linear head every gradient is a matrix product; without a geometry the clip is all."""
    calls = []
    monkeypatch.setattr(sampled, "check_convolutions", calls.append)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    known = {
        "declared": {
            "model": model, "loss_geometry": LossGeometry.smooth(1.0), "feature_norm": None,
        },
        "auto": {},
        "none": {"model": model, "loss_geometry": None},
    }[case]  # fmt: skip
    make_run(**known).epoch()
    assert len(calls) == asked


# --- norms and clips in float32 -------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 256, 257, 256 * 256 + 3])
def test_the_norms_of_rows(length):
    """No long sum makes them shorter than they are."""
    matrix = torch.randn(3, length, dtype=torch.float64)
    expected = np.linalg.norm(matrix.numpy(), axis=1)
    np.testing.assert_allclose(row_norms(matrix).numpy(), expected, rtol=1e-13)


@pytest.mark.parametrize("transposed", [False, True])
def test_of_long_rows_in_float32(transposed):
    """vector_norm is off by 5e-3 and 7e-3 there."""
    matrix = torch.full((2, 4_000_000), 0.1)
    if transposed:
        matrix = matrix.t().contiguous().t()
    exact = 0.1 * 2000.0
    np.testing.assert_allclose(row_norms(matrix).numpy(), exact, rtol=1e-6)


def test_not_finite():
    matrix = torch.ones(3, 1000)
    matrix[0, 999], matrix[1, 3] = torch.nan, torch.inf
    norms = row_norms(matrix)
    assert norms.isnan().tolist() == [True, False, False]
    assert norms.isfinite().tolist() == [False, False, True]


def test_the_clip_uses_them():
    layer = nn.Linear(2_000_000, 1, bias=False)
    model = GradSampleModule(layer, loss_reduction="sum")
    model(torch.full((1, 2_000_000), 0.1)).sum().backward()
    norm = float(joint_norms([gradients_of(layer.weight)]))
    assert norm == pytest.approx(0.1 * 2_000_000**0.5, rel=1e-6)


def test_factors_without_digits_are_zero():
    factors = torch.tensor([1.0, 1e-37, 1e-40, 1e-45, 0.0], dtype=torch.float64)
    single = to_precision(factors, torch.float32)
    assert single.dtype == torch.float32
    assert single.tolist() == [1.0, pytest.approx(1e-37), 0.0, 0.0, 0.0]
    assert to_precision(factors, torch.float64).tolist() == factors.tolist()


def test_the_clip_is_exact():
    norms = torch.tensor([0.0, 0.3, 0.5, 2.0], dtype=torch.float64)
    factors = clip_factors(norms, 0.5)
    np.testing.assert_array_equal(factors, [1.0, 1.0, 1.0, 0.25])
    factors = clip_factors(norms, 0.5, 1e-100)
    np.testing.assert_allclose(factors * norms, [0.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_vector_is_longer_than_the_clip_norm_though_squares_underflow(dtype):
    """Coordinates of ever smaller size: a factor from a norm that underflowed would be huge."""
    smallest = smallest_norm([nn.Parameter(torch.zeros(1, dtype=dtype))])
    exponents = (
        torch.linspace(-45, 5, 400) if dtype is torch.float32 else torch.linspace(-320, 5, 400)
    )
    vectors = (torch.ones(400, 1000, dtype=torch.float64) * 10.0 ** exponents[:, None].double()).to(
        dtype
    )
    for least in (None, smallest):
        factors = clip_factors(joint_norms([vectors]), smallest, least)
        clipped = vectors.double() * factors.double()[:, None]
        # scaled before it is squared here, too
        lengths = clipped.abs().amax(dim=1) * math.sqrt(1000)
        assert torch.isfinite(lengths).all()
        assert lengths.max() <= smallest * (1 + 1e-5)
