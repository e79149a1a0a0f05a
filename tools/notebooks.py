"""Runs the notebooks of docs/tutorials and keeps what they print.

    python tools/notebooks.py [FILE ...]

The environment of the tests has no Jupyter; a cell is Python here: no magics.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"


def _run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell in the notebook format: text, the value of the last line, pictures."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    figures = pyplot.get_fignums()
    for number in figures:
        image = io.BytesIO()
        pyplot.figure(number).savefig(image, format="png", dpi=80, bbox_inches="tight")
        data = {"image/png": base64.b64encode(image.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        pyplot.close(number)
    # The value of a last line that draws is the library's, and of no interest.
    if value is not None and not figures:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append(
            {"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": None}
        )
    return outputs


def run(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs the cells in order and yields each after its outputs were written into it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["outputs"] = _run_cell("".join(cell["source"]), names)
        cell["execution_count"] = number
        yield cell


def main(paths: list[Path]) -> None:
    """Runs the notebooks and writes them back."""
    for path in paths:
        notebook = json.loads(path.read_text("utf-8"))
        for cell in run(notebook):
            print(f"{path.name}: cell {cell['execution_count']}", file=sys.stderr)
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")))
