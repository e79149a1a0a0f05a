"""What tests of the Opacus adapter share beside the fixtures of its conftest."""

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn


def layers(outputs=3):
    """A small network with a layer that is not linear, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors]).double().cpu().numpy()


def weights(run):
    return flat(run.plain_model.parameters())


def in_pieces(run, size):
    return BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=size, optimizer=run.optimizer
    )
