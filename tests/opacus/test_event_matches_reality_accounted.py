"""What the loop does differently, where the event can express it, is accounted as it happened.

See docs/threat_model.md.
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
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    DiceSGD,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


DELTA = 1e-5


def plain(run):
    run.epoch()
    run.epoch()
    return {"num_steps": 12}


def noise_changed_between_backward_and_step(run):
    for batch in run.loader:
        run.backward(batch)
        run.optimizer.noise_multiplier = 1.0
        run.optimizer.step()
        run.optimizer.noise_multiplier = 100.0  # after the noise was drawn
    return {"num_steps": 6, "noise_multiplier": 1.0}


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


def copies_of_model_and_criterion(run):
    for batch in run.loader:
        run.step(batch)
        model, criterion = copy.deepcopy((run.plain_model, run.criterion))
        criterion(model.eval()(batch[0][:3]), batch[1][:3])
        torch.save((run.plain_model, run.criterion), io.BytesIO())
    return {"num_steps": 6}


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
    (14, noise_changed_between_backward_and_step),
    (1, memory_manager),
    (1, manual_pieces),
    (3, learning_rate_as_tensor),
    (14, closure),
    (1, evaluation_in_between),
    (4, losses_for_the_log),
    (4, criterion_shared_with_another_run),
    (11, copies_of_model_and_criterion),
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


def other_weights(model):
    model.weight = nn.Parameter(torch.zeros_like(model.weight))


def weights_under_another_name(model):
    model.old = model.weight
    model.weight = nn.Parameter(torch.zeros_like(model.weight))


def no_weights(model):
    del model.weight


def weights_of_another_type(model):
    model.weight = nn.Parameter(model.weight.detach().double())


REPLACEMENTS = [other_weights, weights_under_another_name, no_weights, weights_of_another_type]


@pytest.mark.parametrize("change", REPLACEMENTS)
def test_row200_weights_that_are_replaced_after_the_last_step(make_run, change):
    run = make_run()
    run.epoch()
    change(run.plain_model)
    with pytest.raises(hsa.UnsupportedRunError, match=r"After step 6.*ask for epsilon before"):
        run.engine.get_epsilon(DELTA)


def test_row200_equal_weights_in_their_place_are_fine(make_run):
    run = make_run()
    run.epoch()
    epsilon = run.engine.get_epsilon(DELTA)
    run.plain_model.weight = nn.Parameter(run.plain_model.weight.detach().clone())
    assert run.engine.get_epsilon(DELTA) == epsilon


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


def test_row13_a_state_dict_is_no_checkpoint(make_run, tmp_path):
    run = make_run()
    for batch in itertools.islice(run.loader, 3):
        run.step(batch)
    torch.save(run.plain_model.state_dict(), tmp_path / "weights.pt")
    back = make_run()
    back.plain_model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside the private optimizer"):
        back.epoch()


def test_row16_the_error_of_dice_is_in_no_state(make_run, tmp_path):
    run = make_run(mechanism=DiceSGD(), loss_geometry=None, max_grad_norm=0.01)
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


def test_row18_a_record_twice_in_an_epoch(make_run, dataset):
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
