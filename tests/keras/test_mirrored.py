"""A model in a MirroredStrategy trains as on one device; other strategies are refused by name.

And gradients row by row with the kernels of TensorFlow that this processor does not choose: oneDNN
is off on a GPU and on some CPUs, and what is differentiated there has other outputs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "reference" / "keras_mirrored.py"
SAME = ("head", "rows_of_poisson_batches", "dice", "resumed")
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
OPTIMIZERS = ("optimizer_in_fit", "optimizer_in_own_loop")  # which need Keras 2


@pytest.fixture(scope="module")
def found():
    """What every case said."""
    pytest.importorskip("tensorflow")
    lines = output_of(SCRIPT).splitlines()
    return dict(line.split(" | ", 1) for line in lines if " | " in line)


def output_of(*command, **variables):
    """What a program says in a process of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, timeout=300,
        env={**own, "OMP_NUM_THREADS": "1", **variables},
    ).stdout  # fmt: skip


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


@pytest.mark.exhaustive  # two more imports of TensorFlow
def test_rows_with_the_other_kernels():
    """Of all layers that are differentiated so; of normalised features in Poisson batches."""
    util = pytest.importorskip("tensorflow.python.util._pywrap_util_port")
    other = {"TF_ENABLE_ONEDNN_OPTS": "0" if util.IsMklEnabled() else "1"}
    case = "rows_of_poisson_batches"
    said = output_of(SCRIPT, case, **other)
    assert float(said.removeprefix(f"{case} | ")) < 1e-6
    rows = "test_other_layers_go_row_by_row and (scale or sequence or embedding or convolution)"
    file = Path(__file__).with_name("test_model_gradients.py")
    said = output_of("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", rows, file, **other)
    assert "4 passed" in said, said
