"""The examples run as they are, in seconds, and print what they promise."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "promised"),
    [
        ("keras_cyclic.py", ["epoch 2: epsilon if the model were released now"]),
        ("keras_mnist_tutorial.py", ["Test accuracy of the released model"]),
        ("keras_custom_loop.py", ["Test accuracy of the released model", "made by the run itself"]),
    ],
)
def test_example(name, promised, tmp_path):
    pytest.importorskip("tensorflow_privacy")
    pytest.importorskip("sklearn")
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, "--epochs", "2"], capture_output=True, text=True,
        check=False, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-5000:]
    for text in (*promised, "This privacy guarantee protects the release of the final model."):
        assert text in " ".join(result.stdout.split())
    last, every = (
        float(re.search(rf"Epsilon {which}.*: +([\d.]+)", result.stdout)[1])
        for which in ("of the released model", "if all checkpoints")
    )
    assert 0 < last < every
