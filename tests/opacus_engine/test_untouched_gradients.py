"""Per-example gradients that a loop writes between the backward pass and the step."""

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CHECKED = "per-example gradients as the backward pass left them"
TEXT = "written or replaced after the backward pass"


def centred_in_place(param):
    param.grad_sample -= param.grad_sample.mean(dim=0, keepdim=True)


def centred(param):
    param.grad_sample = param.grad_sample - param.grad_sample.mean(dim=0, keepdim=True)


def in_a_list(param):
    param.grad_sample = [param.grad_sample / param.grad_sample.abs().max()]


def zeros(param):
    param.grad_sample = torch.zeros(10, *param.shape)


def network():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("write", [centred_in_place, centred, in_a_list])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_gradients_that_are_written(make_run, mode, write):
    run = make_run(grad_sample_mode=mode, model=network(), loss_geometry=None)
    batches = iter(run.loader)
    run.step(next(batches))
    run.backward(next(batches))
    before = [p.detach().clone() for p in run.plain_model.parameters()]
    write(next(run.plain_model.parameters()))
    with pytest.raises(hsa.UnsupportedRunError, match=f"step 2 .*{TEXT}"):
        run.optimizer.step()
    assert all(map(torch.equal, before, run.plain_model.parameters()))
    with pytest.raises(hsa.UnsupportedRunError):
        run.engine.get_epsilon(1e-5)


def test_gradients_that_take_the_place_of_ghosts(make_run):
    run = make_run(loss_geometry=None)  # whose head is linear, so that nobody makes its gradients
    run.backward(next(iter(run.loader)))
    for param in run.plain_model.parameters():
        zeros(param)
    with pytest.raises(hsa.UnsupportedRunError, match=TEXT):
        run.optimizer.step()


def test_gradients_of_a_piece(make_run):
    run = make_run(grad_sample_mode="hooks", loss_geometry=None)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
    ) as pieces:
        batches = iter(pieces)
        run.step(next(batches))
        run.backward(next(batches))
        centred_in_place(run.plain_model.weight)
        with pytest.raises(hsa.UnsupportedRunError, match=f"step 1 .*{TEXT}"):
            run.optimizer.step()


def test_what_is_not_written(make_run):
    """Reading, gradients that nobody clips and passes between the steps change nothing."""
    run = make_run(grad_sample_mode="hooks", loss_geometry=None)
    for batch in run.loader:
        run.backward(batch)
        assert run.plain_model.weight.grad_sample.norm(dim=(1, 2)).max() > 0
        run.plain_model.weight.grad = None
        with torch.no_grad():
            run.model(batch[0])
        run.optimizer.step()
    assert run.engine.get_epsilon(1e-5) > 0
    assert CHECKED in [a.text for a in run.engine.assumptions]


def test_what_cannot_be_followed_is_not_called_checked(make_run):
    """The loss is of a tensor that the module keeps, and not of one that it returns."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, features):
            self.kept = self.head(features)

    run = make_run(model=Keeps(), loss_geometry=None, grad_sample_mode="hooks")
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        run.model(features)
        run.criterion(run.plain_model.kept, labels).backward()
        run.optimizer.step()
    assert run.engine.get_epsilon(1e-5) > 0
    assert CHECKED not in [a.text for a in run.engine.assumptions]


def test_a_loop_that_takes_its_loss_inside_of_the_model():
    """Outputs of other kinds: nothing is followed that has no gradient."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, features, labels):
            outputs = self.head(features)
            return {"loss": nn.functional.cross_entropy(outputs, labels), "outputs": [outputs, 1]}

    model = WithLoss()
    data = TensorDataset(torch.eye(5).repeat(4, 1), torch.arange(20) % 3)
    model, optimizer, loader = HiddenStatePrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=5), noise_multiplier=1.0, max_grad_norm=1.0,
        batch_order="cyclic", grad_sample_mode="hooks",
    )  # fmt: skip
    features, labels = next(iter(loader))
    model(features, labels)["loss"].backward()
    centred_in_place(model._module.head.weight)
    with pytest.raises(hsa.UnsupportedRunError, match=TEXT):
        optimizer.step()
