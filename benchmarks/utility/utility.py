"""Accuracy at equal epsilon: ours without tuning against tuned methods; writes the page.

    python benchmarks/utility/utility.py --size full        # hours; goes on where it stopped
    python benchmarks/utility/utility.py --size reduced     # about a quarter of an hour
    python benchmarks/utility/utility.py --size full --page-only    # of what is there already

The rows of diffprivlib are added by utility_diffprivlib.py, in an environment of their own.

Methods with settings are tuned on a validation split, at no cost in privacy: the same number of
settings for each, one run per setting. The best is trained again with several seeds.
"""

import argparse
import json
import pathlib
import sys
import time

import attrs
import numpy as np
import utility_data
import utility_methods as methods
from utility_page import write_page

ROOT = pathlib.Path(__file__).parents[2]
OURS = ("recommend", "recommend, fixed batches", "recommend, not centred")
EPOCHS = (1, 2, 4, 8, 16, 32, 64)
FIRST_SETS = ("digits", "cancer", "backbone", "mnist5k", "diamonds")


@attrs.frozen
class Size:
    """How much is run.

    Attributes:
        sets: Names of data sets.
        epsilons: Targets.
        seeds: Runs of the chosen setting.
        tries: Runs of every setting that is tuned over; one on sets of more than `large` numbers.
        large: See `tries`.
        lengths: Epochs that are tuned over.
        rates: Times the learning rate of the recipe.
        decays: Number of those that are tuned over by the methods that minimise, 0.1/n to 3.
        cost: Epochs of the table of accuracy against gradients; empty for none.
    """

    sets: tuple[str, ...]
    epsilons: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    seeds: int = 5
    tries: int = 1
    large: float = 5e5
    lengths: tuple[int, ...] = (64,)
    rates: tuple[float, ...] = methods.RATES
    decays: int = 24
    cost: tuple[int, ...] = EPOCHS


SIZES = {
    "full": Size(FIRST_SETS, seeds=10, tries=2, lengths=(16, 64)),
    "reduced": Size(("digits", "cancer")),
    "smoke": Size(
        ("cancer",),
        epsilons=(1.0,),
        seeds=2,
        lengths=(4,),
        rates=(1.0,),
        decays=3,
        cost=(),
    ),
}


def methods_of(data, epsilon, size):
    """Name and settings of every method."""
    descent = (size.lengths, size.rates)
    # Full batches have one split; twice the rates, half a factor apart, make up for it.
    rates = sorted({rate * factor for rate in size.rates for factor in (1.0, 2**0.5)})
    yield OURS[0], methods.estimator(data, epsilon)
    # On the features that the others have, too.
    yield OURS[1], methods.recipe(data, epsilon, "shuffled_once")
    yield OURS[2], methods.estimator(data, epsilon, preprocessing=None)
    yield "hidden, tuned", methods.hidden(data, epsilon, *descent)
    yield "Poisson + PLD", methods.composition(data, epsilon, "poisson", *descent)
    yield "full batch", methods.composition(data, epsilon, "full", size.lengths, rates)
    yield "banded factorisation", methods.fixed_order(data, epsilon, *descent, True)
    yield "fixed order", methods.fixed_order(data, epsilon, *descent, False)
    decays = np.geomspace(0.1 / len(data.train[1]), 3, size.decays)
    yield "objective perturbation", methods.objective_perturbation(data, epsilon, decays)
    yield "output perturbation", methods.output_perturbation(data, epsilon, decays)


def cells(size):
    """Key, settings and tries of every cell of the tables."""
    for name in size.sets:
        try:
            data = utility_data.load(name)
        except ImportError as error:
            tell(f"{name} is left out: {error}")
            continue
        tries = size.tries if data.train[0].size <= size.large else 1
        decays = np.geomspace(1e-7, 1, 15)
        yield (name, "no privacy", 0.0, 0), methods.not_private(data, decays), 1
        for epochs in size.cost:
            for order in ("poisson", "shuffled_once", "cyclic", "full"):
                settings = methods.recipe(data, 1.0, order, epochs)
                yield (name, f"cost, {order}", 1.0, epochs), settings, 1
        for epsilon in size.epsilons:
            for method, settings in methods_of(data, epsilon, size):
                yield (name, method, epsilon, 0), settings, tries


def measure(settings, seeds, tries):
    """Picks a setting on the validation split; its accuracies on the test split."""
    settings = list(settings)
    if not settings:
        return {"setting": "none meets the target", "test": [], "settings": 0, "tries": tries}
    scores = [0.0]
    if len(settings) > 1:
        scores = [sum(setting.run()[0] for _ in range(tries)) for setting in settings]
    best = settings[int(np.argmax(scores))]
    runs = [best.run() for _ in range(seeds)]
    return {
        "setting": best.setting,
        "validation": float(np.mean([run[0] for run in runs])),
        "test": [run[1] for run in runs],
        "settings": len(settings),
        "tries": tries,
    }


def tell(line):
    print(line, file=sys.stderr, flush=True)


def run(size_name, results_path, page_path):
    """Runs what is missing in the file of results, and writes the page."""
    size = SIZES[size_name]
    results = json.loads(results_path.read_text()) if results_path.exists() else {}
    start = time.monotonic()
    for key, settings, tries in cells(size):
        text = "|".join(map(str, key))
        if text in results:
            continue
        results[text] = measure(settings, size.seeds, tries)
        partial = results_path.with_suffix(".part")
        partial.write_text(json.dumps(results, indent=1))
        partial.replace(results_path)
        tests = results[text]["test"]
        mean = f"{100 * np.mean(tests):.1f}" if tests else "-"
        tell(f"{time.monotonic() - start:6.0f} s  {text}: {mean} ({results[text]['setting']})")
    write(size_name, results, page_path)


def write(size_name, results, page_path):
    """The page, and its pictures where there is something to draw."""
    size = SIZES[size_name]
    write_page(page_path, size_name, size, results, OURS)
    if size.cost:
        from utility_plots import draw

        draw(page_path.parent, size, results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "benchmarks/results/utility.md")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    results = arguments.results or ROOT / f"build/utility_{arguments.size}.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    if arguments.page_only:
        write(arguments.size, json.loads(results.read_text()), arguments.page)
    else:
        run(arguments.size, results, arguments.page)


if __name__ == "__main__":
    main()
