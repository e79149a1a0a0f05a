"""A small GAN with a private discriminator: one module sees the real and the made-up images.

    python examples/gan.py

The generator never sees a record, so the discriminator's epsilon is also that of the generator.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

RECORDS, NOISE, EPOCHS = 400, 4, 2


class RealAndFake(nn.Module):
    """Calls the discriminator for both, so that one pass belongs to one step."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, real, fake):
        return self.net(real), self.net(fake)


def main():
    torch.manual_seed(0)
    images = torch.randn(RECORDS, 1, 8, 8).cumsum(dim=-1)
    discriminator = nn.Sequential(
        nn.Conv2d(1, 8, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1)
    )
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8)))
    bce, module = nn.BCEWithLogitsLoss(), RealAndFake(discriminator)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    engine = HiddenStatePrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.Adam(discriminator.parameters(), lr=1e-3),
        data_loader=DataLoader(TensorDataset(images), batch_size=40),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(EPOCHS):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE))
            optimizer.zero_grad()
            on_real, on_fake = module(real, fake.detach())
            loss = bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))
            loss.backward()
            optimizer.step()

            of_generator.zero_grad()
            judged = discriminator(generator(torch.randn(40, NOISE)))
            bce(judged, torch.ones_like(judged)).backward()
            of_generator.step()
            optimizer.zero_grad()  # what the generator's pass left in the discriminator
    print(f"epsilon {engine.get_epsilon(1e-5):.3f} of discriminator and generator, delta 1e-05")


if __name__ == "__main__":
    main()
