"""The Python blocks of the pages run as they stand, one after the other.

Sessions (>>>) are run by core/test_docs.py, docs/keras.md by keras/test_docs.py, EXTENDING.md
by opacus/test_extending.py, the README by core/test_readme.py.
"""

import re
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = {"keras.md"}


def blocks(page):
    found = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text("utf-8"), re.DOTALL | re.M)
    return [textwrap.dedent(block) for block in found if ">>> " not in block]


PAGES = [p for p in sorted(DOCS.rglob("*.md")) if blocks(p) and p.name not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_blocks(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page), 1):
        assert "..." not in block, f"block {number} of {page.name} is not whole"
        for needed in ("opacus", "tensorflow_privacy"):
            if needed in block or (needed == "tensorflow_privacy" and "tf_privacy" in block):
                pytest.importorskip(needed)
        # Two passes say what many do.
        short = re.sub(r"(?<=range\()\d\d+(?=\))", "2", block)
        short = re.sub(r"(?<=\bepochs=)\d\d+", "2", short)
        exec(compile(short, f"{page.name}, block {number}", "exec"), names)
