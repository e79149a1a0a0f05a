"""A private run that is stopped in the middle of an epoch, saved, and resumed elsewhere.

The batches are reshuffled in every epoch, and nobody may learn the order. To go on in the middle of
an epoch the checkpoint has to hold it, so it must stay private and does not count as a release.
The resumed run has the same batches and the same epsilon as one that was not interrupted.

    python examples/resume_opacus.py [--epochs 6] [--stop-after 25] [--path FILE]
"""

import argparse
import pathlib
import tempfile
import warnings

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

RECORDS, BATCH, DELTA = 1500, 150, 1e-5


def load_data():
    """scikit-learn's digits, each record centred and scaled to norm 1 by itself."""
    images, labels = load_digits(return_X_y=True)
    images = images - images.mean(axis=1, keepdims=True)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    return TensorDataset(torch.from_numpy(images[:RECORDS]), torch.from_numpy(labels[:RECORDS]))


def start(data):
    """What every process does first, whether it starts the run or goes on with it."""
    model, criterion = nn.Linear(64, 10, bias=False), nn.CrossEntropyLoss()
    nn.init.zeros_(model.weight)
    engine = HiddenStatePrivacyEngine()
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.01),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=6.0,
        max_grad_norm=1.4143,
        batch_order="reshuffled",
        criterion=criterion,
        feature_norm=1.0,
    )
    return engine, criterion, *private


def train(criterion, model, optimizer, loader, done, until):
    """Whole passes over the private loader; leaves in the middle of one if `until` is there."""
    while done < until:
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()
            done += 1
            if done == until:
                break
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--stop-after", type=int, default=25, help="steps")
    parser.add_argument("--path", type=pathlib.Path)
    options = parser.parse_args()
    for message in ("Secure RNG turned off", "Full backward hook"):
        warnings.filterwarnings("ignore", message=message)
    steps = options.epochs * (RECORDS // BATCH)
    data = load_data()

    engine, *run = start(data)
    train(*run, done=0, until=steps)
    print(f"not interrupted: {steps} steps, epsilon {fixed_up(engine.get_epsilon(DELTA), 4)}")

    with tempfile.TemporaryDirectory() as folder:
        path = options.path or pathlib.Path(folder) / "checkpoint.pt"
        engine, *run = start(data)
        done = train(*run, done=0, until=options.stop_after)
        engine.save_checkpoint(path=path, stays_private=True, include_private_state=True)
        print(
            f"stopped after {done} steps, epsilon so far {fixed_up(engine.get_epsilon(DELTA), 4)}"
        )

        engine, *run = start(data)  # as in another process, another day
        engine.load_checkpoint(path=path)
    train(*run, done=done, until=steps)
    print(f"resumed: {steps} steps, epsilon {fixed_up(engine.get_epsilon(DELTA), 4)}")
    print()
    print(engine.report(DELTA))


if __name__ == "__main__":
    main()
