"""Pictures; matplotlib is needed only when one is drawn."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from hidden_state_accountants.figures import text_up

# Okabe and Ito, then Tol: told apart with any colour vision. The markers repeat later.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255",
           "#999933", "#44AA99")  # fmt: skip
_MARKERS = "osD^vPX<>*p"


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
    """Raises ImportError or ValueError where no picture can be written: asked before long work."""
    known = new_figure(1.0, 1.0).canvas.get_supported_filetypes()
    place = pathlib.Path(path)
    if place.suffix.lstrip(".").lower() not in known or not place.parent.is_dir():
        raise ValueError(
            "Expected a path of the plot, in a folder that there is, that ends in .png, .svg or "
            f".pdf, got {str(path)!r}."
        )


def draw_epsilons(
    panels: Mapping[str, Mapping[tuple[str, str], Sequence[tuple[float, float]]]],
    path: str | os.PathLike[str],
    delta: float,
    relation: str,
) -> None:
    """Epsilon against epochs between logarithmic axes, one panel for each run.

    Args:
        panels: The (epochs, epsilon) of lines by name and style of matplotlib, by title. Lines of
            one name have one colour.
        path: File of the picture.
        delta: Delta at which the epsilons hold.
        relation: In words.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(10.5 * columns, 5.0 * rows)
    from matplotlib.ticker import LogFormatter

    axes = figure.subplots(rows, columns, squeeze=False).flat
    names = list(dict.fromkeys(name for lines in panels.values() for name, _ in lines))
    for (heading, lines), axis in zip(panels.items(), axes, strict=False):
        axis.set(
            title=heading,
            xlabel="epochs (the run is cut off there and its iterate released)",
            ylabel=f"epsilon at delta = {delta:g}",
            xscale="log",
            yscale="log",
        )
        axis.grid(True, which="both", alpha=0.25)
        drawn = [
            (name, style, finite)
            for (name, style), points in lines.items()
            if (finite := [(x, y) for x, y in points if 0 < y < math.inf])
        ]
        # The legend in the order of the lines; of lines on top of each other all are seen.
        drawn.sort(key=lambda line: -line[2][-1][1])
        for rank, (name, style, points) in enumerate(drawn):
            index = names.index(name)
            axis.plot(
                *zip(*points, strict=True),
                linestyle=style,
                linewidth=max(1.8, 4.5 - rank),
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5,
                color=_COLORS[index % len(_COLORS)],
                label=f"{name}: {text_up(points[-1][1], 3)} at the end",
            )
        if drawn:
            axis.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter(LogFormatter())
    for axis in axes:
        axis.set_visible(False)  # the panel that is left over
    figure.suptitle(
        f"Epsilon of a training run, by accountant\n(delta = {delta:g}, neighboring relation "
        f"{relation}; lower is better; dashed: NOT PROVEN; dotted: ANOTHER ALGORITHM)"
    )
    figure.savefig(path, dpi=150)
