"""One look at whether the records of a batch act on each other, in model and criterion."""

import random

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_block_coordinate import make as make_by_hand
from opacus_block_coordinate import train as train_by_hand
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.guards.exchange import halves

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RECORDS, SEEN, NOT_SEEN = 12, "checked: the model", "declared: the model takes every record"


class Model(nn.Module):
    """A function of the batch, and a linear head on it; counts its passes."""

    def __init__(self, function, width=5):
        super().__init__()
        self.function, self.head, self.passes = function, nn.Linear(width, 3), 0

    def forward(self, *args, **kwargs):
        self.passes += 1
        return self.head(self.function(*args, **kwargs))


def unit_features(rows=RECORDS):
    generator = torch.Generator().manual_seed(0)
    return functional.normalize(torch.randn(rows, 5, generator=generator))


class Loop:
    """Six batches of two, unless told otherwise."""

    def __init__(self, model, inputs=None, *, batch_size=2, loss=None, **arguments):
        torch.manual_seed(0)
        inputs = unit_features() if inputs is None else inputs
        self.plain, self.loss = model, loss or nn.CrossEntropyLoss()
        self.engine = HiddenStatePrivacyEngine()
        data = TensorDataset(inputs, torch.arange(len(inputs)) % 3)
        self.model, self.optimizer, *_, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=batch_size),
            **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_order": "cyclic"} | arguments,
        )

    def call(self, inputs):
        return self.model(inputs)

    def step(self, batch):
        inputs, labels = batch
        self.optimizer.zero_grad()
        self.loss(self.call(inputs), labels).backward()
        self.optimizer.step()

    def epoch(self):
        for batch in self.loader:
            self.step(batch)
        return self

    @property
    def line(self):
        (line,) = [str(a) for a in self.engine.assumptions if "every record" in str(a)]
        return line


MIXES = {
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "mean": lambda x: x - x.mean(0),
    "largest": lambda x: x / x.norm(dim=1).max(),
    "smallest": lambda x: x / x.norm(dim=1).min(),
    "neighbour": lambda x: x + 0.1 * x.roll(1, 0),
    "all before it": lambda x: x.cumsum(0),
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "rank": lambda x: x.sort(dim=0).values,
    "faintly": lambda x: x + 1e-3 * x.mean(0),
}


@pytest.mark.parametrize("batch_size", [2, 12])
@pytest.mark.parametrize("name", MIXES)
def test_models_that_mix(name, batch_size):
    loop = Loop(Model(MIXES[name]), batch_size=batch_size)
    before = loop.plain.head.weight.detach().clone()
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the model mixes the records"):
        loop.epoch()
    assert torch.equal(loop.plain.head.weight, before)
    with pytest.raises(hsa.UnsupportedRunError, match="mixes the records"):
        loop.engine.get_epsilon(1e-5)


def pixels():
    """Whole numbers, of which the largest differ."""
    drawn = torch.randint(0, 256, (RECORDS, 5), generator=torch.Generator().manual_seed(0))
    drawn[:, 0] = torch.arange(2 * RECORDS, RECORDS, -1)
    return drawn


@pytest.mark.parametrize("batch_size", [2, 12])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32, torch.int64])
def test_whole_numbers_scaled_by_the_largest(kind, batch_size):
    mixes = Model(lambda x: x.float() / x.max())
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the model mixes the records"):
        Loop(mixes, pixels().to(kind), batch_size=batch_size).epoch()
    honest = Model(lambda x: x.float() / 255)
    assert Loop(honest, pixels().to(kind), batch_size=batch_size).epoch().line.startswith(SEEN)


class Normalized(torch.autograd.Function):
    """The gradient of the batch has norm 1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class AfterTheHead(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.head, self.function = nn.Linear(5, 3), function

    def forward(self, x):
        return self.function(self.head(x))


def hooked(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / gradient.norm())
    return x


GRADIENTS_THAT_MIX = {
    "function": Normalized.apply,
    "hook": hooked,
    "trained only": lambda x: x - x.mean(0) if torch.is_grad_enabled() else x,
}


@pytest.mark.parametrize("name", GRADIENTS_THAT_MIX)
def test_gradients_that_mix(name):
    loop = Loop(AfterTheHead(GRADIENTS_THAT_MIX[name]), batch_size=4)
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the model mixes the records"):
        loop.epoch()


def test_a_hook_of_the_module_that_mixes():
    loop = Loop(nn.Sequential(nn.Linear(5, 3), nn.Tanh()), batch_size=4)
    scale = lambda part, inputs, outputs: (inputs[0] / inputs[0].norm(),)  # noqa: E731
    loop.plain[1].register_full_backward_hook(scale)
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the model mixes the records"):
        loop.epoch()


class Tokens(nn.Module):
    """Cuts its input to the longest record of the batch: sums of other lengths, as with padding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, tokens):
        longest = int((tokens > 0).sum(1).max())
        mask = (tokens > 0)[:, :longest, None]
        return self.head((self.embedding(tokens[:, :longest]) * mask).sum(1))


def tokens():
    drawn = torch.randint(1, 7, (RECORDS, 50), generator=torch.Generator().manual_seed(0))
    return drawn * (torch.arange(50) < torch.arange(4, 4 * RECORDS + 4, 4)[:, None])


def codes():
    """A category as a number, which an embedding needs to know."""
    return torch.cat([torch.arange(RECORDS)[:, None] % 4 + 3.0, unit_features()], dim=1)


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 5), nn.Linear(5, 3)

    def forward(self, rows):
        assert ((rows[:, 0] >= 3) & (rows[:, 0] < 7)).all()
        return self.head(self.embedding(rows[:, :1].long()).sum(1) + rows[:, 1:])


HONEST = {
    "linear": (lambda: nn.Linear(5, 3), unit_features),
    "dropout": (lambda: Model(nn.Dropout(0.5)), unit_features),
    "numpy": (lambda: Model(lambda x: x * np.random.rand()), unit_features),  # noqa: NPY002
    "python": (lambda: Model(lambda x: x * random.random()), unit_features),
    "batch norm in eval": (lambda: Model(nn.BatchNorm1d(5, affine=False).eval()), unit_features),
    "layer norm": (lambda: Model(nn.LayerNorm(5)), unit_features),
    "tokens": (Tokens, tokens),
    "codes": (Codes, codes),
}


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("name", HONEST)
def test_models_that_do_not(name, mode):
    make, inputs = HONEST[name]
    criterion = nn.CrossEntropyLoss()
    loop = Loop(
        make(), inputs(), batch_size=6, grad_sample_mode=mode, criterion=criterion, loss=criterion
    )
    assert loop.epoch().line.startswith(f"{SEEN} and the criterion took every record by itself")
    assert 0 < loop.engine.get_epsilon(1e-5) < float("inf")


class Several(Loop):
    """Positional and keyword arguments, nested, with one that has no rows."""

    def call(self, inputs):
        return self.model({"x": (inputs, None)}, shift=inputs, scale=torch.tensor(2.0))


@pytest.mark.parametrize("mixes", [False, True])
def test_any_arguments(mixes):
    def function(nested, *, shift, scale):
        return nested["x"][0] * scale + (shift.mean(0) if mixes else shift)

    loop = Several(Model(function))
    if mixes:
        with pytest.raises(hsa.UnsupportedRunError, match="mixes the records"):
            loop.epoch()
    else:
        assert loop.epoch().line.startswith(SEEN)


class Sequences(nn.Module):
    """Records in the second dimension."""

    def __init__(self, dim):
        super().__init__()
        self.head, self.dim = nn.Linear(5, 3), dim

    def forward(self, rows):
        return self.head(rows - 0.5 * rows.mean(self.dim, keepdim=True))


@pytest.mark.parametrize(("dim", "mixes"), [(0, False), (1, True)])
def test_records_in_the_second_dimension(dim, mixes):
    inputs = torch.randn(RECORDS, 4, 5, generator=torch.Generator().manual_seed(0))
    loop = Loop(Sequences(dim), inputs, batch_first=False)
    loop.call = lambda x: loop.model(x.transpose(0, 1)).mean(0)
    if mixes:
        with pytest.raises(hsa.UnsupportedRunError, match="mixes the records"):
            loop.epoch()
    else:
        assert loop.epoch().line.startswith(SEEN)


# --- what cannot be looked at ---------------------------------------------------------------------


def raises(x):
    assert torch.allclose(x.norm(dim=1), torch.ones(len(x))), "features of norm 1 only"
    return x


def of_its_own(generator):
    return lambda x: x * torch.rand((), generator=generator)


class Alternates:
    passes = 0

    def __call__(self, x):
        self.passes += 1
        return x * (self.passes % 2 + 1)


@pytest.mark.parametrize(
    "function", [raises, of_its_own(torch.Generator()), Alternates()], ids=["raises", "rng", "turn"]
)
def test_what_cannot_be_looked_at_is_declared(function):
    loop = Loop(Model(function)).epoch()
    assert loop.line.startswith(NOT_SEEN)
    assert 0 < loop.engine.get_epsilon(1e-5) < float("inf")


class LossInside(nn.Module):
    """As models of Hugging Face have it: label -100 is ignored, and the mean is over the others."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, features, labels):
        return {"loss": functional.cross_entropy(self.head(features), labels), "n": len(labels)}


@pytest.mark.parametrize("ignores", [False, True])
def test_a_loss_inside_the_model(ignores):
    """It has no row for every record; the gradients have."""
    loop = Loop(LossInside(), batch_size=4)

    def epoch():
        for features, labels in loop.loader:
            loop.optimizer.zero_grad()
            labels[1:2] = -100 if ignores else labels[1:2]
            loop.model(features, labels)["loss"].backward()
            loop.optimizer.step()

    if ignores:
        with pytest.raises(hsa.UnsupportedRunError, match="step 1: the model mixes the records"):
            epoch()
        return
    epoch()
    assert loop.line.startswith(SEEN)


def test_layers_that_the_loop_calls_by_itself():
    loop = Loop(nn.Sequential(nn.Linear(5, 3), nn.Identity()))
    loop.call = lambda x: loop.plain[0](x)
    assert loop.epoch().line.startswith(NOT_SEEN)


def test_equal_rows_show_nothing():
    """The next batch is looked at."""
    inputs = tokens().clamp(max=1)
    inputs[1] = inputs[0]
    loop = Loop(Tokens(), inputs)
    batches = iter(loop.loader)
    loop.step(next(batches))
    assert loop.line.startswith(NOT_SEEN)
    loop.step(next(batches))
    assert loop.line.startswith(SEEN)


@pytest.mark.parametrize(("most", "line"), [(1, NOT_SEEN), (2, SEEN)])
def test_pieces_of_a_batch(most, line):
    """One record alone shows nothing."""
    loop = Loop(nn.Linear(5, 3), batch_size=3)
    with BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=most, optimizer=loop.optimizer
    ) as pieces:
        for batch in pieces:
            loop.step(batch)
    assert loop.line.startswith(line)


# --- no traces ------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Writes its buffers only where gradients are off, as the look has it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        if not torch.is_grad_enabled():
            self.seen += 1
            self.seen = self.seen + 1
        return self.head(functional.dropout(x))


def random_states():
    numpy = np.random.get_state()[1]  # noqa: NPY002
    return torch.get_rng_state().tolist(), numpy.tolist(), random.getstate()


def test_nothing_is_left_behind():
    loop = Loop(Counts())
    buffer, hooks = loop.plain.seen, len(loop.plain._forward_pre_hooks)
    batches = iter(loop.loader)
    features, labels = next(batches)
    loop.optimizer.zero_grad()
    loop.loss(loop.model(features), labels).backward()
    before = random_states()
    loop.optimizer.step()
    assert random_states() == before
    assert loop.plain.seen is buffer
    assert buffer == 0
    assert loop.plain.training
    assert len(loop.plain._forward_pre_hooks) == hooks - 1
    for batch in batches:
        loop.step(batch)
    assert loop.line.startswith(SEEN)


def test_a_few_more_passes_in_a_run():
    """Each half of a batch stays, with three others in place of the other half."""
    loop = Loop(Model(nn.Identity())).epoch().epoch()
    assert loop.plain.passes == 12 + 2 * (1 + 3)


def test_the_trajectory_is_that_without_a_look(monkeypatch):
    def trained():
        model = Model(nn.Dropout(0.5))
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        return Loop(model, noise_multiplier=0.0).epoch().plain.head.weight.detach().clone()

    looked = trained()
    path = "hidden_state_adapters.opacus.guards.independence.IndependenceGuard.figures"
    monkeypatch.setattr(path, lambda self, piece: {})
    torch.testing.assert_close(looked, trained(), rtol=0, atol=0)


@pytest.mark.parametrize("keeps_whole", [False, True])
def test_what_is_shown(keeps_whole):
    """Every value is one of the batch, or lies between one and 0; whole numbers may be codes."""
    rows = torch.tensor([[0.5, 3.0, 1], [-0.25, 4.0, 0], [1.0, -5.0, 2], [0.75, 6.0, 1]])
    labels = torch.tensor([0, 1, 2, -100])
    seen = set()
    for half in halves(((rows, labels), {"other": "text"}), 4, 0, keeps_whole=keeps_whole):
        seen.add(tuple(half.kept.tolist()))
        first = half.version(0)[0][0]
        for number in (0, *half.numbers):
            (version, targets), others = half.version(number)
            assert others == {"other": "text"}
            assert version[:, 0].abs().max() <= 1.0
            codes = {3.0, 4.0, -5.0, 6.0} if keeps_whole else {-5.0, *range(1, 7)}
            assert set(version[:, 1].tolist()) <= codes
            assert set(version[:, 2].tolist()) <= {0.0, 1.0, 2.0}
            assert set(targets.tolist()) <= {0, 1, 2, -100}
            assert torch.equal(version[half.kept], first[half.kept])
            assert torch.equal(version, first) == (number == 0)
            assert bool(half.differs(number)) == (number > 0)
    assert len(seen) == 2
    assert sorted(place for kept in seen for place in kept) == [0, 1, 2, 3]


# --- the criterion --------------------------------------------------------------------------------


class Weighted(nn.CrossEntropyLoss):
    def __init__(self, reduction):
        super().__init__(weight=torch.tensor([1.0, 5.0, 1.0]), reduction=reduction)


class Contrastive(nn.Module):
    def forward(self, output, labels):
        return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


class Hardest(nn.Module):
    def forward(self, output, labels):
        return functional.cross_entropy(output, labels, reduction="none").topk(2).values.mean()


@pytest.mark.parametrize(
    "criterion", [Weighted("mean"), Contrastive(), Hardest(), nn.CrossEntropyLoss(ignore_index=2)]
)
def test_criteria_that_mix(criterion):
    loop = Loop(nn.Linear(5, 3), batch_size=6, criterion=criterion, loss=criterion)
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the criterion mixes the records"):
        loop.epoch()


@pytest.mark.parametrize(
    ("criterion", "reduction"),
    [
        (Weighted("sum"), "sum"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "mean"),
        (nn.MultiMarginLoss(), "mean"),
    ],
)
def test_criteria_that_do_not(criterion, reduction):
    loop = Loop(
        nn.Linear(5, 3), batch_size=6, criterion=criterion, loss=criterion, loss_reduction=reduction
    )
    assert loop.epoch().line.startswith(f"{SEEN} and the criterion")


TOKENS, IGNORED = 4, -100


class Tagger(nn.Module):
    """Four tokens with three classes each, for every record."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3 * TOKENS)

    def forward(self, inputs):
        return self.linear(inputs).reshape(-1, TOKENS, 3)


def tags(is_ragged):
    """Labels for 12 records; of ragged ones, the last tokens of some are ignored."""
    labels = torch.arange(RECORDS * TOKENS).reshape(RECORDS, TOKENS) % 3
    lengths = 1 + torch.arange(RECORDS) * 5 % TOKENS if is_ragged else torch.full((RECORDS,), 4)
    return torch.where(torch.arange(TOKENS) < lengths[:, None], labels, IGNORED)


def flattened(output, labels):
    return output.reshape(-1, 3), labels.reshape(-1)


def transposed(output, labels):
    return output.transpose(1, 2), labels


def masked(output, labels):
    return output[labels != IGNORED], labels[labels != IGNORED]


def by_record(output, labels):
    return output, labels


class MeanOfEveryRecord(nn.Module):
    """Of its own tokens, then over the records."""

    def forward(self, output, labels):
        losses = functional.cross_entropy(
            output.reshape(-1, 3), labels.reshape(-1), reduction="none"
        ).reshape(-1, TOKENS)
        return (losses.sum(1) / (labels.reshape(-1, TOKENS) != IGNORED).sum(1)).mean()


class FixedDivisor(nn.Module):
    """The mean over all tokens, ignored or not."""

    def forward(self, output, labels):
        return functional.cross_entropy(output, labels, reduction="none").mean()


def token_run(criterion, arrange, *, is_ragged, **arguments):
    engine, model = HiddenStatePrivacyEngine(), Tagger()
    data = TensorDataset(unit_features(), tags(is_ragged))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        batch_order="cyclic",
        criterion=criterion,
        **arguments,
    )
    for inputs, labels in loader:
        optimizer.zero_grad()
        criterion(*arrange(model(inputs), labels)).backward()
        optimizer.step()
    (line,) = [str(a) for a in engine.assumptions if "every record" in str(a)]
    return line


@pytest.mark.parametrize("arrange", [flattened, transposed, masked])
def test_a_mean_over_the_tokens_of_the_batch(arrange):
    """Reported 4.377 where 13.0 is true: one record's labels scale the gradients of all."""
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the criterion mixes the records"):
        token_run(nn.CrossEntropyLoss(), arrange, is_ragged=True)


def test_a_mean_over_a_number_of_tokens_that_varies():
    lengths = iter([4, 2])

    def cut(output, labels):
        return flattened(*(x[:, :length] for length in [next(lengths)] for x in (output, labels)))

    with pytest.raises(hsa.UnsupportedRunError, match=r"step 2: .* Half of them were left out"):
        token_run(nn.CrossEntropyLoss(), cut, is_ragged=False)


@pytest.mark.parametrize(
    ("criterion", "arrange", "is_ragged", "arguments"),
    [
        (nn.CrossEntropyLoss(), flattened, False, {}),
        (nn.CrossEntropyLoss(), transposed, False, {}),
        (nn.CrossEntropyLoss(reduction="sum"), flattened, True, {"loss_reduction": "sum"}),
        (FixedDivisor(), flattened, True, {}),
        (MeanOfEveryRecord(), flattened, True, {}),
        (MeanOfEveryRecord(), by_record, True, {}),
    ],
)
def test_token_losses_of_every_record(criterion, arrange, is_ragged, arguments):
    line = token_run(criterion, arrange, is_ragged=is_ragged, **arguments)
    assert line.startswith(f"{SEEN} and the criterion")


def test_a_sum_over_tokens_under_a_mask():
    criterion = nn.CrossEntropyLoss(reduction="sum")
    line = token_run(criterion, masked, is_ragged=True, loss_reduction="sum")
    assert line.startswith(SEEN)


def test_a_criterion_that_the_loop_does_not_call():
    loop = Loop(nn.Linear(5, 3), criterion=nn.CrossEntropyLoss()).epoch()
    assert loop.line.startswith(f"{SEEN} took every record by itself")


# --- optimizers made by hand ----------------------------------------------------------------------


@pytest.mark.parametrize("mixes", [False, True])
def test_dp_mbcd_by_hand(mixes):
    model, optimizer = make_by_hand()
    if mixes:
        model._module.register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0),))
    data = [(torch.randn(4, 3).double(), torch.ones(4, 3).double())]
    if mixes:
        with pytest.raises(hsa.UnsupportedRunError, match="the model mixes the records"):
            train_by_hand(model, optimizer, data)
        return
    train_by_hand(model, optimizer, data)
    assert "the model took every record by itself" in optimizer.report(1e-5, dataset_size=4)
