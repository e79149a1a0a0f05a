"""A selection of Opacus' own tests on our engine; run_opacus_suite.py runs them all."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

RUNNER = pathlib.Path(__file__).parent / "run_opacus_suite.py"
SELECTION = "not privacy_engine_test or TiedWeightsHooksTest"


@pytest.mark.exhaustive
def test_selection_of_upstream_tests():
    pytest.importorskip("opacus")
    result = subprocess.run(
        [sys.executable, RUNNER, "-k", SELECTION],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-5000:]
    used = re.search(r"^(\d+) tests passed with a private optimizer", result.stdout, re.MULTILINE)
    assert used, result.stdout[-5000:]
    assert int(used.group(1)) >= 38, used.group()
