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
    for name in ("utility", "utility_data", "utility_methods", "utility_page"):
        sys.modules.pop(name, None)


def test_the_smallest_size_writes_the_page_and_goes_on_where_it_stopped(
    script, tmp_path, monkeypatch
):
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    script.run("smoke", results, page)
    text = page.read_text()
    for method in ("recommend", "hidden, tuned", "Poisson + PLD", "banded factorisation"):
        assert f"| {method} |" in text
    assert "REPLACE_SPECIAL" in text
    (counts,) = (line for line in text.splitlines() if line.startswith("The best peer is"))
    assert counts.count(" level,") == 2
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
