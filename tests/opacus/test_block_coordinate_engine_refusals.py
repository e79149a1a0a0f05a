"""DP-MBCD through the engine: what is refused, and that no epsilon is left after it."""

import math

import pytest
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_block_coordinate import BATCHES, DELTA, RATE, Session

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    BallProjection,
    BlockCoordinate,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_no_figures_before_the_end_of_an_epoch(num_blocks):
    run = Session(num_blocks).train()
    epsilon = run.engine.get_epsilon(DELTA)
    batches = iter(run.loader)
    for _ in range(2):
        run.step(next(batches))
        for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
            with pytest.raises(hsa.UnsupportedRunError, match="Finish the epoch"):
                ask(DELTA)
        with pytest.raises(hsa.UnsupportedRunError, match="Finish the epoch"):
            _ = run.event
    run.step(next(batches))
    assert run.engine.get_epsilon(DELTA) > epsilon
    with pytest.raises(ValueError, match="at least one step"):
        _ = Session(num_blocks).event


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"after": BallProjection(5.0)}, "after = None.*l1, l2 and nonnegative"),
        ({"schedule": RATE}, "schedule = None.*constant step size"),
        ({"automatic": True}, "Unknown argument of make_private: automatic"),
        ({"sgd": {"weight_decay": 0.1}}, "weight_decay = 0.*Use l2"),
        ({"sgd": {"momentum": 0.9}}, "momentum = 0"),
        ({"batch_order": "poisson"}, 'batch_order="cyclic" or "full".*"poisson"'),
        ({"batch_order": "reshuffled"}, 'batch_order="cyclic" or "full".*"reshuffled"'),
        ({"batch_order": "shuffled_once"}, 'batch_order="cyclic" or "full".*"shuffled_once"'),
        ({"batch_order": "without_replacement"}, 'batch_order="cyclic" or "full".*"without'),
        ({"max_grad_norm": [0.7, 0.7]}, "max_grad_norm"),
        ({"max_grad_norm": 0.0}, "max_grad_norm > 0"),
        ({"loss_reduction": "none"}, "loss_reduction"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(options, text):
    with pytest.raises((hsa.UnsupportedRunError, ValueError, TypeError), match=text):
        Session(**options)


@pytest.mark.parametrize(("name", "value"), [("l1", -0.1), ("l2", math.nan), ("nonnegative", 1)])
def test_options_that_are_impossible(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        BlockCoordinate(**{name: value})


def no_closure(run):
    run.backward(next(iter(run.loader)))
    run.optimizer.step()


def in_the_second_block(change):
    """A step whose second pass does something else."""

    def misuse(run):
        batch, calls = next(iter(run.loader)), []

        def closure():
            calls.append(1)
            return run.backward(batch) if len(calls) == 1 else change(run, batch)

        run.optimizer.step(closure)

    return misuse


def two_forwards(run, batch):
    run.model(batch[0])
    run.backward(batch)


def moves_the_first_block(run, batch):
    run.backward(batch)
    next(run.inner.parameters()).data.add_(0.1)


def moved_before(run, batch):
    next(run.inner.parameters()).data.add_(0.1)
    run.backward(batch)


def draws(run):
    """Every pass has a batch of its own."""
    drawn = iter(run.loader)
    run.optimizer.step(lambda: run.backward(next(drawn)))


MISUSE = {
    "no closure": (no_closure, "got no closure"),
    "other inputs": (in_the_second_block(lambda r, b: r.backward(BATCHES[1])), "the loader drew"),
    "another batch": (draws, "the loader drew"),
    "two forwards": (
        in_the_second_block(two_forwards),
        "follows 2 training passes|no per-example gradients",
    ),
    "no forward": (
        in_the_second_block(lambda r, b: None),
        "follows 0 training passes|no per-example gradients",
    ),
    "step": (in_the_second_block(lambda r, b: r.step(b)), "step was not finished"),
    "epsilon": (in_the_second_block(lambda r, b: r.engine.get_epsilon(DELTA)), "not finished"),
    "release": (in_the_second_block(lambda r, b: r.engine.release()), "not finished"),
    "moves": (in_the_second_block(moves_the_first_block), "changed outside|other parameters"),
    "moved": (in_the_second_block(moved_before), "changed outside|other parameters"),
}


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("name", MISUSE)
def test_what_the_loop_does_otherwise(name, epochs):
    """Refused, and then there is no epsilon and no event."""
    misuse, text = MISUSE[name]
    run = Session().train(epochs)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        misuse(run)
    if name == "no closure":
        return  # nothing has happened yet
    for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
        with pytest.raises((hsa.UnsupportedRunError, ValueError)):
            ask(DELTA)
    with pytest.raises(hsa.UnsupportedRunError, match="earlier step"):
        run.train()
    with pytest.raises((hsa.UnsupportedRunError, ValueError)):
        _ = run.event


def test_blocks_of_mapped_records_have_one_batch():
    run = Session(loop_maps_records=True)
    with pytest.raises(hsa.UnsupportedRunError, match="different inputs"):
        draws(run)


def test_batches_in_pieces():
    run = Session(1)
    with (
        pytest.raises(hsa.UnsupportedRunError, match="whole batches"),
        BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer
        ) as pieces,
    ):
        run.train(loader=pieces)


def test_a_run_ends_at_the_end_of_an_epoch():
    """A later one would leave the engine without an epsilon for good."""
    run = Session()
    drawn = iter(run.loader)
    run.step(next(drawn))
    again = {"engine": run.engine, "model": run.inner, "module": run.model}
    for options in ({}, {"target_epsilon": 9.0, "target_delta": DELTA, "epochs": 1}):
        with pytest.raises(hsa.UnsupportedRunError, match="Finish the epoch"):
            Session(**again, **options)
    run.train(loader=drawn)
    Session(**again).train()
    assert [e.num_epochs for e in run.event.events] == [1, 1]
