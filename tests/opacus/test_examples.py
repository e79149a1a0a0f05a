"""The examples and the code of EXTENDING.md run as they are and do what they promise."""

import pathlib
import re
import runpy
import sys

import pytest
import torch

import hidden_state_accountants as hsa

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES, PAGE = ROOT / "examples", ROOT / "EXTENDING.md"
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


# --- EXTENDING.md ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def names():
    """What the blocks of the page define, one after the other in one namespace."""
    namespace = {"__name__": "extending"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace


def test_a_bound_refuses_cites_and_lists_what_all_bounds_assume(names):
    bound, event = names["LastStep"](), names["run"]
    relation = names["NeighboringRelation"].REPLACE_SPECIAL
    guarantee = bound.guarantee(event, relation)
    assert guarantee.citations == (bound.citation,)
    composed = hsa.bounds.Composition().guarantee(event, relation)
    assert guarantee.epsilon(1e-5) == pytest.approx(composed.epsilon(1e-5))
    assert "one record per person" in " ".join(a.text for a in guarantee.assumptions)
    two = names["attrs"].evolve(event, num_steps=2)
    with pytest.raises(hsa.UnsupportedRunError, match="number of steps: needs 1, got 2"):
        bound.guarantee(two, relation)


def test_a_mechanism_is_known_to_the_engine_alone(names):
    """The whole run is accounted, and checked."""
    engine, optimizer = names["engine"], names["optimizer"]
    assert engine.privacy_event.num_steps == 2
    assert "ExactlyClipped" not in engine.report(1e-5)
    with pytest.raises(hsa.UnsupportedRunError, match="no new batch"):
        optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        engine.get_epsilon(1e-5)
    assert torch.isfinite(next(names["model"].parameters())).all()
