"""docs/threat_model.md: four tables, and the files and anchors that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat_model.md").read_text("utf-8")


def test_it_has_its_four_tables():
    for title in (
        "Cannot happen",
        "Refused or accounted",
        "Counted as the upstream counts it",
        "Declared by you",
    ):
        section = PAGE.split(f"## {title}\n", 1)[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| ")]
        assert len(rows) > 3
        assert all(line.count(" | ") == 1 and line.endswith(" |") for line in rows)


def test_what_it_names_exists():
    for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).is_file(), path
    for target in re.findall(r"\]\(([\w./]+\.md)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
