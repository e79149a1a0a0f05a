"""Epsilon of one linear probe under every batch order, for 1 to 1,000 epochs.

    python benchmarks/batch_orders.py

Writes its part of docs/benchmarks/speed.md, and docs/benchmarks/batch_orders.png.
"""

import pathlib
import sys

import attrs
from dp_accounting import pld
from sections import fill

import hidden_state_accountants as hsa
from hidden_state_accountants.figures import fixed_up

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
EPOCHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
DELTA = 1e-5
RUN = hsa.LastIterateDpEvent(
    noise_multiplier=2.0,
    learning_rate=0.5,
    clip_norm=1.4143,  # just above the longest gradient: clipping never acts
    batch_size=500,
    dataset_size=50_000,
    num_steps=100,
    batch_order="cyclic",
    loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0),
    weight_decay=0.1,
)
ROWS = {
    "cyclic, public order": "cyclic",
    "shuffled once, secret": "shuffled_once",
    "reshuffled, secret": "reshuffled",
    "without replacement": "without_replacement",
    "balls in bins, one secret draw": "balls_in_bins",
    "balls in bins, redrawn": "balls_in_bins_redrawn",
    "Poisson": "poisson",
}
BASELINE = "Poisson, every iterate released (PLD)"


def measure():
    """Per row its epsilons, one for each number of epochs."""
    table = {name: [] for name in [*ROWS, BASELINE]}
    for epochs in EPOCHS:
        for name, order in ROWS.items():
            event = attrs.evolve(RUN, batch_order=order, num_steps=100 * epochs)
            epsilon = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
            table[name].append(epsilon)
            print(f"{epochs} epochs, {name}: {fixed_up(epsilon, 4)}", file=sys.stderr)
        event = attrs.evolve(RUN, batch_order="poisson", num_steps=100 * epochs)
        epsilon = pld.PLDAccountant().compose(event.as_composition()).get_epsilon(DELTA)
        table[BASELINE].append(epsilon)
    return table


def rows(table):
    """A markdown table with one column per number of epochs."""
    yield "| batches | " + " | ".join(map(str, EPOCHS)) + " |"
    yield "|---" * (len(EPOCHS) + 1) + "|"
    for name, cells in table.items():
        yield f"| {name} | " + " | ".join(fixed_up(epsilon, 3) for epsilon in cells) + " |"


def plot(table):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(10, 4.8), layout="constrained")
    for rank, (name, cells) in enumerate(table.items()):
        # Lines that lie on each other get narrower, so that all are seen.
        style = {"marker": "o", "linewidth": 8 - rank, "markersize": 10 - rank}
        if name == BASELINE:
            style = {"linestyle": "--", "color": "black"}
        label = f"{name}: {fixed_up(cells[-1], 3)}"
        axes.plot(EPOCHS, cells, label=label, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("epochs")
    axes.set_ylabel(f"epsilon of the released model (delta = {DELTA:g})")
    axes.set_title("A linear probe at noise multiplier 2: only the last iterate is released")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.set_yticks([0.2, 0.5, 1, 2, 5])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.legend(title=f"after {EPOCHS[-1]:,} epochs", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(FOLDER / "batch_orders.png", dpi=120)


def main():
    table = measure()
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [
        "Written by `benchmarks/batch_orders.py`. A softmax probe on features of norm 1 "
        "(n = 50,000, b = 500, learning rate 0.5, clip norm 1.4143, weight decay 0.1, noise "
        f"multiplier 2), REPLACE_SPECIAL, delta = {DELTA:g}. All rows but the last: "
        "`LastIterateAccountant`, only the last iterate is released. The last row is "
        "dp-accounting's PLD of ordinary DP-SGD with the same noise.",
        "",
        "![epsilon against epochs](batch_orders.png)",
        "",
        "Epsilon, by the number of epochs:",
        "",
        *rows(table),
        "",
        "A public order pays for the record being in the last batch, a secret one for the average "
        "position, fresh batches for the sampling probability. A secret order is "
        "secret only if neither it nor its seed is ever published "
        "([which order for which run](../theory/data_order.md)).",
    ]
    fill(FOLDER / "speed.md", "benchmarks/batch_orders.py", "\n".join(lines))
    plot(table)


if __name__ == "__main__":
    main()
