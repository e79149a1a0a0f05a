"""The page that the benchmark writes."""

import math

import numpy as np

TUNED = (
    "hidden, tuned",
    "Poisson + PLD",
    "full batch",
    "banded factorisation",
    "objective perturbation",
    "output perturbation",
    "diffprivlib",
)
PEERS = TUNED[1:]


def _mean_and_error(tests):
    if not tests:
        return math.nan, math.nan
    error = np.std(tests, ddof=1) / math.sqrt(len(tests)) if len(tests) > 1 else 0.0
    return 100 * float(np.mean(tests)), 100 * float(error)


def _cell(result):
    if result is None or not result["test"]:
        return "-"
    mean, error = _mean_and_error(result["test"])
    return f"{mean:.1f} ± {error:.1f}"


def _row(cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def _verdict(ours, peer):
    (a, s), (b, t) = _mean_and_error(ours["test"]), _mean_and_error(peer["test"])
    margin = 2 * math.hypot(s, t)
    word = "won" if a - b > margin else "lost" if b - a > margin else "level"
    return word, f"{word} ({a - b:+.1f})"


def write_page(path, size_name, size, results, ours):
    """Tables of accuracy, of cells won and lost, and of accuracy against gradients."""

    def get(*key):
        return results.get("|".join(map(str, key)))

    sets = [name for name in size.sets if get(name, "no privacy", 0.0, 0)]
    lines = [
        "# Accuracy at equal epsilon",
        "",
        "Written by `benchmarks/utility/utility.py` (`make utility`), at the size "
        f"**{size_name}**: {', '.join(sets)}; {size.seeds} seeds; methods tuned at epochs "
        f"{', '.join(map(str, size.lengths))}. In every row one record is replaced by one without "
        "gradient (REPLACE_SPECIAL), delta = 1e-5. Features of norm 1 per record, no bias, "
        "prepared with public constants. Test accuracy in percent, mean and standard error over "
        "seeds; the error of the test sample (1 to 4 points, the same for all rows) comes on top.",
        "",
        "**What is compared.** *recommend* is `PrivateClassifier` as it comes, but without an "
        'intercept: nothing is tuned. *Fixed batches* is the same with `batch_order="shuffled_once"'
        "`: the last iterate only. All others are tuned on a validation split **at no cost in "
        "privacy**, which flatters them: up to 24 settings per number of epochs, one run for each, "
        "learning rates around ours. diffprivlib has delta = 0. The constants of the recipe were "
        "fitted on digits, cancer and mnist5k among others (docs/recommend.md): these are in "
        "sample.",
        "",
    ]
    head = [f"eps {epsilon:g}" for epsilon in size.epsilons]
    counts = {name: {"won": 0, "level": 0, "lost": 0} for name in ours}
    for name in sets:
        lines += [f"## {name}", "", _row(["method", *head]), _row(["---"] * (len(head) + 1))]
        for method in (*ours, *TUNED):
            found = [get(name, method, epsilon, 0) for epsilon in size.epsilons]
            if any(found):
                lines.append(_row([method, *map(_cell, found)]))
        for own in ours:
            verdicts = []
            for epsilon in size.epsilons:
                peers = [get(name, peer, epsilon, 0) for peer in PEERS]
                peers = [peer for peer in peers if peer and peer["test"]]
                best = max(peers, key=lambda peer: peer["validation"])
                word, text = _verdict(get(name, own, epsilon, 0), best)
                counts[own][word] += 1
                verdicts.append(text)
            lines.append(_row([f"*{own} against the best peer*", *verdicts]))
        lines += ["", f"Without privacy: {_cell(get(name, 'no privacy', 0.0, 0))}.", ""]
    lines += [
        "The best peer is the one with the best validation accuracy. Won and lost: by more than "
        "two standard errors of the difference. "
        + " ".join(
            f"*{own}*: {c['won']} won, {c['level']} level, {c['lost']} lost."
            for own, c in counts.items()
        ),
        "",
    ]
    if size.cost:
        lines += [
            "## Accuracy against gradient evaluations",
            "",
            "At epsilon 1, without tuning, by epochs (gradients per record):",
            "",
            _row(["data, order", *size.cost]),
            _row(["---"] * (len(size.cost) + 1)),
        ]
        for name in sets:
            for order in ("poisson", "shuffled_once", "cyclic", "full"):
                found = [get(name, f"cost, {order}", 1.0, epochs) for epochs in size.cost]
                lines.append(_row([f"{name}, {order}", *map(_cell, found)]))
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")
