"""Shared test settings; helper modules live in tests/reference, exact oracles in tests/oracles."""

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

for folder in ("misuse", "oracles", "reference", "../examples/papers"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=12)
settings.register_profile("dev", deadline=None, max_examples=12)
settings.register_profile("exhaustive", deadline=None, derandomize="CI" in os.environ)
# For "make test-deep": examples, in hundreds, where "ci" has one hundred.
deep_examples = 100 * int(os.environ.get("DEEP_EXAMPLES", "18"))
settings.register_profile("deep", deadline=None, max_examples=deep_examples)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also the tests that are marked so, and a hundred examples of each law",
    )


def pytest_configure(config):
    if config.getoption("exhaustive") and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("exhaustive")


def pytest_collection_modifyitems(config, items):
    """Leaves out what is marked exhaustive, unless it is asked for."""
    if config.getoption("exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.fixture(scope="session")
def usual(request):
    """Of two numbers of cases, the first in "make test" and the second in "make test-all"."""
    return lambda few, many: many if request.config.getoption("exhaustive") else few


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """In continuous integration a test draws the same numbers in every run and after any other.

    Secret batches and noise ask the operating system for numbers. Of thousands of tests one a day
    would meet an empty batch or a value that looks like another, and stop what has nothing to do
    with it. What the operating system says is stood in for by a stream that begins with the name of
    the test; programs that a test starts and processes that it forks ask the operating system.
    Elsewhere every run has numbers of its own, which find what one stream never meets.
    """
    if not os.environ.get("CI"):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        asked, own, stream = os.urandom, os.getpid(), random.Random(item.nodeid)

        def urandom(size):
            return stream.randbytes(size) if os.getpid() == own else asked(size)

        patch.setattr(os, "urandom", urandom)
        patch.setattr(random, "_urandom", urandom)  # what `secrets` and unseeded generators read
        seed_global_generators(stream)
        return (yield)


def seed_global_generators(stream):
    """Of Python, NumPy and, where they are loaded, torch and TensorFlow."""
    random.seed(stream.getrandbits(64))
    np.random.seed(stream.getrandbits(32))  # noqa: NPY002
    if torch := sys.modules.get("torch"):
        torch.manual_seed(stream.getrandbits(63))
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(stream.getrandbits(31))
