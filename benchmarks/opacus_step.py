"""Step time and peak memory of private training, ours and Opacus', beside plain SGD.

    python benchmarks/opacus_step.py [--device cpu|cuda] [--seconds 1.2] [--only TEXT]

One process trains the same model on the same batches with each optimizer in turn. Writes its part
of benchmarks/results/speed.md (with --device cuda: steps_cuda.md). What was measured is kept
in build/ until then, so that a second start goes on; of another code it is measured again. --only
prints some rows and writes nothing. "make gpu" measures a GPU, after the tests that need one.
"""

import argparse
import datetime
import functools
import gc
import hashlib
import json
import logging
import pathlib
import platform
import sys
import time
import warnings

import opacus
import torch
from opacus import PrivacyEngine
from sections import fill
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import DiceSGD, HiddenStatePrivacyEngine

ROOT = pathlib.Path(__file__).resolve().parents[1]
BATCHES = 8  # per epoch
SLICE = {"cpu": 0.005, "cuda": 0.02}  # seconds that one optimizer trains before the next one does

SGD, OPACUS, GHOST = "plain SGD", "Opacus", "Opacus ghost"
HEAD, DICE, COMPOSITION, STOCK = "head run", "DiceSGD", "composition", "stock + ours"
KINDS = (SGD, OPACUS, "Opacus again", GHOST, HEAD, DICE, COMPOSITION, STOCK)
LIGHT = (SGD, GHOST, HEAD, DICE)  # of a head: without a gradient of every record
BESIDE_SGD = (HEAD, DICE, COMPOSITION, GHOST, OPACUS)  # of a linear head
BESIDE_OPACUS = ("Opacus again", COMPOSITION, STOCK, DICE, GHOST)
LOOPS = (SGD, "Opacus Poisson", "head run, Poisson", "head run, reshuffled")  # loading included


class Normalised(nn.Module):
    """Features of norm 1."""

    def forward(self, features):
        return nn.functional.normalize(features)


def probe(features, classes):
    """A linear layer on features of norm 1."""
    return nn.Linear(features, classes), (features,), classes


def mlp(width):
    layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10)), (784,), 10


def cnn():
    """The network of Opacus' MNIST example."""
    convolutions = [
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(),
    ]  # fmt: skip
    model = nn.Sequential(*convolutions, nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, (1, 28, 28), 10


def frozen():
    """A linear layer behind a frozen network of 50 layers with batch normalisation."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(50)]
    backbone = nn.Sequential(*layers).requires_grad_(False).eval()
    return nn.Sequential(backbone, Normalised(), nn.Linear(64, 10)), (64,), 10


def is_head(name):
    """Whether a model is a linear head, with what is frozen before it."""
    return "probe" in name or "frozen" in name


CASES = {
    "linear probe 512 x 10": (lambda: probe(512, 10), (64, 256, 1024)),
    "linear probe 2048 x 100": (lambda: probe(2048, 100), (64, 256)),
    "MLP 784-128-128-10": (lambda: mlp(128), (64, 256)),
    "CNN (MNIST)": (cnn, (64, 256)),
    "50 frozen BatchNorm, 64 x 10": (frozen, (256,)),
}
CUDA_CASES = {
    "linear probe 512 x 10": (lambda: probe(512, 10), (256, 4096)),
    "linear probe 2048 x 1000": (lambda: probe(2048, 1000), (256, 1024, 4096)),
    "MLP 784-1024-1024-10": (lambda: mlp(1024), (256, 1024)),
    "CNN (MNIST)": (cnn, (256, 4096)),
    "50 frozen BatchNorm, 64 x 10": (frozen, (256, 4096)),
}


def make_data(shape, classes, batch_size, device):
    """Records of norm 1."""
    features = torch.randn(BATCHES * batch_size, *shape)
    features /= features.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
    labels = torch.arange(len(features)) % classes
    return TensorDataset(features.to(device), labels.to(device))


class Trainer:
    """One model with one optimizer, ready to take timed steps on batches of its own loader."""

    def __init__(self, kind, make_model, dataset, device, *, shuffles=False):
        torch.manual_seed(0)
        self.model = make_model()[0].to(device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.is_head = len(trained) == 2
        self.criterion = nn.CrossEntropyLoss()
        inner = torch.optim.SGD(trained, lr=0.1)
        loader = DataLoader(dataset, batch_size=len(dataset) // BATCHES, shuffle=shuffles)
        arguments = {
            "module": self.model, "optimizer": inner, "data_loader": loader,
            "noise_multiplier": 1.0, "max_grad_norm": 2.1,
        }  # fmt: skip
        if kind == SGD:
            self.module, self.optimizer, self.loader = self.model, inner, loader
            return
        is_ours = kind.startswith((HEAD, DICE, COMPOSITION))
        make = self._make_ours if is_ours else self._make_stock
        self.module, self.optimizer, *others, self.loader = make(kind, arguments)
        self.criterion = others[0] if others else self.criterion  # of ghost clipping

    def _make_stock(self, kind, arguments):
        if kind == GHOST:
            arguments |= {"grad_sample_mode": "ghost", "criterion": self.criterion}
        self.engine = PrivacyEngine(accountant="hidden_state" if kind == STOCK else "rdp")
        made = self.engine.make_private(**arguments, poisson_sampling="Poisson" in kind)
        if kind == STOCK:
            known = {"criterion": self.criterion, "feature_norm": 1.0} if self.is_head else {}
            self.engine.accountant.declare_run(**known)
        return made

    def _make_ours(self, kind, arguments):
        if self.is_head and kind != COMPOSITION:
            arguments |= {"criterion": self.criterion, "feature_norm": 1.0}
        if kind == DICE:
            arguments |= {"mechanism": DiceSGD(), "max_grad_norm": 0.5}
        order = kind.partition(", ")[2].lower() or "cyclic"
        return HiddenStatePrivacyEngine().make_private(**arguments, batch_order=order)

    def batches(self):
        while True:
            yield from self.loader

    def train(self, features, labels):
        self.optimizer.zero_grad()
        self.criterion(self.module(features), labels).backward()
        self.optimizer.step()


def seconds_of(trainer, batches, steps, device, *, overlaps=False):
    """Of `steps` steps, loading left out; on a GPU between events.

    Args:
        trainer: Takes them.
        batches: Given to it.
        steps: Their number.
        device: Of all of it.
        overlaps: Whether the host may run ahead of the device, as it does in a training loop; else
            it waits for the end of every step.
    """
    if device == "cuda":
        return seconds_between_events(trainer, batches, steps, overlaps)
    # On CPU one thread does all the work: what it was given is independent of who else ran.
    total = 0.0
    for _ in range(steps):
        features, labels = next(batches)
        start = time.thread_time()
        trainer.train(features, labels)
        total += time.thread_time() - start
    return total / steps


def seconds_between_events(trainer, batches, steps, overlaps):
    pairs = []
    for _ in range(steps):
        features, labels = next(batches)
        pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        if not overlaps:
            torch.cuda.synchronize()
        pairs[-1][0].record()
        trainer.train(features, labels)
        pairs[-1][1].record()
    torch.cuda.synchronize()
    return sum(start.elapsed_time(end) for start, end in pairs) / 1e3 / steps


def times_of(trainers, device, seconds, *, overlaps=False):
    """Per optimizer its times, one for each round; every round times all of them in turn."""
    sources = {kind: trainer.batches() for kind, trainer in trainers.items()}
    for kind, trainer in trainers.items():
        seconds_of(trainer, sources[kind], 6, device)  # warm up
    once = sum(seconds_of(t, sources[k], 2, device) for k, t in trainers.items())
    steps = max(1, int(SLICE[device] * len(trainers) / once))
    rounds = max(10, int(seconds / (once * steps)))
    times = {kind: [] for kind in trainers}
    kinds = list(trainers)
    for index in range(rounds):
        shift = index % len(kinds)
        for kind in kinds[shift:] + kinds[:shift]:
            one = seconds_of(trainers[kind], sources[kind], steps, device, overlaps=overlaps)
            times[kind].append(one)
    return times


def loop_times(name, batch_size, options):
    """Per loop its seconds for a batch, loading included."""
    make = cases(options.device)[name][0]
    _, shape, classes = make()
    dataset = make_data(shape, classes, batch_size, options.device)
    trainers = {kind: Trainer(kind, make, dataset, options.device, shuffles=True) for kind in LOOPS}
    times = {kind: [] for kind in trainers}
    stop = time.monotonic() + options.seconds / 2
    while time.monotonic() < stop or len(times[SGD]) < 5:
        for kind, trainer in trainers.items():
            times[kind].append(seconds_of_an_epoch(trainer, options.device) / BATCHES)
    return {kind: one[2:] for kind, one in times.items()}  # the first ones warm up


def seconds_of_an_epoch(trainer, device):
    clock = time.thread_time
    if device == "cuda":
        torch.cuda.synchronize()
        clock = time.perf_counter
    start = clock()
    for features, labels in trainer.loader:
        trainer.train(features, labels)
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def loop_rows(found):
    yield "| model | b | " + " | ".join(LOOPS) + " |"
    yield "|---" * (2 + len(LOOPS)) + "|"
    for (name, batch_size), times in found.items():
        base = times[SGD]
        cells = [f"{1e3 * min(base):.2f} ms", *(ratio(times[k], base) for k in LOOPS[1:])]
        yield "| " + " | ".join([name, str(batch_size), *cells]) + " |"


def peak_bytes(kind, make_model, dataset, device):
    """Most bytes of tensors alive at a time while it is made and takes three steps.

    The data set is left out, batches, activations and per-example gradients are not.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        three_steps(kind, make_model, dataset, device)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        three_steps(kind, make_model, dataset, device)
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    alive = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        alive += change
        peak = max(peak, alive)
    return peak


def three_steps(kind, make_model, dataset, device):
    trainer = Trainer(kind, make_model, dataset, device)
    batches = trainer.batches()
    for _ in range(3):
        trainer.train(*next(batches))


def measure(name, batch_size, options):
    """Per optimizer (times, peak bytes, times that overlap)."""
    make_model = cases(options.device)[name][0]
    _, shape, classes = make_model()
    dataset = make_data(shape, classes, batch_size, options.device)
    all_kinds = [kind for kind in KINDS if kind != HEAD or is_head(name)]
    for kinds in (all_kinds, [kind for kind in all_kinds if kind in LIGHT]):
        try:
            return measure_kinds(kinds, make_model, dataset, options)
        except torch.OutOfMemoryError:
            print(f"{name}, b = {batch_size}: {', '.join(kinds)} do not fit")
        gc.collect()
    return {}


def measure_kinds(kinds, make_model, dataset, options):
    device, overlapping = options.device, dict.fromkeys(kinds)
    trainers = {kind: Trainer(kind, make_model, dataset, device) for kind in kinds}
    times = times_of(trainers, device, options.seconds)
    if device == "cuda":
        overlapping = times_of(trainers, device, options.seconds, overlaps=True)
    del trainers
    return {
        kind: (times[kind], peak_bytes(kind, make_model, dataset, device), overlapping[kind])
        for kind in kinds
    }


def cases(device):
    return CUDA_CASES if device == "cuda" else CASES


def ratio(times, base):
    """Of the minima, as a cell."""
    return f"{min(times) / min(base):.2f}"


NOT_MEASURED = "-"


def time_rows(results, base, kinds, which=0):
    """The times at place `which` of what was measured, beside those of `base`."""
    yield f"| model | b | {base} | " + " | ".join(kinds) + " |"
    yield "|---" * (3 + len(kinds)) + "|"
    for (name, batch_size), table in results.items():
        if base == SGD and not is_head(name):
            continue
        own = table[base][which] if base in table else None
        cells = [
            ratio(table[kind][which], own) if own and kind in table else NOT_MEASURED
            for kind in kinds
        ]
        first = NOT_MEASURED if own is None else f"{1e3 * min(own):.2f} ms"
        yield "| " + " | ".join([name, str(batch_size), first, *cells]) + " |"


def memory_rows(results):
    kinds = (HEAD, DICE, COMPOSITION, GHOST)
    yield "| model | b | Opacus' peak | " + " | ".join(kinds) + " |"
    yield "|---" * (3 + len(kinds)) + "|"
    for (name, batch_size), table in results.items():
        own = table[OPACUS][1] if OPACUS in table else None
        cells = [
            f"{table[kind][1] / own:.3f}" if own and kind in table else NOT_MEASURED
            for kind in kinds
        ]
        first = NOT_MEASURED if own is None else f"{own / 2**20:.1f} MiB"
        yield "| " + " | ".join([name, str(batch_size), first, *cells]) + " |"


def overlap_lines(results):
    return [
        "The same where the host runs ahead of the device, as it does in a training loop that "
        "waits for nothing itself. The one transfer of our checks is a wait in every step:",
        "",
        *time_rows(results, SGD, BESIDE_SGD, which=2),
        "",
        *time_rows(results, OPACUS, BESIDE_OPACUS, which=2),
        "",
    ]


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, one thread"


def page(results, loops, options):
    is_cuda = options.device == "cuda"
    clock = "CUDA events" if is_cuda else "CPU time of the one thread"
    return [
        f"Written by `benchmarks/opacus_step.py` on {device_name(options.device)} "
        f"({options.device}); torch {torch.__version__}, opacus {opacus.__version__}, Python "
        f"{platform.python_version()}, {datetime.date.today().isoformat()}; float32.",
        "",
        INTRODUCTION,
        "### Time of a step",
        "",
        f"{clock}, ratio of the minima. Linear heads beside plain SGD:",
        "",
        *time_rows(results, SGD, BESIDE_SGD),
        "",
        "All models beside Opacus:",
        "",
        *time_rows(results, OPACUS, BESIDE_OPACUS),
        "",
        *(overlap_lines(results) if is_cuda else []),
        WHAT_A_STEP_COSTS,
        "### Time of a whole loop",
        "",
        ABOUT_LOOPS,
        *loop_rows(loops),
        "",
        "### Memory",
        "",
        ABOUT_MEMORY,
        *memory_rows(results),
    ]


INTRODUCTION = """\
A step is `zero_grad`, forward pass, loss, backward pass and `optimizer.step()`, without loading.
All optimizers take turns in one process on the same model and batches; only the ratios count.
"Opacus" and "Opacus again" are the same stock engine: the distance of their ratio from 1 is noise.
"Opacus ghost" clips in two backward passes and keeps no per-example gradients.

- "head run": `HiddenStatePrivacyEngine` with `criterion` and `feature_norm`, in a fixed order;
- "DiceSGD": the same with `mechanism=DiceSGD()`; of other models from Opacus' gradients;
- "composition": without `criterion` and `feature_norm`, from Opacus' gradients;
- "stock + ours": a stock `PrivacyEngine(accountant="hidden_state")`.
"""

WHAT_A_STEP_COSTS = """\
A head run makes one product of matrices less than SGD: the backward pass ends at the outputs, and
the gradient is that of the formula, clipped. The rest is noise and a few small operations of every
check, which show in steps of less than a millisecond. In large heads with small batches the noise
takes as long as a step of plain SGD for every 200,000 weights. DiceSGD sums what the clip cuts off
in one more pass. Composition of a linear head needs no per-example gradients either.
"""

ABOUT_LOOPS = """\
The probes with loading, per batch: plain SGD on `DataLoader(TensorDataset(...), shuffle=True)`,
Opacus' engine and head runs with Poisson batches, and reshuffled. torch collates record by record;
our loader reads a batch of a `TensorDataset` at once.
"""

ABOUT_MEMORY = """\
Peak of the tensors' memory, with model, batch, activations and per-example gradients, against
Opacus' engine. The first step is among them, which looks at whether records act on each other.
DiceSGD keeps the error, and from the clip to the noise the rest of the batch.
"""


class Kept:
    """What was measured, in build/: a second start goes on. Of other code it is forgotten."""

    def __init__(self, options):
        self._path = ROOT / "build" / f"opacus_step_{options.device}.json"
        self._of = [code(), options.seconds, torch.__version__, opacus.__version__]
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._found = known["found"] if known.get("of") == self._of else {}

    def get(self, name, measure):
        """What is called `name`; measured if it is not known."""
        if name not in self._found:
            start = time.monotonic()
            self._found[name] = measure()
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(json.dumps({"of": self._of, "found": self._found}))
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        return self._found[name]

    def forget(self):
        self._path.unlink()


def code():
    """Changes with every line of what is measured."""
    folders = ROOT / "hidden_state_accountants", ROOT / "adapters"
    files = [pathlib.Path(__file__), *(p for f in folders for p in sorted(f.rglob("*.py")))]
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()


def all_cases(options):
    for name, (_, batch_sizes) in cases(options.device).items():
        for batch_size in batch_sizes:
            if options.only in name:
                yield name, batch_size


def write_page(options):
    kept, results, loops = Kept(options), {}, {}
    for name, size in all_cases(options):
        measured = functools.partial(measure, name, size, options)
        results[name, size] = kept.get(f"steps of {name}, b = {size}", measured)
    for name, size in all_cases(options):
        if "probe" in name:
            measured = functools.partial(loop_times, name, size, options)
            loops[name, size] = kept.get(f"loops of {name}, b = {size}", measured)
    text = "\n".join(page(results, loops, options))
    if options.device == "cpu":
        fill(ROOT / "benchmarks" / "results" / "speed.md", "benchmarks/opacus_step.py", text)
    else:
        title = "# Time of a step on a GPU\n\n"
        path = ROOT / "benchmarks" / "results" / f"steps_{options.device}.md"
        path.write_text(f"{title}{text}\n", "utf-8")
    kept.forget()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--seconds", type=float, default=1.2, help="for each model, batch size and base"
    )
    parser.add_argument("--only", default="", help="part of a model's name; prints only")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus: secure mode is off
    logging.disable(logging.WARNING)  # no contraction
    torch.set_num_threads(1)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("Expected a CUDA device with --device cuda, got none that torch can use.")
    if not options.only:
        write_page(options)
        return
    for name, size in all_cases(options):
        found = {(name, size): measure(name, size, options)}
        rows = [*time_rows(found, OPACUS, BESIDE_OPACUS), *memory_rows(found)]
        if is_head(name):
            rows = [*time_rows(found, SGD, BESIDE_SGD), *rows]
        print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
