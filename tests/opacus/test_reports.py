"""What an engine says of a run: to its user, to a log, in files and on the command line."""

import json
import logging
import sys
import types
import warnings

import attrs
import pytest
import torch
from declared_lines import CHOICES, FIXED_RECORDS, FUNCTIONS, GEOMETRY, OF_EVERY_RUN, listed
from opacus_stock import SOFTMAX, stock_loop
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants.advice import report_lines
from hidden_state_adapters.opacus import (
    DiceSGD,
    HiddenStatePrivacyEngine,
    fit_head,
    log_epsilon,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5


def records(*, normalised=False):
    features = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    if normalised:
        features = nn.functional.normalize(features)
    return TensorDataset(features, torch.arange(60) % 3)


def private(dataset=None, *, optimizer=torch.optim.SGD, engine=None, **arguments):
    """A linear head; a target epsilon takes the place of noise."""
    model, engine = nn.Linear(5, 3), engine or HiddenStatePrivacyEngine()
    make = engine.make_private_with_epsilon
    if "target_epsilon" not in arguments:
        make, arguments = engine.make_private, {"noise_multiplier": 2.0, **arguments}
    make(
        module=model,
        optimizer=optimizer(model.parameters(), lr=0.5),
        data_loader=DataLoader(dataset or records(), batch_size=10),
        **{"max_grad_norm": 1.0, **arguments},
    )
    return engine


# --- files and the command line -------------------------------------------------------------------


def test_the_files_say_what_the_engine_says(make_run, tmp_path):
    run = make_run()
    run.epoch()
    run.engine.guarantee.save(tmp_path / "model.json", DELTA)
    found = json.loads((tmp_path / "model.json").read_text())
    assert found["epsilon"] == run.engine.get_epsilon(DELTA)
    texts = {text for texts in found["assumptions"].values() for text in texts}
    assert texts == {assumption.text for assumption in run.engine.assumptions}
    assert hsa.LastIterateDpEvent.from_dict(found["event"]) == run.engine.privacy_event
    assert f"| what ran | {run.engine.privacy_event!r} |" in (tmp_path / "model.md").read_text()


def test_the_command_line_reads_a_checkpoint(make_run, tmp_path, capsys):
    command = pytest.importorskip("hidden_state_accountants.cli.app").run
    run = make_run()
    run.epoch()
    path = tmp_path / "checkpoint.pt"
    run.engine.save_checkpoint(path=path)
    assert command(["epsilon", str(path), "--delta", "1e-6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == run.engine.get_epsilon(1e-6)
    assert hsa.LastIterateDpEvent.from_dict(found["event"]) == run.engine.privacy_event
    assert command(["explain", str(path), "--quiet"]) == 0
    assert "theorem: " in capsys.readouterr().out
    assert command(["epsilon", str(path), "--noise-multiplier", "4"]) == 2
    assert "Expected no --noise-multiplier beside a run" in capsys.readouterr().err
    assert command(["epsilon", str(path), "--relation", "replace_one"]) == 2
    assert "Expected the relation of the checkpoint, REPLACE_SPECIAL" in capsys.readouterr().err


# --- the log of a trainer -------------------------------------------------------------------------


class Trainer:
    """What both trainers have, of the shape of theirs."""

    def __init__(self):
        self.callbacks, self.logged = [], []

    def add_callback(self, callback):
        self.callbacks.append(callback)

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
    ("package", "base"),
    [("lightning", "Callback"), ("pytorch_lightning", "Callback"),
     ("transformers", "TrainerCallback")],
)  # fmt: skip
def test_the_epsilon_of_every_epoch_is_that_of_a_run_that_ends_there(
    make_run, monkeypatch, package, base
):
    fake = types.ModuleType(package)
    setattr(fake, base, type(base, (), {}))
    monkeypatch.setitem(sys.modules, package, fake)
    theirs = type("Trainer", (Trainer,), {"__module__": f"{package}.trainer"})
    trainer = type("Mine", (theirs,), {})()  # a subclass in the user's own module
    run = make_run(batch_order="cyclic")
    log_epsilon(trainer, run.engine, DELTA)
    assert isinstance(trainer.callbacks[0], getattr(fake, base))
    for _ in range(2):
        run.epoch()
        trainer.ends_epoch()
    whole = run.engine.privacy_event
    half = attrs.evolve(whole, num_steps=whole.num_steps // 2)
    ends = [hsa.LastIterateAccountant().compose(e).get_epsilon(DELTA) for e in (half, whole)]
    assert trainer.logged == ends
    assert ends[1] < 2 * ends[0]


def test_no_other_trainer(make_run):
    with pytest.raises(TypeError, match=r"In a loop of your own log engine\.get_epsilon"):
        log_epsilon(Trainer(), make_run().engine, DELTA)


# --- what would lower epsilon ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"loss_geometry": None}, "one change: Poisson batches: epsilon "),
        ({"max_grad_norm": 1.0}, "one change: Poisson batches: epsilon "),
        ({"noise_multiplier": 0.0}, "epsilon = inf"),
    ],
)
def test_the_report_says_what_else_there_is(make_run, caplog, arguments, text):
    with caplog.at_level(logging.INFO, "hidden_state_accountants"):
        run = make_run(**arguments)
    assert not caplog.records
    run.epoch()
    report = run.engine.report(DELTA)
    assert text in report
    lines = report_lines(run.engine.privacy_event, run.engine.guarantee.neighboring_relation, DELTA)
    assert report.endswith("\n".join(lines))


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "no loss is declared"),
        ({"criterion": nn.CrossEntropyLoss()}, "criterion= without feature_norm="),
        ({"optimizer": torch.optim.Adam}, "no hidden-state bound for Adam"),
    ],
)
def test_no_gain_has_a_reason(arguments, reason):
    gain = private(num_steps=8, **arguments).would_gain(DELTA)
    assert gain.verdict == "no"
    assert reason in str(gain)


# --- what is declared -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, (FIXED_RECORDS, GEOMETRY)),
        ({"criterion": None, "loss_geometry": SOFTMAX}, (FIXED_RECORDS, GEOMETRY)),
        ({"criterion": None, "loss_geometry": None}, ()),
        ({"criterion": None, "loss_geometry": None, "mechanism": DiceSGD(0.5)}, ()),
    ],
    ids=["head", "declared", "composition", "dice"],
)
def test_a_private_engine(make_run, options, more):
    run = make_run(**options)
    for _ in range(3):  # before, composition is as good
        run.epoch()
    guarantee, every = run.engine.guarantee, (*OF_EVERY_RUN, FIXED_RECORDS, GEOMETRY)
    assert listed(guarantee, every) == [*OF_EVERY_RUN, *more]
    assert listed(run.engine.accountant.guarantee, every) == [*OF_EVERY_RUN, *more]


@pytest.mark.parametrize("declared", [None, {"loss_geometry": SOFTMAX}])
def test_a_stock_engine(declared):
    loop = stock_loop(declared=declared, **({} if declared else {"poisson_sampling": True}))
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

ALL, NONE = "is not below 1/n for n = 60 records", "is the largest norm of the data"


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
    features, labels = records(normalised=True).tensors

    def target(delta):
        private(target_epsilon=2.0, target_delta=delta, epochs=1)

    def fit(delta):
        fit_head(features, labels, epsilon=1.0, delta=delta, classes=3)

    for ask in (run.engine.get_epsilon, run.engine.report, target, fit):
        assert said(lambda ask=ask: ask(1 / 60), ALL) == 1
        assert not said(lambda ask=ask: ask(1e-4), ALL)


def test_the_largest_norm_of_the_data():
    head = {"max_grad_norm": "auto", "criterion": nn.CrossEntropyLoss()}
    longest = float(records().tensors[0].norm(dim=1).max())
    assert said(lambda: private(feature_norm=longest, **head), NONE) == 1
    assert not said(lambda: private(feature_norm=4.5, **head), NONE)
    assert not said(lambda: private(records(normalised=True), feature_norm=1.0, **head), NONE)
