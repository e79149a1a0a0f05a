"""Refuses docstrings that no native reader would write: make lint.

An entry of Args begins with a noun, a docstring with a verb or with the noun that is returned.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("hidden_state_accountants", "adapters")
OPENING = re.compile(r"(What|Of|Whether|As|How|Where|Which|Whose|Whoever)\b")
FRAGMENT = re.compile(
    r"^\s{4,}\*{0,2}\w+: (?:Of|As|That|Those|Its|Likewise|Whose|See above|How|Whether)\b", re.M
)


def complaints(source: str) -> list[tuple[int, str]]:
    """Lines of a module whose docstrings begin with a fragment, and what stands there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            texts = [text.split("\n")[0]] if OPENING.match(text) else []
            texts += [entry[0].strip() for entry in FRAGMENT.finditer(text)]
            found += [(getattr(node, "lineno", 1), text) for text in texts]
    return found


def main() -> None:
    """Prints a line for each, and exits with 1 where there are any."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    lines = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in paths
        for line, text in complaints(path.read_text("utf-8"))
    ]
    print("\n".join(lines))
    sys.exit(bool(lines) and f"{len(lines)} docstrings begin with a fragment.")


if __name__ == "__main__":
    main()
