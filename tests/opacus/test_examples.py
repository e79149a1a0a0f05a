"""The examples run as they are, in seconds, and print what they promise."""

import pathlib
import runpy
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "promised"),
    [
        ("linear_probe_opacus.py", ["--epochs", "2"], "Privacy of the released model"),
        ("lightning_opacus.py", ["--epochs", "2"], "20 steps x 150 of 1500 records, reshuffled"),
        ("swap_accountant_opacus.py", ["--epochs", "2"], "the loader deals each of 1500"),
        ("block_coordinate_opacus.py", ["--epochs", "2"], "two blocks: epsilon"),
        ("factorisation_by_users.py", ["--users", "60", "--epochs", "2"], "user-level epsilon 2"),
        (
            "factorisation_by_users.py",
            ["--setting", "vertical", "--users", "60", "--epochs", "2"],
            "X at item-level epsilon 2",
        ),
        ("dice_sgd_opacus.py", ["--epochs", "5", "--epsilon", "2"], "would claim epsilon"),
        ("resume_opacus.py", ["--epochs", "2", "--stop-after", "13"], "resumed: 20 steps"),
    ],
)
def test_example(name, arguments, promised, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    if name == "lightning_opacus.py":
        pytest.importorskip("lightning", reason="Lightning is not among what this package installs")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert promised in printed
    if name == "resume_opacus.py":
        lines = printed.splitlines()
        assert lines[0].partition("epsilon ")[2] == lines[2].partition("epsilon ")[2]


def test_the_swap_is_three_lines():
    lines = (EXAMPLES / "swap_accountant_opacus.py").read_text().splitlines()
    assert sum("swap " in line and "#" in line for line in lines) == 3
