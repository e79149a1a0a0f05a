"""What the scripts of all papers share: curves, a picture, a page."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hidden_state_accountants.comparing import new_figure

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "results"
TITLES = {
    "chen_liu_2025": "Chen & Liu 2025",
    "chien_li_2024": "Chien & Li 2024",
    "chourasia_2021": "Chourasia, Ye, Shokri 2021",
    "dice_sgd_2024": "Zhang, Bu, Wu, Hong 2024",
    "kong_ribero_2025": "Kong & Ribero 2025",
}
# Okabe and Ito: told apart with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7f7f7f")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), "-")

Curves = Mapping[str, Sequence[float]]


def per_alpha(bound, event, relation, order: float = 2.0) -> float:
    """D_alpha/alpha as a bound gives it; NaN where it does not cover the run."""
    if bound.check(event, relation):
        return float("nan")
    return float(bound.guarantee(event, relation).rdp([order])[0]) / order


def draw(path: pathlib.Path, panels: Sequence[tuple[str, str, str, Sequence[float], Curves]],
         *, log_x: bool = False, log_y: bool = False) -> None:  # fmt: skip
    """One panel per (title, label of x, label of y, x, curves); a line per curve."""
    figure = new_figure(6.2 * len(panels), 4.4)
    for axis, (title, x_label, y_label, x, curves) in zip(
        np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True
    ):
        for index, (name, values) in enumerate(curves.items()):
            axis.plot(
                x,
                values,
                color=COLORS[index % len(COLORS)],
                linestyle=STYLES[index % len(STYLES)],
                linewidth=max(1.4, 3.2 - 0.3 * index),  # of lines on top of each other all are seen
                label=name,
            )
        if log_x:
            axis.set_xscale("log")
        if log_y:
            axis.set_yscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7.5)
    figure.savefig(path, dpi=110)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table; numbers with five digits, to be compared with a paper's."""
    lines = [header, ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def at(x: Sequence[float], curves: Curves, points: Sequence[float]) -> list[list[object]]:
    """A row per curve with its values at some of the x."""
    index = [list(x).index(point) for point in points]
    return [[name, *(values[i] for i in index)] for name, values in curves.items()]


def write(folder: pathlib.Path, name: str, text: str) -> None:
    """The page of a script."""
    title = f"# {TITLES[name]}: figures, recomputed\n\n"
    by = f"Written by `make papers` (`benchmarks/papers/{name}.py`); do not edit.\n"
    (folder / f"{name}.md").write_text(title + by + text, "utf-8")


def run(main: Callable[..., None], description: str) -> None:
    """The command line of a script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER)
    parser.add_argument("--small", action="store_true", help="a few seconds, to see that it runs")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    main(arguments.folder, small=arguments.small)


def _cell(cell: object) -> str:
    if isinstance(cell, int | float | np.floating) and not isinstance(cell, bool):
        return "" if np.isnan(cell) else f"{cell:.5g}"
    return str(cell)
