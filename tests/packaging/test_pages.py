"""Pages: their blocks run, the site has every page and name, figures are those of their scripts.

Sessions (>>>) are run by core/test_texts.py, docs/keras.md by keras/test_reports.py, EXTENDING.md
by opacus/test_examples.py, the README by core/test_texts.py.
"""

import importlib
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS, PAPERS = ROOT / "docs", ROOT / "benchmarks" / "papers"


def blocks(page):
    found = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text("utf-8"), re.DOTALL | re.M)
    return [textwrap.dedent(block) for block in found if ">>> " not in block]


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=[path.stem for path in paths])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@each([p for p in sorted(DOCS.rglob("*.md")) if blocks(p) and p.name != "keras.md"])
def test_blocks(path, tmp_path, monkeypatch):
    """As they stand, one after the other."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for number, block in enumerate(blocks(path), 1):
        assert "..." not in block, f"block {number} of {path.name} is not whole"
        for needed, word in (("opacus", "opacus"), ("tensorflow_privacy", "tf_privacy")):
            if word in block or needed in block:
                pytest.importorskip(needed)
        # Two passes say what many do.
        short = re.sub(r"(?<=range\()\d\d+(?=\))", "2", block)
        short = re.sub(r"(?<=\bepochs=)\d\d+", "2", short)
        exec(compile(short, f"{path.name}, block {number}", "exec"), names)


# --- the site -------------------------------------------------------------------------------------


def test_every_page_is_in_the_menu_once():
    in_menu = re.findall(
        r"^ +- (?:.*: )?((?!from_repository)\S+\.(?:md|ipynb))$",
        (ROOT / "mkdocs.yml").read_text("utf-8"),
        re.MULTILINE,
    )
    pages = [p.relative_to(DOCS).as_posix() for s in ("md", "ipynb") for p in DOCS.rglob(f"*.{s}")]
    assert sorted(in_menu) == sorted([*pages, "index.md"])  # the home page is the README


@pytest.mark.parametrize("page", ["core", "opacus", "sklearn", "tf_privacy"])
def test_every_public_name_is_in_the_reference_once(page):
    if page in ("opacus", "sklearn"):
        pytest.importorskip(page)
    package = "hidden_state_accountants" if page == "core" else f"hidden_state_adapters.{page}"
    text = (DOCS / "reference" / f"{page}.md").read_text("utf-8")
    documented = re.findall(rf"^::: {re.escape(package)}\.(\w+)$", text, re.MULTILINE)
    public = set(importlib.import_module(package).__all__) - {"BOUNDS"}  # a tuple
    assert sorted(documented) == sorted(public)


@each([p for folder in ("theory", "papers", "notes") for p in sorted((DOCS / folder).glob("*.md"))])
def test_formulas_stand_between_dollars(path):
    """Markdown reads bare stars and underscores as emphasis, and proofs lose them."""
    text = path.read_text("utf-8")
    comment, code, indented = r"<!--.*?-->", r"^```.*?^```", r"^(?: {4}.*\n)+"
    for kept in (comment, code, indented, r"`[^`]*`", r"\$\$[^$]+\$\$", r"\$[^$]+\$"):
        text = re.sub(kept, "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|\*\*", "", text)
    assert not re.findall(r"\S*(?:\w\*\w|[A-Za-z)]_[a-z{(]|\^|\$|[<>]=)\S*", text)


NEEDS = {"keras_model": "tensorflow_privacy", "linear_probe": "opacus", "tabular": "sklearn"}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@each(sorted((DOCS / "tutorials").glob("*.ipynb")))
def test_a_notebook_prints_what_it_shows(path, monkeypatch):
    """The figures of a private run differ from run to run; the lines around them do not."""
    pytest.importorskip("matplotlib")
    pytest.importorskip(NEEDS[path.stem])
    monkeypatch.syspath_prepend(ROOT / "tools")
    notebooks = importlib.import_module("notebooks")
    notebook = json.loads(path.read_text("utf-8"))
    shown = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ran = [cell["outputs"] for cell in notebooks.run(notebook)]
    assert [lines(outputs) for outputs in ran] == [lines(outputs) for outputs in shown]
    sys.modules.pop("notebooks")


def lines(outputs):
    """What was printed without its figures, and how many pictures there are."""
    printed = "".join("".join(o.get("text", "")) for o in outputs)
    pictures = sum("image/png" in o.get("data", {}) for o in outputs)
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "0", printed), pictures


# --- the figures of the papers --------------------------------------------------------------------

# script: (a line of its page, what it needs)
FIGURES = {
    "chen_liu_2025": ("| Theorem 4.6, constant noise | 5.467e-06 |", ["sklearn"]),
    "chien_li_2024": ("| Theorem 3.1, convex | 0.064 | 0.16006 |", ["opacus", "sklearn"]),
    "chourasia_2021": ("| Corollary 2 (their upper bound) | 1.5843e-05 |", []),
    "dice_sgd_2024": ("| 0.5 | 0.0000 | -0.7500 | -0.0000 | 0.8 | -0.75 |", ["sklearn"]),
    "kong_ribero_2025": ("| (19), m = 10 |", []),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", FIGURES)
def test_a_script_writes_its_page_and_its_picture(name, tmp_path, monkeypatch):
    line, needs = FIGURES[name]
    for package in ["matplotlib", *needs]:
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(PAPERS))
    try:
        importlib.import_module(name).main(tmp_path, small=True)
    finally:
        for module in (name, "baselines", "networks", "pages"):
            sys.modules.pop(module, None)
    text = (tmp_path / f"{name}.md").read_text("utf-8")
    assert line in text
    for picture in [f"{name}.png", *re.findall(r"\]\((\w+\.png)\)", text)]:
        assert (tmp_path / picture).stat().st_size > 10_000


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_is_that_of_the_script(name):
    page = ROOT / "benchmarks" / "results" / f"{name}.md"
    text = page.read_text("utf-8")
    assert FIGURES[name][0] in text
    source = (PAPERS / f"{name}.py").read_text("utf-8")
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
    scripts = {*FIGURES, "baselines", "hoelder_estimate", "networks", "pages"}
    assert {path.stem for path in PAPERS.glob("*.py")} == scripts
