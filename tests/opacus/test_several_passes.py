"""Networks that see several inputs of a record: one call of one module, or a refusal.

Opacus adds up, row by row, what several calls before one step leave. Whether the rows and the loss
belong together is only seen where the calls are made within one module.
"""

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

RECORDS, CLIP = 12, 0.05


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


class OfBoth(nn.Module):
    """A network that one module calls twice."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, first, second):
        return self.net(first), self.net(second)


class Shifted(OfBoth):
    def forward(self, first, second):
        return self.net(first), self.net(second.roll(1, dims=0))


class Joined(OfBoth):
    def forward(self, first, second):
        return self.net(torch.cat([first, second])).split(len(first))[::-1]


def twins(first, second, labels):
    return functional.cosine_embedding_loss(first, second, labels)


def real_and_made_up(first, second, labels):
    loss = functional.binary_cross_entropy_with_logits
    return loss(first, torch.ones_like(first)) + loss(second, torch.zeros_like(second))


def pairs():
    torch.manual_seed(1)
    first, second = torch.randn(2, RECORDS, 5)
    return TensorDataset(first, second, torch.tensor([1.0, -1.0]).repeat(RECORDS // 2))


def private(engine, module, batch_size=RECORDS, **arguments):
    """What make_private returns; without noise, on all records, unless it is said."""
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": CLIP, **arguments}
    model, optimizer, *_, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=DataLoader(pairs(), batch_size=batch_size),
        **arguments,
    )
    return model, optimizer, loader


@pytest.mark.parametrize("loss", [twins, real_and_made_up])
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_one_call_for_both_is_what_opacus_makes_of_two(mode, loss):
    ours, theirs = OfBoth(network()), network()
    criterion = {"criterion": nn.BCEWithLogitsLoss()} if mode == "ghost" else {}
    model, optimizer, loader = private(
        HiddenStatePrivacyEngine(), ours, grad_sample_mode=mode, **criterion
    )
    ((first, second, labels),) = list(loader)
    loss(*model(first, second), labels).backward()
    optimizer.step()
    model, optimizer, _ = private(PrivacyEngine(), theirs)
    loss(model(first), model(second), labels).backward()
    optimizer.step()
    moved = [p - q for p, q in zip(theirs.parameters(), network().parameters(), strict=True)]
    assert max(float(part.detach().abs().max()) for part in moved) > 1e-3
    for own, stock in zip(ours.net.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, stock, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", [twins, real_and_made_up])
def test_two_calls_are_refused_with_the_way_out(loss):
    model, optimizer, loader = private(HiddenStatePrivacyEngine(), network())
    for first, second, labels in loader:
        loss(model(first), model(second), labels).backward()
        with pytest.raises(UnsupportedRunError, match=r"2 training passes.*forward\(\) calls"):
            optimizer.step()


def test_records_side_by_side_in_one_batch_are_too_many_rows():
    model, optimizer, loader = private(HiddenStatePrivacyEngine(), Joined(network()))
    for first, second, labels in loader:
        twins(*model(first, second), labels).backward()
        with pytest.raises(UnsupportedRunError, match=rf"{2 * RECORDS} rows, expected .*{RECORDS}"):
            optimizer.step()


def test_a_generator_learns_from_the_private_model_in_eval_mode():
    """Its pass needs no record, and is none of the private step.

    (Hooks of Opacus would look for activations, which they do not keep in eval mode.)
    """
    discriminator, generator = OfBoth(network()), nn.Linear(2, 5)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = private(
        engine, discriminator, batch_size=4, noise_multiplier=2.0, max_grad_norm=1.0
    )
    before = generator.weight.detach().clone()
    for real, _, _ in loader:
        made_up = generator(torch.randn(len(real), 2))
        optimizer.zero_grad()
        real_and_made_up(*model(real, made_up.detach()), None).backward()
        optimizer.step()
        model.eval().disable_hooks()
        of_generator.zero_grad()
        made_up = generator(torch.randn(8, 2))
        functional.softplus(-discriminator.net(made_up)).mean().backward()
        of_generator.step()
        model.train().enable_hooks()
    assert engine.privacy_event.num_steps == RECORDS // 4
    assert 0 < engine.get_epsilon(1e-5) < 10
    assert not torch.equal(generator.weight, before)
