"""The examples in docs/ run as they stand."""

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if ">>> " in page.read_text("utf-8")]


def test_there_are_pages():
    assert PAGES


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
