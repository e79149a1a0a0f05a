"""Examples, the code of EXTENDING.md and recommended runs do what they promise."""

import pathlib
import re
import runpy
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    EnvelopeCrossEntropyLoss,
    HiddenStatePrivacyEngine,
    recommended_criterion,
)

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")

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


def test_a_bound_and_a_mechanism_of_ones_own():
    """The blocks of EXTENDING.md, one after the other; the engine knows the mechanism alone."""
    names = {"__name__": "extending"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
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
    assert names["engine"].privacy_event.num_steps == 2
    assert "ExactlyClipped" not in names["engine"].report(1e-5)
    with pytest.raises(hsa.UnsupportedRunError, match="no new batch"):
        names["optimizer"].step()


# docs/recommend.md is run by packaging/test_pages.py.
@pytest.mark.parametrize(
    ("order", "epsilon", "momentum", "bias", "loss", "kind"),
    [
        ("cyclic", 1.0, False, True, "softmax_cross_entropy", EnvelopeCrossEntropyLoss),
        ("poisson", 1.0, False, False, "logistic", nn.BCEWithLogitsLoss),
        ("full", 1.0, False, True, "squared_error", nn.HuberLoss),  # of half the square
        ("full", 50.0, True, False, "softmax_cross_entropy", nn.CrossEntropyLoss),
    ],
)
def test_the_engine_takes_a_recommended_run(order, epsilon, momentum, bias, loss, kind):
    options = dict(orders=[order], epochs=2, bias=bias, loss=loss, momentum=momentum)
    run = hsa.recommend(200, epsilon, 1e-5, classes=3, **options).best
    assert (run.momentum > 0) == momentum
    is_softmax = loss == "softmax_cross_entropy"
    targets = torch.randint(3, (200,)) if is_softmax else torch.rand(200, 1).double()
    features = nn.functional.normalize(torch.randn(200, 4, dtype=torch.float64))
    model = nn.Linear(4, 3 if is_softmax else 1, bias=bias, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    criterion = recommended_criterion(run)
    assert isinstance(criterion, kind)
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=run.event.learning_rate, momentum=run.momentum
        ),
        data_loader=DataLoader(TensorDataset(features, targets), batch_size=run.event.batch_size),
        criterion=criterion,
        **run.make_private_arguments(),
    )
    for _ in range(run.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    assert 0.98 * epsilon < engine.get_epsilon(1e-5) <= epsilon
    assert engine.accountant.recorders[-1].num_steps == run.event.num_steps
