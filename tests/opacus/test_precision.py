"""Settings of torch that round float32 as if it were coarser: what is refused, and where."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import DiceSGDOptimizer, precision, sampled

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
