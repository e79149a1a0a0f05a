"""Every mutation still finds its passage; `make test-mutations` then runs the tests on each."""

import importlib
import pathlib
import re

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def check():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        yield importlib.import_module("check_mutations")


def test_every_mutation_applies_and_is_another_program(check):
    mutants = set()
    for mutation in check.MUTATIONS:
        source = (ROOT / mutation.path).read_text(encoding="utf-8")
        mutant = check.mutated(mutation, source)
        compile(mutant, mutation.path, "exec")
        assert mutant != source, mutation.name
        mutants.add((mutation.path, mutant))
        file, *names = mutation.test.split("::")
        tests = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert all(re.search(rf"(def|class) {name}\b", tests) for name in names), mutation.name
    names = [mutation.name for mutation in check.MUTATIONS]
    assert len(mutants) == len(set(names)) == len(names) >= 20


@pytest.mark.parametrize("source", ["", "{0} {0}"])
def test_a_passage_that_is_gone_or_repeated_is_an_error(check, source):
    mutation = check.MUTATIONS[0]
    with pytest.raises(check.StaleMutationError, match=f"{mutation.name} no longer applies"):
        check.mutated(mutation, source.format(mutation.old))
