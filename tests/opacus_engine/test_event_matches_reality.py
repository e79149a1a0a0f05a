"""What the loop does differently from the event raises, or is accounted as it happened.

One case per way to get a silently wrong epsilon; rows with the same number are about the same way.
(Rows 6 and 7 are about Keras.) A loop either must raise, with a text and after a number of steps,
or returns what the event must say.
"""

import contextlib
import copy
import io
import itertools
import pickle
import subprocess
import sys

import attrs
import pytest
import torch
from opacus.schedulers import StepNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import ConcatDataset, DataLoader, Subset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import DiceSGDOptimizer, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5


# Row 1: batches that are not the declared ones.


def early_break_and_new_epoch(run):
    for batch in itertools.islice(run.loader, 4):
        run.step(batch)
    run.epoch()


def next_iter_every_step(run):
    for _ in range(2):
        run.step(next(iter(run.loader)))


def step_twice_on_one_batch(run):
    for batch in run.loader:
        run.step(batch)
        run.step(batch)


def skip_one_batch(run):
    for index, batch in enumerate(run.loader):
        if index != 2:
            run.step(batch)


def skip_the_last_batch(run):
    for _ in range(2):
        for index, batch in enumerate(run.loader):
            if index != 5:
                run.step(batch)


def own_loader(run):
    run.epoch(DataLoader(run.loader.dataset, batch_size=10))


def own_loader_after_an_epoch(run):
    run.epoch()
    run.epoch(DataLoader(run.loader.dataset, batch_size=10))


def step_after_the_loop(run):
    for batch in run.loader:
        last = batch
    run.step(last)


def own_loader_around_the_private_batches(run):
    run.epoch(DataLoader(run.loader.dataset, batch_sampler=run.loader.batch_sampler))


def copy_of_the_loader(run):
    run.epoch(copy.deepcopy(run.loader))


def two_iterators_at_once(run):
    for batch, _ in zip(run.loader, run.loader, strict=True):
        run.step(batch)


def evaluation_on_the_private_loader_mid_epoch(run):
    for batch in run.loader:
        run.step(batch)
        with torch.no_grad():
            for features, _ in run.loader:
                run.model(features)


def half_of_every_batch(run):
    for features, labels in run.loader:
        run.step((features[:5], labels[:5]))


def batch_twice_in_one_step(run):
    for features, labels in run.loader:
        run.step((torch.cat([features, features]), torch.cat([labels, labels])))


def gradient_accumulation(run):
    for index, (features, labels) in enumerate(run.loader):
        run.criterion(run.model(features), labels).backward()
        if index % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()


def no_zero_grad(run):
    for features, labels in run.loader:
        run.criterion(run.model(features), labels).backward()
        run.optimizer.step()


def two_passes_in_one_step(run):
    # Row i of the gradient then mixes two records.
    features, labels = next(iter(run.loader))
    flipped = run.criterion(run.model(features.flip(0)), labels.flip(0))
    (flipped + run.criterion(run.model(features), labels)).backward()
    run.optimizer.step()


def layer_by_itself(run):
    first, _ = run.loader.dataset.tensors
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        output = run.model(features) + 0.1 * run.plain_model[1](first[:10])
        run.criterion(output, labels).backward()
        run.optimizer.step()


def planted_sum(run):
    for batch in run.loader:
        run.backward(batch)
        for p in run.optimizer.params:
            p.summed_grad = torch.full_like(p, 100.0)
        run.optimizer.step()


def sum_changed_between_pieces(run):
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as pieces:
        for batch in pieces:
            run.step(batch)
            if not run.steps:
                run.optimizer.params[0].summed_grad.mul_(100.0)


def memory_manager_left_early(run):
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
        ) as pieces:
            for batch in itertools.islice(pieces, 6):  # two logical batches
                run.step(batch)


def memory_manager_piece_skipped(run):
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as pieces:
        for index, batch in enumerate(pieces):
            if index != 2:
                run.step(batch)


def batches_fetched_in_advance(run):
    run.epoch(list(run.loader))


def one_batch_fetched_in_advance(run):
    batches = iter(run.loader)
    ahead = next(batches)
    for batch in batches:
        run.step(ahead)
        ahead = batch


def cycle_over_the_loader(run):
    for batch in itertools.islice(itertools.cycle(run.loader), 12):  # keeps the first epoch
        run.step(batch)


def backward_twice(run):
    for features, labels in run.loader:
        loss = run.criterion(run.model(features), labels)
        loss.backward(retain_graph=True)
        with contextlib.suppress(IndexError):  # Opacus has no activations left
            loss.backward()
        run.optimizer.step()


# Row 2: stops and schedules that look at the data.


def plateau(run):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0)
    for batch in run.loader:
        run.step(batch)
        scheduler.step(1.0)  # a loss that does not improve


def more_steps_than_declared(run):
    run.epoch()
    run.epoch()


def best_checkpoint_trained_on(run):
    run.epoch()
    best = copy.deepcopy(run.plain_model.state_dict())
    run.engine.release()
    run.epoch()
    run.plain_model.load_state_dict(best)
    run.epoch()


# Row 3: the update rule.


def second_group_without_decay(run):
    group = run.optimizer.param_groups[0]
    bias = group["params"].pop()
    run.optimizer.param_groups.append({**group, "params": [bias], "weight_decay": 0.0})
    run.epoch()


def momentum_mid_run(run):
    run.epoch()
    run.optimizer.param_groups[0]["momentum"] = 0.9
    run.epoch()


def maximize_mid_run(run):
    run.epoch()
    run.optimizer.param_groups[0]["maximize"] = True
    run.epoch()


def other_base_optimizer(run):
    run.optimizer.original_optimizer = torch.optim.Adam(run.model.parameters())
    run.epoch()


def same_kind_of_base_optimizer(run):
    run.optimizer.original_optimizer = torch.optim.SGD(run.model.parameters(), lr=0.5)
    run.epoch()


def step_hook_inside_sgd(run):
    run.optimizer.original_optimizer.register_step_pre_hook(lambda *_: None)
    run.epoch()


# Rows 4 and 5: another loss, longer features.


def sum_instead_of_mean(run):
    run.criterion = nn.CrossEntropyLoss(reduction="sum")
    run.epoch()


def loss_without_the_criterion(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        nn.functional.cross_entropy(run.model(features), labels).backward()
        run.optimizer.step()


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


def criterion_in_eval_mode(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        output = run.model(features)
        run.model.eval()
        loss = run.criterion(output, labels)
        run.model.train()
        loss.backward()
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


def targets_from_the_output(run):
    for features, _ in run.loader:
        run.optimizer.zero_grad()
        output = run.model(features)
        run.criterion(output, output.softmax(dim=1)).backward()
        run.optimizer.step()


def features_too_long(run):
    for features, labels in run.loader:
        run.step((1.001 * features, labels))


def not_a_number(run):
    for features, labels in run.loader:
        run.step((features * float("nan"), labels))


# Rows 10 and 11: precision and the set of parameters.


def parameters_to_bfloat16(run):
    run.epoch()
    run.model.to(torch.bfloat16)
    for features, labels in run.loader:
        run.step((features.to(torch.bfloat16), labels))


def autocast(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = run.model(features)
        run.criterion(output.float(), labels).backward()
        run.optimizer.step()


def freeze_mid_run(run):
    run.epoch()
    run.plain_model.bias.requires_grad_(False)
    run.epoch()


def new_parameter_mid_run(run):
    run.epoch()
    run.plain_model.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    run.epoch()


def add_param_group(run):
    run.epoch()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    run.epoch()


def load_model_mid_run(run):
    run.epoch()
    state = {k: torch.zeros_like(v) for k, v in run.plain_model.state_dict().items()}
    run.plain_model.load_state_dict(state)
    run.epoch()


def write_through_data(run):
    run.epoch()
    run.plain_model.weight.data.mul_(0.5)  # does not raise the tensor's version counter
    run.epoch()


def averaged_weights_kept(run):
    average = AveragedModel(run.plain_model)
    run.epoch()
    average.update_parameters(run.plain_model)
    run.epoch()
    average.update_parameters(run.plain_model)
    run.plain_model.load_state_dict(average.module.state_dict())
    run.epoch()


def sharpness_aware(run):
    # The gradient at perturbed parameters, which are restored bit by bit before the step.
    for batch in run.loader:
        before = copy.deepcopy(run.plain_model.state_dict())
        if run.steps:
            with torch.no_grad():
                for p in run.plain_model.parameters():
                    p.add_(0.3 * p.grad)
        run.backward(batch)
        run.plain_model.load_state_dict(before)
        run.optimizer.step()


def buffer_that_counts(run):
    run.epoch()
    run.plain_model.register_buffer("mean", torch.zeros(5))
    run.epoch()


def base_step_directly(run):
    for batch in run.loader:
        run.step(batch)
        run.optimizer.original_optimizer.step()


def pre_step_and_base_step(run):
    for batch in run.loader:
        run.backward(batch)
        run.optimizer.pre_step()
        run.optimizer.original_optimizer.step()


# Row 14: hooks, scalers, copies, settings.


def second_step_hook(run):
    run.optimizer.attach_step_hook(lambda optimizer: None)
    run.epoch()


def step_hook_overwritten(run):
    run.epoch()
    run.optimizer.step_hook = lambda optimizer: None
    run.epoch()


def hook_on_all_optimizers(run):
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        run.epoch()
    finally:
        handle.remove()


def another_generator(run):
    for batch in run.loader:
        run.optimizer.generator = torch.Generator().manual_seed(0)
        run.step(batch)


def seeded_every_epoch(run):
    for _ in range(2):
        torch.manual_seed(0)
        run.epoch()


def grad_scaler(run):
    scaler = torch.amp.GradScaler("cpu")
    for batch in run.loader:
        run.optimizer.zero_grad()
        features, labels = batch
        scaler.scale(run.criterion(run.model(features), labels)).backward()
        scaler.step(run.optimizer)
        scaler.update()


def deep_copy_of_the_optimizer(run):
    copy.deepcopy(run.optimizer)


def pickle_of_the_optimizer(run):
    torch.save(run.optimizer, io.BytesIO())


def step_recorded_twice(run):
    run.epoch()
    run.engine.accountant.recorders[0].step(
        noise_multiplier=2.0, learning_rate=0.5, clip_norm=2.1, batch_index=0, batch_rows=10
    )
    run.epoch()


def divisor_changed(run):
    run.epoch()
    run.optimizer.expected_batch_size = 5
    run.epoch()


def no_noise_for_a_piece(run):
    # The clip norm changes between two pieces of one logical batch.
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as pieces:
        for index, batch in enumerate(pieces):
            run.optimizer.max_grad_norm = 2.1 + index % 2
            run.step(batch)


def clip_norm_into_the_margin(run):
    run.epoch()
    run.optimizer.max_grad_norm = run.optimizer.context.lipschitz
    run.epoch()


def eval_mode(run):
    run.model.eval()
    run.epoch()


def exception_swallowed(run):
    for features, labels in run.loader:
        try:
            run.step((2 * features, labels))
        except hsa.UnsupportedRunError:
            run.step((features, labels))


def interrupted_step(run):
    run.epoch()

    def fail(*args):
        raise KeyboardInterrupt

    run.optimizer.original_optimizer.step = fail
    try:
        run.epoch()
    except KeyboardInterrupt:
        del run.optimizer.original_optimizer.step
    run.engine.get_epsilon(DELTA)


def on_another_engine(run):
    return HiddenStatePrivacyEngine().make_private(
        module=run.model,
        optimizer=run.optimizer,
        data_loader=run.loader,
        noise_multiplier=1.0,
        max_grad_norm=2.1,
    )


def new_engine_for_a_trained_model(run):
    run.epoch()
    on_another_engine(run)  # a notebook's cell, run again


def two_engines_in_turn(run):
    own = (run.optimizer, run.loader)
    _, run.optimizer, run.loader = on_another_engine(run)
    run.epoch()
    run.optimizer, run.loader = own
    run.epoch()


def piece_of_another_batch(run):
    batches = iter(run.loader)
    features, labels = next(batches)
    run.optimizer.signal_skip_step(True)
    run.optimizer.signal_skip_step(False)
    run.step((features[:5], labels[:5]))
    features, labels = next(batches)
    run.step((features[5:], labels[5:]))


def no_number_as_noise(run):
    run.epoch()
    run.optimizer.noise_multiplier = float("nan")
    run.epoch()


def old_run_goes_on(run):
    run.epoch()
    run.engine.make_private(
        module=run.model,
        optimizer=run.optimizer,
        data_loader=run.loader,
        noise_multiplier=1.0,
        max_grad_norm=2.1,
    )
    run.epoch()


RAISES = [
    (1, early_break_and_new_epoch, "step 5 used batch 0, expected batch 4", 4),
    (1, next_iter_every_step, "step 2 used batch 0, expected batch 1", 1),
    (1, step_twice_on_one_batch, "step 2 used no new batch, expected batch 1", 1),
    (1, skip_one_batch, "step 3 used batch 3, expected batch 2", 2),
    (1, skip_the_last_batch, "step 6 used batch 0, expected batch 5", 5),
    (1, own_loader, "step 1 used no new batch, expected batch 0", 0),
    (1, own_loader_after_an_epoch, "step 7 used no new batch, expected batch 0", 6),
    (1, step_after_the_loop, "step 1 used no new batch, expected batch 0", 0),
    (1, own_loader_around_the_private_batches, "step 1 used no new batch, expected batch 0", 0),
    (1, copy_of_the_loader, "step 1 used no new batch, expected batch 0", 0),
    (1, two_iterators_at_once, "second iterator", 0),
    (1, evaluation_on_the_private_loader_mid_epoch, "second iterator", 1),
    (1, half_of_every_batch, "step 1 used 5 rows, expected batch_size = 10", 0),
    (1, batch_twice_in_one_step, "step 1 used 20 rows, expected batch_size = 10", 0),
    (1, gradient_accumulation, "step 1 used batch 1, expected batch 0", 0),
    (1, no_zero_grad, "step 2: got the gradients of 2 batches, expected 1", 1),
    (1, two_passes_in_one_step, "step 1 follows 2 training passes", 0),
    (1, planted_sum, "step 1 starts with a sum of clipped gradients", 0),
    (1, sum_changed_between_pieces, "step 1 starts with a sum of clipped gradients", 0),
    (1, memory_manager_left_early, "step 3 used batch 0, expected batch 2", 2),
    (1, memory_manager_piece_skipped, "step 2: a piece of a batch", 1),
    (1, batches_fetched_in_advance, "step 1 used no new batch, expected batch 0", 0),
    (1, one_batch_fetched_in_advance, "step 1 used batch 1, expected batch 0", 0),
    (1, cycle_over_the_loader, "step 7 used no new batch, expected batch 0", 6),
    (1, backward_twice, "step 1 has gradients of another loss", 0),
    (2, plateau, "step 3 uses learning rate 0.05, expected 0.5", 2),
    (2, more_steps_than_declared, "Expected num_steps = 6 steps", 6),
    (2, best_checkpoint_trained_on, "changed outside the private optimizer after step 12", 12),
    (3, second_group_without_decay, "weight_decay = 0.1 in group 0 and 0.0 in group 1", 0),
    (3, momentum_mid_run, "momentum = 0, got 0.9", 6),
    (3, maximize_mid_run, "maximize = False, got True", 6),
    (3, other_base_optimizer, "another original_optimizer", 0),
    (3, same_kind_of_base_optimizer, "another original_optimizer", 0),
    (3, step_hook_inside_sgd, "without step hooks", 0),
    (4, sum_instead_of_mean, "step 1: the criterion passed to make_private was not called", 0),
    (
        4,
        loss_without_the_criterion,
        "step 1: the criterion passed to make_private was not called",
        0,
    ),
    (
        4,
        criterion_on_half_of_the_batch,
        "the last one on 5 rows, expected 1 call on all 10 rows",
        0,
    ),
    (4, criterion_called_twice, "step 1 follows 2 calls of the criterion", 0),
    (4, criterion_in_eval_mode, "step 1: the criterion passed to make_private was not called", 0),
    (4, criterion_changed, "Expected the criterion as it was at make_private", 6),
    (4, ignored_target, "step 7 has a target that equals ignore_index = -100", 6),
    (4, target_with_mass_two, "step 1 has a target .* no vector of probabilities", 0),
    (4, scaled_loss, "step 1 has a per-example gradient of norm", 0),
    (4, loss_divided, "step 1 has gradients of another loss", 0),
    (4, focal_loss, "step 1 has gradients of another loss", 0),
    (4, temperature, "step 1: the criterion was called with something else", 0),
    (4, criterion_for_the_log_only, "step 1 has gradients of another loss", 0),
    (4, second_loss_on_the_output, "step 1 has gradients of another loss", 0),
    (4, targets_from_the_output, "step 1 has gradients of another loss", 0),
    (5, features_too_long, "step 1 used features of norm 1.001", 0),
    (5, not_a_number, "step 1 used features of norm nan", 0),
    (10, parameters_to_bfloat16, "float32 or float64, got torch.bfloat16", 6),
    (10, autocast, "Expected no autocast", 0),
    (11, freeze_mid_run, r"step 7 trains \['weight'\]", 6),
    (11, add_param_group, "step 7 optimizes 3 parameters, expected the 2", None),
    (11, load_model_mid_run, "changed outside the private optimizer after step 6", 6),
    (11, write_through_data, "changed outside the private optimizer after step 6", 6),
    (11, averaged_weights_kept, "changed outside the private optimizer after step 12", 12),
    (11, sharpness_aware, "step 2 has gradients at other parameters", 1),
    (11, buffer_that_counts, "A buffer of the module was changed during the run", 6),
    (11, base_step_directly, "changed outside the private optimizer after step 1", 1),
    (11, pre_step_and_base_step, "step 1 used batch 1, expected batch 0", 0),
    (14, second_step_hook, "single slot", 0),
    (14, step_hook_overwritten, "step 7 has another step_hook", 6),
    (14, hook_on_all_optimizers, "Expected no step hooks for all optimizers", 0),
    (14, another_generator, "step 1 uses .*'generator'", 0),
    (14, seeded_every_epoch, "step 7: the noise generator is in a state", 6),
    (14, grad_scaler, "GradScaler", 0),
    (14, deep_copy_of_the_optimizer, "cannot be copied", 0),
    (14, pickle_of_the_optimizer, "cannot be copied", 0),
    (14, step_recorded_twice, "took 6 steps, but 7 are recorded", 7),
    (14, divisor_changed, "step 7 uses .*'expected_batch_size': 5", 6),
    (14, no_noise_for_a_piece, "step 1 clips to 2.1 and then uses 3.1", 0),
    (14, clip_norm_into_the_margin, r"max_grad_norm >= 2.00000", 6),
    (14, exception_swallowed, "An earlier step of this run was refused", 0),
    (14, interrupted_step, "step 7 was interrupted", None),
    (14, two_engines_in_turn, "step 1 follows 7 training passes", 0),
    (11, new_engine_for_a_trained_model, "no other engine has trained, got one with 6 steps", 6),
    (14, piece_of_another_batch, "step 1: a piece of a batch was delivered", 0),
    (14, old_run_goes_on, "This run ended when make_private was called again", None),
]

ARGUMENTS = {
    plateau: {"learning_rate_schedule": 0.5},
    more_steps_than_declared: {"num_steps": 6},
}


@pytest.mark.parametrize(
    ("loop", "text", "steps"),
    [case[1:] for case in RAISES],
    ids=[f"row{case[0]}-{case[1].__name__}" for case in RAISES],
)
def test_a_different_loop_raises(make_run, loop, text, steps):
    run = make_run(**ARGUMENTS.get(loop, {}))
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        loop(run)
    if steps is not None:
        assert run.steps == steps


def test_no_epsilon_after_a_refused_step(make_run):
    """Where a run stops must not depend on the data, and a refusal may."""
    run = make_run()
    run.epoch()
    before = run.engine.get_epsilon(1e-5)
    features, labels = next(iter(run.loader))
    with pytest.raises(hsa.UnsupportedRunError):
        run.step((9 * features, labels))  # beyond feature_norm
    assert before > 0
    with pytest.raises(hsa.UnsupportedRunError, match="A refused step ended this run"):
        run.engine.get_epsilon(1e-5)


@pytest.mark.parametrize(
    "criterion", [nn.MSELoss(), nn.HuberLoss(), nn.SmoothL1Loss(), nn.BCEWithLogitsLoss()], ids=str
)
def test_targets_that_would_be_broadcast(make_run, criterion):
    # Row i of the gradient would then depend on the targets of all records.
    run = make_run(model=nn.Linear(5, 1), criterion=criterion)
    for features, labels in run.loader:
        run.step((features, (labels > 0).float().reshape(10, 1)))
    assert run.steps == 6
    features, labels = next(iter(run.loader))
    with pytest.raises(
        hsa.UnsupportedRunError, match=r"shape \(10, 1\) of the model's output, got \(10,\)"
    ):
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
    run = make_run(model=nn.Linear(5, 1), criterion=criterion, max_grad_norm=0.5)
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        run.criterion(input=shape(run.model(features)), target=(labels > 0).float()).backward()
        run.optimizer.step()
    assert run.steps == 6
    features, labels = next(iter(run.loader))
    run.optimizer.zero_grad()
    run.criterion(shape(run.model(features)).flip(0), (labels > 0).float()).backward()
    with pytest.raises(hsa.UnsupportedRunError, match="something else than the output"):
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


def test_impossible_values_are_not_recorded(make_run):
    run = make_run()
    with pytest.raises((ValueError, RuntimeError), match="nan"):
        no_number_as_noise(run)
    assert run.steps == 6
    assert bool(torch.isfinite(run.plain_model.weight).all())


def test_a_layer_that_is_called_by_itself(make_run):
    run = make_run(model=nn.Sequential(nn.Flatten(), nn.Linear(5, 3)))
    with pytest.raises(hsa.UnsupportedRunError, match="step 1 follows 2 training passes"):
        layer_by_itself(run)


@pytest.mark.parametrize("loop", [eval_mode, new_parameter_mid_run])
def test_a_loop_that_opacus_refuses(make_run, loop):
    run = make_run()
    with pytest.raises((ValueError, AttributeError)):
        loop(run)
    assert run.steps in (0, 6)


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
        (nn.BatchNorm1d(5), "BatchNorm1d 'state' in train"),
        (nn.BatchNorm1d(5, affine=False), "BatchNorm1d 'state' in train"),
        (nn.BatchNorm1d(5, track_running_stats=False).eval(), "without running statistics"),
    ],
)
def test_batch_statistics_are_refused(make_run, layer, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make_run(model=WithState(layer), **WITH_STATE)


def test_batch_norm_may_only_evaluate(make_run):
    run = make_run(model=WithState(nn.BatchNorm1d(5).eval()), **WITH_STATE)
    run.epoch()
    run.model.train()  # switches the batch norm back
    with pytest.raises(hsa.UnsupportedRunError, match=r"Call \.eval\(\) on this part"):
        run.epoch()
    assert run.steps == 6


def test_state_that_training_writes_is_noticed(make_run):
    run = make_run(model=WithState(RunningMean()), **WITH_STATE)
    with pytest.raises(hsa.UnsupportedRunError, match="A buffer of the module was changed"):
        run.epoch()
    assert run.steps == 0
    run = make_run(model=WithState(RunningMean().eval()), **WITH_STATE)
    run.epoch()
    run.plain_model.state.mean += 1.0
    with pytest.raises(hsa.UnsupportedRunError, match="A buffer of the module was changed"):
        run.engine.get_epsilon(DELTA)


def test_a_parameter_outside_the_forward_pass_is_noticed(make_run):
    run = make_run(model=nn.Sequential(nn.Identity(), nn.Linear(5, 3)))
    run.epoch()
    run.plain_model[0].register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 7 trains \['0.extra', '1.weight'"):
        run.epoch()


def test_row5_a_backbone_that_another_engine_trained(make_run):
    backbone = nn.Linear(5, 5)
    run = make_run(model=nn.Sequential(backbone, nn.Linear(5, 3)), loss_geometry=None)
    head_only = WithState(nn.Identity())
    head_only.state = backbone.requires_grad_(False)
    make_run(model=head_only)  # nothing was trained yet
    backbone.requires_grad_(True)
    run.epoch()
    backbone.requires_grad_(False)
    with pytest.raises(hsa.UnsupportedRunError, match="no other engine has trained"):
        make_run(model=head_only)


def test_a_frozen_parameter_with_an_old_gradient_is_noticed(make_run):
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model(torch.ones(1, 5)).sum().backward()
    model[0].requires_grad_(False)
    loss = hsa.LossGeometry.softmax_cross_entropy(10.0, bias=True)
    run = make_run(model=model, loss_geometry=loss, feature_norm=10.0)
    features, labels = next(iter(run.loader))
    run.criterion(run.model(features), labels).backward()  # zero_grad would clear the old gradient
    with pytest.raises(hsa.UnsupportedRunError, match="step 1 would move a frozen parameter"):
        run.optimizer.step()


def test_memory_manager_tail_with_workers(make_run):
    run = make_run(loader={"num_workers": 1, "prefetch_factor": 4})
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as pieces:
        for index, batch in enumerate(pieces):
            if index != 9:  # the workers are already done with the epoch
                run.step(batch)
    with pytest.raises(hsa.UnsupportedRunError, match=r"announced \(1 are waiting\)"):
        run.engine.get_epsilon(DELTA)
    next(iter(run.loader))  # a new pass does not hide it
    with pytest.raises(hsa.UnsupportedRunError, match=r"announced \(0 are waiting\)"):
        run.engine.get_epsilon(DELTA)
    with pytest.raises(hsa.UnsupportedRunError, match="step 6: a piece of a batch"):
        run.epoch()


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_workers_do_not_move_the_cursor(make_run, workers):
    run = make_run(loader={"num_workers": workers})
    run.epoch()
    for batch in itertools.islice(run.loader, 2):
        run.step(batch)
    with pytest.raises(hsa.UnsupportedRunError, match="step 9 used batch 0, expected batch 2"):
        run.epoch()


def test_memory_manager_with_workers_left_early(make_run):
    run = make_run(loader={"num_workers": 2})
    with pytest.raises(hsa.UnsupportedRunError, match="step 3 used batch 0, expected batch 2"):
        memory_manager_left_early(run)


# Loops that differ in a way that the event can express.


def plain(run):
    run.epoch()
    run.epoch()
    return {"num_steps": 12}


def learning_rate_schedule(run):
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 4, 0.5)
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    return {"num_steps": 6, "learning_rate": [0.5] * 4 + [0.25] * 2}


def decay_changed(run):
    run.epoch()
    run.optimizer.param_groups[0]["weight_decay"] = 0.0
    run.epoch()
    return {"num_steps": 12, "weight_decay": [0.1] * 6 + [0.0] * 6}


def noise_changed(run):
    run.epoch()
    run.optimizer.noise_multiplier = 1.0
    run.epoch()
    return {"num_steps": 12, "noise_multiplier": [2.0] * 6 + [1.0] * 6}


def noise_changed_between_backward_and_step(run):
    for batch in run.loader:
        run.backward(batch)
        run.optimizer.noise_multiplier = 1.0
        run.optimizer.step()
        run.optimizer.noise_multiplier = 100.0  # after the noise was drawn
    return {"num_steps": 6, "noise_multiplier": 1.0}


def clip_norm_changed(run):
    run.epoch()
    run.optimizer.max_grad_norm = 1.0
    run.epoch()
    return {"num_steps": 12, "clip_norm": [2.1] * 6 + [1.0] * 6}


def memory_manager(run):
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
        ) as pieces:
            assert len(pieces) == 15
            run.epoch(pieces)
    return {"num_steps": 12}


def manual_pieces(run):
    for features, labels in run.loader:
        for rows in (slice(0, 3), slice(3, 10)):
            run.optimizer.signal_skip_step(rows.start == 0)
            run.step((features[rows], labels[rows]))
    return {"num_steps": 6}


def learning_rate_as_tensor(run):
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    run.epoch()
    return {"num_steps": 6}


def closure(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()

        def evaluate(features=features, labels=labels):
            loss = run.criterion(run.model(features), labels)
            loss.backward()
            return loss

        assert run.optimizer.step(evaluate) is None  # as in Opacus
    return {"num_steps": 6}


def evaluation_in_between(run):
    for batch in run.loader:
        run.step(batch)
        run.model.eval()
        run.model(batch[0])
        run.model.train()
        with torch.no_grad():
            run.model(batch[0])
    with torch.no_grad():
        for features, _ in run.loader:  # between epochs the private loader is free
            run.model(features)
    run.epoch()
    return {"num_steps": 12}


def weights_swapped_and_restored(run):
    for batch in run.loader:
        run.step(batch)
        state = copy.deepcopy(run.plain_model.state_dict())
        run.plain_model.load_state_dict({k: 0 * v for k, v in state.items()})
        run.plain_model.load_state_dict(state)
    return {"num_steps": 6}


def losses_for_the_log(run):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        output = run.model(features)
        run.criterion(output.detach(), labels)
        with torch.no_grad():
            run.criterion(output, labels)
        run.criterion(output, labels).backward()
        run.optimizer.step()
        run.model.eval()
        run.criterion(run.model(features[:2]), labels[:2])
        run.model.train()
    return {"num_steps": 6}


def criterion_shared_with_another_run(run):
    model = nn.Linear(5, 3)
    for batch in run.loader:
        run.step(batch)
        run.criterion(model(batch[0]), batch[1]).backward()
    return {"num_steps": 6}


def targets_as_probabilities(run):
    for features, labels in run.loader:
        run.step((features, nn.functional.one_hot(labels, 3) * 0.7 + 0.1))
    return {"num_steps": 6}


def copies_of_model_and_criterion(run):
    for batch in run.loader:
        run.step(batch)
        model, criterion = copy.deepcopy((run.plain_model, run.criterion))
        criterion(model.eval()(batch[0][:3]), batch[1][:3])
        torch.save((run.plain_model, run.criterion), io.BytesIO())
    return {"num_steps": 6}


def releases(run):
    run.epoch()
    run.engine.release()
    run.engine.release()
    run.epoch()
    return {"num_steps": 12, "release_steps": (6,)}


def looked_at_one_batch_first(run):
    next(iter(run.loader))
    run.epoch()
    return {"num_steps": 6}


def penalty_in_the_loss(run):
    # Per-example gradients do not hold it: neither the update nor the event changes.
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in run.model.parameters())
        (run.criterion(run.model(features), labels) + 0.5 * penalty).backward()
        run.optimizer.step()
    return {"num_steps": 6, "weight_decay": 0.1}


def gradients_clipped_by_hand(run):
    for batch in run.loader:
        run.backward(batch)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)  # .grad is written anew
        run.optimizer.step()
    return {"num_steps": 6}


def noise_scheduler_of_opacus(run):
    scheduler = StepNoise(run.optimizer, step_size=1, gamma=0.5)
    for batch in itertools.islice(run.loader, 2):
        run.step(batch)
        scheduler.step()
    return {"num_steps": 2, "noise_multiplier": [2.0, 1.0]}


def compiled_model(run):
    model = torch.compile(run.model, backend="eager")
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        run.criterion(model(features), labels).backward()
        run.optimizer.step()
    return {"num_steps": 6}


def averaged_weights_on_the_side(run):
    # Nobody may see the average unless every iterate in it was released.
    average = AveragedModel(run.plain_model)
    for batch in run.loader:
        run.step(batch)
        run.engine.release()
        average.update_parameters(run.plain_model)
    return {"num_steps": 6, "release_steps": range(1, 6)}


ACCOUNTED = [
    (1, plain),
    (2, learning_rate_schedule),
    (3, decay_changed),
    (14, noise_changed),
    (14, noise_changed_between_backward_and_step),
    (14, clip_norm_changed),
    (1, memory_manager),
    (1, manual_pieces),
    (3, learning_rate_as_tensor),
    (14, closure),
    (1, evaluation_in_between),
    (11, weights_swapped_and_restored),
    (4, losses_for_the_log),
    (4, criterion_shared_with_another_run),
    (4, targets_as_probabilities),
    (11, copies_of_model_and_criterion),
    (2, releases),
    (1, looked_at_one_batch_first),
    (9, penalty_in_the_loss),
    (14, gradients_clipped_by_hand),
    (14, noise_scheduler_of_opacus),
    (11, compiled_model),
    (11, averaged_weights_on_the_side),
]


@pytest.mark.parametrize(
    "loop",
    [loop for _, loop in ACCOUNTED],
    ids=[f"row{row}-{loop.__name__}" for row, loop in ACCOUNTED],
)
def test_what_happened_is_accounted(make_run, loop):
    run = make_run()
    declared = hsa.LastIterateDpEvent(
        noise_multiplier=2.0,
        learning_rate=0.5,
        clip_norm=2.1,
        batch_size=10,
        dataset_size=60,
        num_steps=1,
        batch_order="cyclic",
        loss=hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True),
        weight_decay=0.1,
    )
    event = attrs.evolve(declared, **loop(run))
    assert run.engine.privacy_event == event
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)
    assert run.engine.get_epsilon(delta=DELTA) == pytest.approx(expected, rel=1e-12)


def test_epsilon_is_refused_for_a_model_that_is_not_the_last_iterate(make_run):
    run = make_run()
    run.epoch()
    best = copy.deepcopy(run.plain_model.state_dict())
    run.epoch()
    run.plain_model.load_state_dict(best)  # best-checkpoint selection
    for ask in (run.engine.get_epsilon, run.engine.report):
        with pytest.raises(hsa.UnsupportedRunError, match="after step 12"):
            ask(DELTA)
    with pytest.raises(hsa.UnsupportedRunError, match="after step 12"):
        run.engine.release()


def test_row2_selection_among_released_iterates(make_run):
    """Every candidate is released: what public data select is post-processing."""
    run = make_run()
    candidates = []
    for _ in range(3):
        run.epoch()
        run.engine.release()
        candidates.append(copy.deepcopy(run.plain_model.state_dict()))
    epsilon = run.engine.get_epsilon(DELTA)
    assert run.engine.privacy_event.release_steps == (6, 12)
    last_only = make_run()
    for _ in range(3):
        last_only.epoch()
    assert epsilon > last_only.engine.get_epsilon(DELTA)
    run.plain_model.load_state_dict(candidates[0])
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        run.engine.get_epsilon(DELTA)  # so ask before


def test_row2_early_stopping_on_public_data_costs_the_whole_plan(make_run):
    """Stopping is post-processing of the run that goes on to its end and releases every epoch."""
    run = make_run(num_steps=18)
    run.epoch()
    run.engine.release()
    planned = attrs.evolve(run.engine.privacy_event, num_steps=18, release_steps=(6, 12))
    whole = make_run(num_steps=18)
    for _ in range(3):
        whole.epoch()
        whole.engine.release()
    assert whole.engine.privacy_event == planned
    assert any("training ends after step 6 of the 18" in a.text for a in run.engine.assumptions)


@pytest.mark.parametrize("order", ["reshuffled", "without_replacement", "poisson"])
def test_row8_an_order_from_a_public_seed(make_run, order):
    with pytest.raises(hsa.UnsupportedRunError, match="knows which steps used a record"):
        make_run(batch_order=order, order_seed=0)


def test_row8_a_shuffle_from_a_public_seed_is_cyclic(make_run):
    run = make_run(batch_order="shuffled_once", order_seed=0)
    run.epoch()
    assert run.engine.privacy_event.batch_order is hsa.BatchOrder.CYCLIC
    secret = make_run(batch_order="shuffled_once")
    secret.epoch()
    assert run.engine.get_epsilon(DELTA) > secret.engine.get_epsilon(DELTA)


def test_row12_the_radius_is_not_the_diameter(make_run):
    run = make_run(projection_radius=1.1, sgd={"lr": 5.0})
    run.epoch()
    norm = torch.cat([p.flatten() for p in run.plain_model.parameters()]).norm().item()
    assert norm == pytest.approx(1.1, rel=1e-5)  # all parameters together
    assert run.engine.privacy_event.domain_diameter == 2.2


def test_row13_an_older_checkpoint(make_run, tmp_path):
    run = make_run()
    run.epoch()
    run.engine.save_checkpoint(path=tmp_path / "old.pt", stays_private=True)
    run.epoch()
    with pytest.raises(ValueError, match="spent budget is never forgotten"):
        run.engine.load_checkpoint(path=tmp_path / "old.pt")
    back = make_run()
    with pytest.raises(ValueError, match="12 steps were taken"):
        back.engine.load_checkpoint(path=tmp_path / "old.pt")
    run.engine.release()
    with pytest.raises(ValueError, match="would be forgotten"):
        back.engine.load_checkpoint(path=tmp_path / "old.pt", discard_later_steps=True)


def test_row13_a_state_dict_is_no_checkpoint(make_run, tmp_path):
    run = make_run()
    for batch in itertools.islice(run.loader, 3):
        run.step(batch)
    torch.save(run.plain_model.state_dict(), tmp_path / "weights.pt")
    back = make_run()
    back.plain_model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside the private optimizer"):
        back.epoch()


TWO_PROCESSES = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine
torch.set_num_threads(1)
store, rank = "file://" + sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
model = nn.Linear(5, 3)
if sys.argv[3] == "wrapped":
    model = nn.parallel.DistributedDataParallel(model)
try:
    HiddenStatePrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.ones(20, 5)), batch_size=10),
        noise_multiplier=1.0, max_grad_norm=1.0)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["plain", "wrapped"])
def test_row15_two_processes(tmp_path, model):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(tmp_path / "store"), str(rank), model],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert "Expected one process, got 2 with" in out, err


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_row16_the_error_of_dice_cannot_be_copied(make_run, copier):
    run = make_run(optimizer_class=DiceSGDOptimizer, loss_geometry=None)
    run.epoch()
    with pytest.raises(hsa.UnsupportedRunError, match="cannot be copied"):
        copier(run.optimizer)


def test_row16_the_error_of_dice_is_in_no_state(make_run, tmp_path):
    run = make_run(optimizer_class=DiceSGDOptimizer, loss_geometry=None, max_grad_norm=0.01)
    run.epoch()
    states = [run.optimizer.state_dict(), dict(run.optimizer.state), run.model.state_dict()]
    assert not any(state for state in states[0]["state"].values())
    assert not states[1]
    run.engine.save_checkpoint(path=tmp_path / "run.pt")
    stored = torch.load(tmp_path / "run.pt", weights_only=True)
    shapes = [tuple(v.shape) for v in stored["module_state_dict"].values()]
    assert shapes == [(3, 5), (3,)]
    assert "private" not in stored["hidden_state_run"]
    assert not any(isinstance(v, torch.Tensor) for v in stored["hidden_state_run"].values())


def test_row16_automatic_dice_is_never_below_dice(make_run):
    epsilons = []
    for automatic in (False, True):
        run = make_run(optimizer_class=DiceSGDOptimizer, loss_geometry=None, automatic=automatic)
        run.epoch()
        assert run.engine.privacy_event.automatic is automatic
        epsilons.append(run.engine.get_epsilon(DELTA))
    assert epsilons[1] >= epsilons[0]


def test_row17_training_accuracy_in_the_log(make_run):
    run = make_run()
    run.epoch()
    with run.engine.evaluate_on_private_data():
        for features, labels in run.loader:
            (run.model(features).argmax(dim=1) == labels).float().mean()
    for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
        with pytest.raises(hsa.UnsupportedRunError, match="no theorem here covers it"):
            ask(DELTA)


def test_row18_a_record_twice_in_an_epoch(make_run, dataset):
    twice = [0, *range(59)]
    for loader in (
        {"sampler": twice},
        {"dataset": Subset(dataset, twice)},
        {"dataset": ConcatDataset([dataset, dataset])},
    ):
        with pytest.raises(hsa.UnsupportedRunError, match=r"twice|the same"):
            make_run(loader=loader)


def test_row18_one_record_per_person_is_declared(make_run):
    run = make_run()
    run.epoch()
    lines = [str(a) for a in run.engine.assumptions]
    assert "declared: one record per person, clipped as one unit" in lines


def test_secure_mode_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcsprng", None)  # as if it were not installed
    with pytest.raises(ImportError, match="you must install the torchcsprng package"):
        HiddenStatePrivacyEngine(secure_mode=True)


def test_a_sum_has_the_event_of_the_mean(make_run):
    mean, total = (
        make_run(
            criterion=nn.CrossEntropyLoss(reduction=reduction), loss_reduction=reduction,
            sgd={"lr": 0.5 / divisor, "weight_decay": 0.1 * divisor}, noise_multiplier=2.0,
        )
        for reduction, divisor in (("mean", 1), ("sum", 10))
    )  # fmt: skip
    mean.epoch()
    total.epoch()
    assert mean.engine.get_epsilon(DELTA) == pytest.approx(total.engine.get_epsilon(DELTA))
    with pytest.raises(hsa.UnsupportedRunError, match="reduction"):
        make_run(criterion=nn.CrossEntropyLoss(reduction="sum"))
