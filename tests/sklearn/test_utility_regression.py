"""The benchmark of regression: every method fits what noise leaves, and meets its target."""

import pathlib

import pytest

pytest.importorskip("sklearn")

import hidden_state_accountants as hsa

pytestmark = pytest.mark.filterwarnings(  # the same records in every test
    "ignore::hidden_state_adapters.sklearn.PrivacyBudgetWarning"
)


@pytest.fixture
def script(monkeypatch):
    folder = pathlib.Path(__file__).parents[2] / "benchmarks" / "utility"
    monkeypatch.syspath_prepend(str(folder))
    import utility_regression

    return utility_regression


@pytest.mark.slow
def test_with_little_noise_every_method_is_near_ridge(script):
    parts = script.split("diabetes", 0)
    best = script.ridge(parts)
    assert best > 0.3
    assert script.r2(script.ada_ssp(parts, 500.0), parts[2]) > best - 0.1
    assert script.ours(parts, 500.0, "auto")[0] > best - 0.15
    event, rate = list(script.settings(len(parts[0][0]), 500.0))[-1]
    assert script.r2(script.descent(parts[0], event, rate), parts[2]) > best - 0.15


def test_tuned_runs_meet_the_target_at_every_rate(script):
    for event, _ in script.settings(300, 1.0):
        assert hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5) <= 1


def test_the_page_has_a_row_for_every_method(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    name = "benchmarks/utility/utility_regression.py"
    script.PAGE.write_text(f"# By hand\n\n<!-- {name} -->\nold\n<!-- end of {name} -->\nmore\n")
    scores = {f"boston|{m}|{e:g}": [0.2, 0.4] for m in script.METHODS[:-1] for e in (0.3, 1)}
    script.write({**scores, "boston|no privacy|0": [0.7]}, 2)
    text = script.PAGE.read_text()
    assert "| AdaSSP | - | 30 ± 10 | 30 ± 10 | - |" in text
    assert "| diffprivlib | - | - | - | - |" in text
    assert "Without privacy: 70." in text
    assert text.startswith("# By hand\n\n<!-- ")
    assert text.endswith(" -->\nmore\n")
    assert "old" not in text
