"""A run goes on from a checkpoint as if it had not been interrupted, or the difference is named."""

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus_runs import in_pieces
from torch import nn
from torch.optim.lr_scheduler import StepLR

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import BallProjection, Batches, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SECRET = ["shuffled_once", "reshuffled", "without_replacement", "poisson"]
PRIVATE = {"include_private_state": True, "stays_private": True}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


def steps(run, count):
    """Takes steps until `count` are taken, in whole epochs or not."""
    while run.steps < count:
        for batch in run.loader:
            run.step(batch)
            if run.steps == count:
                return


@pytest.mark.parametrize(
    ("batches", "stored", "end"),
    [
        ("cyclic", {}, 18),
        *((Batches(order, seed=7, seed_is_secret=True), {}, 18) for order in SECRET),
        ("shuffled_once", PRIVATE, 18),
        ("reshuffled", PRIVATE, 12),  # the next epoch is drawn anew
        ("poisson", PRIVATE, 12),  # as far as workers drew them ahead
    ],
)
def test_the_same_batches_go_on(make_run, path, batches, stored, end):
    """The noise is 0: then the parameters depend on the batches only."""
    loader = {"num_workers": 2 * (batches == "poisson")}
    first, second = (
        make_run(batch_order=batches, noise_multiplier=0.0, loader=loader) for _ in range(2)
    )
    steps(first, 8)
    first.engine.save_checkpoint(path=path, **stored)
    torch.load(path, weights_only=True)
    second.engine.load_checkpoint(path=path)
    for run in (first, second):
        steps(run, end)
    for a, b in zip(first.plain_model.parameters(), second.plain_model.parameters(), strict=True):
        assert torch.equal(a, b)
    event = second.engine.privacy_event
    assert (event.num_steps, event.release_steps) == (end, () if stored else (8,))
    told = "checkpoints that were saved with stays_private=True are shown to nobody"
    assert any(a.text == told for a in second.engine.assumptions) == bool(stored)


@pytest.mark.parametrize(
    ("order", "stop", "missing"),
    [
        ("shuffled_once", 6, "the batches of the records, which stay"),
        ("reshuffled", 8, "the batches of the epoch"),
        ("reshuffled", 6, ""),
        ("poisson", 8, ""),
    ],
)
def test_without_the_private_state(make_run, path, caplog, order, stop, missing):
    first, second = (make_run(batch_order=order) for _ in range(2))
    steps(first, stop)
    with pytest.raises(ValueError, match="stays_private = True"):
        first.engine.save_checkpoint(path=path, include_private_state=True)
    assert not path.exists()
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


def test_schedules_go_on(make_run, path):
    """Of batches in pieces; and the rates are compared with the declared ones."""
    runs = [make_run(schedule=[0.5] * 12 + [0.25] * 12 + [0.125] * 6) for _ in range(3)]
    whole, first, second = (
        (
            run,
            {
                "noise_scheduler": ExponentialNoise(run.optimizer, gamma=0.9),
                "grad_clip_scheduler": ExponentialGradClip(run.optimizer, gamma=1.1),
                "lr_scheduler": StepLR(run.optimizer, 2, 0.5),
            },
        )
        for run in runs
    )

    def train(run, schedules, epochs):
        for _ in range(epochs):
            with in_pieces(run, 4) as loader:
                run.epoch(loader)
            for schedule in schedules.values():
                schedule.step()

    train(*whole, 5)
    train(*first, 3)
    own = {"mine": 1}
    first[0].engine.save_checkpoint(path=path, stays_private=True, checkpoint_dict=own, **first[1])
    assert own == {"mine": 1}
    assert second[0].engine.load_checkpoint(path=path, **second[1])["mine"] == 1
    train(*second, 2)
    event = second[0].engine.privacy_event
    assert event == whole[0].engine.privacy_event
    for name, count in (("noise_multiplier", 5), ("clip_norm", 5), ("learning_rate", 3)):
        assert len(set(event.per_step(name))) == count
    assert "all of the 30 steps declared in advance" in second[0].engine.report(1e-5)
    with pytest.raises(hsa.UnsupportedRunError, match="Expected num_steps = 30"):
        second[0].epoch()


OTHER = {
    "noise_multiplier": {"noise_multiplier": 3.0},
    "max_grad_norm": {"max_grad_norm": 1.0},
    "batch_size": {"loader": {"batch_size": 15}},
    "batch_order": {"batch_order": "reshuffled"},
    "loss": {"model": nn.Linear(5, 3, bias=False)},
    "domain_diameter": {"after": BallProjection(5.0)},
    "criterion": {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)},
    "order_of_the_records": {"loader": {"sampler": list(reversed(range(60)))}},
    "has_seed": {"batch_order": Batches("shuffled_once", seed=3)},
    "schedule": {"schedule": 0.5},
    "trainable_parameters": {"model": nn.Linear(5, 4)},
    "loss_reduction": {
        "criterion": nn.CrossEntropyLoss(reduction="sum"), "loss_reduction": "sum",
        "sgd": {"lr": 0.05, "weight_decay": 1.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("field", OTHER)
def test_the_field_that_differs_is_named(make_run, path, field):
    run = make_run()
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


def test_an_older_checkpoint_does_not_forget(make_run, path):
    run = make_run()
    run.epoch()
    run.engine.save_checkpoint(path=path, stays_private=True)
    run.epoch()
    back = make_run()
    for engine in (back.engine, HiddenStatePrivacyEngine()):
        with pytest.raises(ValueError, match="that of step 6: 12 steps were taken"):
            engine.load_checkpoint(path=path, module=back.model)
    assert back.steps == 0
    back.engine.load_checkpoint(path=path, discard_later_steps=True)
    assert back.steps == 6
    assert any("given up when it was loaded" in a.text for a in back.engine.assumptions)
    back.epoch()
    run.engine.release()
    again = make_run()
    with pytest.raises(ValueError, match="after step 12 was released"):
        again.engine.load_checkpoint(path=path, discard_later_steps=True)


@pytest.mark.parametrize("order", ["cyclic", "poisson"])
def test_the_record_alone_is_no_run_that_goes_on(make_run, order):
    """A secret order would be drawn anew, and be accounted as one that goes on."""
    run, back = make_run(batch_order=order), make_run(batch_order=order)
    steps(run, 3)
    back.engine.accountant.load_state_dict(run.engine.accountant.state_dict())
    with pytest.raises(hsa.UnsupportedRunError, match="took 0 steps, but 3 are recorded"):
        back.epoch()


def test_what_cannot_be_loaded_leaves_no_error_behind(make_dice, path):
    """The error of the checkpoint would be fed to a run that is accounted from an error of 0."""
    run = make_dice()
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    second = make_dice(engine=run.engine)
    with pytest.raises(ValueError, match="accountant without steps, got one with 6"):
        second.engine.load_checkpoint(path=path)
    assert not any(error.any() for error in second.optimizer._errors)
    assert not second.optimizer.run.is_loading


def test_what_is_neither_saved_nor_loaded(make_run, path):
    run = make_run()
    torch.save({"module_state_dict": {}, "privacy_accountant_state_dict": {}}, path)
    with pytest.raises(ValueError, match="Expected a checkpoint of HiddenStatePrivacyEngine"):
        run.engine.load_checkpoint(path=path)
    run.epoch()
    for act in (run.engine.save_checkpoint, run.engine.load_checkpoint):
        with pytest.raises(hsa.UnsupportedRunError, match="module of the current run"):
            act(path=path, module=nn.Linear(5, 3))
    run.plain_model.weight.data.add_(1.0)
    for stays_private in (True, False):
        with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
            run.engine.save_checkpoint(path=path, stays_private=stays_private)
