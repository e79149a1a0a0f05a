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


@pytest.mark.slow
def test_the_examples():
    finder, examples = doctest.DocTestFinder(exclude_empty=True), 0
    for name in MODULES:
        if name.startswith("hidden_state_accountants.cli."):
            pytest.importorskip("typer")
        module = importlib.import_module(name)
        assert doctest.testmod(module).failed == 0, name
        examples += sum(len(test.examples) for test in finder.find(module))
    assert examples >= 8


def test_every_public_name_is_documented():
    for name in hidden_state_accountants.__all__:
        value = getattr(hidden_state_accountants, name)
        if name != "BOUNDS":
            assert value.__doc__, name
