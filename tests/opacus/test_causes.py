"""What a loop that was written for Opacus is told: the cause that its author recognises."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def shuffled_loader(make_run):
    make_run(loader={"shuffle": True})


def batch_size_of_the_tutorials(make_run):
    make_run(loader={"batch_size": 16})


def reshuffled_batches_of_any_size(make_run):
    make_run(loader={"batch_size": 16}, batch_order="reshuffled")


def accumulation(make_run):
    run = make_run()
    for index, batch in enumerate(run.loader):
        features, labels = batch
        (run.criterion(run.model(features), labels) / 2).backward()
        if index % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()


def empty_batches_left_out(make_run):
    run = make_run(batch_order="poisson", loader={"batch_size": 1})
    for batch in run.loader:
        if len(batch[0]):
            run.step(batch)


def accuracy_without_no_grad(make_run):
    run = make_run()
    for features, labels in run.loader:
        run.step((features, labels))
        (run.model(features).argmax(dim=1) == labels).float().mean()


def weights_loaded_late(make_run):
    run = make_run()
    run.plain_model.load_state_dict(nn.Linear(5, 3).state_dict())
    run.epoch()


def one_cycle(make_run):
    run = make_run()
    torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.5, total_steps=6)
    run.epoch()


class Checkpointed(nn.Module):
    """Its layer is called once more in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, features):
        return checkpoint(self.layer, features, use_reentrant=False)


CAUSES = [
    (shuffled_loader, "got shuffle=True.*\"reshuffled\".*\"poisson\".*shuffle=False"),
    (batch_size_of_the_tutorials, "divides the 60 records, got 16.*drop_last=True.*\"poisson\" .*"
     "\"without_replacement\", which take any"),
    (reshuffled_batches_of_any_size, "reshuffled batches must all .*\"without_replacement\""),
    (accumulation, "raise the batch_size.*BatchMemoryManager"),
    (empty_batches_left_out, "an empty batch is a step, too"),
    (weights_loaded_late, "step 1: .*Load public weights before make_private"),
    (one_cycle, "Expected momentum = 0, got 0.95: .*OneCycleLR .*cycle_momentum=False"),
]  # fmt: skip


def test_a_second_pass_that_is_only_looked_at_changes_nothing(make_run):
    runs = [make_run(noise_generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    accuracy_without_no_grad(lambda: runs[0])
    runs[1].epoch()
    assert torch.equal(runs[0].plain_model.weight, runs[1].plain_model.weight)
    assert runs[0].engine.get_epsilon(1e-5) == runs[1].engine.get_epsilon(1e-5)


def test_activation_checkpointing_of_a_head_changes_nothing(make_run):
    weights = []
    for model in (Checkpointed(), nn.Linear(5, 3)):
        for param in model.parameters():
            nn.init.zeros_(param)
        generator = torch.Generator().manual_seed(1)
        make_run(model=model, loss_geometry=None, noise_generator=generator).epoch()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize(("loop", "text"), CAUSES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_cause_is_named(make_run, loop, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        loop(make_run)


def test_one_cycle_without_momentum(make_run):
    run = make_run()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        run.optimizer, max_lr=0.5, total_steps=6, cycle_momentum=False
    )
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    assert len(set(run.engine.privacy_event.per_step("learning_rate"))) == 6


@pytest.mark.parametrize("size", [7, 10, 16, 60])
@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_orders_that_take_any_batch_size(make_run, order, size):
    run = make_run(batch_order=order, loader={"batch_size": size})
    run.epoch()
    event = run.engine.privacy_event
    divisor = int(60 / -(-60 // size)) if order == "poisson" else size  # as Opacus rounds
    assert (event.batch_size, event.dataset_size) == (divisor, 60)
    assert event.num_steps == -(-60 // size)


@pytest.mark.parametrize("order", ["cyclic", "shuffled_once", "reshuffled"])
def test_the_other_orders_leave_a_rest_out(make_run, order):
    run = make_run(batch_order=order, loader={"batch_size": 16, "drop_last": True})
    run.epoch()
    event = run.engine.privacy_event
    assert (event.batch_size, event.dataset_size, event.num_steps) == (16, 48, 3)


def test_poisson_sampling_by_itself_is_an_order(make_run):
    run = make_run(poisson_sampling=True, loader={"shuffle": True})
    run.epoch()
    assert run.engine.privacy_event.batch_order is BatchOrder.POISSON
    with pytest.raises(hsa.UnsupportedRunError, match="Expected poisson_sampling = False with"):
        make_run(poisson_sampling=True, batch_order="cyclic")
    make_run(poisson_sampling=False)
