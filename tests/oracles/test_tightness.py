"""The committed table is what benchmarks/tightness.py says; no bound is below a found value."""

import importlib.util
import pathlib
import sys

import pytest

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


@pytest.mark.parametrize("item", FAST, ids=lambda item: item.name)
def test_the_table_is_up_to_date(item, table):
    row = tightness.evaluate(item)
    for committed, current in zip(table[item.name], row.cells(), strict=True):
        try:
            assert float(committed) == pytest.approx(float(current), rel=2e-3)
        except ValueError:
            assert committed == current, "run make tightness"
    if item.met:
        assert row.ratio == pytest.approx(1.0, abs=1e-9)
    else:
        assert row.ratio > 1.01  # otherwise its comment is out of date


def test_the_table_has_every_class_once_and_no_ratio_below_one(table):
    assert list(table) == [item.name for item in tightness.CLASSES]
    for cells in table.values():
        ratios = [float(cell) for cell in cells[4:6] if cell]
        assert min(ratios) >= 1.0 - 1e-9
        assert ratios == sorted(ratios)  # a certified ratio is the larger one
