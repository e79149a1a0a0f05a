"""The benchmark of the page "Accuracy": every peer fits what noise leaves, and has its noise."""

import math
import pathlib
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn")

from hidden_state_accountants.calibration import gaussian_log_mu

pytestmark = pytest.mark.filterwarnings(  # the same records in every test
    "ignore::hidden_state_adapters.sklearn.PrivacyBudgetWarning"
)
FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks" / "utility"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import accuracy

    yield accuracy
    for name in ("accuracy", "accuracy_data", "accuracy_page", "utility_data", "utility_training"):
        sys.modules.pop(name, None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["cancer", "diabetes"])
def test_with_little_noise_every_method_is_near_the_model_without_privacy(script, name):
    data = script.accuracy_data.SETS[name]()
    train, _, test = data.split(0)
    (fit, *_) = script.no_privacy(data, 0)
    best = script.scores(data, fit(*train), test)[0]
    for method, index in ((script.as_it_comes, 0), (script.dp_sgd, -2), (script.dp_fc, 10)):
        fit = list(method(data, 300.0))[index]
        assert script.scores(data, fit(*train), test)[0] > best - 0.12


def test_covariance_and_steps_of_a_peer_have_the_mu_of_the_target(script, monkeypatch):
    """A record of norm 1 moves the covariance by at most 1 and a step by at most the clip norm."""
    drawn = []

    class Recorder:
        def normal(self, mean, std, shape):
            drawn.append(std)
            return np.zeros(shape)

    data = script.accuracy_data.SETS["cancer"]()
    train = data.split(0)[0]
    monkeypatch.setattr(script.np.random, "default_rng", lambda *_: Recorder())
    for fit in list(script.dp_fc(data, 1.0))[::7]:
        drawn.clear()
        fit(*train)
        covariance, *steps = drawn
        clip = min(script.CLIPS, key=lambda c: abs(len(steps) * (c / steps[0]) ** 2 - 0.8 * MU**2))
        square = covariance**-2 + len(steps) * (clip / steps[0]) ** 2
        assert square == pytest.approx(MU**2)


MU = math.exp(gaussian_log_mu(1.0, 1e-5))


def test_the_page_has_a_row_for_every_method_and_says_where_it_lost(script, tmp_path):
    pytest.importorskip("matplotlib")
    import accuracy_page

    results = {}
    for name, classes in (("tables", 2), ("prices", False)):
        results[name] = {"shape": [100, 3], "classes": classes, "named": classes == 2}
        for method in script.METHODS:
            points = {"as it comes": 0.7, "DP-FC, tuned": 0.8, "no privacy": 0.9}.get(method, 0.6)
            ends = [[points, 0.5, points], [points + 0.01, 0.5, points]]
            for epsilon in (0.0, *script.EPSILONS):
                if method != "DP-EBM":
                    key = f"{name}|{method}|{epsilon:g}"
                    results[key] = ends if classes else [end[:1] for end in ends]
    accuracy_page.write(results, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "### tables (named; 100 x 3, 2 classes)" in text
    assert "| DP-FC, tuned | 80.5 ± 0.5 | 80.5 ± 0.5 |" in text
    assert "other sets: 0 won, 0 level, 4 lost: prices at 0.1 (-10.0, DP-FC, tuned)" in text
    assert "frequencies: tables at 0.1, tables at 0.3, tables at 1, tables at 3." in text
    assert "| DP-EBM |" not in text
    assert (tmp_path / "page.png").stat().st_size > 10_000
