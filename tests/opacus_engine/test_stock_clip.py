"""Stock engines: the noise of a step belongs to the clip of its gradients (row 68)."""

import pytest
import torch
from opacus import PrivacyEngine
from opacus.schedulers import StepGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
GHOST = {"grad_sample_mode": "ghost"}
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [0.5, 0.5]}


class Loop:
    def __init__(self, model=None, engine=None, **arguments):
        self.engine = engine or PrivacyEngine(accountant="hidden_state")
        model, criterion = model or nn.Linear(4, 3), nn.CrossEntropyLoss()
        data = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
        self.model, self.optimizer, *rest = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=criterion,
            data_loader=DataLoader(data, batch_size=20),
            **{"noise_multiplier": 2.0, "max_grad_norm": 1.0} | arguments,
        )
        self.loader, self.criterion = rest[-1], rest[0] if len(rest) == 2 else criterion
        self.engine.accountant.declare_run()

    def epoch(self, loader=None, after_a_piece=lambda: None):
        for features, labels in loader or self.loader:
            self.optimizer.zero_grad()
            self.criterion(self.model(features), labels).backward()
            self.optimizer.step()
            after_a_piece()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [(GHOST, "clips at max_grad_norm = 0.1"), (PER_LAYER, "make max_grad_norm = 0.07")],
)
def test_a_schedule_that_reaches_the_noise_only(arguments, match):
    """Reported 1.75; one epoch at a tenth of the noise costs 77."""
    loop = Loop(**arguments)
    loop.epoch()
    StepGradClip(loop.optimizer, step_size=1, gamma=0.1).step()
    with pytest.raises(hsa.UnsupportedRunError, match=match):
        loop.epoch()


def test_a_ghost_model_that_is_made_private_again():
    loop = Loop(**GHOST)
    loop.epoch()
    again = Loop(loop.model, loop.engine, **{**GHOST, "max_grad_norm": 0.1})
    with pytest.raises(hsa.UnsupportedRunError, match=r"got 1: a schedule .* or the model was"):
        again.epoch()


def test_pieces_of_a_batch_that_are_clipped_differently():
    loop = Loop()
    schedule = StepGradClip(loop.optimizer, step_size=1, gamma=0.9)
    with (
        BatchMemoryManager(
            data_loader=loop.loader, max_physical_batch_size=3, optimizer=loop.optimizer
        ) as pieces,
        pytest.raises(hsa.UnsupportedRunError, match="one clip norm for all pieces of a batch"),
    ):
        loop.epoch(pieces, schedule.step)


def test_a_schedule_of_flat_clipping_is_recorded():
    loop = Loop()
    loop.epoch()
    StepGradClip(loop.optimizer, step_size=1, gamma=0.5).step()
    loop.epoch()
    assert 0 < loop.engine.get_epsilon(1e-5) < 3
