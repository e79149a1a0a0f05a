"""A selection of Opacus' own tests on our engine; run_opacus_suite.py runs them all."""

import os
import pathlib
import subprocess
import sys

import pytest

RUNNER = pathlib.Path(__file__).parent / "run_opacus_suite.py"
SELECTION = "BatchMemoryManager or GradientAccumulation or SecureMode"


@pytest.mark.slow
def test_selection_of_upstream_tests():
    pytest.importorskip("opacus")
    result = subprocess.run(
        [sys.executable, RUNNER, "-k", SELECTION],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-5000:]
    summary = result.stdout.splitlines()[-1]
    assert int(summary.partition(" passed")[0].split()[-1]) >= 10, summary
