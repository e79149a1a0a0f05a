"""Formulas of the docstrings as MathML: a Markdown extension of the site.

Docstrings write formulas as Sphinx does (:math:`...` in a line, ".. math::" for one on its own),
which Python's help() shows as they are. Markdown does not know them; browsers show MathML without
scripts.
"""

import re
from textwrap import dedent
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

DISPLAYED = re.compile(
    r"^(?P<indent>[ ]*)\.\. math::[ ]*(?P<first>.*)(?P<rest>(?:\n(?:(?P=indent)[ ]+\S.*|[ ]*$))*)",
    re.MULTILINE,
)
IN_LINE = re.compile(r":math:`(?P<formula>[^`]+)`")


class _Formulas(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        def stored(formula: str, display: str) -> str:
            html = convert(" ".join(formula.split()), display=display)
            return self.md.htmlStash.store(html)

        def displayed(match: re.Match[str]) -> str:
            formula = match["first"] + "\n" + dedent(match["rest"])
            return f"\n{match['indent']}{stored(formula, 'block')}\n"

        text = DISPLAYED.sub(displayed, "\n".join(lines))
        return IN_LINE.sub(lambda match: stored(match["formula"], "inline"), text).split("\n")


class MathExtension(Extension):
    """:math:`...` and ".. math::" become MathML."""

    def extendMarkdown(self, md: Markdown) -> None:
        # After fenced blocks of code (25), which keep what they hold, before HTML blocks (20).
        md.preprocessors.register(_Formulas(md), "formulas", 24)


def makeExtension(**configuration: Any) -> MathExtension:  # noqa: D103  the name is the library's
    return MathExtension(**configuration)
