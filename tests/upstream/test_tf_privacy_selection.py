"""A selection of TF Privacy's own tests on our optimizers; run_tf_privacy_suite.py has them all."""

import os
import pathlib
import subprocess
import sys

import pytest

RUNNER = pathlib.Path(__file__).parent / "run_tf_privacy_suite.py"
SELECTION = ["TensorLoss", "ClippingNorm", "NoiseMultiplier", "LargeBatch", "NoCallOf"]


@pytest.mark.exhaustive
def test_selection_of_upstream_tests():
    pytest.importorskip("tensorflow_privacy")
    result = subprocess.run(
        [sys.executable, RUNNER, *SELECTION],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    for line in (
        "CyclicDPKerasSGDOptimizer: 16 cases apply, 11 do not and fail as they must",
        "DiceKerasSGDOptimizer without microbatches: 4 cases apply, 0 do not",
        "DiceKerasAdamOptimizer: 3 cases apply, 2 do not and fail as they must",
    ):
        assert line in result.stdout
