"""What make_private and report say about other batches and other clips."""

import logging

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
OTHERS = "with other batches, at this noise after"


def logged(caplog, make):
    with caplog.at_level(logging.WARNING):
        run = make()
    return run, [record.getMessage() for record in caplog.records]


def test_an_order_that_costs_more_than_the_default(make_run, caplog):
    run, lines = logged(caplog, lambda: make_run(loss_geometry=None))
    (line,) = [line for line in lines if OTHERS in line]
    assert f"{OTHERS} 10 epochs: epsilon at most poisson " in line
    assert "because no loss geometry is declared" in line
    assert "hyper-parameters). Leave out batch_order for Poisson batches." in line
    run.epoch()
    assert f"{OTHERS} 1 epochs" in run.engine.report(DELTA)


def test_an_order_that_wins_later(make_run, caplog):
    _, lines = logged(caplog, lambda: make_run(noise_multiplier=6.0, num_steps=12))
    (line,) = [line for line in lines if OTHERS in line]
    assert f"{OTHERS} 2 epochs" in line
    assert "cyclic batches cost less than Poisson batches from about" in line


def test_poisson_batches_are_not_argued_with(make_run, caplog):
    run, lines = logged(caplog, lambda: make_run(batch_order="poisson", loss_geometry=None))
    assert not [line for line in lines if OTHERS in line]
    run.epoch()
    assert "epsilon at most full " in run.engine.report(DELTA)


def test_an_order_that_costs_less(make_run, caplog):
    _, lines = logged(caplog, lambda: make_run(num_steps=2000))
    assert not [line for line in lines if OTHERS in line]


@pytest.mark.parametrize("batch_order", ["cyclic", "poisson"])
def test_a_clip_that_would_contract(make_run, caplog, batch_order):
    run, lines = logged(caplog, lambda: make_run(max_grad_norm=1.0, batch_order=batch_order))
    (line,) = [line for line in lines if "raise max_grad_norm" in line]
    assert line.startswith("raise max_grad_norm to 2.0001: clipping then never acts, and the")
    run.epoch()
    assert line in run.engine.report(DELTA)
    after = make_run(max_grad_norm=2.0001, batch_order=batch_order)
    after.epoch()
    assert "raise max_grad_norm" not in after.engine.report(DELTA)


def test_a_run_without_noise(make_run, caplog):
    run, lines = logged(caplog, lambda: make_run(noise_multiplier=0.0))
    assert not [line for line in lines if OTHERS in line]
    run.epoch()
    assert "epsilon = inf" in run.engine.report(DELTA)


def test_a_schedule_of_which_nothing_quick_is_known(make_run):
    run = make_run()
    for rate in (0.5, 0.1):
        run.optimizer.param_groups[0]["lr"] = rate
        run.epoch()
    assert OTHERS not in run.engine.report(DELTA)
