"""What a run declares and meets: schedules, targets, looks at the data; what is said."""

import functools
import itertools
import operator
import sys
import types
import warnings

import attrs
import pytest
import torch
from declared_lines import CHOICES, FIXED_RECORDS, FUNCTIONS, GEOMETRY, OF_EVERY_RUN, listed
from opacus_stock import SOFTMAX, records, stock_loop
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.utils.data import Subset, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants.advice import report_lines
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import Batches, DiceSGD, fit_head, log_epsilon

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
HALVES = [0.5] * 6 + [0.25] * 6
NOTHING_HIDDEN = {"loss_geometry": None, "criterion": None}


def texts(run, status):
    return [a.text for a in run.engine.assumptions if a.status is status]


def trusted(run):
    return texts(run, Status.DECLARED)


def checked(run):
    return texts(run, Status.CHECKED)


def two_epochs(run, rates=HALVES):
    for epoch in range(2):
        for index, batch in enumerate(run.loader):
            run.optimizer.param_groups[0]["lr"] = rates[6 * epoch + index]
            run.step(batch)


# --- schedules and numbers of steps ---------------------------------------------------------------

SHRINKING = list(itertools.accumulate([0.5, *[0.9] * 11], operator.mul))  # as schedulers multiply


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (HALVES, HALVES),
        (hsa.Schedule([0.5, 0.25], [6, 6]), HALVES),
        ([0.5 * 0.9**k for k in range(12)], SHRINKING),
    ],
)
def test_a_schedule_that_is_followed_needs_no_trust(make_run, schedule, rates):
    run, plain = make_run(schedule=schedule), make_run()
    two_epochs(run, rates)
    two_epochs(plain, rates)
    assert any("fixed in advance" in text for text in trusted(plain))
    assert not any("in advance" in text or "training ends" in text for text in trusted(run))
    assert "learning rate of every step as declared in advance" in checked(run)
    assert run.engine.privacy_event == plain.engine.privacy_event
    assert run.engine.get_epsilon(DELTA) == plain.engine.get_epsilon(DELTA)
    assert "all of the 12 steps declared in advance" in run.engine.report(DELTA)


def test_one_step_too_many_does_not_spoil_the_run(make_run):
    run = make_run(num_steps=6)
    for batch in itertools.islice(run.loader, 3):
        run.step(batch)
    assert any(t.startswith("training ends after step 3 of the 6 that were") for t in trusted(run))
    run.epoch()
    weights = run.plain_model.weight.clone()
    with pytest.raises(hsa.UnsupportedRunError, match=r"Expected num_steps = 6 .* step 7"):
        run.epoch()
    assert torch.equal(run.plain_model.weight, weights)
    assert not any("training ends" in text or "in advance" in text for text in trusted(run))
    assert "constant learning rate, noise, clip norm, decay" in checked(run)
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


# --- noise for a target ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "rates"),
    [
        *((order, None) for order in ("cyclic", "full", "shuffled_once", "reshuffled")),
        *((order, None) for order in ("without_replacement", "poisson")),
        ("cyclic", [0.5] * 6 + [0.01] * 6),  # the last epoch hides little
    ],
)
def test_the_target_is_met_from_below(make_run, order, rates):
    run = make_run(batch_order=order, target_epsilon=1.0, schedule=rates)
    if rates:
        two_epochs(run, rates)
    else:
        run.epoch()
        run.epoch()
    assert 0.99 <= run.engine.get_epsilon(DELTA) <= 1.0


def warm_up(optimizer):
    return LambdaLR(optimizer, lambda step: (step + 1) / 12)


def warmed_up():
    """The warm-up has set a twelfth of the rate already when the noise is looked for."""
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    warm_up(optimizer)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"epochs": 0}, ValueError, "epochs >= 1"),
        ({"num_steps": 7}, ValueError, "Expected num_steps = 12"),
        ({"batch_order": Batches("poisson", max_batch_size=9)}, ValueError, "Raise max_batch_size"),
        (
            warmed_up(),
            hsa.UnsupportedRunError,
            r"schedule=, got.* is 0.0416667 at this moment \(started from 0.5\)",
        ),
    ],
)
def test_targets_that_cannot_be_met(make_run, arguments, error, text):
    with pytest.raises(error, match=text):
        make_run(target_epsilon=1.0, **arguments)


def test_a_scheduler_that_is_made_after_the_noise_was_found(make_run):
    """The warm-up moved epsilon from the target of 2 to 3.29; by composition nothing follows."""
    run = make_run(target_epsilon=1.0)
    scheduler = ExponentialLR(run.optimizer, 0.9)
    batches = iter(run.loader)
    run.step(next(batches))
    scheduler.step()
    text = r"step 2 uses learning rate 0\.45, expected 0\.5, .*make_private_with_epsilon found"
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        run.step(next(batches))
    assert run.steps == 1
    make_run(target_epsilon=1.0, **NOTHING_HIDDEN, **warmed_up())
    run = make_run(target_epsilon=1.0, **NOTHING_HIDDEN)
    two_epochs(run)
    assert run.engine.get_epsilon(DELTA) <= 1.0


def test_the_target_is_for_everything_on_the_engine(make_run):
    first = make_run(target_epsilon=0.5)
    two_epochs(first, [0.5] * 12)
    spent = first.engine.get_epsilon(DELTA)
    more = {"engine": first.engine, "model": first.model, "target_epsilon": 1.0, "epochs": 1}
    second = make_run(**more)
    second.epoch()
    assert spent < 0.999 <= first.engine.get_epsilon(DELTA) <= 1.0
    with pytest.raises(ValueError, match="what the runs before spent"):
        make_run(**{**more, "target_epsilon": 0.5})


# --- looks at private data ------------------------------------------------------------------------


def test_looking_at_private_data_ends_the_guarantee(make_run):
    run = make_run()
    run.epoch()
    with run.engine.evaluate_on_private_data():
        run.criterion(run.model(run.loader.dataset.tensors[0]), run.loader.dataset.tensors[1])
    run.epoch()
    engine = run.engine
    asked = engine.get_epsilon, engine.report, engine.compare, engine.accountant.get_epsilon
    for ask in (*asked, lambda _: engine.privacy_event):
        with pytest.raises(hsa.UnsupportedRunError, match="private records was looked at after st"):
            ask(DELTA)


def test_a_private_look_is_an_assumption(make_run):
    model = nn.Sequential(nn.Identity(), nn.Linear(5, 3))
    run, plain = make_run(model=model), make_run()
    model[0].eval()
    for batch in run.loader:
        run.step(batch)
        with run.engine.evaluate_on_private_data(stays_private=True):
            assert not any(part.training for part in run.model.modules())
            assert not run.model(run.loader.dataset.tensors[0]).requires_grad
        assert run.model.training
        assert not model[0].training
    plain.epoch()
    assert run.engine.get_epsilon(DELTA) == plain.engine.get_epsilon(DELTA)
    assert any("shown to nobody and influences" in text for text in trusted(run))
    with pytest.raises(RuntimeError), run.engine.evaluate_on_private_data(stays_private=True):
        raise RuntimeError
    assert run.model.training


# --- reports, comparisons, logs, the command line -------------------------------------------------


def test_what_else_there_is(make_run):
    run = make_run(batch_order="shuffled_once", noise_multiplier=4.0)
    run.epoch()
    event, relation = run.engine.privacy_event, run.engine.guarantee.neighboring_relation
    lines = report_lines(event, relation, DELTA)
    assert any("one change: " in line for line in lines)
    assert run.engine.report(DELTA).endswith("\n".join(lines))
    comparison = run.engine.compare(DELTA)
    best = comparison.best()
    assert best.epsilon == pytest.approx(run.engine.get_epsilon(DELTA), rel=1e-9)
    assert dict(comparison.runs) == {"run 1": event}
    assert {"composition", best.accountant} <= {row.accountant for row in comparison.rows}
    run.plain_model.weight.data.add_(1.0)
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
        run.engine.compare(DELTA)


def test_a_run_that_is_not_yet_trained_says_what_it_gains(make_run):
    run = make_run()
    gain = run.engine.would_gain(DELTA, epochs=30)
    assert gain.verdict == "yes"
    with pytest.raises(ValueError, match="Expected epochs, got None"):
        run.engine.would_gain(DELTA)
    for _ in range(30):
        run.epoch()
    assert gain.epsilon == run.engine.get_epsilon(DELTA)
    assert run.engine.would_gain(DELTA).event == run.engine.privacy_event == gain.event
    half_known = make_run(loss_geometry=None, num_steps=8).engine.would_gain(DELTA)
    assert half_known.verdict == "no"
    assert "criterion= without feature_norm=" in str(half_known)


def test_the_command_line_reads_a_checkpoint(make_run, tmp_path, capsys):
    app = pytest.importorskip("hidden_state_accountants.cli.app")
    run, path = make_run(), tmp_path / "checkpoint.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path)
    assert app.run(["epsilon", str(path), "--delta", "1e-6", "--json"]) == 0
    assert f'"epsilon": {run.engine.get_epsilon(1e-6)!r}' in capsys.readouterr().out
    assert app.run(["explain", str(path), "--quiet"]) == 0
    assert "theorem: " in capsys.readouterr().out
    for option, text in (
        (["--noise-multiplier", "4"], "Expected no --noise-multiplier beside a run"),
        (["--relation", "replace_one"], "Expected the relation of the checkpoint, REPLACE_SPECIAL"),
    ):
        assert app.run(["epsilon", str(path), *option]) == 2
        assert text in capsys.readouterr().err
    run.engine.accountant.refuse("a look at private data")
    run.engine.save_checkpoint(path=path)
    assert app.run(["epsilon", str(path)]) == 2
    assert "no guarantee: a look at private data" in capsys.readouterr().err


class Trainer:
    """What both trainers have, of the shape of theirs."""

    def __init__(self):
        self.callbacks, self.logged = [], []
        self.add_callback = self.callbacks.append

    def log(self, entries):
        self.logged.append(entries["epsilon_if_released_now"])

    def ends_epoch(self):
        for callback in self.callbacks:
            if hasattr(callback, "on_epoch_end"):
                callback.on_epoch_end(None, None, None)
            else:
                module = types.SimpleNamespace(log=lambda name, value: self.log({name: value}))
                callback.on_train_epoch_end(self, module)


@pytest.mark.parametrize(
    ("package", "base"), [("pytorch_lightning", "Callback"), ("transformers", "TrainerCallback")]
)
def test_the_epsilon_of_every_epoch_is_that_of_a_run_that_ends_there(
    make_run, monkeypatch, package, base
):
    fake = types.ModuleType(package)
    setattr(fake, base, type(base, (), {}))
    monkeypatch.setitem(sys.modules, package, fake)
    theirs = type("Trainer", (Trainer,), {"__module__": f"{package}.trainer"})
    trainer = type("Mine", (theirs,), {})()  # a subclass in the user's own module
    run = make_run()
    log_epsilon(trainer, run.engine, DELTA)
    assert isinstance(trainer.callbacks[0], getattr(fake, base))
    for _ in range(2):
        run.epoch()
        trainer.ends_epoch()
    whole = run.engine.privacy_event
    events = attrs.evolve(whole, num_steps=6), whole
    ends = [hsa.LastIterateAccountant().compose(e).get_epsilon(DELTA) for e in events]
    assert trainer.logged == ends
    with pytest.raises(TypeError, match=r"In a loop of your own log engine\.get_epsilon"):
        log_epsilon(Trainer(), run.engine, DELTA)


# --- what is taken on the user's word -------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, (FIXED_RECORDS, GEOMETRY)),
        (
            {**NOTHING_HIDDEN, "loss_geometry": SOFTMAX, "feature_norm": 1.0},
            (FIXED_RECORDS, GEOMETRY),
        ),
        (NOTHING_HIDDEN, ()),
        ({**NOTHING_HIDDEN, "mechanism": DiceSGD(0.5)}, ()),
    ],
    ids=["head", "declared", "composition", "dice"],
)
def test_a_private_engine(make_run, options, more):
    run = make_run(**options)
    for _ in range(3):  # before, composition is as good
        run.epoch()
    told = "declared: feature norms at most 1" in map(str, run.engine.assumptions)
    assert told == ("feature_norm" in options)
    every = (*OF_EVERY_RUN, FIXED_RECORDS, GEOMETRY)
    for guarantee in (run.engine.guarantee, run.engine.accountant.guarantee):
        assert listed(guarantee, every) == [*OF_EVERY_RUN, *more]


@pytest.mark.parametrize("declared", [None, {"loss_geometry": SOFTMAX}])
def test_a_stock_engine(declared):
    loop = stock_loop(declared=declared, poisson_sampling=not declared)
    for _ in range(3):
        loop.epoch()
    more = (FIXED_RECORDS, GEOMETRY) if declared else ()
    guarantee = loop.accountant.guarantee
    assert listed(guarantee, (*OF_EVERY_RUN, FIXED_RECORDS, GEOMETRY)) == [*OF_EVERY_RUN, *more]


def test_a_head_in_one_call():
    features = torch.eye(4)[torch.arange(40) % 4]
    _, guarantee = fit_head(features, torch.arange(40) % 2, epsilon=3.0, delta=1e-5, classes=2)
    theirs = [line for line in OF_EVERY_RUN if line not in (FUNCTIONS, CHOICES)]
    told = ["the arguments do not depend on the records", "the features of a record are a function"]
    assert listed(guarantee, (*theirs, *told)) == [*theirs, *told]


# --- warnings: a delta that protects nobody, a bound that was computed from the records -----------


def said(act, text):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return sum(text in str(warning.message) for warning in caught)


@pytest.mark.parametrize("subset", [False, True])
def test_equal_records(make_run, caplog, subset):
    x, y = records().tensors
    twice = torch.cat([x[:30], x[:30]])
    for tensors, count in (([x, y], 0), ([twice, y], 1), ([twice, torch.arange(60)], 0)):
        caplog.clear()
        made = TensorDataset(*tensors)
        make_run(loader={"dataset": Subset(made, range(0, 60, 2)) if subset else made})
        assert sum("records of the data are equal" in text for text in caplog.messages) == count


def test_a_large_delta(make_run):
    run = make_run()
    run.epoch()
    features, labels = records().tensors

    def target(delta):
        make_run(target_epsilon=2.0, target_delta=delta, epochs=1)

    def fit(delta):
        fit_head(features, labels, epsilon=1.0, delta=delta, classes=3)

    text = "is not below 1/n for n = 60 records"
    for ask in (run.engine.get_epsilon, run.engine.report, target, fit):
        assert said(lambda ask=ask: ask(1 / 60), text) == 1
        assert not said(lambda ask=ask: ask(1e-4), text)


def test_the_largest_norm_of_the_data(make_run):
    x, y = records().tensors
    longer = torch.linspace(1, 3, 60)[:, None] * x
    longest = float(longer.norm(dim=1).max())
    for features, norm, count in ((longer, longest, 1), (longer, 3.5, 0), (x, 1.0, 0)):
        options = {"loader": {"dataset": TensorDataset(features, y)}, "feature_norm": norm}
        made = functools.partial(make_run, max_grad_norm="auto", **options)
        assert said(made, "is the largest norm of the data") == count
