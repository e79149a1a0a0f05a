"""LoRA: a frozen linear layer learns two thin matrices, privately, with Adam.

    python examples/lora.py

Every step counts, as in stock Opacus: the product of two trained matrices is not convex. peft's
LoRA works alike, because its matrices are linear layers, too.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

RECORDS, WIDTH, RANK = 1000, 16, 2


class LoRA(nn.Module):
    """The frozen layer, and the product of the two matrices that is added to it."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # the start is the pretrained network

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def main():
    torch.manual_seed(0)
    pretrained = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    x = torch.randn(RECORDS, WIDTH)
    y = (pretrained(x) + x @ torch.randn(WIDTH, 3)).argmax(dim=1)  # a task a little to the side
    model = nn.Sequential(*[LoRA(m) if isinstance(m, nn.Linear) else m for m in pretrained])
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(trained, lr=0.02),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=100),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=8,
        max_grad_norm=1.0,
        criterion=F.cross_entropy,  # looked at: a mean over records, and of nothing else
    )
    for _ in range(8):
        for features, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(features), targets).backward()
            optimizer.step()
    number = sum(p.numel() for p in trained)
    print(f"{number} parameters trained, epsilon {engine.get_epsilon(1e-5):.3f} at delta 1e-05")


if __name__ == "__main__":
    main()
