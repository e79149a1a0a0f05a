"""Puts one plausible mistake at a time into the package and checks that its test notices it.

    python tests/mutation/check_mutations.py [--only NAME ...] [--workers 2]

The mistakes are those of mutations.txt. The mutants live in copies of the tracked files, in a
temporary folder; the checkout is not touched.
Exit status 1 if a mutant survives the test that its entry names.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = "hidden_state_accountants"
_SECONDS = 600  # several times what the slowest file takes: a mutant that loops is noticed as well

# Loaded by pytest: the tests must import the copy, not the checkout that is installed.
_PLUGIN = f"""\
import pathlib

import {PACKAGE}

HERE = pathlib.Path(__file__).resolve().parent
FOUND = pathlib.Path({PACKAGE}.__file__).resolve()
assert FOUND.is_relative_to(HERE), f"{{FOUND}} is not the copy in {{HERE}}"
"""


class Mutation(NamedTuple):
    """One mistake: what is wrong, in which file, and the test that notices it."""

    name: str
    path: str
    old: str
    new: str
    test: str


def read_mutations(text: str) -> Iterator[Mutation]:
    """The mistakes of a table: files, below them their tests, below these a line for each."""
    path = test = ""
    for line in text.splitlines():
        if line.startswith("    "):
            name, _, passages = line[4:].replace(r"\n", "\n").partition(": ")
            old, _, new = passages.partition(" =>")
            yield Mutation(name, path, old, new[1:], test)
        elif line.startswith("  "):
            test = line.strip()
        elif not line.startswith("#"):
            path = line


MUTATIONS = tuple(read_mutations((HERE / "mutations.txt").read_text(encoding="utf-8")))


class StaleMutationError(Exception):
    """The passage that a mutation replaces is gone, or not unique."""


def mutated(mutation: Mutation, source: str) -> str:
    """The source with the mistake in it."""
    count = source.count(mutation.old)
    if count != 1:
        raise StaleMutationError(
            f"mutation {mutation.name} no longer applies: expected its passage once in "
            f"{mutation.path}, found it {count} times"
        )
    return source.replace(mutation.old, mutation.new)


def copy_tracked_files(target: pathlib.Path) -> None:
    """The files of the checkout that git tracks, as they are in the working tree."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    (target / "imports_the_copy.py").write_text(_PLUGIN)


def failing_test(copy: pathlib.Path, tests: list[str], *, workers: int = 0) -> str | None:
    """The first test that fails in the copy, or does not end; None if all pass."""
    environment = os.environ | {
        "CI": "true",  # hypothesis: the same examples every time
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(map(str, (copy, copy / "adapters"))),
        "PYTHONDONTWRITEBYTECODE": "1",  # a mutant may have the size and the time of another one
    }
    options = "-x -q -rfE --color=no --tb=no -p no:cacheprovider -p imports_the_copy".split()
    try:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-n", str(workers), *tests],
            cwd=copy, env=environment, timeout=None if workers else _SECONDS, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end after {_SECONDS} s"
    if result.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", result.stdout, re.MULTILINE)
    if result.returncode not in (1, 2) or found is None:
        raise RuntimeError(f"pytest did not run the tests:\n{result.stdout}")
    return found[1]


def noticed_by(copies: queue.SimpleQueue[pathlib.Path], mutation: Mutation) -> str | None:
    """The test that notices the mutation in a free copy, None if it survives."""
    copy = copies.get()
    path = copy / mutation.path
    source = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutation, source), encoding="utf-8")
    try:
        return failing_test(copy, [f"tests/{mutation.test}"])
    finally:
        path.write_text(source, encoding="utf-8")
        copies.put(copy)


def survivors_of(chosen: list[Mutation], folder: pathlib.Path, workers: int) -> int:
    """How many survive; prints what happens to each."""
    copies: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
    for number in range(workers):
        copy_tracked_files(folder / str(number))
        copies.put(folder / str(number))
    tests = sorted({f"tests/{mutation.test}" for mutation in chosen})
    if failed := failing_test(folder / "0", tests, workers=workers):
        raise SystemExit(f"{failed} fails without a mutation: nothing can be said about mutants")
    survivors = 0
    with ThreadPoolExecutor(workers) as pool:
        runs = {pool.submit(noticed_by, copies, mutation): mutation for mutation in chosen}
        for number, run in enumerate(as_completed(runs), start=1):
            mutation, test = runs[run], run.result()
            survivors += test is None
            verdict = f"noticed by {test}" if test else f"SURVIVES tests/{mutation.test}"
            print(f"[{number}/{len(chosen)}] {mutation.name}: {verdict}", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if not arguments.only or m.name in arguments.only]
    if unknown := set(arguments.only or ()) - {mutation.name for mutation in chosen}:
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}")
    for mutation in chosen:  # fail before the long part, not in the middle of it
        mutated(mutation, (ROOT / mutation.path).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        survivors = survivors_of(chosen, pathlib.Path(folder).resolve(), arguments.workers)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
