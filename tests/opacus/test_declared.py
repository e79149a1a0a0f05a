"""What is declared or met: schedules, numbers of steps, targets, releases, looks at the data."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import Batches, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
HALVES = [0.5] * 6 + [0.25] * 6


def trusted(run):
    return [a.text for a in run.engine.assumptions if a.status.value == "declared"]


def checked(run):
    return [a.text for a in run.engine.assumptions if a.status.value == "checked"]


def two_epochs(run, rates=HALVES):
    for epoch in range(2):
        for index, batch in enumerate(run.loader):
            run.optimizer.param_groups[0]["lr"] = rates[6 * epoch + index]
            run.step(batch)


@pytest.mark.parametrize("schedule", [HALVES, hsa.Schedule([0.5, 0.25], [6, 6])], ids=type)
def test_a_schedule_that_is_followed_needs_no_trust(make_run, schedule):
    run = make_run(schedule=schedule)
    two_epochs(run)
    plain = make_run()
    two_epochs(plain)
    assert any("fixed in advance" in text for text in trusted(plain))
    assert not any("in advance" in text or "training ends" in text for text in trusted(run))
    assert "all of the 12 steps declared in advance" in checked(run)
    assert "learning rate of every step as declared in advance" in checked(run)
    assert run.engine.privacy_event == plain.engine.privacy_event
    assert run.engine.get_epsilon(DELTA) == plain.engine.get_epsilon(DELTA)
    assert "all of the 12 steps" in run.engine.report(DELTA)


def test_a_scheduler_that_multiplies(make_run):
    run = make_run(schedule=[0.5 * 0.9**k for k in range(12)])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    for _ in range(2):
        for batch in run.loader:
            run.step(batch)
            scheduler.step()
    assert not any("in advance" in text for text in trusted(run))


def test_an_epsilon_before_the_declared_end_says_so(make_run):
    run = make_run(num_steps=12)
    run.epoch()
    line = "training ends after step 6 of the 12 that were declared"
    assert [text for text in trusted(run) if text.startswith(line)]
    run.epoch()
    assert not any("training ends" in text or "in advance" in text for text in trusted(run))
    assert "constant learning rate, noise, clip norm, decay" in checked(run)


def test_one_step_too_many_does_not_spoil_the_run(make_run):
    run = make_run(num_steps=6)
    run.epoch()
    before = run.engine.get_epsilon(DELTA)
    weights = run.plain_model.weight.clone()
    with pytest.raises(hsa.UnsupportedRunError, match=r"Expected num_steps = 6 .* step 7"):
        run.epoch()
    assert torch.equal(run.plain_model.weight, weights)
    assert run.engine.get_epsilon(DELTA) == before
    assert any("all of the 6 steps" in text for text in checked(run))


@pytest.mark.parametrize("schedule", [HALVES, 0.5])
def test_another_learning_rate_is_refused(make_run, schedule):
    run = make_run(schedule=schedule)
    run.epoch()
    run.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 7 uses learning rate 0.2, expected"):
        run.epoch()
    assert run.steps == 6
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        run.engine.get_epsilon(DELTA)  # a plateau may depend on the records


def test_what_is_not_declared_stays_trusted(make_run):
    run = make_run(num_steps=12)
    run.epoch()
    run.engine.release()
    run.optimizer.param_groups[0]["lr"] = 0.25
    run.optimizer.noise_multiplier = 3.0
    run.epoch()
    assert "schedule of learning rate, noise fixed in advance" in trusted(run)
    assert "released steps fixed in advance" in trusted(run)
    assert "constant clip norm, decay" in checked(run)
    run = make_run(schedule=0.5)
    run.epoch()
    assert "number of steps fixed in advance" in trusted(run)


def test_a_sum_is_declared_in_the_units_of_the_optimizer(make_run):
    run = make_run(
        criterion=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum",
        sgd={"lr": 0.05, "weight_decay": 0.1}, schedule=[0.05] * 6,
    )  # fmt: skip
    run.epoch()
    assert run.engine.privacy_event.learning_rate == pytest.approx(0.5)
    assert run.engine.privacy_event.weight_decay == pytest.approx(0.01)
    assert not any("in advance" in text for text in trusted(run))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_steps": 0}, ValueError, "num_steps >= 1"),
        ({"num_steps": 2.0}, TypeError, "num_steps to be an integer"),
        ({"schedule": [0.5], "num_steps": 6}, ValueError, "per logical step"),
        ({"schedule": [-0.5]}, ValueError, "schedule"),
        ({"schedule": [0.5] * 5 + [11.0]}, ValueError, "weight_decay"),
    ],
)
def test_impossible_declarations(make_run, arguments, error, text):
    with pytest.raises(error, match=text):
        make_run(**arguments)


def test_checkpoints_compare_the_declaration(make_run, tmp_path):
    run, path = make_run(schedule=HALVES), tmp_path / "run.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path)
    for other in ({"schedule": [*HALVES[:11], 0.2]}, {}):
        with pytest.raises(ValueError, match="schedule"):
            make_run(**other).engine.load_checkpoint(path=path)
    back = make_run(schedule=HALVES)
    back.engine.load_checkpoint(path=path, discard_later_steps=True)
    back.optimizer.param_groups[0]["lr"] = 0.25
    back.epoch()
    assert "all of the 12 steps declared in advance" in checked(back)
    with pytest.raises(hsa.UnsupportedRunError, match="Expected num_steps = 12"):
        back.epoch()


# --- noise for a target ---------------------------------------------------------------------------

ORDERS = ["cyclic", "full", "shuffled_once", "reshuffled", "without_replacement", "poisson"]


def with_epsilon(make_loader, *, engine=None, model=None, scheduler=None, **changes):
    torch.manual_seed(0)
    model, engine = model or nn.Linear(5, 3), engine or HiddenStatePrivacyEngine()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    if scheduler is not None:
        scheduler(optimizer)
    arguments = {
        "module": model,
        "optimizer": optimizer,
        "data_loader": make_loader(),
        "max_grad_norm": 2.1,
        "batch_order": "cyclic",
        "criterion": criterion,
        "loss_geometry": "auto",
        "feature_norm": 1.0,
        "target_epsilon": 1.0,
        "target_delta": DELTA,
        "epochs": 2,
    }
    private = engine.make_private_with_epsilon(**{**arguments, **changes})
    return engine, criterion, *private


def test_the_target_is_met_for_the_declared_schedule(make_loader):
    schedule = [0.5] * 6 + [0.01] * 6  # the last epoch hides little
    engine, criterion, model, optimizer, loader = with_epsilon(make_loader, schedule=schedule)
    constant = with_epsilon(make_loader)[3].noise_multiplier
    assert optimizer.noise_multiplier > 1.01 * constant
    for epoch in range(2):
        for features, labels in loader:
            optimizer.param_groups[0]["lr"] = schedule[6 * epoch]
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()
    assert 0.99 <= engine.get_epsilon(DELTA) <= 1.0


def warm_up(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 12)


@pytest.mark.parametrize(
    ("scheduler", "now"),
    [(warm_up, "0.0416667"), (lambda o: lr_scheduler.CosineAnnealingLR(o, 12), "0.5")],
)
def test_no_noise_is_found_for_the_rate_of_the_moment(make_loader, scheduler, now):
    """The warm-up has set a twelfth of the rate already when the noise is looked for."""
    text = rf"schedule=, got.* is {now} at this moment \(started from 0.5\)"
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        with_epsilon(make_loader, scheduler=scheduler)


def test_a_scheduler_that_is_made_after_the_noise_was_found(make_loader):
    """The warm-up moved epsilon from the target of 2 to 3.29."""
    engine, criterion, model, optimizer, loader = with_epsilon(make_loader)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)

    def epoch():
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()
            scheduler.step()

    text = r"step 2 uses learning rate 0\.45, expected 0\.5, .*make_private_with_epsilon found"
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        epoch()
    assert len(engine.accountant) == 1


def test_composition_takes_any_scheduler(make_loader):
    """The rate is post-processing there."""
    of_hidden_iterates = {"loss_geometry": None, "feature_norm": None, "batch_order": None}
    with_epsilon(make_loader, scheduler=warm_up, **of_hidden_iterates)
    made = with_epsilon(make_loader, **of_hidden_iterates)
    engine, criterion, model, optimizer, loader = made
    scheduler = warm_up(optimizer)
    for _ in range(2):
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()
            scheduler.step()
    assert engine.get_epsilon(DELTA) <= 1.0


def train(criterion, model, optimizer, loader, epochs=2):
    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()


@pytest.mark.parametrize("order", ORDERS)
def test_the_target_is_met_from_below(make_loader, order):
    engine, *run = with_epsilon(make_loader, batch_order=order)
    train(*run)
    assert 0.99 <= engine.get_epsilon(DELTA) <= 1.0


def test_the_target_is_for_everything_on_the_engine(make_loader):
    engine, *run = with_epsilon(make_loader, target_epsilon=0.5)
    train(*run)
    spent = engine.get_epsilon(DELTA)
    _, *again = with_epsilon(make_loader, engine=engine, model=run[1], epochs=1)
    torch.manual_seed(1)
    train(*again, epochs=1)
    assert spent < 0.999 <= engine.get_epsilon(DELTA) <= 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"epochs": 0}, ValueError, "epochs >= 1"),
        ({"noise_multiplier": 1.0}, TypeError, "noise_multiplier"),
        ({"batch_order": Batches("poisson", max_batch_size=9)}, ValueError, "Raise max_batch_size"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
    ],
)
def test_targets_that_cannot_be_met(make_loader, arguments, error, text):
    with pytest.raises(error, match=text):
        with_epsilon(make_loader, **arguments)


def test_a_target_that_is_spent_already(make_loader):
    engine, *run = with_epsilon(make_loader, target_epsilon=2.0)
    train(*run)
    with pytest.raises(ValueError, match="what the runs before spent"):
        with_epsilon(make_loader, engine=engine, model=run[1])


# --- comparisons, releases, looks -----------------------------------------------------------------


def test_compare(make_run):
    run = make_run(batch_order="shuffled_once", noise_multiplier=4.0)
    run.epoch()
    run.epoch()
    comparison = run.engine.compare(DELTA)
    best = comparison.best()
    assert best.epsilon == pytest.approx(run.engine.get_epsilon(DELTA), rel=1e-9)
    assert dict(comparison.runs) == {"run 1": run.engine.privacy_event}
    assert {"composition", best.accountant} <= {row.accountant for row in comparison.rows}
    with torch.no_grad():
        run.plain_model.weight.add_(1.0)
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        run.engine.compare(DELTA)


@pytest.mark.parametrize("order", ["cyclic", "reshuffled", "poisson"])
def test_a_release_costs_and_is_reported(make_run, order):
    run = make_run(batch_order=order, noise_multiplier=4.0)
    for _ in range(2):
        run.epoch()
    silent = run.engine.get_epsilon(DELTA)
    run.engine.release()  # of the current iterate: changes nothing
    assert run.engine.get_epsilon(DELTA) == silent
    before = run.steps
    run.epoch()
    event = run.engine.privacy_event
    assert event.release_steps == (before,)
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)
    assert run.engine.get_epsilon(DELTA) >= silent
    assert f"released: the last iterate, and after steps {before}" in run.engine.report(DELTA)


def test_saving_counts_as_a_release_unless_it_stays_private(make_run, tmp_path):
    shown, hidden = make_run(), make_run()
    for run, stays_private in ((shown, False), (hidden, True)):
        run.epoch()
        run.engine.save_checkpoint(
            path=tmp_path / "c.pt", module=run.model, stays_private=stays_private
        )
        run.epoch()
    assert shown.engine.privacy_event.release_steps == (6,)
    assert hidden.engine.privacy_event.release_steps == ()
    assert hidden.engine.get_epsilon(DELTA) < shown.engine.get_epsilon(DELTA)
    text = "declared: checkpoints that were saved with stays_private=True are shown to nobody"
    assert text in map(str, hidden.engine.assumptions)
    assert text not in map(str, shown.engine.assumptions)
    assert "shown to nobody" in hidden.engine.report(DELTA)


def test_looking_at_private_data_ends_the_guarantee(make_run):
    run = make_run()
    run.epoch()
    with run.engine.evaluate_on_private_data():
        run.criterion(run.model(run.loader.dataset.tensors[0]), run.loader.dataset.tensors[1])
    run.epoch()
    for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
        with pytest.raises(hsa.UnsupportedRunError, match="private records was looked at after st"):
            ask(DELTA)
    with pytest.raises(hsa.UnsupportedRunError, match="looked at after step 6"):
        _ = run.engine.privacy_event
    with pytest.raises(hsa.UnsupportedRunError, match="looked at after step 6"):
        run.engine.accountant.get_epsilon(DELTA)


def test_a_private_look_is_an_assumption(make_run):
    model = nn.Sequential(nn.Identity(), nn.Linear(5, 3))
    run = make_run(model=model)
    model[0].eval()
    features, labels = run.loader.dataset.tensors
    for batch in run.loader:
        run.step(batch)
        with run.engine.evaluate_on_private_data(stays_private=True):
            assert not any(part.training for part in run.model.modules())
            output = run.model(features)
            assert not output.requires_grad
            run.criterion(output, labels)
        assert run.model.training
        assert not model[0].training
    plain = make_run()
    plain.epoch()
    assert run.engine.get_epsilon(DELTA) == plain.engine.get_epsilon(DELTA)
    assert any("shown to nobody and influences" in a.text for a in run.engine.assumptions)
    with pytest.raises(RuntimeError), run.engine.evaluate_on_private_data(stays_private=True):
        raise RuntimeError
    assert run.model.training
