"""Forward, backward and step of a private model, with ghost clipping and in several passes.

What goes wrong there is refused, with the way out; what only seems to is not: layers that work in
place, copies, passes that are cleared. Opacus adds up, row by row, what several calls before one
step leave: whether they belong together is seen where the calls are made within one module.
"""

import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.layers import DPMultiheadAttention
from opacus_runs import flat, layers, weights
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import LossGeometry, UnsupportedRunError
from hidden_state_adapters.opacus import DiceSGDOptimizer, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"
)

BATCH, CLASSES, WORDS, CLIP = 10, 3, 20, 0.05


@pytest.fixture
def make(make_run):
    """A run of a small network, with the clip and the noise of each test."""

    def make(model=None, records=None, **arguments):
        if records is not None:
            labels = torch.arange(len(records)) % CLASSES
            arguments["loader"] = {"dataset": TensorDataset(records, labels)}
        model = layers() if model is None else model
        return make_run(model=model, **{"loss_geometry": None, **arguments})

    return make


def vectors(*shape):
    return torch.randn(2 * BATCH, *shape, generator=torch.Generator().manual_seed(1))


# --- what is refused, with the way out ------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        z = torch.tanh(self.body(x))
        return self.first(z), self.second(z)


def two_backward_passes(make):
    run = make(TwoHeads())
    for x, y in run.loader:
        first, second = run.model(x)
        functional.cross_entropy(first, y).backward(retain_graph=True)
        functional.mse_loss(second[:, 0], y.float()).backward()
        run.optimizer.step()


def gradient_penalty(make):
    run = make()
    x, _ = next(iter(run.loader))
    out = run.model(x.requires_grad_()).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out / len(x) + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()


def train_forgotten(make):
    run = make(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.1), nn.Linear(6, CLASSES)))
    run.model.eval()
    run.epoch()


def evaluated_into_the_clipped_sum(make):
    run = make()
    x, y = batch = next(iter(run.loader))
    run.backward(batch)
    functional.cross_entropy(run.model.eval()(x), y).backward()


class OnceInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.passes = nn.Linear(8, 6), nn.Linear(30, CLASSES), 0

    def forward(self, x):
        self.passes += 1
        z = self.first(x)
        z = z.relu() if self.passes < 2 else z.relu_()  # a clip by the norm of the step before
        return self.last(z.flatten(1))


class Positions(nn.Module):
    """As in GPT-2 and BERT."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 6), nn.Embedding(5, 6)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.last((self.words(x) + self.positions(torch.arange(5)[None])).mean(1))


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.last = DPMultiheadAttention(8, 2), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.last(self.attention(x, x, x)[0].mean(0))


def other_weights(make):
    run = make()
    nudged = {name: 1.1 * p for name, p in run.model.named_parameters()}
    torch.func.functional_call(run.model, nudged, next(iter(run.loader))[0])


def another_criterion(make):
    """The plain one makes one pass: its gradients are those of no clip."""
    run = make()
    run.criterion = nn.CrossEntropyLoss()
    run.epoch()


class Tied(nn.Module):
    """Uses the weights of a layer once more."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, features):
        hidden = self.first(features).relu_()
        return self.last(hidden) + functional.linear(hidden, self.first.weight[:, :3])


def losses_in_a_column(make):
    run = make(layers(1), criterion=nn.BCEWithLogitsLoss())
    features, labels = next(iter(run.loader))
    run.criterion(run.model(features), (labels > 0).float()[:, None])


def another_clip_norm(make):
    """The noise would follow it, Opacus' clip would not."""
    run = make()
    run.optimizer.max_grad_norm = 0.15
    run.epoch()


def norms_of_the_step_before(make):
    run = make(TwoHeads())
    (x, y), (others, labels), *_ = run.loader
    run.criterion(sum(run.model(x)), y).backward()
    run.optimizer.step()
    run.criterion(run.model(others)[0], labels).backward()


def one_epoch(model, records=None):
    def program(make):
        make(model(), records).epoch()

    return program


def refused(**arguments):
    return lambda make: make(**arguments)


RELU = nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(30, CLASSES))
SENTENCES = torch.arange(2 * BATCH)[:, None].expand(-1, 5)
# Every position of a sequence as long as the batch has a row: a record is in all of them.
LONG, BATCH_FIRST = one_epoch(SequenceFirst, vectors(BATCH, 8)), "step 1: .*qlinear.*batch_first"
EVERY_RECORD = 'Expected grad_sample_mode = "hooks"'
REFUSALS = [
    (other_weights, "hooks", "weights of Linear '0'.*functional_call.* Call the model itself"),
    (two_backward_passes, "hooks", r"a second one .* at Linear 'body'.*\(first \+ second\).backw"),
    (gradient_penalty, "hooks", "create_graph=True, a gradient penalty"),
    (train_forgotten, "hooks", r"Call the private model in train\(\) mode"),
    (train_forgotten, "ghost", r"eval\(\) mode with .*ghost.*Call model.train\(\)"),
    (evaluated_into_the_clipped_sum, "ghost", r"join the clipped sum.*grad_sample_mode=\"hooks\""),
    (one_epoch(lambda: RELU, vectors(5, 8)), "hooks", "in-place changes of an output"),
    (one_epoch(OnceInPlace, vectors(5, 8)), "ghost", "use inplace=False"),
    (one_epoch(Positions, SENTENCES), "hooks", r"positions.weight .*one for the whole.*expand\("),
    (
        one_epoch(SequenceFirst, vectors(5, 8)),
        "hooks",
        "attention.qlinear.weight.*batch_first=True",
    ),
    (LONG, "hooks", BATCH_FIRST),
    (LONG, "functorch", BATCH_FIRST),
    (LONG, "ghost", BATCH_FIRST),
    (another_criterion, "ghost", "the criterion that make_private returned"),
    (one_epoch(Tied), "ghost", "another use of the weights"),
    (losses_in_a_column, "ghost", r"one loss for each record.*got \(1,\) for each"),
    (another_clip_norm, "ghost", r"max_grad_norm = 0\.15"),
    (norms_of_the_step_before, "ghost", "no per-example gradients"),
    (refused(optimizer_class=DiceSGDOptimizer), "ghost", EVERY_RECORD),
    (refused(loss_geometry=LossGeometry.smooth(1.0)), "ghost", EVERY_RECORD),
]


@pytest.mark.parametrize(("program", "mode", "text"), REFUSALS)
def test_cause_and_remedy_are_named(make, program, mode, text):
    with pytest.raises(UnsupportedRunError, match=text):
        program(functools.partial(make, grad_sample_mode=mode))


@pytest.mark.parametrize(
    "loss",
    [
        lambda losses, weights: 0.5 * (2 * losses) + (weights**2).sum() / 2,
        lambda losses, weights: (weights**2).sum() - (-losses),
    ],
)
def test_a_penalty_on_the_weights_is_refused_with_ghost_clipping(make, loss):
    """It is in no norm, but in the sum, times the clip factors of all records together."""
    run = make(grad_sample_mode="ghost")
    features, labels = next(iter(run.loader))
    losses = run.criterion(run.model(features), labels)
    with pytest.raises(UnsupportedRunError, match="a penalty, another use"):
        loss(losses, run.plain_model[0].weight).backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: model[0].weight.grad.mul_(100),
        lambda model: setattr(model[2].bias, "grad", model[2].bias.grad * 100),
        lambda model: model[0].weight.register_hook(lambda grad: 100 * grad),
        lambda model: model[0].weight.register_post_accumulate_grad_hook(lambda param: None),
    ],
)
def test_sums_of_ghost_clipping_that_are_changed_before_the_noise_are_refused(make, change):
    run = make(grad_sample_mode="ghost")
    run.backward(next(iter(run.loader)))
    change(run.plain_model)
    with pytest.raises(UnsupportedRunError, match="step 1: expected the clipped sums"):
        run.optimizer.step()


# --- what is fine ---------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.first, self.last, self.relu = nn.Linear(5, 5), nn.Linear(5, 3), nn.ReLU(inplace)

    def forward(self, x):
        out = self.first(x)
        out += x
        return self.last(self.relu(out))


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_layers_that_work_in_place_change_nothing(make, mode):
    ends = []
    for inplace, own in ((True, mode), (False, "hooks")):
        torch.manual_seed(0)
        run = make(Residual(inplace), noise_multiplier=0.0, grad_sample_mode=own)
        run.epoch()
        ends.append(weights(run))
    np.testing.assert_allclose(*ends, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "made",
    [
        lambda run: copy.deepcopy(run.model),
        lambda run: pickle.loads(pickle.dumps(run.model)),
        lambda run: AveragedModel(run.model),
    ],
)
def test_a_copy_trains_nothing(make, made):
    run = make()
    run.epoch()
    another = made(run)
    for x, y in run.loader:
        run.criterion(another(x), y).backward()
    assert all(p.grad is not None and p.grad.any() for p in another.parameters())
    run.epoch()
    assert run.engine.privacy_event.num_steps == 12


# --- several passes before a step -----------------------------------------------------------------


@pytest.fixture
def make_pairs(make):
    """Without noise, on one batch of pairs of records."""
    first, second = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(1))
    pairs = TensorDataset(first, second, torch.tensor([1.0, -1.0]).repeat(6))
    loader = {"dataset": pairs, "batch_size": 12}
    plain = {"max_grad_norm": CLIP, "sgd": {"lr": 1.0, "weight_decay": 0.0}}
    return functools.partial(make, loader=loader, noise_multiplier=0.0, **plain)


class OfBoth(nn.Module):
    """A network that one module calls twice."""

    def __init__(self):
        super().__init__()
        self.net = layers()

    def forward(self, first, second):
        return self.net(first), self.net(second)


def real_and_made_up(first, second, labels):
    loss = functional.binary_cross_entropy_with_logits
    return loss(first, torch.ones_like(first)) + loss(second, torch.zeros_like(second))


@pytest.mark.parametrize(
    ("mode", "loss"),
    [("hooks", functional.cosine_embedding_loss), ("functorch", real_and_made_up)],
)
def test_one_call_for_both_is_what_opacus_makes_of_two(make_pairs, mode, loss):
    run, theirs = make_pairs(OfBoth(), grad_sample_mode=mode), layers()
    ((first, second, labels),) = list(run.loader)
    loss(*run.model(first, second), labels).backward()
    run.optimizer.step()
    model, optimizer, _ = PrivacyEngine().make_private(
        module=theirs, optimizer=torch.optim.SGD(theirs.parameters(), lr=1.0),
        data_loader=DataLoader(run.loader.dataset, batch_size=12), noise_multiplier=0.0,
        max_grad_norm=CLIP,
    )  # fmt: skip
    loss(model(first), model(second), labels).backward()
    optimizer.step()
    np.testing.assert_allclose(weights(run), flat(theirs.parameters()), rtol=1e-5, atol=1e-7)
    assert abs(weights(run) - flat(layers().parameters())).max() > 1e-3


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


def dcgan(engine, evaluates=False, inplace=True, **arguments):
    """Two steps of the loop of dcgan.py; the weights of discriminator and generator."""
    torch.manual_seed(3)
    net_d, net_g = Discriminator(inplace), nn.ConvTranspose2d(3, 1, 4, bias=False)
    parameters = [*net_d.parameters(), *net_g.parameters()]
    net_d, optimizer_d, loader = engine.make_private(
        module=net_d, optimizer=torch.optim.Adam(net_d.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.rand(12, 1, 4, 4)), batch_size=12),
        noise_multiplier=0.0, max_grad_norm=CLIP, **arguments,
    )  # fmt: skip
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=0.1)
    criterion, generator = nn.BCELoss(), torch.Generator().manual_seed(4)
    for _ in range(2):
        for (real,) in loader:
            optimizer_d.zero_grad(set_to_none=True)
            loss = criterion(net_d(real), torch.ones(len(real)))
            fake = net_g(torch.randn(len(real), 3, 1, 1, generator=generator))
            loss = loss + criterion(net_d(fake.detach()), torch.zeros(len(real)))
            loss.backward()
            optimizer_d.step()
            optimizer_d.zero_grad(set_to_none=True)
            net_d.train(not evaluates)
            optimizer_g.zero_grad()
            criterion(net_d(fake), torch.ones(len(real))).backward()
            optimizer_g.step()
            net_d.train()
    assert net_g.weight.grad.norm() > 1e-3
    return flat(parameters)


@pytest.mark.parametrize("evaluates", [False, True])
def test_dcgan_trains_as_with_opacus(evaluates):
    ours = dcgan(HiddenStatePrivacyEngine(), evaluates, loop_maps_records=True)
    theirs = dcgan(PrivacyEngine(), inplace=False)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def squares(outputs):
    return outputs.square().sum(dim=1).mean()


def finished(run, others):
    squares(run.model(others)).backward()
    return torch.zeros(())


def waiting(run, others):
    loss = squares(run.model(others))
    run.optimizer.zero_grad()
    return loss


@pytest.mark.parametrize(
    ("mode", "before"), [("hooks", finished), ("hooks", waiting), ("ew", waiting)]
)
def test_a_pass_on_other_records_counts_until_it_is_cleared(make_pairs, mode, before):
    run = make_pairs(grad_sample_mode=mode)
    first, second, _ = next(iter(run.loader))
    rest = before(run, second)
    (squares(run.model(first)) + rest).backward()
    with pytest.raises(UnsupportedRunError, match=r"2 training passes.*Siamese"):
        run.optimizer.step()


@pytest.mark.parametrize("clear_first", [True, False])
@pytest.mark.parametrize(
    ("arguments", "clears"),
    [({}, "optimizer"), ({}, "model"), ({"wrap_model": False}, "optimizer")],
)
def test_what_was_cleared_does_not_count(make_pairs, arguments, clears, clear_first):
    ends = []
    for is_looked_at in (True, False):
        run = make_pairs(**arguments)
        model = run.plain_model if "wrap_model" in arguments else run.model
        first, second, _ = next(iter(run.loader))
        if is_looked_at:
            squares(model(second)).backward()
        if clear_first:
            getattr(run, clears).zero_grad()
        loss = squares(model(first))
        getattr(run, clears).zero_grad()
        loss.backward()
        run.optimizer.step()
        ends.append(weights(run))
    np.testing.assert_array_equal(*ends)
    assert (ends[0] != flat(layers().parameters())).any()


def test_every_backward_pass_meets_the_activations_of_its_own_pass(make_pairs):
    """Opacus would take those of the last pass first."""
    ends = []
    for is_together in (True, False):
        run = make_pairs(loop_maps_records=True)
        first, second, _ = next(iter(run.loader))
        losses = [squares(run.model(x)) for x in (first, second)]
        for loss in [sum(losses)] if is_together else losses:
            loss.backward()
        run.optimizer.step()
        ends.append(weights(run))
    np.testing.assert_allclose(*ends, rtol=1e-5, atol=1e-7)
