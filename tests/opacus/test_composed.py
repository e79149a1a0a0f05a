"""Optimizers that no hidden-state bound is about: accounted by composition, with one clear line."""

import logging
import re

import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import (
    BallProjection,
    HiddenStatePrivacyEngine,
)
from hidden_state_adapters.opacus.composed import ComposedOptimizer
from hidden_state_adapters.opacus.wrappers import HeadModule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [3.0, 4.0]}


@pytest.fixture
def make(make_run):
    """A run with nothing that asks for a hidden state; Adam, unless told otherwise."""

    def make(base=torch.optim.Adam, options=None, **arguments):
        torch.manual_seed(0)
        model = arguments.pop("model", None) or nn.Linear(5, 3)
        if "optimizer" not in arguments:
            options = {"lr": 0.01, **(options or {})}
            arguments["optimizer"] = base(model.parameters(), **options)
        arguments = {"loss_geometry": None, "batch_order": "poisson", **arguments}
        return make_run(model=model, **arguments)

    return make


def as_composition(run):
    event = run.engine.privacy_event.as_composition(NeighboringRelation.ADD_OR_REMOVE_ONE)
    return hsa.LastIterateAccountant("ADD_OR_REMOVE_ONE").compose(event).get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("base", "options", "name"),
    [
        (torch.optim.Adam, {}, "Adam"),
        (torch.optim.SGD, {"momentum": 0.9}, r"SGD with momentum = 0\.9"),
        (
            torch.optim.SGD,
            {"momentum": 0.9, "nesterov": True},
            r"SGD with momentum = 0\.9, nesterov = True",
        ),
    ],
)
def test_the_report_says_why_every_step_counts(make, base, options, name):
    run = make(base, options)
    run.epoch()
    report = run.engine.report(DELTA)
    line = f"no hidden-state bound for {name}: every step counts; epsilon is that of composition"
    assert re.search(line, report)
    assert "learning rate" not in report
    assert isinstance(run.optimizer, ComposedOptimizer)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(as_composition(run), rel=1e-9)


def test_plain_sgd_is_recorded_as_it_is(make):
    run = make(torch.optim.SGD, {"weight_decay": 0.1})
    run.epoch()
    event = run.engine.privacy_event
    assert (event.learning_rate, event.weight_decay) == (0.01, 0.1)
    assert "criterion= without feature_norm=: every step counts" in run.engine.report(DELTA)


def test_momentum_that_a_scheduler_sets(make):
    """OneCycleLR sets it at the first step; nothing asked for a hidden state."""
    run = make(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.5, total_steps=6)
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    assert "SGD with momentum = " in run.engine.report(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(as_composition(run), rel=1e-9)


# --- what asks for a hidden state ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ({"loss_geometry": "auto", "feature_norm": 1.0}, "criterion, feature_norm"),
        ({"loss_geometry": LossGeometry.convex(1.0)}, "loss_geometry"),
        ({"after": BallProjection(5.0)}, "after"),
        ({"schedule": 0.01}, "schedule"),
    ],
)
def test_hidden_state_bounds_stay_refused_by_name(make, arguments, asked):
    text = f"Expected torch.optim.SGD, got Adam.*Or leave out {asked}.*: any optimizer is accounted"
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make(**arguments)


# --- the guards that stay on ---------------------------------------------------------------------


def trained_before(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_moments_from_before_the_run(make):
    model = nn.Linear(5, 3)
    with pytest.raises(hsa.UnsupportedRunError, match="Adam that took no step, got one with a st"):
        make(model=model, optimizer=trained_before(model))


def test_moments_of_another_optimizer_are_not_loaded(make):
    run = make()
    state = trained_before(nn.Linear(5, 3)).state_dict()
    with pytest.raises(hsa.UnsupportedRunError, match="moments: from elsewhere they may hold"):
        run.optimizer.load_state_dict(state)


def test_moments_of_the_run_before_go_on(make):
    """The runs compose, and what the optimizer keeps was accounted by the first."""
    run = make()
    run.epoch()
    once = run.engine.get_epsilon(DELTA)
    model, optimizer, loader = run.engine.make_private(
        module=run.model, optimizer=run.optimizer, data_loader=run.loader, noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    run.model, run.optimizer, run.loader = model, optimizer, loader
    run.epoch()
    assert run.engine.get_epsilon(DELTA) > once


def test_a_step_hook_is_refused(make):
    run = make()
    run.optimizer.original_optimizer.register_step_pre_hook(lambda *args: None)
    with pytest.raises(hsa.UnsupportedRunError, match="without step hooks"):
        run.epoch()


class Halved(torch.optim.SGD):
    """An optimizer of the user's own."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.5 * group["lr"])


def test_an_optimizer_of_ones_own_is_taken_at_its_word(make):
    run = make(Halved)
    run.epoch()
    declared = [a.text for a in run.engine.assumptions if a.status is Status.DECLARED]
    assert "of the records Halved sees only the noisy gradients in .grad" in declared
    adam = make()
    adam.epoch()
    checked = [a.text for a in adam.engine.assumptions if a.status is Status.CHECKED]
    assert "momentum and moments made from noisy gradients only" in checked


# --- Opacus' clips -----------------------------------------------------------------------------

LAYERS = {"clipping": "per_layer", "max_grad_norm": [0.3, 0.02, 0.3, 0.004]}
WAYS = [
    {},
    LAYERS,
    {**LAYERS, "grad_sample_mode": "functorch"},
    {"grad_sample_mode": "ew"},
    {"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss()},
]


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("way", WAYS)
def test_the_trajectory_is_that_of_opacus(way, rows):
    """In pieces, too; 0.2 shortens about half of the gradients."""
    ends = []
    for engine, order in (
        (HiddenStatePrivacyEngine(), {"batch_order": "cyclic"}),
        (PrivacyEngine(), {"poisson_sampling": False}),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        data = TensorDataset(torch.randn(12, 5), torch.arange(12) % 3)
        private, optimizer, *criterion, loader = engine.make_private(
            module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=4), noise_multiplier=0.0,
            **{"max_grad_norm": 0.2, **way, **order},
        )  # fmt: skip
        criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=rows, optimizer=optimizer
        ) as pieces:
            for features, labels in pieces:
                optimizer.zero_grad()
                criterion(private(features), labels).backward()
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(ends[0]).all()


def test_the_noise_is_that_of_all_clip_norms_together(make):
    run = make(
        torch.optim.SGD, {"lr": 1.0}, batch_order="full", noise_multiplier=20.0,
        model=nn.Linear(5, 300), **PER_LAYER,
    )  # fmt: skip
    assert run.optimizer.max_grad_norm == 5.0
    assert not isinstance(run.model, HeadModule)  # as in Opacus
    before = [p.detach().clone() for p in run.plain_model.parameters()]
    run.epoch()
    assert run.engine.privacy_event.clip_norm == 5.0
    moved = [p.detach() - q for p, q in zip(run.plain_model.parameters(), before, strict=True)]
    std = float(torch.cat([m.flatten() for m in moved]).std()) * 60 / (20.0 * 5.0)
    assert std == pytest.approx(1, rel=0.1)  # 1800 numbers


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_grad_norm": 1.0}, ValueError, "a list of 2 clip norms"),
        ({"max_grad_norm": [1.0]}, ValueError, "a list of 2 clip norms"),
        ({"max_grad_norm": [1.0, 0.0]}, ValueError, "max_grad_norm"),
        (
            {"max_grad_norm": [1.0, 1.0], "grad_sample_mode": "ghost"},
            hsa.UnsupportedRunError,
            'with grad_sample_mode="ghost"',
        ),
        (
            {"max_grad_norm": [1.0, 1.0], "after": BallProjection(1.0)},
            hsa.UnsupportedRunError,
            '"per_layer" is accounted by composition',
        ),
    ],
)
def test_clip_norms_that_are_refused(make, arguments, error, text):
    with pytest.raises(error, match=text):
        make(torch.optim.SGD, clipping="per_layer", **arguments)


def test_the_sum_of_clip_norms_does_not_change(make):
    """A scheduler of Opacus scales what the noise is made from, and not the clips."""
    run = make(**PER_LAYER)
    run.optimizer.max_grad_norm *= 0.5
    with pytest.raises(hsa.UnsupportedRunError, match=r"uses max_grad_norm = 2\.5"):
        run.epoch()


@pytest.mark.parametrize("own", [True, False])
def test_clip_norms_of_layers_do_not_change(make, own):
    """The noise is made from those of the start."""
    norms = [3.0, 4.0]
    runs = [make(**{**PER_LAYER, "max_grad_norm": norms, "batch_order": "cyclic"}) for _ in "ab"]
    if own:
        runs[0].optimizer.max_grad_norms[0] = 100.0
        with pytest.raises(
            hsa.UnsupportedRunError, match=r"uses norms_of_layers = \(100\.0, 4\.0\)"
        ):
            runs[0].epoch()
    else:
        norms[0] = 100.0  # the list of the call is no longer asked
        assert runs[0].optimizer.max_grad_norms == runs[1].optimizer.max_grad_norms == [3.0, 4.0]


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_with_the_moments(make, tmp_path, caplog):
    arguments = {"noise_multiplier": 0.0, "batch_order": "cyclic"}
    whole, first, second = (make(**arguments) for _ in range(3))
    for run, epochs in ((whole, 3), (first, 2)):
        for _ in range(epochs):
            run.epoch()
    with caplog.at_level(logging.WARNING):
        first.engine.save_checkpoint(path=tmp_path / "adam.pt")
    assert "counts as a release" not in caplog.text  # every iterate is covered anyway
    second.engine.load_checkpoint(path=tmp_path / "adam.pt")
    second.epoch()
    assert second.steps == 18
    for a, b in zip(whole.plain_model.parameters(), second.plain_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
