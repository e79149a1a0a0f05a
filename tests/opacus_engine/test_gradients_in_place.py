"""Per-example gradients that are kept where they are, beside Opacus' copies."""

import copy

import pytest
import torch
from opacus import GradSampleModule
from opacus.layers import DPLSTM
from torch import nn

from hidden_state_adapters.opacus.gradients.in_place import keep_in_place

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(5, 5), nn.Linear(5, 3)
        self.layer.bias.requires_grad_(False)

    def forward(self, x):
        return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.out = nn.Embedding(4, 6), nn.Linear(6, 4, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x):
        return self.out(self.tokens((x > 0).long()).mean(dim=1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = DPLSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        lengths = torch.arange(1, len(x) + 1).flip(0)
        rows = x[:, None, :].expand(-1, len(x), -1)
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True)
        return self.out(self.cells(packed)[1][0][-1])


class Own(nn.Module):
    """A parameter without a layer: functorch differentiates the whole model."""

    def __init__(self):
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(x * self.scale) * self.scale.sum()


def in_place(*args, **kwargs):
    private = GradSampleModule(*args, **kwargs)
    keep_in_place(private)
    return private


MODELS = {
    "plain": lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 3)
    ),
    "twice": Twice, "tied": Tied, "recurrent": Recurrent, "own": Own,
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_those_of_opacus(name, reduction):
    torch.manual_seed(0)
    model = MODELS[name]()
    data, targets = torch.randn(6, 5), torch.arange(6) % 3
    found = []
    for kind in (GradSampleModule, in_place):
        private = kind(copy.deepcopy(model), loss_reduction=reduction)
        for _ in range(2):  # the second time beside those of the first batch
            nn.CrossEntropyLoss(reduction=reduction)(private(data), targets).backward()
        found.append([p.grad_sample for p in private.parameters() if p.requires_grad])
    for theirs, ours in zip(*found, strict=True):
        assert len(theirs) == len(ours) == 2
        for one, other in zip(theirs, ours, strict=True):
            assert torch.equal(one, other)


def test_an_empty_batch():
    private = in_place(nn.Linear(5, 3))
    private(torch.zeros(0, 5)).sum().backward()
    assert [p.grad_sample.shape for p in private.parameters()] == [(0, 3, 5), (0, 3)]


def test_accumulation_is_forbidden_where_opacus_forbids_it():
    private = in_place(nn.Linear(5, 3))
    private.forbid_grad_accumulation()
    private(torch.ones(2, 5)).sum().backward()
    with pytest.raises(ValueError, match="grad accumulation"):
        private(torch.ones(2, 5)).sum().backward()


@pytest.mark.parametrize("first", [lambda m: m, GradSampleModule])
def test_a_model_of_another_run_is_taken_again(make_run, first):
    run = make_run(model=first(nn.Linear(5, 3)), grad_sample_mode="hooks", loss_geometry=None,
                   feature_norm=None)  # fmt: skip
    assert isinstance(run.model, GradSampleModule)
    run.epoch()
    again = make_run(model=run.model, grad_sample_mode="hooks", loss_geometry=None,
                     feature_norm=None, engine=run.engine)  # fmt: skip
    assert again.model is run.model
