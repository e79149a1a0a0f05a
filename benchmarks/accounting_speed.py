"""How long epsilon takes, and how much memory: every batch order, beside the stock accountants.

    python benchmarks/accounting_speed.py

Writes its part of benchmarks/results/speed.md. Every figure is taken in a process of its own, a
copy of one that has imported all and computed other runs; it may use `LIMIT` seconds of a core and
`MEMORY` gigabytes.
"""

import multiprocessing
import pathlib
import resource
import sys
import time

import attrs
import numpy as np
from dp_accounting import NeighboringRelation, pld, rdp
from sections import fill

import hidden_state_accountants as hsa

PAGE = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "speed.md"
STEPS = (200, 20_000, 1_000_000, 100_000_000)
LIMIT = 30
MEMORY = 4
DELTA = 1e-5
RUN = hsa.LastIterateDpEvent(
    noise_multiplier=2.0,
    learning_rate=0.5,
    clip_norm=1.0,
    batch_size=500,
    dataset_size=50_000,
    num_steps=100,
    batch_order="cyclic",
    loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0),
    weight_decay=0.1,
)
SAMPLED = ("without_replacement", "poisson")
BINS = ("balls_in_bins", "balls_in_bins_redrawn")
ORDERS = ("full", "cyclic", "shuffled_once", "reshuffled", *BINS, *SAMPLED)
CONSTANT, SCHEDULE, DOMAIN = "constant", "cosine schedule", "projected"
LARGE = "n = 1e9, b = 1,000"  # a million batches
CALIBRATED = "calibrate_noise"
QUIET = "noise multiplier 0.8"  # Theorems E and F are asked
KINDS = (CONSTANT, SCHEDULE, DOMAIN, LARGE, CALIBRATED, QUIET)
MOST_STEPS = {SCHEDULE: 1_000_000, CALIBRATED: 20_000}  # a schedule is a list
RELEASED = "every iterate released"
STOCK = {
    RELEASED: "poisson",
    "dp-accounting RDP": "poisson",
    "dp-accounting PLD": "poisson",
    "Opacus PRV": "poisson",
    "dp-accounting RDP, fixed size": "without_replacement",
}


def make_run(order, kind, steps):
    size = RUN.dataset_size if order == "full" else RUN.batch_size
    run = attrs.evolve(RUN, num_steps=steps, batch_order=order, batch_size=size)
    if kind == LARGE:
        size = 10**9 if order == "full" else 1000
        run = attrs.evolve(run, dataset_size=10**9, batch_size=size)
    if kind == DOMAIN:
        run = attrs.evolve(run, domain_diameter=1.0)
    if kind == QUIET:
        run = attrs.evolve(run, noise_multiplier=0.8)
    if kind == SCHEDULE:
        rates = 0.25 * (1 + np.cos(np.pi * np.arange(steps) / steps)) + 0.005
        run = attrs.evolve(run, learning_rate=rates)
    return run


def stock_epsilon(name, run):
    """Of the same steps with every iterate released."""
    if name == RELEASED:
        accountant = hsa.LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
        return accountant.compose(run.as_composition()).get_epsilon(DELTA)
    if name == "Opacus PRV":
        from opacus.accountants import PRVAccountant

        accountant = PRVAccountant()
        accountant.history = [(run.noise_multiplier, run.sampling_probability, run.num_steps)]
        return accountant.get_epsilon(delta=DELTA)
    if name == "dp-accounting PLD":
        return pld.PLDAccountant().compose(run.as_composition()).get_epsilon(DELTA)
    if run.batch_order is hsa.BatchOrder.POISSON:
        return rdp.RdpAccountant().compose(run.as_composition()).get_epsilon(DELTA)
    relation = NeighboringRelation.REPLACE_ONE
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    return accountant.compose(run.as_composition(relation)).get_epsilon(DELTA)


def measure_here(name, kind, steps, sender):
    """Sends seconds, and megabytes beside those of the imports."""
    order = STOCK.get(name, name)
    if name == "Opacus PRV":
        import opacus.accountants  # noqa: F401  not counted

    def epsilon(run):
        if name in STOCK:
            return stock_epsilon(name, run)
        if kind == CALIBRATED:
            return hsa.calibrate_noise(1.0, DELTA, run)
        return hsa.LastIterateAccountant().compose(run).get_epsilon(DELTA)

    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT + 5, LIMIT + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY * 2**30, MEMORY * 2**30))
    run = make_run(order, kind, steps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()  # other work on the machine does not count
    epsilon(run)
    seconds = time.process_time() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    sender.send(f"{seconds:.2f} s, {max(0.0, peak):.0f} MB")


def measure(*case):
    """What `measure_here` sends from a process of its own; why there is nothing, if so."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def in_a_process():
        try:
            measure_here(*case, sender)
        except MemoryError:
            sender.send(f"over {MEMORY} GB")

    process = context.Process(target=in_a_process)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return f"over {LIMIT} s" if process.exitcode < 0 else "error"


def lines():
    yield (
        "Written by `benchmarks/accounting_speed.py` on one core; compare within the table only. A "
        "softmax probe (n = 50,000, b = 500, learning rate 0.5, clip norm 1, weight decay 0.1, "
        f"noise multiplier 2), delta = {DELTA:g}: seconds for compose and get_epsilon, and the "
        "memory that they need. The cosine schedule has another learning rate in every step; the "
        "projected run stays in a ball of diameter 1; `calibrate_noise` finds the noise multiplier "
        "for an epsilon of 1. The last rows account for the same steps with every iterate "
        "released: first ours, then the stock accountants. A dash: not measured."
    )
    yield ""
    yield "| batches | run | " + " | ".join(f"{steps:,} steps" for steps in STEPS) + " |"
    yield "|---" * (len(STEPS) + 2) + "|"
    rows = [(o, kind) for kind in KINDS for o in (SAMPLED if kind == QUIET else ORDERS)]
    for name, kind in [*rows, *((name, CONSTANT) for name in STOCK)]:
        cells = []
        for steps in STEPS:
            is_listed = steps <= MOST_STEPS.get(kind, STEPS[-1])
            cells.append(measure(name, kind, steps) if is_listed else "-")
            print(name, kind, steps, cells[-1], file=sys.stderr)
        label = f"{name} ({STOCK[name]})" if name in STOCK else name
        yield f"| {label} | {kind} | " + " | ".join(cells) + " |"


def main():
    for order in ORDERS:  # loads what is loaded late
        run = attrs.evolve(make_run(order, CONSTANT, 2), noise_multiplier=3.3)
        hsa.calibrate_noise(1.0, DELTA, run)
    for name in STOCK:
        if name != "Opacus PRV":
            stock_epsilon(name, run)
    fill(PAGE, "benchmarks/accounting_speed.py", "\n".join(lines()))


if __name__ == "__main__":
    main()
