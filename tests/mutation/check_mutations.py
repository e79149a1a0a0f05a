"""Puts one plausible mistake at a time into the engine and checks that a test notices it.

    python tests/mutation/check_mutations.py [--list] [--only NAME ...]

The mutants live in a copy of the tracked files, in a temporary folder; the checkout is not touched.
A mutant first meets the test file that is most likely to notice it, then the whole selection.
Exit status 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from mutation import Mutation
from mutations import MUTATIONS

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "hidden_state_accountants"
SELECTION = ("core", "theorems", "laws", "oracles")
# The README's examples need a training framework, the table of docs/tightness.md repeats figures.
LEFT_OUT = ("tests/core/test_readme.py", "tests/oracles/test_tightness.py")
_LIMIT = 3  # times what the tests take without a mutation: a mutant that loops is noticed as well

# Loaded by pytest: the tests must import the copy, not the checkout that is installed.
_PLUGIN = f"""\
import pathlib

import {PACKAGE}

HERE = pathlib.Path(__file__).resolve().parent
FOUND = pathlib.Path({PACKAGE}.__file__).resolve()
assert FOUND.is_relative_to(HERE), f"{{FOUND}} is not the copy in {{HERE}}"
"""


class StaleMutationError(Exception):
    """The passage that a mutation replaces is gone, or not unique."""


def mutated(mutation: Mutation, source: str) -> str:
    """The source with the mistake in it."""
    count = source.count(mutation.old)
    if count != 1:
        raise StaleMutationError(
            f"mutation {mutation.name} no longer applies: expected its passage once in "
            f"{PACKAGE}/{mutation.path}, found it {count} times"
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


def failing_test(copy: pathlib.Path, tests: list[str], seconds: float | None = None) -> str | None:
    """The first test that fails in the copy, or does not end; None if all pass."""
    environment = os.environ | {
        "CI": "true",  # hypothesis: the same examples every time
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (copy, copy / "adapters"))),
        "PYTHONDONTWRITEBYTECODE": "1",  # a mutant may have the size and the time of another one
    }
    options = "-x -q -rfE --color=no --tb=no -p no:cacheprovider -p imports_the_copy".split()
    options += [f"--ignore={name}" for name in LEFT_OUT]
    command = [sys.executable, "-m", "pytest", *options, "-m", "not slow", *tests]
    try:
        result = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            timeout=seconds,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {seconds:.0f} s"
    if result.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", result.stdout, re.MULTILINE)
    if result.returncode not in (1, 2) or found is None:
        raise RuntimeError(f"pytest did not run the tests:\n{result.stdout}")
    return found[1]


def noticed_by(copy: pathlib.Path, mutation: Mutation, seconds: float) -> str | None:
    """The test that notices the mutation, None if it survives."""
    path = copy / PACKAGE / mutation.path
    source = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutation, source), encoding="utf-8")
    try:
        hint = [f"tests/{mutation.hint}"]
        return failing_test(copy, hint, seconds) or failing_test(copy, selection(), seconds)
    finally:
        path.write_text(source, encoding="utf-8")


def selection() -> list[str]:
    return [f"tests/{name}" for name in SELECTION]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the names of the mutations")
    parser.add_argument("--only", metavar="NAME", action="append", help="may be repeated")
    arguments = parser.parse_args()
    if arguments.list:
        print(*(mutation.name for mutation in MUTATIONS), sep="\n")
        return 0
    unknown = set(arguments.only or ()) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}; see --list")
    chosen = [m for m in MUTATIONS if not arguments.only or m.name in arguments.only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = pathlib.Path(folder).resolve()
        copy_tracked_files(copy)
        for mutation in chosen:  # fail before the long part, not in the middle of it
            mutated(mutation, (copy / PACKAGE / mutation.path).read_text(encoding="utf-8"))
        print("without any mutation ...", end=" ", flush=True)
        start = time.monotonic()
        failed = failing_test(copy, selection())
        if failed is not None:
            print(f"{failed} fails: nothing can be said about mutants", flush=True)
            return 1
        duration = time.monotonic() - start
        print(f"all tests pass, {duration:.0f} s", flush=True)
        survivors = []
        for number, mutation in enumerate(chosen, start=1):
            print(f"[{number}/{len(chosen)}] {mutation.name} ...", end=" ", flush=True)
            start = time.monotonic()
            test = noticed_by(copy, mutation, _LIMIT * duration)
            if test is None:
                survivors.append(mutation.name)
            verdict = "SURVIVES" if test is None else f"noticed by {test}"
            print(f"{verdict}, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants noticed")
    if survivors:
        print("no test notices:", *survivors, sep="\n  ")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
