"""The benchmarks of accuracy at equal epsilon: what peers draw, and what the pages say."""

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


@pytest.fixture(autouse=True)
def _modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def script():
    import accuracy

    return accuracy


@pytest.fixture
def orders():
    import utility

    return utility


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


@pytest.mark.exhaustive  # half a minute
def test_the_smallest_size_writes_the_page_and_goes_on_where_it_stopped(
    orders, tmp_path, monkeypatch
):
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    orders.run("smoke", results, page)
    text = page.read_text()
    for method in ("recommend", "hidden, tuned", "Poisson + PLD", "banded factorisation"):
        assert f"| {method} |" in text
    assert "REPLACE_SPECIAL" in text
    counts = [line for line in text.splitlines() if "against the best tuned peer" in line]
    assert len(counts) == len(orders.OURS) == 3
    assert all(" won, " in line and " lost." in line for line in counts)
    assert "not measured with every method" not in text
    page.unlink()
    monkeypatch.setattr(orders, "measure", lambda *_: pytest.fail("measured again"))
    orders.run("smoke", results, page)
    assert page.read_text() == text


def test_banded_noise_has_the_covariance_of_the_factorisation():
    import utility_methods as methods

    steps, width = 6, 200_000
    noise = methods.BandedNoise(methods.coefficients(3))
    rows = np.array([noise.normal(2.0, (width,)) for _ in range(steps)])
    c = sum(k * np.eye(steps, k=-i) for i, k in enumerate(methods.coefficients(3)))
    inverse = np.linalg.inv(c)
    np.testing.assert_allclose(rows @ rows.T / width, 4 * inverse @ inverse.T, atol=0.1)
    multiplier, bands = methods.best_bands(20, 16)
    assert multiplier == pytest.approx(4 * np.linalg.norm(methods.coefficients(bands)))
    assert methods.best_bands(1, 16) == (4.0, 1)


def test_objective_perturbation_meets_its_delta_in_one_dimension():
    """With one class against another the privacy loss is known but for the sign of the noise."""
    import utility_data
    import utility_methods as methods

    data = utility_data.load("cancer")
    std = methods.objective_noise(data, 30.0, 1.0)
    draws = np.abs(np.random.default_rng(0).normal(size=2_000_000))
    loss = math.log1p(0.25 / 30) + 1 / (2 * std**2) + draws / std
    assert np.mean(np.maximum(-np.expm1(1.0 - loss), 0)) == pytest.approx(1e-5, rel=0.3)
    assert methods.objective_noise(data, 0.1, 1.0) is None
