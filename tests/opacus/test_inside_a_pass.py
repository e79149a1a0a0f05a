"""What goes wrong in forward, backward and step of a private model: refused, with the way out.

And what only seems to: layers that work in place, copies, averages of weights.
"""

import copy
import pickle

import pytest
import torch
from opacus.layers import DPMultiheadAttention
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RECORDS, BATCH, CLASSES, WORDS = 24, 12, 3, 20


def vectors(*shape):
    return torch.randn(RECORDS, *shape, generator=torch.Generator().manual_seed(1))


def words():
    return torch.randint(WORDS, (RECORDS, 5), generator=torch.Generator().manual_seed(1))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, CLASSES))


def private(module, records=None, engine=None, **arguments):
    """Engine, model, optimizer, criterion and loader."""
    engine = engine or HiddenStatePrivacyEngine()
    labels = torch.arange(RECORDS) % CLASSES
    records = vectors(8) if records is None else records
    ghost = {"criterion": nn.CrossEntropyLoss()} if "ghost" in arguments.values() else {}
    model, optimizer, *criterion, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(records, labels), batch_size=BATCH),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_order": "cyclic"},
        **ghost,
        **arguments,
    )
    return engine, model, optimizer, criterion[0] if criterion else nn.CrossEntropyLoss(), loader


def train(run):
    _, model, optimizer, criterion, loader = run
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        z = torch.tanh(self.body(x))
        return self.first(z), self.second(z)


def two_backward_passes():
    _, model, optimizer, _, loader = private(TwoHeads())
    for x, y in loader:
        optimizer.zero_grad()
        first, second = model(x)
        functional.cross_entropy(first, y).backward(retain_graph=True)
        functional.mse_loss(second[:, 0], y.float()).backward()
        optimizer.step()


def gradient_penalty():
    _, model, optimizer, _, loader = private(network())
    for x, _ in loader:
        optimizer.zero_grad()
        out = model(x.requires_grad_()).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out / len(x) + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()


def train_forgotten(**mode):
    run = private(network(), **mode)
    run[1].eval()
    train(run)


def eval_in_ghost_clipping():
    train_forgotten(grad_sample_mode="ghost")


def evaluated_into_the_clipped_sum():
    _, model, optimizer, criterion, loader = private(network(), grad_sample_mode="ghost")
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        functional.cross_entropy(model.eval()(x), y).backward()


def in_place_at_several_positions(**mode):
    module = nn.Sequential(
        nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(30, CLASSES)
    )
    train(private(module, vectors(5, 8), **mode))


class OnceInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.passes = nn.Linear(8, 6), nn.Linear(30, CLASSES), 0

    def forward(self, x):
        self.passes += 1
        z = self.first(x)
        z = z.relu() if self.passes < 2 else z.relu_()  # a clip by the norm of the step before
        return self.last(z.flatten(1))


def in_place_in_ghost_clipping():
    train(private(OnceInPlace(), vectors(5, 8), grad_sample_mode="ghost"))


class Positions(nn.Module):
    """As in GPT-2 and BERT."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 6), nn.Embedding(5, 6)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.last((self.words(x) + self.positions(torch.arange(5)[None])).mean(1))


def positions_for_all_records():
    train(private(Positions(), words()))


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.last = DPMultiheadAttention(8, 2), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.last(self.attention(x, x, x)[0].mean(0))


def the_sequence_comes_first():
    train(private(SequenceFirst(), vectors(5, 8)))


def a_sequence_as_long_as_the_batch(**mode):
    """Every position has a row then, and a record is in all of them: 4 clip norms and more."""
    train(private(SequenceFirst(), vectors(BATCH, 8), **mode))


def a_sequence_in_functorch():
    a_sequence_as_long_as_the_batch(grad_sample_mode="functorch")


def a_sequence_in_ghost_clipping():
    a_sequence_as_long_as_the_batch(grad_sample_mode="ghost")


def no_gradients_of_records():
    private(network(), grad_sample_mode="no_op")


def a_known_loss_of_a_network():
    private(network(), criterion=nn.CrossEntropyLoss(), feature_norm=1.0)


def a_known_loss_with_adam():
    module = nn.Linear(8, CLASSES)
    HiddenStatePrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.Adam(module.parameters()),
        data_loader=DataLoader(TensorDataset(vectors(8), words()), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
        feature_norm=1.0,
    )


def other_weights():
    _, model, optimizer, _, loader = private(network())
    for x, _ in loader:
        optimizer.zero_grad()
        nudged = {name: 1.1 * p for name, p in model.named_parameters()}
        torch.func.functional_call(model, nudged, x)


REFUSALS = [
    (other_weights, "weights of Linear '0'.*functional_call.* Call the model itself"),
    (two_backward_passes, r"a second one .* at Linear 'body'.*\(first \+ second\).backward\(\)"),
    (gradient_penalty, "create_graph=True, a gradient penalty"),
    (train_forgotten, r"Call the private model in train\(\) mode"),
    (eval_in_ghost_clipping, r"eval\(\) mode with .*ghost.*Call model.train\(\)"),
    (evaluated_into_the_clipped_sum, r"join the clipped sum.*grad_sample_mode=\"hooks\""),
    (in_place_at_several_positions, "in-place changes of an output"),
    (in_place_in_ghost_clipping, "use inplace=False"),
    (
        positions_for_all_records,
        r"positions.weight .*one for the whole.*expand\(len\(x\), -1",
    ),
    (the_sequence_comes_first, "attention.qlinear.weight.*batch_first=True"),
    (a_sequence_as_long_as_the_batch, "step 1: .*attention.qlinear.*batch_first"),
    (a_sequence_in_functorch, "step 1: .*attention.qlinear.*batch_first"),
    (a_sequence_in_ghost_clipping, "step 1: .*attention.qlinear.*batch_first"),
    (no_gradients_of_records, 'Use "functorch"'),
    (a_known_loss_of_a_network, "^criterion= and feature_norm= need a model"),
    (a_known_loss_with_adam, "leave out criterion, feature_norm"),
]


@pytest.mark.parametrize(("program", "text"), REFUSALS, ids=lambda x: getattr(x, "__name__", ""))
def test_cause_and_remedy_are_named(program, text):
    with pytest.raises(UnsupportedRunError, match=text):
        program()


class Block(nn.Module):
    """As in the networks of torchvision."""

    def __init__(self, inplace):
        super().__init__()
        self.first, self.second = (nn.Conv2d(1, 1, 3, padding=1) for _ in range(2))
        self.norm, self.relu = nn.GroupNorm(1, 1), nn.ReLU(inplace=inplace)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x):
        out = self.relu(self.norm(self.first(x)))
        out = self.second(out)
        out += x
        return self.last(self.relu(out).flatten(1))


def test_ghost_clipping_takes_no_norms_of_the_step_before():
    _, model, optimizer, criterion, loader = private(TwoHeads(), grad_sample_mode="ghost")
    (x, y), (others, labels) = loader
    criterion(sum(model(x)), y).backward()
    optimizer.step()
    with pytest.raises(UnsupportedRunError, match="no per-example gradients"):
        criterion(model(others)[0], labels).backward()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_layers_that_work_in_place_change_nothing(mode):
    weights = []
    for inplace, own in ((True, mode), (False, "hooks")):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        module = Block(inplace)
        train(private(module, vectors(1, 4, 4), grad_sample_mode=own, noise_generator=generator))
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def copied_wrapper(model, plain):
    return copy.deepcopy(model)


def copied_model(model, plain):
    return copy.deepcopy(plain)


def pickled(model, plain):
    return pickle.loads(pickle.dumps(model))


def averaged(model, plain):
    return AveragedModel(model)


@pytest.mark.parametrize("made", [copied_wrapper, copied_model, pickled, averaged])
def test_a_copy_trains_nothing(made):
    module = network()
    run = private(module)
    train(run)
    engine, model, _, criterion, loader = run
    another = made(model, module)
    for x, y in loader:
        criterion(another(x), y).backward()
    assert all(p.grad is not None and p.grad.any() for p in another.parameters())
    before = engine.get_epsilon(1e-5)
    train(run)
    assert engine.get_epsilon(1e-5) > before
    assert engine.privacy_event.num_steps == 2 * RECORDS // BATCH


def test_a_model_is_made_private_again_and_again():
    """By itself, by its wrapper and by an older wrapper."""
    module, engine = network(), HiddenStatePrivacyEngine()
    run = private(module, engine=engine)
    train(run)
    for again in (module, run[1], run[1]):
        train(private(again, engine=engine))
    assert len(engine.accountant.recorders) == 4
    assert engine.get_epsilon(1e-5) > 1
