"""A run on a model that other private runs trained, here or elsewhere."""

import copy
import gc
import io
import weakref

import pytest
import torch
from opacus import PrivacyEngine
from opacus_stock import records
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import DiceSGD, HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.accountant import HiddenStateAccountant

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
EPSILON = 1.08957
"""Of one epoch of `Run`, every step of which counts."""


def stock_engine():
    return PrivacyEngine(accountant="hidden_state")


class Run:
    """One make_private on a linear model, and the shortest loop."""

    def __init__(self, engine=None, model=None, **options):
        self.engine = HiddenStatePrivacyEngine() if engine is None else engine
        self.plain = nn.Linear(5, 3) if model is None else model
        trained = [p for p in self.plain.parameters() if p.requires_grad]
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.plain,
            optimizer=torch.optim.SGD(trained, lr=0.5),
            data_loader=DataLoader(records(), batch_size=10),
            **{"noise_multiplier": 2.0, "max_grad_norm": 2.1, **options},
        )

    def epoch(self):
        for features, labels in self.loader:
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(features), labels).backward()
            self.optimizer.step()
        return self

    @property
    def epsilon(self):
        return self.engine.get_epsilon(DELTA)


def trained(engine=None):
    return Run(engine).epoch()


def test_a_cell_that_is_run_again():
    """The model is that of the first engine; both runs are composed, as one engine does it."""
    run, first = trained(), trained()
    again = Run(None, run.model).epoch()
    both = Run(first.engine, first.model).epoch()
    assert again.epsilon == pytest.approx(both.epsilon)
    assert again.epsilon > 1.1 * EPSILON
    assert any("1 private run(s) of other engines" in str(a) for a in again.engine.assumptions)
    assert "(2 runs)" in again.engine.report(DELTA)
    for ask in (lambda: run.epsilon, run.epoch):
        with pytest.raises(hsa.UnsupportedRunError, match="another engine took over its model"):
            ask()


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", ["plain", "model"])
def test_copies_take_their_runs_along(copied, name):
    """3.605 was reported of a federated loop of deep copies, for 5.389."""
    model, rounds = None, []
    for _ in range(3):
        run = Run(None, model).epoch()
        model = copied(getattr(run, name))
        rounds.append(run.epsilon)
    whole = Run()
    for _ in range(3):
        whole.epoch()
        whole = Run(whole.engine, whole.model)
    assert rounds[-1] == pytest.approx(whole.epsilon)
    assert rounds[0] < rounds[1] < rounds[2]


OPTIONS = {
    "head": {"criterion": nn.CrossEntropyLoss()},
    "known loss": {"criterion": nn.CrossEntropyLoss(), "feature_norm": 9.0, "max_grad_norm": 20.0},
    "layers": {},
    "DiceSGD": {"mechanism": DiceSGD(error_max_grad_norm=1.0), "batch_order": "cyclic"},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_script_that_keeps_the_model_alone(kind):
    """The hooks of a run end with its engine and optimizer."""
    layers = [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)]
    model = nn.Linear(5, 3) if "criterion" in OPTIONS[kind] else nn.Sequential(*layers)
    found = []
    for _ in range(3):
        found.append(Run(None, model, **OPTIONS[kind]).epoch().epsilon)
        gc.collect()
    assert found[0] < found[1] < found[2]


def with_its_weight(layer):
    new = nn.Linear(5, 3)
    new.weight = layer.weight
    return new


@pytest.mark.parametrize(
    "build", [with_its_weight, lambda layer: nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3))]
)
def test_parts_go_on_in_another_model(build):
    assert Run(None, build(trained().plain)).epoch().epsilon > 1.1 * EPSILON


@pytest.mark.parametrize("releases", [False, True])
def test_a_run_that_goes_on_beside_a_copy(releases):
    """Two models of one run are used; the one before counts if it was released."""
    run = trained()
    early = copy.deepcopy(run.plain)
    if releases:
        run.engine.release()
    run.epoch()
    if releases:
        Run(run.engine, early)
        return
    with pytest.raises(hsa.UnsupportedRunError, match="after step 6 of 12"):
        Run(run.engine, early)


def test_a_run_without_epsilon():
    run = trained()
    with pytest.raises(hsa.UnsupportedRunError):
        run.optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match=r"that has none: .*Start from a new model"):
        Run(None, run.model)


def test_a_model_keeps_no_records_alive():
    run = trained()
    model, dataset = copy.copy(run.plain), weakref.ref(run.loader.dataset)
    for part in model.modules():  # what a run hangs on a model that goes on
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    run.engine._run.close("")
    del run
    gc.collect()
    assert dataset() is None
    assert len(list(vars(model)["_hidden_state_runs"])) == 1


def test_opacus_own_engine_refuses():
    own, stock = trained().plain, trained(stock_engine()).model
    for model in (own, copy.deepcopy(own), stock):
        with pytest.raises((hsa.UnsupportedRunError, ValueError), match=r"6 steps of|hooks twice"):
            Run(stock_engine(), model).epoch()


def test_a_hook_by_hand_refuses():
    layer, accountant = trained().plain, HiddenStateAccountant()
    run = Run(PrivacyEngine(accountant="rdp"), with_its_weight(layer))
    run.optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(1 / 6))
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of another engine"):
        run.epoch()


def test_runs_of_opacus_own_engine():
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of a PrivacyEngine were not decl"):
        Run(None, trained(stock_engine()).model)
    run = Run(stock_engine())
    run.engine.accountant.declare_run()
    once = run.epoch().epsilon
    again = Run(None, run.model).epoch()
    assert len(again.engine.accountant.recorders) == 2
    assert again.epsilon > 1.1 * once


@pytest.mark.parametrize("new_engine", [HiddenStatePrivacyEngine, stock_engine])
def test_a_frozen_part_of_the_model(new_engine):
    model = nn.Sequential(trained().plain.requires_grad_(False), nn.Linear(3, 3))
    run = Run(new_engine(), model)
    if new_engine is HiddenStatePrivacyEngine:
        assert run.epsilon == pytest.approx(EPSILON, rel=1e-4)
        return
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of another engine"):
        run.epoch()


@pytest.mark.parametrize("new_engine", [HiddenStatePrivacyEngine, stock_engine])
def test_a_checkpoint_goes_on(new_engine, tmp_path):
    """A second run from there knows the first; a loaded run is not counted twice."""
    first, again = trained(new_engine()), Run(new_engine())
    path = {"path": tmp_path / "a"}
    first.engine.save_checkpoint(**path, module=first.model, optimizer=first.optimizer)
    again.engine.load_checkpoint(**path, module=again.model, optimizer=again.optimizer)
    once = again.epsilon
    Run(again.engine, again.model)
    assert again.epsilon == pytest.approx(once)
    assert trained(again.engine).epsilon > once
    if new_engine is HiddenStatePrivacyEngine:
        third = Run(None, again.model)
        assert len(third.engine.accountant.recorders) == 3
        with pytest.raises(ValueError, match="without steps, got one with"):
            third.engine.load_checkpoint(**path)
