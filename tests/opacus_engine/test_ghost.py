"""Ghost clipping in the engine: the run is that of "hooks"."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus_ghost import BATCH, flat, make_private, mlp, plain, records, steps, train
from torch import nn
from torch.utils.data import DataLoader

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    GhostGradSampleModule,
)
from hidden_state_adapters.opacus.gradients import ghost as ghost_gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# --- the engine -----------------------------------------------------------------------------------


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
    assert float(draws.std()) == pytest.approx(expected, rel=6 / math.sqrt(2 * len(draws)))


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


def write_the_batch_through_numpy(model, optimizer, criterion, batch):
    criterion(model(batch[0]), batch[1]).backward()
    batch[0].numpy()[:] *= 2  # a write that torch does not count
    optimizer.step()


def another_criterion(model, optimizer, criterion, batch):
    nn.CrossEntropyLoss(label_smoothing=0.2)(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("scale", [100.0, 1e9])
def test_the_clip_holds_for_a_batch_that_is_written_unseen(scale):
    """The step measures the inputs that it adds up, not those of the backward pass."""
    _, model, optimizer, criterion, loader = make_private(loss_geometry=None)
    before = flat(model.parameters())
    features, targets = next(iter(loader))
    criterion(model(features), targets).backward()
    features.numpy()[:] *= scale
    optimizer.step()
    moved = flat(model.parameters()) - before * (1 - 0.5 * 0.1)
    assert np.linalg.norm(moved) <= 0.5 * 0.6 * (1 + 1e-5)  # rate times clip norm


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (no_backward, "used 0 rows, expected batch_size = 10"),
        (part_of_the_batch, "7 rows, expected batch_size = 10"),
        (two_passes, "gradients of 2 batches"),
        (two_backward_passes, "2 batches|2 training passes"),
        (another_loss, "3 times as long"),
        (write_the_batch, "changed in place after the pass"),
        (write_the_batch_through_numpy, "used features of norm 2"),
        (another_criterion, "label_smoothing = 0.2"),
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


@pytest.mark.parametrize("kept", [0, 4])
def test_a_layer_that_differs_from_pass_to_pass(monkeypatch, kept):
    monkeypatch.setattr(ghost_gradients, "_KEPT", kept)  # 0: made a second time for the sums
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


def test_inputs_that_are_written_before_the_backward_pass():
    layer = nn.Linear(3, 2)
    module, inputs = GhostGradSampleModule(layer), torch.ones(4, 3)
    outputs = module(inputs)
    inputs.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_a_second_backward_pass_is_refused():
    module = GhostGradSampleModule(nn.Linear(3, 2))
    loss = module(torch.ones(4, 3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(hsa.UnsupportedRunError, match=r"one backward pass.*got a second"):
        loss.backward()


def test_a_hook_on_a_parameter_gets_the_gradient_of_the_sum():
    plain, layer, found = nn.Linear(3, 2), nn.Linear(3, 2), []
    layer.load_state_dict(plain.state_dict())
    for param in layer.parameters():
        param.register_hook(found.append)
    inputs = torch.randn(4, 5, 3)
    plain(inputs).square().sum().backward()
    GhostGradSampleModule(layer)(inputs).square().sum().backward()
    torch.testing.assert_close(
        sorted(found, key=torch.Tensor.dim), [plain.bias.grad, plain.weight.grad]
    )
    assert len(layer.weight.grad_sample) == 4


def test_linear_layers_have_no_hooks_of_opacus():
    """They cost more than a small layer does; `remove_hooks` leaves the layer as it was."""
    layer, other = nn.Linear(3, 2), nn.Conv1d(1, 1, 2)
    model = nn.Sequential(layer, other)
    module = GhostGradSampleModule(model)
    assert not layer._forward_hooks and not layer._backward_hooks  # noqa: PT018
    assert other._forward_hooks and other._backward_hooks  # noqa: PT018
    module.remove_hooks()
    assert "forward" not in vars(layer)
    assert not other._backward_hooks
