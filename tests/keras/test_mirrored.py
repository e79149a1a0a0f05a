"""A model in a MirroredStrategy trains as on one device; other strategies are refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "reference" / "keras_mirrored.py"
SAME = ("linear", "rows_of_poisson_batches", "dice", "one_record", "resumed")
REFUSED = {
    "written": "The trainable variables were changed outside",
    "within_the_scope": "Expected fit outside of strategy.scope()",
    "compiled": "Expected jit_compile = False in a MirroredStrategy",
    "adam": "Expected plain SGD in a MirroredStrategy, got Adam",
    "blocks": "Expected plain SGD in a MirroredStrategy, got BlockCoordinateUpdate",
    "made_elsewhere": "Expected variables that were made in the scope",
    "one_device": "or a MirroredStrategy, got OneDeviceStrategy",
    "workers": "or a MirroredStrategy, got CollectiveAllReduceStrategy",
}
OPTIMIZERS = [  # which need Keras 2
    f"optimizer_{way}"
    for way in ("constructed_in_scope", "fit_without_callback", "own_loop", "fit")
]


@pytest.fixture(scope="module")
def found():
    """What every case said."""
    pytest.importorskip("tensorflow")
    result = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return dict(line.split(" | ", 1) for line in result.stdout.splitlines() if " | " in line)


def test_every_case_is_known(found):
    assert set(found) == {*SAME, *REFUSED, *OPTIMIZERS, "noise"}


@pytest.mark.parametrize("case", SAME)
def test_it_is_the_run_of_one_device(case, found):
    assert float(found[case]) < 1e-6


def test_noise_is_drawn_once(found):
    """Of two replicas that each draw it, it would be 1.41 times as much."""
    assert float(found["noise"]) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, found):
    assert found[case].startswith("UnsupportedRunError: ")
    assert REFUSED[case] in found[case]


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers_with_noise_are_refused(case, found):
    pytest.importorskip("tensorflow_privacy")
    text = "UnsupportedRunError: Expected no distribution strategy, got MirroredStrategy with 2"
    assert found[case].startswith(text)
    assert "Train outside of strategy.scope()." in found[case]
