"""The site: every page is in its menu, every public name in its reference, its notebooks run."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SETTINGS = (ROOT / "mkdocs.yml").read_text("utf-8")
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
NEEDS = {"keras_model": "tensorflow_privacy", "linear_probe": "opacus", "tabular": "sklearn"}


def test_every_page_is_in_the_menu_once():
    in_menu = re.findall(
        r"^ +- (?:.*: )?((?!from_repository)\S+\.(?:md|ipynb))$", SETTINGS, re.MULTILINE
    )
    pages = [p.relative_to(DOCS).as_posix() for s in ("md", "ipynb") for p in DOCS.rglob(f"*.{s}")]
    assert sorted(in_menu) == sorted([*pages, "index.md"])  # the home page is the README


@pytest.mark.parametrize(
    ("package", "pages"),
    [
        ("hidden_state_accountants", ["core"]),
        ("hidden_state_adapters.opacus", ["opacus"]),
        ("hidden_state_adapters.sklearn", ["sklearn"]),
        ("hidden_state_adapters.tf_privacy", ["tf_privacy"]),
    ],
)
def test_every_public_name_is_in_the_reference_once(package, pages):
    for needed in ("opacus", "sklearn"):
        if package.endswith(needed):
            pytest.importorskip(needed)
    text = "".join((DOCS / "reference" / f"{page}.md").read_text("utf-8") for page in pages)
    documented = re.findall(rf"^::: {re.escape(package)}\.(\w+)$", text, re.MULTILINE)
    public = set(importlib.import_module(package).__all__) - {"BOUNDS"}  # a tuple
    assert sorted(documented) == sorted(public)


WRITTEN_AS_FORMULAS = [
    path
    for folder in ("theory", "papers", "notes")
    for path in sorted((DOCS / folder).glob("*.md"))
]


@pytest.mark.parametrize("path", WRITTEN_AS_FORMULAS, ids=lambda path: path.stem)
def test_formulas_stand_between_dollars(path):
    """Markdown reads bare stars and underscores as emphasis, and proofs lose them."""
    text = path.read_text("utf-8")
    for kept in (
        r"<!--.*?-->",
        r"^```.*?^```",
        r"^(?: {4}.*\n)+",
        r"`[^`]*`",
        r"\$\$[^$]+\$\$",
        r"\$[^$]+\$",
    ):
        text = re.sub(kept, "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|\*\*", "", text)
    assert not re.findall(r"\S*(?:\w\*\w|[A-Za-z)]_[a-z{(]|\^|\$|[<>]=)\S*", text)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebook_runs_and_prints_what_it_shows(path, monkeypatch):
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
