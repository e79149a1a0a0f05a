"""Another loss than the declared one, longer features and layers that mix records raise.

See docs/threat_model.md.
"""

import pytest
import torch
from misuse import each_row
from torch import nn

import hidden_state_accountants as hsa

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


DELTA = 1e-5


# Another loss, longer features.


def sum_instead_of_mean(run):
    run.criterion = nn.CrossEntropyLoss(reduction="sum")
    run.epoch()


def criterion_on_half_of_the_batch(run):
    # Twice the gradient for these, none for the others.
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(features)[:5], labels[:5]).backward()
        run.optimizer.step()


def criterion_called_twice(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        output = run.model(features)
        (run.criterion(output, labels) - run.criterion(output.flip(0), labels)).backward()
        run.optimizer.step()


def criterion_changed(run):
    run.epoch()
    run.criterion.weight = torch.tensor([0.1, 0.1, 5.0])
    run.epoch()


def ignored_target(run):
    run.epoch()
    for features, labels in run.loader:
        run.step((features, torch.where(torch.arange(10) == 3, -100, labels)))


def target_with_mass_two(run):
    for features, _ in run.loader:
        run.step((features, torch.full((10, 3), 2 / 3)))


def scaled_loss(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        (5 * run.criterion(run.model(features), labels)).backward()
        run.optimizer.step()


def loss_divided(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        (run.criterion(run.model(features), labels) / 4).backward()
        run.optimizer.step()


def focal_loss(run):
    # The weight depends on the whole batch, so that one record changes the gradients of all.
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        loss = run.criterion(run.model(features), labels)
        (loss * (1 - torch.exp(-loss.detach()))).backward()
        run.optimizer.step()


def temperature(run):
    # M grows by 1/0.9**2, and few gradients reach their bound.
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(features) / 0.9, labels).backward()
        run.optimizer.step()


def criterion_for_the_log_only(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        output = run.model(features)
        run.criterion(output, labels)
        (0.5 * nn.functional.cross_entropy(1.4 * output, labels)).backward()
        run.optimizer.step()


def second_loss_on_the_output(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        output = run.model(features)
        (run.criterion(output, labels) + 0.1 * output.square().mean()).backward()
        run.optimizer.step()


def hook_on_the_output(change):
    def loop(run):
        for features, labels in run.loader:
            run.optimizer.zero_grad()
            output = run.model(features)
            output.register_hook(change)
            run.criterion(output, labels).backward()
            run.optimizer.step()

    return loop


def penalty_in_the_loss(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in run.model.parameters())
        (run.criterion(run.model(features), labels) + 0.5 * penalty).backward()
        run.optimizer.step()


def targets_from_the_output(run):
    for features, _ in run.loader:
        run.optimizer.zero_grad()
        output = run.model(features)
        run.criterion(output, output.softmax(dim=1)).backward()
        run.optimizer.step()


def features_too_long(run):
    for features, labels in run.loader:
        run.step((1.001 * features, labels))


def features_that_a_hook_lengthens(run):
    run.plain_model.register_forward_pre_hook(lambda head, args: (1.2 * args[0],))
    run.epoch()


def not_a_number(run):
    for features, labels in run.loader:
        run.step((features * float("nan"), labels))


# Hooks, scalers, copies, settings.


RAISES = [
    (4, sum_instead_of_mean, 'as many times as long .* as with reduction="sum"', 0),
    (4, criterion_on_half_of_the_batch, "its rows are scaled by 0 to 2: weights of records", 0),
    (4, criterion_called_twice, "step 1: the loop has gradients of another loss", 0),
    (4, criterion_changed, "step 7: .*each class is scaled by one number: class weights", 6),
    (4, ignored_target, "step 7: .*its rows are scaled by 0 to 1.11", 6),
    (4, target_with_mass_two, "step 1: .*other targets than those of the batch", 0),
    (4, scaled_loss, "its gradients are 5 times as long: a scaled or doubled loss", 0),
    (4, loss_divided, "its gradients are 0.25 times as long", 0),
    (4, focal_loss, "its gradients are 0.69.* times as long", 0),
    (4, temperature, "step 1: the loop has gradients of another loss", 0),
    (4, criterion_for_the_log_only, "step 1: the loop has gradients of another loss", 0),
    (4, second_loss_on_the_output, "step 1: the loop has gradients of another loss", 0),
    (4, hook_on_the_output(lambda gradient: 0.9 * gradient), "0.9 times as long: .*a hook", 0),
    (4, hook_on_the_output(lambda gradient: gradient.mul_(0.9)), "0.9 times as long: .*a hook", 0),
    (4, targets_from_the_output, "step 1: .*other targets than those of the batch", 0),
    (9, penalty_in_the_loss, "step 1: .*.*a penalty in the loss", 0),
    (5, features_too_long, "step 1 used features of norm 1.001", 0),
    (5, not_a_number, "step 1 used features of norm nan", 0),
    (150, features_that_a_hook_lengthens, "step 1: what went into the model", 0),
]


@each_row(("loop", "text", "steps"), RAISES)
def test_a_different_loop_raises(make_run, loop, text, steps):
    run = make_run(loop_maps_records=loop in (features_too_long, not_a_number))
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        loop(run)
    assert run.steps == steps


def binary(labels):
    return (labels > 0).float()[:, None]


@pytest.mark.parametrize(
    "criterion", [nn.MSELoss(), nn.HuberLoss(), nn.SmoothL1Loss(), nn.BCEWithLogitsLoss()], ids=str
)
def test_targets_that_would_be_broadcast(make_run, criterion):
    # Row i of the gradient would then depend on the targets of all records.
    run = make_run(model=nn.Linear(5, 1), criterion=criterion, targets=binary)
    for features, labels in run.loader:
        run.step((features, binary(labels)))
    assert run.steps == 6
    features, labels = next(iter(run.loader))
    text = "step 7: the loop has gradients of another|Target size"  # torch's own, of BCE
    with pytest.raises((hsa.UnsupportedRunError, ValueError), match=text):
        run.step((features, (labels > 0).float()))
    assert run.steps == 6


@pytest.mark.parametrize(
    "shape",
    [
        lambda output: output.squeeze(1),
        lambda output: output.view(-1),
        lambda output: output[:, 0],
        lambda output: output.float().flatten(),
    ],
)
@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.BCEWithLogitsLoss()], ids=str)
def test_row4_other_shapes_of_the_same_output(make_run, criterion, shape):
    arguments = {"criterion": criterion, "targets": binary, "max_grad_norm": 0.5}
    run = make_run(model=nn.Linear(5, 1), **arguments)
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        run.criterion(input=shape(run.model(features)), target=(labels > 0).float()).backward()
        run.optimizer.step()
    assert run.steps == 6
    features, labels = next(iter(run.loader))
    run.optimizer.zero_grad()
    run.criterion(shape(run.model(features)).roll(1, 0), (labels > 0).float()).backward()
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of another loss"):
        run.optimizer.step()


def test_the_criterion_is_left_alone_when_the_run_ends(make_run):
    criterion = nn.CrossEntropyLoss()
    run = make_run(criterion=criterion)
    run.epoch()
    make_run(engine=run.engine, model=run.model, loss_geometry=None)
    assert not criterion._forward_pre_hooks
    assert not criterion._forward_hooks
    with pytest.raises(ValueError, match="noise_multiplier"):
        make_run(criterion=criterion, noise_multiplier=-1.0)
    assert not criterion._forward_pre_hooks


class WithState(nn.Module):
    """Normalises what a layer with state computes, then a linear layer."""

    def __init__(self, state):
        super().__init__()
        self.state = state.requires_grad_(False)
        self.linear = nn.Linear(5, 3)

    def forward(self, features):
        return self.linear(nn.functional.normalize(self.state(features)))


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, features):
        if self.training:
            self.mean.data = 0.9 * self.mean + 0.1 * features.mean(dim=0)  # version unchanged
        return features - self.mean


WITH_STATE = {
    "loss_geometry": hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True),
    "criterion": nn.CrossEntropyLoss(),
}


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.BatchNorm1d(5, affine=False), "BatchNorm1d 'state' in train"),
        (
            nn.BatchNorm1d(5, track_running_stats=False),
            "BatchNorm1d 'state' without running statistics",
        ),
        (nn.BatchNorm1d(5, track_running_stats=False).eval(), "without running statistics"),
    ],
)
def test_batch_statistics_are_refused(make_run, layer, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make_run(model=WithState(layer), **WITH_STATE)


def test_batch_norm_only_evaluates(make_run):
    run = make_run(model=WithState(nn.BatchNorm1d(5).eval()), **WITH_STATE)
    run.epoch()
    run.model.train()  # would switch the batch norm back
    run.epoch()
    assert run.steps == 12
    assert not run.plain_model.state.training
    # What has no parameters is not frozen: its statistics may be meant.
    layer = nn.BatchNorm1d(5, affine=False)
    model = nn.Sequential(layer.eval(), nn.Linear(5, 3))
    run = make_run(model=model, loss_geometry=None)
    run.epoch()
    run.model.train()
    with pytest.raises(hsa.UnsupportedRunError, match=r"BatchNorm1d '0' in train\(\) mode"):
        run.epoch()


def test_state_that_training_writes_is_noticed(make_run):
    run = make_run(model=WithState(RunningMean()), **WITH_STATE)
    with pytest.raises(hsa.UnsupportedRunError, match=r"model mixes|buffer or frozen"):
        run.epoch()
    run = make_run(model=WithState(RunningMean().eval()), **WITH_STATE)
    run.epoch()
    run.plain_model.state.mean += 1.0
    with pytest.raises(hsa.UnsupportedRunError, match="buffer or frozen parameter"):
        run.engine.get_epsilon(DELTA)


def test_row5_a_backbone_that_another_engine_trained(make_run):
    backbone = nn.Linear(5, 5)
    run = make_run(model=nn.Sequential(backbone, nn.Linear(5, 3)), loss_geometry=None)
    head_only = WithState(nn.Identity())
    head_only.state = backbone.requires_grad_(False)
    make_run(model=head_only)  # nothing was trained yet
    with pytest.raises(hsa.UnsupportedRunError, match="another engine took over its model"):
        run.epoch()
    backbone.requires_grad_(True)
    run = make_run(model=nn.Sequential(backbone, nn.Linear(5, 3)), loss_geometry=None)
    run.epoch()
    first = run.engine.get_epsilon(DELTA)
    backbone.requires_grad_(False)
    again = make_run(model=head_only)  # the runs compose
    again.epoch()
    assert again.engine.get_epsilon(DELTA) > first


class WritesUncounted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, features):
        if self.training and torch.is_grad_enabled():
            self.mean.data.add_(0.1 * features.detach()[0])
        return features


def test_state_that_is_written_past_all_counts_is_noticed_before_epsilon(make_run):
    run = make_run(model=WithState(WritesUncounted()), **WITH_STATE)
    run.epoch()
    with pytest.raises(hsa.UnsupportedRunError, match="buffer or frozen parameter"):
        run.engine.get_epsilon(1e-5)
