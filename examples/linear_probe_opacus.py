"""A private softmax classifier on handwritten digits, trained by Opacus.

Trains on Opacus' own Poisson batches and on fixed batches in a fixed order, and prints for each run
the epsilon of the released model (the last iterate) beside the one that pays for every iterate.

    python examples/linear_probe_opacus.py [--epochs 200] [--noise-multiplier 6.0] ...
"""

import argparse
import logging
import math
import warnings
from types import SimpleNamespace

import numpy as np
import torch
from dp_accounting import NeighboringRelation
from opacus.accountants import create_accountant
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
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


def train(model, optimizer, loader, criterion, epochs, name):
    for epoch in range(1, epochs + 1):
        for features, targets in loader:
            optimizer.zero_grad()
            criterion(model(features), targets).backward()
            optimizer.step()
        if epoch % 50 == 0 or epoch == epochs:
            print(f"  {name}: epoch {epoch} of {epochs}", flush=True)


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


def train_privately(data, criterion, options, batch_order):
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = make_training(data, options)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=CLIP_NORM,
        batch_order=batch_order,
        criterion=criterion,
        feature_norm=1.0,
    )
    train(model, optimizer, loader, criterion, options.epochs, f"private, {batch_order}")
    return SimpleNamespace(engine=engine, model=model)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise-multiplier", type=float, default=6.0)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--weight-decay", type=float, default=0.005)
    parser.add_argument("--batch-size", type=int, default=150, help="must divide 1500")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--delta", type=float, default=1e-5)
    options = parser.parse_args()
    logging.basicConfig(format="  %(message)s")
    # Known and harmless here: Opacus' hint at secure_mode, its backward hook on a first layer, and
    # the RDP accountant that its PRV accountant starts from.
    for message in ("Secure RNG turned off", "Full backward hook", "Optimal order is the largest"):
        warnings.filterwarnings("ignore", message=message)

    data, test = load_data()
    criterion = nn.CrossEntropyLoss()

    print(f"Training on {len(data)} digits, testing on {len(test[1])}")
    model, optimizer, loader = make_training(data, options)
    train(model, optimizer, loader, criterion, options.epochs, "without privacy")
    public_accuracy = accuracy(model, test)

    poisson = train_privately(data, criterion, options, "poisson")
    cyclic = train_privately(data, criterion, options, "cyclic")

    event, delta = cyclic.engine.privacy_event, options.delta
    prv = create_accountant("prv")
    prv.history = [(options.noise_multiplier, options.batch_size / len(data), event.num_steps)]
    # The composed event has the relation folded into its noise: read it under add-or-remove.
    composed = hsa.LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE).compose(
        event.as_composition(NeighboringRelation.REPLACE_SPECIAL)
    )

    def row(batches, stock, epsilon, run):
        figures = (fixed_up(epsilon, 2), fixed_up(run.engine.get_epsilon(delta), 2))
        return (batches, stock, *figures, f"{accuracy(run.model, test):.3f}")

    print()
    print_table(
        [
            (f"epsilon at delta {delta:g}", "stock accountant", "every iterate", "the model (ours)",
             "test accuracy"),
            row("Poisson batches", "Opacus PRV", prv.get_epsilon(delta), poisson),
            row("fixed batches in a fixed order", "exact composition",
                composed.get_epsilon(delta), cyclic),
            ("without privacy", "-", f"{math.inf}", f"{math.inf}", f"{public_accuracy:.3f}"),
        ]
    )  # fmt: skip
    for run in (poisson, cyclic):
        print()
        print(run.engine.report(delta))


if __name__ == "__main__":
    main()
