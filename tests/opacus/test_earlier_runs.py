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


def hidden_state_engine():
    return HiddenStatePrivacyEngine()


def stock_engine():
    return PrivacyEngine(accountant="hidden_state")


each_engine = pytest.mark.parametrize("new_engine", [hidden_state_engine, stock_engine])


class Run:
    """One make_private on a linear model, and the shortest loop."""

    def __init__(self, engine, model=None, **options):
        self.engine, self.plain = engine, nn.Linear(5, 3) if model is None else model
        self.model, self.optimizer, self.loader = engine.make_private(
            module=self.plain,
            data_loader=DataLoader(records(), batch_size=10),
            noise_multiplier=2.0,
            **{
                "optimizer": torch.optim.SGD(self.plain.parameters(), lr=0.5),
                "max_grad_norm": 2.1,
                **options,
            },
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


def trained(engine):
    return Run(engine).epoch()


def test_a_cell_that_is_run_again():
    """The model is that of the first engine; both runs are composed, as one engine does it."""
    run, own = trained(hidden_state_engine()), hidden_state_engine()
    again = Run(own, run.model).epoch()
    first = trained(hidden_state_engine())
    both = Run(first.engine, first.model).epoch()
    assert again.epsilon == pytest.approx(both.epsilon)
    assert again.epsilon > 1.1 * first_epsilon()
    assert any("1 private run(s) of other engines" in str(a) for a in own.assumptions)
    assert "(2 runs)" in own.report(DELTA)
    for ask in (lambda: run.epsilon, run.epoch):
        with pytest.raises(hsa.UnsupportedRunError, match="another engine took over its model"):
            ask()


def first_epsilon():
    return trained(hidden_state_engine()).epsilon


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
        run = Run(hidden_state_engine(), model).epoch()
        model = copied(getattr(run, name))
        rounds.append(run.epsilon)
    whole = Run(hidden_state_engine())
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
    model = nn.Linear(5, 3) if "loss" in kind or kind == "head" else nn.Sequential(*layers)
    found = []
    for _ in range(3):
        found.append(Run(hidden_state_engine(), model, **OPTIONS[kind]).epoch().epsilon)
        gc.collect()
    assert found[0] < found[1] < found[2]


def test_a_layer_goes_on_in_another_model():
    run = Run(hidden_state_engine(), nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))).epoch()
    new = nn.Sequential(run.plain[0], nn.Tanh(), nn.Linear(4, 3))
    assert Run(hidden_state_engine(), new).epoch().epsilon > 1.1 * first_epsilon()


def test_a_parameter_goes_on_in_another_layer():
    run, new = trained(hidden_state_engine()), nn.Linear(5, 3)
    new.weight = run.plain.weight
    assert Run(hidden_state_engine(), new).epoch().epsilon > 1.1 * first_epsilon()


def test_a_run_that_goes_on_beside_a_copy():
    """Two models of one run are used; the one before counts if it was released."""
    for releases in (False, True):
        run = trained(hidden_state_engine())
        early = copy.deepcopy(run.plain)
        if releases:
            run.engine.release()
        run.epoch()
        if releases:
            Run(run.engine, early)
            continue
        with pytest.raises(hsa.UnsupportedRunError, match="after step 6 of 12"):
            Run(run.engine, early)


def test_a_run_without_epsilon():
    run = trained(hidden_state_engine())
    with pytest.raises(hsa.UnsupportedRunError):
        run.optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match=r"that has none: .*Start from a new model"):
        Run(hidden_state_engine(), run.model)


def test_a_loaded_run_is_not_counted_twice(tmp_path):
    first = trained(hidden_state_engine())
    first.engine.save_checkpoint(path=tmp_path / "a")
    again = Run(hidden_state_engine())
    again.engine.load_checkpoint(path=tmp_path / "a")
    third = Run(hidden_state_engine(), again.model)
    assert len(third.engine.accountant.recorders) == 2
    assert third.epsilon == pytest.approx(first.epsilon)
    with pytest.raises(ValueError, match="without steps, got one with 6"):
        third.engine.load_checkpoint(path=tmp_path / "a")


def test_a_model_keeps_no_records_alive():
    run = trained(hidden_state_engine())
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
    own, stock = trained(hidden_state_engine()).plain, trained(stock_engine()).model
    for model in (own, copy.deepcopy(own), stock):
        with pytest.raises((hsa.UnsupportedRunError, ValueError), match=r"6 steps of|hooks twice"):
            Run(stock_engine(), model).epoch()


def test_a_hook_by_hand_refuses():
    model, accountant = trained(hidden_state_engine()).plain, HiddenStateAccountant()
    layer = nn.Linear(5, 3)
    layer.weight, layer.bias = model.weight, model.bias
    run = Run(PrivacyEngine(accountant="rdp"), layer)
    run.optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(1 / 6))
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of another engine"):
        run.epoch()


def test_runs_of_opacus_own_engine():
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of a PrivacyEngine were not decl"):
        Run(hidden_state_engine(), trained(stock_engine()).model)
    run = Run(stock_engine())
    run.engine.accountant.declare_run()
    once = run.epoch().epsilon
    again = Run(hidden_state_engine(), run.model).epoch()
    assert len(again.engine.accountant.recorders) == 2
    assert again.epsilon > 1.1 * once


@each_engine
def test_a_frozen_part_of_the_model(new_engine):
    backbone = trained(hidden_state_engine()).plain
    model = nn.Sequential(backbone.requires_grad_(False), nn.Linear(3, 3))
    run = Run(new_engine(), model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.5))
    if new_engine is hidden_state_engine:
        assert run.epsilon == pytest.approx(first_epsilon())
        return
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of another engine"):
        run.epoch()


@each_engine
def test_a_checkpoint_goes_on(new_engine, tmp_path):
    first = trained(new_engine())
    first.engine.save_checkpoint(path=tmp_path / "a", module=first.model, optimizer=first.optimizer)
    again = Run(new_engine())
    again.engine.load_checkpoint(path=tmp_path / "a", module=again.model, optimizer=again.optimizer)
    once = again.epsilon
    Run(again.engine, again.model)  # a second run from there
    assert again.epsilon == pytest.approx(once)
    assert trained(again.engine).epsilon > once
