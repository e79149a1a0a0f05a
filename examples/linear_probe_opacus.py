"""A private softmax classifier of handwritten digits: every iterate counted, or the last one.

All runs have the same epsilon, records, optimizer and number of epochs. Who pays for every iterate
needs more noise than who pays for the model that is released. With Poisson batches the difference
is small. With an ordinary shuffled loader it decides whether the model is of any use.

    python examples/linear_probe_opacus.py [--epsilon 1] [--epochs 20] ...
"""

import argparse
import logging
import warnings

import numpy as np
import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

TRAIN_RECORDS = 1500
CLASSES = 10
# The gradient of softmax cross-entropy is at most sqrt(2) long for features of norm 1. A clip norm
# just above never acts, and a clip that never acts costs no contraction. (Opacus shrinks gradients
# from clip_norm - 1e-6 on, so sqrt(2) itself would act.)
CLIP_NORM = 1.4143


def load_data():
    """scikit-learn's digits, each record centred and scaled to norm 1 by itself."""
    images, labels = load_digits(return_X_y=True)
    images = images - images.mean(axis=1, keepdims=True)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    split = train_test_split(
        images, labels, train_size=TRAIN_RECORDS, random_state=0, stratify=labels
    )
    features, test_features, targets, test_targets = map(torch.from_numpy, split)
    return TensorDataset(features, targets), (test_features, test_targets)


def make_training(data, options):
    """A model that starts at zero, plain SGD with decoupled decay, fixed batches."""
    model = nn.Linear(data.tensors[0].shape[1], CLASSES, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
    )
    loader = DataLoader(data, batch_size=options.batch_size)
    return model, optimizer, loader


def train(model, optimizer, loader, criterion, epochs):
    for _ in range(epochs):
        for features, targets in loader:
            optimizer.zero_grad()
            criterion(model(features), targets).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, test):
    features, targets = test
    return float((model(features).argmax(dim=1) == targets).float().mean())


def print_table(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for index, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")
        if index == 0:
            print("|-" + "-|-".join("-" * width for width in widths) + "-|")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--weight-decay", type=float, default=0.005)
    parser.add_argument("--batch-size", type=int, default=150, help="must divide 1500")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    logging.basicConfig(format="  %(message)s")
    # Known and harmless here: Opacus' hint at secure_mode, its backward hook on a first layer, and
    # the RDP accountant that its PRV accountant starts from.
    for message in ("Secure RNG turned off", "Full backward hook", "Optimal order is the largest"):
        warnings.filterwarnings("ignore", message=message)

    data, test = load_data()
    criterion = nn.CrossEntropyLoss()
    known = {"criterion": criterion, "feature_norm": 1.0}
    reports = []

    def trained(name, engine, **arguments):
        """Trains to the target, and returns a row of the table."""
        model, optimizer, loader = make_training(data, options)
        if engine is not None:
            arguments = {
                "target_epsilon": options.epsilon,
                "target_delta": options.delta,
                "epochs": options.epochs,
                "max_grad_norm": CLIP_NORM,
                **arguments,
            }
            wrapped, optimizer, loader = engine.make_private_with_epsilon(
                module=model, optimizer=optimizer, data_loader=loader, **arguments
            )
        print(f"  {name}: {options.epochs} epochs", flush=True)
        train(model if engine is None else wrapped, optimizer, loader, criterion, options.epochs)
        epsilon = "inf" if engine is None else fixed_up(engine.get_epsilon(options.delta), 3)
        if isinstance(engine, HiddenStatePrivacyEngine):
            reports.append(engine.report(options.delta))
        noise = "0" if engine is None else f"{optimizer.noise_multiplier:.2f}"
        return (name, epsilon, noise, f"{accuracy(model, test):.3f}")

    print(f"Training on {len(data)} digits, testing on {len(test[1])}")
    ours, shuffled = HiddenStatePrivacyEngine, {"batch_order": "shuffled_once"}
    rows = [
        ("run", "epsilon", "noise multiplier", "test accuracy"),
        trained("shuffled batches, every iterate counts", ours(), **shuffled),
        trained("shuffled batches, the last iterate counts", ours(), **shuffled, **known),
        trained("Poisson batches, every iterate counts (stock Opacus)", PrivacyEngine()),
        trained("Poisson batches, the last iterate counts", ours(), **known),
        trained("without privacy", None),
    ]
    print()
    print_table(rows)
    print(f"\n{reports[1]}")


if __name__ == "__main__":
    main()
