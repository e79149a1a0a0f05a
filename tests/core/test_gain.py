"""Whether a script would gain: the figures are the accountant's, and "no" says why."""

import json

import attrs
import dp_accounting
import pytest

import hidden_state_accountants as hsa
from hidden_state_accountants.cli.app import run as command

SOFTMAX = hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0)
DELTA = 1e-5


def run(order="poisson", **changes):
    fields = {
        "noise_multiplier": 6.0,
        "clip_norm": 1.4143,
        "learning_rate": 0.5,
        "weight_decay": 0.1,
        "batch_size": 500,
        "dataset_size": 50_000,
        "num_steps": 2_000,
        "batch_order": order,
        "loss": SOFTMAX,
    }
    return hsa.LastIterateDpEvent(**(fields | changes))


def epsilon(event):
    return hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)


def composed(event):
    return epsilon(attrs.evolve(event, loss=None))


def test_a_run_that_gains_says_by_how_much():
    gain = hsa.would_gain(run())
    assert gain.verdict == "yes"
    assert gain.epsilon == epsilon(run())
    assert gain.every_iterate == pytest.approx(composed(run()), rel=1e-3)
    stock = dp_accounting.pld.PLDAccountant().compose(run().as_composition()).get_epsilon(DELTA)
    assert gain.every_iterate == pytest.approx(stock, rel=1e-3)
    assert epsilon(run(noise_multiplier=gain.noise_multiplier)) <= gain.every_iterate
    assert epsilon(run(noise_multiplier=0.99 * gain.noise_multiplier)) > gain.every_iterate
    for text in ("would it gain: yes", "instead of 6\n", "one change: weight decay"):
        assert text in str(gain)


def test_the_stock_figure_is_the_smaller_of_two():
    long = run("cyclic", num_steps=20_000)
    gain = hsa.would_gain(long)
    assert gain.verdict == "yes"
    assert gain.every_iterate == pytest.approx(composed(long), rel=1e-3)
    poisson = composed(attrs.evolve(long, batch_order="poisson"))
    assert gain.with_poisson_batches == pytest.approx(poisson, rel=1e-3)
    met = epsilon(attrs.evolve(long, noise_multiplier=gain.noise_multiplier))
    assert 0.99 * gain.with_poisson_batches < met <= gain.with_poisson_batches


def test_a_short_run_gains_with_its_own_batches_only():
    short = {"noise_multiplier": 6.0, "batch_size": 20, "dataset_size": 60, "num_steps": 15}
    gain = hsa.would_gain(run("shuffled_once", weight_decay=0.005, **short))
    assert gain.verdict == "only with these batches"
    assert gain.with_poisson_batches < gain.epsilon < gain.every_iterate
    met = epsilon(attrs.evolve(gain.event, noise_multiplier=gain.noise_multiplier))
    assert 0.99 * gain.every_iterate < met <= gain.every_iterate


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss": None}, "a network with hidden layers has none"),
        ({"weight_decay": 0.0}, "the update does not shrink distances"),
        ({"num_steps": 5}, "too few steps: one of them keeps up to c = 0.95 of a distance"),
        ({"clip_norm": 1.0, "weight_decay": 0.0}, "a step stretches distances by up to c = 1.03"),
    ],
)
def test_no_says_why(changes, reason):
    gain = hsa.would_gain(run(**changes))
    assert gain.verdict == "no"
    assert gain.noise_multiplier is None
    assert reason in str(gain)


def test_the_change_is_the_first_one_of_the_advice():
    event = run("cyclic")
    guarantee = hsa.LastIterateAccountant().compose(event).guarantee
    assert hsa.would_gain(event).change == guarantee.changes(DELTA, epsilon(event))[0]


def test_a_rate_that_stretches_is_the_change_that_matters():
    long_features = hsa.LossGeometry.softmax_cross_entropy(feature_norm=6.0)
    event = run(noise_multiplier=2.0, clip_norm=8.49, loss=long_features, num_steps=3_000)
    description, changed = hsa.would_gain(event).change
    assert description.startswith("learning rate 0.0546: ")
    assert "up to twice the mean size" in description
    assert changed < 0.5 * epsilon(event)


def test_other_runs_are_refused():
    dice = hsa.DiceSgdDpEvent(
        noise_std=1.0, clip_norm=1.0, error_clip_norm=1.0, batch_size=1, dataset_size=10,
        num_steps=1, batch_order="cyclic",
    )  # fmt: skip
    with pytest.raises(TypeError, match="hiding the iterates is about noisy SGD"):
        hsa.would_gain(dice)


def test_command(tmp_path, capsys):
    path = str(tmp_path / "run.toml")
    assert command(["init", path]) == 0
    capsys.readouterr()
    assert command(["gain", path, "--quiet"]) == 0
    assert "would it gain: yes" in capsys.readouterr().out
    assert command(["gain", path, "--quiet", "--json", "--loss", "none"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["epsilon"]) == ("no", found["every_iterate"])
    assert "loss" not in found["event"]
