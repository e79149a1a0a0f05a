"""What report says would lower epsilon, and that make_private says nothing."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants.advice import report_lines
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5


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


def test_a_clip_that_never_acts_is_not_raised(make_run):
    run = make_run(max_grad_norm=2.0001)
    run.epoch()
    assert "which never acts" not in run.engine.report(DELTA)


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
        ({"optimizer": "adam"}, "no hidden-state bound for Adam"),
    ],
)
def test_no_gain_has_a_reason(arguments, reason):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if arguments.pop("optimizer", None):
        optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(20, 4), torch.randint(3, (20,)))
    engine = HiddenStatePrivacyEngine()
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=5),
        noise_multiplier=1.0, max_grad_norm=1.0, num_steps=8, **arguments,
    )  # fmt: skip
    gain = engine.would_gain(DELTA)
    assert gain.verdict == "no"
    assert reason in str(gain)
