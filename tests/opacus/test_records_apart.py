"""One look at the first batch tells models, collate functions and losses that mix its records."""

import functools
import logging
import random
import re

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
LOSSES = (
    "the loss of a batch is the mean (or sum) of the losses of its records: no class weights or "
    "token counts in a mean, no contrastive terms"
)
MIXES, DECLARED, LOOKED = "refused", "declared", "looked at once, on the first batch"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def entropy(model, inputs, labels):
    return functional.cross_entropy(model(inputs), labels)


def trained(module, data, loss=entropy, arguments=None, **loader):
    """An engine that trained for an epoch; every step counts unless the arguments say otherwise."""
    engine = HiddenStatePrivacyEngine()
    data = data if isinstance(data, list) else TensorDataset(*data)
    model, optimizer, *_, batches = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data, **{"batch_size": 6, **loader}), noise_multiplier=1.0,
        max_grad_norm=9.0, batch_order="cyclic", **(arguments or {}),
    )  # fmt: skip
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss(model, inputs, labels).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-5) > 0
    return engine


def outcome(text, refusal, *args, **kwargs):
    """Whether a run is refused, or what the assumption that begins with a text says of a look."""
    try:
        engine = trained(*args, **kwargs)
    except hsa.UnsupportedRunError as error:
        if re.match(refusal, str(error)):
            return MIXES
        raise
    (own,) = [a for a in engine.assumptions if a.text.startswith(text)]
    assert own.status is Status.DECLARED
    return LOOKED if LOOKED in own.text else DECLARED


of_the_model = functools.partial(
    outcome, ALONE, "step 1: the model mixes the records.*padding to the longest"
)
of_the_loss = functools.partial(
    outcome, LOSSES, "step 1: the criterion that was passed mixes.*a number of tokens in a mean"
)


INPUTS = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1, 0] * 2)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 4), nn.Linear(4, 3), function

    def forward(self, features):
        return self.last(self.function(self.first(features)))


class Shares(nn.Module):
    """In train() mode only, and by the number of records."""

    def forward(self, features):
        return features / len(features) if self.training else features


class Statistics(nn.Module):
    """In train() mode only, beside a dropout that no eval() mode switches off."""

    def forward(self, features):
        centred = features - features.mean(0) if self.training else features
        return functional.dropout(centred, 0.5, self.training)


KINDS = {
    "dice": {"optimizer_class": DiceSGDOptimizer},
    "declared": {"loss_geometry": hsa.LossGeometry.smooth(1.0)},
    "composition": {},
}


@pytest.mark.parametrize(
    ("function", "kind", "found"),
    [
        (lambda x: x + x.argsort(0).float(), "dice", MIXES),
        (lambda x: torch.softmax(x @ x.T, dim=1) @ x, "declared", MIXES),
        (lambda x: x + 0.1 * x.roll(1, 0), "composition", MIXES),
        # Nothing that long is there.
        (lambda x: x / (x.norm(dim=1).max() / 30).clamp(min=1.0), "composition", MIXES),
        (lambda x: functional.layer_norm(x, (4,)), "dice", LOOKED),
        (lambda x: x / x.norm(dim=1, keepdim=True), "declared", LOOKED),
        (lambda x: torch.tanh(0.5 * x), "composition", LOOKED),
        # Nobody can tell of random numbers; how often a Poisson variable draws depends on others.
        (lambda x: x + torch.rand_like(x), "dice", DECLARED),
        (lambda x: x + torch.poisson(5 * x.detach().abs()), "dice", DECLARED),
        # The function draws in eval() mode, too; the module does not.
        (lambda x: functional.dropout(x, 0.5), "composition", DECLARED),
        (nn.Dropout(0.5), "composition", LOOKED),
        (nn.Sequential(nn.Dropout(0.5), Shares()), "composition", MIXES),
        (Statistics(), "composition", MIXES),
    ],
)
def test_models(function, kind, found):
    assert of_the_model(Model(function), (INPUTS, LABELS), arguments=KINDS[kind]) == found


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


@pytest.mark.parametrize(("dim", "found"), [(0, MIXES), (1, LOOKED)])
def test_what_a_model_makes_of_the_outputs_of_a_head(dim, found):
    """A softmax along the wrong dimension, behind one trained layer."""

    def likelihood(model, inputs, labels):
        return functional.nll_loss(model(inputs), labels)

    module = nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(dim))
    arguments = {"criterion": nn.NLLLoss(), "feature_norm": 5.0}
    assert of_the_model(module, (INPUTS, LABELS), likelihood, arguments) == found


def test_nothing_is_left_behind(make_run):
    """Random numbers, buffers and gradients are as without the look."""

    class Counts(Model):
        def __init__(self):
            super().__init__(torch.tanh)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, features):
            if not torch.is_grad_enabled():
                self.seen += random.random()
            return super().forward(features)

    run = make_run(model=Counts(), feature_norm=None, loss_geometry=None, **KINDS["dice"])
    batch = next(iter(run.loader))
    before, python = torch.get_rng_state(), random.getstate()
    run.step(batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python
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


def with_a_mask(model, ids, labels):
    return functional.cross_entropy(model(ids, mask=ids > 3)["logits"], labels)


def with_states(model, inputs, labels):
    states = (torch.zeros(1, len(inputs), 3), torch.zeros(1, len(inputs), 3))
    return functional.cross_entropy(model(inputs, states), labels)


def with_positions(model, inputs, labels):
    mask = torch.ones(6, 6).triu(1).bool()
    return functional.cross_entropy(model(inputs, mask), labels)


IDS = torch.arange(60).reshape(12, 5) % 20
SQUARES = torch.randn(12, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "inputs", "loss", "size", "found"),
    [
        (Words, IDS, entropy, 6, LOOKED),
        (Words, IDS.float(), entropy, 6, LOOKED),
        (Words, IDS, with_a_mask, 6, LOOKED),
        (lambda: Writes(torch.tanh), INPUTS, entropy, 6, LOOKED),
        (lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 5), nn.Flatten()),
         INPUTS, entropy, 6, LOOKED),
        (Recurrent, INPUTS, with_states, 6, DECLARED),
        (Attends, SQUARES, with_positions, 3, LOOKED),
        (Attends, SQUARES, with_positions, 6, LOOKED),
        (lambda: nn.Sequential(nn.Softmax(0), nn.Linear(6, 3)), SQUARES[:, 0], entropy, 6, MIXES),
    ],
)  # fmt: skip
def test_ordinary_models(make, inputs, loss, size, found):
    assert of_the_model(make(), (inputs.clone(), LABELS), loss, batch_size=size) == found


# --- the loader's collate_fn ----------------------------------------------------------------------


def sequences(length=None):
    """Of 3 to 14 vectors, or of a length."""
    return [(torch.randn(length or 3 + i, 2), i % 3) for i in range(12)]


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
    ("kind", "collate", "found"),
    [
        ("all", padded, MIXES),
        ("last", padded, MIXES),
        ("all", centred, MIXES),
        ("mask", padded, LOOKED),
        ("last", padded_to_20, LOOKED),
    ],
)
def test_a_longer_record_changes_the_gradients_of_others(kind, collate, found):
    assert of_the_model(Mean(kind), sequences(), collate_fn=collate) == found


@pytest.mark.parametrize(("kind", "found"), [("all", MIXES), ("mask", LOOKED)])
def test_halves_that_are_padded_alike(kind, found):
    """Each half holds one of the longest records."""
    rows = sequences()
    rows = [rows[i] for i in (11, 0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9)]
    rows[3] = (rows[0][0].clone(), rows[3][1])
    assert of_the_model(Mean(kind), rows, collate_fn=padded) == found


def test_records_are_mixed_before_a_head_that_is_all_there_is():
    def collate(rows):
        inputs, labels = centred(rows)
        return inputs.mean(1), labels

    known = {"criterion": nn.CrossEntropyLoss(), "feature_norm": 9.0}
    head = nn.Linear(2, 3)
    assert of_the_model(head, sequences(), arguments=known, collate_fn=collate) == MIXES


def positions_first(rows):
    return torch.stack([x for x, _ in rows], dim=1), torch.tensor([y for _, y in rows])


class SequenceFirst(nn.Module):
    """Of inputs (positions, records, 2); returns (records, 4) or (positions, records, 4)."""

    def __init__(self, mixes, over_positions):
        super().__init__()
        self.layer, self.mixes, self.over_positions = nn.Linear(2, 4), mixes, over_positions

    def forward(self, inputs):
        found = self.layer(inputs - inputs.mean(1, keepdim=True) if self.mixes else inputs)
        return found.mean(0) if self.over_positions else found


@pytest.mark.parametrize("length", [3, 4, 6])
@pytest.mark.parametrize("over_positions", [True, False])
def test_records_in_the_second_dimension(length, over_positions):
    """Sequences of half the length of a batch, of another one, and of that of a batch."""

    def loss(model, inputs, labels):
        outputs = model(inputs)
        return functional.cross_entropy(outputs if over_positions else outputs.mean(0), labels)

    def of(mixes):
        arguments = sequences(length), loss, {"batch_first": False}
        model = SequenceFirst(mixes, over_positions)
        return of_the_model(model, *arguments, collate_fn=positions_first)

    assert of(mixes=False) == (LOOKED if over_positions or length == 4 else DECLARED)
    if over_positions or length < 6:  # else positions and records look alike
        assert of(mixes=True) == MIXES


# --- losses ---------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([1.0, 5.0, 20.0])
SUM = {"loss_reduction": "sum"}


class Weighted(nn.Module):
    """Class weights as somebody's own module has them, where no attribute tells."""

    def forward(self, outputs, labels):
        return functional.cross_entropy(outputs, labels, weight=WEIGHTS)


def contrastive(outputs, labels):
    outputs = functional.normalize(outputs)
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def by_the_positives(outputs, labels):
    """Divides by the number of positives of the batch."""
    positive = (labels == 1).float()
    losses = functional.binary_cross_entropy_with_logits(outputs[:, 0], positive, reduction="none")
    return losses.sum() / positive.sum().clamp(min=1)


def drawing(outputs, labels):
    losses = functional.cross_entropy(outputs, labels, reduction="none")
    return (torch.rand(len(labels)) * losses).mean()


def of_a_column(outputs, targets):
    return ((outputs[:, 0] - targets) ** 2).mean()


def of_all_tokens(outputs, labels):
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def of_tokens(outputs, labels):
    """The mean over the tokens of every record, as on the page."""
    losses = functional.cross_entropy(outputs.mT, labels, reduction="none")
    return (losses.sum(dim=1) / (labels != -100).sum(dim=1).clamp(min=1)).mean()


def layers(outputs=3):
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))


def tokens():
    return nn.Sequential(nn.Embedding(20, 4), nn.Tanh(), nn.Linear(4, 20))


PLAIN, NUMBERS = (INPUTS, LABELS), (INPUTS, LABELS.float())
WHOLE = (IDS, IDS)
PADDED = (IDS, IDS.masked_fill(torch.arange(5) > torch.arange(12)[:, None] % 4, -100))
ENTROPY = nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("make", "data", "criterion", "in_the_loop", "arguments", "found"),
    [
        (layers, PLAIN, Weighted(), None, {}, MIXES),
        (layers, PLAIN, contrastive, None, {}, MIXES),
        (layers, PLAIN, by_the_positives, None, {}, MIXES),
        # opacus 792, 632, 827: the tokens of one record rescale the gradients of all others.
        *(
            (tokens, data, criterion, of_all_tokens, {}, found)
            for criterion in (ENTROPY, of_all_tokens)
            for data, found in ((PADDED, MIXES), (WHOLE, LOOKED))
        ),
        (tokens, PADDED, of_tokens, None, {}, LOOKED),
        (layers, PLAIN, ENTROPY, None, {}, LOOKED),
        (layers, PLAIN, nn.CrossEntropyLoss(WEIGHTS, reduction="sum"), None, SUM, LOOKED),
        (layers, PLAIN, nn.CrossEntropyLoss(WEIGHTS, reduction="none"), None,
         {"grad_sample_mode": "functorch"}, LOOKED),
        (layers, PLAIN, drawing, None, {}, DECLARED),
        # Outputs of shape (n, 1), targets of shape (n,): the loop gives both the same shape.
        *(
            (functools.partial(layers, 1), data, criterion, of_a_column, {}, LOOKED)
            for criterion in (nn.MSELoss(), nn.SmoothL1Loss(), of_a_column)
            for data in (PLAIN, NUMBERS)
        ),
    ],
)  # fmt: skip
def test_criteria(make, data, criterion, in_the_loop, arguments, found):
    def loss(model, inputs, labels):
        value = (in_the_loop or criterion)(model(inputs), labels)
        return value.mean() if value.dim() else value

    arguments = {"criterion": criterion, **arguments}
    assert of_the_loss(make(), data, loss, arguments) == found


class WithItsLoss(nn.Module):
    """A model that returns its loss, as those of transformers do, and constants."""

    def __init__(self, module, loss):
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, inputs, labels):
        outputs = self.module(inputs)
        return self.loss(outputs, labels), outputs, torch.tensor(0.5)


@pytest.mark.parametrize(
    ("make", "data", "loss", "arguments", "found"),
    [
        (layers, PLAIN, Weighted(), {}, MIXES),
        (layers, PLAIN, contrastive, {}, MIXES),
        (tokens, PADDED, of_all_tokens, {}, MIXES),  # as causal models of transformers do
        (tokens, WHOLE, of_all_tokens, {}, DECLARED),
        (layers, PLAIN, ENTROPY, {}, DECLARED),
        (layers, PLAIN, nn.CrossEntropyLoss(reduction="sum"), SUM, DECLARED),
        (layers, PLAIN, nn.CrossEntropyLoss(reduction="sum"), {}, DECLARED),
        (layers, PLAIN, drawing, {}, DECLARED),  # nobody can tell
    ],
)
def test_losses_in_the_model(make, data, loss, arguments, found):
    def returned(model, inputs, labels):
        return model(inputs, labels)[0]

    refusal = "step 1: a number that the model returns for a batch"
    module = WithItsLoss(make(), loss)
    assert outcome(LOSSES, refusal, module, data, returned, arguments, batch_size=3) == found


def test_without_a_criterion_the_log_says_what_is_declared(caplog):
    with caplog.at_level(logging.WARNING, "hidden_state_accountants"):
        assert of_the_loss(layers(), PLAIN) == DECLARED
        (line,) = [r.message for r in caplog.records if LOSSES in r.message]
        assert "criterion= was not passed" in line
        caplog.clear()
        trained(layers(), PLAIN, arguments={"criterion": ENTROPY})
        assert not caplog.records
