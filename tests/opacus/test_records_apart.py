"""One look at the first batch tells models that mix its records, but for composition."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import DiceSGDOptimizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ALONE = "the model took every record by itself"


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 4), nn.Linear(4, 3), function

    def forward(self, features):
        return self.last(self.function(self.first(features)))


MIXES = {
    "mean": lambda x: x - x.mean(0),
    "largest": lambda x: x / x.norm(dim=1).max(),
    "statistics": lambda x: functional.batch_norm(x, None, None, training=True),
    "rank": lambda x: x + x.argsort(0).float(),
    "neighbour": lambda x: x + 0.1 * x.roll(1, 0),
    "attention": lambda x: torch.softmax(x @ x.T, dim=1) @ x,
}
DOES_NOT = {
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "own norm": lambda x: x / x.norm(dim=1, keepdim=True),
    "constant": lambda x: torch.tanh(0.5 * x),
}


def a_run(make_run, function, **arguments):
    torch.manual_seed(0)
    model = Model(function)
    return make_run(model=model, feature_norm=None, **arguments)


KINDS = {
    "dice": {"loss_geometry": None, "optimizer_class": DiceSGDOptimizer},
    "declared": {"loss_geometry": hsa.LossGeometry.convex(1.0)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MIXES)
def test_models_that_mix(make_run, name, kind):
    run = a_run(make_run, MIXES[name], **KINDS[kind])
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the model mixes the records"):
        run.epoch()


@pytest.mark.parametrize("name", DOES_NOT)
def test_models_that_do_not(make_run, name):
    run = a_run(make_run, DOES_NOT[name], **KINDS["dice"])
    run.epoch()
    assert any(a.text.startswith(ALONE) for a in run.engine.assumptions)


def test_random_models_are_declared(make_run):
    run = a_run(make_run, nn.Dropout(0.5), **KINDS["dice"])
    run.epoch()
    assert not any(a.text.startswith(ALONE) for a in run.engine.assumptions)
    texts = [a.text for a in run.engine.assumptions]
    assert "the model takes every record of a batch by itself" in texts


def test_composition_is_at_the_trust_of_opacus(make_run):
    run = a_run(make_run, MIXES["mean"], loss_geometry=None)
    run.epoch()
    texts = [a.text for a in run.engine.assumptions]
    assert "the model takes every record of a batch by itself" in texts


def test_nothing_is_left_behind(make_run):
    """Random numbers, buffers and gradients are as without the look."""

    class Counts(Model):
        def __init__(self):
            super().__init__(torch.tanh)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, features):
            if not torch.is_grad_enabled():
                self.seen += 1
            return super().forward(features)

    torch.manual_seed(0)
    run = make_run(model=Counts(), feature_norm=None, **KINDS["dice"])
    batch = next(iter(run.loader))
    before = torch.get_rng_state()
    run.step(batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert not run.plain_model.seen
    run.engine.get_epsilon(1e-5)


def test_class_weights_in_a_mean_are_divided_by_those_of_the_batch(make_run):
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(hsa.UnsupportedRunError, match="Expected no class weights in a mean"):
        make_run(loss_geometry=None, criterion=criterion)
