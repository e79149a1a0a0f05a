"""The examples of the documentation, of docstrings and of the README run as they stand."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import hidden_state_accountants as package

README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if ">>> " in page.read_text("utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_examples(page):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testfile(str(page), module_relative=False, optionflags=flags)
    assert results.failed == 0


@pytest.mark.slow
def test_the_sessions_of_the_command_line(tmp_path, monkeypatch, capsys):
    """Every line but those of the tables, which hold seconds, is printed; new ones may be."""
    pytest.importorskip("typer")
    from hidden_state_accountants.cli.app import run

    monkeypatch.chdir(tmp_path)
    text = (DOCS / "cli.md").read_text("utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    pairs = re.findall(r"^\$ (.*)\n((?:[^$].*\n)+)", "".join(blocks), re.MULTILINE)
    (shown,) = re.findall(r"`logistic.toml`:\n\n```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "logistic.toml").write_text(shown)
    assert len(pairs) >= 12
    for command, expected in pairs:
        run(command.split()[1:])
        captured = capsys.readouterr()
        printed = (captured.out + captured.err).splitlines()
        for line in expected.splitlines():
            if line[:1] not in "┏┃┡│└":
                assert line in [p.rstrip() for p in printed], command


@pytest.mark.slow
def test_the_examples_of_docstrings():
    examples, root = 0, package.__name__
    modules = pkgutil.walk_packages(package.__path__, f"{root}.")
    for name in (root, *(module.name for module in modules)):
        if ".cli." in name:
            pytest.importorskip("typer")
        results = doctest.testmod(importlib.import_module(name))
        assert results.failed == 0, name
        examples += results.attempted
    assert examples >= 8


BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_readme(block, capsys):
    if "torch" in block:
        pytest.importorskip("opacus")
        pytest.importorskip("sklearn")
    exec(compile(block, str(README), "exec"), {})
    epsilon, *explanation = capsys.readouterr().out.splitlines()
    assert 0 < float(epsilon) <= 1
    if "torch" in block:
        assert float(explanation[0].strip("tensor()")) > 0.75
    assert any("REPLACE_SPECIAL" in line for line in explanation)


def test_the_tests_that_pages_name_exist():
    for page in DOCS.rglob("*.md"):
        for path in re.findall(r"`(tests/[\w/]+\.py)`", page.read_text("utf-8")):
            assert (DOCS.parent / path).is_file(), (page, path)
