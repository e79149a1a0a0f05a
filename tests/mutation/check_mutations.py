"""Puts one plausible mistake at a time into the package and checks that its test notices it.

    python tests/mutation/check_mutations.py [--list] [--only NAME ...] [--workers 2]

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
import time
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
    command = [sys.executable, "-m", "pytest", *options, "-n", str(workers), *tests]
    try:
        result = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            timeout=None if workers else _SECONDS,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_SECONDS} s"
    if result.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", result.stdout, re.MULTILINE)
    if result.returncode not in (1, 2) or found is None:
        raise RuntimeError(f"pytest did not run the tests:\n{result.stdout}")
    return found[1]


def noticed_by(copy: pathlib.Path, mutation: Mutation) -> str | None:
    """The test that notices the mutation, None if it survives."""
    path = copy / mutation.path
    source = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutation, source), encoding="utf-8")
    try:
        return failing_test(copy, [f"tests/{mutation.test}"])
    finally:
        path.write_text(source, encoding="utf-8")


def verdicts(
    mutations: list[Mutation], copies: list[pathlib.Path]
) -> Iterator[tuple[Mutation, str | None, float]]:
    """Mutation, the test that notices it or None, seconds; as they come, one for each copy."""
    free: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def verdict(mutation: Mutation) -> tuple[Mutation, str | None, float]:
        copy, start = free.get(), time.monotonic()
        try:
            return mutation, noticed_by(copy, mutation), time.monotonic() - start
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        for ended in as_completed([pool.submit(verdict, mutation) for mutation in mutations]):
            yield ended.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the names of the mutations")
    parser.add_argument("--only", metavar="NAME", action="append", help="may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    arguments = parser.parse_args()
    if arguments.list:
        print(*(mutation.name for mutation in MUTATIONS), sep="\n")
        return 0
    unknown = set(arguments.only or ()) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}; see --list")
    chosen = [m for m in MUTATIONS if not arguments.only or m.name in arguments.only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [pathlib.Path(folder).resolve() / str(k) for k in range(arguments.workers)]
        for copy in copies:
            copy_tracked_files(copy)
        for mutation in chosen:  # fail before the long part, not in the middle of it
            mutated(mutation, (ROOT / mutation.path).read_text(encoding="utf-8"))
        print("without any mutation ...", end=" ", flush=True)
        start = time.monotonic()
        tests = sorted({f"tests/{mutation.test}" for mutation in chosen})
        if failed := failing_test(copies[0], tests, workers=arguments.workers):
            print(f"{failed} fails: nothing can be said about mutants", flush=True)
            return 1
        print(f"all their tests pass, {time.monotonic() - start:.0f} s", flush=True)
        survivors = []
        for number, (mutation, test, seconds) in enumerate(verdicts(chosen, copies), start=1):
            if test is None:
                survivors.append(f"{mutation.name}: not by tests/{mutation.test}")
            verdict = "SURVIVES" if test is None else f"noticed by {test}"
            print(
                f"[{number}/{len(chosen)}] {mutation.name}: {verdict}, {seconds:.0f} s", flush=True
            )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants noticed")
    if survivors:
        print("not noticed:", *survivors, sep="\n  ")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
