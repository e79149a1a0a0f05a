"""Accuracy and log loss of `PrivateClassifier` as it comes; writes its part of the page.

python benchmarks/utility/utility_probabilities.py --sets digits cancer diamonds
"""

import argparse
import math
import pathlib
import sys
import warnings

import numpy as np
import utility_data

from hidden_state_adapters.sklearn import PrivateClassifier

PAGE = pathlib.Path(__file__).parents[2] / "docs/benchmarks/estimators.md"
EPSILONS = (0.1, 0.3, 1.0, 3.0)
HEAD = """\
Written by `benchmarks/utility/utility_probabilities.py`: `PrivateClassifier` of this version (full
batches with momentum, centred where that pays, [one temperature](../sklearn.md#probabilities)
where that pays) on the splits of [the benchmark of accuracy](utility.md), delta = 1e-5,
REPLACE_SPECIAL; {runs}.
Mean and standard error. *Log loss* is in nats, on the test split;
*without temperature* is the same fit with its logits undivided; *frequencies* predicts those of
the classes in training. *In sample*: the recipe or the temperature was looked at on the set.
Nothing was changed after the others were measured.
"""


def log_loss(probabilities, labels):
    return float(-np.mean(np.log(np.maximum(probabilities[np.arange(len(labels)), labels], 1e-15))))


def measure(data, epsilon):
    """Accuracy, log loss, log loss without the temperature, and the temperature."""
    model = PrivateClassifier(epsilon, classes=data.classes).fit(*data.train)
    found = [model.score(*data.test), log_loss(model.predict_proba(data.test[0]), data.test[1])]
    temperature, model.temperature_ = model.temperature_, 1.0
    return [*found, log_loss(model.predict_proba(data.test[0]), data.test[1]), temperature]


def cell(values, factor=1, digits=3):
    mean, error = np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{factor * mean:.{digits}f} ± {factor * error:.{digits}f}"


def table(name, seeds):
    data = utility_data.load(name)
    rows = {"accuracy, %": [], "log loss": [], "log loss without temperature": []}
    for epsilon in EPSILONS:
        runs = np.array([measure(data, epsilon) for _ in range(seeds)]).T
        rows["accuracy, %"].append(cell(runs[0], 100, 1))
        rows["log loss"].append(cell(runs[1]) if (runs[3] != 1).any() else "the same")
        rows["log loss without temperature"].append(cell(runs[2]))
        print(name, epsilon, *(values[-1] for values in rows.values()), flush=True)
    frequencies = np.bincount(data.train[1]) / len(data.train[1])
    sample = "" if name in utility_data.OUT_OF_SAMPLE else " (in sample)"
    lines = [f"\n### {name}{sample}\n\n| | {' | '.join(f'eps {e:g}' for e in EPSILONS)} |\n"]
    lines += ["| --- |" + " --- |" * len(EPSILONS) + "\n"]
    lines += [f"| {title} | {' | '.join(cells)} |\n" for title, cells in rows.items()]
    base = -np.mean(np.log(frequencies[data.test[1]]))
    return "".join(lines) + f"\nLog loss of the frequencies: {base:.3f}.\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=list(utility_data.SETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[10], help="one, or one a set")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds = arguments.seeds * (len(arguments.sets) if len(arguments.seeds) == 1 else 1)
    runs = ", ".join(f"{k} runs on {name}" for name, k in zip(arguments.sets, seeds, strict=True))
    tables = [table(name, k) for name, k in zip(arguments.sets, seeds, strict=True)]
    sys.path.append(str(pathlib.Path(__file__).parents[1]))
    from sections import fill

    text = HEAD.format(runs=runs) + "".join(tables)
    fill(PAGE, "benchmarks/utility/utility_probabilities.py", text)


if __name__ == "__main__":
    main()
