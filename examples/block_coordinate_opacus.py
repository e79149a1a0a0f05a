"""Block coordinate descent on handwritten digits: one block with a lasso, and two blocks.

A linear classifier is one block: the prox of the elastic net contracts, and the released model
costs less than its iterates. The same classifier as a product of two matrices is two blocks: each
block's gradient shows the other, and the sum of all updates is what is proven.

    python examples/block_coordinate_opacus.py [--epochs 20] [--noise-multiplier 4] [--l1 0.002] ...
"""

import argparse
import logging
import warnings

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.opacus import BlockCoordinate, HiddenStatePrivacyEngine

TRAIN_RECORDS, CLASSES, RANK = 1500, 10, 12


def load_data():
    """scikit-learn's digits, each record scaled to norm 1 by itself."""
    images, labels = load_digits(return_X_y=True)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    split = train_test_split(
        images, labels, train_size=TRAIN_RECORDS, random_state=0, stratify=labels
    )
    features, test_features, targets, test_targets = map(torch.from_numpy, split)
    return TensorDataset(features, targets), (test_features, test_targets)


def train(model, data, options, l1=0.0, **declared):
    """Every layer is a block; fixed batches in a fixed order."""
    engine = HiddenStatePrivacyEngine()
    criterion = nn.CrossEntropyLoss()
    groups = [{"params": [p]} for p in model.parameters()]
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(groups, lr=options.learning_rate),
        data_loader=DataLoader(data, batch_size=options.batch_size),
        noise_multiplier=options.noise_multiplier,
        batch_order="cyclic",
        mechanism=BlockCoordinate(l1=l1, l2=options.l2),
        criterion=criterion,
        **declared,
    )
    for _ in range(options.epochs):
        for features, targets in loader:

            def closure(features=features, targets=targets):
                optimizer.zero_grad()
                criterion(model(features), targets).backward()

            optimizer.step(closure)
    return engine


@torch.no_grad()
def accuracy(model, test):
    features, targets = test
    return float((model(features).argmax(dim=1) == targets).float().mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise-multiplier", type=float, default=4.0)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    parser.add_argument("--l1", type=float, default=0.002)
    parser.add_argument("--l2", type=float, default=0.005)
    parser.add_argument("--batch-size", type=int, default=250, help="must divide 1500")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--delta", type=float, default=1e-5)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    for message in ("Secure RNG turned off", "Full backward hook"):
        warnings.filterwarnings("ignore", message=message)
    torch.manual_seed(0)  # repeats the initial models; the noise has a generator of its own
    data, test = load_data()

    linear = nn.Linear(data.tensors[0].shape[1], CLASSES, bias=False)
    nn.init.zeros_(linear.weight)
    # Features of norm 1: gradients are at most sqrt(2) long, and the clip never acts.
    one = train(
        linear, data, options, max_grad_norm="auto", l1=options.l1, feature_norm=1.0,
    )  # fmt: skip
    zeros = float((linear.weight == 0).float().mean())
    print(
        f"one block: epsilon {fixed_up(one.get_epsilon(options.delta), 2)}; test accuracy "
        f"{accuracy(linear, test):.3f}, {zeros:.0%} of the weights are 0"
    )

    product = nn.Sequential(
        nn.Linear(data.tensors[0].shape[1], RANK, bias=False), nn.Linear(RANK, CLASSES, bias=False)
    )
    # An engine of its own, to compare the two. Whoever releases both models uses one for both.
    two = train(product, data, options, max_grad_norm=1.0)
    print(
        f"two blocks: epsilon {fixed_up(two.get_epsilon(options.delta), 2)}, composition of all "
        "updates; "
        f"test accuracy {accuracy(product, test):.3f}"
    )
    print()
    print(one.report(options.delta))


if __name__ == "__main__":
    main()
