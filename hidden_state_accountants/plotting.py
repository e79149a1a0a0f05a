"""Pictures; matplotlib is needed only when one is drawn."""

from __future__ import annotations

import functools
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import attrs

# Okabe and Ito, then Tol: told apart with any colour vision. The markers repeat later.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255",
           "#999933", "#44AA99")  # fmt: skip
_MARKERS = "osD^vPX<>*p"


@attrs.frozen
class Series:
    """One line: (x, y) points, its text in the legend, and a style of matplotlib.

    Lines of one name have one colour.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    label: str
    style: str = "-"


@attrs.frozen
class Panel:
    """One set of axes."""

    title: str
    series: tuple[Series, ...]


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure that needs no display.

    Raises:
        ImportError: matplotlib is missing; the text says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "Plots need matplotlib: pip install 'hidden-state-accountants[plot]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def check_path(path: str | os.PathLike[str]) -> None:
    """Whether a picture can be written there: asked before long work.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: The folder does not exist or the ending is not a format.
    """
    known = new_figure(1.0, 1.0).canvas.get_supported_filetypes()
    place = pathlib.Path(path)
    if place.suffix.lstrip(".").lower() not in known:
        raise ValueError(
            f"Expected a plot path that ends in .png, .svg or .pdf, got {str(path)!r}."
        )
    if not place.parent.is_dir():
        raise ValueError(f"Expected a folder for the plot, got {str(place.parent)!r}.")


def draw(
    panels: Sequence[Panel],
    path: str | os.PathLike[str],
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> None:
    """Lines between logarithmic axes, one panel beside or below the other."""
    columns = min(2, len(panels))
    figure = new_figure(10.5 * columns, 5.0 * -(-len(panels) // columns))
    axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, names)
        axis.set_yscale("log")
        axis.set_xscale("log")
        sides = (axis.yaxis, axis.get_ylim()), (axis.xaxis, axis.get_xlim())
        for side, (low, high) in sides:
            side.set_major_formatter(lambda value, _: f"{value:g}")
            digits = "23456789" if high < 4 * low else "235" if high < 20 * low else ""
            side.set_minor_formatter(functools.partial(_minor_label, digits))
        axis.set_title(panel.title, fontsize=11)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.grid(True, which="both", alpha=0.25)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _draw_panel(axis: Any, panel: Panel, names: Sequence[str]) -> None:
    drawn = [
        attrs.evolve(series, points=tuple(p for p in series.points if 0 < p[1] < math.inf))
        for series in panel.series
    ]
    # The legend in the order of the lines; of lines on top of each other all are seen.
    drawn = sorted((s for s in drawn if s.points), key=lambda series: -series.points[-1][1])
    for rank, series in enumerate(drawn):
        axis.plot(
            *zip(*series.points, strict=True),
            linestyle=series.style,
            linewidth=max(1.8, 4.5 - rank),
            marker=_MARKERS[names.index(series.name) % len(_MARKERS)],
            markersize=5,
            color=_COLORS[names.index(series.name) % len(_COLORS)],
            label=series.label,
        )
    if drawn:
        axis.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5), labelspacing=0.8)


def _minor_label(digits: str, value: float, _: object) -> str:
    return f"{value:g}" if f"{value:e}"[0] in digits else ""
