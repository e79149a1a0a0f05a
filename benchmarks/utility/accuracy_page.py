"""The page of accuracy.py, and its chart."""

import math

import matplotlib
import numpy as np
from accuracy import EPSILONS, FREQUENCIES, NONE, OURS, PEERS
from accuracy_data import SETS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INTRODUCTION = """\
# Accuracy of the estimators: every cell

Written by `make utility` (`benchmarks/utility/accuracy.py`): test accuracy in per cent, or R2 in
hundredths (a constant has 0), mean and standard error of {seeds} splits, two thirds for training;
delta = 1e-5, REPLACE_SPECIAL. AUC is the mean of each class against the rest, log loss in nats;
*frequencies* are those of the classes in training. Methods and sets:
[accuracy](../../docs/benchmarks/accuracy.md).

![At epsilon 1, against the same model without privacy](accuracy.png)
"""


def mean_and_error(found, column=0):
    values = 100 * np.array(found)[:, column]
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def cell(found, column=0, digits=1):
    if not found:
        return "-"
    if column == 2:
        return f"{np.mean(found, axis=0)[2]:.3f}"
    if column == 1:
        return f"{100 * np.mean(found, axis=0)[1]:.1f}"
    mean, error = mean_and_error(found)
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if mean > -100 else "below -100"


def table(results, name):
    about = results[name]
    shape, classes = about["shape"], about["classes"]
    kind = f"{classes} classes" if classes else "R2"
    title = f"{name} ({'named' if about['named'] else 'other'}; {shape[0]:,} x {shape[1]}, {kind})"
    heads = [f"eps {e:g}" for e in EPSILONS] + (["AUC at 1", "log loss at 1"] if classes else [])
    lines = [f"### {title}", "", f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for method in (*OURS, *PEERS):
        found = [results.get(f"{name}|{method}|{e:g}") for e in EPSILONS]
        if any(found):
            cells = [cell(f) for f in found]
            cells += [cell(found[2], column) for column in (1, 2)] if classes else []
            lines.append(f"| {method} | {' | '.join(cells)} |")
    best = results[f"{name}|{NONE}|0"]
    lines += ["", f"Without privacy: {mean_and_error(best)[0]:.1f}"]
    if classes:
        base = results[f"{name}|{FREQUENCIES}|0"]
        lines[-1] += f", log loss {cell(best, 2)}; of the frequencies: {cell(base, 2)}"
    lines[-1] += "."
    return [*lines, ""]


def comparisons(results, sets, method, others):
    """(set, epsilon, points ahead of the best of the others, its error, its name)."""
    for name in sets:
        for epsilon in EPSILONS:
            mine = results.get(f"{name}|{method}|{epsilon:g}")
            found = [(o, results.get(f"{name}|{o}|{epsilon:g}")) for o in others]
            found = [(o, *mean_and_error(f)) for o, f in found if f]
            if mine and found:
                best, other, error = max(found, key=lambda f: f[1])
                own, own_error = mean_and_error(mine)
                yield name, epsilon, own - other, math.hypot(error, own_error), best


def summary(results, sets):
    lines = ["## Won and lost", ""]
    for named in (True, False):
        chosen = [s for s in sets if results[s]["named"] == named]
        cells = list(comparisons(results, chosen, OURS[0], PEERS))
        won = sum(points > 2 * error for _, _, points, error, _ in cells)
        lost = [c for c in cells if c[2] < -2 * c[3]]
        where = "; ".join(f"{n} at {e:g} ({p:+.1f}, {o})" for n, e, p, _, o in lost)
        level, kind = len(cells) - won - len(lost), "named" if named else "other"
        lines.append(
            f"* *As it comes* against the best peer of each cell, {kind} sets: {won} won, "
            f"{level} level, {len(lost)} lost{': ' + where if lost else ''}."
        )
    for method in OURS[1:]:
        gains = list(comparisons(results, sets, method, OURS[:1]))
        for epsilon in EPSILONS:
            points = sorted((p, n) for n, e, p, _, _ in gains if e == epsilon)
            lines.append(
                f"* *{method.capitalize()}* against *as it comes* at {epsilon:g}: from "
                f"{points[0][0]:+.1f} ({points[0][1]}) to {points[-1][0]:+.1f} "
                f"({points[-1][1]}), mean {np.mean([p for p, _ in points]):+.1f}."
            )
    above = [
        f"{name} at {epsilon:g}"
        for name in sets
        if results[name]["classes"]
        for epsilon in EPSILONS
        if np.mean(results[f"{name}|{OURS[0]}|{epsilon:g}"], axis=0)[2]
        > np.mean(results[f"{name}|{FREQUENCIES}|0"], axis=0)[2]
    ]
    lines.append(f"* Log loss above that of the frequencies: {', '.join(above) or 'nowhere'}.")
    return [*lines, "", "Won and lost: by more than two standard errors of the difference.", ""]


MARKS = dict(zip((*OURS, *PEERS), "oP^*Dsxv", strict=True))
COLOURS = dict(zip((*OURS, *PEERS), ("C0", "C0", "C0", "C0", "C1", "C3", "0.5", "C2"), strict=True))
_FARTHEST = -20


def draw(results, sets, path):
    """At epsilon 1: a line for every set, points against the same without privacy."""
    kinds = [
        [s for s in sets if bool(results[s]["classes"]) == classes] for classes in (True, False)
    ]
    heights = [len(kind) + 1 for kind in kinds]
    figure, axes = plt.subplots(
        2, 1, figsize=(8.5, 0.36 * sum(heights) + 1.2), height_ratios=heights, layout="constrained"
    )
    for axis, kind, label in zip(axes, kinds, ("accuracy, points", "R2, hundredths"), strict=True):
        for row, name in enumerate(kind):
            base = mean_and_error(results[f"{name}|{NONE}|0"])[0]
            for method, mark in MARKS.items():
                found = results.get(f"{name}|{method}|1")
                if found:
                    x = max(mean_and_error(found)[0] - base, _FARTHEST)
                    style = {"color": COLOURS[method], "ms": 11 if mark == "*" else 7}
                    axis.plot(x, row, mark, **style, alpha=0.85, clip_on=False)
        named = [" (named)" if results[s]["named"] else "" for s in kind]
        axis.set_yticks(range(len(kind)), [s + n for s, n in zip(kind, named, strict=True)])
        axis.set_ylim(len(kind) - 0.5, -0.5)
        axis.set_xlim(_FARTHEST, None)
        axis.axvline(0, color="0.6", lw=1)
        axis.grid(axis="both", alpha=0.25)
        axis.set_xlabel(f"{label}, less that without privacy; at the edge: farther left")
    handles = [
        plt.Line2D([], [], ls="", marker=mark, color=COLOURS[method], label=method)
        for method, mark in MARKS.items()
    ]
    figure.legend(handles=handles, ncols=4, loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(results, path):
    names = [key for key, value in results.items() if isinstance(value, dict)]
    sets = [name for name in names if f"{name}|{NONE}|0" in results]
    sets.sort(key=[*SETS, *names].index)
    seeds = max(len(found) for found in results.values() if isinstance(found, list))
    lines = [INTRODUCTION.format(seeds=seeds).rstrip(), "", *summary(results, sets)]
    for title, classes in (("Classes", True), ("Numbers", False)):
        lines += [f"## {title}", ""]
        for name in sets:
            if bool(results[name]["classes"]) == classes:
                lines += table(results, name)
    path.write_text("\n".join(lines), encoding="utf-8")
    draw(results, sets, path.with_suffix(".png"))
