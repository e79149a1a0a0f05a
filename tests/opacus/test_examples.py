"""The examples run as they are, in seconds, and print what they promise."""

import pathlib
import runpy
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
NEEDS = {
    "lightning_opacus.py": ["lightning"],
    "transformers_trainer.py": ["transformers", "accelerate"],
}


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
        ("dice_sgd_opacus.py", ["--epochs", "5", "--epsilon", "2"], "claimed)"),
        ("transformers_trainer.py", ["--epochs", "2"], "epoch 2: epsilon 3.4"),
        ("frozen_transformer.py", [], "would it gain: yes"),
        ("lora.py", [], "102 parameters trained, epsilon 3.000"),
        ("gan.py", [], "of discriminator and generator"),
        ("class_weights.py", [], "refused: Expected no class weights in a mean"),
        ("language_model.py", [], "epsilon 5.378 of a text"),
        ("federated_rounds.py", [], "after round 4: epsilon 1.132 of the first hospital"),
        ("resume_opacus.py", ["--epochs", "2", "--stop-after", "13"], "resumed: 20 steps"),
    ],
)
def test_example(name, arguments, promised, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"{package} is not among what this package installs")
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
