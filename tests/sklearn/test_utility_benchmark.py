"""The benchmark of accuracy at equal epsilon, at its smallest size."""

import math
import pathlib
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn")

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks" / "utility"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import utility

    yield utility
    for name in (
        "utility",
        "utility_data",
        "utility_methods",
        "utility_page",
        "utility_training",
        "utility_plots",
    ):
        sys.modules.pop(name, None)


@pytest.mark.exhaustive  # half a minute
def test_the_smallest_size_writes_the_page_and_goes_on_where_it_stopped(
    script, tmp_path, monkeypatch
):
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    script.run("smoke", results, page)
    text = page.read_text()
    for method in ("recommend", "hidden, tuned", "Poisson + PLD", "banded factorisation"):
        assert f"| {method} |" in text
    assert "REPLACE_SPECIAL" in text
    counts = [line for line in text.splitlines() if "against the best tuned peer" in line]
    assert len(counts) == len(script.OURS) == 3
    assert all(" won, " in line and " lost." in line for line in counts)
    assert "not measured with every method" not in text
    page.unlink()
    monkeypatch.setattr(script, "measure", lambda *_: pytest.fail("measured again"))
    script.run("smoke", results, page)
    assert page.read_text() == text


@pytest.mark.parametrize("order", ["shuffled_once", "cyclic"])
def test_tuned_runs_of_ours_meet_the_target_at_every_rate(script, order):
    import utility_data
    import utility_methods as methods

    import hidden_state_accountants as hsa

    data = utility_data.load("cancer")
    candidate = methods.recommended(data, 1.0, order, 16, 0.3).best
    for changed in methods.at_rates(candidate, (0.125, 4.0, 100.0)):
        event = methods.smoothed(changed, 2).event
        assert hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5) <= 1


def test_banded_noise_has_the_covariance_of_the_factorisation(script):
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


def test_objective_perturbation_meets_its_delta_in_one_dimension(script):
    """With one class against another the privacy loss is known but for the sign of the noise."""
    import utility_data
    import utility_methods as methods

    data = utility_data.load("cancer")
    std = methods.objective_noise(data, 30.0, 1.0)
    draws = np.abs(np.random.default_rng(0).normal(size=2_000_000))
    loss = math.log1p(0.25 / 30) + 1 / (2 * std**2) + draws / std
    assert np.mean(np.maximum(-np.expm1(1.0 - loss), 0)) == pytest.approx(1e-5, rel=0.3)
    assert methods.objective_noise(data, 0.1, 1.0) is None


def test_the_page_says_what_was_won_and_what_is_missing(script, tmp_path):
    """Made-up figures: ours are 4 points behind, level and ahead; one epsilon is not measured."""
    import attrs
    import utility_page

    def result(points):
        return {"test": [points / 100, points / 100 + 0.002], "validation": 0.5, "tries": 1}

    cells = {"cancer|no privacy|0.0|0": result(95)}
    for epsilon, points in ((0.1, 76), (1.0, 80), (3.0, 85)):
        for method in script.OURS:
            cells[f"cancer|{method}|{epsilon}|0"] = result(points)
        for peer in ("Poisson + PLD", "banded factorisation"):
            cells[f"cancer|{peer}|{epsilon}|0"] = result(80)
    for order, accuracies in (("full", (60, 80)), ("poisson", (80, 81))):
        for epochs, points in zip((1, 4), accuracies, strict=True):
            cells[f"cancer|cost, {order}|1.0|{epochs}"] = result(points)
    size = attrs.evolve(script.SIZES["reduced"], sets=("cancer",), cost=(1, 4))
    utility_page.write_page(tmp_path / "page.md", "made up", size, cells, script.OURS)
    text = (tmp_path / "page.md").read_text()
    assert "1 won, 1 level, 1 lost" in text
    assert "missed: cancer at 0.1 (-4.0 " in text
    assert "1 cells are not measured with every method yet" in text
    assert "1 on cancer (a quarter of the gradients: met)" in text
    assert "mean of all cells: +0.3" in text
    assert "| lost (-4.0) | - | level (+0.0) | won (+5.0) |" in text
