"""The examples in the docstrings."""

import doctest
import importlib
import pkgutil

import pytest

import hidden_state_accountants

MODULES = ["hidden_state_accountants"] + [
    module.name
    for module in pkgutil.walk_packages(
        hidden_state_accountants.__path__, "hidden_state_accountants."
    )
]


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    if name.startswith("hidden_state_accountants.cli."):
        pytest.importorskip("typer")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = map(importlib.import_module, (m for m in MODULES if ".cli" not in m))
    assert sum(len(test.examples) for m in modules for test in finder.find(m)) >= 8


def test_every_public_name_is_documented():
    for name in hidden_state_accountants.__all__:
        value = getattr(hidden_state_accountants, name)
        if name != "BOUNDS":
            assert value.__doc__, name
