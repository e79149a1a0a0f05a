"""A private head on features of a frozen backbone: embed once, then one call.

python examples/fit_head.py
"""

import torch
from torch import nn
from torch.nn.functional import normalize

from hidden_state_adapters.opacus import fit_head

torch.manual_seed(0)
labels = torch.randint(10, (5000,))
images = torch.randn(10, 1, 8, 8)[labels] + torch.randn(5000, 1, 8, 8)
backbone = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten()).eval()  # yours is trained
with torch.no_grad():
    features = normalize(backbone(images))
head, guarantee = fit_head(features[:4000], labels[:4000], epsilon=1.0, delta=1e-5, classes=10)
correct = head(features[4000:]).argmax(dim=1) == labels[4000:]
print(f"accuracy {correct.float().mean():.3f} at epsilon {guarantee.epsilon(1e-5):.3f}")
