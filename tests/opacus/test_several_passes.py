"""Networks that see several inputs of a record: one call of one module, or a declaration.

Opacus adds up, row by row, what several calls before one step leave. Whether the rows and the loss
belong together is only seen where the calls are made within one module. A pass that is not trained
counts as long as something is left of it.
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


@pytest.mark.parametrize(("mode", "loss"), [("hooks", twins), ("functorch", real_and_made_up)])
def test_one_call_for_both_is_what_opacus_makes_of_two(mode, loss):
    ours, theirs = OfBoth(network()), network()
    model, optimizer, loader = private(HiddenStatePrivacyEngine(), ours, grad_sample_mode=mode)
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


def test_two_calls_are_refused_with_the_way_out():
    model, optimizer, loader = private(HiddenStatePrivacyEngine(), network())
    for first, second, labels in loader:
        twins(model(first), model(second), labels).backward()
        with pytest.raises(UnsupportedRunError, match=r"2 training passes.*Siamese"):
            optimizer.step()


def test_a_generator_learns_from_the_private_model_in_eval_mode():
    """Its pass needs no record, and is none of the private step."""
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
        model.eval()
        of_generator.zero_grad()
        made_up = generator(torch.randn(8, 2))
        functional.softplus(-discriminator.net(made_up)).mean().backward()
        of_generator.step()
        model.train()
    assert engine.privacy_event.num_steps == RECORDS // 4
    assert 0 < engine.get_epsilon(1e-5) < 10
    assert not torch.equal(generator.weight, before)


class Discriminator(nn.Module):
    """As in Opacus' examples/dcgan.py, smaller."""

    def __init__(self, inplace):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 4, 2, bias=False),
            nn.LeakyReLU(0.2, inplace=inplace),
            nn.Conv2d(4, 1, 3, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images):
        return self.main(images).view(-1, 1).squeeze(1)


def dcgan(engine, form="train", batch_size=RECORDS, inplace=True, **arguments):
    """Two steps of the loop of dcgan.py; discriminator, generator and its last gradient."""
    torch.manual_seed(3)
    net_d, net_g = Discriminator(inplace), nn.ConvTranspose2d(3, 1, 4, bias=False)
    weights = net_d.main.parameters()
    net_d, optimizer_d, loader = engine.make_private(
        module=net_d,
        optimizer=torch.optim.Adam(weights, lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.rand(RECORDS, 1, 4, 4)), batch_size=batch_size),
        **{"noise_multiplier": 0.0, "max_grad_norm": CLIP, **arguments},
    )
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=0.1)
    criterion = nn.BCELoss()
    generator = torch.Generator().manual_seed(4)
    for _ in range(2 * batch_size // RECORDS):
        for (real,) in loader:
            optimizer_d.zero_grad(set_to_none=True)
            loss = criterion(net_d(real), torch.ones(len(real)))
            fake = net_g(torch.randn(len(real), 3, 1, 1, generator=generator))
            loss = loss + criterion(net_d(fake.detach()), torch.zeros(len(real)))
            loss.backward()
            optimizer_d.step()
            if form != "not cleared":
                optimizer_d.zero_grad(set_to_none=True)
            if form == "eval":
                net_d.eval()
            optimizer_g.zero_grad()
            criterion(net_d(fake), torch.ones(len(real))).backward()
            optimizer_g.step()
            net_d.train()
            if form == "not cleared":
                optimizer_d.step()
    return net_d, net_g


@pytest.mark.parametrize("form", ["train", "eval"])
def test_dcgan_trains_as_with_opacus(form):
    ours = dcgan(HiddenStatePrivacyEngine(), form, loop_maps_records=True)
    theirs = dcgan(PrivacyEngine(), inplace=False)
    for own, stock in zip(ours, theirs, strict=True):
        for param, other in zip(own.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-6)
    assert float(ours[1].weight.grad.norm()) > 1e-3


def test_a_pass_that_was_not_cleared_counts():
    with pytest.raises(UnsupportedRunError, match="gradients of 2 batches"):
        dcgan(HiddenStatePrivacyEngine(), "not cleared", loop_maps_records=True)


def squares(outputs):
    return outputs.square().sum(dim=1).mean()


def finished(model, optimizer, others):
    squares(model(others)).backward()
    return torch.zeros(())


def waiting(model, optimizer, others):
    loss = squares(model(others))
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize(
    ("mode", "before"),
    [("hooks", finished), ("hooks", waiting), ("ew", waiting)],
)
def test_a_pass_on_other_records_counts_until_it_is_cleared(mode, before):
    model, optimizer, loader = private(HiddenStatePrivacyEngine(), network(), grad_sample_mode=mode)
    for first, second, _ in loader:
        rest = before(model, optimizer, second)
        (squares(model(first)) + rest).backward()
        with pytest.raises(UnsupportedRunError, match=r"2 training passes"):
            optimizer.step()


@pytest.mark.parametrize("clear_first", [True, False])
@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("mode", [{}, {"wrap_model": False}])
def test_what_was_cleared_does_not_count(mode, clear, clear_first):
    weights = []
    for is_looked_at in (True, False):
        net = network()
        model, optimizer, loader = private(HiddenStatePrivacyEngine(), net, **mode)
        model = model if "wrap_model" not in mode else net
        owner = model if clear == "model" and "wrap_model" not in mode else optimizer
        for first, second, _ in loader:
            if is_looked_at:
                squares(model(second)).backward()
            if clear_first:
                owner.zero_grad()
            loss = squares(model(first))
            owner.zero_grad()
            loss.backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.cat([p.flatten() for p in network().parameters()]))


def test_every_backward_pass_meets_the_activations_of_its_own_pass():
    """Opacus would take those of the last pass first."""
    weights = []
    for is_together in (True, False):
        engine = HiddenStatePrivacyEngine()
        model, optimizer, loader = private(engine, network(), loop_maps_records=True)
        for first, second, _ in loader:
            losses = [squares(model(x)) for x in (first, second)]
            for loss in [sum(losses)] if is_together else losses:
                loss.backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)
