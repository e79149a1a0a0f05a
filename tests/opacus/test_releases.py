"""Targets, comparisons, releases and looks at private data."""

import pytest
import torch
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    Batches,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
ORDERS = ["cyclic", "full", "shuffled_once", "reshuffled", "without_replacement", "poisson"]


def make_with_epsilon(make_loader, engine=None, model=None, epochs=2, **arguments):
    torch.manual_seed(0)
    model = model or nn.Linear(5, 3)
    engine = engine or HiddenStatePrivacyEngine()
    criterion = nn.CrossEntropyLoss()
    private = engine.make_private_with_epsilon(
        **{
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1),
            "data_loader": make_loader(),
            "max_grad_norm": 2.1,
            "batch_order": "cyclic",
            "criterion": criterion,
            "loss_geometry": "auto",
            "feature_norm": 1.0,
            "target_epsilon": 1.0,
            "target_delta": DELTA,
            "epochs": epochs,
            **arguments,
        }
    )
    return engine, criterion, *private


def train(criterion, model, optimizer, loader, epochs=2):
    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()


@pytest.mark.parametrize("order", ORDERS)
def test_the_target_is_met_from_below(make_loader, order):
    engine, *run = make_with_epsilon(make_loader, batch_order=order)
    train(*run)
    assert 0.99 <= engine.get_epsilon(DELTA) <= 1.0


def test_the_target_is_for_everything_on_the_engine(make_loader):
    engine, *run = make_with_epsilon(make_loader, target_epsilon=0.5)
    train(*run)
    spent = engine.get_epsilon(DELTA)
    _, *again = make_with_epsilon(make_loader, engine=engine, model=run[1], epochs=1)
    torch.manual_seed(1)
    train(*again, epochs=1)
    assert spent < 0.999 <= engine.get_epsilon(DELTA) <= 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"epochs": 0}, ValueError, "epochs to be an integer >= 1"),
        ({"epochs": 1.5}, ValueError, "epochs to be an integer >= 1"),
        ({"noise_multiplier": 1.0}, TypeError, "no noise_multiplier"),
        ({"target_epsilon": -1.0}, ValueError, "target_epsilon >= 0"),
        ({"target_delta": 0.0}, ValueError, "delta > 0"),
        ({"batch_order": Batches("poisson", max_batch_size=9)}, ValueError, "Raise max_batch_size"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
    ],
)
def test_targets_that_cannot_be_met(make_loader, arguments, error, text):
    with pytest.raises(error, match=text):
        make_with_epsilon(make_loader, **arguments)


def test_a_target_that_is_spent_already(make_loader):
    engine, *run = make_with_epsilon(make_loader, target_epsilon=2.0)
    train(*run)
    with pytest.raises(ValueError, match="what the runs before spent"):
        make_with_epsilon(make_loader, engine=engine, model=run[1])


@pytest.mark.parametrize("order", ["cyclic", "shuffled_once"])
def test_compare(make_run, order):
    run = make_run(batch_order=order, noise_multiplier=4.0)
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


@pytest.mark.parametrize("order", ORDERS)
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


@pytest.mark.parametrize("order", ["cyclic", "poisson"])
def test_a_public_checkpoint_says_what_it_costs(make_run, tmp_path, caplog, order):
    """What is released after the last step."""
    run = make_run(batch_order=order)
    path = tmp_path / "checkpoint.pt"
    run.engine.save_checkpoint(path=path)  # nothing was trained
    run.epoch()
    run.engine.save_checkpoint(path=path, stays_private=True)
    assert "counts as a release" not in caplog.text
    run.engine.save_checkpoint(path=path)
    (line,) = [r.getMessage() for r in caplog.records if "counts as a release" in r.getMessage()]
    assert "The checkpoint after step 6" in line
    assert "its epsilon grows" in line
    assert "stays_private=True avoids it" in line
    assert run.engine.privacy_event.num_steps == 6
