"""One look at the first batch tells models, and collate functions, that mix its records."""

import pytest
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import DiceSGDOptimizer, HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.apart import records_are_apart

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ALONE = "the model takes every record of a batch by itself"
LOOKED = f"{ALONE} (looked at once, on the first batch"


class Centres(nn.Module):
    """In train() mode only."""

    def forward(self, features):
        return features - features.mean(0) if self.training else features


class Shares(nn.Module):
    """In train() mode only, and by the number of records."""

    def forward(self, features):
        return features / len(features) if self.training else features


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 4), nn.Linear(4, 3), function

    def forward(self, features):
        return self.last(self.function(self.first(features)))


MIXES = {
    "mean": lambda x: x - x.mean(0),
    "largest": lambda x: x / x.norm(dim=1).max(),
    "guard": lambda x: x / (x.norm(dim=1).max() / 30).clamp(min=1.0),  # nothing that long is there
    "statistics": lambda x: functional.batch_norm(x, None, None, training=True),
    "rank": lambda x: x + x.argsort(0).float(),
    "neighbour": lambda x: x + 0.1 * x.roll(1, 0),
    "attention": lambda x: torch.softmax(x @ x.T, dim=1) @ x,
}
DOES_NOT = {
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "own norm": lambda x: x / x.norm(dim=1, keepdim=True),
    "constant": lambda x: torch.tanh(0.5 * x),
}


def a_run(make_run, function, **arguments):
    torch.manual_seed(0)
    model = Model(function)
    return make_run(model=model, feature_norm=None, **arguments)


KINDS = {
    "dice": {"loss_geometry": None, "optimizer_class": DiceSGDOptimizer},
    "declared": {"loss_geometry": hsa.LossGeometry.smooth(1.0)},
    "composition": {"loss_geometry": None},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MIXES)
def test_models_that_mix(make_run, name, kind):
    run = a_run(make_run, MIXES[name], **KINDS[kind])
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the model mixes the records"):
        run.epoch()


def of_the_model(engine):
    """What is said about the model, which is never said to be checked."""
    (own,) = [a for a in engine.assumptions if a.text.startswith(ALONE)]
    assert own.status is Status.DECLARED
    return own.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DOES_NOT)
def test_models_that_do_not(make_run, name, kind):
    run = a_run(make_run, DOES_NOT[name], **KINDS[kind])
    run.epoch()
    assert of_the_model(run.engine).startswith(LOOKED)


@pytest.mark.parametrize("draw", [torch.rand_like, lambda x: torch.poisson(5 * x.abs())])
def test_random_models_are_declared(make_run, draw):
    """How often a Poisson variable draws depends on the records before it."""
    run = a_run(make_run, lambda x: x + draw(x).detach(), **KINDS["dice"])
    run.epoch()
    assert of_the_model(run.engine) == ALONE


@pytest.mark.parametrize("function", [nn.Dropout(0.5), lambda x: functional.dropout(x, 0.5)])
def test_dropout_hides_nothing(make_run, function):
    """The function draws in eval() mode, too, and nobody can tell; the module does not."""
    run = a_run(make_run, function, **KINDS["composition"])
    run.epoch()
    is_module = isinstance(function, nn.Module)
    assert of_the_model(run.engine).startswith(LOOKED if is_module else ALONE)
    if is_module:
        mixes = a_run(make_run, nn.Sequential(function, Shares()), **KINDS["composition"])
        with pytest.raises(hsa.UnsupportedRunError, match="the model mixes the records"):
            mixes.epoch()


def test_dropout_of_a_function_hides_nothing_beside_other_records(make_run):
    """Statistics of the batch in train() mode, as no eval() mode has them, were not noticed."""

    class Statistics(Centres):
        def forward(self, features):
            return functional.dropout(super().forward(features), 0.5, self.training)

    mixes = a_run(make_run, Statistics(), **KINDS["composition"])
    with pytest.raises(hsa.UnsupportedRunError, match="the model mixes the records"):
        mixes.epoch()


def test_faint_random_numbers_are_not_taken_for_mixing():
    """Those that move the outputs by about the tolerance were, as in the attention of BERT."""

    class Faint(nn.Linear):
        def forward(self, features):
            drawn = functional.dropout(features, 0.5, self.training)
            return super().forward(features + self.factor * drawn)

    model = Faint(5, 3)
    for model.factor in torch.logspace(-3.2, -2.8, 150).tolist():
        features = torch.randn(10, 5)
        found = records_are_apart(model, lambda call: [model(*call[0])], ((features,), {}), 10)
        assert found is not False


@pytest.mark.parametrize("kind", ["one head", "a network"])
def test_a_head_on_a_frozen_network_that_mixes(make_run, kind):
    """Composition: the features of a frozen part, divided by the largest of the batch."""
    model = Model(MIXES["largest"])
    model.first.requires_grad_(kind == "a network")
    run = make_run(
        model=model,
        optimizer=torch.optim.Adam(p for p in model.parameters() if p.requires_grad),
        loss_geometry=None,
    )
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the model mixes the records"):
        run.epoch()


@pytest.mark.parametrize("last", [0, 1])
def test_what_a_model_makes_of_the_outputs_of_a_head(last):
    """A softmax along the wrong dimension, behind one trained layer."""
    module = nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(dim=last))
    if last:
        assert trained(module, (PAIRS, LABELS), likelihood).startswith(LOOKED)
        return
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: the model mixes the records"):
        trained(module, (PAIRS, LABELS), likelihood)


def test_nothing_is_left_behind(make_run):
    """Random numbers, buffers and gradients are as without the look."""

    class Counts(Model):
        def __init__(self):
            super().__init__(torch.tanh)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, features):
            if not torch.is_grad_enabled():
                self.seen += 1
            return super().forward(features)

    torch.manual_seed(0)
    run = make_run(model=Counts(), feature_norm=None, **KINDS["dice"])
    batch = next(iter(run.loader))
    before = torch.get_rng_state()
    run.step(batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert not run.plain_model.seen
    run.engine.get_epsilon(1e-5)


# --- ordinary models that take every record by itself ---------------------------------------------


class Words(nn.Module):
    """Indices, as integers or in floating point, and a mask; another order, other containers."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, ids, mask=None):
        mean = self.words(ids.long())
        if mask is None:
            return self.head(mean.mean(1))
        kept = mask[..., None].to(mean)
        return {"logits": self.head((mean * kept).sum(1) / kept.sum(1).clamp(min=1))}


class Writes(Model):
    """Works on its input in place."""

    def forward(self, features):
        return super().forward(features.mul_(0.5))


class Convolution(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 5), nn.Flatten())


def trained(module, tensors, loss, arguments=None, **loader):
    engine = HiddenStatePrivacyEngine()
    data = tensors if isinstance(tensors, list) else TensorDataset(*tensors)
    model, optimizer, batches = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data, **{"batch_size": 6, **loader}), noise_multiplier=1.0,
        max_grad_norm=1.0, batch_order="cyclic", **(arguments or {}),
    )  # fmt: skip
    for batch in batches:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-5) > 0
    return of_the_model(engine)


IDS, LABELS = torch.arange(60).reshape(12, 5) % 20, torch.arange(12) % 3
PAIRS = torch.linspace(-1, 1, 60).reshape(12, 5)


def entropy(model, inputs, labels):
    return functional.cross_entropy(model(inputs), labels)


def likelihood(model, inputs, labels):
    return functional.nll_loss(model(inputs), labels)


def with_a_mask(model, ids, labels):
    return functional.cross_entropy(model(ids, mask=ids > 3)["logits"], labels)


@pytest.mark.parametrize(
    ("make", "inputs", "loss"),
    [
        (Words, IDS, entropy),
        (Words, IDS.float(), entropy),
        (Words, IDS, with_a_mask),
        (lambda: Writes(torch.tanh), PAIRS, entropy),
        (Convolution, PAIRS, entropy),
    ],
    ids=["words", "words in float", "mask", "in place", "convolution"],
)  # fmt: skip
def test_ordinary_models(make, inputs, loss):
    torch.manual_seed(0)
    assert trained(make(), (inputs.clone(), LABELS), loss).startswith(LOOKED)


class Recurrent(nn.Module):
    """As in an example of Opacus: initial states have the records in their second dimension."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = DPLSTM(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, inputs, states):
        return self.head(self.lstm(inputs[..., None], states)[0][:, -1])


class Attends(nn.Module):
    """To earlier positions: the mask has one for every pair of them."""

    def __init__(self):
        super().__init__()
        self.query, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs, mask):
        scores = (self.query(inputs) @ inputs.mT).masked_fill(mask, -1e9)
        return self.head((scores.softmax(-1) @ inputs).mean(1))


def with_states(model, inputs, labels):
    states = (torch.zeros(1, len(inputs), 3), torch.zeros(1, len(inputs), 3))
    return functional.cross_entropy(model(inputs, states), labels)


def with_positions(model, inputs, labels):
    mask = torch.ones(6, 6).triu(1).bool()
    return functional.cross_entropy(model(inputs, mask), labels)


@pytest.mark.parametrize("size", [3, 6])
@pytest.mark.parametrize(
    ("make", "inputs", "loss"),
    [(Recurrent, PAIRS, with_states), (Attends, torch.randn(12, 6, 6), with_positions)],
    ids=["initial states", "mask of positions"],
)
def test_arguments_that_are_no_records(make, inputs, loss, size):
    torch.manual_seed(0)
    said = trained(make(), (inputs, LABELS), loss, batch_size=size)
    assert said.startswith(ALONE)


# --- the loader's collate_fn ----------------------------------------------------------------------


def records():
    """Sequences of 3 to 14 vectors."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3 + i, 2, generator=generator), i % 3) for i in range(12)]


def padded(rows):
    return pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


def padded_to_20(rows):
    longer = [functional.pad(x, (0, 0, 0, 20 - len(x))) for x, _ in rows]
    return torch.stack(longer), torch.tensor([y for _, y in rows])


def centred(rows):
    inputs, labels = padded_to_20(rows)
    return inputs - inputs.mean(0), labels


class Mean(nn.Module):
    """Of the positions: with or without the padding; or the last one of a recurrent network."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.head = kind, nn.Linear(2, 3)
        self.lstm = DPLSTM(2, 2, batch_first=True) if kind == "last" else None

    def forward(self, inputs):
        if self.kind == "last":
            return self.head(self.lstm(inputs)[0][:, -1])
        hidden = torch.tanh(inputs)
        is_there = inputs.any(dim=2, keepdim=True)
        count = is_there.sum(1) if self.kind == "mask" else inputs.shape[1]
        return self.head((hidden * is_there).sum(1) / count)


@pytest.mark.parametrize(
    ("kind", "collate"), [("all", padded), ("last", padded), ("all", centred), ("mask", centred)]
)
def test_a_longer_record_changes_the_gradients_of_others(kind, collate):
    with pytest.raises(hsa.UnsupportedRunError, match=r"mixes the records.*padding to the longest"):
        trained(Mean(kind), records(), entropy, collate_fn=collate)


def test_halves_that_are_padded_alike():
    """Each half holds one of the longest records."""
    rows = records()
    rows = [rows[i] for i in (11, 0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9)]
    rows[3] = (rows[0][0].clone(), rows[3][1])
    with pytest.raises(hsa.UnsupportedRunError, match=r"mixes the records.*padding to the longest"):
        trained(Mean("all"), rows, entropy, collate_fn=padded)
    trained(Mean("mask"), rows, entropy, collate_fn=padded)


@pytest.mark.parametrize(
    ("kind", "collate"), [("mask", padded), ("all", padded_to_20), ("last", padded_to_20)]
)
def test_padding_that_the_model_does_not_see(kind, collate):
    assert trained(Mean(kind), records(), entropy, collate_fn=collate).startswith(LOOKED)


def positions_first(rows):
    return torch.stack([x for x, _ in rows], dim=1), torch.tensor([y for _, y in rows])


class SequenceFirst(nn.Module):
    """Of inputs (positions, records, 5); returns (records, 4) or (positions, records, 4)."""

    def __init__(self, mixes, over_positions):
        super().__init__()
        self.layer, self.mixes, self.over_positions = nn.Linear(5, 4), mixes, over_positions

    def forward(self, inputs):
        found = self.layer(inputs - inputs.mean(1, keepdim=True) if self.mixes else inputs)
        return found.mean(0) if self.over_positions else found


@pytest.mark.parametrize("length", [3, 4, 6])
@pytest.mark.parametrize("over_positions", [True, False])
def test_records_in_the_second_dimension(length, over_positions):
    """Sequences of half the length of a batch, of another one, and of that of a batch."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(length, 5, generator=generator), i % 3) for i in range(12)]

    def loss(model, inputs, labels):
        outputs = model(inputs)
        return functional.cross_entropy(outputs if over_positions else outputs.mean(0), labels)

    def of(mixes):
        model = SequenceFirst(mixes, over_positions)
        return trained(model, data, loss, {"batch_first": False}, collate_fn=positions_first)

    looked = LOOKED if over_positions or length == 4 else ALONE
    assert of(mixes=False).startswith(looked)
    if over_positions or length < 6:  # else positions and records look alike
        with pytest.raises(hsa.UnsupportedRunError, match="mixes the records"):
            of(mixes=True)
