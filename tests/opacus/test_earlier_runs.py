"""A run on a model that another private run of the process trained."""

import pytest
import torch
from opacus import PrivacyEngine
from opacus_stock_loops import records
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5


def hidden_state_engine():
    return HiddenStatePrivacyEngine()


def stock_engine():
    return PrivacyEngine(accountant="hidden_state")


each_engine = pytest.mark.parametrize("new_engine", [hidden_state_engine, stock_engine])


class Run:
    """One make_private on a linear model, and the shortest loop."""

    def __init__(self, engine, model=None):
        self.engine, self.plain = engine, nn.Linear(5, 3) if model is None else model
        self.model, self.optimizer, self.loader = engine.make_private(
            module=self.plain,
            optimizer=torch.optim.SGD(self.plain.parameters(), lr=0.5),
            data_loader=DataLoader(records(), batch_size=10),
            noise_multiplier=2.0,
            max_grad_norm=2.1,
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


@each_engine
def test_a_cell_that_is_run_again(new_engine):
    """The model is that of the first engine, whose steps the second would not count."""
    run = trained(new_engine())
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of another engine"):
        Run(new_engine(), run.model)


def test_an_engine_of_the_other_kind():
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of another engine"):
        Run(stock_engine(), trained(hidden_state_engine()).plain)
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of another engine"):
        Run(hidden_state_engine(), trained(stock_engine()).model)


@each_engine
def test_a_frozen_part_of_the_model(new_engine):
    backbone = trained(new_engine()).plain
    model = nn.Sequential(backbone.requires_grad_(False), nn.Linear(3, 3))
    with pytest.raises(hsa.UnsupportedRunError, match="6 steps of another engine"):
        new_engine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model[1].parameters(), lr=0.5),
            data_loader=DataLoader(records(), batch_size=10),
            noise_multiplier=2.0,
            max_grad_norm=2.0,
        )


@each_engine
def test_the_same_engine_composes(new_engine):
    engine = new_engine()
    first = trained(engine)
    one = first.epsilon
    second = Run(engine, first.model).epoch()
    assert second.epsilon > 1.1 * one


@each_engine
def test_a_checkpoint_goes_on(new_engine, tmp_path):
    first = trained(new_engine())
    first.engine.save_checkpoint(path=tmp_path / "a", module=first.model, optimizer=first.optimizer)
    again = Run(new_engine())
    again.engine.load_checkpoint(path=tmp_path / "a", module=again.model, optimizer=again.optimizer)
    once = again.epsilon
    again.engine.make_private(  # a second run from there
        module=again.model,
        optimizer=torch.optim.SGD(again.plain.parameters(), lr=0.5),
        data_loader=DataLoader(records(), batch_size=10),
        noise_multiplier=2.0,
        max_grad_norm=2.1,
    )
    assert again.epsilon == pytest.approx(once)
    assert trained(again.engine).epsilon > once
