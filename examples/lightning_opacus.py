"""A private softmax classifier on handwritten digits, trained by a Lightning Trainer.

Needs Lightning, which this package does not install: pip install lightning

    python examples/lightning_opacus.py [--epochs 20] [--noise-multiplier 6.0] ...

`make_private` comes first; the LightningModule holds the private model and returns the private
optimizer, and the Trainer gets the private loader. What the Trainer would do beside training is
switched off, because it shows or chooses iterates that epsilon does not cover: checkpoints, logs of
the training loss, early stopping. Epsilon itself goes to your loggers by `log_epsilon`.
"""

import argparse
import warnings

import lightning
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import HiddenStatePrivacyEngine, log_epsilon

TRAIN_RECORDS = 1500
BATCH_SIZE = 150
CLIP_NORM = 1.4143  # just above sqrt(2), the longest gradient for features of norm 1


def load_data():
    """scikit-learn's digits, each record centred and scaled to norm 1 by itself."""
    images, labels = load_digits(return_X_y=True)
    images = images - images.mean(axis=1, keepdims=True)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    features, targets = torch.from_numpy(images), torch.from_numpy(labels)
    train = TensorDataset(features[:TRAIN_RECORDS], targets[:TRAIN_RECORDS])
    return train, (features[TRAIN_RECORDS:], targets[TRAIN_RECORDS:])


class Probe(lightning.LightningModule):
    """What make_private returned, in Lightning's words."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.private_optimizer = model, optimizer

    def training_step(self, batch, index):
        features, targets = batch
        return F.cross_entropy(self.model(features), targets)

    def configure_optimizers(self):
        return self.private_optimizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise-multiplier", type=float, default=6.0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--delta", type=float, default=1e-5)
    options = parser.parse_args()
    # Known and harmless here: hints of Opacus, and of Lightning at workers and loggers.
    for message in ("Secure RNG turned off", "Full backward hook", "The '.*' does not have many"):
        warnings.filterwarnings("ignore", message=message)

    data, (features, targets) = load_data()
    model = nn.Linear(features.shape[1], 10, bias=False)
    nn.init.zeros_(model.weight)
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.005),
        data_loader=DataLoader(data, batch_size=BATCH_SIZE),
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=CLIP_NORM,
        batch_order="reshuffled",
        criterion=F.cross_entropy,
        feature_norm=1.0,
        num_steps=options.epochs * TRAIN_RECORDS // BATCH_SIZE,
        schedule=0.5,
    )
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    log_epsilon(trainer, engine, options.delta)
    trainer.fit(Probe(model, optimizer), loader)

    logged = float(trainer.callback_metrics["epsilon_if_released_now"])
    print(f"logged after the last epoch: {logged:.3f}")
    with torch.no_grad():
        correct = (model(features).argmax(dim=1) == targets).float().mean()
    print(f"accuracy on {len(targets)} public digits: {float(correct):.3f}")
    print(engine.report(options.delta))


if __name__ == "__main__":
    main()
