"""The rows of diffprivlib, for the file of results of utility.py; in an environment of its own.

    python benchmarks/utility/utility_diffprivlib.py --results build/utility_full.json

With scikit-learn 1.4 and newer diffprivlib (up to 0.6.5) adds its noise to the mean of the losses
as if it were their sum, n times too much, so that its accuracy is that of guessing. This package
needs scikit-learn 1.6. So: scikit-learn 1.3, diffprivlib, and what utility_data.py imports.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
import sklearn
import utility_data
from diffprivlib.models import LogisticRegression

EPSILONS = (0.1, 0.3, 1.0, 3.0)
DECAYS = np.geomspace(1e-4, 3, 24)


def accuracies(data, epsilon, strength):
    model = LogisticRegression(
        epsilon=epsilon, data_norm=1.0, C=strength, fit_intercept=False, max_iter=300
    ).fit(*data.train)
    return [float(model.score(*part)) for part in (data.validation, data.test)]


def measure(data, epsilon, seeds, tries):
    """Picks a strength on the validation split, as for all other methods."""
    strengths = 1 / (DECAYS * len(data.train[1]))
    scores = [sum(accuracies(data, epsilon, c)[0] for _ in range(tries)) for c in strengths]
    best = strengths[int(np.argmax(scores))]
    runs = [accuracies(data, epsilon, best) for _ in range(seeds)]
    return {
        "setting": f"C {best:.3g}",
        "validation": float(np.mean([run[0] for run in runs])),
        "test": [run[1] for run in runs],
        "settings": len(strengths),
        "tries": tries,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--sets", nargs="+", default=list(utility_data.SETS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tries", type=int, default=2)
    arguments = parser.parse_args()
    if tuple(map(int, sklearn.__version__.split(".")[:2])) >= (1, 4):
        parser.error(f"needs scikit-learn below 1.4, got {sklearn.__version__}: see above")
    for name in arguments.sets:
        data = utility_data.load(name)
        for epsilon in EPSILONS:
            results = json.loads(arguments.results.read_text())
            key = f"{name}|diffprivlib|{epsilon}|0"
            if key not in results:
                results[key] = measure(data, epsilon, arguments.seeds, arguments.tries)
                arguments.results.write_text(json.dumps(results, indent=1))
                print(key, 100 * np.mean(results[key]["test"]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
