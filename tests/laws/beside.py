"""Epsilon of random runs beside that of another commit: the worst ratios of each batch order.

    python tests/laws/beside.py [--runs 1000] [--against REVISION] [--seed 0]

A ratio is what is reported now over what was reported there. Above 1 a figure got worse; below 1 it
got smaller, which needs a proof (CONTRIBUTING.md). Exit status 1 if a run has no figure any more.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants.events.batch_order import unmet_relation

ROOT = pathlib.Path(__file__).resolve().parents[2]
DELTAS = (1e-3, 1e-5, 1e-8)


def random_run(rng: random.Random) -> tuple[hsa.LastIterateDpEvent, NeighboringRelation]:
    """A run of any order and class of losses, and a relation that makes sense with it."""
    order = rng.choice(list(hsa.BatchOrder))
    relation = rng.choice([r for r in NeighboringRelation if unmet_relation(order, r) is None])
    batch, period = rng.choice([1, 8, 250]), rng.choice([2, 10, 100])
    if order is hsa.BatchOrder.FULL:
        period = 1
    steps = max(1, round(math.exp(rng.uniform(0, math.log(3000)))))
    rate, clip = math.exp(rng.uniform(-3, 1)), math.exp(rng.uniform(-1, 1))
    smoothness = math.exp(rng.uniform(-2, 1))
    losses = [
        hsa.LossGeometry.convex(smoothness),
        hsa.LossGeometry.convex(smoothness, clip / 2),
        hsa.LossGeometry.generalized_linear(smoothness),
        hsa.LossGeometry.strongly_convex(smoothness, smoothness / 4, clip / 2),
        hsa.LossGeometry.softmax_cross_entropy(1.0),
        hsa.LossGeometry.hoelder(smoothness, 0.5),
        None,
    ]
    changes = {}
    if rng.random() < 0.3:
        noise = rate / batch  # of a step, in units of the clip norm
        changes["domain_diameter"] = clip * noise * math.exp(rng.uniform(0, 4))
    if rng.random() < 0.2:
        changes["release_steps"] = tuple(rng.sample(range(1, steps + 1), min(steps, 2)))
    if order is hsa.BatchOrder.POISSON and rng.random() < 0.2:
        changes["sampling_rate"] = rng.uniform(0.2, 1.0) / period
    if rng.random() < 0.3 and steps > 1:
        changes["learning_rate"] = [rate] * (steps // 2) + [rate / 3] * (steps - steps // 2)
    decay = rng.choice([0.0, 0.02, 0.3]) / rate
    arguments = {"learning_rate": rate, "weight_decay": decay, **changes}
    event = hsa.LastIterateDpEvent(
        noise_multiplier=math.exp(rng.uniform(-0.5, 2)), clip_norm=clip, batch_size=batch,
        dataset_size=batch * period, num_steps=steps, batch_order=order, loss=rng.choice(losses),
        **arguments,
    )  # fmt: skip
    return event, relation


def figures() -> None:
    """Answers one line for each line of the standard input: epsilons, or why there are none."""
    for line in sys.stdin:
        event, relation = json.loads(line)
        try:
            run = hsa.LastIterateDpEvent.from_dict(event)
            accountant = hsa.LastIterateAccountant(relation).compose(run)
            found = [accountant.get_epsilon(delta) for delta in DELTAS]
        except Exception as error:  # another commit may refuse, or not know, what this one has
            found = f"{type(error).__name__}: {error}"
        print(json.dumps(found), flush=True)


def asked_of(tree: pathlib.Path, questions: pathlib.Path, answers: pathlib.Path) -> Any:
    """A process that answers with the package of a tree.

    It reads and writes files: pipes that are full would let it and this process wait for each
    other.
    """
    with questions.open() as source, answers.open("w") as sink:
        return subprocess.Popen(
            [sys.executable, __file__, "--figures"], cwd=tree, stdin=source, stdout=sink,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--against", help="by default the newest tag; without tags the last commit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.figures:
        figures()
        return 0
    revision = arguments.against or git("describe", "--tags", "--abbrev=0") or "HEAD"
    rng = random.Random(arguments.seed)
    runs = [random_run(rng) for _ in range(arguments.runs)]
    with tempfile.TemporaryDirectory(prefix="earlier-") as name:
        folder = pathlib.Path(name)
        archive = subprocess.run(
            ["git", "archive", revision, "hidden_state_accountants"],
            cwd=ROOT, check=True, capture_output=True,
        ).stdout  # fmt: skip
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        questions, files = folder / "questions", [folder / "now", folder / "then"]
        questions.write_text("".join(json.dumps([e.to_dict(), r.name]) + "\n" for e, r in runs))
        trees = (ROOT, folder)
        processes = [asked_of(*each) for each in zip(trees, [questions] * 2, files, strict=True)]
        while any(process.poll() is None for process in processes):
            time.sleep(5)
            done = [len(file.read_text().splitlines()) for file in files]
            print(f"{min(done)} of {len(runs)} runs", file=sys.stderr, flush=True)
        answers = [map(json.loads, file.read_text().splitlines()) for file in files]
        return report(revision, zip(runs, *answers, strict=True))


def report(revision: str, answers) -> int:
    """Prints the ratios by order and delta, with the runs of the largest and the smallest ones."""
    ratios, lost, known = collections.defaultdict(list), [], 0
    for (event, relation), now, then in answers:
        if isinstance(then, str) or isinstance(now, str):
            lost += [(event, relation, now)] if not isinstance(then, str) else []
            continue
        known += 1
        for delta, one, other in zip(DELTAS, now, then, strict=True):
            ratio = 1.0 if one == other else one / other if other else math.inf
            ratios[event.batch_order.value, -delta].append((ratio, relation.name, event))
    print(f"{known} runs with figures, beside {revision}; reported now over reported there")
    for (order, delta), rows in sorted(ratios.items()):
        rows.sort(key=lambda row: row[0])
        found, name = [ratio for ratio, *_ in rows], f"{order} at delta {-delta:g}"
        middle = found[len(found) // 2]
        print(f"{name}: {found[0]:.6f} to {found[-1]:.6f}, median {middle:.6f}")
        for ratio, relation, event in (rows[0], rows[-1]):
            if not 0.999 < ratio < 1.001:
                print(f"    {ratio:.6f}: {relation}, {event!r}")
    for event, relation, why in lost:
        print(f"no figure any more: {relation.name}, {event!r}: {why}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
