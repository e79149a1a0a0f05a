"""The private softmax classifier of linear_probe_opacus.py, trained by several processes together.

    torchrun --nproc-per-node 2 examples/linear_probe_ddp.py [--epochs 200] ...

What is different from one process: the process group, the model in Opacus' DPDDP, and that one
process prints. Every process loads all records; make_private gives it its part of every batch.
"""

import argparse
import logging
import warnings

import torch
from linear_probe_opacus import CLASSES, CLIP_NORM, accuracy, load_data
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import distributed, nn
from torch.utils.data import DataLoader

from hidden_state_adapters.opacus import HiddenStatePrivacyEngine


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise-multiplier", type=float, default=6.0)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--delta", type=float, default=1e-5)
    options = parser.parse_args()
    for message in ("Secure RNG turned off", "Full backward hook"):
        warnings.filterwarnings("ignore", message=message)

    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    logging.basicConfig(format="  %(message)s", level=logging.WARNING if rank == 0 else "ERROR")

    data, test = load_data()
    model = nn.Linear(data.tensors[0].shape[1], CLASSES, bias=False)
    nn.init.zeros_(model.weight)
    model = DPDDP(model.to(device))
    criterion = nn.CrossEntropyLoss()
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.005),
        data_loader=DataLoader(data, batch_size=150),  # 150 records in a step, of all processes
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=CLIP_NORM,
        batch_order="cyclic",
        criterion=criterion,
        feature_norm=1.0,
    )
    for _ in range(options.epochs):
        for features, targets in loader:
            optimizer.zero_grad()
            criterion(model(features.to(device)), targets.to(device)).backward()
            optimizer.step()

    if rank == 0:
        features, targets = (part.to(device) for part in test)
        figure = accuracy(model, (features, targets))
        print(f"trained by {size} processes, test accuracy {figure:.3f}")
        print(engine.report(options.delta))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
