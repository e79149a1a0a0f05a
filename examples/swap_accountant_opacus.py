"""An ordinary Opacus script whose accountant was swapped: three lines, marked with "swap".

Engine, optimizer and training loop stay Opacus' own. The batches are read off the loader that
make_private returned, and the loss is derived from the criterion, which is watched. What cannot be
seen from inside Opacus (other changes of the model) is listed as an assumption;
HiddenStatePrivacyEngine checks it instead (examples/linear_probe_opacus.py). With Opacus' own
accountant epsilon is 1.63 after the 60 epochs, and goes on growing.

    python examples/swap_accountant_opacus.py [--epochs 60] [--noise-multiplier 6.0]
"""

import argparse
import warnings

import numpy as np
import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_adapters.opacus  # noqa: F401  swap 1: registers the accountant
from hidden_state_accountants.figures import fixed_up

RECORDS, BATCH, DELTA = 1500, 150, 1e-5


def load_data():
    """scikit-learn's digits, each record centred and scaled to norm 1 by itself."""
    images, labels = load_digits(return_X_y=True)
    images = images - images.mean(axis=1, keepdims=True)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    features, labels = torch.from_numpy(images), torch.from_numpy(labels)
    train = TensorDataset(features[:RECORDS], labels[:RECORDS])
    return train, (features[RECORDS:], labels[RECORDS:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--noise-multiplier", type=float, default=6.0)
    options = parser.parse_args()
    for message in ("Secure RNG turned off", "Full backward hook"):
        warnings.filterwarnings("ignore", message=message)

    train, (test_features, test_labels) = load_data()
    model = nn.Linear(64, 10, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.02)
    loader = DataLoader(train, batch_size=BATCH)
    criterion = nn.CrossEntropyLoss()

    engine = PrivacyEngine(accountant="hidden_state")  # swap 2: was accountant="prv"
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=1.4143,
    )
    engine.accountant.declare_run(criterion=criterion, feature_norm=1.0)  # swap 3
    for epoch in range(1, options.epochs + 1):
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()
        if epoch % 20 == 0 or epoch == options.epochs:
            epsilon = engine.get_epsilon(DELTA)
            print(
                f"epoch {epoch}: epsilon {fixed_up(epsilon, 3)} if this model were the one released"
            )

    with torch.no_grad():
        accuracy = (model(test_features).argmax(dim=1) == test_labels).float().mean()
    print(f"test accuracy {accuracy:.3f}")
    print()
    print(engine.accountant.guarantee.explain(DELTA))


if __name__ == "__main__":
    main()
