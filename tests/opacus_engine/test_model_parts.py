"""The parts of a model are found once, and again where something is another object."""

import pytest
import torch
from torch import nn

from hidden_state_adapters.opacus.guards.parts import ModelParts


def model():
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
    return nn.Sequential(inner, nn.Linear(2, 2, bias=False))


def add_a_module(model):
    model[0].append(nn.Tanh())


def replace_a_module(model):
    model[0][2] = nn.ReLU()


def remove_a_module(model):
    del model[0][2]


def rename_a_module(model):
    model._modules["last"] = model._modules.pop("1")


def replace_a_parameter(model):
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def add_a_parameter(model):
    model[1].bias = nn.Parameter(torch.zeros(2))


def replace_a_buffer(model):
    model[0][1].running_mean = torch.zeros(2)


def remove_statistics(model):
    model[0][1].running_mean = None


def add_a_buffer(model):
    model.register_buffer("counter", torch.zeros(1))


def other_dictionary(model):
    model[1]._parameters = dict(model[1]._parameters, extra=nn.Parameter(torch.zeros(1)))


def other_class(model):
    model[0][2].__class__ = nn.Tanh


CHANGES = [
    add_a_module, replace_a_module, remove_a_module, rename_a_module, replace_a_parameter,
    add_a_parameter, replace_a_buffer, remove_statistics, add_a_buffer, other_dictionary,
    other_class,
]  # fmt: skip


def found(parts):
    return parts.modules, parts.parameters, parts.buffers


def walked(model):
    return (
        tuple(model.named_modules()),
        tuple(model.named_parameters()),
        tuple(model.named_buffers()),
    )


def are_the_same(one, other):
    """Names and objects; tensors are not compared by value."""
    return [[(n, id(v)) for n, v in pairs] for pairs in one] == [
        [(n, id(v)) for n, v in pairs] for pairs in other
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_walk_would_find(change):
    one = model()
    parts = ModelParts(one)
    before = found(parts)
    parts.refresh()
    assert all(a is b for a, b in zip(found(parts), before, strict=True))
    change(one)
    parts.refresh()
    assert parts.modules is not before[0]
    assert are_the_same(found(parts), walked(one))


def test_values_are_not_looked_at():
    one = model()
    parts = ModelParts(one)
    before = found(parts)
    one[1].weight.data = torch.ones(2, 2)
    one.train().requires_grad_(False)
    parts.refresh()
    assert all(a is b for a, b in zip(found(parts), before, strict=True))


def test_a_walk_of_its_own_is_walked_every_time():
    class Own(nn.Sequential):
        def named_parameters(self, *args, **kwargs):
            return iter([(f"own {name}", p) for name, p in super().named_parameters()])

    one = Own(nn.Linear(2, 2))
    parts = ModelParts(one)
    before = parts.parameters
    parts.refresh()
    assert parts.parameters is not before
    assert parts.parameters[0][0] == "own 0.weight"
