"""The pictures of the page."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from utility_page import ORDERS, Results, has_costs, mean_and_error

LINES = {  # method: colour and style
    "recommend": ("tab:blue", "-"),
    "recommend, fixed batches": ("tab:cyan", "-"),
    "recommend, not centred": ("tab:purple", "-"),
    "Poisson + PLD": ("tab:orange", "--"),
    "full batch": ("tab:green", "--"),
    "banded factorisation": ("tab:red", "--"),
    "objective perturbation": ("tab:gray", ":"),
    "diffprivlib": ("black", ":"),
}


def _panels(sets):
    figure, axes = plt.subplots(1, len(sets), figsize=(3.1 * len(sets), 3.3), squeeze=False)
    return figure, dict(zip(sets, axes[0], strict=True))


def _draw(axis, points, **style):
    points = [(x, *mean_and_error(result)) for x, result in points if result]
    if points:
        xs, means, errors = zip(*points, strict=True)
        axis.errorbar(xs, means, [2 * e for e in errors], lw=1.2, capsize=2, ms=3, **style)


def _finish(figure, axes, path, label, ticks):
    for name, axis in axes.items():
        axis.set_title(name, fontsize=10)
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
        axis.minorticks_off()
        axis.tick_params(axis="y", labelsize=8)
        axis.set_xlabel(label, fontsize=9)
        axis.grid(alpha=0.3)
    first, *_ = axes.values()
    first.set_ylabel("test accuracy, %", fontsize=9)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=8, loc="lower center", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(folder, size, cells):
    """Accuracy against epsilon, and against gradient evaluations; two standard errors."""
    results = Results(cells)
    sets = [name for name in size.sets if results.get(name, "no privacy", 0.0, 0)]
    figure, axes = _panels(sets)
    for name, axis in axes.items():
        for method, (colour, line) in LINES.items():
            points = [(e, results.get(name, method, e, 0)) for e in size.epsilons]
            _draw(axis, points, color=colour, ls=line, marker="o", label=method)
    _finish(figure, axes, folder / "utility_accuracy.png", "epsilon", size.epsilons)
    figure, axes = _panels([name for name in sets if has_costs(results, name)] or sets)
    for name, axis in axes.items():
        for colour, order in enumerate(ORDERS):  # the same one where an order is missing
            points = [(e, results.get(name, f"cost, {order}", 1.0, e)) for e in size.cost]
            _draw(axis, points, color=f"C{colour}", marker="o", label=order)
    _finish(figure, axes, folder / "utility_gradients.png", "epochs", size.cost)
