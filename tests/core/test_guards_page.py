"""docs/guards.md: every test and module that it names exists, and every row is complete."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guards.md").read_text("utf-8")
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::([\w:]+)`", PAGE)))
MODULES = sorted(set(re.findall(r"`([\w/]+\.py)`", PAGE)))
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| [A-D]?\d", line)
]


def names_in(path):
    """Functions, and methods as Class::method."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}::{n.name}" for n in node.body if hasattr(n, "name"))


def test_what_is_named_exists():
    for path, name in TESTS:
        assert name in set(names_in(ROOT / "tests" / path)), (path, name)
    folders = (ROOT / "adapters/hidden_state_adapters", ROOT / "hidden_state_accountants", ROOT)
    for module in MODULES:
        assert any((folder / module).is_file() for folder in folders), module


def test_rows_are_numbered_and_complete():
    numbers = [row[0].removeprefix("|").strip() for row in ROWS]
    closed = [int(number) for number in numbers if number.isdecimal()]
    assert closed == sorted(set(closed))
    opened = [number for number in numbers if not number.isdecimal()]
    assert opened == sorted(opened, key=lambda number: (number[0], int(number[1:])))
    for number, row in zip(numbers, ROWS, strict=True):
        assert len(row) == 4, number
        assert all(row[1:]), number
        if number.isdecimal():
            assert re.search(r"`[\w/]+\.py::\w+`", row[3]), number
        else:
            assert row[3].startswith("open"), number


def test_rows_that_tests_are_about_exist():
    """What a test calls "Row 8" is row 8 of the page."""
    numbers = {row[0].removeprefix("|").strip() for row in ROWS}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number in re.findall(r"\b[Rr]ow ?(\d+)[:.]|test_row(\d+)_", path.read_text("utf-8")):
            assert "".join(number) in numbers, path
