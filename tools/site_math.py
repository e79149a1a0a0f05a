"""Formulas as MathML, which browsers show without scripts: a Markdown extension of the site.

Pages write them as GitHub shows them: $...$ in a line, $$...$$ for one on its own. Docstrings
write them as Sphinx does (:math:`...` and ".. math::"), which Python's help() shows as they are.
A formula on its own scrolls by itself where it is wider than the page.
"""

import re
from textwrap import dedent
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

DIRECTIVE = re.compile(
    r"^(?P<indent>[ ]*)\.\. math::[ ]*(?P<first>.*)(?P<rest>(?:\n(?:(?P=indent)[ ]+\S.*|[ ]*$))*)",
    re.MULTILINE,
)
# Code keeps its dollars: it is matched first, and left as it is.
DISPLAYED = re.compile(r"^(?P<indent>[ ]*)\$\$(?P<formula>[^$]+)\$\$[ ]*$", re.MULTILINE)
IN_LINE = re.compile(
    r":math:`(?P<role>[^`]+)`|(?P<code>(`+)[^`].*?(?<!`)\3(?!`))|\$(?P<formula>(?!\s)[^$\n]+?)(?<!\s)\$",
    re.DOTALL,
)


LONG = 40  # characters of a formula in a line that may be wider than a phone
# latex2mathml makes operators of bars, which stretch, with gaps: marks stand for them meanwhile.
BARS = {r"\lvert": ("\ue000", "prefix"), r"\rvert": ("\ue001", "postfix")}


def _marked(text: str) -> str:
    for command, (mark, _) in BARS.items():
        text = text.replace(command, f"{mark} ")
    return text


def _fenced(html: str) -> str:
    for mark, form in BARS.values():
        bar = f'<mo form="{form}" stretchy="false" lspace="0" rspace="0">|</mo>'
        html = re.sub(rf"<(m[io])>{mark}</\1>", bar, html)
    return html


class _Formulas(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        def stored(formula: str, display: str) -> str:
            # latex2mathml sets the lines of split, not those of aligned (GitHub's), and no arg.
            text = " ".join(formula.split()).replace("{aligned}", "{split}")
            text = re.sub(r"\\arg\b", r"\\operatorname{arg}", text)
            html = _fenced(convert(_marked(text), display=display))
            if display == "block":
                html = f'<div class="formula">{html}</div>'
            elif len(text) > LONG:
                html = f'<span class="long">{html}</span>'
            return self.md.htmlStash.store(html)

        def directive(match: re.Match[str]) -> str:
            formula = match["first"] + "\n" + dedent(match["rest"])
            return f"\n{match['indent']}{stored(formula, 'block')}\n"

        def displayed(match: re.Match[str]) -> str:
            return f"\n{match['indent']}{stored(match['formula'], 'block')}\n"

        def in_line(match: re.Match[str]) -> str:
            return match["code"] or stored(match["role"] or match["formula"], "inline")

        text = DISPLAYED.sub(displayed, DIRECTIVE.sub(directive, "\n".join(lines)))
        return IN_LINE.sub(in_line, text).split("\n")


class MathExtension(Extension):
    """$...$, $$...$$, :math:`...` and ".. math::" become MathML."""

    def extendMarkdown(self, md: Markdown) -> None:
        # After fenced blocks of code (25), which keep what they hold, before HTML blocks (20).
        md.preprocessors.register(_Formulas(md), "formulas", 24)


def makeExtension(**configuration: Any) -> MathExtension:  # noqa: D103  the name is the library's
    return MathExtension(**configuration)
