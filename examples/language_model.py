"""A language model whose loss is a mean over the tokens of every text, then over the texts.

    python examples/language_model.py

The usual loss, a mean over all tokens of the batch, divides by a number that every text changes:
the gradient of one text then depends on how long the others are. Every text also brings its
padding along: to what length a text is padded must not depend on the longest one of its batch.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

TEXTS, LENGTH, WORDS, PADDING = 600, 12, 20, -100


class Model(nn.Module):
    """The next word from the mean of the words so far."""

    def __init__(self):
        super().__init__()
        self.words, self.hidden = nn.Embedding(WORDS, 16), nn.Linear(16, 32)
        self.next = nn.Linear(32, WORDS)

    def forward(self, x):
        so_far = torch.arange(1, LENGTH + 1)[:, None]
        return self.next(self.hidden(self.words(x).cumsum(dim=1) / so_far).relu())


def mean_of_tokens(logits, labels):
    """The loss of the batch, as it has to be."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=PADDING, reduction="none")
    return (losses.sum(dim=1) / (labels != PADDING).sum(dim=1).clamp(min=1)).mean()


def main():
    torch.manual_seed(0)
    texts = (torch.arange(LENGTH + 1) * 3 + torch.randint(WORDS, (TEXTS, 1))) % WORDS
    lengths = torch.randint(4, LENGTH, (TEXTS, 1))
    labels = texts[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, PADDING)
    model = Model()
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        data_loader=DataLoader(TensorDataset(texts[:, :-1], labels), batch_size=60),
        noise_multiplier=0.8,
        max_grad_norm=1.0,
        criterion=mean_of_tokens,
    )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            mean_of_tokens(model(x), y).backward()
            optimizer.step()
    print(f"epsilon {engine.get_epsilon(1e-4):.3f} of a text at delta 0.0001")


if __name__ == "__main__":
    main()
