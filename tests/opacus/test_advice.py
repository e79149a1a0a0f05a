"""What report says about other batches and other clips, and that make_private says nothing."""

import logging

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
OTHERS = "with other batches, at this noise after"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"loss_geometry": None}, "because no loss geometry is declared"),
        ({"batch_order": "poisson", "loss_geometry": None}, "epsilon at most full "),
        ({"max_grad_norm": 1.0}, "raise max_grad_norm to 2.0001: clipping then never acts"),
        ({"noise_multiplier": 0.0}, "epsilon = inf"),
    ],
)
def test_the_report_says_what_else_there_is(make_run, caplog, arguments, text):
    with caplog.at_level(logging.INFO, "hidden_state_accountants"):
        run = make_run(**arguments)
    assert not caplog.records
    run.epoch()
    assert text in run.engine.report(DELTA)


def test_a_clip_that_never_acts_is_not_raised(make_run):
    run = make_run(max_grad_norm=2.0001)
    run.epoch()
    assert "raise max_grad_norm" not in run.engine.report(DELTA)


def test_a_schedule_of_which_nothing_quick_is_known(make_run):
    run = make_run()
    for rate in (0.5, 0.1):
        run.optimizer.param_groups[0]["lr"] = rate
        run.epoch()
    assert OTHERS not in run.engine.report(DELTA)
