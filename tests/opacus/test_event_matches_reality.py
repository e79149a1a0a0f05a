"""Update rules, parameters and noise: another one raises, what the event can express is accounted.

What every optimizer refuses is in tests/misuse/misuse.py; losses are in test_criteria.py and loops
over the batches in test_loops.py beside this file.
"""

import copy
import io
import itertools

import attrs
import pytest
import torch
from opacus.schedulers import StepNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import hidden_state_accountants as hsa

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5


def noise_changed_between_backward_and_step(run):
    for batch in run.loader:
        run.backward(batch)
        run.optimizer.noise_multiplier = 1.0
        run.optimizer.step()
        run.optimizer.noise_multiplier = 100.0  # after the noise was drawn
    return {"num_steps": 6, "noise_multiplier": 1.0}


def learning_rate_as_tensor(run):
    """And dampening, which torch ignores where there is no momentum."""
    run.optimizer.param_groups[0] |= {"lr": torch.tensor(0.5), "dampening": 0.5}
    run.epoch()
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


def copies_of_model_and_criterion(run):
    for batch in run.loader:
        run.step(batch)
        model, criterion = copy.deepcopy((run.plain_model, run.criterion))
        criterion(model.eval()(batch[0][:3]), batch[1][:3])
        torch.save((run.plain_model, run.criterion), io.BytesIO())
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


@pytest.mark.parametrize(
    "loop",
    [
        noise_changed_between_backward_and_step, learning_rate_as_tensor, losses_for_the_log,
        copies_of_model_and_criterion, noise_scheduler_of_opacus, compiled_model,
    ],
)  # fmt: skip
def test_what_happened_is_accounted(make_run, loop):
    run = make_run()
    arguments = {
        "noise_multiplier": 2.0, "learning_rate": 0.5, "clip_norm": 2.1, "batch_size": 10,
        "dataset_size": 60, "batch_order": "cyclic", "weight_decay": 0.1,
        "loss": hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True),
    }  # fmt: skip
    event = hsa.LastIterateDpEvent(**arguments | loop(run))
    assert run.engine.privacy_event == event
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(delta=DELTA) == pytest.approx(expected, rel=1e-12)


def other_weights(model):
    model.weight = nn.Parameter(torch.zeros_like(model.weight))


def no_weights(model):
    del model.weight


def weights_of_another_type(model):
    model.weight = nn.Parameter(model.weight.detach().double())


@pytest.mark.parametrize("change", [other_weights, no_weights, weights_of_another_type])
def test_weights_that_are_replaced_after_the_last_step(make_run, change):
    run = make_run()
    run.epoch()
    epsilon = run.engine.get_epsilon(DELTA)
    run.plain_model.weight = nn.Parameter(run.plain_model.weight.detach().clone())
    assert run.engine.get_epsilon(DELTA) == epsilon  # equal ones are fine
    change(run.plain_model)
    with pytest.raises(hsa.UnsupportedRunError, match=r"After step 6.*ask for epsilon before"):
        run.engine.get_epsilon(DELTA)


def test_early_stopping_on_public_data_costs_the_whole_plan(make_run):
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


def test_a_record_twice_in_an_epoch(make_run, dataset):
    twice, from_the_end = [0, *range(59)], [-60, *range(59)]
    for loader in (
        {"sampler": twice},
        {"sampler": from_the_end},
        {"dataset": Subset(dataset, twice)},
        {"dataset": Subset(dataset, from_the_end)},
        {"dataset": ConcatDataset([dataset, dataset])},
        {"dataset": ConcatDataset([Subset(dataset, range(59)), Subset(dataset, [-60])])},
        {"dataset": ConcatDataset([TensorDataset(*dataset[a:b]) for a, b in ((0, 40), (30, 50))])},
    ):
        with pytest.raises(hsa.UnsupportedRunError, match=r"twice|the same"):
            make_run(loader=loader)
    halves = [TensorDataset(*dataset[a:b]) for a, b in ((0, 30), (30, 60))]
    make_run(loader={"dataset": ConcatDataset(halves)}).epoch()


# --- what raises ----------------------------------------------------------------------------------


def second_group_without_decay(run):
    group = run.optimizer.param_groups[0]
    bias = group["params"].pop()
    run.optimizer.param_groups.append({**group, "params": [bias], "weight_decay": 0.0})
    run.epoch()


def pre_step_and_base_step(run):
    for batch in run.loader:
        run.backward(batch)
        run.optimizer.pre_step()
        run.optimizer.original_optimizer.step()


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


def piece_of_another_batch(run):
    batches = iter(run.loader)
    features, labels = next(batches)
    run.optimizer.signal_skip_step(True)
    run.optimizer.signal_skip_step(False)
    run.step((features[:5], labels[:5]))
    features, labels = next(batches)
    run.step((features[5:], labels[5:]))


def hook_of_another_accountant(run):
    run.optimizer.attach_step_hook(lambda optimizer: None)
    run.epoch()


def features_that_a_hook_lengthens(run):
    run.plain_model.register_forward_pre_hook(lambda head, args: (1.2 * args[0],))
    run.epoch()


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (second_group_without_decay, "weight_decay = 0.1 in group 0 and 0.0 in group 1"),
        (pre_step_and_base_step, "got a call of pre_step"),
        (hook_of_another_accountant, "step 1 uses step_hook"),
        (hook_on_all_optimizers, "Expected no step hooks for all optimizers"),
        (no_noise_for_a_piece, "step 1 clips to 2.1 and then uses 3.1"),
        (clip_norm_into_the_margin, r"max_grad_norm >= 2.00000"),
        (piece_of_another_batch, "step 1: a piece of a batch was delivered"),
        (features_that_a_hook_lengthens, "step 1: what went into the model"),
    ],
)
def test_a_different_loop_raises(make_run, loop, text):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        loop(run)


@pytest.mark.parametrize(("factor", "norm"), [(1.001, "1.001"), (float("nan"), "nan")])
def test_no_epsilon_after_a_refused_step(make_run, factor, norm):
    """Where a run stops must not depend on the data, and a refusal may."""
    run = make_run(loop_maps_records=True)
    run.epoch()
    assert run.engine.get_epsilon(DELTA) > 0
    features, labels = next(iter(run.loader))
    with pytest.raises(hsa.UnsupportedRunError, match=f"step 7 used features of norm {norm}"):
        run.step((factor * features, labels))
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        run.engine.get_epsilon(DELTA)


def test_a_model_in_eval_mode_trains_the_same(make_run):
    runs = [make_run(noise_generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    runs[0].model.eval()
    for run in runs:
        run.epoch()
    assert torch.equal(runs[0].plain_model.weight, runs[1].plain_model.weight)
    assert runs[0].engine.get_epsilon(DELTA) == runs[1].engine.get_epsilon(DELTA)


def written(model):
    model[0].running_mean += 0.1


def new_buffer(model):
    model[0].register_buffer("extra", torch.zeros(5))


def new_parameter(model):
    model[0].register_parameter("extra", nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize(
    ("change", "name"), [(written, "running_mean"), (new_buffer, "extra"), (new_parameter, "extra")]
)
def test_what_is_frozen_changes_or_comes_later(make_run, change, name):
    model = nn.Sequential(nn.BatchNorm1d(5).requires_grad_(False), nn.Linear(5, 3))
    run = make_run(model=model, feature_norm=3.0, max_grad_norm=9.0)
    run.epoch()
    change(model)
    run.epoch()  # which trains the head alone
    with pytest.raises(hsa.UnsupportedRunError, match=rf"frozen parameter 0\.{name} has"):
        run.engine.get_epsilon(DELTA)


def test_a_frozen_parameter_with_an_old_gradient_stays(make_run):
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model(torch.ones(1, 5)).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    run = make_run(model=model, loss_geometry=None)
    features, labels = next(iter(run.loader))
    run.criterion(run.model(features), labels).backward()  # zero_grad would clear the old gradient
    run.optimizer.step()
    assert torch.equal(model[0].weight, before)
    run.engine.get_epsilon(DELTA)
