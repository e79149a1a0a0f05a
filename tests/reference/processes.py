"""Several processes on this machine that train together, and what a test lets them do."""

import contextlib
import multiprocessing
import os
import tempfile
import warnings

import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hidden_state_adapters.opacus import (
    Batches,
    BlockCoordinateOptimizer,
    DiceSGDOptimizer,
    HiddenStatePrivacyEngine,
)

RECORDS, FEATURES, CLASSES, BATCH = 30, 4, 3, 10
SEEDED = {
    "shuffled_once": Batches("shuffled_once", seed=5),
    **{
        order: Batches(order, seed=5, seed_is_secret=True)
        for order in ("reshuffled", "without_replacement", "poisson")
    },
}
# The server of the forks does not know this folder. Autograd imports _dynamo sooner or later.
PRELOADED = ["torch._dynamo", "hidden_state_adapters.opacus"]
DICE = {"optimizer_class": DiceSGDOptimizer, "max_grad_norm": 0.2, "loss_geometry": None}


class Group:
    """Processes that wait for functions of this module, and call them together.

    Args:
        size: Processes.
    """

    def __init__(self, size):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # the imports take longer than all tests
        self.folder = tempfile.TemporaryDirectory()
        store = "file://" + os.path.join(self.folder.name, "store")
        self.pipes, self.processes = [], []
        for rank in range(size):
            pipe, theirs = context.Pipe()
            arguments = (rank, size, store, theirs)
            self.processes.append(context.Process(target=_work, args=arguments, daemon=True))
            self.processes[-1].start()
            self.pipes.append(pipe)

    def call(self, name, *arguments):
        """What a function of this module returns in each process; an error as its text."""
        for pipe in self.pipes:
            pipe.send((name, arguments))
        return [pipe.recv() for pipe in self.pipes]

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _work(rank, size, store, pipe):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    while True:
        name, arguments = pipe.recv()
        pipe.send(or_error(globals()[name], *arguments))


def rank():
    return distributed.get_rank() if distributed.is_initialized() else 0


def records(count=RECORDS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(
        features / features.norm(dim=1, keepdim=True), torch.arange(count) % CLASSES
    )


class Training:
    """A run of a small softmax head; keyword arguments go to make_private or are named here."""

    def __init__(
        self,
        *,
        wrapper=DPDDP,
        seed=0,
        sgd=None,
        data=None,
        loader=None,
        deep=False,
        classes=CLASSES,
        noise_seed=None,
        device="cpu",
        **options,
    ):
        torch.manual_seed(seed)
        self.device = device
        self.inner = nn.Linear(FEATURES, classes)
        if deep:
            self.inner = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
        self.inner.to(device)
        is_wrapped = wrapper is not None and distributed.is_initialized()
        model = wrapper(self.inner) if is_wrapped else self.inner
        self.criterion, self.engine = nn.CrossEntropyLoss(), HiddenStatePrivacyEngine()
        data = records() if data is None else data
        base = torch.optim.SGD(model.parameters(), **{"lr": 0.5, **(sgd or {})})
        given = {
            "noise_multiplier": 0.0,
            "max_grad_norm": 2.1,
            "batch_order": "cyclic",
            "loss_geometry": "auto",
            **options,
        }
        if given["loss_geometry"] == "auto":
            given |= {"criterion": self.criterion, "feature_norm": 1.0}
        if noise_seed is not None:
            given["noise_generator"] = torch.Generator().manual_seed(noise_seed)
        if options.get("blocks"):
            del given["blocks"]
            layers = [self.inner[0], self.inner[2]]
            base = torch.optim.SGD([{"params": part.parameters()} for part in layers], lr=0.5)
        loader = DataLoader(data, **{"batch_size": BATCH, **(loader or {})})
        made = self.engine.make_private(module=model, optimizer=base, data_loader=loader, **given)
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        if len(made) == 4:  # with ghost clipping
            self.criterion = made[2]
        self.used = []

    def backward(self, batch):
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()

    def step(self, batch):
        self.used.append(len(batch[1]))
        batch = [part.to(self.device) for part in batch]
        if isinstance(self.optimizer, BlockCoordinateOptimizer):
            self.optimizer.step(lambda: self.backward(batch))
        else:
            self.backward(batch)
            self.optimizer.step()

    def batches(self, physical=None):
        """Of an epoch, in pieces of so many records."""
        if physical is None:
            return contextlib.nullcontext(self.loader)
        return BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=physical, optimizer=self.optimizer
        )

    def epochs(self, count=2, physical=None):
        for _ in range(count):
            with self.batches(physical) as loader:
                for batch in loader:
                    self.step(batch)
        return self

    @property
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.inner.parameters()]).tolist()


CASES = {
    **{
        order: {"batch_order": SEEDED.get(order, order)}
        for order in ("cyclic", "full", *SEEDED)
    },
    "adam": {"loss_geometry": None, "sgd": {"momentum": 0.9}, "batch_order": "cyclic"},
    "per layer": {
        "loss_geometry": None, "clipping": "per_layer", "max_grad_norm": [0.2, 0.1], "deep": False
    },
    "deep": {"deep": True, "loss_geometry": None, "max_grad_norm": 0.3},
    "deep ghost": {
        "deep": True, "loss_geometry": None, "max_grad_norm": 0.3, "grad_sample_mode": "ghost",
        "criterion": nn.CrossEntropyLoss(),
    },
    "torch": {"wrapper": DistributedDataParallel},
    "empty parts": {"batch_order": SEEDED["poisson"], "loader": {"batch_size": 2}},
    "plain": {"wrapper": None, "distributed": True},
    "pieces": {"physical": 2},
    "dice": DICE,
    "dice poisson": {**DICE, "batch_order": SEEDED["poisson"]},
    "blocks": {
        "optimizer_class": BlockCoordinateOptimizer, "blocks": True, "deep": True,
        "loss_geometry": None, "max_grad_norm": 0.3,
    },
    "noise": {"noise_multiplier": 1.0, "noise_seed": 3},
    "noise of pieces": {"noise_multiplier": 1.0, "noise_seed": 3, "physical": 3},
}  # fmt: skip
# Runs without noise, or with known noise: they take the same way in any number of processes.


def trajectory(case):
    options = dict(CASES[case])
    physical = options.pop("physical", None)
    if not distributed.is_initialized():
        options.pop("distributed", None)
    return Training(**options).epochs(physical=physical).weights


def trajectory_on(device):
    return Training(device=device).epochs().weights


def or_error(act, *arguments):
    """What it returns, or the text of what it raises."""
    try:
        return act(*arguments)
    except Exception as error:  # a test looks at it
        return f"{type(error).__name__}: {error}"


def error_of(act, *arguments):
    """The text of what it raises, or "nothing"."""
    found = or_error(lambda: act(*arguments) is None)
    return found if isinstance(found, str) else "nothing"


def trajectories(cases=tuple(CASES)):
    return {case: or_error(trajectory, case) for case in cases}


def epsilon(order):
    run = Training(noise_multiplier=2.0, batch_order=order).epochs()
    return run.engine.get_epsilon(1e-5), run.engine.report(1e-5), run.weights


class Numbered(TensorDataset):
    """Records that say which ones they are."""

    def __getitem__(self, index):
        asked.append(index)
        return super().__getitem__(index)


asked = []


def used_records(order, size=BATCH):
    """The records of every step that this process used."""
    data = Numbered(*records().tensors)
    run = Training(batch_order=order, data=data, loader={"batch_size": size}, loss_geometry=None)
    steps = []
    asked.clear()
    for _ in range(2):
        for batch in run.loader:
            steps.append(list(asked))
            asked.clear()
            run.step(batch)
    return steps


def stock_run(is_poisson, declared=None):
    """The accountant of a stock engine after an epoch."""
    engine, model = PrivacyEngine(accountant="hidden_state"), DPDDP(nn.Linear(FEATURES, CLASSES))
    sampler = None if is_poisson else DistributedSampler(records(), shuffle=False)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=BATCH if is_poisson else 5, sampler=sampler),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        poisson_sampling=is_poisson,
    )
    engine.accountant.declare_run(**(declared or {}))
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    return engine.accountant


def stock_epsilon():
    accountant = stock_run(True)
    return accountant.get_epsilon(1e-5), accountant.recorders[0].event()


# What goes wrong in process 1, or in all. The text of the error comes back, and whether the run has
# an epsilon.


def _outcome(run, act):
    return error_of(act), error_of(run.engine.get_epsilon, 1e-5) == "nothing"


def _every_step(act, physical=None):
    """The outcome of an epoch whose steps `act` takes."""
    run = Training(noise_multiplier=1.0)

    def epoch():
        with run.batches(physical) as loader:
            for index, batch in enumerate(loader):
                act(run, index, batch)

    return _outcome(run, epoch)


def skips_a_step():
    return _every_step(lambda run, i, batch: None if i == 1 == rank() else run.step(batch))


def refuses_a_step(which=1, at=1, physical=None):
    def act(run, index, batch):
        longer = 2.0 if index == at and rank() == which else 1.0
        run.step((longer * batch[0], batch[1]))

    return _every_step(act, physical)


def refuses_a_piece():
    return refuses_a_step(at=0, physical=2)


def changes(name, value):
    def act(run, index, batch):
        run.step(batch)
        if rank() == 1:
            own = run.optimizer
            (own.param_groups[0] if name == "lr" else vars(own))[name] = value

    return _every_step(act)


def writes_a_parameter():
    def act(run, index, batch):
        run.step(batch)
        if rank() == 1:
            run.inner.bias.data += 1e-3

    return _every_step(act)


def takes_one_step_too_many():
    """All processes find that before they look at a gradient: the run stays what it is."""
    run = Training(noise_multiplier=1.0, num_steps=3).epochs(1)
    return _outcome(run, run.epochs)


def dies():
    return _every_step(lambda run, i, batch: os._exit(1) if i == 1 == rank() else run.step(batch))


def starts_with(options, others):
    """make_private with `others` in process 1 in place of `options`."""
    made = {**options, **(others if rank() == 1 else {})}
    if "records" in made:
        made["data"] = records(seed=made.pop("records"))
    if made.pop("ghost", None):
        made |= {"wrapper": DistributedDataParallel, "grad_sample_mode": "ghost"}
    if made.pop("sampler", None):
        data = records()
        made |= {"data": data, "loader": {"sampler": DistributedSampler(data)}}
    return error_of(lambda: Training(**made))


def tells(what):
    """Process 1 releases, or looks; what process 0 knows of it after the next step."""
    run = Training(noise_multiplier=1.0)
    for index, batch in enumerate(run.loader):
        if index == 1 and rank() == 1:
            if what == "release":
                run.engine.release()
            else:
                with run.engine.evaluate_on_private_data(stays_private=what == "assume"):
                    pass
        run.step(batch)
    refusal = error_of(run.engine.get_epsilon, 1e-5)
    if refusal != "nothing":
        return refusal
    return run.optimizer.run.record.release_steps, str(run.engine.assumptions)


def resumes(folder, order, other=False):
    """Saved in the middle of an epoch, loaded by a fresh engine, finished."""
    options = {"batch_order": SEEDED.get(order, order)}
    run, path = Training(**options), os.path.join(folder, f"{order}{other}{{}}.pt")
    stored = {"stays_private": True, "include_private_state": order == "reshuffled"}
    for index, batch in enumerate(run.loader):
        if index == 2:
            break
        run.step(batch)
        if index == 0 and other:
            run.engine.save_checkpoint(path=path.format("older"), **stored)
    run.engine.save_checkpoint(path=path.format(rank()), **stored)
    distributed.barrier()
    files = [os.path.exists(path.format(process)) for process in range(2)]
    again = Training(**options)
    chosen = path.format("older" if other and rank() == 1 else 0)
    load = again.engine.load_checkpoint
    refusal = error_of(lambda: load(path=chosen, discard_later_steps=True))
    return files, again.epochs(1).weights if refusal == "nothing" else refusal


def shards_the_model():
    from torch.distributed.fsdp import fully_shard

    return error_of(lambda: Training(wrapper=fully_shard))
