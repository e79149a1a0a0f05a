"""What the site needs beside the pages of docs/: the files outside of it that pages link to.

Pages are read in the repository, too, where a link to ../examples/resume_opacus.py or
../SECURITY.md leads to the file. On the site each such file becomes a page of its own.
"""

import ast
import json
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
# Guides before tutorials before the reference before proofs, papers and files of the repository.
BOOST = {"": 4.0, "tutorials": 2.0, "reference": 1.5}
LOG = logging.getLogger("mkdocs.hooks.site")
LINK = re.compile(r"(?<=\]\()(?!https?:|#)[^)#\s]+")
NAMES = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "EXTENDING.md", "SECURITY.md")
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    *(ROOT / name for name in NAMES),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted(RESULTS.glob("*.md")),
]


# What people look for, and the page of a guide that has to answer.
SEARCHES = {
    "BERT": "opacus",
    "GAN": "opacus",
    "LLM": "opacus",
    "class weights": "opacus",
    "resume": "opacus",
    "shuffle": "decide",
}


def _page(path: Path) -> str:
    """The page of a file: `from_repository/` and its path, so that no two are the same."""
    suffix = ".png" if path.suffix == ".png" else ".md"
    return f"from_repository/{path.relative_to(ROOT).with_suffix(suffix).as_posix()}"


def _relinked(text: str, source: str, page: str) -> str:
    """Text of a file of the repository as that of a page: its relative links lead to pages."""

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[0]))
        if path == "README.md":
            path = "docs/index.md"
        target = path[5:] if path.startswith("docs/") else _page(ROOT / path)
        return posixpath.relpath(target, posixpath.dirname(page) or ".")

    return LINK.sub(replaced, text)


def _text(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix == ".cff":
        return f"# Citing\n\n```yaml\n{text}```\n"
    if path.suffix != ".py":
        return _relinked(text, path.relative_to(ROOT).as_posix(), _page(path))
    tree = ast.parse(text)
    title = (ast.get_docstring(tree) or path.name).split("\n")[0].rstrip(".")
    return f"# {title}\n\n`{path.relative_to(ROOT).as_posix()}`\n\n```python\n{text}```\n"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the README as the home page, and pages that are in no menu, for links and the search."""
    home = _relinked((ROOT / "README.md").read_text("utf-8"), "README.md", "index.md")
    files.append(File.generated(config, "index.md", content=home))
    for path in PAGES:
        page = File.generated(config, _page(path), content=_text(path))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    for path in RESULTS.glob("*.png"):
        files.append(File.generated(config, _page(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the pages that were added; searches find guides first."""
    folder = posixpath.dirname(page.file.src_uri)
    page.meta.setdefault("search", {"boost": BOOST.get(folder, 0.5)})
    if page.file.abs_src_path is None:
        return markdown
    return _relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """A proof that Markdown has eaten from, or a formula that stands bare, is an error."""
    if re.search(r"<mi>(?:&amp;|&|\\\w+)</mi>", html):
        LOG.warning("%s: a formula is not converted: it shows a & or a command", page.file.src_uri)
    if page.file.src_uri.startswith(("theory/", "papers/", "notes/")):
        words = re.sub(r"<(math|pre|code|table)\b.*?</\1>", "", html, flags=re.DOTALL)
        text = re.sub(r"<[^>]+>", "", re.sub(r"</?(?:em|strong)>", "\0", words))
        for found in re.findall(r"\S*(?:\w\0\w|[A-Za-z)]_[a-z{(]|\^|\$)\S*", text):
            LOG.warning("%s: %r is a formula outside of $...$", page.file.src_uri, found)
    return html


def on_post_build(config: Any, **_: Any) -> None:
    """A word that the search does not find on its page is an error."""
    path = Path(config["site_dir"]) / "search" / "search_index.json"
    found: dict[str, str] = {}
    for section in json.loads(path.read_text("utf-8"))["docs"]:
        page = section["location"].partition(".html")[0]
        found[page] = f"{found.get(page, '')} {section['title']} {section['text']}".casefold()
    for words, page in SEARCHES.items():
        if words.casefold() not in found.get(page, ""):
            LOG.warning("%s.md: the search does not find %r there", page, words)
