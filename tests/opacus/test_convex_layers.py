"""A loss is convex in one trained layer: in the product of two it is not."""

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import BlockCoordinate, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CONVEX = [
    hsa.LossGeometry.convex(1.0),
    hsa.LossGeometry.generalized_linear(1.0, 1.0),
    hsa.LossGeometry.strongly_convex(1.0, 0.1, 3.0),
    hsa.LossGeometry.weakly_convex(1.0, 0.0),
    hsa.LossGeometry.linear(1.0),
]


def mlp():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def start(module, groups=None, engine=None, **arguments):
    engine = engine or HiddenStatePrivacyEngine()
    given = {"batch_order": "cyclic"} if isinstance(engine, HiddenStatePrivacyEngine) else {}
    params = [p for p in module.parameters() if p.requires_grad]
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(params if groups is None else groups, lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        **given,
        **arguments,
    )
    return engine


@pytest.mark.parametrize("loss", CONVEX, ids=lambda loss: loss.kind.value)
def test_two_layers_in_a_row(loss):
    """62.24 became 14.60 where the refusal of criterion= was followed."""
    with pytest.raises(hsa.UnsupportedRunError, match=r"got Linear, Linear: no loss is convex"):
        start(mlp(), loss_geometry=loss)


def test_what_is_not_convex_may_have_two():
    start(mlp(), loss_geometry=hsa.LossGeometry.smooth(1.0))
    start(mlp(), loss_geometry=hsa.LossGeometry.weakly_convex(1.0, 0.5))


def test_one_trained_layer():
    module = mlp()
    module[0].requires_grad_(False)
    start(module, loss_geometry=CONVEX[0])


def test_blocks_are_looked_at_one_by_one():
    module = mlp()
    blocks = {"mechanism": BlockCoordinate(), "loss_geometry": CONVEX[0]}
    start(module, [{"params": part.parameters()} for part in (module[0], module[2])], **blocks)
    with pytest.raises(hsa.UnsupportedRunError, match="got Linear, Linear: no loss is convex"):
        start(mlp(), **blocks)


def test_opacus_own_engine():
    engine = start(mlp(), engine=PrivacyEngine(accountant="hidden_state"), poisson_sampling=False)
    with pytest.raises(hsa.UnsupportedRunError, match="got Linear, Linear: no loss is convex"):
        engine.accountant.declare_run(loss_geometry=CONVEX[0])


def test_no_text_advises_it():
    with pytest.raises(hsa.UnsupportedRunError) as error:
        start(mlp(), criterion=nn.CrossEntropyLoss(), feature_norm=1.0)
    assert "LossGeometry" not in str(error.value)
    assert "Leave out criterion= and feature_norm=" in str(error.value)
