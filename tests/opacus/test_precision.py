"""Settings of torch that round float32 as if it were coarser; norms and clips in float32."""

import contextlib
import math

import numpy as np
import pytest
import torch
from opacus_runs import layers, weights
from torch import nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import DiceSGDOptimizer, precision, sampled
from hidden_state_adapters.opacus.gradients import (
    clip_factors,
    joint_norms,
    row_norms,
    smallest_norm,
    to_precision,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@contextlib.contextmanager
def products(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


COARSE = {
    "autocast": (lambda: torch.autocast("cpu"), "Expected no autocast"),
    "tf32": (lambda: products("high"), "Expected float32 matrix products"),
    "bf16": (lambda: products("medium"), "Expected float32 matrix products"),
}
EVERYWHERE = pytest.mark.parametrize(("coarse", "text"), COARSE.values(), ids=COARSE)


@EVERYWHERE
@pytest.mark.parametrize("kind", ["the step of per-example gradients", "all of a head"])
def test_what_is_computed_in_float32_whatever_is_set(make_run, coarse, text, kind):
    """The sum of clipped gradients is a matrix product; a head is computed from its features."""
    ends = []
    for around in (contextlib.nullcontext, coarse):
        if kind == "all of a head":
            run = make_run(noise_multiplier=0.0)
            with around():
                run.epoch()
        else:
            run = make_run(loss_geometry=None, noise_multiplier=0.0)
            run.backward(next(iter(run.loader)))
            with around():
                run.optimizer.step()
        ends.append(weights(run))
    np.testing.assert_array_equal(*ends)


@EVERYWHERE
@pytest.mark.parametrize("model", [lambda: nn.Linear(5, 3), layers])
def test_a_training_pass_of_a_declared_loss_is_refused(make_run, coarse, text, model):
    """Its gradients would be off by more than any contraction forgives."""
    run = make_run(model=model(), loss_geometry=LossGeometry.smooth(1.0))
    features, _ = next(iter(run.loader))
    with coarse():
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            run.model(features)
        with torch.no_grad():
            run.model(features)


@pytest.mark.parametrize("arguments", [{}, {"optimizer_class": DiceSGDOptimizer}])
def test_gradients_under_autocast_are_clipped_in_float32(make_run, arguments):
    """Where every step counts it does not matter how coarsely a gradient was computed."""
    run = make_run(
        model=layers(), loss_geometry=None, noise_multiplier=0.0, max_grad_norm=0.01,
        sgd={"lr": 10.0, "weight_decay": 0.0}, **arguments,
    )  # fmt: skip
    before = weights(run)
    with torch.autocast("cpu"):
        run.step(next(iter(run.loader)))
    assert np.linalg.norm(weights(run) - before) <= 10 * 0.01 * (1 + 1e-5)


class Coarse(nn.Sequential):
    """A frozen layer."""

    def forward(self, features):
        with self.around():
            return super().forward(features).float()


@EVERYWHERE
def test_a_frozen_backbone_is_a_fixed_map(make_run, coarse, text):
    backbone = Coarse(nn.Linear(5, 4)).requires_grad_(False)
    backbone.around = coarse
    model = nn.Sequential(backbone, nn.Linear(4, 3))
    run = make_run(model=model, loss_geometry=LossGeometry.smooth(1.0))
    run.epoch()
    assert run.steps == 6


def test_float64_is_never_rounded(make_run, dataset):
    features, labels = dataset.tensors
    loader = {"dataset": TensorDataset(features.double(), labels)}
    loss = LossGeometry.smooth(1.0)
    run = make_run(model=nn.Linear(5, 3).double(), loader=loader, loss_geometry=loss)
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


class OnAGpu(nn.Parameter):
    """Says that it is."""

    @property
    def device(self):
        return torch.device("cuda")


def test_convolutions_on_a_gpu(monkeypatch):
    """cuDNN uses TF32 unless told otherwise."""
    params = [OnAGpu(torch.zeros(2))]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with pytest.raises(hsa.UnsupportedRunError, match=r"cudnn.allow_tf32 = False"):
        precision.check_convolutions(params)
    precision.check_convolutions([nn.Parameter(torch.zeros(2))])
    precision.check_convolutions([OnAGpu(torch.zeros(2, dtype=torch.float64))])
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    precision.check_convolutions(params)


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [({"loss_geometry": LossGeometry.smooth(1.0)}, 6), ({"loss_geometry": None}, 0)],
)
def test_convolutions_matter_to_a_declared_loss(make_run, monkeypatch, arguments, asked):
    calls = []
    monkeypatch.setattr(sampled, "check_convolutions", calls.append)
    make_run(model=layers(), **arguments).epoch()
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
    for norms in (row_norms(matrix), joint_norms([matrix])):  # the clip uses them
        np.testing.assert_allclose(norms.numpy(), 0.1 * 2000.0, rtol=1e-6)


def test_factors_without_digits_are_zero():
    factors = torch.tensor([1.0, 1e-37, 1e-40, 1e-45, 0.0], dtype=torch.float64)
    single = to_precision(factors, torch.float32)
    assert single.tolist() == [1.0, pytest.approx(1e-37), 0.0, 0.0, 0.0]
    assert to_precision(factors, torch.float64).tolist() == factors.tolist()


def test_the_clip_is_exact():
    norms = torch.tensor([0.0, 0.3, 0.5, 2.0], dtype=torch.float64)
    np.testing.assert_array_equal(clip_factors(norms, 0.5), [1.0, 1.0, 1.0, 0.25])
    factors = clip_factors(norms, 0.5, 1e-100)
    np.testing.assert_allclose(factors * norms, [0.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, -45), (torch.float64, -320)])
def test_no_vector_is_longer_than_the_clip_norm_though_squares_underflow(dtype, least):
    """Coordinates of ever smaller size: a factor from a norm that underflowed would be huge."""
    params = [nn.Parameter(torch.zeros(1, dtype=kind)) for kind in (torch.float64, dtype)]
    smallest = smallest_norm(params)  # of the coarser one
    sizes = 10.0 ** torch.linspace(least, 5, 400, dtype=torch.float64)
    vectors = (torch.ones(400, 1000, dtype=torch.float64) * sizes[:, None]).to(dtype)
    for normalised in (None, smallest):
        factors = clip_factors(joint_norms([vectors]), smallest, normalised)
        clipped = vectors.double() * factors.double()[:, None]
        # scaled before it is squared here, too
        lengths = clipped.abs().amax(dim=1) * math.sqrt(1000)
        assert torch.isfinite(lengths).all()
        assert lengths.max() <= smallest * (1 + 1e-5)
