"""The figures of the papers: every script runs at a small size, every row of the index exists."""

import importlib
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "papers"
PAPERS = {
    "chen_liu_2025": "| Theorem 4.6, constant noise | 5.467e-06 |",
    "chien_li_2024": "| Theorem 3.1, convex | 0.064 | 0.16006 |",
    "chourasia_2021": "| Corollary 2 (their upper bound) | 1.5843e-05 |",
    "dice_sgd_2024": "| 0.5 | 0.0000 | -0.7500 | -0.0000 | 0.8 | -0.75 |",
    "kong_ribero_2025": "| (19), m = 10 |",
}
NEEDS = {
    "chen_liu_2025": ["sklearn"],
    "chien_li_2024": ["opacus", "sklearn"],
    "dice_sgd_2024": ["sklearn"],
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", sorted(PAPERS))
def test_a_script_writes_its_page_and_its_picture(name, tmp_path, monkeypatch):
    for package in ["matplotlib", *NEEDS.get(name, [])]:
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(FOLDER))
    try:
        importlib.import_module(name).main(tmp_path, small=True)
    finally:
        for module in (name, "baselines", "networks", "pages"):
            sys.modules.pop(module, None)
    text = (tmp_path / f"{name}.md").read_text("utf-8")
    assert PAPERS[name] in text
    for picture in re.findall(r"\]\((\w+\.png)\)", text):
        assert (tmp_path / picture).stat().st_size > 10_000
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_the_page_is_that_of_the_script(name):
    page = ROOT / "benchmarks" / "results" / f"{name}.md"
    text = page.read_text("utf-8")
    assert PAPERS[name] in text
    source = (FOLDER / f"{name}.py").read_text("utf-8")
    for heading in re.findall(r"^###+ .*$", text, re.MULTILINE):
        assert heading in source
    for picture in re.findall(r"\]\((\S+\.png)\)", text):
        assert (page.parent / picture).is_file()


def test_what_the_index_names_exists():
    text = (ROOT / "benchmarks" / "results" / "papers.md").read_text("utf-8")
    paths = re.findall(r"`([\w/.]+\.py)`", text)
    assert len(paths) > 40
    for path in paths:
        places = (ROOT / "hidden_state_accountants", ROOT / "tests", ROOT)
        assert any((place / path).is_file() for place in places), path
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *PAPERS,
        "baselines",
        "hoelder_estimate",
        "networks",
        "pages",
    }
