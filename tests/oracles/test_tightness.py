"""The committed table is what benchmarks/tightness.py says; no bound is below a found value."""

import importlib.util
import pathlib
import sys

import attrs
import numpy as np
import pytest

from hidden_state_accountants.bounds.shifted_interpolation import worst_mu_squared
from hidden_state_accountants.process.noisy_process import noisy_process

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("tightness", ROOT / "benchmarks" / "tightness.py")
tightness = sys.modules["tightness"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tightness)

FAST = [item for item in tightness.CLASSES if item.gaussian]


@pytest.fixture(scope="module")
def table():
    """The lines of the committed table by the names of the classes."""
    text = (ROOT / "benchmarks" / "results" / "tightness.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: [cell.strip() for cell in cells] for cells in lines[2:]}


@pytest.fixture(scope="module")
def rows():
    return {item.name: tightness.evaluate(item) for item in FAST}


def test_the_table_has_every_class_once(table):
    assert list(table) == [item.name for item in tightness.CLASSES]


@pytest.mark.parametrize("item", FAST, ids=lambda item: item.name)
def test_the_table_is_up_to_date(item, table, rows):
    for committed, current in zip(table[item.name], rows[item.name].cells(), strict=True):
        try:
            assert float(committed) == pytest.approx(float(current), rel=2e-3)
        except ValueError:
            assert committed == current, "run make tightness"


@pytest.mark.parametrize("item", FAST, ids=lambda item: item.name)
def test_bounds_that_are_met_and_bounds_that_are_not(item, rows):
    ratio = rows[item.name].ratio
    assert ratio >= 1 - 1e-9
    if item.met:
        assert ratio == pytest.approx(1.0, abs=1e-9)
    else:
        assert ratio > 1.01  # otherwise its comment is out of date


def test_no_committed_ratio_is_below_one(table):
    for cells in table.values():
        ratios = [float(cell) for cell in cells[4:6] if cell]
        assert min(ratios) >= 1.0 - 1e-9
        assert ratios == sorted(ratios)  # a certified ratio is the larger one


@pytest.mark.parametrize("item", FAST, ids=lambda item: item.name)
def test_gaussian_rows_use_curvature_and_sensitivity_only(item):
    """Quadratics have no bounded gradient: a bound that used one would not be about them."""
    process = noisy_process(item.event, item.relation)
    boundless = attrs.evolve(process, drift=np.full(process.num_steps, 1e9))
    assert worst_mu_squared(process) == pytest.approx(worst_mu_squared(boundless), rel=1e-13)


def test_the_grid_and_the_gaussian_oracle_agree_on_linear_losses():
    """The search on the grid would find a bound that is met, up to the width of its cells."""
    item = next(i for i in FAST if i.name.startswith("clipped generalized linear model"))
    row = tightness.evaluate(
        attrs.evolve(
            item,
            event=attrs.evolve(item.event, num_steps=4),
            family=tightness.full_huber,
            gaussian=False,
        )
    )
    assert row.ratio == pytest.approx(1.0, abs=2e-3)
    assert 1.0 < row.certified_ratio < 1.01
