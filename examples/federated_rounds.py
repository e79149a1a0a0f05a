"""Federated rounds: hospitals train in turn on their own records, and average what they release.

    python examples/federated_rounds.py

The engine of a hospital is its ledger. It composes all its rounds, and within a round it pays for
the last iterate only, because nothing else leaves the hospital.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

HOSPITALS, RECORDS, ROUNDS, STEPS, DELTA = 3, 500, 4, 40, 1e-5


def round_of(engine, data, weights):
    """The model of one hospital after a round that starts from the weights of all of them."""
    model = nn.Linear(8, 3, bias=False)
    model.load_state_dict(weights)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.2),
        data_loader=DataLoader(data, batch_size=RECORDS),
        noise_multiplier=20.0,
        max_grad_norm="auto",
        criterion=nn.CrossEntropyLoss(),
        feature_norm=1.0,
        batch_order="full",
        num_steps=STEPS,
        schedule=1.0,
    )
    for _ in range(STEPS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(private(x), y).backward()
            optimizer.step()
    return model.state_dict()


def main():
    torch.manual_seed(0)
    centres, hospitals = torch.randn(3, 8), []
    for _ in range(HOSPITALS):
        labels = torch.randint(3, (RECORDS,))
        features = F.normalize(centres[labels] + torch.randn(RECORDS, 8))
        hospitals.append((HiddenStatePrivacyEngine(), TensorDataset(features, labels)))
    weights = nn.Linear(8, 3, bias=False).state_dict()
    for number in range(1, ROUNDS + 1):
        released = [round_of(engine, data, weights) for engine, data in hospitals]
        weights = {name: sum(r[name] for r in released) / HOSPITALS for name in weights}
        engine = hospitals[0][0]
        print(
            f"after round {number}: epsilon {engine.get_epsilon(DELTA):.3f} of the first hospital"
        )
    every = [row for row in engine.compare(DELTA).rows if row.accountant == "composition"]
    print(f"one round with every iterate released: epsilon {every[0].epsilon:.3f}")


if __name__ == "__main__":
    main()
