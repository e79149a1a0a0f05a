"""DiceSGD through the engine: constants and helpers of its tests."""

import torch

DELTA, RATE, CLIP, ERROR_CLIP = 1e-5, 0.3, 0.1, 0.02
ORDERS = ["cyclic", "full", "shuffled_once", "reshuffled", "without_replacement", "poisson"]
PRIVATE = {"include_private_state": True, "stays_private": True}


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors]).cpu().numpy().astype(float)


def weights(run):
    return flat(run.plain_model.parameters())


def error_of(run):
    return flat(run.optimizer.private_state()["error"])
