"""Pictures; matplotlib is needed only when one is drawn."""

from __future__ import annotations

import functools
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import attrs

from hidden_state_accountants.figures import text_up

# Okabe and Ito, then Tol: told apart with any colour vision. The markers repeat later.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255",
           "#999933", "#44AA99")  # fmt: skip
_MARKERS = "osD^vPX<>*p"


@attrs.frozen
class Series:
    """One line: (x, y) points and what kind of claim they are."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_proven: bool = True
    is_other_algorithm: bool = False


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


def plot_comparison(
    panels: Sequence[Panel], path: str | os.PathLike[str], *, delta: float, relation: str
) -> None:
    """Epsilon against epochs, one panel beside or below the other; both axes logarithmic."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(10.5 * columns, 5.0 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, delta, names)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(
        "Epsilon of a training run, by accountant\n"
        f"(delta = {delta:g}, neighboring relation {relation}; lower is better)"
    )
    figure.savefig(path, dpi=150)


def _draw_panel(axis: Any, panel: Panel, delta: float, names: Sequence[str]) -> None:
    drawn = [
        attrs.evolve(series, points=tuple(p for p in series.points if 0 < p[1] < math.inf))
        for series in panel.series
    ]
    drawn = [series for series in drawn if series.points]
    drawn.sort(key=lambda series: -series.points[-1][1])  # the legend in the order of the lines
    for rank, series in enumerate(drawn):
        index = names.index(series.name)
        style = ":" if series.is_other_algorithm else "-" if series.is_proven else "--"
        axis.plot(
            [x for x, _ in series.points],
            [y for _, y in series.points],
            linestyle=style,
            linewidth=max(1.8, 4.5 - rank),  # of lines on top of each other all are seen
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            color="#7f7f7f" if series.is_other_algorithm else _COLORS[index % len(_COLORS)],
            label=_label(series),
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    for side, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        side.set_major_formatter(lambda value, _: f"{value:g}")
        digits = "23456789" if high < 4 * low else "235" if high < 20 * low else ""
        side.set_minor_formatter(functools.partial(_minor_label, digits))
    axis.set_title(panel.title, fontsize=11)
    axis.set_xlabel("epochs (the run is cut off there and its iterate released)")
    axis.set_ylabel(f"epsilon at delta = {delta:g}")
    axis.grid(True, which="both", alpha=0.25)
    if drawn:
        axis.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5), labelspacing=0.8)


def _minor_label(digits: str, value: float, _: object) -> str:
    return f"{value:g}" if f"{value:e}"[0] in digits else ""


def _label(series: Series) -> str:
    label = f"{series.name}: {text_up(series.points[-1][1], 3)} at the end"
    if series.is_other_algorithm:
        return f"ANOTHER ALGORITHM:\n{label}"
    return label if series.is_proven else f"NOT PROVEN:\n{label}"


def plot_audit(
    claimed: Series, found: Sequence[Series], path: str | os.PathLike[str], *, verdict: str
) -> None:
    """Delta over epsilon, logarithmic: what is claimed, and what it must be at least.

    Only the points were computed; the thin lines between them lead the eye.
    """
    figure = new_figure(8.0, 5.2)
    axis = figure.subplots()
    for rank, series in enumerate((claimed, *found)):
        points = [(x, y) for x, y in series.points if 0 < y < 1]  # 1 claims nothing
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            linestyle=":",
            linewidth=1.0,
            marker="osD^vPX"[rank % 7],
            markersize=9 if rank == 0 else 7,
            color="#000000" if rank == 0 else _COLORS[(rank - 1) % (len(_COLORS) - 1)],
            label=series.name,
        )
    axis.set_yscale("log")
    axis.set_ylim(bottom=1e-12, top=2.0)
    axis.set_title(f"A claim is false where a lower bound is above it\n{verdict}", fontsize=11)
    axis.set_xlabel("epsilon")
    axis.set_ylabel("delta")
    axis.grid(True, which="both", alpha=0.25)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
