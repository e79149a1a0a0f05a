"""Another update rule, other parameters, other noise than declared raise.

See docs/threat_model.md. What every optimizer
refuses is in tests/misuse/misuse.py.
"""

import pytest
import torch
from misuse import each_row
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


DELTA = 1e-5


# Stops and schedules that look at the data.


def plateau(run):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0)
    for batch in run.loader:
        run.step(batch)
        scheduler.step(1.0)  # a loss that does not improve


def more_steps_than_declared(run):
    run.epoch()
    run.epoch()


# The update rule.


def second_group_without_decay(run):
    group = run.optimizer.param_groups[0]
    bias = group["params"].pop()
    run.optimizer.param_groups.append({**group, "params": [bias], "weight_decay": 0.0})
    run.epoch()


# Precision and the set of parameters.


def buffer_that_counts(run):
    run.epoch()
    run.plain_model.register_buffer("mean", torch.zeros(5))
    run.epoch()


def pre_step_and_base_step(run):
    for batch in run.loader:
        run.backward(batch)
        run.optimizer.pre_step()
        run.optimizer.original_optimizer.step()


# Hooks, scalers, copies, settings.


def hook_on_all_optimizers(run):
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        run.epoch()
    finally:
        handle.remove()


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
    run.optimizer.max_grad_norm = run.optimizer.run.declared.lipschitz
    run.epoch()


def eval_mode(run):
    run.model.eval()
    run.epoch()


def on_another_engine(run):
    return HiddenStatePrivacyEngine().make_private(
        module=run.model,
        optimizer=run.optimizer,
        data_loader=run.loader,
        noise_multiplier=1.0,
        max_grad_norm=2.1,
        batch_order="cyclic",
    )


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


def hook_of_another_accountant(run):
    run.optimizer.attach_step_hook(lambda optimizer: None)
    run.epoch()


RAISES = [
    (2, plateau, "step 3 uses learning rate 0.05, expected 0.5", 2),
    (2, more_steps_than_declared, "Expected num_steps = 6 steps", 6),
    (3, second_group_without_decay, "weight_decay = 0.1 in group 0 and 0.0 in group 1", 0),
    (11, pre_step_and_base_step, "got a call of pre_step", 0),
    (14, hook_of_another_accountant, "step 1 uses step_hook", 0),
    (14, hook_on_all_optimizers, "Expected no step hooks for all optimizers", 0),
    (14, no_noise_for_a_piece, "step 1 clips to 2.1 and then uses 3.1", 0),
    (14, clip_norm_into_the_margin, r"max_grad_norm >= 2.00000", 6),
    (14, two_engines_in_turn, "another engine took over its model", 0),
    (14, piece_of_another_batch, "step 1: a piece of a batch was delivered", 0),
]

ARGUMENTS = {
    plateau: {"schedule": 0.5},
    more_steps_than_declared: {"num_steps": 6},
}


@each_row(("loop", "text", "steps"), RAISES)
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
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        run.engine.get_epsilon(1e-5)


def test_impossible_values_are_not_recorded(make_run):
    run = make_run()
    with pytest.raises((ValueError, RuntimeError), match="nan"):
        no_number_as_noise(run)
    assert run.steps == 6
    assert bool(torch.isfinite(run.plain_model.weight).all())


def test_a_model_in_eval_mode_trains_the_same(make_run):
    runs = [make_run(noise_generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    eval_mode(runs[0])
    runs[1].epoch()
    assert torch.equal(runs[0].plain_model.weight, runs[1].plain_model.weight)
    assert runs[0].engine.get_epsilon(DELTA) == runs[1].engine.get_epsilon(DELTA)


def test_a_buffer_that_comes_later(make_run):
    run = make_run()
    buffer_that_counts(run)
    with pytest.raises(hsa.UnsupportedRunError, match="has mean, which was not there at the start"):
        run.engine.get_epsilon(DELTA)


def test_a_parameter_outside_the_forward_pass_is_noticed(make_run):
    run = make_run(model=nn.Sequential(nn.Identity(), nn.Linear(5, 3)))
    run.epoch()
    run.plain_model[0].register_parameter("extra", nn.Parameter(torch.zeros(1)))
    run.epoch()  # which trains the head alone
    with pytest.raises(hsa.UnsupportedRunError, match=r"has 0\.extra, which was not there"):
        run.engine.get_epsilon(DELTA)


@pytest.mark.parametrize("mode", [{}, {"grad_sample_mode": "hooks"}])
def test_a_frozen_parameter_with_an_old_gradient_stays(make_run, mode):
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model(torch.ones(1, 5)).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    run = make_run(model=model, loss_geometry=None, **mode)
    features, labels = next(iter(run.loader))
    run.criterion(run.model(features), labels).backward()  # zero_grad would clear the old gradient
    run.optimizer.step()
    assert torch.equal(model[0].weight, before)
    run.engine.get_epsilon(DELTA)
