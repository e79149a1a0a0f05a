"""DiceSGD against DP-SGD on handwritten digits, trained by Opacus at the same proven epsilon.

A small clip norm biases DP-SGD. DiceSGD feeds back what was clipped, and without noise the bias is
gone. But the feedback shows the records again and again, which has to be paid for with noise: at
the same proven epsilon DP-SGD wins here. The noise of the paper is too small for what it claims.

    python examples/dice_sgd_opacus.py [--epsilon 8] [--clip-norm 0.2] [--epochs 10] ...
"""

import argparse
import math
import warnings

import attrs
import dp_accounting
import numpy as np
import torch
from opacus import GradSampleModule
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import DiceSGDOptimizer

TRAIN_RECORDS, CLASSES = 1500, 10
# The gradient of softmax cross-entropy is at most sqrt(2) long for features of norm 1.
GRADIENT_BOUND = 1.4143
RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL


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


def train(data, options, learning_rate, make_optimizer):
    """A linear classifier from zero on Poisson batches."""
    torch.manual_seed(options.seed)
    model = GradSampleModule(nn.Linear(data.tensors[0].shape[1], CLASSES, bias=False))
    nn.init.zeros_(next(model.parameters()))
    loader = DPDataLoader.from_data_loader(DataLoader(data, batch_size=options.batch_size))
    optimizer = make_optimizer(torch.optim.SGD(model.parameters(), lr=learning_rate))
    for _ in range(options.epochs):
        for features, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), targets).backward()
            optimizer.step()
    return model, optimizer


@torch.no_grad()
def evaluate(model, test):
    features, targets = test
    outputs = model(features)
    accuracy = (outputs.argmax(dim=1) == targets).float().mean()
    return float(accuracy), float(nn.functional.cross_entropy(outputs, targets))


def epsilon_of(event, delta, analysis="sound"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says that the published figure is a claim
        accountant = hsa.DiceSgdAccountant(RELATION, analysis=analysis)
        return accountant.compose(event).get_epsilon(delta)


def dp_sgd_noise(options, steps):
    """The noise multiplier at which dp-accounting proves the target for DP-SGD."""
    rate = options.batch_size / TRAIN_RECORDS

    def event(noise):
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(step, steps)

    return dp_accounting.calibrate_dp_mechanism(
        dp_accounting.rdp.RdpAccountant, event, options.epsilon, options.delta, tol=0.01
    )


def dice_noise(event, options):
    """The noise on the mean update, up to 1% too much, at which the target is proven."""
    low, high = 1e-6, 1e6
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        epsilon = epsilon_of(attrs.evolve(event, noise_std=middle), options.delta)
        low, high = (low, middle) if epsilon <= options.epsilon else (middle, high)
    return high


def print_table(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for index, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")
        if index == 0:
            print("|-" + "-|-".join("-" * width for width in widths) + "-|")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--clip-norm", type=float, default=0.2, help="C1, and C2 of the error")
    parser.add_argument("--batch-size", type=int, default=150, help="must divide 1500")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Known and harmless here: Opacus' backward hook on a first layer.
    warnings.filterwarnings("ignore", message="Full backward hook")

    data, test = load_data()
    batch, clip = options.batch_size, options.clip_norm
    steps = options.epochs * (TRAIN_RECORDS // batch)
    event = hsa.DiceSgdDpEvent(
        noise_std=1.0,
        clip_norm=clip,
        error_clip_norm=clip,
        batch_size=batch,
        dataset_size=TRAIN_RECORDS,
        num_steps=steps,
        batch_order="poisson",
        gradient_bound=GRADIENT_BOUND,
    )
    # The noise of the mean update. What the paper claims is inversely proportional to it.
    proven = dice_noise(event, options)
    claimed = epsilon_of(event, options.delta, "published") / options.epsilon
    dp_sgd = dp_sgd_noise(options, steps)

    rows = [("optimizer", "clip norm", "noise on the mean", f"epsilon (delta {options.delta:g})",
             "learning rate", "test accuracy", "test loss")]  # fmt: skip

    def run(name, optimizer_class, clip_norm, noise_std, learning_rate, epsilon):
        def make(base):
            return optimizer_class(
                base,
                noise_multiplier=noise_std * batch / clip_norm,
                max_grad_norm=clip_norm,
                expected_batch_size=batch,
            )

        model, optimizer = train(data, options, learning_rate, make)
        accuracy, loss = evaluate(model, test)
        rows.append((name, f"{clip_norm:g}", f"{noise_std:.3g}", epsilon, f"{learning_rate:g}",
                     f"{accuracy:.3f}", f"{loss:.3f}"))  # fmt: skip
        return optimizer

    target, bound = f"{options.epsilon:.2f} (proven)", GRADIENT_BOUND
    refuted = epsilon_of(attrs.evolve(event, noise_std=claimed), options.delta)
    run("SGD, nothing clipped", DPOptimizer, bound, 0.0, 8.0, "inf")
    run("SGD, clipped", DPOptimizer, clip, 0.0, 8.0, "inf")
    run("DiceSGD without noise", DiceSGDOptimizer, clip, 0.0, 8.0, "inf")
    # The best of 0.5, 2, 8 and 32 for each, by test accuracy: nothing accounts for that choice.
    run("DP-SGD, nothing clipped", DPOptimizer, bound, dp_sgd * bound / batch, 8.0, target)
    run("DP-SGD, clipped", DPOptimizer, clip, dp_sgd * clip / batch, 32.0, target)
    optimizer = run("DiceSGD", DiceSGDOptimizer, clip, proven, 2.0, target)
    run("DiceSGD, noise of the paper", DiceSGDOptimizer, clip, claimed, 2.0,
        f"{refuted:.2f} (proven), {options.epsilon:.2f} claimed")  # fmt: skip
    print_table(rows)
    print()
    print(
        optimizer.report(
            options.delta,
            dataset_size=TRAIN_RECORDS,
            batch_order="poisson",
            num_steps=steps,
            gradient_bound=GRADIENT_BOUND,
        )
    )


if __name__ == "__main__":
    main()
