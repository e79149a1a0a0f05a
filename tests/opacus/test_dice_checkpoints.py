"""DiceSGD through the engine: going on elsewhere, and the error that stays here."""

import copy
import pickle

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_dice import (
    BOUND,
    DELTA,
    MARK,
    NEEDLE,
    ORDERS,
    PRIVATE,
    SHOWN,
    error_of,
    everything_in,
    saved,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    Batches,
    DiceAdamOptimizer,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def take(run, count):
    """Takes steps until `count` are taken, in whole epochs or not."""
    while run.steps < count:
        for batch in run.loader:
            run.step(batch)
            if run.steps == count:
                return


@pytest.mark.parametrize(
    ("order", "variant", "stop"), [*[(order, "sgd", 3) for order in ORDERS], ("cyclic", "adam", 6)]
)
def test_a_run_goes_on_exactly(make_dice, tmp_path, order, variant, stop):
    """The noise is 0: then model and error depend on batches, error and moments only."""
    arguments = {"batch_order": order, "noise_multiplier": 0.0}
    if order in ORDERS[2:]:
        arguments["batch_order"] = Batches(order, seed=7, seed_is_secret=True)
    base = {"momentum": 0.9} if variant == "sgd" else None
    whole, first, second = (make_dice(variant, base=base, **arguments) for _ in range(3))
    take(whole, 12)
    take(first, stop)
    path = tmp_path / "c.pt"
    first.engine.save_checkpoint(path=path, **PRIVATE)
    torch.load(path, weights_only=True)
    second.engine.load_checkpoint(path=path)
    np.testing.assert_array_equal(error_of(second), error_of(first))
    take(second, 12)
    np.testing.assert_array_equal(weights(second), weights(whole))
    np.testing.assert_array_equal(error_of(second), error_of(whole))
    assert second.engine.privacy_event == whole.engine.privacy_event


def test_pieces_go_on_too(make_dice, tmp_path):
    """Saved between two batches that came in pieces; in the middle of one nothing can go on."""
    run, other, path = make_dice(), make_dice(), tmp_path / "c.pt"
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
    ) as pieces:
        for count, batch in enumerate(pieces, 1):
            run.step(batch)
            if count == 6:  # of 3 pieces each
                run.engine.save_checkpoint(path=path, **PRIVATE)
                break
            if count > 3:
                with pytest.raises(ValueError, match="a piece of one"):
                    run.engine.save_checkpoint(path=path, **PRIVATE)
    other.engine.load_checkpoint(path=path)
    with BatchMemoryManager(
        data_loader=other.loader, max_physical_batch_size=4, optimizer=other.optimizer
    ) as pieces:
        other.epoch(pieces)
    assert other.steps == 6


def test_without_the_private_state(make_dice, tmp_path, caplog):
    """What is released can be saved, but the run cannot go on from it, and says so."""
    first, second = make_dice(), make_dice()
    first.epoch()
    path = tmp_path / "c.pt"
    for arguments in ({}, {"stays_private": True}):
        caplog.clear()
        first.engine.save_checkpoint(path=path, **arguments)
        assert "lacks the error of the feedback, which is data of the records" in caplog.text
        assert "cannot go on from it" in caplog.text
        assert "private" not in torch.load(path, weights_only=True)["hidden_state_run"]
        with pytest.raises(hsa.UnsupportedRunError, match="lacks the error of the feedback"):
            second.engine.load_checkpoint(path=path)
    assert second.steps == 0
    second.epoch()  # nothing was loaded
    fresh = HiddenStatePrivacyEngine()
    fresh.load_checkpoint(path=path, module=make_dice().model)  # as an ended run
    assert fresh.get_epsilon(DELTA) == first.engine.get_epsilon(DELTA)
    assert fresh.privacy_event == first.engine.privacy_event
    assert "update rule any" in fresh.report(DELTA)


def marked():
    """An engine whose run has an error of MARK in one coordinate."""
    engine, model = HiddenStatePrivacyEngine(), nn.Linear(1, 1, bias=False).double()
    records = TensorDataset(torch.full((1, 1), MARK + 1, dtype=torch.float64))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        data_loader=DataLoader(records, batch_size=1), noise_multiplier=1.0, max_grad_norm=1.0,
        optimizer_class=DiceAdamOptimizer, noise_generator=torch.Generator().manual_seed(0),
        batch_order="cyclic",
    )  # fmt: skip
    for (batch,) in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(optimizer._errors[0]) == MARK
    return engine, model, optimizer, loader


def test_the_error_is_nowhere_by_default(tmp_path):
    engine, model, optimizer, _ = marked()
    path = tmp_path / "c.pt"
    for arguments in ({}, {"stays_private": True}):
        engine.save_checkpoint(path=path, **arguments)
        content = torch.load(path, weights_only=True)
        assert not {MARK, MARK + 1} & set(everything_in(content))  # nor the gradient's norm
        assert NEEDLE not in saved(content)
    engine.save_checkpoint(path=path, **PRIVATE)
    assert NEEDLE in saved(torch.load(path, weights_only=True))
    states = [optimizer.state_dict(), dict(optimizer.state), model.state_dict(),
              engine.accountant.state_dict()]  # fmt: skip
    assert not {MARK, MARK + 1} & set(everything_in(states))
    texts = [repr(engine), repr(optimizer), str(vars(optimizer)), engine.report(DELTA),
             str(vars(engine)), str(engine.compare(DELTA))]  # fmt: skip
    for text in texts:
        assert not SHOWN.search(text)


def test_nothing_that_holds_the_error_can_be_copied():
    engine, model, optimizer, _ = marked()
    for value in (engine, optimizer):
        for copier in (pickle.dumps, copy.deepcopy, saved):
            with pytest.raises((hsa.UnsupportedRunError, TypeError, AttributeError)):
                copier(value)
    assert NEEDLE not in saved(copy.deepcopy(model._module).state_dict())


def test_the_error_is_not_released(make_dice, tmp_path):
    run = make_dice()
    run.epoch()
    with pytest.raises(ValueError, match="nor the error of DiceSGD"):
        run.engine.save_checkpoint(path=tmp_path / "c.pt", include_private_state=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("error_clip_norm", {"error_max_grad_norm": 0.05}),
        ("gradient_bound", {"gradient_bound": BOUND}),
        ("automatic", {"automatic": True}),
        ("optimizer_class", {"variant": "adam"}),
    ],
)
def test_the_field_that_differs_is_named(make_dice, tmp_path, field, arguments):
    run, path = make_dice(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    other = make_dice(**arguments)
    with pytest.raises(ValueError, match=f"of another run: expected ({field}) = "):
        other.engine.load_checkpoint(path=path)
    assert other.steps == 0
    assert not any(error.any() for error in other.optimizer._errors)
    other.epoch()


def test_runs_of_the_other_kind(make_run, make_dice, tmp_path, dataset):
    plain, path = make_run(), tmp_path / "c.pt"
    plain.epoch()
    plain.engine.save_checkpoint(path=path)
    dice = make_dice(model=nn.Linear(5, 3), loader={"dataset": dataset})
    with pytest.raises(ValueError, match=r"of another run|state of a DiceRecorder"):
        dice.engine.load_checkpoint(path=path)
    dice.epoch()
    dice.engine.save_checkpoint(path=path, **PRIVATE)
    with pytest.raises(ValueError, match=r"of another run|state of a RunRecorder"):
        make_run().engine.load_checkpoint(path=path)


def test_damaged_private_state(make_dice, tmp_path):
    run, path = make_dice(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    content = torch.load(path, weights_only=True)
    private = content["hidden_state_run"]["private"]
    broken = [torch.full_like(error, torch.nan) for error in private["error"]]
    for others in ({}, {"error": private["error"][:1]}, {"error": broken}):
        content["hidden_state_run"]["private"] = others
        torch.save(content, path)
        other = make_dice()
        with pytest.raises(ValueError, match=r"damaged|of shapes"):
            other.engine.load_checkpoint(path=path)
        assert other.steps == 0
        other.epoch()


@pytest.mark.parametrize("make", ["make_dice", "make_run"])
def test_a_run_goes_on_once(make, tmp_path, request):
    """That there is one continuation is declared; one that gives up steps is seen."""
    make_dice = request.getfixturevalue(make)
    run, path = make_dice(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    third = make_dice()
    third.engine.load_checkpoint(path=path)
    assert run.engine.get_epsilon(DELTA) == third.engine.get_epsilon(DELTA)
    assert any("in one place only" in a.text for a in third.engine.assumptions)
    third.epoch()
    fourth = make_dice()
    with pytest.raises(ValueError, match="that of step 6: 12 steps were taken"):
        fourth.engine.load_checkpoint(path=path)
    third.engine.release()
    with pytest.raises(ValueError, match="after step 12 was released"):
        fourth.engine.load_checkpoint(path=path, discard_later_steps=True)
