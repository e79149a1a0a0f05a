"""A run goes on from a checkpoint as if it had not been interrupted, or the difference is named."""

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    BallProjection,
    Batches,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SECRET = ["shuffled_once", "reshuffled", "without_replacement", "poisson"]
PRIVATE = {"include_private_state": True, "stays_private": True}


def steps(run, count):
    """Takes steps until `count` are taken, in whole epochs or not."""
    while run.steps < count:
        for batch in run.loader:
            run.step(batch)
            if run.steps == count:
                return


@pytest.mark.parametrize("stop", [3, 6, 9])
@pytest.mark.parametrize("order", ["cyclic", *SECRET])
def test_the_same_batches_go_on(make_run, tmp_path, order, stop):
    """The noise is 0: then the parameters depend on the batches only."""
    batches = "cyclic" if order == "cyclic" else Batches(order, seed=7, seed_is_secret=True)
    runs = (make_run(batch_order=batches, noise_multiplier=0.0) for _ in range(3))
    whole, first, second = runs
    for _ in range(3):
        whole.epoch()
    steps(first, stop)
    path = tmp_path / "checkpoint.pt"
    first.engine.save_checkpoint(path=path)
    second.engine.load_checkpoint(path=path)
    while second.steps < 18:
        second.epoch()
    assert second.steps == 18
    for a, b in zip(whole.plain_model.parameters(), second.plain_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert second.engine.privacy_event.release_steps == (stop,)


@pytest.mark.parametrize(("order", "workers"), [*((order, 0) for order in SECRET), ("poisson", 2)])
def test_a_secret_order_goes_on_with_its_private_state(make_run, tmp_path, order, workers):
    loader = {"num_workers": workers}
    first, second = (make_run(batch_order=order, loader=loader) for _ in range(2))
    steps(first, 8)
    plan, path = first.optimizer.run.declared.plan, tmp_path / "checkpoint.pt"
    first.engine.save_checkpoint(path=path, **PRIVATE)
    torch.load(path, weights_only=True)
    second.engine.load_checkpoint(path=path)
    features = second.loader.dataset.tensors[0]
    drawn_ahead = len(plan.private_state(8)["draws"]) if plan.draws_every_step else 4
    assert drawn_ahead or not workers
    expected = [plan.batch(k) for k in range(8, 12)]
    for k, batch in enumerate(second.loader):
        if k < drawn_ahead:
            torch.testing.assert_close(batch[0], features[expected[k]], rtol=0, atol=0)
        second.step(batch)
    assert second.steps == 12
    assert second.engine.privacy_event.num_steps == 12


@pytest.mark.parametrize(
    ("order", "stop", "missing"),
    [
        ("shuffled_once", 6, "the batches of the records, which stay"),
        ("shuffled_once", 8, "the batches of the records, which stay"),
        ("reshuffled", 8, "the batches of the epoch"),
        ("reshuffled", 6, ""),
        ("without_replacement", 8, ""),
        ("poisson", 8, ""),
    ],
)
def test_without_the_private_state(make_run, tmp_path, caplog, order, stop, missing):
    first, second = (make_run(batch_order=order) for _ in range(2))
    steps(first, stop)
    path = tmp_path / "checkpoint.pt"
    first.engine.save_checkpoint(path=path)
    assert ("cannot go on from it" in caplog.text) == bool(missing)
    assert "private" not in torch.load(path, weights_only=True)["hidden_state_run"]
    if missing:
        with pytest.raises(hsa.UnsupportedRunError, match=f"lacks {missing}.*include_private"):
            second.engine.load_checkpoint(path=path)
        assert second.steps == 0
        second.epoch()  # nothing was loaded
        return
    second.engine.load_checkpoint(path=path)
    second.epoch()
    assert second.steps == 12 if stop == 6 else 14


def test_the_order_is_not_released(make_run, tmp_path):
    run = make_run(batch_order="reshuffled")
    run.epoch()
    with pytest.raises(ValueError, match="stays_private = True"):
        run.engine.save_checkpoint(path=tmp_path / "c.pt", include_private_state=True)
    assert not list(tmp_path.iterdir())
    assert run.engine.accountant.recorders[0].release_steps == ()


def schedulers(run):
    return {
        "noise_scheduler": ExponentialNoise(run.optimizer, gamma=0.9),
        "grad_clip_scheduler": ExponentialGradClip(run.optimizer, gamma=1.1),
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5),
    }


def test_schedules_go_on(make_run, tmp_path):
    runs = [make_run() for _ in range(3)]
    whole, first, second = ((run, schedulers(run)) for run in runs)
    path = tmp_path / "c.pt"

    def train(run, schedules, epochs):
        for _ in range(epochs):
            run.epoch()
            for schedule in schedules.values():
                schedule.step()

    train(*whole, 5)
    train(*first, 3)
    first[0].engine.save_checkpoint(path=path, stays_private=True, **first[1])
    torch.load(path, weights_only=True)
    second[0].engine.load_checkpoint(path=path, **second[1])
    train(*second, 2)
    assert second[0].engine.privacy_event == whole[0].engine.privacy_event
    event = second[0].engine.privacy_event
    assert len(set(event.per_step("noise_multiplier"))) == 5
    assert len(set(event.per_step("clip_norm"))) == 5
    assert len(set(event.per_step("learning_rate"))) == 3


OTHER = {
    "noise_multiplier": {"noise_multiplier": 3.0},
    "max_grad_norm": {"max_grad_norm": 1.0},
    "batch_size": {"loader": {"batch_size": 15}},
    "batch_order": {"batch_order": "reshuffled"},
    "loss": {"model": nn.Linear(5, 3, bias=False)},
    "domain_diameter": {"after": BallProjection(5.0)},
    "max_batch_size": {},
    "criterion": {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)},
    "order_of_the_records": {"loader": {"sampler": list(reversed(range(60)))}},
    "has_seed": {"batch_order": Batches("shuffled_once", seed=3)},
    "trainable_parameters": {"model": nn.Linear(5, 4)},
    "loss_reduction": {
        "criterion": nn.CrossEntropyLoss(reduction="sum"), "loss_reduction": "sum",
        "sgd": {"lr": 0.05, "weight_decay": 1.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("field", [name for name in OTHER if OTHER[name]])
def test_the_field_that_differs_is_named(make_run, tmp_path, field):
    run, path = make_run(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path)
    other = make_run(**OTHER[field])
    before = [p.detach().clone() for p in other.plain_model.parameters()]
    with pytest.raises(ValueError, match=f"of another run: expected {field} = "):
        other.engine.load_checkpoint(path=path)
    assert other.steps == 0
    for p, old in zip(other.plain_model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    other.epoch()


def test_a_stock_checkpoint_is_refused(make_run, tmp_path):
    run, path = make_run(), tmp_path / "c.pt"
    state = {"module_state_dict": {}, "privacy_accountant_state_dict": {}}
    torch.save(state, path)
    with pytest.raises(ValueError, match="Expected a checkpoint of HiddenStatePrivacyEngine"):
        run.engine.load_checkpoint(path=path)


def test_an_older_checkpoint_does_not_forget(make_run, tmp_path):
    run, path = make_run(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, stays_private=True)
    run.epoch()
    back = make_run()
    with pytest.raises(ValueError, match="that of step 6: 12 steps were taken"):
        back.engine.load_checkpoint(path=path)
    with pytest.raises(ValueError, match="that of step 6: 12 steps were taken"):
        HiddenStatePrivacyEngine().load_checkpoint(path=path, module=back.model)
    assert back.steps == 0
    back.engine.load_checkpoint(path=path, discard_later_steps=True)
    assert back.steps == 6
    assert any("given up when it was loaded" in a.text for a in back.engine.assumptions)
    back.epoch()
    run.engine.release()
    again = make_run()
    with pytest.raises(ValueError, match="after step 12 was released"):
        again.engine.load_checkpoint(path=path, discard_later_steps=True)


@pytest.mark.parametrize("order", ["cyclic", *SECRET])
def test_the_record_alone_is_no_run_that_goes_on(make_run, order):
    """A secret order would be drawn anew, and be accounted as one that goes on."""
    run = make_run(batch_order=order)
    steps(run, 3)
    back = make_run(batch_order=order)
    back.engine.accountant.load_state_dict(run.engine.accountant.state_dict())
    with pytest.raises(hsa.UnsupportedRunError, match="took 0 steps, but 3 are recorded"):
        back.epoch()


def test_what_cannot_be_loaded_leaves_no_error_behind(make_dice, tmp_path):
    """The error of the checkpoint would be fed to a run that is accounted from an error of 0."""
    run, path = make_dice(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    second = make_dice(engine=run.engine)
    with pytest.raises(ValueError, match="accountant without steps, got one with 6"):
        second.engine.load_checkpoint(path=path)
    assert not any(error.any() for error in second.optimizer._errors)
    assert not second.optimizer.run.is_loading


def test_own_entries_and_pieces(make_run, tmp_path):
    run, path = make_run(), tmp_path / "c.pt"
    own = {"mine": 1}
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as pieces:
        for batch in pieces:
            run.step(batch)
            if run.steps == 3:
                break
    run.engine.save_checkpoint(path=path, checkpoint_dict=own)
    assert own == {"mine": 1}
    resumed = make_run()
    assert resumed.engine.load_checkpoint(path=path)["mine"] == 1
    with BatchMemoryManager(
        data_loader=resumed.loader, max_physical_batch_size=5, optimizer=resumed.optimizer
    ) as pieces:
        resumed.epoch(pieces)
    assert resumed.steps == 6


def test_a_changed_model_is_not_saved(make_run, tmp_path):
    run = make_run()
    run.epoch()
    with torch.no_grad():
        run.plain_model.weight.add_(1.0)
    for stays_private in (True, False):
        with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
            run.engine.save_checkpoint(path=tmp_path / "c.pt", stays_private=stays_private)
    with pytest.raises(hsa.UnsupportedRunError, match="module of the current run"):
        run.engine.save_checkpoint(path=tmp_path / "c.pt", module=nn.Linear(5, 3))
