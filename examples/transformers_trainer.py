"""A small BERT with random weights, trained privately by the Trainer of transformers.

Needs transformers and accelerate, which this package does not install.

    python examples/transformers_trainer.py [--epochs 3]

Stock Opacus stops at the second step, because Trainer clears the gradients by model.zero_grad().
"""

import argparse
import tempfile

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hidden_state_adapters.opacus import HiddenStatePrivacyEngine, log_epsilon

RECORDS, WORDS, LENGTH = 400, 50, 12


class PrivateTrainer(Trainer):
    """Trains on the loader that make_private returned."""

    def get_train_dataloader(self):
        return self.train_dataset


def texts():
    """Half of them hold the word 7; all have one length and bring their positions along.

    BERT would make one row of positions for the whole batch, and no gradient of single records.
    """
    torch.manual_seed(0)
    words = torch.randint(10, WORDS, (RECORDS, LENGTH))
    labels = torch.arange(RECORDS) % 2
    words[labels == 1, 3] = 7
    each = {"position_ids": torch.arange(LENGTH)}
    return [{"input_ids": words[i], "labels": labels[i], **each} for i in range(RECORDS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    epochs, delta = parser.parse_args().epochs, 1e-3
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=WORDS, intermediate_size=32, max_position_embeddings=16, **size)
    model = BertForSequenceClassification(config).train()
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        data_loader=DataLoader(texts(), batch_size=40),
        noise_multiplier=0.8,
        max_grad_norm=1.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        # Losses of the training data stay out of the logs: no epsilon covers them.
        quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
        arguments = TrainingArguments(folder, num_train_epochs=epochs, use_cpu=True, **quiet)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trainer = PrivateTrainer(
            model, arguments, train_dataset=loader, optimizers=(optimizer, constant)
        )
        log_epsilon(trainer, engine, delta)
        trainer.train()
    for entry in trainer.state.log_history:
        if "epsilon_if_released_now" in entry:
            print(f"epoch {entry['epoch']:g}: epsilon {entry['epsilon_if_released_now']:.3f}")
    print(engine.report(delta))


if __name__ == "__main__":
    main()
