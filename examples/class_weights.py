"""An imbalanced data set: public class weights, and a mean over records.

    python examples/class_weights.py

nn.CrossEntropyLoss(weight=...) divides by the sum of the weights of the batch. One record then
changes the gradients of all others, and no clip bounds that: the engine refuses it where it sees
the criterion, and says so. Weights are a choice of yours; counted from the labels they are a
statistic of the records.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

RECORDS, WEIGHTS = 2000, torch.tensor([1.0, 9.0])  # one case in ten is rare: known to everybody


def private(criterion, data):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    engine = HiddenStatePrivacyEngine()
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        data_loader=DataLoader(data, batch_size=100),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=criterion,
    )
    return engine, *parts


def train(optimizer, loader, model, loss):
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def main():
    torch.manual_seed(0)
    y = (torch.rand(RECORDS) < 0.1).long()
    x = torch.randn(RECORDS, 6) + 1.5 * y[:, None]
    data = TensorDataset(x[:1800], y[:1800])

    wrong = nn.CrossEntropyLoss(weight=WEIGHTS)
    try:
        _, model, optimizer, loader = private(wrong, data)
        train(optimizer, loader, model, wrong)
    except UnsupportedRunError as error:
        print(f"refused: {error}\n")

    right = nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none")
    engine, model, optimizer, loader = private(right, data)
    for _ in range(5):
        train(optimizer, loader, model, lambda logits, labels: right(logits, labels).mean())
    with torch.no_grad():
        found = model(x[1800:])[y[1800:] == 1].argmax(dim=1).float().mean()  # public records
    print(f"{found:.0%} of the rare cases found, epsilon {engine.get_epsilon(1e-5):.3f}")


if __name__ == "__main__":
    main()
