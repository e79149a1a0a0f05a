"""Settings of torch that round float32 as if it were coarser: what is refused, and where."""

import contextlib

import pytest
import torch
from opacus import GradSampleModule
from torch import nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import DiceSGDOptimizer
from hidden_state_adapters.opacus.guards import precision

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
def test_a_step(make_run, coarse, text):
    """The sum of clipped gradients would be rounded, whatever the loss is."""
    run = make_run(loss_geometry=None)
    run.backward(next(iter(run.loader)))
    before = [p.detach().clone() for p in run.plain_model.parameters()]
    with coarse(), pytest.raises(hsa.UnsupportedRunError, match=f"step 1: {text}"):
        run.optimizer.step()
    assert all(map(torch.equal, run.plain_model.parameters(), before))
    assert run.steps == 0


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
def test_a_training_pass(make_run, coarse, text):
    """With functorch the gradients would arrive in float32, computed in bfloat16."""
    for mode in ("hooks", "functorch"):
        run = make_run(grad_sample_mode=mode, loss_geometry=None)
        features, _ = next(iter(run.loader))
        with coarse():
            with pytest.raises(hsa.UnsupportedRunError, match=text):
                run.model(features)
            with torch.no_grad():
                run.model(features)
            run.plain_model.eval()
            run.model(features)


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
    model = Backbone(coarse, around_head=True)
    model.frozen.eval()
    run = make_run(model=model, loss_geometry=None)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        run.epoch()


@EVERYWHERE
def test_dice_sgd(coarse, text):
    model = GradSampleModule(nn.Linear(3, 2))
    optimizer = DiceSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        expected_batch_size=4,
    )
    model(torch.randn(4, 3)).sum().backward()
    with coarse(), pytest.raises(hsa.UnsupportedRunError, match=f"step 1: {text}"):
        optimizer.step()
    assert optimizer.num_steps == 0


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
        with pytest.raises(hsa.UnsupportedRunError, match=PRODUCTS):
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
    monkeypatch.setattr(precision, "check_convolutions", calls.append)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    known = {
        "declared": {
            "model": model, "loss_geometry": LossGeometry.convex(1.0), "feature_norm": None,
        },
        "auto": {},
        "none": {"model": model, "loss_geometry": None},
    }[case]  # fmt: skip
    make_run(**known).epoch()
    assert len(calls) == asked
