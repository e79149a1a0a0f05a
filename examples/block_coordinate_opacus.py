"""Block coordinate descent on handwritten digits: one block with a lasso, and two blocks.

A linear classifier is one block: the prox of the elastic net contracts, and the released model
costs less than its iterates. The same classifier as a product of two matrices is two blocks: each
block's gradient shows the other, and the sum of all updates is what is proven.

    python examples/block_coordinate_opacus.py [--epochs 20] [--noise-multiplier 4] [--l1 0.002] ...
"""

import argparse
import warnings

import attrs
import numpy as np
import torch
from dp_accounting import NeighboringRelation
from opacus import GradSampleModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import BlockCoordinateOptimizer

TRAIN_RECORDS, CLASSES, RANK = 1500, 10, 12
RELATION = NeighboringRelation.REPLACE_SPECIAL


def load_data():
    """scikit-learn's digits, each record scaled to norm 1 by itself."""
    images, labels = load_digits(return_X_y=True)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    split = train_test_split(
        images, labels, train_size=TRAIN_RECORDS, random_state=0, stratify=labels
    )
    features, test_features, targets, test_targets = map(torch.from_numpy, split)
    return TensorDataset(features, targets), (test_features, test_targets)


def train(model, data, options, clip_norm, **regulariser):
    """Every layer is a block; fixed batches in a fixed order."""
    model = GradSampleModule(model)
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = BlockCoordinateOptimizer(
        torch.optim.SGD(groups, lr=options.learning_rate),
        module=model,
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=clip_norm,
        expected_batch_size=options.batch_size,
        **regulariser,
    )
    for _ in range(options.epochs):
        for features, targets in DataLoader(data, batch_size=options.batch_size):

            def closure(features=features, targets=targets):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(features), targets).backward()

            optimizer.step(closure)
    return model, optimizer


@torch.no_grad()
def accuracy(model, test):
    features, targets = test
    return float((model(features).argmax(dim=1) == targets).float().mean())


def epsilon(event, delta):
    return hsa.BlockCoordinateAccountant(RELATION).compose(event).get_epsilon(delta)


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
    for message in ("Secure RNG turned off", "Full backward hook"):
        warnings.filterwarnings("ignore", message=message)
    # Makes the output repeatable. Never seed the noise of a model that you release.
    torch.manual_seed(0)
    data, test = load_data()

    linear = nn.Linear(data.tensors[0].shape[1], CLASSES, bias=False)
    nn.init.zeros_(linear.weight)
    # Features of norm 1: gradients are at most sqrt(2) long, and the clip never acts.
    loss = hsa.LossGeometry.softmax_cross_entropy(1.0)
    model, optimizer = train(linear, data, options, 1.4143, l1=options.l1, l2=options.l2)
    event = optimizer.privacy_event(
        dataset_size=len(data), neighboring_relation=RELATION, block_loss=loss
    )
    everything = attrs.evolve(event, block_loss=None, update_lipschitz=None)
    zeros = float((linear.weight == 0).float().mean())
    print(
        f"one block: epsilon {epsilon(event, options.delta):.2f} for the model, "
        f"{epsilon(everything, options.delta):.2f} with all iterates; test accuracy "
        f"{accuracy(model, test):.3f}, {zeros:.0%} of the weights are 0"
    )

    product = nn.Sequential(
        nn.Linear(data.tensors[0].shape[1], RANK, bias=False), nn.Linear(RANK, CLASSES, bias=False)
    )
    model, two = train(product, data, options, 1.0, l2=options.l2)
    event = two.privacy_event(dataset_size=len(data), neighboring_relation=RELATION)
    print(
        f"two blocks: epsilon {epsilon(event, options.delta):.2f}, composition of all updates; "
        f"test accuracy {accuracy(model, test):.3f}"
    )
    print()
    print(optimizer.report(options.delta, dataset_size=len(data), block_loss=loss))


if __name__ == "__main__":
    main()
