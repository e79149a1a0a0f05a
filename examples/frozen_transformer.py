"""A classifier on a frozen transformer: only its last iterate counts.

    python examples/frozen_transformer.py

The transformer has random weights here; yours is pretrained. Its dropout is off, because features
that a record meets anew in every step would be features of another record.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

RECORDS, LENGTH, WIDTH, EPOCHS = 1000, 8, 32, 20


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, batch_first=True)
        self.backbone = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x):
        return self.head(F.normalize(self.backbone(x).mean(dim=1)))  # features of norm 1


def main():
    torch.manual_seed(0)
    labels = torch.randint(2, (RECORDS,))
    x = torch.randn(RECORDS, LENGTH, WIDTH) + labels[:, None, None] * torch.randn(WIDTH)
    model = Classifier()
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.head.parameters(), lr=1.0, weight_decay=0.05),
        data_loader=DataLoader(TensorDataset(x, labels), batch_size=100),
        noise_multiplier=4.0,
        max_grad_norm="auto",
        criterion=nn.CrossEntropyLoss(),
        feature_norm=1.0,
        num_steps=EPOCHS * 10,
        schedule=1.0,
    )
    print(engine.would_gain(delta=1e-5))  # before anything is trained
    for _ in range(EPOCHS):
        for features, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(features), targets).backward()
            optimizer.step()
    with torch.no_grad(), engine.evaluate_on_private_data(stays_private=True):
        accuracy = (model(x).argmax(dim=1) == labels).float().mean()
    print(f"accuracy {accuracy:.3f} at epsilon {engine.get_epsilon(1e-5):.3f} of the last iterate")


if __name__ == "__main__":
    main()
