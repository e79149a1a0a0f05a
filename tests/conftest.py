"""Shared test settings; helper modules live in tests/reference, exact oracles in tests/oracles."""

import gc
import os
import random
import secrets
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import core, settings

for folder in ("misuse", "oracles", "reference", "../examples/papers"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# For "make test-deep": examples, in hundreds, where a law of "make test" has twelve.
deep_examples = 100 * int(os.environ.get("DEEP_EXAMPLES", "18"))
settings.register_profile("usual", deadline=None, derandomize=False, max_examples=12, database=None)
settings.register_profile("exhaustive", settings.get_profile("usual"), max_examples=100)
settings.register_profile("deep", settings.get_profile("usual"), max_examples=deep_examples)
settings.load_profile("usual")


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also the tests that are marked so, and a hundred examples of each law",
    )
    parser.addoption(
        "--seed",
        type=int,
        help="of everything that tests draw; by default a new one, with CI in the environment 0",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.getoption("exhaustive") and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("exhaustive")
    if config.option.seed is None:  # the processes of xdist have that of the first one
        config.option.seed = 0 if os.environ.get("CI") else secrets.randbits(32)
    config.pluginmanager.register(Draws(config.option.seed))


def pytest_report_header(config):
    return f"seed: {config.option.seed} (--seed {config.option.seed} draws the same)"


def pytest_collection_modifyitems(config, items):
    """Leaves out what is marked exhaustive, unless it is asked for."""
    if config.getoption("exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_collection_finish():
    """What frameworks and tests are made of stays: no collector need look through it again."""
    gc.freeze()


@pytest.fixture(scope="session")
def usual(request):
    """Of two numbers of cases, the first in "make test" and the second in "make test-all"."""
    return lambda few, many: many if request.config.getoption("exhaustive") else few


class Draws:
    """All that a test draws follows from the seed of the session and the name of the test.

    So it does not depend on what else runs, where, and in which order. Secret batches and noise ask
    the operating system for numbers, which a stream stands in for. A fixture of several tests has a
    stream of its own. Programs that a test starts and processes that it forks are left out.

    Args:
        seed: Seed of the session.
    """

    def __init__(self, seed):
        self._seed, self._stream = seed, random.Random(seed)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        asked, own = os.urandom, os.getpid()

        def urandom(size):
            return self._stream.randbytes(size) if os.getpid() == own else asked(size)

        self._test = item.nodeid
        self._begin(self._test)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "urandom", urandom)
            patch.setattr(random, "_urandom", urandom)  # what `secrets` and NumPy's generators read
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        self._begin(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}")
        try:
            return (yield)
        finally:
            self._begin(self._test)

    def _begin(self, name):
        """Draws from here on what follows from a name: of Python, NumPy, torch and TensorFlow."""
        self._stream = stream = random.Random(f"{self._seed} {name}")
        core.global_force_seed = stream.getrandbits(64)
        random.seed(stream.getrandbits(64))
        np.random.seed(stream.getrandbits(32))  # noqa: NPY002
        if torch := sys.modules.get("torch"):
            torch.manual_seed(stream.getrandbits(63))
        if tensorflow := sys.modules.get("tensorflow"):
            tensorflow.random.set_seed(stream.getrandbits(31))
