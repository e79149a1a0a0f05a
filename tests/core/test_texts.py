"""The examples of the documentation, of docstrings and of the README run as they stand."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import hidden_state_accountants

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if ">>> " in page.read_text("utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_examples(page):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testfile(str(page), module_relative=False, optionflags=flags)
    assert results.failed == 0


def sessions():
    """The (command, output) pairs of docs/cli.md and the file that it shows."""
    text = (DOCS / "cli.md").read_text("utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    pairs = re.findall(r"^\$ (.*)\n((?:[^$].*\n)+)", "".join(blocks), re.MULTILINE)
    (shown,) = re.findall(r"`logistic.toml`:\n\n```toml\n(.*?)```", text, re.DOTALL)
    return pairs, shown


@pytest.mark.slow
def test_the_sessions_of_the_command_line(tmp_path, monkeypatch, capsys):
    """Every line but those of the tables, which hold seconds, is printed; new ones may be."""
    pytest.importorskip("typer")
    from hidden_state_accountants.cli.app import run

    monkeypatch.chdir(tmp_path)
    pairs, shown = sessions()
    (tmp_path / "logistic.toml").write_text(shown)
    assert len(pairs) >= 12
    for command, expected in pairs:
        run(command.split()[1:])
        captured = capsys.readouterr()
        printed = (captured.out + captured.err).splitlines()
        for line in expected.splitlines():
            if line[:1] not in "┏┃┡│└":
                assert line in [p.rstrip() for p in printed], command


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


README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(block, capsys):
    if "torch" in block:
        pytest.importorskip("opacus")
        pytest.importorskip("sklearn")
    exec(compile(block, str(README), "exec"), {})
    epsilon, *explanation = capsys.readouterr().out.splitlines()
    assert 0 < float(epsilon) <= 1
    if "torch" in block:
        assert float(explanation[0].strip("tensor()")) > 0.75
    assert any("REPLACE_SPECIAL" in line for line in explanation)


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat_model.md").read_text("utf-8")


def test_it_has_its_four_tables():
    for title in (
        "Cannot happen",
        "Refused or accounted",
        "Counted as the upstream counts it",
        "Declared by you",
    ):
        section = PAGE.split(f"## {title}\n", 1)[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| ")]
        assert len(rows) > 3
        assert all(line.count(" | ") == 1 and line.endswith(" |") for line in rows)


def test_what_it_names_exists():
    for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).is_file(), path
    for target in re.findall(r"\]\(([\w./]+\.md)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
