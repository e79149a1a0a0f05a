"""Gradients row by row with the kernels of TensorFlow that this processor does not choose.

oneDNN is off on a GPU and on some CPUs, and what is differentiated there has other outputs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
from tensorflow.python.util import _pywrap_util_port

pytestmark = pytest.mark.exhaustive  # another import of TensorFlow a test
TESTS = Path(__file__).parents[1]


def with_the_other_kernels(*command):
    """Returns what a program says in a process of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    other = "0" if _pywrap_util_port.IsMklEnabled() else "1"
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300,
        env={**own, "OMP_NUM_THREADS": "1", "TF_ENABLE_ONEDNN_OPTS": other},
    ).stdout  # fmt: skip


def test_rows_on_one_device():
    rows = "test_other_layers_go_row_by_row and (scale or sequence or embedding or convolution)"
    file = TESTS / "keras" / "test_model.py"
    said = with_the_other_kernels("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", rows, file)
    assert "4 passed" in said, said


def test_rows_on_two_replicas():
    """Of normalised features in Poisson batches."""
    case = "rows_of_poisson_batches"
    found = with_the_other_kernels(TESTS / "reference" / "keras_mirrored.py", case)
    assert float(found.removeprefix(f"{case} | ")) < 1e-6
