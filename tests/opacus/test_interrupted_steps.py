"""Steps that end half way: what they did to the parameters is never free."""

import functools

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import BlockCoordinateOptimizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PRIVATE = {"include_private_state": True, "stays_private": True}


@pytest.fixture
def make_blocks(make_run):
    """A run of DP-MBCD with two blocks; `model` is one that was wrapped before."""

    def make(model=None, engine=None):
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)) if model is None else model
        groups = [{"params": part.parameters()} for part in getattr(model, "_module", model)]
        return make_run(
            model=model,
            engine=engine,
            optimizer=torch.optim.SGD(groups, lr=0.1),
            optimizer_class=BlockCoordinateOptimizer,
            loss_geometry=None,
            max_grad_norm=1.0,
        )

    return make


def interrupt_after_first_block(run):
    batch, calls = next(iter(run.loader)), []

    def closure():
        calls.append(run.backward(batch))
        if len(calls) == 2:
            raise KeyError("stop")

    before = [p.clone() for p in run.plain_model.parameters()]
    with pytest.raises(KeyError):
        run.optimizer.step(closure)
    pairs = zip(before, run.plain_model.parameters(), strict=True)
    assert [torch.equal(old, now) for old, now in pairs] == [False, False, True, True]
    assert run.steps == 0


def test_a_block_that_moved_stays_with_the_run(make_blocks):
    run = make_blocks()
    interrupt_after_first_block(run)
    with pytest.raises(hsa.UnsupportedRunError, match="interrupted while it changed"):
        run.engine.get_epsilon(1e-5)
    with pytest.raises(hsa.UnsupportedRunError, match="interrupted while it changed"):
        make_blocks(run.model, run.engine)


def test_a_first_step_that_broke_off_stays_with_the_run(make_run, monkeypatch):
    run = make_run(loss_geometry=None)

    def breaks_off(*_):
        run.plain_model.weight.data.add_(1.0)
        raise KeyError("stop")

    monkeypatch.setattr(run.optimizer.original_optimizer, "step", breaks_off)
    with pytest.raises(KeyError):
        run.step(next(iter(run.loader)))
    with pytest.raises(hsa.UnsupportedRunError, match="interrupted while it changed"):
        make_run(engine=run.engine, model=run.model)


@pytest.mark.parametrize("kind", ["sgd", "dice"])
@pytest.mark.parametrize("clears", [True, False])
def test_pieces_from_before_a_checkpoint_was_loaded(make_run, make_dice, tmp_path, kind, clears):
    """They are no part of the next step."""
    make = functools.partial(make_run if kind == "sgd" else make_dice, noise_multiplier=0.0)
    first = make()
    first.epoch()
    first.engine.save_checkpoint(path=tmp_path / "c.pt", **PRIVATE)
    run = make()
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as loader:
        run.step(next(iter(loader)))  # half a batch, which waits for the rest
    run.engine.load_checkpoint(path=tmp_path / "c.pt")
    features, labels = next(iter(run.loader))
    if clears:
        run.optimizer.zero_grad()
    for p in run.plain_model.parameters():
        p.grad_sample = None
    run.criterion(run.model(features), labels).backward()
    run.optimizer.step()
    first.step(next(iter(first.loader)))
    for own, expected in zip(
        run.plain_model.parameters(), first.plain_model.parameters(), strict=True
    ):
        assert torch.equal(own, expected)
    assert run.steps == 7
